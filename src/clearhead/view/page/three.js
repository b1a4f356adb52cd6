// Three heads of one model on one text: the short answer to why there are several.

import { accent, onTheme } from "./colour.js";
import { byId, el, percent, share, style } from "./base.js";
import { facts, heads, hidden, L, layers, tokens, weights } from "./data.js";
import { go } from "./state.js";
import { quoted } from "./tokens.js";
import { Words } from "./words.js";

const WEAK = 0.3; // weaker links are not drawn before a word is pointed at
const MANY = 60; // tokens; in a longer text only SHOWN links are drawn then
const SHOWN = 10;

export const title = "Three heads";
export const wanted = facts.three.length > 0;

let words, cards, said, proof, shown, map, pinned;

export function build(panel) {
  const many = facts.three.length;
  cards = facts.three.map((three, n) =>
    el(
      "button",
      {
        type: "button",
        class: "card",
        "aria-pressed": "false",
        style: { "--accent": accent(n) },
        onclick: () => show(n),
      },
      el("strong", { text: three.title }),
      el("span", { text: `head ${three.layer}.${three.head}` }),
    ),
  );
  words = new Words("The text; point at a word to see what it looks at", {
    point: (i) => point(i ?? pinned),
    choose: (i) => point((pinned = pinned === i ? null : i)),
  });
  said = el("p", { class: "said", role: "status" });
  proof = el("div", { class: "proof" });
  panel.append(
    el("h2", { text: `Why several heads? ${["", "One", "Two", "Three"][many]} of ${heads}` }),
    el("p", {
      class: "lead",
      text:
        "For every word, an attention head decides which words to take information from. One head " +
        `can follow one habit at a time, so this model runs ${heads} of them, in ${layers} layers. ` +
        "Here is what a few of them do with the same text. Point at a word.",
    }),
    el("div", { class: "cards", role: "group", "aria-label": "Which head" }, ...cards),
    el("div", { class: "stage" }, words.element, said),
    proof,
  );
  onTheme(() => words.redraw());
  show(0);
}

export function enter() {
  words.redraw();
}

async function show(n) {
  const three = facts.three[n];
  shown = n;
  pinned = null;
  cards.forEach((card, m) => card.setAttribute("aria-pressed", String(m === n)));
  style(byId("panel-three"), { "--accent": accent(n) });
  proof.replaceChildren(...evidence(three));
  const found = await weights(three.layer, three.head);
  if (shown !== n) return;
  map = found;
  point(null);
}

/** The links of a word, the strongest first: [key, weight]. */
function links(i) {
  const found = [];
  for (let j = 0; j < L; j++) if (map[i * L + j] > 0) found.push([j, map[i * L + j]]);
  return found.sort((a, b) => b[1] - a[1]);
}

function point(i) {
  if (!map) return;
  words.mark(i, pinned);
  if (i === null || i === undefined) overview();
  else one(i);
}

/** Nobody points anywhere: the strongest link of each word, where it is strong. */
function overview() {
  const best = [];
  for (let i = 0; i < L; i++) {
    const [link] = links(i).filter(([j]) => !hidden[j] && j !== i);
    if (link && link[1] >= WEAK) best.push([i, ...link]);
  }
  const strengths = new Float32Array(L);
  for (const [, j, w] of best) strengths[j] = Math.max(strengths[j], w);
  words.tint(strengths);
  words.join(best);
  // Of a long text only what tells most: all arcs together would hide the words.
  if (L > MANY) {
    best.sort((a, b) => telling(b) - telling(a));
    words.join(best.slice(0, SHOWN));
  }
  const [i, j, w] = best.reduce((a, b) => (telling(b) > telling(a) ? b : a), best[0] ?? []);
  said.textContent =
    i === undefined
      ? "In this text the head leaves almost everything on the first word: it finds nothing of its kind."
      : `${quoted(tokens[i])} gives ${quoted(tokens[j])} ${percent(w)} of its attention. ` +
        (L > MANY
          ? "Drawn: the links that tell most of what it does."
          : "Drawn: the strongest link of each word, if it is over 30 %.");
}

/** A link tells more where its head is made for that word, or else where it goes far. */
function telling([i, j, w]) {
  const three = facts.three[shown];
  return w + (three.focus?.includes(i) ? 2 : 0) + (Math.abs(i - j) > 1 ? 0.1 : 0);
}

function one(i) {
  const found = links(i);
  const strengths = new Float32Array(L);
  for (const [j, w] of found) strengths[j] = w;
  words.tint(strengths);
  words.join(found.filter(([j, w]) => !hidden[j] && w >= 0.01).map(([j, w]) => [i, j, w]));
  const open = found.filter(([j]) => !hidden[j]).slice(0, 3);
  const aside = found.filter(([j]) => hidden[j]).reduce((sum, [, w]) => sum + w, 0);
  const told = open.map(([j, w]) => `${j === i ? "itself" : quoted(tokens[j])} ${percent(w)}`);
  const rest = aside ? [`${percent(aside)} is parked on the first word, where it says little`] : [];
  said.textContent = `${quoted(tokens[i])} looks at: ${[...told, ...rest].join(", ") || "nothing"}.`;
}

function evidence(three) {
  const bars = three.bars.map(({ name, value }, n) =>
    el(
      "li",
      {},
      el("span", { class: "name", text: name }),
      el(
        "span",
        { class: "track", "aria-hidden": true },
        el("span", { class: n ? "bar plain" : "bar", style: { width: `${100 * value}%` } }),
      ),
      el("span", { class: "figure", text: share(value) }),
    ),
  );
  const parts = [
    ["What it does", three.does],
    ["What speaks for it", three.evidence],
    ["Where it fails", three.fails],
  ];
  return [
    ...parts
      .filter(([, text]) => text)
      .map(([name, text], n) =>
        el(
          "div",
          { class: "part" },
          el("h3", { text: name }),
          el("p", { text }),
          n === 1 && bars.length ? el("ul", { class: "bars" }, ...bars) : null,
        ),
      ),
    el("button", {
      type: "button",
      class: "more",
      text: `See all of head ${three.layer}.${three.head}`,
      onclick: () => go({ panel: "head", layer: three.layer, head: three.head }),
    }),
  ];
}
