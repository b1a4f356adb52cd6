// What Python wrote: facts as JSON, maps as deflated bytes that are decoded when first shown.

import { byId } from "./base.js";

export const facts = JSON.parse(byId("facts").textContent);
export const attention = facts.attention;
export const tokens = attention ? attention.tokens : [];
export const hidden = attention ? attention.hidden : [];
export const L = tokens.length;

/** Heads in one list, layer by layer: the number of the first one of each layer, and of all. */
const first = [0];
for (const count of attention ? attention.heads : []) first.push(first.at(-1) + count);
export const layers = first.length - 1;
export const heads = first.at(-1);
export const headsOf = (layer) => attention.heads[layer];
export const place = (layer, head) => first[layer] + head;
export const nameOf = (index) => at(index).join(".");

/** [layer, head] of a number in the list of all heads. */
export function at(index) {
  const layer = first.findLastIndex((start) => start <= index);
  return [layer, index - first[layer]];
}

/** How many bytes the element with this id holds, inflated. */
async function inflated(id) {
  // The maps stand after this script, so that the first view need not wait for them.
  while (!byId(id) && document.readyState === "loading") {
    await new Promise((done) => document.addEventListener("DOMContentLoaded", done));
  }
  const letters = atob(byId(id).textContent);
  const bytes = new Uint8Array(letters.length);
  for (let n = 0; n < letters.length; n++) bytes[n] = letters.charCodeAt(n);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** The weight that each level stands for. */
function weightsOfLevels({ levels, octaves }) {
  const table = new Float32Array(levels + 1);
  for (let n = 1; n <= levels; n++) table[n] = 2 ** ((octaves * (n - levels)) / (levels - 1));
  return table;
}

let small = null;

/** All thumbnails, weights (heads, T, T) one after another. */
export function thumbnails() {
  small ??= inflated("thumbnails").then((levels) => {
    const table = weightsOfLevels(attention.thumbnail);
    return Float32Array.from(levels, (level) => table[level]);
  });
  return small;
}

const KEEP = Math.max(4, Math.min(64, Math.floor(3e7 / Math.max(1, L * L))));
const cache = new Map();

/** The weights of one head, Float32Array (L, L): a promise. What the file left out is 0. */
export function weights(layer, head) {
  const index = place(layer, head);
  let found = cache.get(index);
  cache.delete(index);
  found ??= decoded(index);
  cache.set(index, found);
  if (cache.size > KEEP) cache.delete(cache.keys().next().value);
  return found;
}

let table = null;

async function decoded(index) {
  const { maps, causal } = attention;
  const bytes = await inflated(`map${index}`);
  if (maps.kind === "qk") return softmaxed(bytes, await inflated(`key${maps.keys[index]}`));
  table ??= weightsOfLevels(maps);
  const found = new Float32Array(L * L);
  if (maps.kind === "all") {
    const count = bytes.length / maps.bytes;
    let n = 0;
    for (let i = 0; i < L; i++) {
      for (let j = 0; j < (causal ? i + 1 : L); j++, n++) {
        found[i * L + j] = table[bytes[n] + (maps.bytes === 2 ? 256 * bytes[count + n] : 0)];
      }
    }
    return found;
  }
  const k = maps.top;
  // Planes of (k, L): levels, then how far apart the keys are, low and high bytes.
  for (let i = 0; i < L; i++) {
    for (let n = i, j = 0; n < k * L; n += L) {
      j += bytes[k * L + n] + 256 * bytes[2 * k * L + n];
      if (bytes[n]) found[i * L + j] = table[bytes[n]];
    }
  }
  return found;
}

/** Weights from packed queries and keys: each L float32 of row sizes, then L * D int8. */
function softmaxed(queryBytes, keyBytes) {
  const sizes = (bytes) => new Float32Array(bytes.buffer, 0, L);
  const rows = (bytes) => new Int8Array(bytes.buffer, 4 * L);
  const [a, b, D] = [sizes(queryBytes), sizes(keyBytes), (queryBytes.length - 4 * L) / L];
  const q = Float32Array.from(rows(queryBytes));
  const k = Float32Array.from(rows(keyBytes));
  const found = new Float32Array(L * L);
  for (let i = 0; i < L; i++) {
    const end = attention.causal ? i + 1 : L;
    const row = found.subarray(i * L, i * L + end);
    let top = -Infinity;
    for (let j = 0; j < end; j++) {
      let sum = 0;
      for (let d = 0, x = i * D, y = j * D; d < D; d++) sum += q[x + d] * k[y + d];
      row[j] = sum * a[i] * b[j];
      top = Math.max(top, row[j]);
    }
    let total = 0;
    for (let j = 0; j < end; j++) total += row[j] = Math.exp(row[j] - top);
    for (let j = 0; j < end; j++) row[j] /= total;
  }
  return found;
}

/** The mean of the weights of some heads, [[layer, head], ...]. */
export async function mean(chosen) {
  const maps = await Promise.all(chosen.map(([layer, head]) => weights(layer, head)));
  if (maps.length === 1) return maps[0];
  const sum = new Float32Array(L * L);
  for (const map of maps) for (let n = 0; n < sum.length; n++) sum[n] += map[n];
  return sum.map((value) => value / maps.length);
}

/** Weights without the columns of hidden tokens, each row scaled to what it summed to before. */
export function withoutSink(map) {
  const found = new Float32Array(map);
  for (let i = 0; i < L; i++) {
    let all = 0;
    let left = 0;
    for (let j = 0; j < L; j++) {
      all += map[i * L + j];
      if (hidden[j]) found[i * L + j] = 0;
      else left += map[i * L + j];
    }
    for (let j = 0; j < L; j++) if (left > 0) found[i * L + j] *= all / left;
  }
  return found;
}

/** The role rows of a head, best first. */
export function rolesOf(layer, head) {
  return facts.badges.filter((row) => row.layer === layer && row.head === head);
}
