// The panel of one token: the die roll, the probabilities behind it, and what would have happened otherwise.

import { apart, deltaText, known, make, probability, quoted, significant, visible } from './elements.js';
import { gamma, isBehindEnd, isKept, phi, rowsOf, targetRows, verdictAt } from './rejudge.js';

/** The rules whose verdict delta decides, and with them the die roll u·p < gamma at any other delta. */
export const WITH_DELTA = new Set(['sps', 'cactus']);
export const UNJUDGED = new Set(['discarded', 'cut']);
export const WITHOUT_DRAW = new Set(['tas', 'topk', 'fuzzy']); // rules whose verdict no draw decides

/** The range of u: accepted by SpS, added by the rule, refused; and where the draw fell. */
export function dieRoll(token, raised, t) {
  const all = phi(token.p, raised);
  const sps = Math.min(all, phi(token.p, token.q));
  const place = (name, from, to = from) => {
    const part = make('span', { class: name });
    part.style.setProperty('--from', from);
    part.style.setProperty('--to', to);
    return part;
  };
  const label = (name, value, text) => {
    const part = make('span', { class: name }, text);
    part.style.setProperty('--at', value);
    return part;
  };
  const values = { phi: significant(all), u: significant(token.u) };
  return make(
    'div', { class: 'die', role: 'img', 'aria-label': t('detail.die', values) },
    label('phi-label', all, t('detail.phi', values)),
    make('div', { class: 'die-bar' },
      place('by-sps', 0, sps), place('by-delta', sps, all), place('refused', all, 1), place('draw', token.u)),
    label('u-label', token.u, t('detail.u', values)),
  );
}

export function dieKey(t, added = 'detail.legend_delta') {
  const key = (name, text) => make('span', {}, make('i', { class: name }), t(text));
  return make('p', { class: 'die-key quiet' }, key('by-sps', 'detail.legend_sps'), key('by-delta', added),
    key('refused', 'detail.legend_reject'));
}

function shareCell(name, value) {
  const cell = make('td', { class: name }, probability(value));
  cell.style.setProperty('--share', known(value) ? value : 0);
  return cell;
}

/** columns: [{key, name, class, summed}], rows: [{text, drafted, chosen, ...values}] with text null for the rest. */
function distributionTable(columns, rows, t) {
  const head = make('tr', {}, make('th', { scope: 'col' }, ''), ...columns.map(({ name }) => make('th', { scope: 'col' }, name)));
  const body = rows.map((row) => make(
    'tr', { class: row.drafted ? 'drafted' : row.chosen ? 'chosen' : null },
    make('th', { scope: 'row' },
      row.text === null ? make('em', {}, t('detail.rest')) : make('bdi', {}, visible({ t: row.text }))),
    ...columns.map((column) => shareCell(column.class, row[column.key])),
  ));
  const sum = (column) => {
    const values = rows.map((row) => row[column.key]);
    return column.summed && values.every(known) ? values.reduce((total, value) => total + value, 0) : null;
  };
  const foot = make('tr', {}, make('th', { scope: 'row' }, t('detail.sum')),
    ...columns.map((column) => make('td', {}, probability(sum(column)))));
  return make('table', {}, make('caption', {}, t('detail.table')),
    make('thead', {}, head), make('tbody', {}, ...body), make('tfoot', {}, foot));
}

const P_AND_Q = [{ key: 'p', name: 'p', class: 'p', summed: true }, { key: 'q', name: 'q', class: 'q', summed: true }];

function figures(pairs) {
  return make('dl', { class: 'figures' }, ...pairs.map(([name, value]) => (
    make('div', {}, make('dt', {}, name), make('dd', {}, significant(value)))
  )));
}

function criticalText(token, t) {
  if (isBehindEnd(token)) return '';
  if (!known(token.dc)) return t('critical.never');
  if (token.u * token.p < token.q) return t('critical.always');
  return t('critical.from', { delta: significant(token.dc) });
}

/** The verdict of a rule without delta, in its own terms. */
function otherSentence(token, pane, t) {
  if (pane.rule === 'tas') return t(isKept(token) ? 'verdict.tas_kept' : 'verdict.tas_rejected', { q: significant(token.q) });
  const [up, raised] = apart(token.u * token.p, token.g);
  return t(isKept(token) ? 'verdict.other_kept' : 'verdict.other_rejected', { label: pane.label, up, gamma: raised });
}

function recordedSentence(token, pane, t) {
  if (!WITH_DELTA.has(pane.rule) && !UNJUDGED.has(token.c)) return otherSentence(token, pane, t);
  if (token.c === 'rejected' && token.q === 0) return t('verdict.impossible');
  const limit = token.c === 'accepted' ? token.q : token.g;
  const [up, against] = apart(token.u * token.p, limit);
  return t(`verdict.${token.c}`, { up, q: token.c === 'rescued' ? significant(token.q) : against, gamma: against });
}

/** What the recorded replacement draw holds ready for a token that was kept; nothing where the rule could not have rejected it. */
function alternative(token, t) {
  if (!isKept(token) || !token.alt || phi(token.p, token.g) === 1) return [];
  return [make('p', {}, t('detail.alternative', { token: quoted({ t: token.alt[1] }) }))];
}

function whatIf(entry, delta, t) {
  const { token } = entry;
  const [up, raised] = apart(token.u * token.p, gamma(token.q, delta));
  return t(`whatif.${verdictAt(entry.thresholds, delta)}`, { up, gamma: raised });
}

function numbers(token) {
  return figures([['p', token.p], ['q', token.q], ['γ', token.g], ['φ', phi(token.p, token.g)], ['u', token.u]]);
}

const closing = (token, t, columns = 'detail.columns') => [
  make('p', { class: 'quiet' }, t(columns)),
  ...(token.lumped ? [make('p', { class: 'quiet' }, t('detail.lumped'))] : []),
];

/** What is known about the divergence here: of what comes out, of this token's own target, and what bounds either. */
function guarantee(token, pane, t) {
  const lines = [];
  if (known(token.kl)) {
    const limit = known(token.klp) ? significant(token.klp) : t('guarantee.infinite');
    lines.push(t('guarantee.position', { kl: significant(token.kl), limit }));
    if (known(token.cert)) lines.push(t('guarantee.certificate', { bound: significant(token.cert) }));
  }
  if (token.grow) {
    const [small, middle, large, largest] = token.grow.map(significant);
    lines.push(t('guarantee.growth', { small, middle, large, largest }));
  }
  if (known(token.klh) && pane.delta > 0) {
    const values = { klh: significant(token.klh), delta: deltaText(pane.delta) };
    const within = t(token.klh > pane.delta ? 'guarantee.over' : 'guarantee.within');
    lines.push(pane.rule === 'cactus'
      ? t('guarantee.taylor', { ...values, within, bound: significant(Math.log(1 + 2 * pane.delta)) })
      : t('guarantee.target', values));
  }
  return lines.map((line) => make('p', { class: 'quiet' }, line));
}

function otherDetail({ token, pane }, t) {
  const die = WITHOUT_DRAW.has(pane.rule) ? [] : [numbers(token), dieRoll(token, token.g, t), dieKey(t, 'detail.legend_rule')];
  const rows = targetRows(token, token, token.g);
  return [
    make('p', { class: 'verdict' }, recordedSentence(token, pane, t)), ...die, ...alternative(token, t),
    ...guarantee(token, pane, t), distributionTable(P_AND_Q, rows, t), ...closing(token, t, 'detail.columns_plain'),
  ];
}

function draftedDetail(entry, delta, t) {
  const { token, pane } = entry;
  const rows = targetRows(token, token, token.g);
  const columns = [...P_AND_Q, { key: 'h', name: t('detail.h_run', { delta: deltaText(pane.delta) }), class: 'h', summed: true }];
  const parts = [
    make('p', { class: 'verdict' }, recordedSentence(token, pane, t)), numbers(token),
    make('h5', {}, t('detail.run', { delta: deltaText(pane.delta) })), dieRoll(token, token.g, t),
  ];
  if (delta !== pane.delta) {
    const raised = gamma(token.q, delta);
    const moved = targetRows(token, token, raised);
    rows.forEach((row, at) => { row.moved = moved[at].h; });
    columns.push({ key: 'moved', name: t('detail.h_run', { delta: deltaText(delta) }), class: 'h', summed: true });
    parts.push(
      make('h5', {}, t('detail.slider', { delta: deltaText(delta) })), dieRoll(token, raised, t),
      ...(isBehindEnd(token) ? [] : [make('p', {}, whatIf(entry, delta, t))]),
    );
  }
  return [
    ...parts, dieKey(t), make('p', { class: 'critical' }, criticalText(token, t)), ...alternative(token, t),
    ...guarantee(token, pane, t), distributionTable(columns, rows, t), ...closing(token, t),
  ];
}

function resampledDetail({ token, pane }, rejected, t) {
  // The row of the rejected draft is the row of this position.
  const rows = targetRows(rejected, rejected, rejected.g, [rejected, token]).map((row) => (
    { ...row, chosen: row.id === token.id, residual: row.id === null ? null : Math.max(0, row.h - row.p) }
  ));
  const columns = [
    ...P_AND_Q, { key: 'h', name: 'h', class: 'h', summed: true },
    { key: 'residual', name: t('detail.residual'), class: 'residual' },
  ];
  return [
    make('p', { class: 'verdict' }, t('verdict.resampled', { rejected: visible(rejected), label: pane.label })),
    distributionTable(columns, rows, t), make('p', { class: 'quiet' }, t('detail.columns_residual')),
  ];
}

function originOf({ token, round, pane }) {
  if (token.c === 'resampled') return pane.rule === 'tas' ? 'tas_resampled' : 'other_resampled';
  return round.drafted.length > 0 ? 'bonus' : 'nothing_drafted';
}

function emittedDetail(entry, t) {
  const { token, round, pane } = entry;
  const rejected = round.drafted.find((draft) => draft.c === 'rejected');
  if (token.c === 'resampled' && rejected && WITH_DELTA.has(pane.rule)) return resampledDetail(entry, rejected, t);
  const rows = rowsOf(token, [token]).map((row) => ({ ...row, chosen: row.id === token.id }));
  return [
    make('p', { class: 'verdict' }, t(`verdict.${originOf(entry)}`, { label: pane.label })),
    distributionTable(P_AND_Q.slice(rows.every((row) => !known(row.p)) ? 1 : 0), rows, t),
  ];
}

function partsOf(entry, delta, t) {
  if (!entry.round.drafted.includes(entry.token)) return emittedDetail(entry, t);
  return WITH_DELTA.has(entry.pane.rule) ? draftedDetail(entry, delta, t) : otherDetail(entry, t);
}

function covers(sheet, element) {
  const [above, below] = [sheet.getBoundingClientRect(), element.getBoundingClientRect()];
  return above.top < below.bottom && above.bottom > below.top && above.left < below.right && above.right > below.left;
}

/** values: the panel under the token's own, {node, show(entry or null)}; onShown(entry or null): told what is shown from now on */
export function createDetail(t, currentDelta, values, onShown) {
  let shown = null;
  let opener = null;
  const title = make('h3', { tabindex: '-1' }, t('detail.title'));
  const close = make('button', {
    type: 'button', class: 'close', 'aria-label': t('detail.close'), hidden: '', click: shut,
  }, '×');
  const body = make('div', { class: 'detail-body' });
  const node = make('aside', { class: 'detail', 'aria-label': t('detail.label'), keydown: onKey },
    make('div', { class: 'detail-head' }, title, close), body, values.node);

  function explain() {
    title.textContent = t('detail.title');
    body.replaceChildren(
      make('p', {}, t('detail.formula_text')), make('p', { class: 'formula' }, t('detail.formula')),
      make('p', { class: 'quiet' }, t('detail.hint')),
    );
  }

  function refresh() {
    if (!shown) return;
    const { token, pane, round } = shown;
    body.replaceChildren(
      make('p', { class: 'quiet' }, t('detail.place', { label: pane.label, index: token.i, number: round.block + 1 }), ' · ',
        make('span', { class: `token ${token.c}` }, t(`class.${token.c}`))),
      ...partsOf(shown, currentDelta(), t),
    );
  }

  /** @param from  what gets the focus back: the token, or what stands for it elsewhere on the page */
  function open(entry, from = entry.element) {
    shown?.element.classList.remove('opened');
    shown = entry;
    opener = from;
    entry.element.classList.add('opened');
    title.replaceChildren(make('bdi', { class: 'big-token' }, visible(entry.token)));
    close.hidden = false;
    node.classList.add('open');
    // An embedding page that stretches the frame to its content has no bottom edge to hold a sheet.
    node.classList.toggle('framed', 'parentIFrame' in window);
    const top = node.closest('.cactus-viewer').getBoundingClientRect().top;
    node.style.setProperty('--token-bottom', `${opener.getBoundingClientRect().bottom - top}px`);
    refresh();
    values.show(entry);
    onShown(entry);
    takeFocus();
    if (covers(node, opener)) opener.scrollIntoView({ block: 'start' });
  }

  function takeFocus() {
    if (shown) title.focus({ preventScroll: true });
  }

  function shut() {
    if (!shown) return;
    const { element } = shown;
    element.classList.remove('opened');
    shown = null;
    close.hidden = true;
    node.classList.remove('open');
    values.show(null);
    onShown(null);
    explain();
    opener.focus({ preventScroll: true });
  }

  function onKey(event) {
    if (!shown || !event.key.startsWith('Arrow') || event.key === 'ArrowUp' || event.key === 'ArrowDown') return;
    open(shown.view.neighbour(shown, event.key));
    event.preventDefault();
  }

  explain();
  return { node, open, shut, refresh, takeFocus };
}
