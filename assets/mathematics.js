// Divergences, acceptance rules and the best possible rule, on whole distributions. No DOM and no wording here, so that
// node can test every line; the Python twins are cactus/divergences.py and cactus/rules.py.
//
// p: draft distribution, q: verifier distribution, n: the drafted token, delta: the divergence budget,
// gamma: the probability to which the budget raises q(n), h: the target once n is drafted,
// h_alg ("effective"): what comes out, averaged over n and over accepting or replacing it. Logarithms are natural.

const HALVINGS = 110; // enough for neighbouring numbers from a bracket as wide as a ratio of probabilities can be
const BELOW_ONE = 1 - Number.EPSILON / 2;

export function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

/** Where `reached` turns from false to true between low and high: the last number found before it. */
function bisect(reached, low, high) {
  for (let halving = 0; halving < HALVINGS; halving += 1) {
    const middle = (low + high) / 2;
    if (middle <= low || middle >= high) break;
    if (reached(middle)) high = middle;
    else low = middle;
  }
  return low;
}

// ---- divergences ----
// D_f(h ‖ q) = Σ q f(h/q). Each f is written as a function of s = h/q − 1 and without its linear part, which sums to
// nothing over distributions: every term is then at least 0, and small differences keep their digits.

const SMALL = 0.03;
const TERMS = 11; // SMALL ** TERMS is below rounding

function series(s, coefficient) {
  let total = 0;
  for (let term = TERMS; term >= 0; term -= 1) total = coefficient(term) - s * total;
  return s * s * total;
}

/** t ln t with t = 1 + s. */
function klTerm(s) {
  if (s <= -1) return 1;
  if (Math.abs(s) < SMALL) return series(s, (term) => 1 / ((term + 1) * (term + 2)));
  return (1 + s) * Math.log1p(s) - s;
}

/** −ln t with t = 1 + s. */
function reverseKlTerm(s) {
  if (Math.abs(s) < SMALL) return series(s, (term) => 1 / (term + 2));
  return s - Math.log1p(s);
}

/**
 * f: see above; slope: limit of f(s)/s, the price of mass where q = 0; curvature: f''(1), null where there is none;
 * closed: the exact gamma from 0 < q < 1 and delta > 0, where it has a closed form.
 */
export const DIVERGENCES = {
  kl: { curvature: 1, slope: Infinity, f: klTerm },
  reverse_kl: { curvature: 1, slope: 1, f: reverseKlTerm },
  chi2: { curvature: 2, slope: Infinity, f: (s) => s * s, closed: (q, delta) => q + Math.sqrt(delta * q * (1 - q)) },
  tv: { curvature: null, slope: 0.5, f: (s) => Math.abs(s) / 2, closed: (q, delta) => q + delta },
  hellinger: {
    curvature: 0.25, slope: 0.5, f: (s) => (s / (1 + Math.sqrt(1 + s))) ** 2 / 2,
    // With q = sin²θ the distance of two coins is 1 − cos of the difference of their angles.
    closed: (q, delta) => Math.sin(Math.asin(Math.sqrt(q)) + 2 * Math.asin(Math.sqrt(delta / 2))) ** 2,
  },
  js: { curvature: 0.25, slope: Math.LN2 / 2, f: (s) => (klTerm(s) - 2 * klTerm(s / 2)) / 2 },
};

/** D_f(h ‖ q): at least 0, infinite where f forbids mass that q does not have. */
export function divergence(name, h, q) {
  const { f, slope } = DIVERGENCES[name];
  return sum(q.map((x, at) => {
    if (x > 0) return x * f(h[at] / x - 1);
    return h[at] > 0 ? h[at] * slope : 0;
  }));
}

export function kl(h, q) {
  return divergence('kl', h, q);
}

/** Total variation, ½·L1. */
export function tv(h, q) {
  return divergence('tv', h, q);
}

export function entropy(h) {
  return sum(h.map((x) => (x > 0 ? -x * Math.log(x) : 0)));
}

// ---- the raised probability ----

/** d_f between two coins, one raised from q by `by`. */
function coins(f, q, by) {
  return q * f(by / q) + (1 - q) * f(-by / (1 - q));
}

function taylorGamma({ curvature }, q, delta) {
  if (curvature === null) throw new RangeError('no second derivative at 1, so no Taylor form');
  return Math.min(q + Math.sqrt((2 * delta * q * Math.max(0, 1 - q)) / curvature), 1);
}

function exactGamma({ f, closed }, q, delta) {
  if (delta <= 0 || q >= 1) return q;
  if (coins(f, q, 1 - q) <= delta) return 1;
  if (closed) return Math.min(closed(q, delta), 1);
  // Rounding must not make certain what this budget does not.
  return Math.min(q + bisect((by) => coins(f, q, by) > delta, 0, 1 - q), BELOW_ONE);
}

/** Elementwise in q. A token that the verifier excludes is never accepted, whatever the divergence and the budget. */
export function gamma(name, solver, q, delta) {
  if (q <= 0) return 0;
  return (solver === 'taylor' ? taylorGamma : exactGamma)(DIVERGENCES[name], q, delta);
}

/** The smallest budget at which gamma is 1; infinite where none is enough. */
export function certainFrom(name, solver, q) {
  const { f, curvature } = DIVERGENCES[name];
  if (q <= 0) return Infinity;
  if (q >= 1) return 0;
  return solver === 'taylor' ? (curvature * (1 - q)) / (2 * q) : coins(f, q, 1 - q);
}

/** Acceptance probability of a token of draft probability p. */
export function phi(p, raised) {
  return p > raised ? raised / p : Number(raised > 0);
}

/** h(x) for x other than the drafted token, whose own probability goes from qDrafted to raised. */
export function scaledDown(q, qDrafted, raised) {
  return qDrafted < 1 ? (q * (1 - raised)) / (1 - qDrafted) : q;
}

// ---- rules ----
// A rule has gamma(p, q), one value per token; recovery(p, q, n), the distribution that replaces a rejected n; and,
// unless it is typical acceptance, target(p, q, n), which is h.

/** (h − p)₊ normalised; h itself where rounding leaves nothing. */
function residual(h, p) {
  const rest = h.map((x, at) => Math.max(0, x - p[at]));
  const mass = sum(rest);
  return mass > 0 ? rest.map((x) => x / mass) : h;
}

function raising(raise) {
  const target = (p, q, n) => {
    const raised = raise(q[n]);
    return q.map((x, at) => (at === n ? raised : scaledDown(x, q[n], raised)));
  };
  return { gamma: (p, q) => q.map((x) => raise(x)), target, recovery: (p, q, n) => residual(target(p, q, n), p) };
}

export const rules = {
  sps: () => raising((q) => q),

  cactus: ({ divergence: name, solver, delta }) => raising((q) => gamma(name, solver, q, delta)),

  /** Typical acceptance: n is kept iff q(n) exceeds a threshold that follows the entropy of q; else argmax q comes out. */
  tas({ epsilon = 0.09, alpha = 0.3 } = {}) {
    const threshold = (q) => Math.min(epsilon, alpha * Math.exp(-entropy(q)));
    const recovery = (p, q) => {
      const likeliest = q.indexOf(Math.max(...q));
      return q.map((_, at) => Number(at === likeliest));
    };
    return { threshold, gamma: (p, q) => q.map((x) => Number(x > threshold(q))), recovery };
  },

  /** The mixture a p + (1−a) q as target, whatever was drafted. */
  interpolation({ a }) {
    const target = (p, q) => q.map((x, at) => a * p[at] + (1 - a) * x);
    return { gamma: target, target, recovery: (p, q) => residual(target(p, q), p) };
  },
};

/** Expected acceptance of one drafted token, Σ min(p, gamma). */
export function acceptance(rule, p, q) {
  const raised = rule.gamma(p, q);
  return sum(p.map((x, at) => Math.min(x, raised[at])));
}

/** h_alg, summed over every token that may be drafted. */
export function effective(rule, p, q) {
  const raised = rule.gamma(p, q);
  const h = p.map((x, at) => Math.min(x, raised[at]));
  p.forEach((x, n) => {
    const rejected = x - raised[n];
    if (rejected > 0) rule.recovery(p, q, n).forEach((share, at) => { h[at] += rejected * share; });
  });
  return h;
}

/** Where a rule stands: divergence of what comes out, and acceptance. */
export function standing(rule, p, q) {
  return { kl: kl(effective(rule, p, q), q), acceptance: acceptance(rule, p, q) };
}

// ---- the best possible rule at a given divergence ----
// h = clip(p, q/Z, a q/Z) with a ≥ 1. Its cap a/Z runs from 1 (h = q) to max p/q (no token is held back any more), which
// is finite where a is not.

function ratios(p, q) {
  return p.flatMap((x, at) => (q[at] > 0 ? [x / q[at]] : []));
}

/** The optimal h of that cap; its floor 1/Z, at most 1, follows from normalisation. */
function capped(p, q, cap) {
  const withFloor = (floor) => q.map((x, at) => Math.min(Math.max(p[at], floor * x), cap * x));
  return withFloor(bisect((floor) => sum(withFloor(floor)) >= 1, 0, 1));
}

function judged(h, p, q) {
  return { h, kl: kl(h, q), acceptance: sum(p.map((x, at) => Math.min(x, h[at]))) };
}

/** Most acceptance with KL(h ‖ q) ≤ budget: {h, kl, acceptance}. */
export function optimum(p, q, budget) {
  const last = Math.max(1, ...ratios(p, q));
  const over = (cap) => kl(capped(p, q, cap), q) > budget;
  const cap = over(last) ? bisect(over, 1, last) : last;
  return judged(capped(p, q, cap), p, q);
}

/** The optimum at every budget, as points {h, kl, acceptance}, `steps` of them between two bends. */
export function frontier(p, q, steps = 8) {
  const bends = [...new Set([1, ...ratios(p, q).filter((ratio) => ratio > 1)])].sort((one, other) => one - other);
  const caps = bends.slice(1).flatMap((bend, at) => (
    Array.from({ length: steps }, (_, step) => bends[at] * (bend / bends[at]) ** ((step + 1) / steps))
  ));
  return [1, ...caps].map((cap) => judged(capped(p, q, cap), p, q));
}
