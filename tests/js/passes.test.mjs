import assert from 'node:assert/strict';
import { test } from 'node:test';
import {
  addRecord, emptyLog, firstAccepting, judgeAnswer, keptCounts, passBeats, passOf, spendingOf, teachingTokens,
} from '../../assets/rejudge.js';

const GRID = [0, 0.01, 0.1, 0.5, 2];
const token = (c, more = {}) => ({ i: 0, id: 1, t: ' word', c, p: 0.8, q: 0.35, u: 0.7, dc: 0.0969, kl: 0.1, ...more });
const round = (classes, added = null, more = {}) => ({
  k: 'round', pane: 0, block: 0, drafted: classes.map((c) => token(c)), emitted: added && { i: 9, id: 2, t: 'x', c: added }, stats: {},
  curve: null, ...more,
});

test('a pass is counted by what became of its drafts', () => {
  const rejected = round(['accepted', 'rescued', 'rejected', 'discarded', 'discarded'], 'resampled');
  assert.deepEqual(passOf(rejected), { drafted: 5, kept: 2, rejected: 1, discarded: 2, cut: 0, added: 'resampled' });
  assert.deepEqual(passOf(round(['accepted', 'cut'])), { drafted: 2, kept: 1, rejected: 0, discarded: 0, cut: 1, added: null });
});

test('a pass plays drafts one by one, one verification, verdicts up to the rejection, the replacement', () => {
  const beats = passBeats(round(['accepted', 'rejected', 'discarded'], 'resampled'));
  assert.deepEqual(beats.map(({ phase }) => phase), ['draft', 'draft', 'draft', 'verify', 'verdict', 'verdict', 'add']);
  assert.deepEqual(beats.map(({ proposed }) => proposed), [1, 2, 3, 3, 3, 3, 3]);
  assert.deepEqual(beats.map(({ read }) => read), [false, false, false, true, true, true, true]);
  assert.deepEqual(beats.map(({ judged }) => judged), [0, 0, 0, 0, 1, 2, 2]);
  assert.deepEqual(beats.map(({ added }) => added), [false, false, false, false, false, false, true]);
});

test('a pass that drafted or added nothing still has its verification', () => {
  assert.deepEqual(passBeats(round([], 'bonus')).map(({ phase }) => phase), ['verify', 'add']);
  assert.deepEqual(passBeats(round(['accepted', 'cut'])).map(({ phase }) => phase), ['draft', 'draft', 'verify', 'verdict']);
});

test('the histogram counts every pass once and its mean is the acceptance length', () => {
  const rounds = [round(['accepted', 'accepted']), round(['rejected']), round([]), round(['accepted', 'rejected'])];
  const counts = keptCounts(rounds, 4);
  assert.deepEqual(counts, [2, 1, 1, 0, 0]);
  assert.equal(counts.reduce((sum, many) => sum + many, 0), rounds.length);
  assert.equal(counts.reduce((sum, many, kept) => sum + many * kept, 0) / rounds.length, 3 / 4);
  assert.deepEqual(keptCounts([round(['accepted', 'accepted'])], 1), [0, 0, 1]); // a longer block than the settings say
  assert.deepEqual(keptCounts([], 2), [0, 0, 0]);
});

test('divergence is spent at judged positions only, and what the record could not hold is infinite', () => {
  const spent = spendingOf({
    drafted: [token('accepted'), token('rescued', { kl: 0 }), token('rejected', { kl: null }), token('discarded'), token('cut')],
  });
  assert.deepEqual(spent.map(({ kl }) => kl), [0.1, 0, Infinity]);
});

test('an answer is right from the critical delta to the first step of the slider above it', () => {
  const asked = token('rejected');
  assert.equal(firstAccepting(GRID, asked), 0.1);
  assert.deepEqual([0, 0.01, 0.0968, 0.097, 0.1, 0.11, 2].map((delta) => judgeAnswer(GRID, asked, delta)),
    ['low', 'low', 'low', 'right', 'right', 'high', 'high']);
  assert.equal(firstAccepting(GRID, token('rejected', { q: 0 })), undefined);
});

test('tokens to teach with: rejected, within reach of the slider, clearest first, SpS before others', () => {
  const log = emptyLog();
  addRecord(log, { k: 'run', grid: GRID, panes: [{ rule: 'cactus', label: 'Cactus', delta: 0.01 }, { rule: 'sps', label: 'SpS', delta: 0 }] });
  const add = (pane, t, more) => addRecord(log, round([], null, { pane, drafted: [token('rejected', { t, ...more })] }));
  add(0, ' other');
  add(1, ',');
  add(1, ' plain');
  add(1, ' never', { q: 0, dc: null });
  add(1, ' beyond', { p: 1, q: 0.01, u: 0.99, dc: 48 });
  add(1, ' always', { u: 0.1, dc: 0 });
  const middle = round(['accepted', 'rejected', 'discarded'], 'resampled', { pane: 1 });
  middle.drafted[1].t = ' middle';
  addRecord(log, middle);
  assert.deepEqual(teachingTokens(log).map((entry) => entry.token.t), [' middle', ' plain', ',', ' other']);
  const [first] = teachingTokens(log);
  assert.equal(first.pane.rule, 'sps');
  assert.ok(first.round.drafted.includes(first.token));
});

test('the frontier belongs to its run', () => {
  const log = emptyLog();
  const run = { k: 'run', grid: GRID, panes: [{ rule: 'sps', label: 'SpS', delta: 0 }] };
  addRecord(log, run);
  addRecord(log, { k: 'frontier', contexts: 'SpS', rules: [], optimum: [] });
  assert.deepEqual(log.frontier.rules, []);
  addRecord(log, run);
  assert.equal(log.frontier, null);
});
