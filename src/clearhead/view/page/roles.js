// Which head does what, and how sure that is.

import { accent } from "./colour.js";
import { el, share } from "./base.js";
import { facts } from "./data.js";
import { go } from "./state.js";

export const title = "Roles";
export const wanted = facts.roles.length > 0;

export function build(panel) {
  const columns = {
    Role: "",
    Head: "layer.head, from 0",
    Score: "how often, or how strongly, the head does it",
    Baseline: "what a simple rule reaches",
    n: "cases",
    "Held out": "the score on cases that were not used to find the head",
    "Without it": "what happens to the task when the head is switched off",
  };
  const used = Object.entries(columns).filter(
    ([name]) =>
      (name !== "Held out" || facts.roles.some((row) => row.held_out !== null)) &&
      (name !== "Without it" || facts.roles.some((row) => row.ablation)),
  );
  panel.append(
    el("h2", { text: "Which head does what" }),
    el("p", {
      class: "lead",
      text:
        "Each role was tested on sentences made for it. A score means something only beside its " +
        "baseline: what the best simple rule, such as “always the word before”, reaches on the " +
        "same cases. Choose a row to open its head.",
    }),
    el(
      "div",
      { class: "table-holder" },
      el(
        "table",
        { class: "roles" },
        el(
          "thead",
          {},
          el("tr", {}, ...used.map(([name, what]) => el("th", { scope: "col" }, name, hint(what)))),
        ),
        el("tbody", {}, ...facts.roles.map((row) => line(row, used))),
      ),
    ),
    el("p", {
      class: "note",
      text:
        "What this does not show: that a head does nothing else, that no other head does the same, " +
        "or that the model needs it. A model that reads from left to right cannot use what comes " +
        "later, and pairs of adjacent words prove nothing, since “the word before” explains them too.",
    }),
  );
}

export function enter() {}

const hint = (text) => (text ? el("small", { text }) : null);

function line(row, used) {
  const open = () => go({ panel: "head", layer: row.layer, head: row.head });
  const cells = {
    Role: el(
      "th",
      { scope: "row" },
      el("span", { class: "swatch", "aria-hidden": true, style: { "--accent": accent(row.colour) } }),
      row.role,
    ),
    Head: el(
      "td",
      {},
      el("button", {
        type: "button",
        class: "link",
        text: `${row.layer}.${row.head}`,
        "aria-label": `Open head ${row.layer}.${row.head}: ${row.role}`,
        onclick: (event) => {
          event.stopPropagation();
          open();
        },
      }),
    ),
    Score: el("td", { class: "wide" }, bar(row)),
    Baseline: el("td", { class: "figure", text: row.baseline === null ? "–" : share(row.baseline) }),
    n: el("td", { class: "figure", text: row.n ?? "–" }),
    "Held out": el("td", { class: "figure", text: row.held_out === null ? "–" : share(row.held_out) }),
    "Without it": el("td", { class: "said", text: row.ablation ?? "–" }),
  };
  return el("tr", { onclick: open }, ...used.map(([name]) => named(cells[name], name)));
}

/** On a narrow screen a cell carries its column's name. */
function named(cell, name) {
  cell.setAttribute("data-column", name);
  return cell;
}

function bar(row) {
  const within = (value) => `${100 * Math.min(1, Math.max(0, value))}%`;
  const base = row.baseline;
  return el(
    "span",
    { class: "score", style: { "--accent": accent(row.colour) } },
    el(
      "span",
      { class: "track", "aria-hidden": true },
      el("span", { class: "bar", style: { width: within(row.score) } }),
      base === null ? null : el("span", { class: "mark", style: { left: within(base) } }),
    ),
    el("span", { class: "figure", text: share(row.score) }),
  );
}
