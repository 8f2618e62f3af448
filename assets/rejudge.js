// The mathematics of the page and the reduction of the run log to what is drawn.
// No DOM and no wording here, so that node can test every line.
//
// p: draft distribution, q: verifier distribution, n: the drafted token, u: its uniform draw,
// gamma: the probability to which delta raises n, h: the target for n, all after the sampling filters.

export const CLASSES = ['accepted', 'rescued', 'rejected', 'resampled', 'bonus', 'discarded', 'cut'];
const KEPT = new Set(['accepted', 'rescued', 'resampled', 'bonus']);
const PASSED = new Set(['accepted', 'rescued']);

// ---- the rule ----

export function gamma(q, delta) {
  if (q <= 0) return 0; // a token the filters cut is never accepted, whatever the budget
  return Math.min(q + Math.sqrt(2 * delta * q * Math.max(0, 1 - q)), 1);
}

export function phi(p, raised) {
  return Math.min(1, raised / p);
}

/** h(x) for x other than the drafted token, whose own probability goes from qDrafted to raised. */
export function scaledDown(q, qDrafted, raised) {
  return qDrafted < 1 ? (q * (1 - raised)) / (1 - qDrafted) : q;
}

/** Strict, so that gamma = 0 is never accepted even by u = 0. */
export function acceptedAt({ p, q, u }, delta) {
  return u * p < gamma(q, delta);
}

// ---- the same draws at another delta ----

/** The delta above which a drafted token is accepted: -Infinity for always, Infinity for never. */
export function threshold({ p, q, u, dc }) {
  if (u * p < q) return -Infinity;
  return dc ?? Infinity;
}

/** Behind a drafted end token nothing is ever judged: it has no critical delta although the verifier allows it. */
export function isBehindEnd({ c, q, dc }) {
  return c === 'cut' || (dc === null && q > 0);
}

/**
 * For each drafted token of a block the deltas above which it is reached and accepted.
 * A token is reached once everything before it is accepted, so both only grow along the block.
 */
export function blockThresholds(drafted) {
  let reached = -Infinity;
  return drafted.map((token) => {
    if (isBehindEnd(token)) return { reached: Infinity, accepted: Infinity };
    const accepted = Math.max(reached, threshold(token));
    const pair = { reached, accepted };
    reached = accepted;
    return pair;
  });
}

export function verdictAt({ reached, accepted }, delta) {
  if (delta > accepted) return 'accept';
  return delta > reached ? 'reject' : 'discard';
}

export function recordedVerdict(token) {
  if (PASSED.has(token.c)) return 'accept';
  return { rejected: 'reject', discarded: 'discard', cut: 'cut' }[token.c];
}

/** Accepted tokens of one block. */
export function leadingAccepted(drafted, delta) {
  const first = drafted.findIndex((token) => isBehindEnd(token) || !acceptedAt(token, delta));
  return first < 0 ? drafted.length : first;
}

/** Acceptance length of the recorded draws at another delta, over all passes; null before the first. */
export function sameDraws(rounds, delta) {
  if (rounds.length === 0) return null;
  return rounds.reduce((sum, round) => sum + leadingAccepted(round.drafted, delta), 0) / rounds.length;
}

// ---- curves over the grid of deltas ----

/** Expected acceptance length and mean KL(h_alg||q) per grid delta; null before the first block. */
export function curves({ al, blocks, kl, judged }) {
  return {
    al: blocks > 0 ? al.map((sum) => sum / blocks) : null,
    kl: judged > 0 ? kl.map((sum) => sum / judged) : null,
  };
}

/** Where delta lies on the grid, as a fractional index. */
export function gridPosition(grid, delta) {
  const right = grid.findIndex((value) => value >= delta);
  if (right < 0) return grid.length - 1;
  if (right === 0 || grid[right] === delta) return right;
  return right - 1 + (delta - grid[right - 1]) / (grid[right] - grid[right - 1]);
}

export function nearestIndex(grid, delta) {
  return Math.round(gridPosition(grid, delta));
}

/** The curve's value at delta, and whether delta is a grid point or lies between two. */
export function interpolate(grid, values, delta) {
  const at = gridPosition(grid, delta);
  const left = Math.floor(at);
  const share = at - left;
  if (share === 0) return { value: values[left], exact: grid[left] === delta };
  return { value: values[left] * (1 - share) + values[left + 1] * share, exact: false };
}

// ---- the run log ----

export function emptyLog() {
  return { run: null, panes: [], baseline: null, sums: null };
}

function startRun(log, run) {
  const zeros = () => run.grid.map(() => 0);
  log.run = run;
  log.panes = run.panes.map((pane) => ({
    ...pane,
    rounds: [],
    kept: [],
    counts: Object.fromEntries(CLASSES.map((name) => [name, 0])),
    stats: null,
    end: null,
  }));
  log.baseline = null;
  log.sums = { al: zeros(), blocks: 0, kl: zeros(), judged: 0 };
}

function addRound(log, round) {
  const pane = log.panes[round.pane];
  const tokens = round.emitted ? [...round.drafted, round.emitted] : round.drafted;
  for (const token of tokens) {
    pane.counts[token.c] += 1;
    if (KEPT.has(token.c)) pane.kept.push(token);
  }
  pane.rounds.push(round);
  pane.stats = round.stats;
  if (round.curve) addCurve(log.sums, round.curve);
}

function addCurve(sums, curve) {
  curve.expected_al.forEach((value, at) => { sums.al[at] += value; });
  curve.kl.forEach((value, at) => { sums.kl[at] += value; });
  sums.blocks += 1;
  sums.judged += curve.judged;
}

/** Adds one record to the log, in place: a stream of some hundred records must not copy itself. */
export function addRecord(log, record) {
  if (record.k === 'run') startRun(log, record);
  if (record.k === 'round') addRound(log, record);
  if (record.k === 'end') log.panes[record.pane].end = record;
  if (record.k === 'baseline') log.baseline = record.tokens_per_s;
}

export function isKept(token) {
  return KEPT.has(token.c);
}

/** Exactly the generated text: no rejected or cut draft, no special token. */
export function plainText(kept) {
  return kept.filter((token) => !token.sp).map((token) => token.t).join('');
}

/** First index at or after `from` where two kept texts hold different tokens, or -1. */
export function firstDifference(left, right, from = 0) {
  const both = Math.min(left.length, right.length);
  for (let at = from; at < both; at += 1) {
    if (left[at].id !== right[at].id) return at;
  }
  return -1;
}

// ---- one token's distributions, for the detail panel ----

function less(whole, part) {
  return whole === null ? null : Math.max(0, whole - part);
}

/** Rows {id, text, p, q}: the recorded top tokens, those of `shown` that are not among them, and the rest. */
export function rowsOf({ top, rest }, shown) {
  const rows = top.map(([id, text, p, q]) => ({ id, text, p, q }));
  let [restP, restQ] = rest;
  for (const { id, t, p, q } of shown) {
    if (rows.some((row) => row.id === id)) continue;
    rows.push({ id, text: t, p, q });
    restP = less(restP, p);
    restQ = less(restQ, q);
  }
  return [...rows, { id: null, text: null, p: restP, q: restQ }];
}

/** The rows with h, the target once token `n` was drafted and raised; the rest scales like any other token. */
export function targetRows(token, n, raised, shown = [n]) {
  return rowsOf(token, shown).map((row) => (
    row.id === n.id ? { ...row, drafted: true, h: raised } : { ...row, drafted: false, h: scaledDown(row.q, n.q, raised) }
  ));
}
