// The bench: a vocabulary of 3 to 8 tokens whose p and q can be dragged, under every rule and divergence.
// Nothing here asks the server: the numbers are those of mathematics.js.

import { deltaText, make, wording } from './elements.js';
import {
  DIVERGENCES, acceptance, certainFrom, divergence, effective, entropy, frontier, kl, optimum, phi, rules, standing, sum, tv,
} from './mathematics.js';
import { gridPosition, nearestIndex } from './rejudge.js';

const NAMES = 'abcdefgh';
const [FEWEST, MOST] = [3, NAMES.length];
const [STEP, LEAP] = [0.01, 0.1];
const RULES = ['cactus', 'sps', 'interpolation', 'tas'];
const OPENING = {
  p: [0.05, 0.8, 0.15], q: [0.3, 0.35, 0.35], n: 1, rule: 'cactus', divergence: 'kl', solver: 'taylor', delta: 0.2112, a: 0.5,
};
const PRESETS = {
  example: () => ({ p: OPENING.p, q: OPENING.q, n: OPENING.n }),
  sure: () => ({ p: [0.91, 0.04, 0.03, 0.02], q: [0.4, 0.3, 0.2, 0.1], n: 0 }),
  equal: ({ q }) => ({ p: q }),
  excluded: () => ({ p: [0.1, 0.5, 0.15, 0.25], q: [0.55, 0.3, 0.15, 0], n: 3 }),
  random: ({ p }) => {
    const [draft, verifier] = [randomRow(p.length), randomRow(p.length)];
    const excess = draft.map((x, at) => x - verifier[at]);
    return { p: draft, q: verifier, n: excess.indexOf(Math.max(...excess)) };
  },
};
const ANNOUNCE_PAUSE_MS = 700;
const NOTHING = 1e-9;

// ---- small helpers ----

/** An element of a drawing. */
function draw(tag, attributes = {}, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function properties(node, values) {
  for (const [name, value] of Object.entries(values)) node.style.setProperty(`--${name}`, value);
}

/** 0.35 as .35, so that eight of them fit side by side on a phone. */
function probability(x) {
  if (x < NOTHING) return '0';
  if (x > 1 - NOTHING) return '1';
  if (x < 0.005) return '<.01';
  return x > 0.995 ? '>.99' : x.toFixed(2).slice(1);
}

function percent(x, digits = 0) {
  const least = 10 ** -digits;
  const value = 100 * x;
  if (x > NOTHING && value < least / 2) return `<${least.toFixed(digits)} %`;
  if (x < 1 - NOTHING && value > 100 - least / 2) return `>${(100 - least).toFixed(digits)} %`;
  return `${value.toFixed(digits)} %`;
}

function amount(x) {
  if (x === Infinity) return '∞';
  if (x < NOTHING) return '0';
  return x < 1e-4 ? x.toExponential(1) : x.toPrecision(2);
}

// ---- distributions ----

/** The row with one value set and the others rescaled to fill up; equal shares where they have nothing to scale. */
function withValue(row, at, value) {
  const rest = 1 - row[at];
  return row.map((x, other) => {
    if (other === at) return value;
    return rest > NOTHING ? (x * (1 - value)) / rest : (1 - value) / (row.length - 1);
  });
}

function withOneMore(row) {
  return [...row.map((x) => (x * row.length) / (row.length + 1)), 1 / (row.length + 1)];
}

function withoutLast(row) {
  return withValue(row, row.length - 1, 0).slice(0, -1);
}

/** Hundredths that sum to 1. */
function randomRow(count) {
  const weights = Array.from({ length: count }, () => (-Math.log(1 - Math.random())) ** 1.5);
  const row = weights.map((weight) => Math.round((100 * weight) / sum(weights)) / 100);
  const largest = row.indexOf(Math.max(...row));
  row[largest] += 1 - sum(row);
  return row;
}

// ---- everything that is shown, from the state ----

/** Where the divergence has no Taylor form the exact solver stands in; the choice comes back with another divergence. */
function settled(state) {
  return DIVERGENCES[state.divergence].curvature === null ? { ...state, solver: 'exact' } : state;
}

function ruleOf(state) {
  return rules[state.rule](state);
}

/** Budgets from 0 to where nothing changes any more, evenly in logarithm, the current one among them. */
function budgets({ q, divergence: name, solver, delta }) {
  const last = Math.max(2, ...q.map((x) => certainFrom(name, solver, x)).filter((x) => x < 1e3));
  const spread = Array.from({ length: 64 }, (_, at) => 1e-4 * (last / 1e-4) ** (at / 63));
  return [0, ...spread, delta].sort((one, other) => one - other);
}

/** Where the rule stands along its own parameter. */
function curveOf(state) {
  const at = (parameter) => standing(ruleOf({ ...state, ...parameter }), state.p, state.q);
  if (state.rule === 'cactus') return budgets(state).map((delta) => at({ delta }));
  if (state.rule !== 'interpolation') return [];
  return Array.from({ length: 41 }, (_, step) => at({ a: step / 40 })).filter((point) => point.kl < Infinity);
}

function study(state) {
  const { p, q, n } = state;
  const rule = ruleOf(state);
  const raised = rule.gamma(p, q);
  const h = rule.target?.(p, q, n) ?? null;
  const out = effective(rule, p, q);
  const spent = kl(out, q);
  const chance = phi(p[n], raised[n]);
  return {
    ...state, name: NAMES[n], raised, h, out, chance, bySps: phi(p[n], q[n]),
    recovery: chance < 1 && p[n] > 0 ? rule.recovery(p, q, n) : null,
    alpha: acceptance(rule, p, q), alphaSps: acceptance(rules.sps(), p, q),
    klTarget: h && kl(h, q), spentTarget: h && divergence(state.divergence, h, q), klDraft: kl(p, q),
    kl: spent, tv: tv(out, q), best: spent < Infinity ? optimum(p, q, spent).acceptance : null,
    threshold: rule.threshold?.(q), likeliest: NAMES[q.indexOf(Math.max(...q))],
  };
}

// ---- the sentences ----

function sentenceOf(view, t) {
  const { p, q, n, name, raised, rule, chance, bySps } = view;
  const values = {
    name, p: probability(p[n]), q: probability(q[n]), gamma: probability(raised[n]), phi: percent(chance), sps: percent(bySps),
    threshold: probability(view.threshold ?? 0), likeliest: view.likeliest, a: deltaText(view.a), delta: deltaText(view.delta),
  };
  const say = (key) => t(`say.${key}`, values);
  if (p[n] < NOTHING) return say('never_drafted');
  if (rule === 'tas') return say(raised[n] > 0 ? 'tas_kept' : 'tas_rejected');
  if (q[n] < NOTHING) return say(rule === 'interpolation' ? 'interpolation' : 'excluded');
  if (bySps === 1) return say('kept_anyway');
  if (rule === 'interpolation') return say('interpolation');
  if (raised[n] === q[n]) return say(rule === 'sps' ? 'sps' : 'zero');
  return say(chance === 1 ? 'certain' : 'raised');
}

/** The sentence with every "x = .35" in one piece. */
function unbroken(text) {
  return text.split(/(\S+ = [^\s,:]+(?: %)?)/).map((part, at) => (at % 2 ? make('span', {}, part) : part));
}

function formulaOf(view, t) {
  const { q, n, rule, solver, delta, a, p } = view;
  const name = view.divergence;
  const values = {
    p: probability(p[n]), q: probability(q[n]), rest: probability(1 - q[n]),
    gamma: probability(view.raised[n]), phi: percent(view.chance),
    delta: deltaText(delta), curvature: DIVERGENCES[name].curvature, a: deltaText(a), one_less_a: deltaText(1 - a),
    threshold: probability(view.threshold ?? 0), entropy: entropy(q).toFixed(2), edge: amount(certainFrom(name, solver, q[n])),
  };
  const kind = name === 'kl' || name === 'chi2' || solver === 'exact' ? `${solver}_${name}` : solver;
  const raising = t(`formula.${rule === 'cactus' ? kind : rule}`, values);
  const special = rule === 'cactus' && (q[n] < NOTHING ? 'excluded' : view.raised[n] === 1 && q[n] < 1 && 'certain');
  const ending = rule === 'tas' ? 'phi_tas' : p[n] < NOTHING ? 'phi_none' : 'phi';
  return [raising + (special ? t(`formula.${special}`, values) : ''), t(`formula.${ending}`, values)];
}

/** What the drafted token spends of its budget. Taylor forms may spend more than delta, and then it is said. */
function budgetOf(view, t) {
  const { rule, solver, delta, spentTarget: spent, q, n } = view;
  const name = view.divergence;
  if (rule === 'tas') return t('budget.tas');
  const values = {
    kl: amount(view.klTarget), spent: amount(spent), delta: deltaText(delta),
    measure: t(`divergence.${name}`), unit: t(`unit.${name}`),
    bound: amount(Math.log1p(2 * delta)), share: delta > 0 ? share(spent / delta) : '',
  };
  if (view.klTarget === Infinity) return t('budget.infinite');
  if (rule !== 'cactus') return t(`budget.${rule}`, values);
  if (delta === 0) return t('budget.zero');
  if (q[n] < NOTHING) return t('budget.excluded');
  const over = spent > delta * (1 + NOTHING);
  const promise = solver === 'exact' || name === 'chi2' ? 'exact' : spent === Infinity ? 'endless' : over ? 'over' : 'within';
  if (name !== 'kl') return `${t(`budget.${promise}`, values)} ${t('budget.in_kl', values)}`;
  return t(`budget.${promise}`, values) + (solver === 'taylor' ? ` ${t('budget.bound', values)}` : '');
}

/** A share of delta that never rounds to 100 % from the wrong side. */
function share(x) {
  const rounded = (100 * x).toFixed(0);
  if (rounded !== '100' || Math.abs(x - 1) <= NOTHING) return `${rounded} %`;
  return x > 1 ? '>100 %' : '<100 %';
}

// ---- controls ----

/** A group of radio buttons that look like one control. choose(value) on a change. */
function createChoice(label, name, options, choose) {
  const inputs = new Map();
  const chips = options.map(({ value, text, title }) => {
    const input = make('input', { type: 'radio', name: `cactus-bench-${name}`, value, change: () => choose(value) });
    inputs.set(value, input);
    return make('label', { class: 'chip', title }, input, make('span', {}, text));
  });
  const node = make('fieldset', { class: `choice ${name}` }, make('legend', {}, label), make('div', { class: 'chips' }, ...chips));

  function show(value, disabled = () => false) {
    for (const [each, input] of inputs) {
      input.checked = each === value;
      input.disabled = disabled(each);
    }
  }

  return { node, show };
}

/** A slider over `grid` beside a box for any number up to its last. */
function createAmount(name, grid, labels, t, set) {
  const last = grid.length - 1;
  const top = grid[last];
  const id = `cactus-bench-${name}`;
  const slider = make('input', {
    type: 'range', min: 0, max: last, step: 1, 'aria-label': t(`${name}.slider`), input: () => set(grid[slider.valueAsNumber]),
  });
  const message = make('span', { class: 'invalid', id: `${id}-message`, role: 'alert' });
  const number = make('input', {
    type: 'number', min: 0, max: top, step: 'any', inputmode: 'decimal', 'aria-label': t(`${name}.number`),
    'aria-describedby': message.id,
    input: () => {
      const valid = number.valueAsNumber >= 0 && number.valueAsNumber <= top;
      comdeltaText(!valid);
      if (valid) set(number.valueAsNumber);
    },
  });
  const ticks = labels.map((value) => {
    const tick = make('span', {}, deltaText(value));
    properties(tick, { at: gridPosition(grid, value) / last });
    return tick;
  });
  const node = make('div', { class: `amount ${name}` },
    make('strong', {}, t(`${name}.label`)), number,
    make('div', { class: 'slider' }, slider, make('div', { class: 'ticks', 'aria-hidden': 'true' }, ...ticks)),
    message);

  function comdeltaText(invalid) {
    number.setAttribute('aria-invalid', invalid);
    message.textContent = invalid ? t(`${name}.invalid`) : '';
  }

  function show(value) {
    slider.value = nearestIndex(grid, value);
    slider.setAttribute('aria-valuetext', deltaText(value));
    properties(slider, { at: gridPosition(grid, value) / last });
    if (number.valueAsNumber !== value) number.value = deltaText(value);
    comdeltaText(false);
  }

  return { node, show };
}

function createRulePanel(grid, t, change) {
  const options = (name, values) => values.map((value) => (
    { value, text: t(`${name}.${value}`), title: t(`${name}_title.${value}`) }
  ));
  const labels = [0, 0.01, 0.1, 1, 2].filter((value) => value <= grid.at(-1));
  const delta = createAmount('delta', grid, labels, t, (value) => change({ delta: value }));
  const hundredths = Array.from({ length: 101 }, (_, at) => at / 100);
  const a = createAmount('a', hundredths, [0, 0.5, 1], t, (value) => change({ a: value }));
  const rule = createChoice(t('rule'), 'rule', options('rule', RULES), (value) => change({ rule: value }));
  const measures = options('divergence', Object.keys(DIVERGENCES));
  const measure = createChoice(t('measure'), 'measure', measures, (value) => change({ divergence: value }));
  const solver = createChoice(t('solver'), 'solver', options('solver', ['taylor', 'exact']), (value) => change({ solver: value }));
  const about = make('p', { class: 'quiet about' });
  const node = make('section', { class: 'card panel', 'aria-label': t('panel') },
    rule.node, about, delta.node, a.node, measure.node, solver.node);

  function show(state) {
    const cactus = state.rule === 'cactus';
    delta.node.hidden = measure.node.hidden = solver.node.hidden = !cactus;
    a.node.hidden = state.rule !== 'interpolation';
    delta.show(state.delta);
    a.show(state.a);
    rule.show(state.rule);
    measure.show(state.divergence);
    solver.show(state.solver, (value) => value === 'taylor' && DIVERGENCES[state.divergence].curvature === null);
    about.textContent = t(`rule_title.${state.rule}`);
  }

  return { node, show };
}

function createPresets(t, actions) {
  const button = (key, click) => make('button', { type: 'button', class: 'button', click }, t(key));
  const [fewer, more] = [[-1, '−'], [1, '+']].map(([by, sign]) => make('button', {
    type: 'button', class: 'button step', 'aria-label': t(by < 0 ? 'fewer' : 'more'), click: () => actions.resize(by),
  }, sign));
  const count = make('output', {});
  const node = make('div', { class: 'presets' },
    make('div', { class: 'buttons', role: 'group', 'aria-label': t('presets') },
      ...Object.keys(PRESETS).map((name) => button(`preset.${name}`, () => actions.preset(name)))),
    make('div', { class: 'buttons' },
      make('div', { class: 'count', role: 'group', 'aria-label': t('count') }, fewer, count, more),
      button('reset', actions.reset)));

  function show({ p }) {
    count.textContent = t('tokens', { count: p.length });
    fewer.disabled = p.length === FEWEST;
    more.disabled = p.length === MOST;
  }

  return { node, show };
}

// ---- the board: bars to drag, one column per token ----

const KEYS = {
  ArrowUp: STEP, ArrowRight: STEP, ArrowDown: -STEP, ArrowLeft: -STEP, PageUp: LEAP, PageDown: -LEAP,
  Home: -Infinity, End: Infinity,
};

function within(value) {
  return Math.min(1, Math.max(0, value));
}

function hundredth(value) {
  return Math.round(100 * value) / 100;
}

/** One bar whose top can be dragged. row: 'p' or 'q'; set(row, at, value, from) where from is the row as the drag found it. */
function createBar(row, at, t, actions, ...fills) {
  const label = t(`bar.${row}`, { name: NAMES[at] });
  const grip = make('div', {
    class: 'grip', role: 'slider', tabindex: 0, 'aria-label': label, 'aria-orientation': 'vertical',
    'aria-valuemin': 0, 'aria-valuemax': 1,
    keydown: (event) => {
      const by = KEYS[event.key];
      if (by === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const before = actions.row(row);
      actions.set(row, at, within(hundredth(before[at] + by)), before);
    },
  });
  let found = null;
  const track = make('div', {
    class: `track ${row}`,
    pointerdown: (event) => {
      // A finger on the bar scrolls the page; a finger on its top drags.
      if (event.button !== 0 || (event.pointerType === 'touch' && !grip.contains(event.target))) return;
      event.preventDefault();
      track.setPointerCapture(event.pointerId);
      grip.focus({ preventScroll: true });
      found = actions.row(row);
      actions.drag(true);
      follow(event);
    },
    pointermove: (event) => { if (found) follow(event); },
    lostpointercapture: () => {
      found = null;
      actions.drag(false);
    },
  }, ...fills.map((name) => make('div', { class: name })), grip);

  function follow({ clientY }) {
    const { top, height } = track.getBoundingClientRect();
    actions.set(row, at, within(hundredth(1 - (clientY - top) / height)), found);
  }

  function show(value) {
    grip.setAttribute('aria-valuenow', Number(value.toFixed(4)));
    grip.setAttribute('aria-valuetext', probability(value));
    grip.dataset.value = probability(value);
  }

  return { node: track, show };
}

function createColumn(at, t, actions) {
  const p = createBar('p', at, t, actions, 'refused', 'rescued', 'kept');
  const q = createBar('q', at, t, actions, 'mass', 'held', 'target');
  const gammaText = make('span', {});
  const node = make('div', { class: 'column' }, p.node, q.node, make('div', { class: 'gamma', 'aria-hidden': 'true' }, gammaText));

  function show(view) {
    const [draft, verifier, raised] = [view.p[at], view.q[at], Math.min(view.p[at], view.raised[at])];
    const drafted = view.n === at;
    node.classList.toggle('drafted', drafted);
    node.classList.toggle('raised', drafted && view.h !== null);
    node.classList.toggle('aimed', view.h !== null);
    const h = view.h?.[at] ?? verifier;
    properties(node, {
      p: draft, 'kept-share': Math.min(raised, verifier), raised, gamma: view.raised[at],
      q: verifier, held: Math.min(verifier, h), h,
    });
    gammaText.textContent = t('gamma_mark', { gamma: probability(view.raised[at]) });
    p.show(draft);
    q.show(verifier);
  }

  return { node, show };
}

/** A row of numbers under the columns, with its meaning in front. */
function createNumbers(name, count, t) {
  const cells = Array.from({ length: count }, () => make('span', {}));
  const node = make('div', { class: `line numbers ${name}` },
    make('span', { class: 'head' },
      make('i', { class: `swatch ${name}` }), make('b', {}, t(`row.${name}`)), make('small', {}, t(`row_is.${name}`))),
    ...cells);

  function show(values) {
    cells.forEach((cell, at) => { cell.textContent = values ? probability(values[at]) : '–'; });
  }

  return { node, show };
}

/** Small bars that only show; one or several per token. */
function createBars(names, count) {
  const columns = Array.from({ length: count }, () => (
    make('div', { class: 'column' }, ...names.map((name) => make('div', { class: `still ${name}` })))
  ));

  function show(...rows) {
    columns.forEach((column, at) => names.forEach((name, which) => {
      properties(column, { [`${name}-share`]: rows[which]?.[at] ?? 0 });
    }));
  }

  return { columns, show };
}

function createScale() {
  return make('div', { class: 'scale', 'aria-hidden': 'true' }, ...[0, 0.25, 0.5, 0.75, 1].map((value) => {
    const line = make('div', {}, make('span', {}, probability(value)));
    properties(line, { at: value });
    return line;
  }));
}

function createBoard(count, t, actions) {
  const columns = Array.from({ length: count }, (_, at) => createColumn(at, t, actions));
  const inputs = columns.map((_, at) => make('input', {
    type: 'radio', name: 'cactus-bench-drafted', value: at, change: () => actions.draft(at),
  }));
  const numbers = Object.fromEntries(['p', 'q', 'h'].map((name) => [name, createNumbers(name, count, t)]));
  const replacement = createBars(['residual'], count);
  const replacementNumbers = createNumbers('residual', count, t);
  const replacementTitle = make('p', { class: 'subtitle' });
  const node = make('div', { class: 'grid' },
    make('div', { class: 'line plot' }, createScale(), ...columns.map((column) => column.node)),
    make('div', { class: 'line names', role: 'radiogroup', 'aria-label': t('drafted') },
      make('span', { class: 'head' }, make('b', {}, t('drafted'))),
      ...inputs.map((input, at) => make('label', { class: 'chip' }, input, make('span', {}, NAMES[at])))),
    ...Object.values(numbers).map((row) => row.node),
    replacementTitle,
    make('div', { class: 'line small' }, make('span', { class: 'head' }), ...replacement.columns),
    replacementNumbers.node);
  properties(node, { count });

  function show(view) {
    for (const column of columns) column.show(view);
    inputs[view.n].checked = true;
    for (const [name, row] of Object.entries(numbers)) row.show(view[name]);
    replacement.show(view.recovery);
    replacementNumbers.show(view.recovery);
    const key = !view.recovery ? 'none' : view.h ? 'some' : 'tas';
    replacementTitle.textContent = t(`replacement.${key}`, { name: view.name, chance: percent(1 - view.chance) });
  }

  return { node, show };
}

/** What comes out, against q. */
function createOutcome(count, t) {
  const bars = createBars(['q', 'out'], count);
  const names = Array.from({ length: count }, (_, at) => make('span', {}, NAMES[at]));
  const [q, out] = ['q', 'out'].map((name) => createNumbers(name, count, t));
  const node = make('div', { class: 'grid' },
    make('div', { class: 'line plot still-plot' }, createScale(), ...bars.columns),
    make('div', { class: 'line names' }, make('span', { class: 'head' }), ...names), q.node, out.node);
  properties(node, { count });
  return {
    node,
    show(view) {
      bars.show(view.q, view.out);
      bars.columns.forEach((column, at) => properties(column, { p: view.p[at] }));
      q.show(view.q);
      out.show(view.out);
    },
  };
}

// ---- figures ----

function createFigures(names, t) {
  const parts = new Map();
  const node = make('dl', { class: 'figures' }, ...names.map((name) => {
    const [value, note] = [make('strong', {}), make('span', { class: 'quiet' })];
    parts.set(name, { value, note });
    return make('div', { class: name }, make('dt', {}, t(`figure.${name}`)), make('dd', {}, value, ' ', note));
  }));

  function show(figures) {
    for (const [name, [value, note]] of Object.entries(figures)) {
      parts.get(name).value.textContent = value;
      parts.get(name).note.textContent = note ?? '';
    }
  }

  return { node, show };
}

function targetFigures(view, t) {
  const nats = view.klTarget === null ? '–' : amount(view.klTarget);
  return {
    phi: [percent(view.chance), t('figure.instead', { sps: percent(view.bySps) })],
    gamma: [view.h ? probability(view.raised[view.n]) : '–', t('figure.from', { q: probability(view.q[view.n]) })],
    kl_target: [nats, view.rule === 'cactus' ? t('figure.beside', { delta: deltaText(view.delta) }) : ''],
  };
}

function overallFigures(view, t) {
  const [better, best] = [view.alpha - view.alphaSps, view.best];
  const sign = better > NOTHING ? 'more' : better < -NOTHING ? 'less' : 'same';
  return {
    alpha: [percent(view.alpha, 1), t(`figure.alpha_${sign}`, { sps: percent(view.alphaSps, 1) })],
    best: best === null ? ['–'] : [percent(best, 1), t('figure.best_note', { kl: amount(view.kl) })],
    kl: [amount(view.kl), view.kl === Infinity ? t('figure.infinite') : t('unit.kl')],
    kl_draft: [amount(view.klDraft), view.klDraft === Infinity ? t('figure.infinite') : t('unit.kl')],
    tv: [amount(view.tv), t('figure.tv_note')],
    entropy: [entropy(view.out).toFixed(2), t('figure.entropy_note', { q: entropy(view.q).toFixed(2) })],
  };
}

// ---- the frontier ----

const BETWEEN_BENDS = 24; // enough points that no chord of the optimum shows below a rule that attains it
const PLOT = { height: 270, left: 50, right: 14, top: 28, bottom: 42 };

/** A round step that divides `span` into four to ten parts. */
function roundStep(span) {
  const power = 10 ** Math.floor(Math.log10(span));
  return [0.1, 0.2, 0.5, 1].map((part) => part * power).find((step) => span / step <= 6) ?? power;
}

function roundValues(from, to) {
  const step = roundStep(to - from);
  const first = Math.ceil(from / step - 1e-6);
  return Array.from({ length: Math.floor(to / step + 1e-6) - first + 1 }, (_, at) => (first + at) * step);
}

function frontierModel(view) {
  const best = frontier(view.p, view.q, BETWEEN_BENDS);
  const curve = curveOf(view);
  const all = view.klDraft < Infinity ? { kl: view.klDraft, acceptance: 1 } : null;
  const here = view.kl < Infinity ? { kl: view.kl, acceptance: view.alpha } : null;
  const shown = [...best, ...curve, ...[all, here].filter(Boolean)];
  return {
    best, curve, all, here, sps: { kl: 0, acceptance: view.alphaSps },
    right: 1.06 * Math.max(1e-3, ...shown.map((point) => point.kl)),
    bottom: Math.min(0.8, Math.floor(5 * Math.min(...shown.map((point) => point.acceptance)) + NOTHING) / 5),
  };
}

function createFrontier(t) {
  const svg = draw('svg', { role: 'img', height: PLOT.height });
  const curveName = make('span', {});
  const key = (name, text = t(`frontier.${name}`)) => make('li', { class: name }, make('i', {}), text);
  const keys = { best: key('best'), curve: key('curve', curveName), here: key('here'), sps: key('sps'), all: key('all') };
  const reading = make('p', {});
  const frame = make('div', { class: 'frame' }, svg);
  const node = make('figure', { class: 'frontier' },
    frame, make('ul', { class: 'keys' }, ...Object.values(keys)), make('figcaption', {}, reading));
  let latest = null;

  function axes(x, y, model, width) {
    const { left, right, top, bottom, height } = PLOT;
    const across = roundValues(0, model.right).map((value) => draw('g', {},
      draw('line', { class: 'rule', x1: x(value), x2: x(value), y1: top, y2: height - bottom }),
      draw('text', { x: x(value), y: height - bottom + 17, 'text-anchor': 'middle' }, deltaText(value))));
    const up = roundValues(model.bottom, 1).map((value) => draw('g', {},
      draw('line', { class: 'rule', x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      draw('text', { x: left - 7, y: y(value) + 4, 'text-anchor': 'end' }, `${deltaText(100 * value)} %`)));
    return [
      ...across, ...up,
      draw('text', { class: 'title', x: width - right, y: height - 6, 'text-anchor': 'end' }, t('frontier.x')),
      draw('text', { class: 'title', x: 4, y: 12 }, t('frontier.y')),
    ];
  }

  function stripes() {
    const pattern = {
      id: 'cactus-bench-beyond', width: 8, height: 8, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)',
    };
    return draw('defs', {}, draw('pattern', pattern, draw('line', { class: 'stripe', x1: 0, x2: 0, y1: 0, y2: 8 })));
  }

  function paint() {
    const width = frame.clientWidth;
    if (!latest || width === 0) return;
    const model = frontierModel(latest);
    const { left, right, top, bottom, height } = PLOT;
    const x = (value) => left + (value / model.right) * (width - left - right);
    const y = (value) => height - bottom - ((value - model.bottom) / (1 - model.bottom)) * (height - top - bottom);
    const place = ({ kl: at, acceptance: up }) => `${x(at).toFixed(1)},${y(up).toFixed(1)}`;
    const path = (name, points) => (points.length > 1 ? [draw('path', { class: name, d: `M${points.map(place).join('L')}` })] : []);
    const [{ acceptance: start }, end] = [model.best[0], model.best.at(-1)];
    const beyond = draw('path', {
      fill: 'url(#cactus-bench-beyond)',
      d: `M${x(0)},${y(1)}L${x(0)},${y(start)}L${model.best.map(place).join('L')}L${x(end.kl)},${y(1)}Z`,
    });
    const diamond = ({ kl: at, acceptance: up }) => draw('path', { class: 'all', d: `M${x(at)},${y(up) - 7}l7,7l-7,7l-7,-7z` });
    svg.setAttribute('width', width);
    svg.setAttribute('aria-label', reading.textContent);
    svg.replaceChildren(
      stripes(), beyond, ...axes(x, y, model, width), ...path('curve', model.curve), ...path('best', model.best),
      ...(model.all ? [diamond(model.all)] : []),
      draw('circle', { class: 'sps', cx: x(0), cy: y(model.sps.acceptance), r: 6 }),
      ...(model.here ? [draw('circle', { class: 'here', cx: x(model.here.kl), cy: y(model.here.acceptance), r: 6.5 })] : []),
    );
    keys.curve.hidden = model.curve.length < 2;
    keys.here.hidden = !model.here;
    keys.all.hidden = !model.all;
  }

  function show(view) {
    latest = view;
    const rule = t(`rule.${view.rule}`);
    curveName.textContent = t(`frontier.curve_${view.rule === 'interpolation' ? 'a' : 'delta'}`, { rule });
    const lost = view.best - view.alpha;
    reading.textContent = view.best === null ? t('frontier.infinite') : t(lost < 5e-4 ? 'frontier.attained' : 'frontier.short', {
      kl: amount(view.kl), best: percent(view.best, 1), alpha: percent(view.alpha, 1), rule,
    }) + (view.klDraft === Infinity ? ` ${t('frontier.no_all')}` : '');
    paint();
  }

  new ResizeObserver(paint).observe(frame);
  return { node, show };
}

// ---- every number ----

const COLUMNS = ['p', 'q', 'raised', 'phi', 'h', 'recovery', 'out'];

function createTable(t) {
  const body = make('tbody', {});
  const node = make('details', { class: 'numbers-table' }, make('summary', {}, t('table')),
    make('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': t('table') },
      make('table', {}, make('thead', {}, make('tr', {}, make('th', { scope: 'col' }, t('table.token')),
        ...COLUMNS.map((name) => make('th', { scope: 'col' }, t(`table.${name}`))))), body)));
  let latest = null;

  function fill() {
    if (!latest || !node.open) return;
    const values = { ...latest, phi: latest.p.map((x, at) => phi(x, latest.raised[at])) };
    const cell = (name, at) => make('td', {}, values[name] ? values[name][at].toFixed(6) : '–');
    body.replaceChildren(...latest.p.map((_, at) => make('tr', { class: at === latest.n && 'drafted' },
      make('th', { scope: 'row' }, NAMES[at]), ...COLUMNS.map((name) => cell(name, at)))));
  }

  node.addEventListener('toggle', fill);
  return {
    node,
    show(view) {
      latest = view;
      fill();
    },
  };
}

// ---- the whole ----

function createBench(root, grid, t) {
  let state = OPENING;
  let frame = 0;
  let announcement = 0;
  let charts = [];
  let size = 0;

  const panel = createRulePanel(grid, t, change);
  const presets = createPresets(t, {
    preset: (name) => change(PRESETS[name](state)),
    reset: () => change(OPENING),
    resize: (by) => {
      const [p, q] = [state.p, state.q].map(by > 0 ? withOneMore : withoutLast);
      change({ p, q, n: Math.min(state.n, p.length - 1) });
    },
  });
  const actions = {
    row: (name) => state[name],
    set: (name, at, value, from) => change({ [name]: withValue(from, at, value) }),
    draft: (n) => change({ n }),
    drag: (on) => root.classList.toggle('dragging', on),
  };
  const sentence = make('p', { class: 'sentence' });
  const formulas = [make('p', {}), make('p', {})];
  const budget = make('p', { class: 'budget' });
  const drafted = createFigures(['phi', 'gamma', 'kl_target'], t);
  const overall = createFigures(['alpha', 'best', 'kl', 'kl_draft', 'tv', 'entropy'], t);
  const plot = createFrontier(t);
  const table = createTable(t);
  const [boardPlace, outcomePlace] = [make('div', {}), make('div', {})];
  const announcer = make('p', { class: 'hidden-text', role: 'status' });
  const legend = make('ul', { class: 'legend' }, ...['kept', 'rescued', 'refused', 'target'].map((name) => (
    make('li', {}, make('i', { class: `swatch ${name}` }), t(`legend.${name}`)))));

  root.replaceChildren(
    make('header', {}, make('h2', {}, t('title')), make('p', {}, t('lead'))),
    presets.node,
    make('div', { class: 'work' },
      make('section', { class: 'card board', 'aria-label': t('board') },
        sentence, legend, boardPlace, make('p', { class: 'quiet' }, t('hint'))),
      make('div', { class: 'side' }, panel.node,
        make('section', { class: 'card reading', 'aria-label': t('reading') },
          make('h3', {}, t('reading')), make('div', { class: 'formula' }, ...formulas), drafted.node, budget))),
    make('div', { class: 'work overall' },
      make('section', { class: 'card', 'aria-label': t('overall') },
        make('h3', {}, t('overall')), make('p', { class: 'quiet' }, t('overall_lead')), outcomePlace, overall.node),
      make('section', { class: 'card', 'aria-label': t('frontier') },
        make('h3', {}, t('frontier')), make('p', { class: 'quiet' }, t('frontier_lead')), plot.node)),
    table.node, announcer,
  );

  /** Columns exist once per vocabulary, so that a bar keeps its focus while its keys are pressed. */
  function build(count) {
    if (count === size) return;
    size = count;
    charts = [createBoard(count, t, actions), createOutcome(count, t)];
    boardPlace.replaceChildren(charts[0].node);
    outcomePlace.replaceChildren(charts[1].node);
  }

  function paint() {
    frame = 0;
    const view = study(settled(state));
    build(view.p.length);
    for (const part of [presets, panel, ...charts, plot, table]) part.show(view);
    sentence.replaceChildren(...unbroken(sentenceOf(view, t)));
    formulaOf(view, t).forEach((text, at) => { formulas[at].textContent = text; });
    budget.textContent = budgetOf(view, t);
    drafted.show(targetFigures(view, t));
    overall.show(overallFigures(view, t));
  }

  /** A drag speaks once, when it rests. */
  function announce() {
    clearTimeout(announcement);
    announcement = setTimeout(() => { announcer.textContent = sentence.textContent; }, ANNOUNCE_PAUSE_MS);
  }

  function change(next) {
    state = { ...state, ...next };
    frame ||= requestAnimationFrame(paint);
    announce();
  }

  paint();
}

/** Draws the bench into element, from props.strings and props.grid, the budgets of its slider. */
export function mount(element, props) {
  const text = wording(props.strings);
  createBench(element.querySelector('.cactus-bench') ?? element, props.grid, (key, values) => text(`bench.${key}`, values));
}
