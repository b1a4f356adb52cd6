// The text as words that can be pointed at, tinted, and joined by lines.

import { el, moved, style, svg } from "./base.js";
import { hidden, tokens } from "./data.js";
import { continues, direction, label } from "./tokens.js";

const MOST_LINES = 500;
const SHORT = 60; // so many tokens get large letters and room for arcs
let count = 0;

/**
 * A view of the text.
 *   on.point(i)   the pointer or the keyboard is on token i; null when it has left
 *   on.choose(i)  token i was clicked, or Enter or Space pressed on it
 */
export class Words {
  constructor(name, on) {
    this.on = on;
    this.lines = [];
    this.pieces = tokens.map((token, i) => this.piece(token, i));
    this.drawing = svg("svg", { class: "lines", "aria-hidden": true });
    this.id = `words${count++}`;
    const text = el("div", { class: "flow", dir: direction(tokens) });
    tokens.forEach((token, i) => {
      const before = /^\s*/.exec(token)[0];
      // A token that is only space or a line's end is shown as such, and then ends its line.
      if (before && i && before !== token) text.append(before.includes("\n") ? el("br") : " ");
      text.append(this.pieces[i]);
      if (before === token && token.includes("\n")) text.append(el("br"));
    });
    this.element = el(
      "div",
      {
        class: `words ${tokens.length <= SHORT ? "short" : "long"}`,
        id: this.id,
        role: "group",
        "aria-label": name,
        onpointerleave: () => this.on.point?.(null),
      },
      this.drawing,
      text,
    );
    if (this.pieces.length) this.pieces[Math.min(1, tokens.length - 1)].tabIndex = 0;
    new ResizeObserver(() => this.redraw()).observe(this.element);
  }

  piece(token, i) {
    return el("span", {
      class: `piece${continues(token) && i ? " joined" : ""}${hidden[i] ? " set-aside" : ""}`,
      role: "button",
      tabindex: -1,
      "data-token": i,
      text: label(token),
      title: [...token].length > 48 ? `${[...token].length} characters` : null,
      onpointerenter: (event) => event.pointerType !== "touch" && this.on.point?.(i),
      onfocus: () => this.on.point?.(i),
      onblur: () => this.on.point?.(null),
      onclick: () => this.on.choose?.(i),
      onkeydown: (event) => this.key(event, i),
    });
  }

  key(event, i) {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.on.choose?.(i);
      return;
    }
    const to = moved(event, i, tokens.length);
    if (to === null) return;
    this.pieces[i].tabIndex = -1;
    this.pieces[to].tabIndex = 0;
    this.pieces[to].focus();
  }

  /** Mark a token as the chosen one, or none. */
  mark(chosen, pinned = chosen) {
    this.pieces.forEach((piece, i) => {
      piece.classList.toggle("chosen", i === chosen);
      piece.setAttribute("aria-pressed", String(i === pinned));
    });
  }

  /** Tint the words: strengths from 0 to 1, one a token, or null for none. */
  tint(strengths, told = null) {
    this.pieces.forEach((piece, i) => {
      const strength = strengths ? strengths[i] : 0;
      style(piece, { "--tint": `${Math.round(Math.sqrt(strength) * 1000) / 10}%` });
      piece.toggleAttribute("data-tinted", strength > 0);
      if (told && told[i]) piece.setAttribute("aria-description", told[i]);
      else piece.removeAttribute("aria-description");
    });
  }

  /** Draw lines [from, to, weight], the strongest last and at most some hundreds. */
  join(lines) {
    this.lines = [...lines].sort((a, b) => a[2] - b[2]).slice(-MOST_LINES);
    this.redraw();
  }

  redraw() {
    const frame = this.element.getBoundingClientRect();
    if (!frame.width) return;
    const up = { x: frame.left, y: frame.top - this.element.scrollTop };
    style(this.drawing, { height: `${this.element.scrollHeight}px` });
    this.drawing.replaceChildren(...this.lines.flatMap((line) => this.arc(line, up)));
  }

  arc([i, j, weight], { x, y }) {
    const [a, b] = [i, j].map((n) => this.pieces[n].getBoundingClientRect());
    const [ax, bx] = [a, b].map((box) => box.left + box.width / 2 - x);
    const [ay, by] = [a.top - y, b.top - y];
    const sameLine = Math.abs(ay - by) < a.height / 2;
    const far = Math.abs(ax - bx);
    const rise = sameLine ? Math.min(a.height * 1.25, 9 + far * 0.16) : a.height * 0.7;
    const path = `M${ax} ${ay}C${ax} ${ay - rise * 1.33} ${bx} ${by - rise * 1.33} ${bx} ${by}`;
    const opacity = 0.3 + 0.7 * weight;
    return [
      svg("path", { d: path, "stroke-width": 1 + 4 * weight, opacity, "data-link": `${i} ${j}` }),
      svg("circle", { cx: bx, cy: by, r: 2 + 2.5 * weight, opacity }),
    ];
  }
}
