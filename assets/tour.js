// The guided tour: each step lights up a part of the page and explains it with the numbers of the log that is shown.
// The last one asks a question, which the slider of delta answers.

import { dieKey, dieRoll } from './detail.js';
import { apart, deltaText, fixed, known, make, quoted, reducedMotion, significant } from './elements.js';
import {
  curves, firstAccepting, gamma, interpolate, judgeAnswer, passOf, phi, sameDraws, spendingOf, teachingTokens,
} from './rejudge.js';

const GAP = 14;
const PHONE = '(max-width: 700px)';
const STORED = 'cactus-tour';
// Where a log has no rejected token that some delta would keep: THEORY's worked example, with a draw that SpS rejects.
const MADE_UP = { token: { t: 'n', p: 0.8, q: 0.35, u: 0.7, dc: 0.21 ** 2 / (2 * 0.35 * 0.65) }, made: true };

// ---- what a step knows ----

/** The token to explain and another one to ask about, which the slider reaches at another place. */
function chooseTokens(log) {
  const found = teachingTokens(log);
  const example = found[0] ?? MADE_UP;
  const reach = ({ token }) => firstAccepting(log.run.grid, token);
  const other = found.find((entry) => entry.token.t !== example.token.t && reach(entry) !== reach(example));
  return { example, question: other ?? found[1] ?? example };
}

/** Expected acceptance length and mean KL at delta, at the contexts of SpS; null where the log has none. */
function curvesAt(log, delta) {
  const { al, kl } = curves(log.sums);
  if (!al || !kl) return null;
  const at = (values) => interpolate(log.run.grid, values, delta).value;
  return { before: al[0], al: at(al), kl: at(kl) };
}

/** What the runs really reached: "SpS 2.96, Cactus 4.20". */
function reached(log, name, t) {
  return log.panes.filter(({ stats }) => known(stats?.[name]))
    .map(({ label, stats }) => t('tour.of_pane', { label, value: fixed(2)(stats[name]) })).join(', ');
}

// ---- the steps: each returns {target, around, body, answer, enter, exit} ----
// around: what the card must not cover, where that is more than the target.

const paragraph = (...text) => make('p', {}, ...text);
const formula = (...text) => make('p', { class: 'formula' }, ...text);

function slow({ log, t, places }) {
  const [pane] = log.panes;
  const values = { tokens: pane.kept.length, rate: known(log.baseline) ? fixed(1)(log.baseline) : '' };
  return {
    target: places.tokens(pane),
    body: [
      paragraph(t('tour.slow_1')),
      paragraph(t(known(log.baseline) ? 'tour.slow_rate' : 'tour.slow_2', values)),
      formula(t('tour.slow_formula', values)),
    ],
  };
}

function draft({ log, t, places, example }) {
  const pane = example.pane ?? log.panes[0];
  const round = example.round ?? pane.rounds[0];
  const rates = log.panes.filter(({ rounds }) => rounds.length > 0).map((each) => formula(t('tour.draft_formula', {
    label: each.label, tokens: each.kept.length, passes: each.rounds.length, per: fixed(2)(each.kept.length / each.rounds.length),
  })));
  const drafted = round ? passOf(round).drafted : log.run.settings.num_draft_tokens;
  return {
    target: places.steps(),
    enter: () => { if (round) places.playPass(pane, round); },
    exit: places.pausePass,
    body: [paragraph(t('tour.draft_1', { many: drafted })), paragraph(t('tour.draft_2')), ...rates],
  };
}

function introduced(entry, t) {
  return entry.made ? [make('p', { class: 'quiet' }, t('tour.made_up'))] : [];
}

function numbersOf({ token }) {
  const [up, q] = apart(token.u * token.p, token.q);
  return { token: quoted(token), p: significant(token.p), q, u: significant(token.u), up, phi: significant(phi(token.p, token.q)) };
}

function die({ t, places, example }) {
  const { token, round } = example;
  const replacement = round?.emitted?.c === 'resampled' ? round.emitted : null;
  return {
    target: example.made ? places.tokens() : places.token(example),
    around: places.tokens(example.pane),
    body: [
      ...introduced(example, t), paragraph(t('tour.die_1', numbersOf(example))), formula(t('tour.die_formula', numbersOf(example))),
      dieRoll(token, token.q, t),
      paragraph(replacement ? t('tour.die_replaced', { token: quoted(replacement) }) : t('tour.die_rejected')),
      paragraph(t('tour.die_2', numbersOf(example))),
    ],
  };
}

function budget({ t, places, example, delta }) {
  const { token } = example;
  const raised = gamma(token.q, delta);
  const [up, gammaText] = apart(token.u * token.p, raised);
  const values = {
    ...numbersOf(example), delta: deltaText(delta), rest: significant(1 - token.q), q: significant(token.q), up, gamma: gammaText,
    critical: significant(token.dc),
  };
  return {
    target: places.delta(),
    enter: places.liftDelta,
    body: [
      ...introduced(example, t), paragraph(t('tour.budget_1')), formula(t('tour.budget_formula', values)), dieRoll(token, raised, t), dieKey(t),
      paragraph(t(token.u * token.p < raised ? 'tour.budget_kept' : 'tour.budget_rejected', values)),
      formula(t('tour.critical_formula', values)), paragraph(t('tour.budget_2', values)),
    ],
  };
}

/** Passes are not time: whether fewer of them save any depends on what drafting costs. */
function time({ panes, baseline }, t) {
  const speedups = panes.filter(({ stats }) => known(baseline) && known(stats?.tokens_per_s))
    .map(({ label, stats }) => ({ label, times: stats.tokens_per_s / baseline }));
  if (speedups.length === 0) return [];
  const list = speedups.map(({ label, times }) => t('tour.of_pane', { label, value: `${times.toFixed(2)}×` })).join(', ');
  const slower = speedups.some(({ times }) => times < 1);
  return [make('p', { class: 'quiet' }, t(slower ? 'tour.gain_slower' : 'tour.gain_faster', { list }))];
}

function gain({ log, t, places, delta }) {
  const here = curvesAt(log, delta);
  const runs = reached(log, 'al', t);
  return {
    target: places.gain(),
    enter: places.liftDelta,
    body: [
      paragraph(t('tour.gain_1')),
      ...(here ? [paragraph(t('tour.gain_2')), formula(t('tour.gain_formula', {
        before: fixed(2)(here.before), after: fixed(2)(here.al), delta: deltaText(delta),
        percent: fixed(0)(100 * (here.al / here.before - 1)),
      }))] : []),
      ...(runs ? [paragraph(t('tour.gain_runs', { runs }))] : []), ...time(log, t),
    ],
  };
}

function cost({ log, t, places, delta }) {
  const here = curvesAt(log, delta);
  const pane = log.panes.at(-1);
  const sum = pane.rounds.flatMap(spendingOf).reduce((total, { kl }) => total + kl, 0);
  return {
    target: places.cost(),
    enter: places.liftDelta,
    body: [
      paragraph(t('tour.cost_1')),
      ...(here ? [paragraph(t('tour.cost_curve')), formula(t('tour.cost_formula', { delta: deltaText(delta), kl: significant(here.kl) }))] : []),
      paragraph(t('tour.cost_2', { label: pane.label, sum: Number.isFinite(sum) ? significant(sum) : '∞' })),
    ],
  };
}

function question({ log, t, places, question: asked, delta }) {
  const { token } = asked;
  const raised = gamma(token.q, delta);
  const [up, gammaText] = apart(token.u * token.p, raised);
  const verdict = judgeAnswer(log.run.grid, token, delta);
  const values = {
    ...numbersOf(asked), q: significant(token.q), up, gamma: gammaText, delta: deltaText(delta), critical: significant(token.dc),
  };
  const here = curvesAt(log, delta);
  const consequence = verdict === 'right' && here ? ` ${t('tour.consequence', {
    al: fixed(2)(here.al), before: fixed(2)(here.before), kl: significant(here.kl),
  })}` : '';
  return {
    target: places.delta(),
    enter: () => places.setDelta(0),
    body: [
      ...introduced(asked, t), paragraph(t(asked.made ? 'tour.question_made' : 'tour.question', values)),
      dieRoll(token, raised, t), dieKey(t),
    ],
    answer: { verdict, text: t(delta === 0 ? 'tour.answer_start' : `tour.answer_${verdict}`, values) + consequence },
  };
}

const STEPS = [['slow', slow], ['draft', draft], ['die', die], ['budget', budget], ['gain', gain], ['cost', cost], ['question', question]];

// ---- where a visitor left off; a frame may forbid storage ----

function remembered() {
  try {
    const at = Number(sessionStorage.getItem(STORED));
    return Number.isInteger(at) && at > 0 && at < STEPS.length ? at : 0;
  } catch {
    return 0;
  }
}

function remember(at) {
  try {
    sessionStorage.setItem(STORED, at);
  } catch {
    // Then the tour starts anew after a reload.
  }
}

// ---- the card and the light ----

/** The element's place in the viewer; of a token that a line break splits, its longer part. */
function boxWithin(root, element) {
  const outer = root.getBoundingClientRect();
  const { left, top, width, height } = [...element.getClientRects()].reduce((a, b) => (b.width > a.width ? b : a));
  return { left: left - outer.left, top: top - outer.top, width, height };
}

/** Beside the surroundings of the target where there is room, else below it. */
function placeFor(box, around, card, width) {
  const right = around.left + around.width + GAP;
  if (right + card.offsetWidth <= width + GAP) return { left: right, top: box.top };
  if (around.left - GAP - card.offsetWidth >= 0) return { left: around.left - GAP - card.offsetWidth, top: box.top };
  return { left: Math.max(0, width - card.offsetWidth), top: box.top + box.height + GAP };
}

function focusables(element) {
  const all = [...element.querySelectorAll('button, input, select, summary, [tabindex="0"]')];
  return all.filter((node) => !node.disabled && node.offsetParent !== null && node.tabIndex >= 0);
}

/**
 * places: where things are and what a step may do: {tokens(pane), token(entry), steps(), delta(), gain(), cost(),
 * playPass(pane, round), pausePass(), setDelta(delta), liftDelta() away from 0}; state(): {log, delta}.
 */
export function createTour(root, t, places, state, onChange) {
  let at = remembered();
  let open = false;
  let step = null;
  let tokens = null;
  let opener = null;

  const title = make('h3', { tabindex: '-1', id: 'cactus-tour-title' });
  const counter = make('p', { class: 'quiet tour-counter' });
  const body = make('div', { class: 'tour-body' });
  const answer = make('p', { class: 'tour-answer', role: 'status' });
  const back = make('button', { type: 'button', click: () => go(at - 1) }, t('tour.back'));
  const next = make('button', { type: 'button', class: 'tour-next', click: advance });
  const close = make('button', { type: 'button', class: 'close', 'aria-label': t('tour.leave'), click: shut }, '×');
  const card = make('div', { class: 'tour-card', role: 'dialog', 'aria-labelledby': title.id, hidden: '' },
    make('div', { class: 'detail-head' }, counter, close), title, body, answer, make('div', { class: 'tour-buttons' }, back, next));
  const light = make('div', { class: 'tour-light', 'aria-hidden': 'true', hidden: '' });
  const extent = make('div', { class: 'tour-extent', 'aria-hidden': 'true' });
  const resized = new ResizeObserver(() => { if (open && step.target.isConnected) place(); });
  resized.observe(root);

  function build() {
    return STEPS[at][1]({ ...state(), ...tokens, t, places });
  }

  function fill() {
    if (tokens.example.made) tokens = chooseTokens(state().log); // a run that still grows may have brought a real one
    step = build();
    body.replaceChildren(...step.body);
    const { verdict, text } = step.answer ?? { verdict: '', text: '' };
    if (answer.textContent !== text) answer.textContent = text;
    answer.hidden = text === '';
    answer.className = `tour-answer ${verdict}`;
  }

  function place() {
    const box = boxWithin(root, step.target);
    Object.assign(light.style, { left: `${box.left - 6}px`, top: `${box.top - 6}px`, width: `${box.width + 12}px`, height: `${box.height + 12}px` });
    const { left, top } = placeFor(box, boxWithin(root, step.around ?? step.target), card, root.clientWidth);
    card.style.setProperty('--left', `${left}px`);
    card.style.setProperty('--top', `${top}px`);
    return { box, left, top };
  }

  /** Target and card on one screen where they fit, else the target's top. */
  function scroll() {
    const { box, top } = place();
    const sheet = getComputedStyle(card).position === 'fixed';
    const first = sheet ? box.top : Math.min(box.top, top);
    const last = Math.max(box.top + box.height, sheet ? 0 : top + card.offsetHeight);
    Object.assign(extent.style, { top: `${first}px`, height: `${last - first}px` });
    const fits = !sheet && last - first < innerHeight - 40;
    extent.scrollIntoView({ block: fits ? 'center' : 'start', behavior: reducedMotion() ? 'auto' : 'smooth' });
  }

  function go(to) {
    step?.exit?.();
    at = to;
    remember(at);
    const [name] = STEPS[at];
    counter.textContent = t('tour.place', { step: at + 1, steps: STEPS.length });
    title.textContent = t(`tour.${name}_title`);
    back.disabled = at === 0;
    next.textContent = t(at === STEPS.length - 1 ? 'tour.finish' : 'tour.next');
    fill();
    step.enter?.();
    scroll();
    title.focus({ preventScroll: true });
  }

  function advance() {
    if (at < STEPS.length - 1) {
      go(at + 1);
      return;
    }
    at = 0;
    remember(at);
    shut();
  }

  function start(from) {
    opener = from;
    open = true;
    tokens = chooseTokens(state().log);
    // A page that stretches this frame to its content has no bottom edge to hold a sheet.
    card.classList.toggle('framed', 'parentIFrame' in window);
    card.hidden = light.hidden = false;
    document.addEventListener('keydown', onKey, true);
    onChange();
    go(at);
  }

  function shut() {
    if (!open) return;
    open = false;
    step.exit?.();
    card.hidden = light.hidden = true;
    document.removeEventListener('keydown', onKey, true);
    onChange();
    opener.focus({ preventScroll: true });
    opener.scrollIntoView({ block: 'nearest' });
  }

  /** Tab goes round between the card and the lit part; a visitor who clicked elsewhere is free to stay there. */
  function onKey(event) {
    if (event.key === 'Escape') {
      shut();
      event.stopPropagation();
    }
    if (event.key !== 'Tab') return;
    const inCard = card.contains(document.activeElement);
    if (!inCard && !step.target.contains(document.activeElement)) return;
    const stops = [...focusables(card), ...focusables(step.target)];
    const here = stops.indexOf(document.activeElement);
    const way = event.shiftKey ? -1 : 1;
    stops[(here + way + stops.length + (here < 0 && way < 0 ? 1 : 0)) % stops.length].focus();
    event.preventDefault();
  }

  return {
    nodes: [light, extent, card],
    start, shut,
    isOpen: () => open,
    at: () => at,
    steps: STEPS.length,
    /** After a move of delta or new data. */
    update() {
      if (!open) return;
      fill();
      place();
    },
    /** Another log is shown: its tokens are others. */
    renew() {
      tokens = chooseTokens(state().log);
      this.update();
    },
  };
}
