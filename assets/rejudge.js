// The mathematics of the page and the reduction of the run log to what is drawn.
// No DOM and no wording here, so that node can test every line.
//
// p: draft distribution, q: verifier distribution, n: the drafted token, u: its uniform draw,
// gamma: the probability to which delta raises n, h: the target for n, all after the sampling filters.

import { gamma as raisedTo, phi, scaledDown } from './mathematics.js';

export const CLASSES = ['accepted', 'rescued', 'rejected', 'resampled', 'bonus', 'discarded', 'cut'];
const KEPT = new Set(['accepted', 'rescued', 'resampled', 'bonus']);
const PASSED = new Set(['accepted', 'rescued']);

// ---- the rule ----

export { phi, scaledDown };

/** The paper's rule, by which the page judges recorded draws anew. */
export function gamma(q, delta) {
  return raisedTo('kl', 'taylor', q, delta);
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
  return { run: null, panes: [], baseline: null, sums: null, frontier: null };
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
  log.frontier = null;
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
  if (record.k === 'frontier') log.frontier = record;
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

// ---- what one pass did, and how passes add up ----

/** One verifier pass in numbers; added: class of the token the verifier contributed, or null. */
export function passOf({ drafted, emitted }) {
  const count = (...names) => drafted.filter(({ c }) => names.includes(c)).length;
  return {
    drafted: drafted.length, kept: count(...PASSED), rejected: count('rejected'), discarded: count('discarded'), cut: count('cut'),
    added: emitted?.c ?? null,
  };
}

/**
 * The order of events of one pass, one state after each: the draft proposes token after token, the verifier reads
 * them all at once, verdicts fall from left to right up to the first rejection, the verifier adds its token.
 */
export function passBeats(round) {
  const { drafted, kept, rejected, added } = passOf(round);
  const steps = (many) => Array.from({ length: many }, (_, at) => at + 1);
  const state = { proposed: drafted, read: true, judged: kept + rejected, added: false };
  return [
    ...steps(drafted).map((proposed) => ({ phase: 'draft', proposed, read: false, judged: 0, added: false })),
    { ...state, phase: 'verify', judged: 0 },
    ...steps(kept + rejected).map((judged) => ({ ...state, phase: 'verdict', judged })),
    ...(added ? [{ ...state, phase: 'add', added: true }] : []),
  ];
}

/** How many passes kept 0, 1, ... drafts, up to `most` or the longest block. */
export function keptCounts(rounds, most) {
  const kept = rounds.map((round) => passOf(round).kept);
  const counts = Array.from({ length: Math.max(most, ...kept) + 1 }, () => 0);
  for (const many of kept) counts[many] += 1;
  return counts;
}

/** KL(h_alg||q) of the judged positions of a round; Infinity where the record could not hold it. */
export function spendingOf({ drafted }) {
  return drafted.filter(({ c }) => PASSED.has(c) || c === 'rejected').map((token) => ({ token, kl: token.kl ?? Infinity }));
}

// ---- tokens to teach with ----

/** The smallest delta of the grid at which the recorded draw accepts the token; undefined for none. */
export function firstAccepting(grid, token) {
  return grid.find((delta) => acceptedAt(token, delta));
}

/** Whether delta is the smallest that does, as far as the slider can tell: 'low', 'right' or 'high'. */
export function judgeAnswer(grid, token, delta) {
  if (!acceptedAt(token, delta)) return 'low';
  return delta <= firstAccepting(grid, token) ? 'right' : 'high';
}

const CLEAR = { from: 0.004, to: 0.6 }; // critical deltas well inside the slider
const WORD = /^\s?\p{L}{2,}$/u;

function clarity({ token, round }) {
  const at = round.drafted.indexOf(token);
  const midst = at > 0 && at < round.drafted.length - 1; // something was kept before it and thrown away behind it
  return (WORD.test(token.t) ? 2 : 0) + (token.dc >= CLEAR.from && token.dc <= CLEAR.to ? 2 : 0) + (midst ? 1 : 0);
}

/**
 * Rejected tokens {token, round, pane} that some delta of the slider would have kept, the clearest first: those of SpS before
 * those of other rules, words before marks.
 */
export function teachingTokens({ run, panes }) {
  const rank = ({ rule }) => ({ sps: 0, cactus: 1 })[rule] ?? 2;
  return [...panes].sort((a, b) => rank(a) - rank(b))
    .flatMap((pane) => pane.rounds.flatMap((round) => (
      round.drafted.filter(({ c }) => c === 'rejected').map((token) => ({ token, round, pane }))
    )))
    .filter(({ token }) => token.dc > 0 && firstAccepting(run.grid, token) !== undefined)
    .sort((a, b) => (rank(a.pane) - rank(b.pane)) || (clarity(b) - clarity(a)));
}

// ---- one token's distributions, for the detail panel ----

/**
 * What a token was judged in, to be computed again: {ids of the text before it, steps, token, drafted, p, q}. What replaced a rejected
 * draft stands at that draft's position; a bonus has nothing drafted, and no recorded p.
 *
 * steps: how many of the ids the draft read at a time. On eight-bit kernels its p depends on that: a last bit decides how a value is
 * rounded. The prompt but its last token comes at once, then what is not cached yet, then every drafted token but the block's last.
 */
export function positionOf(run, pane, round, token) {
  const ids = [...run.prompt_ids];
  const steps = ids.length > 1 ? [ids.length - 1] : [];
  let read = ids.length - 1;
  const draftReads = (many) => {
    if (ids.length > read) steps.push(ids.length - read);
    steps.push(...Array.from({ length: many }, () => 1));
    read = ids.length + many;
  };
  for (const { drafted, emitted } of pane.rounds.slice(0, pane.rounds.indexOf(round))) {
    const kept = drafted.filter(isKept);
    if (drafted.length > 0) draftReads(Math.min(kept.length, drafted.length - 1));
    ids.push(...kept.map(({ id }) => id), ...(emitted ? [emitted.id] : []));
  }
  const place = round.drafted.includes(token) ? round.drafted.indexOf(token) : round.drafted.filter(isKept).length;
  draftReads(place);
  const { id, p, q } = round.drafted[place] ?? token;
  return {
    ids: [...ids, ...round.drafted.slice(0, place).map((one) => one.id)], steps, token: id, drafted: place < round.drafted.length,
    p: p ?? null, q,
  };
}

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
