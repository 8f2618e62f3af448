import assert from 'node:assert/strict';
import { test } from 'node:test';
import { positionOf } from '../../assets/rejudge.js';
import { disagreement, questionOf, valueText } from '../../assets/vocabulary.js';

const RUN = { prompt_ids: [1, 2], made_by: { verifier: 'v' }, settings: { temperature: 0.6, top_k: 20, top_p: 0.95, seed: 3 } };
const token = (id, c, p, q) => ({ id, c, p, q });
const FIRST = {
  drafted: [token(3, 'accepted', 0.3, 0.4), token(4, 'rescued', 0.5, 0.2), token(5, 'rejected', 0.7, 0.1), token(6, 'discarded', 0.2, 0.3)],
  emitted: token(7, 'resampled', 0.1, 0.6),
};
const SECOND = { drafted: [token(8, 'accepted', 0.9, 0.8)], emitted: { id: 9, c: 'bonus', q: 0.5 } };
const LAST = { drafted: [token(10, 'accepted', 0.9, 0.8), token(11, 'cut', 0.4, 0.3)], emitted: null };
const PANE = { rule: 'cactus', delta: 0.1, parameter: null, rounds: [FIRST, SECOND, LAST] };
const at = (round, one) => positionOf(RUN, PANE, round, one);

test('a draft is judged after the kept text and the drafts before it, rejected ones included', () => {
  assert.deepEqual(at(FIRST, FIRST.drafted[0]), { ids: [1, 2], steps: [1, 1], token: 3, drafted: true, p: 0.3, q: 0.4 });
  assert.deepEqual(at(FIRST, FIRST.drafted[3]), { ids: [1, 2, 3, 4, 5], steps: [1, 1, 1, 1, 1], token: 6, drafted: true, p: 0.2, q: 0.3 });
  assert.deepEqual(at(SECOND, SECOND.drafted[0]).ids, [1, 2, 3, 4, 7]);
  assert.deepEqual(at(LAST, LAST.drafted[1]).ids, [1, 2, 3, 4, 7, 8, 9, 10]);
  assert.deepEqual(at(LAST, LAST.drafted[1]).steps, [1, 1, 1, 1, 1, 2, 1]); // the draft had not read 8 when 9 came
});

test('a replacement stands where the rejected draft stood, a bonus where nothing was drafted', () => {
  assert.deepEqual(at(FIRST, FIRST.emitted), { ids: [1, 2, 3, 4], steps: [1, 1, 1, 1], token: 5, drafted: true, p: 0.7, q: 0.1 });
  assert.deepEqual(at(SECOND, SECOND.emitted), { ids: [1, 2, 3, 4, 7, 8], steps: [1, 1, 1, 1, 1, 1], token: 9, drafted: false, p: null, q: 0.5 });
});

test('a position with two equal drafts is told by the token itself', () => {
  const twice = { drafted: [token(3, 'accepted', 0.3, 0.4), token(3, 'accepted', 0.3, 0.4)], emitted: null };
  const pane = { ...PANE, rounds: [twice] };
  assert.deepEqual(positionOf(RUN, pane, twice, twice.drafted[1]).ids, [1, 2, 3]);
});

test('the question carries the rule with its own parameter and no recorded number', () => {
  const pane = { ...PANE, rule: 'tas', delta: null, parameter: { name: 'epsilon', value: 0.09 } };
  assert.deepEqual(questionOf(RUN, pane, at(SECOND, SECOND.emitted)), {
    made_by: { verifier: 'v' }, ids: [1, 2, 3, 4, 7, 8], steps: [1, 1, 1, 1, 1, 1], token: 9, drafted: false, rule: 'tas', delta: null, parameter: 0.09,
    temperature: 0.6, top_k: 20, top_p: 0.95,
  });
});

test('rounding is no disagreement, more is, and an unrecorded p is none', () => {
  assert.deepEqual(disagreement({ p: 0.3, q: 0.4 }, [0.30002, 0.39998]), []);
  assert.deepEqual(disagreement({ p: 0.3, q: 0.4 }, [0.3, 0.41]), [{ name: 'q', recorded: 0.4, again: 0.41 }]);
  assert.deepEqual(disagreement({ p: 0.3, q: 0.4 }, [0.2, 0.5]).map(({ name }) => name), ['p', 'q']);
  assert.deepEqual(disagreement({ p: null, q: 0.4 }, [0.9, 0.4]), []);
});

test('small values keep their size', () => {
  assert.deepEqual([0, 1, 0.4567, 0.001, 0.00099, 1.26e-12].map(valueText), ['0', '1.000', '0.457', '0.001', '9.9e−4', '1.3e−12']);
});
