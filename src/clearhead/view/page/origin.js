// Where each number of a step comes from: which row and which column of what came before.

import { number } from "./base.js";

const MOST_TERMS = 6;

// name of a step: the formula, and how its result is made of earlier steps and learned matrices.
//   product    left (row) times right (column)
//   same       one number, taken over
//   softmax    one row
// Where a list of names is given, the first that is there.
const RULES = {
  x: { formula: "X" },
  queries: { formula: "Q = X · W_Q", product: ["x", "W_query"] },
  keys: { formula: "K = X · W_K", product: ["x", "W_key"] },
  values: { formula: "V = X · W_V", product: ["x", "W_value"] },
  q: { formula: "Qₕ = columns of Q that belong to head h", split: "queries", own: "W_query" },
  k: { formula: "Kₕ = columns of K that belong to head h", split: "keys", own: "W_key" },
  v: { formula: "Vₕ = columns of V that belong to head h", split: "values", own: "W_value" },
  scores: { formula: "Sₕ = Qₕ · Kₕᵀ", product: ["q", "k"], transposed: true },
  scaled: { formula: "Sₕ, scaled", same: ["scores"] },
  masked: { formula: "Sₕ[i, j] = −∞ where j > i", same: ["scaled", "scores"] },
  weights: { formula: "Aₕ = softmax(Sₕ / √D), row by row", softmax: ["masked", "scaled", "scores"] },
  context: { formula: "Cₕ = Aₕ · Vₕ", product: ["weights", "v"] },
  recombined: { formula: "C = [C₁ | C₂ | …]", joined: "context" },
  output: { formula: "O = C · W_O", product: ["recombined", "out_proj"] },
  wrapper_output: { formula: "the same, computed head by head", same: ["output"] },
};

// The same step of another call, told by its code.
const OTHERS = {
  masked: [/^future/, "Sₕ[i, j] = −∞ where i may not see j"],
  weights: [/sqrt/, "Aₕ = softmax(Sₕ), row by row"],
};

export function formula({ name, code }) {
  const [usual, other] = OTHERS[name] ?? [/^/, ""];
  return usual.test(code) ? (RULES[name]?.formula ?? "") : other;
}

/**
 * How a step's numbers were made, for one head h (0 where the step has no heads):
 *   inputs     [{name, step, values, transposed}]
 *   signs      what stands between them, and last before the result
 *   lit(i, c)  for each input the [row, column] to light; null in it stands for all
 *   say(i, c)  the arithmetic in words
 * or null where it has no origin on the page.
 */
export function origin(step, h, find, parameters) {
  const rule = RULES[step.name];
  if (!rule) return null;
  const result = of(step, h);
  const input = (name, transposed = false) => {
    const made = find(name);
    if (made) {
      const values = of(made, h);
      return { name, step: made, values: transposed ? transpose(values) : values, transposed };
    }
    const learned = parameters[name];
    if (!learned) return null;
    return { name, values: deep(learned) === 3 ? learned[h] : learned, transposed: false };
  };
  if (rule.split && !find(rule.split)) return product(input("x"), input(rule.own), result);
  if (rule.product) {
    return product(input(rule.product[0]), input(rule.product[1], rule.transposed), result);
  }
  const there = (names) => names.find((name) => find(name)) ?? names[0];
  if (rule.same) {
    const from = input(there(rule.same));
    return from && cellwise(from, result, (i, c) => [i, c]);
  }
  if (rule.split) {
    const from = input(rule.split);
    const width = result[0].length;
    return from && cellwise(from, result, (i, c) => [i, h * width + c]);
  }
  if (rule.joined) return joined(find(rule.joined), result);
  if (rule.softmax) {
    const D = step.code.includes("sqrt") ? find("q")?.shape.at(-1) : 1;
    return softmax(input(there(rule.softmax)), D, step.code.includes("sink"), result);
  }
  return null;
}

const of = (step, h) => (step.per_head ? step.values[h] : step.values);
const deep = (values) => (Array.isArray(values) ? 1 + deep(values[0]) : 0);
const transpose = (rows) => rows[0].map((_, c) => rows.map((row) => row[c]));
const factor = (value) => (value < 0 ? `(${number(value)})` : number(value));

function product(left, right, result) {
  if (!left || !right) return null;
  return {
    inputs: [left, right],
    signs: ["·", "="],
    lit: (i, c) => [
      [i, null],
      [null, c],
    ],
    say(i, c) {
      const pairs = left.values[i].map((value, n) => [value, right.values[n][c]]);
      // Terms that are 0 by the mask say nothing.
      const terms = pairs
        .filter(([a]) => a !== 0)
        .map(([a, b]) => `${factor(a)} × ${factor(b)}`);
      const shown = terms.slice(0, MOST_TERMS).join(" + ");
      const rest = terms.length > MOST_TERMS ? ` + … (${terms.length} products)` : "";
      return `${shown}${rest} = ${number(result[i][c])}`;
    },
  };
}

function cellwise(from, result, where) {
  return {
    inputs: [from],
    signs: ["→"],
    lit: (i, c) => [where(i, c)],
    say(i, c) {
      const [m, n] = where(i, c);
      const [before, after] = [from.values[m][n], result[i][c]].map((value) => number(value));
      if (before === after) return `${after}, taken over unchanged`;
      return `${before} becomes ${after}`;
    },
  };
}

function joined(step, result) {
  const width = step.values[0][0].length;
  return {
    inputs: step.values.map((values, n) => ({ name: step.name, step, values, head: n })),
    signs: step.values.map((_, n) => (n < step.values.length - 1 ? "|" : "→")),
    lit: (i, c) =>
      step.values.map((_, n) => (n === Math.floor(c / width) ? [i, c % width] : [null, null])),
    say: (i, c) => `${number(result[i][c])}, from head ${Math.floor(c / width) + 1}`,
  };
}

/**
 * Two things at once: scores are divided by √D, unless they were scaled before (D is 1), and each
 * row of them is brought to a sum of 1, or less where there is a sink besides.
 */
function softmax(from, D, sink, result) {
  if (!from || !D) return null;
  const divided = D !== 1;
  const values = from.values.map((row) => row.map((value) => value / Math.sqrt(D)));
  const scaled = { name: `${from.name} / √${D}`, step: from.step, values };
  const both = [
    [from, (i, c) => [i, c]],
    [scaled, (i) => [i, null]],
  ];
  const shown = divided ? both : [[from, (i) => [i, null]]];
  return {
    inputs: shown.map(([one]) => one),
    signs: shown.map(() => "→"),
    lit: (i, c) => shown.map(([, where]) => where(i, c)),
    say(i, c) {
      if (values[i][c] === -Infinity) return "e to the power of −∞ is exactly 0";
      const seen = values[i].filter((value) => value !== -Infinity);
      const terms = seen.slice(0, MOST_TERMS).map((value) => `e^${factor(value)}`);
      const rest = (seen.length > MOST_TERMS ? " + …" : "") + (sink ? " + e^sink" : "");
      const before = `${number(from.values[i][c])} / √${D} = ${number(values[i][c])};  `;
      return (
        (divided ? before : "") +
        `e^${factor(values[i][c])} / (${terms.join(" + ")}${rest}) = ${number(result[i][c])}`
      );
    },
  };
}
