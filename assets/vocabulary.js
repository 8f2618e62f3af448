// Under a token's detail: every value of its position, computed again by the loaded models when the visitor asks.
// Token text is hostile: it only ever passes through text nodes and setAttribute.

import { apart, deltaText, known, make, visible } from './elements.js';
import { positionOf } from './rejudge.js';

const ROUNDING = 1e-4; // float32 runs of the same machine stay within 2e-5 of each other, whatever the number of threads
const TYPING_PAUSE_MS = 250;
const EXPONENT_BELOW = 0.001;

/** Small values keep their size: over a whole vocabulary most of them are small. */
export function valueText(x) {
  if (x === 0) return '0';
  return x < EXPONENT_BELOW ? x.toExponential(1).replace('-', '−') : x.toFixed(3);
}

/** What the server is asked about a position of a run (cactus/page/vocabulary.py). */
export function questionOf(run, pane, position) {
  const { ids, steps, token, drafted } = position;
  const { temperature, top_k: topK, top_p: topP } = run.settings;
  return {
    made_by: run.made_by, ids, steps, token, drafted, rule: pane.rule, delta: pane.delta, parameter: pane.parameter?.value ?? null,
    temperature, top_k: topK, top_p: topP,
  };
}

/** Which of p and q differ from the recorded ones by more than rounding: {name, recorded, again}. */
export function disagreement(position, at) {
  return ['p', 'q'].map((name, k) => ({ name, recorded: position[name], again: at[k] }))
    .filter(({ recorded, again }) => recorded !== null && Math.abs(recorded - again) > ROUNDING);
}

function agreement(position, at, t) {
  const differing = disagreement(position, at);
  if (differing.length === 0) return make('p', { class: 'quiet' }, t(position.p === null ? 'values.agree_q' : 'values.agree'));
  const [recorded, again] = [0, 1].map((side) => differing.map((one) => (
    t(`values.differ_${one.name}`, { value: apart(one.recorded, one.again)[side] })
  )).join(', '));
  return make('p', { class: 'note' }, t('values.differ', { recorded, again }));
}

/** run: the log's first record; ask(question): the server's answer. Without ask, as where the page has no models, nothing is offered. */
export function createValues(run, t, ask) {
  const hint = make('p', { class: 'quiet', id: 'cactus-values-hint' }, t('values.hint'));
  const button = make('button', {
    type: 'button', class: 'ask-values', 'aria-describedby': hint.id, click: () => { if (!asking) compute(); },
  }, t('values.ask'));
  const offer = make('div', {}, button, hint);
  const status = make('p', { class: 'values-status', role: 'status', 'aria-live': 'polite' });
  const results = make('div', { class: 'values-results', hidden: '', keydown: keepArrows });
  const node = make('section', { class: 'values', 'aria-label': t('values.title'), hidden: '' }, offer, status, results);
  let shown = null; // {entry, position} of the detail that is open
  let asking = 0; // number of the last question, 0 while none is open: an answer that comes later than the next question is dropped
  let questions = 0;
  let typing = 0;

  /** @param entry  the token of the detail, null when it is closed */
  function show(entry) {
    clearTimeout(typing);
    asking = 0;
    shown = entry && { entry, position: positionOf(run, entry.pane, entry.round, entry.token) };
    node.hidden = !ask || !entry;
    offer.hidden = false;
    button.removeAttribute('aria-disabled');
    results.hidden = true;
    status.textContent = '';
    status.classList.remove('failed');
  }

  /** The detail's arrows move to other tokens; here they move the caret, the order and the table. */
  function keepArrows(event) {
    if (event.key.startsWith('Arrow')) event.stopPropagation();
  }

  /** The answer to a question, with a sentence in its place where there is none; null once it is out of date. */
  async function answered(find, by) {
    questions += 1;
    asking = questions;
    const own = asking;
    const question = { ...questionOf(run, shown.entry.pane, shown.position), find, by };
    const answer = await ask(question).catch(() => ({ error: t('values.lost') }));
    if (asking !== own) return null;
    asking = 0;
    return answer?.rows || answer?.error ? answer : { error: t('values.lost') };
  }

  function say(text, failed = false) {
    status.classList.toggle('failed', failed);
    status.textContent = text;
    if (failed) status.scrollIntoView({ block: 'nearest' });
  }

  async function compute() {
    say(t('values.computing'));
    button.setAttribute('aria-disabled', 'true');
    const answer = await answered('', 'largest');
    if (!answer) return;
    button.removeAttribute('aria-disabled');
    if (answer.error) {
      say(answer.error, true);
      return;
    }
    const focused = document.activeElement === button;
    const table = createTable(answer);
    results.replaceChildren(agreement(shown.position, answer.at, t), ...table.nodes);
    results.hidden = false;
    offer.hidden = true;
    table.draw(answer);
    if (focused) table.search.focus({ preventScroll: true });
    results.scrollIntoView({ block: 'nearest' });
  }

  function columnName(name) {
    return t(name === 'h' && !known(shown.entry.pane.delta) ? 'values.h_alg' : `values.${name}`);
  }

  function columnsText(columns) {
    const { entry: { pane, round, token } } = shown;
    if (!columns.includes('h')) return t('values.columns_none');
    if (!known(pane.delta)) return t('values.columns_h_alg');
    const own = round.drafted.includes(token) ? 'values.columns_h' : 'values.columns_h_rejected';
    return t(own, { delta: deltaText(pane.delta) });
  }

  function createTable({ columns }) {
    const search = make('input', { type: 'search', maxlength: '100', autocomplete: 'off', spellcheck: 'false', input: soon });
    const order = make('select', { change: look },
      make('option', { value: 'largest' }, t('values.largest')),
      ...columns.map((name) => make('option', { value: name }, columnName(name))));
    const heads = columns.map((name) => make('th', { scope: 'col' }, columnName(name)));
    const body = make('tbody', {});
    const sums = make('tr', {});
    const table = make('table', {},
      make('thead', {}, make('tr', {}, make('td', {}), ...heads)), body, make('tfoot', {}, sums));
    const region = make('div', { class: 'values-scroll', role: 'region', tabindex: '0', 'aria-label': t('values.region') }, table);

    function soon() {
      clearTimeout(typing);
      typing = setTimeout(look, TYPING_PAUSE_MS);
    }

    async function look() {
      clearTimeout(typing);
      say(t('values.searching'));
      const answer = await answered(search.value, order.value);
      if (!answer) return;
      if (answer.error) say(answer.error, true);
      else draw(answer);
    }

    function draw({ rows, found, positive, size, sums: totals }) {
      const numbers = { found, positive, size, shown: rows.length };
      body.replaceChildren(...rows.map(([id, text, ...values]) => make(
        'tr', { class: id === shown.position.token && shown.position.drafted ? 'drafted' : id === shown.entry.token.id ? 'chosen' : null },
        make('th', { scope: 'row' }, make('bdi', {}, visible({ t: text })), make('small', {}, String(id))),
        ...values.map((value, at) => {
          const cell = make('td', { class: columns[at].slice(0, 1) }, valueText(value));
          cell.style.setProperty('--share', value);
          return cell;
        }),
      )));
      sums.replaceChildren(
        make('th', { scope: 'row' }, found === size ? t('values.sum') : t('values.sum_found', numbers)),
        ...totals.map((value) => make('td', {}, valueText(value))),
      );
      heads.forEach((head, at) => {
        if (order.value === columns[at]) head.setAttribute('aria-sort', 'descending');
        else head.removeAttribute('aria-sort');
      });
      region.scrollTop = 0;
      say(found === 0 ? t('values.none') : t(found === size ? 'values.counts' : 'values.counts_found', numbers));
    }

    const nodes = [
      make('div', { class: 'values-controls' },
        make('label', {}, make('span', {}, t('values.find')), search), make('label', {}, make('span', {}, t('values.by')), order)),
      region, make('p', { class: 'quiet' }, t('values.columns'), columnsText(columns)),
    ];
    return { nodes, search, draw };
  }

  return { node, show };
}
