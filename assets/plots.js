// The two charts over delta. Their x axis counts grid points, so that they line up with the slider.
// plotly.js may arrive after the viewer: until then the places stay reserved and everything else works.
// The mark of the current delta lies over the chart as an element of its own: it follows the slider at
// every frame, which redrawing a chart does not.

import { gridPosition, interpolate } from './rejudge.js';

const HEIGHT = 290;
// No growing by itself: the mark of the current delta is placed by these very margins.
const MARGIN = { l: 52, r: 14, t: 46, b: 44, autoexpand: false };
const LABEL_WIDTH = 36;
const ROUND_DELTAS = [0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2];
const MARKERS = ['circle-open', 'diamond'];
const CHARTS = [
  { name: 'al', colours: { light: '#0072B2', dark: '#56B4E9' }, format: (value) => value.toFixed(2) },
  { name: 'kl', colours: { light: '#B0578F', dark: '#CC79A7' }, format: (value) => (value < 1e-9 ? '0' : Number(value.toPrecision(2)).toString()) },
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

/** What each run really reached, with the standard error where there is one. */
function realised(chart, model) {
  return model.points
    .map(({ label, delta, [chart.name]: y, [`${chart.name}_se`]: error }) => ({ label, delta, y, error: error ?? 0 }))
    .filter(({ y }) => y !== null && y !== undefined);
}

function traces(chart, model, look, t) {
  const curve = {
    x: model.grid.map((_, at) => at), y: model[chart.name], mode: 'lines', name: t('plot.curve'),
    line: { color: chart.colours[look.name], width: 2.5 },
    text: model.grid.map(String), hovertemplate: 'δ = %{text}: %{y:.3f}<extra></extra>',
  };
  const points = realised(chart, model).map(({ label, delta, y, error }, at) => ({
    x: [gridPosition(model.grid, delta)], y: [y], mode: 'markers', name: t('plot.realised', { label: withoutMarkup(label) }),
    marker: { symbol: MARKERS[at % MARKERS.length], size: 10, color: look.ink, line: { width: 2, color: look.ink } },
    error_y: { array: [error], color: look.ink, thickness: 1, width: 3 },
    hovertemplate: `δ = ${delta}: %{y:.3f}<extra></extra>`,
  }));
  return [curve, ...points];
}

function layout(chart, model, look, width, t) {
  const axis = { gridcolor: look.faint, linecolor: look.faint, zeroline: false };
  const highest = Math.max(1e-3, ...model[chart.name], ...realised(chart, model).map(({ y, error }) => y + error));
  return {
    width, height: HEIGHT, margin: MARGIN, uirevision: 'kept',
    paper_bgcolor: 'transparent', plot_bgcolor: 'transparent', font: { color: look.ink, size: 12, family: look.font },
    // On a touch screen a drag has to scroll the page.
    dragmode: matchMedia('(pointer: coarse)').matches ? false : 'zoom',
    showlegend: true,
    legend: {
      orientation: 'h', x: 0, y: 1.01, yanchor: 'bottom', font: { size: 11 }, itemclick: false, itemdoubleclick: false,
    },
    xaxis: { ...axis, title: { text: t('plot.delta') }, range: [-0.5, model.grid.length - 0.5], ...ticks(model.grid, width) },
    yaxis: { ...axis, title: { text: t(`plot.${chart.name}_axis`) }, range: [-0.02 * highest, 1.15 * highest] },
  };
}

function createChart(chart, make, t) {
  const loading = make('p', { class: 'quiet' }, t('plot.loading'));
  const place = make('div', { class: 'plot', role: 'img', 'aria-label': t('plot.aria', { title: t(`plot.${chart.name}`) }) });
  const value = make('span', {});
  const line = make('div', { class: 'plot-line', hidden: '' });
  const dot = make('div', { class: `plot-dot ${chart.name}`, hidden: '' }, value);
  const frame = make('div', { class: 'plot-frame', style: `height: ${HEIGHT}px` }, place, line, dot, loading);
  const node = make('figure', {}, make('h4', {}, t(`plot.${chart.name}`)), frame,
    make('figcaption', { class: 'quiet' }, t(`plot.${chart.name}_caption`)));
  let drawn = false;
  let pointed = null;
  line.style.top = `${MARGIN.t}px`;
  line.style.height = `${HEIGHT - MARGIN.t - MARGIN.b}px`;

  function draw(model) {
    const empty = !model[chart.name];
    place.hidden = empty;
    loading.hidden = !empty;
    if (empty) {
      point(model);
      return;
    }
    const look = theme(node);
    const shape = layout(chart, model, look, frame.clientWidth, t);
    Plotly.react(place, traces(chart, model, look, t), shape, { displayModeBar: false });
    if (!drawn) place.on('plotly_relayout', () => point(pointed));
    drawn = true;
    point(model);
  }

  /** Moves the mark of the current delta; zooming changes the ranges under it. */
  function point(model) {
    pointed = model;
    line.hidden = dot.hidden = true;
    if (!model[chart.name] || !drawn) return;
    const { xaxis, yaxis, width } = place.layout;
    const share = (position, [from, to]) => (position - from) / (to - from);
    const here = interpolate(model.grid, model[chart.name], model.delta);
    const x = share(gridPosition(model.grid, model.delta), xaxis.range);
    const y = share(here.value, yaxis.range);
    const left = MARGIN.l + x * (width - MARGIN.l - MARGIN.r);
    const top = MARGIN.t + (1 - y) * (HEIGHT - MARGIN.t - MARGIN.b);
    line.hidden = x < 0 || x > 1;
    dot.hidden = line.hidden || y < 0 || y > 1;
    line.style.transform = `translateX(${left}px)`;
    dot.style.transform = `translate(${left}px, ${top}px)`;
    dot.dataset.side = x < 0.1 ? 'right' : x > 0.9 ? 'left' : 'middle';
    value.textContent = (here.exact ? '' : '≈ ') + chart.format(here.value);
  }

  return { node, draw, point };
}

/**
 * @param make  the element builder, @param t  the lookup of wordings
 * @returns {node, draw(model), point(model)}: draw after new data, point alone after a move of delta;
 *   model = {grid, al, kl, delta, points: [{label, delta, al, al_se, kl}]}
 */
export function createPlots(make, t) {
  const charts = CHARTS.map((chart) => createChart(chart, make, t));
  const node = make('div', { class: 'plots' }, ...charts.map((chart) => chart.node));
  let latest = null;

  function point(model) {
    latest = model;
    for (const chart of charts) chart.point(model);
  }

  function draw(model) {
    latest = model;
    if (!globalThis.Plotly || node.clientWidth === 0) return;
    for (const chart of charts) chart.draw(model);
  }

  function redraw() {
    if (latest) draw(latest);
  }

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
  return { node, draw, point };
}
