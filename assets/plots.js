// The charts: two over delta, the drafts kept per pass, and acceptance against divergence; and the strip of divergence
// under each text. The axis of delta counts grid points, so that it lines up with the slider.
// plotly.js may arrive after the viewer: until then the places stay reserved and everything else works.
// The mark of the current delta lies over a chart as an element of its own: it follows the slider at
// every frame, which redrawing a chart does not.

import { fixed, known, make, quoted, significant } from './elements.js';
import { gridPosition, interpolate, keptCounts, passOf, spendingOf } from './rejudge.js';

const HEIGHT = 290;
// No growing by itself: the mark of the current delta is placed by these very margins.
const MARGIN = { l: 52, r: 14, t: 46, b: 44, autoexpand: false };
// Acceptance against divergence names every rule.
const TALL_HEIGHT = 430;
const TALL_LEGEND = 104;
const LABEL_WIDTH = 36;
const NARROW = 450;
const LABEL_REACH = 2; // grid points on either side that the number at the mark covers
const ROUND_DELTAS = [0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2];
const BAR_GAP = 0.25; // between the bars of two numbers of drafts, and below between the panes' own
const BAR_GROUP_GAP = 0.06;
const MARKERS = ['circle-open', 'diamond'];
const BLUE = { light: '#0072B2', dark: '#56B4E9' };
const PURPLE = { light: '#B0578F', dark: '#CC79A7' };
const PANE_BARS = [{ colour: BLUE, pattern: '' }, { colour: PURPLE, pattern: '/' }];
// One per rule of the frontier; colour, mark and dash each tell the rules apart on their own.
const RULE_STYLES = [
  { colour: { light: '#555555', dark: '#BBBBBB' }, symbol: 'circle-open', dash: 'solid' },
  { colour: PURPLE, symbol: 'circle', dash: 'solid' },
  { colour: { light: '#6A4FB3', dark: '#B5A2F0' }, symbol: 'circle-dot', dash: 'dash' },
  { colour: { light: '#C25500', dark: '#F08A3C' }, symbol: 'x', dash: 'dot' },
  { colour: BLUE, symbol: 'square', dash: 'dash' },
  { colour: { light: '#8F6400', dark: '#E69F00' }, symbol: 'cross', dash: 'longdash' },
  { colour: { light: '#00785A', dark: '#2CC79B' }, symbol: 'triangle-up', dash: 'dashdot' },
  { colour: { light: '#0B7285', dark: '#66D9E8' }, symbol: 'star', dash: 'longdashdot' },
  { colour: { light: '#A61E4D', dark: '#FAA2C1' }, symbol: 'triangle-down', dash: 'dot' },
];

/** Labels come from the run log, and plotly reads some markup in its texts. */
function withoutMarkup(text) {
  return text.replace(/[<>&]/g, '');
}

/** The round deltas that find room beside each other, from the left. */
function ticks(grid, width) {
  const room = (LABEL_WIDTH * grid.length) / width;
  const kept = [];
  for (const delta of ROUND_DELTAS.filter((value) => value <= grid[grid.length - 1])) {
    const at = gridPosition(grid, delta);
    if (kept.every((other) => at - other.at >= room)) kept.push({ at, delta });
  }
  return { tickvals: kept.map(({ at }) => at), ticktext: kept.map(({ delta }) => String(delta)), tickangle: 0 };
}

function theme(host) {
  const { color, fontFamily } = getComputedStyle(host);
  const dark = host.closest('.dark') !== null;
  const faint = dark ? 'rgba(255,255,255,.13)' : 'rgba(0,0,0,.09)';
  return { ink: color, font: fontFamily, name: dark ? 'dark' : 'light', faint };
}

function layout(look, width, { x, y, margin = MARGIN, height = HEIGHT, ...more }) {
  const axis = { gridcolor: look.faint, linecolor: look.faint, zeroline: false };
  return {
    width, height, margin, uirevision: 'kept',
    paper_bgcolor: 'transparent', plot_bgcolor: 'transparent', font: { color: look.ink, size: 12, family: look.font },
    // On a touch screen a drag has to scroll the page.
    dragmode: matchMedia('(pointer: coarse)').matches ? false : 'zoom',
    showlegend: true,
    // A narrow chart would stack its names beyond its upper edge if they kept to the width of the axes: they begin at its left edge.
    legend: {
      orientation: 'h', x: width < NARROW ? -MARGIN.l / (width - MARGIN.l - MARGIN.r) : 0, xanchor: 'left', y: 1.01, yanchor: 'bottom', font: { size: 11 }, itemclick: false, itemdoubleclick: false,
    },
    xaxis: { ...axis, ...x }, yaxis: { ...axis, ...y }, ...more,
  };
}

function marker(at, look) {
  return { symbol: MARKERS[at % MARKERS.length], size: 10, color: look.ink, line: { width: 2, color: look.ink } };
}

// ---- the curves over delta ----

/** What each run really reached, with the standard error where there is one. */
function realised(name, model) {
  return model.points
    .map(({ label, delta, [name]: y, [`${name}_se`]: error }) => ({ label, delta, y, error: error ?? 0 }))
    .filter(({ delta, y }) => known(delta) && known(y));
}

function curveOf(name, colour, format) {
  return {
    name, kind: 'plot', format, dotted: true,
    empty: (model) => !model[name],
    hidden: (model) => !model.onVerifier,
    traces(model, look, t) {
      const curve = {
        x: model.grid.map((_, at) => at), y: model[name], mode: 'lines', name: t('plot.curve'),
        line: { color: colour[look.name], width: 2.5 },
        text: model.grid.map(String), hovertemplate: 'δ = %{text}: %{y:.3f}<extra></extra>',
      };
      const points = realised(name, model).map(({ label, delta, y, error }, at) => ({
        x: [gridPosition(model.grid, delta)], y: [y], mode: 'markers', name: t('plot.realised', { label: withoutMarkup(label) }),
        marker: marker(at, look), error_y: { array: [error], color: look.ink, thickness: 1, width: 3 },
        hovertemplate: `δ = ${delta}: %{y:.3f}<extra></extra>`,
      }));
      return [curve, ...points];
    },
    layout(model, look, width, t) {
      const highest = Math.max(1e-3, ...model[name], ...realised(name, model).map(({ y, error }) => y + error));
      return layout(look, width, {
        x: { title: { text: t('plot.delta') }, range: [-0.5, model.grid.length - 0.5], ...ticks(model.grid, width) },
        y: { title: { text: t(`plot.${name}_axis`) }, range: [-0.02 * highest, 1.15 * highest] },
      });
    },
    dot(model) {
      const { value, exact } = interpolate(model.grid, model[name], model.delta);
      const x = gridPosition(model.grid, model.delta);
      // Where a run's point lies just above, the number goes below.
      const below = realised(name, model).some(({ delta, y }) => y > value && Math.abs(gridPosition(model.grid, delta) - x) < LABEL_REACH);
      return { x, y: value, text: (exact ? '' : '≈ ') + format(value), below };
    },
  };
}

// ---- drafts kept per pass ----

const HISTOGRAM = {
  name: 'hist', kind: 'chart',
  empty: ({ panes }) => panes.every(({ rounds }) => rounds.length === 0),
  hidden: () => false,
  traces({ panes, most }, look, t) {
    return panes.filter(({ rounds }) => rounds.length > 0).map(({ label, rounds, stats }, at) => {
      const { colour, pattern } = PANE_BARS[at % PANE_BARS.length];
      const counts = keptCounts(rounds, most);
      return {
        type: 'bar', x: counts.map((_, kept) => kept), y: counts,
        name: t('hist.pane', { label: withoutMarkup(label), passes: rounds.length, al: fixed(2)(stats.al) }),
        marker: { color: colour[look.name], pattern: { shape: pattern, fillmode: 'overlay', fgcolor: look.name === 'dark' ? '#000' : '#fff', size: 7 } },
        text: counts.map((many) => (many > 0 ? String(many) : '')), textposition: 'outside', cliponaxis: false,
        hovertemplate: `${t('hist.hover')}<extra></extra>`,
      };
    });
  },
  layout({ panes, most }, look, width, t) {
    const highest = Math.max(1, ...panes.flatMap(({ rounds }) => keptCounts(rounds, most)));
    return layout(look, width, {
      x: { title: { text: t('hist.x') }, dtick: 1, range: [-0.6, most + 0.6] },
      y: { title: { text: t('hist.y') }, range: [0, 1.18 * highest], dtick: highest < 6 ? 1 : undefined },
      bargap: BAR_GAP, bargroupgap: BAR_GROUP_GAP,
    });
  },
  /** The bar that counts a pass, in the units of the axes. */
  bar({ panes, most }, { pane, round }) {
    const drawn = panes.filter(({ rounds }) => rounds.length > 0);
    const { kept } = passOf(round);
    const slot = (1 - BAR_GAP) / drawn.length;
    const left = kept - (1 - BAR_GAP) / 2 + slot * (drawn.indexOf(pane) + BAR_GROUP_GAP / 2);
    return { left, width: slot * (1 - BAR_GROUP_GAP), height: keptCounts(pane.rounds, most)[kept] };
  },
};

// ---- acceptance against divergence, with the optimum ----

/** Up to where the axis goes: rules that spend a multiple of what Cactus spends would squeeze everything else to the left. */
function widest({ frontier, panes }) {
  const all = frontier.rules.flatMap(({ points }) => points.map(({ x }) => x));
  const cactus = frontier.rules.filter(({ rule }) => rule === 'cactus').flatMap(({ points }) => points.map(({ x }) => x));
  const reached = panes.map(({ stats }) => stats?.kl).filter(Number.isFinite);
  return 1.05 * Math.max(1e-3, Math.min(Math.max(...all), 1.6 * Math.max(0, ...(cactus.length > 0 ? cactus : all))), ...reached);
}

const FRONTIER = {
  name: 'frontier', kind: 'chart', dotted: true, height: TALL_HEIGHT,
  empty: () => false,
  hidden: ({ frontier }) => !frontier,
  traces({ frontier, panes }, look, t) {
    const line = ({ points }) => ({ x: points.map(({ x }) => x), y: points.map(({ y }) => y) });
    const best = {
      ...line({ points: frontier.optimum }), mode: 'lines', name: t('frontier.optimum'),
      line: { color: look.ink, width: 3 }, hovertemplate: `${t('frontier.optimum')}: %{y:.3f}<extra></extra>`,
    };
    const rules = frontier.rules.map((rule, at) => {
      const { colour, symbol, dash } = RULE_STYLES[at % RULE_STYLES.length];
      return {
        ...line(rule), mode: 'lines+markers', name: withoutMarkup(rule.label),
        line: { color: colour[look.name], width: 1.5, dash }, marker: { color: colour[look.name], symbol, size: 7 },
        text: rule.points.map(({ parameter }) => significant(parameter)),
        hovertemplate: `${t('frontier.hover')}<extra>${withoutMarkup(rule.label)}</extra>`,
      };
    });
    const runs = panes.filter(({ stats }) => known(stats?.kl) && known(stats.accepted_per_judged)).map(({ label, stats }, at) => ({
      x: [stats.kl], y: [stats.accepted_per_judged], mode: 'markers', marker: { ...marker(at, look), size: 12 },
      name: t('plot.realised', { label: withoutMarkup(label) }), hovertemplate: 'KL %{x:.3f}, %{y:.3f}<extra></extra>',
    }));
    return [best, ...rules, ...runs];
  },
  layout(model, look, width, t) {
    const right = widest(model);
    const { frontier, panes } = model;
    const seen = [...frontier.optimum, ...frontier.rules.flatMap(({ points }) => points)].filter(({ x }) => x <= right).map(({ y }) => y);
    const lowest = Math.min(...seen, ...panes.map(({ stats }) => stats?.accepted_per_judged).filter(known));
    return layout(look, width, {
      x: { title: { text: t('frontier.x') }, range: [-0.03 * right, right] },
      y: { title: { text: t('frontier.y') }, range: [lowest - 0.08 * (1 - lowest), 1.04] },
      margin: { ...MARGIN, t: TALL_LEGEND }, height: TALL_HEIGHT,
    });
  },
  /** Where Cactus is at the slider's delta. */
  dot({ frontier, delta }) {
    const points = frontier.rules.find(({ rule }) => rule === 'cactus')?.points ?? [];
    const grid = points.map(({ parameter }) => parameter);
    if (points.length === 0 || delta < grid[0] || delta > grid.at(-1)) return null;
    const at = (key) => interpolate(grid, points.map((point) => point[key]), delta);
    const { value, exact } = at('y');
    // Above it lies the point that the run reached.
    return { x: at('x').value, y: value, text: (exact ? '' : '≈ ') + fixed(2)(value), below: true };
  },
};

const CHARTS = [
  curveOf('al', BLUE, fixed(2)),
  curveOf('kl', PURPLE, (value) => (value < 1e-9 ? '0' : Number(value.toPrecision(2)).toString())),
  HISTOGRAM, FRONTIER,
];

// ---- one chart on the page ----

function createChart(chart, t) {
  const height = chart.height ?? HEIGHT;
  const loading = make('p', { class: 'quiet' }, t('plot.loading'));
  const titles = chart.kind === 'plot' ? `plot.${chart.name}` : `${chart.name}.title`;
  const captions = chart.kind === 'plot' ? `plot.${chart.name}_caption` : `${chart.name}.caption`;
  const aria = t(chart.kind === 'plot' ? 'plot.aria' : `${chart.name}.aria`, { title: t(titles) });
  const place = make('div', { class: chart.kind, role: 'img', 'aria-label': aria });
  const value = make('span', {});
  const line = make('div', { class: 'plot-line', hidden: '' });
  const dot = make('div', { class: `plot-dot ${chart.name}`, hidden: '' }, value);
  const frame = make('div', { class: 'plot-frame', style: `height: ${height}px` }, place, ...(chart.dotted ? [line, dot] : []), loading);
  const node = make('figure', {}, make('h4', {}, t(titles)), frame, make('figcaption', { class: 'quiet' }, t(captions)));
  let drawn = false;
  let pointed = null;
  let marked = []; // outlines over bars

  /** Hides or shows without drawing; tells whether there is something to draw. */
  function prepare(model) {
    const hidden = chart.hidden(model);
    const empty = hidden || chart.empty(model);
    node.hidden = hidden;
    place.hidden = empty;
    loading.hidden = !empty;
    return !empty;
  }

  function draw(model) {
    if (prepare(model)) {
      const look = theme(node);
      Plotly.react(place, chart.traces(model, look, t), chart.layout(model, look, frame.clientWidth, t), { displayModeBar: false });
      if (!drawn && chart.dotted) place.on('plotly_relayout', () => point(pointed));
      drawn = true;
    }
    mark(model, []);
    point(model);
  }

  /** Moves the mark of the current delta; zooming changes the ranges under it. */
  function point(model) {
    pointed = model;
    if (!chart.dotted) return;
    line.hidden = dot.hidden = true;
    if (!drawn || chart.hidden(model) || chart.empty(model)) return;
    const here = chart.dot(model);
    if (!here) return;
    const { xaxis, yaxis, width, margin } = place.layout;
    const share = (position, [from, to]) => (position - from) / (to - from);
    const x = share(here.x, xaxis.range);
    const y = share(here.y, yaxis.range);
    const left = margin.l + x * (width - margin.l - margin.r);
    const top = margin.t + (1 - y) * (height - margin.t - margin.b);
    line.style.top = `${margin.t}px`;
    line.style.height = `${height - margin.t - margin.b}px`;
    line.hidden = x < 0 || x > 1;
    dot.hidden = line.hidden || y < 0 || y > 1;
    line.style.transform = `translateX(${left}px)`;
    dot.style.transform = `translate(${left}px, ${top}px)`;
    dot.dataset.side = x < 0.1 ? 'right' : x > 0.9 ? 'left' : 'middle';
    dot.classList.toggle('below', here.below);
    value.textContent = here.text;
  }

  /** Outlines the bars of these passes, each {pane, round}: elements of their own, since drawing anew costs more than a frame. */
  function mark(model, passes) {
    for (const outline of marked) outline.remove();
    marked = [];
    if (!drawn || !chart.bar || passes.length === 0) return;
    const { xaxis, yaxis, width, margin } = place.layout;
    const scaleX = (width - margin.l - margin.r) / (xaxis.range[1] - xaxis.range[0]);
    const scaleY = (height - margin.t - margin.b) / (yaxis.range[1] - yaxis.range[0]);
    marked = passes.map((pass) => chart.bar(model, pass)).map((bar) => make('div', { class: 'plot-bar', style: `
      left: ${margin.l + scaleX * (bar.left - xaxis.range[0])}px; width: ${scaleX * bar.width}px;
      bottom: ${margin.b}px; height: ${scaleY * (bar.height - yaxis.range[0])}px` }));
    frame.append(...marked);
  }

  return { node, kind: chart.kind, prepare, draw, point, mark };
}

/**
 * @param t  the lookup of wordings
 * @returns {node, figures: one element per chart's name, draw(model), point(model), mark(passes)}: draw after new data, point alone after a move
 *   of delta; mark(passes) to outline the bars that count these passes, each {pane, round}; model = {grid, al, kl, delta, onVerifier, points: [{label, delta, al, al_se, kl}], panes, most, frontier}, with
 *   onVerifier telling whether the curves have contexts of the verifier's own, and most the length of a block
 */
export function createPlots(t) {
  const charts = CHARTS.map((chart) => createChart(chart, t));
  const node = make('div', { class: 'plots' }, ...charts.map((chart) => chart.node));
  const near = new Set();
  let latest = null;
  let timer = 0;

  function point(model) {
    latest = model;
    for (const chart of charts) chart.point(model);
  }

  function mark(passes) {
    for (const chart of charts) chart.mark(latest, passes);
  }

  const ready = () => globalThis.Plotly && latest && node.clientWidth > 0;

  /** The charts that wait below the screen are drawn when they come near it, one at a time: a frame has no room for all. */
  function drawNear() {
    clearTimeout(timer);
    const waiting = charts.filter((chart) => near.has(chart));
    const next = () => {
      const chart = waiting.shift();
      if (!chart || !ready()) return;
      chart.draw(latest);
      timer = setTimeout(next);
    };
    timer = setTimeout(next);
  }

  function draw(model) {
    latest = model;
    for (const chart of charts) chart.prepare(model);
    if (!ready()) return;
    for (const chart of charts.filter(({ kind }) => kind === 'plot')) chart.draw(model);
    drawNear();
  }

  function redraw() {
    if (latest) draw(latest);
  }

  const watcher = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) {
      const chart = charts.find((each) => each.node === target);
      if (isIntersecting) near.add(chart);
      else near.delete(chart);
    }
    drawNear();
  }, { rootMargin: '300px' });
  for (const chart of charts.filter(({ kind }) => kind === 'chart')) watcher.observe(chart.node);

  // A script's load event does not bubble, but it is captured.
  function onScript() {
    if (!globalThis.Plotly) return;
    document.removeEventListener('load', onScript, true);
    redraw();
  }
  document.addEventListener('load', onScript, true);
  const themeChange = new MutationObserver(redraw);
  for (const place of [document.documentElement, document.body]) {
    themeChange.observe(place, { attributes: true, attributeFilter: ['class'] });
  }
  new ResizeObserver(redraw).observe(node);
  return { node, figures: Object.fromEntries(CHARTS.map(({ name }, at) => [name, charts[at].node])), draw, point, mark };
}

// ---- the strip under a text ----

const BARS_PER_LINE = 128;

/**
 * One bar per judged position, as high as the divergence there. A single tab stop, like the text above it.
 * actions: {open(token, from), link(index or null)}
 */
export function createStrip(pane, t, actions) {
  const bars = [];
  const byElement = new WeakMap();
  const byIndex = new Map();
  let sum = 0;
  let current = null;

  const list = make('div', {
    class: 'bars', role: 'group', 'aria-label': t('budget.strip', { label: pane.label }),
    click: (event) => withBar(event, open),
    pointerover: (event) => withBar(event, ({ token }) => actions.link(token.i)),
    pointerleave: () => actions.link(null),
    focusin: (event) => withBar(event, (bar) => { makeCurrent(bar); actions.link(bar.token.i); }),
    focusout: () => actions.link(null),
    keydown: onKey,
  });
  const total = make('p', { class: 'budget-sum' }, t('budget.waiting'));
  const node = make('div', { class: 'budget' },
    make('h4', {}, t('budget.title')), list, total, make('p', { class: 'quiet' }, t('budget.bound')));

  function withBar(event, action) {
    const bar = byElement.get(event.target);
    if (bar) action(bar);
  }

  function open({ token, element }) {
    actions.open(token, element);
  }

  function makeCurrent(bar) {
    current?.element.setAttribute('tabindex', '-1');
    current = bar;
    bar.element.setAttribute('tabindex', '0');
  }

  function onKey(event) {
    withBar(event, (bar) => {
      const at = bars.indexOf(bar);
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: bars.length - 1 }[event.key];
      if (to !== undefined) bars[to]?.element.focus();
      else if (event.key === 'Enter' || event.key === ' ') open(bar);
      else return;
      event.preventDefault();
    });
  }

  function addBar({ token, kl }) {
    const finite = Number.isFinite(kl);
    const text = finite ? significant(kl) : '∞';
    const element = make('span', {
      class: `bar${finite ? '' : ' unbounded'}`, role: 'button', tabindex: '-1',
      'aria-label': t('budget.bar', { index: token.i, token: quoted(token), kl: text }), title: `${quoted(token)} ${text}`,
    });
    element.style.setProperty('--kl', finite ? kl : 1);
    const bar = { token, element };
    byElement.set(element, bar);
    if (!byIndex.has(token.i)) byIndex.set(token.i, []);
    byIndex.get(token.i).push(element);
    bars.push(bar);
    sum += kl;
    return element;
  }

  function add(rounds) {
    const spent = rounds.flatMap(spendingOf);
    list.append(...spent.map(addBar));
    if (bars.length === 0) return;
    if (!current) makeCurrent(bars[0]);
    list.style.setProperty('--columns', Math.min(bars.length, BARS_PER_LINE));
    const values = { sum: significant(sum), mean: significant(sum / bars.length), many: bars.length };
    total.textContent = t(!Number.isFinite(sum) ? 'budget.unbounded' : sum < 1e-9 ? 'budget.nothing' : 'budget.sum', values);
  }

  return {
    node, add,
    link(index, on) { for (const element of byIndex.get(index) ?? []) element.classList.toggle('linked', on); },
  };
}
