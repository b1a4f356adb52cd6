// Puts the page together: panels and their tabs, the theme, the keys.

import { setTheme, theme } from "./colour.js";
import { byId, el, moved } from "./base.js";
import { attention, facts } from "./data.js";
import { follow, go, panels, read, state } from "./state.js";
import * as three from "./three.js";
import * as overview from "./overview.js";
import * as head from "./head.js";
import * as text from "./text.js";
import * as steps from "./steps.js";
import * as roles from "./roles.js";

for (const [name, panel] of Object.entries({ three, overview, head, text, steps, roles })) {
  if (panel.wanted) panels[name] = panel;
}

const names = Object.keys(panels);
const tabs = names.map((name, n) =>
  el("button", {
    type: "button",
    role: "tab",
    id: `tab-${name}`,
    "aria-controls": `panel-${name}`,
    text: panels[name].title,
    onclick: () => go({ panel: name }),
    onkeydown: (event) => {
      const to = event.key.startsWith("Arrow") ? moved(event, n, names.length) : null;
      if (to === null) return;
      go({ panel: names[to] });
      tabs[to].focus();
    },
  }),
);
const frames = names.map((name) =>
  el("section", {
    role: "tabpanel",
    id: `panel-${name}`,
    "aria-labelledby": `tab-${name}`,
    class: "panel",
    hidden: true,
  }),
);

const themer = el("button", {
  type: "button",
  class: "theme",
  onclick: () => {
    setTheme(theme() === "dark" ? "light" : "dark");
    nameTheme();
  },
});

function nameTheme() {
  themer.textContent = theme() === "dark" ? "Light" : "Dark";
  themer.setAttribute("aria-label", `Switch to ${theme() === "dark" ? "light" : "dark"} colours`);
}

byId("masthead").append(
  el("h1", {}, el("span", { class: "name", text: "clearhead" }), el("span", { text: facts.title })),
  el("p", { class: "about", text: facts.about }),
  themer,
);
byId("tabs").append(...tabs);
byId("panels").replaceChildren(...frames);
document.title = `${facts.title}: clearhead`;
nameTheme();

const built = new Set();
follow(({ panel }) => {
  names.forEach((name, n) => {
    const here = name === panel;
    tabs[n].setAttribute("aria-selected", String(here));
    tabs[n].tabIndex = here ? 0 : -1;
    frames[n].hidden = !here;
    if (!here) return;
    // A panel is made when it is first looked at, so that the first one comes at once.
    if (!built.has(name)) panels[name].build(frames[n]);
    built.add(name);
    panels[name].enter();
    const bar = byId("tabs");
    bar.scrollLeft = tabs[n].offsetLeft - bar.clientWidth / 2 + tabs[n].offsetWidth / 2;
  });
});

const STEPS = { ArrowLeft: ["head", -1], ArrowRight: ["head", 1], ArrowUp: ["layer", -1], ArrowDown: ["layer", 1] };

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.target.closest("input, select, textarea, [role=tab]")) return;
  const tab = Number(event.key) - 1;
  if (tab in names) go({ panel: names[tab] });
  else if (event.key in STEPS && state.panel === "steps") {
    const [what, by] = STEPS[event.key];
    if (what !== "head") return;
    steps.turn(by);
  } else if (event.key in STEPS && attention && ["head", "text"].includes(state.panel)) {
    const [what, by] = STEPS[event.key];
    go({ [what]: state[what] + by });
  } else return;
  event.preventDefault();
});

window.addEventListener("hashchange", read);
read();
performance.mark("page ready");
