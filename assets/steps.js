// The run pass by pass: a stage that plays the events of one verifier pass in their order, and one row per pass.

import { WITHOUT_DRAW } from './detail.js';
import { apart, fixed, known, make, piece, quoted, reducedMotion, visible, whenIdle } from './elements.js';
import { passBeats, passOf } from './rejudge.js';

const BEAT_MS = { draft: 420, verify: 1000, verdict: 520, add: 900 };
const REST_MS = 1100;
const SPEEDS = [0.5, 1, 2, 4];
const PHASES = ['draft', 'verify', 'verdict', 'add'];
const ROWS_AT_ONCE = 30; // drawn per idle moment
const CONTEXT_LENGTH = 80;
const JUDGED = new Set(['accepted', 'rescued', 'rejected']);
const WAYS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

/** "drafted 5, kept 3, replaced 1, discarded 1; the verifier added ‹x›" */
export function passSentence(round, t) {
  const { drafted, kept, rejected, discarded, cut, added } = passOf(round);
  const refused = added === 'resampled' ? 'replaced' : 'rejected';
  const parts = [['drafted', drafted], ['kept', kept], [refused, rejected], ['discarded', discarded], ['cut', cut]]
    .filter(([name, many]) => many > 0 || name === 'drafted' || name === 'kept')
    .map(([name, many]) => t(`step.${name}`, { many }));
  const addition = added ? t(`step.added_${added}`, { token: quoted(round.emitted) }) : '';
  return parts.join(', ') + addition;
}

// ---- the stage ----

function short(x) {
  return known(x) ? fixed(2)(x).replace(/^0\./, '.') : '–';
}

/** The comparison that decided, with its numbers; nothing where no draw decides or nobody judged. */
function testOf(token, pane) {
  if (!JUDGED.has(token.c) || WITHOUT_DRAW.has(pane.rule)) return '';
  const [up, limit] = apart(token.u * token.p, token.g).map((x) => x.replace(/^0\./, '.'));
  return `u·p ${up}\n${token.c === 'rejected' ? '≥' : '<'} ${pane.rule === 'sps' ? 'q' : 'γ'} ${limit}`;
}

function draftCard(round, token, pane, t, open) {
  const chip = piece(token, 'pending');
  const replaced = token.c === 'rejected' && round.emitted?.c === 'resampled';
  const node = make('div', { class: `card${JUDGED.has(token.c) ? '' : ' unjudged'}`, click: () => open(token) },
    chip,
    make('span', { class: 'card-p' }, `p ${short(token.p)}`), make('span', { class: 'card-q' }, `q ${short(token.q)}`),
    make('span', { class: 'card-verdict' }, t(`step.is_${token.c}`)), make('span', { class: 'card-test' }, testOf(token, pane)),
    ...(replaced ? [make('span', { class: 'card-added' }, '↳ ', piece(round.emitted))] : []));
  return { node, chip, token };
}

function bonusCard(round, t, open) {
  const token = round.emitted;
  return make('div', { class: 'card bonus-card card-added', click: () => open(token) },
    piece(token), make('span', { class: 'card-q' }, `q ${short(token.q)}`),
    make('span', { class: 'card-verdict' }, t('step.is_bonus')));
}

/** Draws one pass, and any moment of it: a moment only toggles classes, so nothing moves while it plays. */
function createStage(t, actions) {
  const phases = PHASES.map((name) => make('li', {}, t(`step.phase_${name}`)));
  const before = make('span', {});
  const context = make('p', { class: 'step-context quiet' }, before);
  const cards = make('div', { class: 'cards', 'aria-hidden': 'true' });
  const told = make('p', { class: 'told', role: 'status' });
  const node = make('div', { class: 'stage', role: 'group', tabindex: '0', 'aria-label': t('step.stage') },
    make('ol', { class: 'phases', 'aria-hidden': 'true' }, ...phases), context, cards, told);
  let drafts = [];
  let shown = null;

  function draw(round, pane, text) {
    const open = (token) => actions.open(pane, token, node);
    shown = round;
    drafts = round.drafted.map((token) => draftCard(round, token, pane, t, open));
    const bonus = round.emitted && round.emitted.c !== 'resampled' ? [bonusCard(round, t, open)] : [];
    before.textContent = text || t('step.beginning');
    cards.replaceChildren(...drafts.map((draft) => draft.node), ...bonus);
    node.style.minHeight = `${Math.max(parseFloat(node.style.minHeight) || 0, node.offsetHeight)}px`;
  }

  function showBeat(beat, last) {
    const all = drafts.filter(({ token }) => JUDGED.has(token.c)).length;
    drafts.forEach(({ node: card, chip, token }, at) => {
      // What nobody judges is thrown away with the last verdict.
      const judged = JUDGED.has(token.c) ? at < beat.judged : beat.read && beat.judged === all;
      card.classList.toggle('proposed', at < beat.proposed);
      card.classList.toggle('judged', judged);
      chip.className = `piece ${judged ? token.c : 'pending'}`;
    });
    cards.classList.toggle('read', beat.read);
    cards.classList.toggle('reading', beat.phase === 'verify' && !last);
    cards.classList.toggle('added', beat.added);
    phases.forEach((phase, at) => phase.classList.toggle('on', !last && PHASES[at] === beat.phase));
    node.classList.toggle('over', last);
    const text = last ? passSentence(shown, t) : t(`step.tell_${beat.phase}`, { many: drafts.length });
    if (told.textContent !== text) told.textContent = text; // a screen reader says every change
  }

  return { node, draw, showBeat };
}

// ---- the rows ----

function createRow(round, number, t) {
  const order = [
    ...round.drafted.filter(({ c }) => JUDGED.has(c)), ...(round.emitted ? [round.emitted] : []),
    ...round.drafted.filter(({ c }) => !JUDGED.has(c)),
  ];
  const pieces = order.map((token) => {
    const chip = piece(token);
    chip.dataset.index = token.i;
    return chip;
  });
  const sentence = passSentence(round, t);
  const difference = make('span', { class: 'row-differs', hidden: '' }, t('step.differs'));
  const node = make('li', { role: 'option', 'aria-selected': 'false', 'aria-label': t('step.row', { number, sentence }) },
    make('span', { class: 'row-number' }, number), make('span', { class: 'row-pieces' }, ...pieces),
    make('span', { class: 'row-sentence quiet' }, sentence, difference));
  return { node, round, number, difference };
}

function createList(pane, at, t, actions) {
  const rows = [];
  const byRound = new Map();
  const byElement = new WeakMap();
  const byIndex = new Map();
  const waiting = [];
  let drawing = false;
  const list = make('ul', {
    class: 'rows', role: 'listbox', tabindex: '0', 'aria-label': t('step.rows', { label: pane.label }),
    click: (event) => withRow(event, ({ round }) => actions.choose(pane, round)),
    pointerover: (event) => withRow(event, ({ round }) => actions.hover(pane, round, indexAt(event))),
    pointerleave: () => actions.hover(null),
  });
  const count = make('span', { class: 'row-count quiet' });
  const node = make('div', { class: 'row-column' }, make('h5', {}, pane.label, ' ', count), list);

  function withRow(event, action) {
    const row = byElement.get(event.target.closest('li'));
    if (row) action(row);
  }

  function indexAt(event) {
    const { index } = event.target.closest('.piece')?.dataset ?? {};
    return index === undefined ? null : Number(index);
  }

  function drawSome(many) {
    const fragment = document.createDocumentFragment();
    for (const round of waiting.splice(0, many)) {
      const row = createRow(round, rows.length + 1, t);
      row.node.id = `cactus-pass-${at}-${rows.length}`;
      rows.push(row);
      byRound.set(round, row);
      byElement.set(row.node, row);
      for (const token of [...round.drafted, ...(round.emitted ? [round.emitted] : [])]) {
        if (!byIndex.has(token.i)) byIndex.set(token.i, new Set());
        byIndex.get(token.i).add(row);
      }
      fragment.append(row.node);
    }
    list.append(fragment);
  }

  function drawWhenIdle() {
    drawing = waiting.length > 0;
    if (!drawing) return;
    whenIdle(() => {
      drawSome(ROWS_AT_ONCE);
      drawWhenIdle();
    });
  }

  function rowOf(round) {
    if (!byRound.has(round)) drawSome(waiting.length);
    return byRound.get(round);
  }

  /** Only the list itself scrolls: the page stays where its reader is. */
  function bringIntoView({ node: row }) {
    const above = row.offsetTop - list.scrollTop;
    if (above < 0) list.scrollTop = row.offsetTop;
    if (above + row.offsetHeight > list.clientHeight) list.scrollTop = row.offsetTop + row.offsetHeight - list.clientHeight;
  }

  return {
    node, pane, rowOf,
    add(rounds) {
      waiting.push(...rounds);
      count.textContent = t('step.passes', { many: pane.rounds.length });
      if (!drawing) drawWhenIdle();
    },
    select(round, on) {
      const row = rowOf(round);
      row.node.setAttribute('aria-selected', on);
      if (!on) return;
      list.setAttribute('aria-activedescendant', row.node.id);
      bringIntoView(row);
    },
    link(index, on) { for (const { node: row } of byIndex.get(index) ?? []) row.classList.toggle('linked', on); },
    markDifference(round) {
      const row = rowOf(round);
      row.difference.hidden = false;
      row.node.setAttribute('aria-label', `${row.node.getAttribute('aria-label')}; ${t('step.differs')}`);
    },
  };
}

// ---- the player ----

/**
 * Fills `node` with the pass-by-pass view.
 * actions: {open(pane, token, from), link(index or null), markPass(pane or null, round, current)}
 * @returns {add(at, rounds), show(pane, round), play(), stop(), link(index, on), markDifference(at, round)}
 */
export function createSteps(node, panes, t, actions) {
  let pane = panes[0];
  let round = null;
  let beats = [];
  let beat = 0;
  let timer = 0;
  let playing = false;

  const lists = panes.map((each, at) => createList(each, at, t, { choose: show, hover }));
  const tabs = panes.map((each) => make('button', {
    type: 'button', 'aria-pressed': each === pane, click: () => show(each, each.rounds[0] ?? null),
  }, each.label));
  const stage = createStage(t, actions);
  const place = make('span', { class: 'step-place' });
  const play = make('button', { type: 'button', class: 'play', click: toggle });
  const [back, next] = [-1, 1].map((way) => make('button', { type: 'button', click: () => go(way) },
    t(way < 0 ? 'step.back' : 'step.next')));
  const speed = make('select', { 'aria-label': t('step.speed') },
    ...SPEEDS.map((times) => make('option', { value: times }, `${times}×`)));
  const columns = make('div', { class: 'row-columns' }, ...lists.map((list) => list.node));
  speed.value = 1;
  node.replaceChildren(
    make('div', { class: 'step-head' },
      make('h4', {}, t('step.title')), make('p', { class: 'quiet' }, t('step.lead')),
      make('div', { class: 'step-tabs', role: 'group', 'aria-label': t('step.tabs') }, ...tabs), place),
    make('div', { class: 'player' }, stage.node,
      make('div', { class: 'controls' }, back, play, next, make('label', {}, t('step.speed'), ' ', speed),
        make('span', { class: 'quiet keys' }, t('step.keys')))),
    columns,
  );
  node.addEventListener('keydown', onKey);
  showPlaying();

  function hover(over, overRound, index = null) {
    actions.markPass(over, overRound, false);
    actions.link(index);
  }

  function showPlaying() {
    play.textContent = t(playing ? 'step.pause' : 'step.play');
    node.classList.toggle('playing', playing);
  }

  function showBeat() {
    stage.showBeat(beats[beat], beat === beats.length - 1);
  }

  function textBefore(current) {
    const first = (current.drafted[0] ?? current.emitted)?.i ?? 0;
    const text = pane.kept.filter(({ i }) => i < first).map((token) => visible(token)).join('');
    return text.length > CONTEXT_LENGTH ? `…${text.slice(-CONTEXT_LENGTH).replace(/^\S*/, '')}` : text;
  }

  /** Puts a pass on the stage, at its end or at its first event. */
  function put(nextPane, nextRound, at = Infinity) {
    if (round) lists[panes.indexOf(pane)].select(round, false);
    [pane, round] = [nextPane, nextRound];
    tabs.forEach((tab, k) => tab.setAttribute('aria-pressed', panes[k] === pane));
    lists.forEach((list) => list.node.classList.toggle('current', list.pane === pane));
    if (!round) return;
    beats = passBeats(round);
    beat = Math.min(at, beats.length - 1);
    stage.draw(round, pane, textBefore(round));
    lists[panes.indexOf(pane)].select(round, true);
    showPlace();
    showBeat();
  }

  /** Of how many: a live run still grows. */
  function showPlace() {
    const number = pane.rounds.indexOf(round);
    place.textContent = t('step.place', { label: pane.label, number: number + 1, many: pane.rounds.length });
    back.disabled = number === 0;
    next.disabled = number === pane.rounds.length - 1;
  }

  /** A pass that somebody asked for: it is marked in its pane too. */
  function show(nextPane, nextRound) {
    stop();
    put(nextPane, nextRound);
    actions.markPass(pane, round, true);
  }

  function neighbour(way) {
    return pane.rounds[pane.rounds.indexOf(round) + way];
  }

  function go(way) {
    const other = neighbour(way);
    if (other) show(pane, other);
  }

  // One timer drives everything: each tick shows the next event, or the first of the next pass.
  function tick() {
    if (beat < beats.length - 1) {
      beat += 1;
      showBeat();
    } else if (neighbour(1)) {
      put(pane, neighbour(1), reducedMotion() ? Infinity : 0);
      actions.markPass(pane, round, true);
    } else {
      stop();
      return;
    }
    timer = setTimeout(tick, pause());
  }

  function pause() {
    const last = beat === beats.length - 1;
    const whole = reducedMotion() ? 3 * REST_MS : BEAT_MS[beats[beat].phase] + (last ? REST_MS : 0);
    return whole / Number(speed.value);
  }

  /** Starts at the first event of the pass on the stage, unless it was paused in the midst of it. */
  function start() {
    if (!round) return;
    stop();
    playing = true;
    if (beat === beats.length - 1 && !reducedMotion()) beat = 0;
    showBeat();
    showPlaying();
    actions.markPass(pane, round, true);
    timer = setTimeout(tick, pause());
  }

  function stop() {
    clearTimeout(timer);
    playing = false;
    showPlaying();
  }

  function toggle() {
    if (playing) stop();
    else start();
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target === speed) return;
    const other = lists.find((list) => list.pane !== pane && list.node.contains(event.target));
    if (other && event.key in WAYS) show(other.pane, other.pane.rounds[0] ?? null); // keys act on the list that has the focus
    else if (event.key in WAYS) go(WAYS[event.key]);
    else if (event.key === 'Home') show(pane, pane.rounds[0] ?? null);
    else if (event.key === 'End') show(pane, pane.rounds.at(-1) ?? null);
    else if (event.key === ' ' && event.target.tagName !== 'BUTTON') toggle();
    else return;
    event.preventDefault();
  }

  return {
    show, stop, play: start,
    add(at, rounds) {
      lists[at].add(rounds);
      if (!round && panes[at] === pane && rounds.length > 0) put(pane, rounds[0]);
      else if (round) showPlace();
    },
    link(index, on) { for (const list of lists) list.link(index, on); },
    markDifference: (at, differing) => lists[at].markDifference(differing),
  };
}
