// How a token is shown: what cannot be seen is named, what is too long is cut, nothing is markup.

const LONG = 48;
const NAMES = { "\n": "⏎", "\t": "⇥", "\r": "␍", "\u00a0": "␣" };
// Controls, zero-width characters, direction marks, variation selectors, lone surrogates.
const UNSEEN =
  /[\u0000-\u001f\u007f-\u00a0\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
// A joiner or selector inside an emoji is part of what is seen.
const EMOJI = /\p{Extended_Pictographic}[\ufe0f\u200d]/u;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/g;

/** A token in letters that can be seen, whole. */
export function visible(token) {
  if (token === "") return "·";
  const bare = token.replace(/^ +| +$/g, "") || "␣".repeat(Math.min(4, token.length));
  if (EMOJI.test(bare)) return bare;
  return bare.replace(UNSEEN, (c) => {
    return NAMES[c] ?? `⟨${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** The same, cut to a length that a line can hold. */
export function label(token, most = LONG) {
  const letters = visible(token.length > 4 * most ? token.slice(0, 4 * most) : token);
  // Split by what a reader takes for one letter, so that no emoji is cut in two.
  const parts = [...new Intl.Segmenter().segment(letters)].map((part) => part.segment);
  return parts.length <= most ? letters : `${parts.slice(0, most - 1).join("")}…`;
}

/** A token between quotes, for a sentence; isolated, so that it cannot turn the sentence round. */
export const quoted = (token) => `“\u2068${label(token, 24)}\u2069”`;

/** "rtl" where most letters of a text are written from right to left. */
export function direction(tokens) {
  const text = tokens.join("").slice(0, 20000);
  return (text.match(RIGHT_TO_LEFT)?.length ?? 0) * 2 > text.trim().length ? "rtl" : "ltr";
}

/** Whether a token continues the word of the one before it. */
export const continues = (token) => !/^\s/.test(token);
