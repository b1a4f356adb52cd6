// One head: who looks at whom, in full.

import { el, labelled, percent, segmented, share } from "./base.js";
import { BENDS, onTheme, pixels } from "./colour.js";
import { L, attention, hidden, place, tokens, weights, withoutSink } from "./data.js";
import { HeatMap } from "./heatmap.js";
import { STATISTICS } from "./overview.js";
import { picker } from "./picker.js";
import { state } from "./state.js";
import { quoted } from "./tokens.js";

export const title = "Head";
export const wanted = attention !== null;

let map, view, bend, hides, readout, facts, note, key;

export function build(panel) {
  bend = "root";
  view = new HeatMap("Attention from each word, down, to each word, across. Arrow keys move", {
    point: tell,
  });
  const scales = { linear: "Linear", root: "Square root", log: "Logarithm" };
  const scale = segmented("Scale of colours", scales, bend, (name) => {
    bend = name;
    render();
  });
  hides = el("input", { type: "checkbox", onchange: render });
  readout = el("p", { class: "readout", role: "status" });
  facts = el("dl", { class: "facts" });
  note = el("p", { class: "note" });
  key = el("canvas", { class: "key", width: 256, height: 1, "aria-hidden": true });
  const zooms = el(
    "span",
    { class: "segmented", role: "group", "aria-label": "Zoom" },
    button("Zoom in", "+", () => view.zoom(1.5)),
    button("Zoom out", "−", () => view.zoom(1 / 1.5)),
    button("Show all", "All", () => view.reset()),
  );
  panel.append(
    el("h2", { text: "One head" }),
    picker(),
    el(
      "div",
      { class: "bar-of-controls" },
      scale.group,
      labelled("Hide the sink", hides, { class: "control check" }),
      zooms,
    ),
    el(
      "div",
      { class: "beside" },
      el("div", { class: "plot" }, view.canvas),
      el(
        "div",
        { class: "aside" },
        readout,
        el(
          "div",
          { class: "scale" },
          el("span", { text: "0", "aria-hidden": true }),
          key,
          el("span", { text: "1", "aria-hidden": true }),
        ),
        facts,
        note,
      ),
    ),
  );
  onTheme(() => {
    if (map) render();
  });
}

export async function enter() {
  const { layer, head } = state;
  const began = performance.now();
  const found = await weights(layer, head);
  if (state.layer !== layer || state.head !== head) return;
  map = found;
  describe();
  render();
  view.canvas.dataset.shown = `${layer}.${head}`;
  performance.measure("head shown", { start: began });
}

function button(name, text, press) {
  return el("button", { type: "button", "aria-label": name, text, onclick: press });
}

function shown() {
  return hides.checked ? withoutSink(map) : map;
}

function render() {
  if (!map) return;
  view.show(shown(), bend, hides.checked);
  view.paint();
  const pen = key.getContext("2d");
  const image = pen.createImageData(256, 1);
  const dots = new Uint32Array(image.data.buffer);
  const bent = BENDS[bend];
  for (let n = 0; n < 256; n++) dots[n] = pixels()[Math.round(255 * bent(n / 255))];
  pen.putImageData(image, 0, 0);
  tell(...(view.cross ?? [null]));
  const sink = attention.statistics.sink?.[place(state.layer, state.head)];
  const kept = attention.kept[place(state.layer, state.head)];
  const parts = [];
  if (hides.checked) {
    parts.push(
      `Left out: ${what()}, ${percent(sink ?? 0)} of the attention on average. Each row is scaled ` +
        "up to what it was before.",
    );
  }
  if (attention.maps.kind === "top") {
    parts.push(
      `This file keeps each word's ${attention.maps.top} strongest links, here ${percent(kept)} of ` +
        "the attention; the rest is drawn as 0. Written with --full maps it keeps all.",
    );
  }
  note.textContent = parts.join(" ");
}

function what() {
  return hidden.filter(Boolean).length > 1 ? "the first and the added tokens" : "the first token";
}

function tell(i, j) {
  if (!map) return;
  if (i === null || i === undefined || i >= L || j >= L) {
    readout.replaceChildren(
      el("span", { class: "quiet", text: "Point at the map, or move through it with the arrow keys." }),
    );
    return;
  }
  const weight = shown()[i * L + j];
  const future = attention.causal && j > i;
  const none = attention.maps.kind === "top" && weight === 0;
  readout.replaceChildren(
    el("strong", { text: quoted(tokens[i]) }),
    ` → `,
    el("strong", { text: quoted(tokens[j]) }),
    el("span", {
      class: "figure",
      text: future ? "not to be seen" : none ? "not kept" : precise(weight),
    }),
    el("span", { class: "quiet", text: `token ${i} to token ${j}` }),
  );
}

/** As many digits as the file holds. */
function precise(weight) {
  return weight === 0 ? "0" : weight.toPrecision(attention.maps.bytes === 2 ? 4 : 2);
}

function describe() {
  const index = place(state.layer, state.head);
  const rows = Object.entries(STATISTICS).flatMap(([name, [called, what, shares]]) => {
    const value = attention.statistics[name]?.[index];
    if (value === undefined || value === null) return [];
    return [
      el("dt", { text: called, title: what }),
      el("dd", { "data-statistic": name, text: shares ? share(value) : value.toFixed(1) }),
    ];
  });
  facts.replaceChildren(...rows);
}
