// A matrix of real numbers as a table, whose rows, columns and cells can be lit.

import { signed } from "./colour.js";
import { el, moved, number, style } from "./base.js";
import { label } from "./tokens.js";

// Words and features beyond these are left out, and the caption says so.
const MOST = { tokens: 32, features: 12 };

/**
 * matrix({values, rows, columns, title, colours, on}):
 *   values   rows of numbers
 *   rows, columns   their names
 *   kinds    what rows and columns count, ["tokens", "features"] or the like
 *   colours  one accent for each column, or null
 *   on.point(i, c)  a number is pointed at; null when none is. Without `on` nothing can be pointed at.
 */
export class Matrix {
  constructor({ values, rows, columns, kinds, title, colours, on }) {
    this.on = on;
    this.values = values;
    this.height = Math.min(MOST[kinds[0]], values.length);
    this.width = Math.min(MOST[kinds[1]], values[0]?.length ?? 0);
    const finite = values.flat().filter(Number.isFinite);
    this.most = Math.max(1e-9, ...finite.slice(0, 20000).map(Math.abs));
    this.cells = [];
    const body = el("tbody", {});
    for (let i = 0; i < this.height; i++) {
      this.cells.push([]);
      const row = el("tr", {}, el("th", { scope: "row", text: label(rows[i], 12) }));
      for (let c = 0; c < this.width; c++) row.append(this.cell(i, c));
      if (this.width < values[i].length) row.append(el("td", { class: "cut", text: "…" }));
      body.append(row);
    }
    const heads = Array.from({ length: this.width }, (_, c) =>
      el("th", {
        scope: "col",
        text: label(columns[c], 9),
        class: colours && c && colours[c] !== colours[c - 1] ? "next" : null,
        style: colours ? { "--accent": colours[c] } : null,
      }),
    );
    const cut = [];
    if (this.height < values.length) cut.push(`the first ${this.height} of ${values.length} rows`);
    const all = values[0]?.length ?? 0;
    if (this.width < all) cut.push(`the first ${this.width} of ${all} columns`);
    this.heads = heads;
    this.table = el(
      "table",
      { class: `matrix${on ? " result" : ""}${colours ? " coloured" : ""}` },
      el("caption", {}, title, cut.length ? el("span", { text: ` ${cut.join(", ")}` }) : null),
      el("thead", {}, el("tr", {}, el("td", {}), ...heads)),
      body,
    );
    this.tint();
    if (colours) this.separate(colours);
    this.element = el("div", { class: "holder" }, this.table);
    if (on) {
      this.table.addEventListener("pointerleave", () => on.point(null));
      if (this.cells[0]?.[0]) this.cells[0][0].tabIndex = 0;
    }
  }

  cell(i, c) {
    const value = this.values[i][c];
    const cell = el("td", {
      text: number(value),
      class: value === 0 ? "zero" : null,
      "data-cell": `${i} ${c}`,
    });
    this.cells[i].push(cell);
    if (this.on) {
      cell.tabIndex = -1;
      cell.addEventListener("pointerenter", () => this.on.point(i, c));
      cell.addEventListener("focus", () => this.on.point(i, c));
      cell.addEventListener("click", () => this.on.point(i, c));
      cell.addEventListener("keydown", (event) => this.key(event, i, c));
    }
    return cell;
  }

  key(event, i, c) {
    const to = moved(event, i * this.width + c, this.width * this.height, this.width);
    if (to === null) return;
    this.cells[i][c].tabIndex = -1;
    const next = this.cells[Math.floor(to / this.width)][to % this.width];
    next.tabIndex = 0;
    next.focus();
  }

  /** Numbers stand on a colour that tells sign and size. */
  tint() {
    for (const row of this.cells) {
      for (const cell of row) {
        const [i, c] = cell.dataset.cell.split(" ").map(Number);
        const value = this.values[i][c];
        const part = Number.isFinite(value) ? (0.55 * value) / this.most : 0;
        style(cell, { "--fill": signed(part) });
      }
    }
  }

  /** A wider gap where the next head's columns begin, and its colour above them. */
  separate(colours) {
    for (const row of this.cells) {
      row.forEach((cell, c) => {
        cell.classList.toggle("next", c > 0 && colours[c] !== colours[c - 1]);
      });
    }
  }

  /** Scroll the matrix, and nothing else, so far that a cell can be seen. */
  reveal(cell) {
    if (!cell) return;
    const box = this.element;
    const end = cell.offsetLeft + cell.offsetWidth - box.clientWidth;
    box.scrollLeft = Math.min(cell.offsetLeft, Math.max(box.scrollLeft, end));
  }

  /** Light what made a number: (i, null) a row, (null, c) a column, (i, c) a cell; () nothing. */
  light(i = null, c = null) {
    const nothing = i === null && c === null;
    this.cells.forEach((row, m) =>
      row.forEach((cell, n) => {
        const lit = !nothing && (i === null || m === i) && (c === null || n === c);
        cell.classList.toggle("lit", lit);
      }),
    );
    const row = i === null ? null : this.cells[i];
    if (row && c !== null) this.reveal(row[c]);
    else if (c !== null) this.reveal(this.cells[0]?.[c]);
  }
}
