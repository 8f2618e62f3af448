import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';
import {
  DIVERGENCES, acceptance, certainFrom, divergence, effective, entropy, frontier, gamma, kl, optimum, phi, rules, standing, sum, tv,
} from '../../assets/mathematics.js';

const { cases } = JSON.parse(readFileSync(new URL('../data/vectors.json', import.meta.url), 'utf8'));
const TOLERANCE = 1e-9;
const DELTAS = [0, 1e-6, 1e-3, 0.01, 0.1, 0.2112, 0.5, 1, 2];
const METHODS = Object.entries(DIVERGENCES).flatMap(([name, { curvature }]) => (
  [...(curvature === null ? [] : ['taylor']), 'exact'].map((solver) => ({ divergence: name, solver }))
));

function near(actual, expected, tolerance = TOLERANCE, about = '') {
  assert.ok(actual === expected || Math.abs(actual - expected) <= tolerance, `${actual} is not ${expected} ${about}`);
}

function allNear(actual, expected, tolerance = TOLERANCE, about = '') {
  assert.equal(actual.length, expected.length);
  actual.forEach((value, at) => near(value, expected[at], tolerance, `${about} at ${at}`));
}

/** Reproducible uniform numbers (mulberry32). */
function uniforms(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

function distribution(uniform, size, power) {
  const weights = Array.from({ length: size }, () => (-Math.log(1 - uniform())) ** power);
  return weights.map((weight) => weight / sum(weights));
}

/** Pairs p ≠ q of 2 to 8 tokens, flat and peaked; every fifth verifier excludes a token. */
function* pairs(count) {
  const uniform = uniforms(7);
  for (let at = 0; at < count; at += 1) {
    const size = 2 + (at % 7);
    const p = distribution(uniform, size, 1 + (at % 4));
    let q = distribution(uniform, size, 1 + (at % 3));
    if (at % 5 === 0) {
      q = q.with(0, 0);
      q = q.map((x) => x / sum(q));
    }
    yield { p, q };
  }
}

test('Cactus agrees with the brute-force vectors', () => {
  for (const { name, p, q, cactus } of cases) {
    for (const expected of cactus) {
      const about = `${name}, ${expected.solver}, delta ${expected.delta}`;
      const rule = rules.cactus({ divergence: 'kl', ...expected });
      const raised = rule.gamma(p, q);
      const out = effective(rule, p, q);
      allNear(raised, expected.gamma, TOLERANCE, about);
      allNear(p.map((x, at) => phi(x, raised[at])), expected.accept_prob, TOLERANCE, about);
      near(acceptance(rule, p, q), expected.acceptance, TOLERANCE, about);
      allNear(out, expected.effective, TOLERANCE, about);
      near(kl(out, q), expected.kl_effective_q ?? Infinity, TOLERANCE, about);
      near(tv(out, q), expected.tv_effective_q, TOLERANCE, about);
    }
  }
});

test('SpS agrees with the vectors and returns the verifier', () => {
  for (const { p, q, sps, kl_p_q: given } of cases) {
    near(acceptance(rules.sps(), p, q), sps.acceptance);
    allNear(effective(rules.sps(), p, q), q);
    near(kl(p, q), given ?? Infinity);
  }
});

test('typical acceptance agrees with the vectors', () => {
  for (const { p, q, tas } of cases) {
    for (const expected of tas) {
      const rule = rules.tas(expected);
      near(rule.threshold(q), expected.threshold);
      assert.deepEqual(rule.gamma(p, q).map((x) => x > 0), expected.accept);
      near(acceptance(rule, p, q), expected.acceptance);
      allNear(effective(rule, p, q), expected.effective);
    }
  }
});

test('interpolation agrees with the vectors', () => {
  for (const { p, q, interp } of cases) {
    for (const expected of interp) {
      const rule = rules.interpolation({ a: expected.alpha });
      near(acceptance(rule, p, q), expected.acceptance);
      allNear(effective(rule, p, q), expected.effective);
    }
  }
});

test('the optimum agrees with the vectors', () => {
  for (const { p, q, optimal } of cases) {
    for (const expected of optimal) {
      const best = optimum(p, q, expected.kl_budget);
      near(best.acceptance, expected.acceptance);
      near(best.kl, expected.kl);
      allNear(best.h, expected.effective);
    }
  }
});

test('an exact gamma is the largest that the budget allows, within 1e-12', () => {
  const spent = (name, raised, q) => divergence(name, [raised, 1 - raised], [q, 1 - q]);
  for (const name of Object.keys(DIVERGENCES)) {
    for (const q of [1e-9, 1e-3, 0.05, 0.35, 0.5, 0.9, 0.999]) {
      for (const delta of DELTAS) {
        const raised = gamma(name, 'exact', q, delta);
        const about = `${name}, q ${q}, delta ${delta}`;
        assert.ok(raised >= q && raised <= 1, about);
        assert.ok(spent(name, Math.max(q, raised - 1e-12), q) <= delta + 1e-15, about);
        if (raised < 1 - 1e-12) assert.ok(spent(name, raised + 1e-12, q) > delta, about);
      }
    }
  }
});

test('at delta 0 gamma is q exactly, at q = 0 it is 0 and at q = 1 it is 1, under every divergence', () => {
  for (const { divergence: name, solver } of METHODS) {
    for (const q of [1e-12, 0.1, 0.35, 1]) assert.equal(gamma(name, solver, q, 0), q);
    for (const delta of DELTAS) {
      assert.equal(gamma(name, solver, 0, delta), 0);
      assert.equal(gamma(name, solver, 1, delta), 1);
    }
  }
});

test('gamma is 1 from a certain delta on', () => {
  for (const { divergence: name, solver } of METHODS) {
    for (const q of [0.05, 0.35, 0.8]) {
      const enough = certainFrom(name, solver, q);
      assert.ok(gamma(name, solver, q, enough * 0.99) < 1 || enough === Infinity);
      if (enough < Infinity) near(gamma(name, solver, q, enough * (1 + 1e-12)), 1, 1e-12);
    }
  }
  near(certainFrom('kl', 'taylor', 1 / 3), 1);
  near(certainFrom('kl', 'exact', 0.2), -Math.log(0.2));
  assert.equal(certainFrom('reverse_kl', 'exact', 0.5), Infinity);
});

test('Taylor approaches the exact gamma as delta goes to 0', () => {
  for (const { divergence: name } of METHODS.filter(({ solver }) => solver === 'taylor')) {
    const [taylor, exact] = ['taylor', 'exact'].map((solver) => gamma(name, solver, 0.3, 1e-8) - 0.3);
    near(taylor / exact, 1, 1e-3, name);
  }
});

test('total variation has no Taylor form', () => {
  assert.throws(() => gamma('tv', 'taylor', 0.3, 0.1), RangeError);
  near(gamma('tv', 'exact', 0.3, 0.1), 0.4);
});

test('divergences against their textbook sums', () => {
  const textbook = {
    kl: (h, q) => sum(h.map((x, at) => x * Math.log(x / q[at]))),
    reverse_kl: (h, q) => sum(h.map((x, at) => q[at] * Math.log(q[at] / x))),
    chi2: (h, q) => sum(h.map((x, at) => (x - q[at]) ** 2 / q[at])),
    tv: (h, q) => sum(h.map((x, at) => Math.abs(x - q[at]))) / 2,
    hellinger: (h, q) => 1 - sum(h.map((x, at) => Math.sqrt(x * q[at]))),
    js: (h, q) => entropy(h.map((x, at) => (x + q[at]) / 2)) - (entropy(h) + entropy(q)) / 2,
  };
  const uniform = uniforms(3);
  for (let at = 0; at < 200; at += 1) {
    const [h, q] = [distribution(uniform, 5, 2), distribution(uniform, 5, 1)];
    for (const [name, value] of Object.entries(textbook)) near(divergence(name, h, q), value(h, q), 1e-9 * (1 + value(h, q)), name);
  }
});

test('excluded tokens: infinite where f forbids them, finite where it does not', () => {
  const [h, q] = [[0.5, 0.5], [1, 0]];
  assert.equal(kl(h, q), Infinity);
  assert.equal(divergence('chi2', h, q), Infinity);
  near(divergence('reverse_kl', h, q), Math.LN2);
  near(tv(h, q), 0.5);
  near(divergence('hellinger', h, q), 1 - Math.SQRT1_2);
  near(divergence('js', h, q), entropy([0.75, 0.25]) - entropy(h) / 2);
  assert.equal(kl([1, 0], [1, 0]), 0);
});

test('small divergences are neither negative nor lost', () => {
  for (const name of Object.keys(DIVERGENCES)) {
    for (const shift of [1e-3, 1e-6, 1e-9]) {
      const value = divergence(name, [0.3 + shift, 0.7 - shift], [0.3, 0.7]);
      const { curvature } = DIVERGENCES[name];
      const expected = curvature === null ? shift : (curvature * shift ** 2) / (2 * 0.3 * 0.7);
      near(value / expected, 1, 5e-3, `${name} ${shift}`);
    }
    assert.equal(divergence(name, [0.3, 0.7], [0.3, 0.7]), 0);
  }
});

test('the worked example', () => {
  const [p, q, n] = [[0.05, 0.8, 0.15], [0.3, 0.35, 0.35], 1];
  const rule = rules.cactus({ divergence: 'kl', solver: 'taylor', delta: 0.2112 });
  near(phi(p[n], q[n]), 0.4375);
  near(rule.gamma(p, q)[n], 0.66, 1e-4);
  near(phi(p[n], rule.gamma(p, q)[n]), 0.82, 0.005);
  allNear(rule.target(p, q, n), [0.16, 0.66, 0.18], 0.005);
  near(kl(rule.target(p, q, n), q), 0.2, 0.005);
  near(acceptance(rules.sps(), p, q), 0.55);
  near(acceptance(rules.cactus({ divergence: 'kl', solver: 'taylor', delta: 0.1 }), p, q), 0.76, 0.005);
});

test('what comes out is a distribution, coupled optimally with p, and no further from q than p is', () => {
  for (const { p, q } of pairs(300)) {
    for (const method of METHODS) {
      let before = 0;
      for (const delta of DELTAS) {
        const rule = rules.cactus({ ...method, delta });
        const [h, raised] = [effective(rule, p, q), rule.gamma(p, q)];
        near(sum(h), 1, 1e-12);
        h.forEach((x, at) => assert.ok(x >= 0 && x <= raised[at] + 1e-12));
        near(sum(h.map((x, at) => Math.min(x, p[at]))), acceptance(rule, p, q), 1e-12);
        const spent = kl(h, q);
        assert.ok(spent <= kl(p, q) + 1e-12);
        if (method.divergence === 'kl') assert.ok(spent >= before - 1e-12);
        before = spent;
      }
    }
  }
});

test('the target is a distribution; its KL stays below ln(1 + 2 delta), and below delta with the exact solver', () => {
  for (const { p, q } of pairs(300)) {
    for (const delta of DELTAS) {
      for (const n of q.keys()) {
        const target = (solver) => rules.cactus({ divergence: 'kl', solver, delta }).target(p, q, n);
        const [taylor, exact] = [target('taylor'), target('exact')];
        near(sum(taylor), 1, 1e-12);
        assert.ok(kl(taylor, q) <= Math.log1p(2 * delta) + 1e-12);
        assert.ok(kl(exact, q) <= delta + 1e-12);
        if (taylor[n] < 1 && q[n] > 0) near(divergence('chi2', taylor, q), 2 * delta, 1e-9);
      }
    }
  }
});

test('a replacement is never empty', () => {
  for (const { p, q } of pairs(200)) {
    for (const rule of [rules.sps(), rules.tas(), rules.interpolation({ a: 0.3 }), rules.interpolation({ a: 1 })]) {
      for (const n of q.keys()) near(sum(rule.recovery(p, q, n)), 1, 1e-12);
    }
  }
});

test('an exact gamma below its certain budget stays below 1, however close', () => {
  for (const q of [0.9, 0.999, 1 - 1e-9]) {
    const raised = gamma('reverse_kl', 'exact', q, 2);
    assert.ok(raised < 1 && raised > q);
    assert.ok(divergence('reverse_kl', [raised, 1 - raised], [q, 1 - q]) <= 2);
  }
});

test('the optimum is as exact where one token is a trillion times likelier under p', () => {
  const [p, q] = [[0.5, 0.2, 0.3], [1e-13, 0.4, 0.6 - 1e-13]];
  near(optimum(p, q, 1e-3).kl, 1e-3, 1e-12);
});

test('the optimum keeps its budget, grows with it, and no rule beats it', () => {
  for (const { p, q } of pairs(60)) {
    let before = -Infinity;
    for (const budget of [0, 0.001, 0.01, 0.1, 0.5, 100]) {
      const best = optimum(p, q, budget);
      near(sum(best.h), 1, 1e-12);
      assert.ok(best.kl <= budget + 1e-12 && best.acceptance >= before - 1e-12);
      before = best.acceptance;
    }
    near(optimum(p, q, 0).acceptance, acceptance(rules.sps(), p, q), 1e-9);
    near(optimum(p, q, 100).acceptance, sum(p.filter((_, at) => q[at] > 0)), 1e-9);
    const raising = METHODS.map((method) => rules.cactus({ ...method, delta: 0.1 }));
    for (const rule of [rules.tas(), rules.interpolation({ a: 0.5 }), ...raising]) {
      const at = standing(rule, p, q);
      if (at.kl < Infinity) assert.ok(at.acceptance <= optimum(p, q, at.kl).acceptance + 1e-6);
    }
  }
});

test('the frontier runs from the verifier to all that it allows, through the optima', () => {
  for (const { p, q } of pairs(40)) {
    const points = frontier(p, q);
    near(points[0].kl, 0, 1e-12);
    near(points[0].acceptance, acceptance(rules.sps(), p, q));
    near(points.at(-1).acceptance, sum(p.filter((_, at) => q[at] > 0)));
    points.forEach((point, at) => {
      near(point.acceptance, optimum(p, q, point.kl).acceptance, 1e-6);
      if (at > 0) assert.ok(point.kl >= points[at - 1].kl - 1e-12);
    });
  }
});
