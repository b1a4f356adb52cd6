// The walkthrough: one step of attention at a time, its numbers, and what made each of them.

import { accent, onTheme } from "./colour.js";
import { el, moved, segmented } from "./base.js";
import { facts } from "./data.js";
import { Matrix } from "./matrix.js";
import { formula, origin } from "./origin.js";
import { label } from "./tokens.js";

const ROOM = 2; // so many heads stand beside each other; of more, one is shown at a time

export const title = "Steps";
export const wanted = facts.steps.length > 0;

let list, stage, lead, current, head, buttons, tour, steps, parameters;
const find = (name) => steps.find((step) => step.name === name);
const headName = (h) => `head ${tour.heads[h] ?? h + 1}`;

/** JSON knows no infinity: those numbers came as words. */
function withNumbers(step) {
  return { ...step, values: numbers(step.values) };
}

function numbers(values) {
  return Array.isArray(values) ? values.map(numbers) : Number(values);
}

export function build(panel) {
  list = el("ol", { class: "stepper" });
  stage = el("div", { class: "step-stage" });
  lead = el("p", { class: "lead" });
  const names = Object.fromEntries(facts.steps.map(({ name }, n) => [n, name]));
  const several = facts.steps.length > 1;
  panel.append(
    el("h2", { text: "Attention, step by step" }),
    several ? segmented("Which example", names, "0", (n) => begin(Number(n))).group : "",
    lead,
    el("div", { class: "steps" }, el("nav", { "aria-label": "Steps" }, list), stage),
  );
  begin(0);
  onTheme(() => show(current));
}

/** Take up one of the examples, at its first step. */
function begin(n) {
  tour = facts.steps[n];
  steps = tour.steps.map(withNumbers);
  const learned = Object.entries(tour.parameters);
  parameters = Object.fromEntries(learned.map(([name, values]) => [name, numbers(values)]));
  lead.textContent = tour.about;
  head = 0;
  buttons = steps.map((step, n) =>
    el(
      "button",
      {
        type: "button",
        tabindex: n ? -1 : 0,
        onclick: () => show(n),
        onkeydown: (event) => {
          const to = moved(event, n, steps.length);
          if (to === null) return;
          show(to);
          buttons[to].focus();
        },
      },
      el("span", { class: "count", text: n + 1, "aria-hidden": true }),
      el("span", { text: step.title }),
    ),
  );
  list.replaceChildren(...buttons.map((button) => el("li", {}, button)));
  show(0);
}

export function enter() {}

/** Go to the step before or after: for the arrow keys. */
export function turn(by) {
  show(Math.min(steps.length - 1, Math.max(0, current + by)));
}

function show(n) {
  current = n;
  const step = steps[n];
  buttons.forEach((button, m) => {
    if (m === n) button.setAttribute("aria-current", "step");
    else button.removeAttribute("aria-current");
    button.tabIndex = m === n ? 0 : -1;
  });
  const bar = list.parentElement;
  bar.scrollLeft = buttons[n].offsetLeft - bar.clientWidth / 2 + buttons[n].offsetWidth / 2;
  const count = step.per_head ? step.values.length : 1;
  head = Math.min(head, count - 1);
  const shown = count > ROOM ? [head] : [...Array(count).keys()];
  const said = el("p", { class: "said arithmetic", role: "status" });
  said.textContent = hint(step);
  const kinds = step.axes.map((axis, k) => `${step.shape[k]} ${axis}`).join(" × ") || "one number";
  stage.dataset.step = step.name;
  stage.replaceChildren(
    el(
      "header",
      {},
      el("h3", { text: `${n + 1}. ${step.title}` }),
      el("p", { text: step.explanation }),
      el(
        "dl",
        { class: "what" },
        ...term("Formula", formula(step)),
        ...term("Shape", kinds),
        el("dt", { text: "Code" }),
        el("dd", {}, el("pre", {}, el("code", { text: step.code }))),
      ),
    ),
    count > ROOM ? chooser(count, n) : "",
    el("div", { class: "blocks" }, ...shown.map((h) => block(step, h, said))),
    said,
    el(
      "div",
      { class: "turn" },
      turner("← Before", -1, n === 0),
      turner("Next →", 1, n === steps.length - 1),
    ),
  );
}

function hint(step) {
  if (step.shape.length === 0) return "";
  return origin(step, 0, find, parameters)
    ? "Point at a number of the result: what made it lights up, and the arithmetic stands here."
    : "These numbers are where it begins.";
}

function term(name, text) {
  return text ? [el("dt", { text: name }), el("dd", { text })] : [];
}

function turner(text, by, ends) {
  return el("button", { type: "button", text, disabled: ends, onclick: () => turn(by) });
}

function chooser(count, n) {
  const chips = Array.from({ length: count }, (_, h) =>
    el("button", {
      type: "button",
      class: "chip",
      text: headName(h),
      "aria-pressed": String(h === head),
      style: { "--accent": accent(h) },
      onclick: () => {
        head = h;
        show(n);
      },
    }),
  );
  return el("div", { class: "chips", role: "group", "aria-label": "Head" }, ...chips);
}

/** One head of a step: what went in, and what came out. */
function block(step, h, said) {
  const frame = el("section", {
    class: "block",
    "data-head": step.per_head ? h + 1 : null,
    style: step.per_head ? { "--accent": accent(h) } : null,
  });
  if (step.per_head) frame.append(el("h4", { text: headName(h) }));
  if (!step.shape.length) {
    frame.append(el("p", { class: "scalar", text: step.values.toExponential(1) }));
    return frame;
  }
  const from = origin(step, h, find, parameters);
  const inputs = (from?.inputs ?? []).map((input) => new Matrix(looks(input)));
  const result = new Matrix({
    ...looks({ name: step.name, step, values: step.per_head ? step.values[h] : step.values }),
    on: {
      point(i, c) {
        const nothing = i === null || i === undefined || !from;
        const lit = nothing ? [] : from.lit(i, c);
        inputs.forEach((matrix, n) => matrix.light(...(lit[n] ?? [])));
        result.light(...(nothing ? [] : [i, c]));
        said.textContent = nothing ? hint(step) : `${cellName(step, i, c)}${from.say(i, c)}`;
      },
    },
  });
  const row = el("div", { class: "equation" });
  inputs.forEach((matrix, n) => row.append(part(n ? from.signs[n - 1] : "", matrix)));
  row.append(part(inputs.length ? from.signs.at(-1) : "", result));
  frame.append(row);
  return frame;
}

/** A matrix with the sign before it, which stay together when the line is broken. */
function part(sign, matrix) {
  const before = sign ? el("span", { class: "sign", text: sign, "aria-hidden": true }) : "";
  return el("div", { class: "part" }, before, matrix.element);
}

function cellName(step, i, c) {
  const [row, column] = [names(step, -2), names(step, -1)];
  const end = step.axes.at(-1) === "features" ? `feature ${Number(column[c])}` : column[c];
  return `${label(row[i], 24)}, ${end.trim()}:  `;
}

/** What names the rows or columns of a step; of a call between two texts the words are of one. */
function names(step, axis) {
  const [kind, length] = [step.axes.at(axis), step.shape.at(axis)];
  if (kind !== "features" && step.tokens.length === length) return step.tokens;
  return Array.from({ length }, (_, n) => String(n + 1));
}

const LEARNED = { W_query: "W_Q", W_key: "W_K", W_value: "W_V", out_proj: "W_O" };

function looks({ name, step, values, transposed, head: own }) {
  const across = Array.from({ length: values[0].length }, (_, n) => String(n + 1));
  const down = values.map((_, n) => String(n + 1));
  if (!step) {
    // Of the learned matrices only the unsplit projections have columns that belong to heads.
    const heads = name === "out_proj" ? 1 : (find("queries")?.heads ?? 1);
    const colours = heads > 1 ? coloured(values[0].length, heads) : null;
    const kinds = ["features", "features"];
    return { values, rows: down, columns: across, kinds, title: LEARNED[name] ?? name, colours };
  }
  const rows = transposed ? names(step, -1) : names(step, -2);
  const columns = transposed ? names(step, -2) : names(step, -1);
  const title = `${name}${transposed ? "ᵀ" : ""}${own === undefined ? "" : `, ${headName(own)}`}`;
  const colours =
    !step.per_head && step.heads > 1 ? coloured(values[0].length, step.heads) : null;
  const kinds = [-2, -1].map((axis) => (step.axes.at(axis) === "features" ? "features" : "tokens"));
  if (transposed) kinds.reverse();
  return { values, rows, columns, kinds, title, colours };
}

const coloured = (width, count) =>
  Array.from({ length: width }, (_, c) => accent(Math.floor((c * count) / width)));
