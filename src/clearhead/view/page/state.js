// Where the reader is: panel, layer and head, kept in the address so that a view can be sent on.
//     #head/9.4     panel "head", layer 9, head 4

import { attention, facts, headsOf, layers } from "./data.js";

export const panels = {};
export const state = { panel: "", layer: 0, head: 0 };
const followers = [];

/** Call now and after each change: follow(({panel, layer, head}) => ...). */
export function follow(follower) {
  followers.push(follower);
}

/** Go to another panel, layer or head; what does not exist is brought to what does. */
export function go(change, { remember = true } = {}) {
  const next = { ...state, ...change };
  if (!(next.panel in panels)) next.panel = state.panel in panels ? state.panel : start();
  if (attention) {
    next.layer = Math.min(layers - 1, Math.max(0, next.layer));
    next.head = Math.min(headsOf(next.layer) - 1, Math.max(0, next.head));
  }
  Object.assign(state, next);
  if (remember) write();
  for (const follower of followers) follower(state);
}

function start() {
  return facts.start in panels ? facts.start : Object.keys(panels)[0];
}

function write() {
  const hash = attention ? `#${state.panel}/${state.layer}.${state.head}` : `#${state.panel}`;
  try {
    if (location.hash !== hash) history.replaceState(null, "", hash);
  } catch {
    // A notebook's frame has no address of its own to write.
  }
}

/** Read the address; where it names no head, start with one of the three. */
export function read() {
  const [, panel, layer, head] = /^#([a-z]*)(?:\/(\d+)\.(\d+))?/.exec(location.hash) ?? [];
  const lead = facts.three[0] ?? { layer: 0, head: 0 };
  const change = { panel: panel ?? "" };
  if (layer !== undefined) Object.assign(change, { layer: Number(layer), head: Number(head) });
  else if (!state.panel) Object.assign(change, { layer: lead.layer, head: lead.head });
  go(change, { remember: location.hash !== "" });
}
