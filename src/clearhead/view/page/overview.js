// All heads at once: a thumbnail each, or one number each.

import { BENDS, accent, onShade, onTheme, pixels, shade } from "./colour.js";
import { byId, el, moved, segmented, share, style } from "./base.js";
import { at, attention, facts, heads, nameOf, rolesOf, thumbnails } from "./data.js";
import { go, state } from "./state.js";

/** name: [what it is called, what it tells, whether it is a share of 1]. */
export const STATISTICS = {
  entropy: ["Spread", "how widely a head spreads its attention: 0 on one token, 1 on all alike", true],
  sink: ["Sink", "the share left on the first token or on added ones, where it says little", true],
  previous: ["Previous", "the share given to the token before", true],
  self: ["Itself", "the share given to the token itself", true],
  distance: ["Distance", "how many tokens away the attention lies, on average", false],
  max_logit: ["Largest score", "the largest score before softmax", false],
};

export const title = "Overview";
export const wanted = attention !== null;

let grid, legend, cells, shownAs, sorted, told;

export function build(panel) {
  const known = Object.keys(STATISTICS).filter((name) => name in attention.statistics);
  const choices = { thumbnails: "Thumbnails" };
  for (const name of known) choices[name] = STATISTICS[name][0];
  if (facts.roles.length) choices.role = "Role";
  shownAs = "thumbnails";
  sorted = "layer";
  const views = segmented("What each cell shows", choices, shownAs, (name) => {
    shownAs = name;
    if (sorted === "value") arrange();
    draw();
  });
  const by = { layer: "By layer", value: "By value" };
  const order = segmented("Order", by, sorted, (name) => {
    sorted = name;
    arrange();
  });
  grid = el("div", { class: "grid" });
  told = el("p", { class: "note", role: "status" });
  legend = el("ul", { class: "legend", "aria-label": "Roles" });
  cells = Array.from({ length: heads }, (_, index) => cell(index));
  panel.append(
    el("h2", { text: "All heads at a glance" }),
    el("p", {
      class: "lead",
      text:
        "One square for each head. Down a square go the words that look, across it the words they " +
        "look at; a diagonal is a habit of looking nearby, a strong left edge a head at rest on the " +
        "first word. Choose a square to open its head.",
    }),
    el("div", { class: "bar-of-controls" }, views.group, order.group),
    told,
    grid,
    legend,
  );
  legend.append(...roleLegend());
  arrange();
  onTheme(draw);
}

export function enter() {
  draw();
  for (const [index, { button }] of cells.entries()) {
    const [layer, head] = at(index);
    const here = layer === state.layer && head === state.head;
    button.tabIndex = here ? 0 : -1;
    button.toggleAttribute("data-here", here);
  }
}

function cell(index) {
  const [layer, head] = at(index);
  const T = attention.thumbnail.size;
  const canvas = el("canvas", { width: T, height: T, "aria-hidden": true });
  const figure = el("span", { class: "figure" });
  const badge = rolesOf(layer, head)[0];
  const button = el(
    "button",
    {
      type: "button",
      class: "cell",
      tabindex: -1,
      "data-head": nameOf(index),
      onclick: () => go({ panel: "head", layer, head }),
      onkeydown: (event) => key(event, button),
    },
    canvas,
    figure,
    el("span", { class: "name", text: nameOf(index), "aria-hidden": true }),
    badge ? el("span", { class: "dot", style: { "--accent": accent(badge.colour) } }) : null,
  );
  return { button, canvas, figure, badge };
}

function key(event, button) {
  const shown = [...grid.querySelectorAll(".cell")];
  const across = shown.findIndex((other) => other.offsetTop > shown[0].offsetTop);
  const to = moved(event, shown.indexOf(button), shown.length, Math.max(1, across));
  if (to === null) return;
  button.tabIndex = -1;
  shown[to].tabIndex = 0;
  shown[to].focus();
}

/** Put the cells into rows of a layer each, or into one flow from the largest value down. */
function arrange() {
  const indices = cells.map((_, index) => index);
  grid.classList.toggle("flat", sorted === "value");
  const widest = Math.max(...attention.heads);
  style(grid, { "--heads": widest });
  if (sorted === "value") {
    indices.sort((a, b) => rank(b) - rank(a) || a - b);
    grid.replaceChildren(...indices.map((index) => cells[index].button));
    return;
  }
  let index = 0;
  const rows = attention.heads.map((count, layer) => {
    const own = indices.slice(index, (index += count)).map((n) => cells[n].button);
    const name = el("span", { class: "layer", text: layer, "aria-hidden": true });
    return el("div", { class: "row", role: "group", "aria-label": `Layer ${layer}` }, name, ...own);
  });
  grid.replaceChildren(...rows);
}

/** What "By value" sorts by: thumbnails by how little rests on the sink. */
function rank(index) {
  if (shownAs === "thumbnails") return -(attention.statistics.sink?.[index] ?? 0);
  if (shownAs === "role") return cells[index].badge ? cells[index].badge.score : -1;
  return attention.statistics[shownAs][index] ?? -Infinity;
}

async function draw() {
  grid.dataset.shown = shownAs;
  if (shownAs === "thumbnails") {
    told.textContent =
      "Shade: share of attention, on a cube-root scale." +
      (sorted === "value" ? " Heads that rest least come first." : "");
    cells.forEach(({ button }, index) => name(button, index, ""));
    paint(await thumbnails());
  } else if (shownAs === "role") {
    told.textContent = "A head's best role, where one was measured and beats its baseline.";
    cells.forEach(({ button, figure, badge }, index) => {
      figure.textContent = badge ? badge.short : "";
      style(button, { "--fill": badge ? accent(badge.colour) : "transparent", "--ink": "#fff" });
      name(button, index, badge ? `, ${badge.role} ${share(badge.score)}` : ", no role");
    });
  } else {
    numbers();
  }
}

function numbers() {
  const values = attention.statistics[shownAs];
  const [, what, shares] = STATISTICS[shownAs];
  const known = values.filter((value) => value !== null);
  const most = shares ? 1 : Math.max(...known);
  const least = shares ? 0 : Math.min(0, ...known);
  const mean = known.reduce((sum, value) => sum + value, 0) / Math.max(1, known.length);
  const say = (value) => (shares ? share(value) : value.toFixed(most < 10 ? 1 : 0));
  told.textContent = `In each cell: ${what}. Mean over all heads: ${say(mean)}.`;
  cells.forEach(({ button, figure }, index) => {
    const value = values[index];
    const part = value === null ? 0 : (value - least) / (most - least || 1);
    figure.textContent = value === null ? "" : say(value);
    style(button, { "--fill": shade(part), "--ink": onShade(part) });
    name(button, index, value === null ? "" : `, ${what.split(":")[0]}: ${say(value)}`);
  });
}

function name(button, index, more) {
  const [layer, head] = at(index);
  button.setAttribute("aria-label", `Layer ${layer}, head ${head}${more}`);
}

function paint(all) {
  const T = attention.thumbnail.size;
  const colours = pixels();
  cells.forEach(({ canvas }, index) => {
    const pen = canvas.getContext("2d");
    const image = pen.createImageData(T, T);
    const dots = new Uint32Array(image.data.buffer);
    for (let n = 0; n < T * T; n++) {
      dots[n] = colours[Math.round(255 * BENDS.cube(all[index * T * T + n]))];
    }
    pen.putImageData(image, 0, 0);
  });
  performance.mark("overview painted");
  byId("panel-overview").dataset.painted = "yes";
}

/** One line for each role, with the head that plays it best. */
function roleLegend() {
  const best = new Map();
  for (const row of facts.roles) if (!best.has(row.role)) best.set(row.role, row);
  return [...best.values()].map((row) =>
    el(
      "li",
      {},
      el("span", { class: "badge", text: row.short, style: { "--accent": accent(row.colour) } }),
      el("span", { text: row.role }),
      el("button", {
        type: "button",
        class: "link",
        text: `${row.layer}.${row.head}`,
        "aria-label": `${row.role}: open head ${row.layer}.${row.head}`,
        onclick: () => go({ panel: "head", layer: row.layer, head: row.head }),
      }),
    ),
  );
}
