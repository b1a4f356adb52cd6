// The document in small: making elements, telling numbers, announcing.
// Token text enters the page through textContent only, so it can never become markup.

/** el("p", {class: "note", text: "..."}, child, ...): an element with properties and children. */
export function el(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

/** The same for a part of a drawing. */
export function svg(tag, properties = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "style") style(element, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set styles one by one: a style attribute would be refused by the page's own policy. */
export function style(element, values) {
  for (const [name, value] of Object.entries(values)) element.style.setProperty(name, value);
}

export const byId = (id) => document.getElementById(id);

/** A share of 1 in hundredths: .07, 1.0; "<.01" for less, 0 for none. */
export function share(value) {
  if (value === 0) return "0";
  if (value < 0.005) return "<.01";
  return value >= 0.995 ? "1.0" : value.toFixed(2).slice(1);
}

/** A share as a percentage without needless digits. */
export function percent(value) {
  if (value > 0 && value < 0.001) return "under 0.1 %";
  return `${(value * 100).toFixed(value < 0.0995 ? 1 : 0)} %`;
}

/** A number of a matrix in so many digits behind the point, with a true minus. */
export function number(value, digits = 2) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value < 0 ? "−∞" : "∞";
  const text = Math.abs(value).toFixed(digits);
  return value < 0 && Number(text) !== 0 ? `−${text}` : text;
}

/** What a control shows and what is read out for it: a label around a control. */
export function labelled(text, control, properties = {}) {
  return el("label", { class: "control", ...properties }, el("span", { text }), control);
}

/** A choice of one out of few: buttons in a row, of which one is pressed. */
export function segmented(name, choices, chosen, choose) {
  const buttons = Object.entries(choices).map(([key, text]) =>
    el("button", {
      type: "button",
      text,
      "data-choice": key,
      "aria-pressed": String(key === chosen),
      onclick: () => set(key, true),
    }),
  );
  function set(key, tell = false) {
    for (const button of buttons) {
      button.setAttribute("aria-pressed", String(button.dataset.choice === key));
    }
    if (tell) choose(key);
  }
  const group = el("div", { class: "segmented", role: "group", "aria-label": name }, ...buttons);
  return { group, set };
}

/** Arrow keys among many buttons, of which Tab reaches one: move(event, i, count, columns). */
export function moved(event, i, count, columns = 1) {
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
  if (event.altKey || event.ctrlKey || event.metaKey) return null;
  let to = null;
  if (event.key in steps) to = i + steps[event.key];
  else if (event.key === "Home") to = 0;
  else if (event.key === "End") to = count - 1;
  if (to === null) return null;
  event.preventDefault();
  event.stopPropagation();
  return Math.min(count - 1, Math.max(0, to));
}
