// Elements, wordings and number formats that the parts of the viewer share.
// Token text is hostile: it only ever passes through text nodes and setAttribute.

const IDLE_PATIENCE_MS = 1500;

/** An element; attributes that are functions become listeners, strings among the children text. */
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === 'function') node.addEventListener(name, value);
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** The lookup of wordings: t(key, values) fills `{name}` placeholders with text. */
export function wording(strings) {
  return (key, values = {}) => (strings[key] ?? key).replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}

/** Runs an action once the browser has nothing better to do: what is not on the first screen must not hold it up. */
export function whenIdle(action) {
  if (globalThis.requestIdleCallback) requestIdleCallback(action, { timeout: IDLE_PATIENCE_MS });
  else setTimeout(action, 50);
}

export function reducedMotion() {
  return matchMedia('(prefers-reduced-motion: reduce)').matches;
}

// ---- numbers ----

export const known = (x) => x !== null && x !== undefined;
export const orDash = (format) => (x) => (known(x) ? format(x).replace('-', '−') : '–');
export const fixed = (digits) => orDash((x) => x.toFixed(digits));
export const percent = orDash((x) => `${(100 * x).toFixed(1)} %`);
export const significant = orDash((x) => (Math.abs(x) < 1e-9 ? '0' : Number(x.toPrecision(3)).toString()));
export const probability = orDash((x) => (x > 0 && x < 0.0005 ? '<0.001' : x.toFixed(3)));

export function deltaText(delta) {
  return Number(delta.toPrecision(6)).toString();
}

/** Two numbers with enough digits to be told apart: a verdict must not read "0.3 is below 0.3". */
export function apart(a, b) {
  for (let digits = 3; digits < 16; digits += 1) {
    const pair = [a, b].map((x) => Number(x.toPrecision(digits)).toString());
    if (pair[0] !== pair[1]) return pair;
  }
  return [String(a), String(b)];
}

// ---- tokens ----

/** A token's text where it stands alone, outside the running text. */
export function visible(token) {
  if (token.x) return `<${token.x}>`;
  if (token.t === '') return '∅';
  const text = token.t.replace(/\n/g, '⏎').replace(/\t/g, '→');
  return /^ +$/.test(text) ? text.replace(/ /g, '·') : text;
}

/** A token's text inside a sentence. */
export function quoted(token) {
  return `‹${visible(token).trim() || visible(token)}›`;
}

/** A token as a chip outside the running text; the class carries colour and the second cue. */
export function piece(token, name = token.c) {
  return make('bdi', { class: `piece ${name}` }, visible(token));
}
