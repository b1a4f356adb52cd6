// The text under one head, or under two side by side, each of them alone or averaged with others.

import { accent } from "./colour.js";
import { el, labelled, percent, segmented, style } from "./base.js";
import { L, attention, heads, hidden, mean, nameOf, at, place, tokens } from "./data.js";
import { picker } from "./picker.js";
import { state } from "./state.js";
import { quoted } from "./tokens.js";
import { Words } from "./words.js";

export const title = "Text";
export const wanted = attention !== null;

let views, chosen, incoming, mass, compare, more, massText, frame;

export function build(panel) {
  chosen = null;
  incoming = false;
  const ways = { out: "looks at", in: "is looked at by" };
  const way = segmented("Direction", ways, "out", (name) => {
    incoming = name === "in";
    render();
  });
  mass = el("input", { type: "range", min: 10, max: 100, step: 5, value: 90, oninput: render });
  massText = el("output", {});
  more = adder("Average with", (index) => {
    views[0].extra.push(at(index));
    load();
  });
  compare = adder("Compare with", (index) => {
    views[1].extra.push(at(index));
    load();
  });
  views = [new Side(0), new Side(1)];
  frame = el("div", { class: "sides" }, ...views.map((view) => view.element));
  panel.append(
    el("h2", { text: "The text" }),
    el("p", {
      class: "lead",
      text: "Click a word: what it looks at is tinted, and lines lead there. Click it again to let go.",
    }),
    picker(),
    el(
      "div",
      { class: "bar-of-controls" },
      el("span", { class: "control" }, el("span", { text: "The word" }), way.group),
      labelled("Largest links until", mass),
      massText,
      more,
      compare,
    ),
    frame,
  );
}

export function enter() {
  return load();
}

/** A list of heads, of which one can be added. */
function adder(name, add) {
  const options = Array.from({ length: heads }, (_, index) =>
    el("option", { value: index, text: nameOf(index) }),
  );
  const list = el(
    "select",
    {
      onchange: () => {
        add(Number(list.value));
        list.selectedIndex = 0;
      },
    },
    el("option", { value: "", text: "…" }),
    ...options,
  );
  return labelled(name, list);
}

/** One side: the text, and the heads whose mean it shows. */
class Side {
  constructor(number) {
    this.number = number;
    this.extra = [];
    this.words = new Words("The text; choose a word to see its links", {
      choose: (i) => {
        chosen = chosen === i ? null : i;
        render();
      },
    });
    this.chips = el("div", { class: "chips" });
    this.said = el("p", { class: "said", role: "status" });
    this.element = el("section", { class: "side" }, this.chips, this.words.element, this.said);
  }

  heads() {
    const own = this.number ? [] : [[state.layer, state.head]];
    const all = [...own, ...this.extra].map(([layer, head]) => place(layer, head));
    return [...new Set(all)].map(at);
  }

  async load() {
    const shown = this.heads();
    this.element.hidden = shown.length === 0;
    if (!shown.length) return;
    style(this.element, { "--accent": accent(this.number ? 1 : 0) });
    this.chips.replaceChildren(
      el("strong", { text: shown.length > 1 ? "Mean of heads" : "Head" }),
      ...shown.map(([layer, head]) => this.chip(layer, head)),
    );
    this.element.dataset.heads = shown.map((pair) => pair.join(".")).join(" ");
    this.map = await mean(shown);
  }

  chip(layer, head) {
    const name = `${layer}.${head}`;
    const added = this.extra.some(([l, h]) => l === layer && h === head);
    if (!added) return el("span", { class: "chip", text: name });
    return el("button", {
      type: "button",
      class: "chip",
      text: `${name} ×`,
      "aria-label": `Remove head ${name}`,
      onclick: () => {
        this.extra = this.extra.filter(([l, h]) => l !== layer || h !== head);
        load();
      },
    });
  }

  render() {
    if (!this.map || this.element.hidden) return;
    this.words.mark(chosen);
    if (chosen === null) return this.all();
    const links = largest(this.map, chosen);
    const strengths = new Float32Array(L);
    for (const [n, w] of links) strengths[n] = w;
    const told = [];
    for (const [n, w] of links) told[n] = percent(w);
    this.words.tint(strengths, told);
    const ends = (n) => (incoming ? [n, chosen] : [chosen, n]);
    this.words.join(links.filter(([n]) => n !== chosen).map(([n, w]) => [...ends(n), w]));
    const names = links.slice(0, 5).map(([n, w]) => `${quoted(tokens[n])} ${percent(w)}`);
    const rest = links.length > 5 ? `, and ${links.length - 5} more` : "";
    this.said.textContent =
      `${quoted(tokens[chosen])} ${incoming ? "is looked at by" : "looks at"}: ` +
      `${names.join(", ") || "nothing that this file keeps"}${rest}.`;
  }

  /** No word is chosen: how much each is looked at. */
  all() {
    const received = new Float32Array(L);
    for (let i = 0; i < L; i++) for (let j = 0; j < L; j++) received[j] += this.map[i * L + j];
    const most = Math.max(1e-9, ...received.filter((_, j) => !hidden[j]));
    this.words.tint(received.map((value) => Math.min(1, value / most)));
    this.words.join([]);
    this.said.textContent = "Tint: how much each word is looked at by all others together.";
  }
}

/** The largest links of a word that together reach the chosen share of its mass: [token, weight]. */
function largest(map, word) {
  const links = [];
  let total = 0;
  for (let n = 0; n < L; n++) {
    const w = incoming ? map[n * L + word] : map[word * L + n];
    if (w > 0) links.push([n, w]);
    total += w;
  }
  links.sort((a, b) => b[1] - a[1] || a[0] - b[0]);
  // A row sums to 1, whatever part of it the file keeps.
  const part = Number(mass.value) / 100;
  const goal = part < 1 ? part * (incoming ? total : 1) - 1e-4 : Infinity;
  let sum = 0;
  let kept = 0;
  while (kept < links.length && sum < goal) sum += links[kept++][1];
  return links.slice(0, kept);
}

async function load() {
  await Promise.all(views.map((view) => view.load()));
  frame.dataset.sides = views.filter((view) => !view.element.hidden).length;
  render();
}

function render() {
  massText.textContent = `${mass.value} % of the mass`;
  for (const view of views) view.render();
}
