// A map of weights on a canvas: every query a row, every key a column, both named by their token.

import { BENDS, pixels } from "./colour.js";
import { el } from "./base.js";
import { L, hidden, tokens } from "./data.js";
import { label } from "./tokens.js";

const LABEL = 13; // least height of a line of names

/** on.point(i, j): the crosshair is on a cell; (null) when it has left. */
export class HeatMap {
  constructor(name, on) {
    this.on = on;
    this.canvas = el("canvas", {
      class: "heat",
      tabindex: 0,
      role: "application",
      "aria-roledescription": "heat map",
      "aria-label": name,
      onpointermove: (event) => this.move(event),
      onpointerdown: (event) => this.press(event),
      onpointerup: (event) => this.fingers.delete(event.pointerId),
      onpointercancel: (event) => this.fingers.delete(event.pointerId),
      onpointerleave: (event) => {
        this.fingers.delete(event.pointerId);
        if (document.activeElement !== this.canvas) this.point(null);
      },
      onwheel: (event) => this.wheel(event),
      onkeydown: (event) => this.key(event),
      onblur: () => this.point(null),
      ondblclick: () => this.reset(),
    });
    this.fingers = new Map();
    this.image = el("canvas", { width: Math.max(1, L), height: Math.max(1, L) });
    this.view = { i: 0, j: 0, size: L };
    this.cross = null;
    this.map = null;
    this.bend = "root";
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  /** Show a map (L, L); blank tells whether hidden tokens' columns are left out of it. */
  show(map, bend, blank) {
    Object.assign(this, { map, bend, blank });
    this.paint();
    this.draw();
  }

  /** Put the map's colours into the small canvas, one pixel for each cell. */
  paint() {
    if (!this.map) return;
    const pen = this.image.getContext("2d");
    const image = pen.createImageData(L, L);
    const dots = new Uint32Array(image.data.buffer);
    const colours = pixels();
    const bent = BENDS[this.bend];
    for (let n = 0; n < L * L; n++) dots[n] = colours[Math.round(255 * bent(this.map[n]))];
    pen.putImageData(image, 0, 0);
  }

  /** Where things are, in CSS pixels: the square of cells, the margins of names. */
  layout() {
    const { width, height } = this.canvas.getBoundingClientRect();
    const margin = Math.min(120, Math.max(58, width * 0.16));
    const side = Math.max(1, Math.min(width, height) - margin - 2);
    return { width, height, margin, side, cell: side / this.view.size };
  }

  draw() {
    if (!this.map) return;
    const at = this.layout();
    if (at.width < 40) return;
    const dots = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(at.width * dots);
    this.canvas.height = Math.round(at.height * dots);
    const pen = this.canvas.getContext("2d");
    pen.scale(dots, dots);
    pen.imageSmoothingEnabled = false;
    const { i, j, size } = this.view;
    pen.drawImage(this.image, j, i, size, size, at.margin, at.margin, at.side, at.side);
    const ink = getComputedStyle(this.canvas);
    if (this.blank) this.hatch(pen, at, ink);
    pen.strokeStyle = ink.borderTopColor;
    pen.strokeRect(at.margin - 0.5, at.margin - 0.5, at.side + 1, at.side + 1);
    this.names(pen, at, ink);
    if (this.cross) this.crosshair(pen, at, ink);
  }

  /** Columns that are left out look left out. */
  hatch(pen, at, ink) {
    pen.fillStyle = ink.borderTopColor;
    for (let j = 0; j < L; j++) {
      const x = (j - this.view.j) * at.cell;
      if (hidden[j] && x > -at.cell && x < at.side) {
        const from = Math.max(0, x);
        pen.fillRect(at.margin + from, at.margin, Math.min(at.side, x + at.cell) - from, at.side);
      }
    }
  }

  names(pen, at, ink) {
    const size = Math.min(14, Math.max(11, at.cell * 0.55));
    pen.font = `${size}px ${ink.fontFamily}`;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const every = Math.max(1, Math.ceil(LABEL / at.cell));
    const plain = ink.textDecorationColor;
    const strong = ink.color;
    for (const down of [true, false]) {
      const from = down ? this.view.i : this.view.j;
      const lit = this.cross && this.cross[down ? 0 : 1];
      for (let n = Math.ceil(from); n < Math.min(L, from + this.view.size); n++) {
        const isLit = n === lit;
        const near = lit !== null && lit !== undefined && Math.abs(n - lit) < every;
        if (!isLit && (near ? this.cross : n % every)) continue;
        const along = at.margin + (n + 0.5 - from) * at.cell;
        pen.fillStyle = isLit ? strong : plain;
        pen.font = `${isLit ? "600 " : ""}${size}px ${ink.fontFamily}`;
        pen.save();
        // Names of columns stand upright above them, read from below.
        if (down) pen.translate(at.margin - 7, along);
        else {
          pen.translate(along, at.margin - 7);
          pen.rotate(Math.PI / 2);
          pen.textAlign = "right";
        }
        pen.fillText(this.fit(pen, label(tokens[n], 24), at.margin - 12), 0, 0);
        pen.restore();
      }
    }
  }

  fit(pen, text, room) {
    if (pen.measureText(text).width <= room) return text;
    const parts = [...text];
    while (parts.length > 1 && pen.measureText(`${parts.join("")}…`).width > room) parts.pop();
    return `${parts.join("")}…`;
  }

  crosshair(pen, at, ink) {
    const [i, j] = this.cross;
    const y = at.margin + (i - this.view.i) * at.cell;
    const x = at.margin + (j - this.view.j) * at.cell;
    pen.save();
    pen.beginPath();
    pen.rect(at.margin, at.margin, at.side, at.side);
    pen.clip();
    pen.strokeStyle = ink.color;
    pen.globalAlpha = 0.35;
    pen.strokeRect(at.margin, y - 0.5, at.side, at.cell + 1);
    pen.strokeRect(x - 0.5, at.margin, at.cell + 1, at.side);
    pen.globalAlpha = 1;
    pen.lineWidth = 2;
    pen.strokeRect(x - 1, y - 1, at.cell + 2, at.cell + 2);
    pen.restore();
  }

  /** The cell under a pointer: [i, j], or null beside the map. */
  under(event) {
    const box = this.canvas.getBoundingClientRect();
    const at = this.layout();
    const [x, y] = [event.clientX - box.left - at.margin, event.clientY - box.top - at.margin];
    if (x < 0 || y < 0 || x >= at.side || y >= at.side) return null;
    return [this.view.i + y / at.cell, this.view.j + x / at.cell].map(Math.floor);
  }

  point(cross) {
    this.cross = cross;
    this.on.point?.(...(cross ?? [null]));
    this.draw();
  }

  press(event) {
    this.canvas.focus({ preventScroll: true });
    this.fingers.set(event.pointerId, [event.clientX, event.clientY]);
    if (this.view.size < L) this.canvas.setPointerCapture(event.pointerId);
    this.point(this.under(event));
  }

  move(event) {
    const before = this.fingers.get(event.pointerId);
    const after = [event.clientX, event.clientY];
    if (!before) return this.point(this.under(event));
    const spread = () => {
      const [a, b] = [...this.fingers.values()];
      return Math.hypot(a[0] - b[0], a[1] - b[1]);
    };
    const apart = this.fingers.size === 2 ? spread() : 0;
    this.fingers.set(event.pointerId, after);
    if (apart) return this.zoom(spread() / apart, this.under(event));
    const { cell } = this.layout();
    this.pan((before[1] - after[1]) / cell, (before[0] - after[0]) / cell);
    this.point(this.under(event));
  }

  wheel(event) {
    // Without a modifier the page scrolls, unless the map has been chosen by a click or by Tab.
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== this.canvas) return;
    event.preventDefault();
    this.zoom(Math.exp(-event.deltaY / 300), this.under(event));
  }

  /** Enlarge by a factor around a cell, or around the crosshair or the middle. */
  zoom(factor, around = this.cross) {
    const { i, j, size } = this.view;
    const [y, x] = around ?? [i + size / 2, j + size / 2];
    const now = Math.min(L, Math.max(Math.min(4, L), size / factor));
    const keep = now / size;
    this.view = { i: y - (y - i) * keep, j: x - (x - j) * keep, size: now };
    this.pan(0, 0);
  }

  pan(down, right) {
    const end = L - this.view.size;
    this.view.i = Math.min(end, Math.max(0, this.view.i + down));
    this.view.j = Math.min(end, Math.max(0, this.view.j + right));
    this.canvas.style.touchAction = this.view.size < L ? "none" : "pan-y";
    this.draw();
  }

  reset() {
    this.view = { i: 0, j: 0, size: L };
    this.pan(0, 0);
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key in steps) {
      const [down, right] = steps[event.key];
      const [i, j] = this.cross ?? [0, 0];
      const inside = (n) => Math.min(L - 1, Math.max(0, n));
      const to = this.cross ? [inside(i + down), inside(j + right)] : [0, 0];
      this.follow(to);
      this.point(to);
    } else if (event.key === "+" || event.key === "=") this.zoom(1.5);
    else if (event.key === "-") this.zoom(1 / 1.5);
    else if (event.key === "0") this.reset();
    else if (event.key === "Escape") this.point(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Bring a cell into view. */
  follow([i, j]) {
    const { size } = this.view;
    const into = (from, n) => Math.min(Math.max(from, n + 1 - size), n);
    this.pan(into(this.view.i, i) - this.view.i, into(this.view.j, j) - this.view.j);
  }
}
