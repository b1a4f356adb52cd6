// Colours of numbers. Weights go from the paper's colour to one that stands out, their lightness
// changing in one direction only, so that the order survives colour blindness and grey print.
// Signed numbers alone diverge: orange below zero, blue above.

const SCALES = {
  light: ["#f6f5f1", "#cfe3d4", "#7dc0b4", "#35919c", "#2b5f93", "#2f2b6e", "#180f3d"],
  dark: ["#171b22", "#25345e", "#1f5f8b", "#1d8f8f", "#4fba74", "#b5d94f", "#fdf29a"],
};
const SIGNED = {
  light: ["#b45309", "#e8b684", "#f6f5f1", "#93b8ee", "#1d4ed8"],
  dark: ["#fb923c", "#8a5326", "#171b22", "#2a4f95", "#7fb0ff"],
};

const parsed = new Map();
const wanted = window.matchMedia("(prefers-color-scheme: dark)");
let printing = false;
const followers = [];

/** "light" or "dark": what the reader chose, else what the system prefers; paper is light. */
export function theme() {
  if (printing) return "light";
  return document.documentElement.dataset.theme ?? (wanted.matches ? "dark" : "light");
}

/** Call when colours have changed. */
export function onTheme(follower) {
  followers.push(follower);
}

export function setTheme(name) {
  document.documentElement.dataset.theme = name;
  for (const follower of followers) follower();
}

wanted.addEventListener("change", () => followers.forEach((follower) => follower()));
for (const [event, now] of [["beforeprint", true], ["afterprint", false]]) {
  window.addEventListener(event, () => {
    printing = now;
    for (const follower of followers) follower();
  });
}

/** [r, g, b] at part (0 to 1) of the way through evenly spaced colours. */
function mixed(colours, part) {
  const key = colours.join();
  if (!parsed.has(key)) {
    parsed.set(key, colours.map((c) => [1, 3, 5].map((k) => parseInt(c.slice(k, k + 2), 16))));
  }
  const stops = parsed.get(key);
  const way = Math.min(1, Math.max(0, part)) * (stops.length - 1);
  const left = Math.min(Math.floor(way), stops.length - 2);
  return stops[left].map((x, n) => Math.round(x + (stops[left + 1][n] - x) * (way - left)));
}

const tables = new Map();

/** 256 colours of the scale of weights, as the 32-bit pixels of a canvas. */
export function pixels() {
  const name = theme();
  if (!tables.has(name)) {
    const table = new Uint32Array(256);
    for (let n = 0; n < 256; n++) {
      const [r, g, b] = mixed(SCALES[name], n / 255);
      table[n] = (255 << 24) | (b << 16) | (g << 8) | r;
    }
    tables.set(name, table);
  }
  return tables.get(name);
}

const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;
export const shade = (part) => css(mixed(SCALES[theme()], part));
export const signed = (part) => css(mixed(SIGNED[theme()], (part + 1) / 2));
/** The colour of figures that stand on shade(part). */
export const onShade = (part) => ((theme() === "dark") === part > 0.55 ? "#0b0d12" : "#ffffff");

/** How far up the scale of colours a weight stands, 0 to 1. */
export const BENDS = {
  linear: (w) => w,
  root: (w) => Math.sqrt(w),
  cube: (w) => Math.cbrt(w),
  log: (w) => (w > 0 ? Math.max(0, 1 + Math.log2(w) / 10) : 0),
};

/** The colour of a head, counted from 0: blue, teal, and further ones. */
export const accent = (head) => `var(--head-${head % 7})`;
