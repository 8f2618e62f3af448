import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';
import {
  CLASSES, acceptedAt, addRecord, blockThresholds, curves, emptyLog, firstDifference, gamma, gridPosition,
  interpolate, leadingAccepted, phi, plainText, recordedVerdict, rowsOf, sameDraws, targetRows, threshold, verdictAt,
} from '../../assets/rejudge.js';

const vectors = JSON.parse(readFileSync(new URL('../data/vectors.json', import.meta.url), 'utf8'));
const GRID = [0, 0.1, 1, 2];

function near(actual, expected, tolerance = 1e-12) {
  assert.ok(Math.abs(actual - expected) <= tolerance, `${actual} is not ${expected}`);
}

/** A drafted token whose class and critical delta follow from p, q and u at the delta of the run. */
function drafted(fields, delta) {
  const token = { id: 1, t: 'x', ...fields };
  const short = token.u * token.p - token.q;
  token.dc = token.q === 0 ? null : short < 0 ? 0 : short ** 2 / (2 * token.q * (1 - token.q));
  token.c ??= acceptedAt(token, delta) ? (short < 0 ? 'accepted' : 'rescued') : 'rejected';
  return token;
}

function run() {
  const log = emptyLog();
  addRecord(log, {
    k: 'run', grid: GRID, panes: [{ rule: 'sps', label: 'SpS', delta: 0 }, { rule: 'cactus', label: 'Cactus', delta: 0.1 }],
  });
  return log;
}

test('gamma, phi and the expected acceptance agree with the brute-force vectors', () => {
  let compared = 0;
  for (const { p, q, cactus } of vectors.cases) {
    for (const entry of cactus.filter(({ solver }) => solver === 'taylor')) {
      q.forEach((value, x) => {
        near(gamma(value, entry.delta), entry.gamma[x]);
        if (p[x] > 0) near(phi(p[x], gamma(value, entry.delta)), entry.accept_prob[x]);
        compared += 1;
      });
      near(p.reduce((sum, px, x) => sum + Math.min(px, gamma(q[x], entry.delta)), 0), entry.acceptance);
    }
  }
  assert.ok(compared > 500);
});

test('gamma at its edges', () => {
  assert.equal(gamma(0.3, 0), 0.3);
  assert.equal(gamma(0, 2), 0);
  assert.equal(gamma(1, 2), 1);
  assert.equal(gamma(0.5, 2), 1);
});

test('q = 0 is never accepted, not even by u = 0', () => {
  const token = { p: 0.5, q: 0, u: 0, dc: null };
  assert.equal(acceptedAt(token, 2), false);
  token.u = 0.4;
  assert.equal(threshold(token), Infinity);
});

test('a threshold separates rejection from acceptance', () => {
  for (let at = 0; at < 2000; at += 1) {
    const token = drafted({ p: (at % 37) / 37 + 0.01, q: (at % 41) / 42, u: (at % 53) / 53 }, 0);
    const limit = threshold(token);
    if (limit === -Infinity) assert.ok(acceptedAt(token, 0));
    else if (limit === Infinity) assert.ok(!acceptedAt(token, 1e6));
    else {
      assert.ok(!acceptedAt(token, limit * (1 - 1e-9)));
      assert.ok(acceptedAt(token, limit * (1 + 1e-9) + 1e-12));
    }
  }
});

test('a block is judged up to its first rejection', () => {
  const block = [
    drafted({ p: 0.5, q: 0.6, u: 0.9 }, 0),
    drafted({ p: 0.9, q: 0.3, u: 0.5 }, 0), // accepted once delta > 0.0536
    drafted({ p: 0.5, q: 0.6, u: 0.1, c: 'discarded' }, 0),
    drafted({ p: 0.9, q: 0.1, u: 0.9, c: 'discarded' }, 0), // accepted once delta > 2.8
  ];
  assert.deepEqual([0, 0.05, 0.06, 2].map((delta) => leadingAccepted(block, delta)), [1, 1, 3, 3]);
  const verdicts = (delta) => blockThresholds(block).map((pair) => verdictAt(pair, delta));
  assert.deepEqual(verdicts(0), block.map(recordedVerdict));
  assert.deepEqual(verdicts(0), ['accept', 'reject', 'discard', 'discard']);
  assert.deepEqual(verdicts(1), ['accept', 'accept', 'accept', 'reject']);
  assert.deepEqual(verdicts(3), ['accept', 'accept', 'accept', 'accept']);
});

test('nothing behind a drafted end token is ever reached', () => {
  const block = [
    drafted({ p: 0.9, q: 0.3, u: 0.5 }, 0), // the end token, rejected; accepted once delta > 0.0536
    { ...drafted({ p: 0.5, q: 0.6, u: 0.1, c: 'discarded' }, 0), dc: null },
  ];
  assert.equal(leadingAccepted(block, 2), 1);
  assert.deepEqual(blockThresholds(block).map((pair) => verdictAt(pair, 2)), ['accept', 'discard']);
});

test('verdicts per token count as many acceptances as the block rule, at every delta', () => {
  const block = Array.from({ length: 7 }, (_, at) => drafted({ p: 0.8, q: 0.1 + at / 11, u: ((at * 5) % 7) / 7 }, 0));
  for (const delta of [0, 0.001, 0.02, 0.1, 0.5, 2]) {
    const accepts = blockThresholds(block).filter((pair) => verdictAt(pair, delta) === 'accept').length;
    assert.equal(accepts, leadingAccepted(block, delta));
  }
});

test('the same draws give the recorded acceptance length at the delta of the run', () => {
  const block = [drafted({ p: 0.5, q: 0.6, u: 0.9 }, 0), drafted({ p: 0.9, q: 0.3, u: 0.5 }, 0)];
  const cut = [drafted({ p: 0.5, q: 0.6, u: 0.9 }, 0), drafted({ p: 0.5, q: 0.6, u: 0.9, c: 'cut' }, 0)];
  assert.equal(sameDraws([{ drafted: block }, { drafted: cut }], 0), 1);
  assert.equal(sameDraws([{ drafted: block }, { drafted: [] }, { drafted: cut }], 0), 2 / 3);
  assert.equal(sameDraws([], 0), null);
});

test('curves average blocks and judged positions', () => {
  const log = run();
  const round = (al, kl, judged) => ({
    k: 'round', pane: 0, block: 0, drafted: [], emitted: null, stats: {}, curve: { expected_al: al, kl, judged },
  });
  assert.deepEqual(curves(log.sums), { al: null, kl: null });
  addRecord(log, round([1, 2, 3, 4], [0, 0.1, 0.2, 0.4], 1));
  addRecord(log, round([3, 4, 5, 5], [0, 0.2, 0.4, 0.8], 3));
  addRecord(log, { ...round([], [], 0), curve: null });
  const { al, kl } = curves(log.sums);
  assert.deepEqual(al, [2, 3, 4, 4.5]);
  addRecord(log, round([0, 0, 0, 0], [0, 0, 0, 0], 0)); // a pass that drafted nothing counts, as in the figures under a pane
  assert.deepEqual(curves(log.sums).al, [4, 6, 8, 9].map((value) => value / 3));
  [0, 0.075, 0.15, 0.3].forEach((value, at) => near(kl[at], value));
});

test('interpolation is exact on the grid and linear in delta between its points', () => {
  assert.deepEqual(interpolate(GRID, [1, 2, 4, 6], 0.1), { value: 2, exact: true });
  assert.deepEqual(interpolate(GRID, [1, 2, 4, 6], 2), { value: 6, exact: true });
  const between = interpolate(GRID, [1, 2, 4, 6], 0.55);
  near(between.value, 3);
  assert.equal(between.exact, false);
  near(gridPosition(GRID, 1.5), 2.5);
  assert.equal(gridPosition(GRID, 5), 3);
});

test('counts cover every record once and the text holds only what was kept', () => {
  const log = run();
  const token = (i, c, t, more = {}) => ({ i, id: i, t, c, ...more });
  addRecord(log, {
    k: 'round', pane: 1, block: 0, stats: { tokens: 4 }, curve: null,
    drafted: [token(0, 'accepted', ' a'), token(1, 'rescued', '\n'), token(2, 'rejected', 'X'), token(3, 'discarded', 'Y')],
    emitted: token(2, 'resampled', '<b>'),
  });
  addRecord(log, {
    k: 'round', pane: 1, block: 1, stats: { tokens: 7 }, curve: null,
    drafted: [token(3, 'accepted', '', { x: 'F0 9F' }), token(4, 'accepted', '😀'),
      token(5, 'accepted', '<|im_end|>', { sp: true }), token(6, 'cut', 'Z')],
    emitted: null,
  });
  addRecord(log, { k: 'end', pane: 1, reason: 'eos', message: null });
  const pane = log.panes[1];
  assert.equal(plainText(pane.kept), ' a\n<b>😀');
  assert.equal(Object.values(pane.counts).reduce((sum, count) => sum + count, 0), 9);
  assert.deepEqual(Object.keys(pane.counts), CLASSES);
  assert.equal(pane.stats.tokens, 7);
  assert.equal(pane.end.reason, 'eos');
});

test('a new run replaces the old one', () => {
  const log = run();
  addRecord(log, { k: 'baseline', tokens_per_s: 7 });
  addRecord(log, { k: 'run', grid: [0, 1], panes: [{ rule: 'sps', label: 'SpS', delta: 0 }] });
  assert.equal(log.panes.length, 1);
  assert.equal(log.baseline, null);
  assert.deepEqual(log.sums.al, [0, 0]);
});

test('the first difference of two texts', () => {
  const ids = (...list) => list.map((id) => ({ id }));
  assert.equal(firstDifference(ids(1, 2, 3), ids(1, 2, 4)), 2);
  assert.equal(firstDifference(ids(1, 2), ids(1, 2, 4)), -1);
  assert.equal(firstDifference(ids(1, 9, 3), ids(1, 2, 3), 2), -1);
});

test('p, q and h of a token each keep their sum, whether or not the top holds it', () => {
  const sum = (rows, key) => rows.reduce((total, row) => total + row[key], 0);
  const n = { id: 7, t: 'n', p: 0.5, q: 0.2 };
  const inside = { top: [[7, 'n', 0.5, 0.2], [8, 'm', 0.3, 0.6]], rest: [0.2, 0.2] };
  const outside = { top: [[8, 'm', 0.3, 0.6]], rest: [0.7, 0.4] };
  for (const token of [inside, outside]) {
    const rows = targetRows(token, n, gamma(n.q, 0.1));
    for (const key of ['p', 'q', 'h']) near(sum(rows, key), 1);
    assert.equal(rows.filter((row) => row.drafted).length, 1);
  }
  const both = targetRows(outside, n, gamma(n.q, 0.1), [n, { id: 9, t: 'drawn', p: 0.1, q: 0.1 }]);
  assert.deepEqual(both.map((row) => row.id), [8, 7, 9, null]);
  for (const key of ['p', 'q', 'h']) near(sum(both, key), 1);
  const sure = targetRows({ top: [[7, 'n', 1, 1]], rest: [0, 0] }, { id: 7, t: 'n', p: 1, q: 1 }, 1);
  near(sum(sure, 'h'), 1);
});

test('rows of a bonus token keep an unknown p unknown', () => {
  const token = { id: 3, t: 'c', p: null, q: 0.1, top: [[1, 'a', null, 0.6], [2, 'b', null, 0.2]], rest: [null, 0.2] };
  const rows = rowsOf(token, [token]);
  assert.ok(rows.every((row) => row.p === null));
  near(rows.at(-1).q, 0.1);
});
