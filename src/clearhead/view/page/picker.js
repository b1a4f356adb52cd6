// Which head: two lists and two arrows each, the same on every panel that shows one head.

import { accent } from "./colour.js";
import { el, labelled, share, style } from "./base.js";
import { attention, headsOf, layers, rolesOf } from "./data.js";
import { follow, go, state } from "./state.js";

/** The choice of the head that the page is about. */
export function picker() {
  const layer = select(layers, (value) => go({ layer: value }));
  const head = select(Math.max(...attention.heads), (value) => go({ head: value }));
  const badges = el("span", { class: "badges" });
  const element = el(
    "div",
    { class: "picker" },
    which("Layer", layer, (by) => go({ layer: state.layer + by })),
    which("Head", head, (by) => go({ head: state.head + by })),
    badges,
  );
  follow(() => {
    layer.value = state.layer;
    for (const [n, option] of [...head.options].entries()) {
      option.disabled = option.hidden = n >= headsOf(state.layer);
    }
    head.value = state.head;
    style(element, { "--accent": accent(state.head) });
    badges.replaceChildren(...rolesOf(state.layer, state.head).map(badge));
  });
  return element;
}

export function badge(row) {
  return el("span", {
    class: "badge",
    text: `${row.role} ${share(row.score)}`,
    style: { "--accent": accent(row.colour) },
  });
}

function select(count, choose) {
  const options = Array.from({ length: count }, (_, n) => el("option", { value: n, text: n }));
  return el("select", { onchange: (event) => choose(Number(event.target.value)) }, ...options);
}

function which(name, list, move) {
  const before = step(`${name} before`, "−", () => move(-1));
  const next = step(`Next ${name.toLowerCase()}`, "+", () => move(1));
  return el("span", { class: "which" }, labelled(name, list), before, next);
}

function step(name, text, move) {
  return el("button", { type: "button", class: "step", "aria-label": name, text, onclick: move });
}
