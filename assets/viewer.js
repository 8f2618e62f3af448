// The page's one component: draws the run log of both panes, lets delta move, and explains single tokens.
// Token text is hostile: it only ever passes through text nodes and setAttribute.

import { UNJUDGED, WITH_DELTA, createDetail } from './detail.js';
import { deltaText, fixed, known, make, orDash, percent, significant, visible, whenIdle, wording } from './elements.js';
import { createPlots, createStrip } from './plots.js';
import {
  CLASSES, addRecord, blockThresholds, curves, emptyLog, firstDifference, gamma, gridPosition, interpolate, isKept,
  nearestIndex, plainText, recordedVerdict, sameDraws, spendingOf, verdictAt,
} from './rejudge.js';
import { createValues } from './vocabulary.js';

const OVERLAY = { accept: 'would_accept', reject: 'would_reject', discard: 'would_discard' };
const OVERLAYS = Object.values(OVERLAY);
const OTHERWISE = new Set(['accepted', 'rescued', 'rejected', 'resampled']);
const SLIDER_LABELS = [0, 0.01, 0.1, 1, 2];
const EXAMPLE_Q = 0.3;
const EXAMPLE_DELTA = 0.1;
const STATUS_PAUSE_MS = 1500;
const PLOT_PAUSE_MS = 250;
const TOKEN_HASH = /^#token=(\d)\.(\d{1,6})$/; // pane and place among its tokens, both from 0
const NO_KL = 1e-3; // the strips' scale while nothing was spent

// ---- source line and prompt ----

function sourceLine(run, t) {
  const settings = Object.fromEntries(
    Object.entries(run.settings).map(([name, value]) => [name, known(value) ? String(value) : t('run.off')]),
  );
  const kind = run.live ? 'live' : 'recorded';
  return make(
    'header', { class: 'source' },
    make('span', { class: `badge ${kind}` }, t(`run.${kind}`)),
    make('span', {}, run.source),
    make('span', { class: 'quiet' }, t(run.settings.auto ? 'run.settings_auto' : 'run.settings', settings)),
  );
}

function promptBox(run, t) {
  const text = make('div', { class: 'prompt-text', id: 'cactus-prompt', dir: 'auto' }, run.prompt);
  const toggle = make('button', {
    type: 'button', class: 'link', 'aria-controls': 'cactus-prompt', 'aria-expanded': 'false',
    click: () => {
      const open = text.classList.toggle('open');
      toggle.setAttribute('aria-expanded', open);
      toggle.textContent = t(open ? 'run.prompt_less' : 'run.prompt_more');
    },
  }, t('run.prompt_more'));
  const node = make('section', { class: 'prompt' }, make('h4', {}, t('run.prompt')), text, toggle);
  new ResizeObserver(() => {
    toggle.hidden = !text.classList.contains('open') && text.scrollHeight <= text.clientHeight + 1;
  }).observe(text);
  return node;
}

// ---- the delta control ----

function deltaControl(run, runDelta, t, onDelta) {
  const last = run.grid.length - 1;
  const top = run.grid[last];
  const hasDelta = run.panes.some(({ rule }) => WITH_DELTA.has(rule));
  const slider = make('input', {
    type: 'range', min: 0, max: last, step: 1, 'aria-label': t('delta.slider'),
    input: () => onDelta(run.grid[slider.valueAsNumber]),
  });
  const message = make('span', { class: 'invalid', id: 'cactus-delta-message', role: 'alert' });
  const number = make('input', {
    type: 'number', min: 0, max: top, step: 'any', inputmode: 'decimal', 'aria-label': t('delta.number'),
    'aria-describedby': 'cactus-delta-message',
    input: () => {
      const valid = isValid(number.valueAsNumber);
      number.setAttribute('aria-invalid', !valid);
      message.textContent = valid ? '' : t('delta.invalid');
      if (valid) onDelta(number.valueAsNumber);
    },
  });
  const sentence = make('p', { class: 'sentence' });
  const back = make('button', { type: 'button', class: 'link', click: () => onDelta(runDelta) },
    t('delta.run_value', { delta: deltaText(runDelta) }));
  const noteText = make('span', {});
  const note = make('p', { class: 'note' }, noteText, ' ', back);
  const marks = SLIDER_LABELS.filter((delta) => delta <= top).map((delta) => mark('tick', delta, deltaText(delta)));
  const node = make(
    'section', { class: 'delta' },
    make('div', { class: 'delta-row' },
      make('strong', {}, t('delta.label')),
      make('div', { class: 'slider' }, slider,
        make('div', { class: 'ticks', 'aria-hidden': 'true' }, ...marks, mark('run-mark', runDelta, ''))),
      number),
    message, sentence, note,
  );

  function mark(name, delta, text) {
    const place = make('span', { class: name }, text);
    place.style.setProperty('--at', gridPosition(run.grid, delta) / last);
    return place;
  }

  function isValid(delta) {
    return delta >= 0 && delta <= top;
  }

  function show(delta) {
    const text = deltaText(delta);
    slider.value = nearestIndex(run.grid, delta);
    slider.setAttribute('aria-valuetext', t('delta.value', { delta: text }));
    slider.style.setProperty('--at', gridPosition(run.grid, delta) / last);
    if (number.valueAsNumber !== delta) number.value = text;
    number.setAttribute('aria-invalid', 'false');
    message.textContent = '';
    sentence.textContent = delta === 0 ? t('delta.zero') : t('delta.effect', {
      delta: text, gamma: gamma(EXAMPLE_Q, delta).toFixed(2),
    });
    noteText.textContent = t(!hasDelta ? 'delta.no_rule' : delta === runDelta ? 'delta.at_run' : 'delta.rejudged', { delta: text });
    note.classList.toggle('at-run', !hasDelta || delta === runDelta);
    back.hidden = !hasDelta || delta === runDelta;
  }

  return { node, show, isValid };
}

// ---- legend ----

function createLegend(root, panes, t, onDiscarded) {
  let pinned = null;
  const cells = new Map(); // class or overlay name -> one number per pane
  const overlayTitle = make('li', { class: 'overlay-title quiet' });
  // Where a rule knows no delta, a class is explained by what every rule shares.
  const everyDelta = panes.every(({ rule }) => WITH_DELTA.has(rule));
  const explain = (name) => t(everyDelta || !OTHERWISE.has(name) ? `explain.${name}` : `explain.${name}_other`);
  const dim = (name) => { if (name) root.dataset.only = name; else delete root.dataset.only; };

  function entry(name) {
    const overlay = OVERLAYS.includes(name);
    const button = make('button', {
      type: 'button', 'aria-pressed': 'false', title: explain(name),
      pointerenter: () => dim(name), focus: () => dim(name),
      pointerleave: () => dim(pinned), blur: () => dim(pinned),
      click: () => {
        pinned = pinned === name ? null : name;
        for (const other of node.querySelectorAll('[aria-pressed]')) other.setAttribute('aria-pressed', 'false');
        button.setAttribute('aria-pressed', pinned === name);
        if (pinned) root.dataset.pinned = pinned; else delete root.dataset.pinned;
        dim(pinned ?? name);
      },
    },
    make('span', { class: `token ${overlay ? `${sampleClass(name)} ` : ''}${name}`, 'aria-hidden': 'true' }, t('legend.sample')),
    make('span', { class: 'name' }, t(`class.${name}`)), counts(name));
    return make('li', {}, button);
  }

  function sampleClass(overlay) {
    return overlay === 'would_accept' ? 'rejected' : 'accepted';
  }

  function counts(name) {
    const unjudged = (pane) => OVERLAYS.includes(name) && !WITH_DELTA.has(pane.rule);
    const places = panes.map((pane) => make('span', { title: pane.label }, unjudged(pane) ? '–' : '0'));
    cells.set(name, places);
    return make('span', { class: 'counts' }, ...places);
  }

  const explanations = make('details', { class: 'explanations' }, make('summary', {}, t('legend.explain')),
    make('dl', {}, ...[...CLASSES, ...OVERLAYS].flatMap((name) => [
      make('dt', {}, t(`class.${name}`)), make('dd', {}, explain(name)),
    ])));
  const node = make(
    'section', { class: 'legend' },
    make('div', { class: 'legend-head' },
      make('h4', {}, t('legend.title'), ' ',
        make('span', { class: 'quiet' }, t('legend.counts', { labels: panes.map((pane) => pane.label).join(' | ') }))),
      make('label', {}, make('input', { type: 'checkbox', change: (event) => onDiscarded(event.target.checked) }),
        t('legend.show_discarded')),
      explanations),
    make('ul', {}, ...CLASSES.map(entry),
      make('li', { class: 'total' }, make('span', { class: 'name' }, t('legend.total')), counts('total')),
      overlayTitle, ...OVERLAYS.map(entry)),
  );

  function set(name, at, count) {
    const text = String(count);
    const place = cells.get(name)[at];
    if (place.textContent !== text) place.textContent = text;
  }

  return {
    node,
    showCounts(pane, at) {
      CLASSES.forEach((name) => set(name, at, pane.counts[name]));
      set('total', at, CLASSES.reduce((sum, name) => sum + pane.counts[name], 0));
    },
    showDelta(delta) { overlayTitle.textContent = t('legend.overlays', { delta: deltaText(delta) }); },
    showOverlays(overlays, at) {
      if (WITH_DELTA.has(panes[at].rule)) OVERLAYS.forEach((name) => set(name, at, overlays[name]));
    },
  };
}

// ---- figures under a pane ----

const STATS = [
  ['tokens_per_pass', fixed(2)], ['accepted_per_judged', percent], ['accepted_per_drafted', percent],
  ['kl', significant], ['entropy', fixed(2)], ['entropy_q', fixed(2)], ['log_q', fixed(2)],
  ['tokens_per_s', fixed(1)], ['speedup', orDash((x) => `${x.toFixed(2)}×`)],
];

function createStats(at, t) {
  const definition = make('p', { class: 'definition', id: `cactus-define-${at}`, role: 'status', hidden: '' });
  const values = new Map();
  let open = null;

  function term(name) {
    const button = make('button', {
      type: 'button', class: 'term', 'aria-expanded': 'false', 'aria-controls': definition.id,
      click: () => {
        open?.setAttribute('aria-expanded', 'false');
        open = open === button ? null : button;
        open?.setAttribute('aria-expanded', 'true');
        definition.hidden = !open;
        definition.textContent = open ? t(`define.${name}`) : '';
      },
    }, t(`stat.${name}`));
    return button;
  }

  function stat(name, ...more) {
    const value = make('strong', {}, '–');
    values.set(name, value);
    return make('div', { class: `stat ${name}` }, term(name), value, ...more);
  }

  const inHead = make('p', { class: 'head-al', title: t('define.al') }, t('pane.al', { value: '–' }));
  const error = make('span', { class: 'error' });
  const expected = make('span', { class: 'quiet' });
  const node = make('div', { class: 'stats' },
    stat('al', error, expected), ...STATS.map(([name]) => stat(name)), definition);

  function show(stats, baseline) {
    const all = { ...stats, speedup: baseline && known(stats.tokens_per_s) ? stats.tokens_per_s / baseline : null };
    values.get('al').textContent = fixed(2)(all.al);
    error.textContent = known(all.al_se) ? `± ${all.al_se.toFixed(2)}` : '';
    inHead.textContent = `${t('pane.al', { value: fixed(2)(all.al) })} ${error.textContent}`;
    expected.textContent = t('stat.expected', { value: fixed(2)(all.expected_al) });
    for (const [name, format] of STATS) values.get(name).textContent = format(all[name]);
    if (all.kl_infinite) values.get('kl').textContent = '∞';
  }

  return { node, inHead, show };
}

// ---- a pane of tokens ----

function whitespaceMark(text) {
  if (!/^\s+$/.test(text)) return null;
  if (text.includes('\n')) return { kind: 'newline', glyph: '⏎'.repeat(text.split('\n').length - 1) };
  return { kind: 'blank', glyph: text.replace(/\t/g, '→\t').replace(/[^\t→]/g, '·') };
}

function dress(element, token) {
  if (token.x) {
    element.classList.add('chip');
    element.dataset.glyph = `<${token.x}>`;
  } else if (token.t === '') {
    element.classList.add('chip');
    element.dataset.glyph = '∅';
  } else {
    const mark = whitespaceMark(token.t);
    if (mark) {
      element.classList.add(mark.kind);
      element.dataset.glyph = mark.glyph;
    }
  }
  if (token.sp) element.classList.add('special');
}

function ariaLabel(entry, t) {
  const { token, overlay, differs } = entry;
  const figures = { p: significant(token.p), q: significant(token.q) };
  return t('token.aria', {
    index: token.i, text: visible(token).trim() || visible(token), class: t(`class.${token.c}`),
    numbers: known(token.p) ? t('token.numbers', figures) : t('token.numbers_q', figures),
    overlay: overlay ? t('token.overlay', { overlay: t(`class.${overlay}`) }) : '',
    differs: differs ? t('token.differs') : '',
  });
}

/** Order of reading: what was judged, the token the verifier added, then what nobody judged. */
function readingOrder(round) {
  const judged = round.drafted.filter((token) => !UNJUDGED.has(token.c));
  const unjudged = round.drafted.filter((token) => UNJUDGED.has(token.c));
  return [...judged, ...(round.emitted ? [round.emitted] : []), ...unjudged];
}

/** The part of an element's text that a range covers. */
function coveredText(element, range) {
  const part = document.createRange();
  part.selectNodeContents(element);
  if (part.comparePoint(range.startContainer, range.startOffset) >= 0) part.setStart(range.startContainer, range.startOffset);
  if (part.comparePoint(range.endContainer, range.endOffset) <= 0) part.setEnd(range.endContainer, range.endOffset);
  return part.toString();
}

/** What a rule is set to, beside its name. */
function parameterText(pane, t) {
  if (known(pane.delta)) return t('pane.delta', { delta: deltaText(pane.delta) });
  return pane.parameter ? `${pane.parameter.name} = ${significant(pane.parameter.value)}` : '';
}

function createPane(pane, at, t, actions) {
  const entries = [];
  const byToken = new Map();
  const blocks = new Map(); // round -> its element
  const byElement = new WeakMap();
  const byIndex = new Map();
  const overlays = Object.fromEntries(OVERLAYS.map((name) => [name, 0]));
  let current = null;

  const list = make('div', {
    class: 'tokens', role: 'list', dir: 'auto', 'aria-label': t('pane.tokens', { label: pane.label }),
    click: (event) => withEntry(event, openWithPass),
    pointerover: (event) => withEntry(event, (entry) => actions.link(entry.token.i)),
    pointerleave: () => actions.link(null),
    focusin: (event) => withEntry(event, (entry) => { makeCurrent(entry); actions.link(entry.token.i); }),
    focusout: () => actions.link(null),
    keydown: onKey,
    copy: onCopy,
  });
  const copy = make('button', { type: 'button', class: 'copy', click: copyAll }, t('pane.copy'));
  const ending = make('p', { class: 'ending', hidden: '' });
  const stats = createStats(at, t);
  const strip = createStrip(pane, t, { link: actions.link, open: (token, from) => actions.open(byToken.get(token), from) });
  const node = make(
    'section', { class: 'pane', 'aria-label': pane.label },
    make('div', { class: 'pane-head' },
      make('h3', {}, pane.label, ' ', make('span', { class: 'pane-delta' }, parameterText(pane, t))),
      stats.inHead, copy, make('p', { class: 'quiet' }, t(pane.rule.startsWith('cactus-') ? 'pane.cactus_exact' : `pane.${pane.rule}`))),
    list, ending, strip.node, stats.node,
  );

  function withEntry(event, action) {
    const entry = byElement.get(event.target.closest('.token'));
    if (entry) action(entry);
  }

  function openWithPass(entry) {
    actions.open(entry);
    actions.showPass(pane, entry.round);
  }

  function makeCurrent(entry) {
    current?.element.setAttribute('tabindex', '-1');
    current = entry;
    entry.element.setAttribute('tabindex', '0');
  }

  function addToken(token, round, thresholds) {
    const element = make('span', { class: `token ${token.c}`, role: 'button', tabindex: '-1' }, token.t);
    dress(element, token);
    const entry = { token, round, pane, view, element, thresholds, number: entries.length, overlay: null, differs: false };
    element.setAttribute('aria-label', ariaLabel(entry, t));
    byElement.set(element, entry);
    byToken.set(token, entry);
    entries.push(entry);
    if (!byIndex.has(token.i)) byIndex.set(token.i, []);
    byIndex.get(token.i).push(entry);
    return make('span', { role: 'listitem' }, element);
  }

  function addRounds(rounds) {
    const fragment = document.createDocumentFragment();
    for (const round of rounds) {
      const thresholds = WITH_DELTA.has(pane.rule) ? blockThresholds(round.drafted) : [];
      const tokens = readingOrder(round).map((token) => addToken(token, round, thresholds[round.drafted.indexOf(token)]));
      const block = make('span', { class: 'block', role: 'presentation' }, ...tokens);
      blocks.set(round, block);
      fragment.append(block);
    }
    list.append(fragment);
    if (!current && entries.length > 0) makeCurrent(entries[0]);
  }

  function rejudge(entry, delta) {
    if (!entry.thresholds || entry.token.c === 'cut') return;
    const verdict = verdictAt(entry.thresholds, delta);
    const overlay = verdict === recordedVerdict(entry.token) ? null : OVERLAY[verdict];
    if (overlay === entry.overlay) return;
    if (entry.overlay) {
      entry.element.classList.remove(entry.overlay);
      overlays[entry.overlay] -= 1;
    }
    if (overlay) {
      entry.element.classList.add(overlay);
      overlays[overlay] += 1;
    }
    entry.overlay = overlay;
    entry.element.setAttribute('aria-label', ariaLabel(entry, t));
  }

  function reachable() {
    return entries.filter(({ element }) => element.offsetParent !== null);
  }

  function neighbour(entry, key) {
    const all = reachable();
    const place = all.indexOf(entry);
    const blockStart = (step) => {
      const block = entry.round.block + step;
      return all.find((other) => other.round.block === block) ?? entry;
    };
    switch (key) {
      case 'ArrowRight': return all[place + 1] ?? entry;
      case 'ArrowLeft': return all[place - 1] ?? entry;
      case 'ArrowDown': return blockStart(1);
      case 'ArrowUp': return blockStart(-1);
      case 'Home': return all[0];
      case 'End': return all[all.length - 1];
      default: return null;
    }
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    withEntry(event, (entry) => {
      const next = neighbour(entry, event.key);
      if (next) next.element.focus();
      else if (event.key === 'Enter' || event.key === ' ') openWithPass(entry);
      else return;
      event.preventDefault();
    });
  }

  function selectedText(range) {
    return entries
      .filter(({ token, element }) => isKept(token) && !token.sp && range.intersectsNode(element))
      .map(({ element }) => coveredText(element, range))
      .join('');
  }

  function onCopy(event) {
    const selection = getSelection();
    if (selection.isCollapsed) return;
    event.clipboardData.setData('text/plain', selectedText(selection.getRangeAt(0)));
    event.preventDefault();
  }

  async function copyAll() {
    try {
      await navigator.clipboard.writeText(plainText(pane.kept));
    } catch {
      // Inside a frame the clipboard may be refused; a copied selection goes through onCopy instead.
      getSelection().selectAllChildren(list);
      document.execCommand('copy');
      getSelection().removeAllRanges();
    }
    copy.textContent = t('pane.copied');
    setTimeout(() => { copy.textContent = t('pane.copy'); }, STATUS_PAUSE_MS);
  }

  function showEnd() {
    const { reason, message } = pane.end;
    ending.textContent = message ? `${t(`end.${reason}`)}: ${message}` : t(`end.${reason}`);
    ending.classList.toggle('failed', reason === 'error');
    ending.hidden = false;
  }

  const view = {
    node, pane, overlays, addRounds, showEnd, neighbour,
    rejudgeAll(delta) { for (const entry of entries) rejudge(entry, delta); },
    rejudgeFrom(first, delta) { for (let k = first; k < entries.length; k += 1) rejudge(entries[k], delta); },
    size: () => entries.length,
    link(index, on) {
      for (const { element } of byIndex.get(index) ?? []) element.classList.toggle('linked', on);
      strip.link(index, on);
    },
    addSpending: strip.add,
    entryOf: (token) => byToken.get(token),
    /** The pass that put the token of this place into the text. */
    passAt: (index) => byIndex.get(index)?.find(({ token }) => isKept(token))?.round,
    entryAt: (number) => entries[number],
    markPass(round, name) {
      list.querySelector(`.${name}`)?.classList.remove(name);
      blocks.get(round)?.classList.add(name);
    },
    markDifference(index) {
      const entry = (byIndex.get(index) ?? []).find(({ token }) => isKept(token));
      if (!entry) return;
      entry.differs = true;
      entry.element.classList.add('differs');
      entry.element.setAttribute('aria-label', ariaLabel(entry, t));
    },
    showStats: (baseline) => stats.show(pane.stats ?? {}, baseline),
  };
  return view;
}

// ---- the line under the panes ----

/** Whether there are curves: they need contexts of the verifier's own, which only SpS has. */
function onVerifier(log) {
  return log.panes[0].rule === 'sps';
}

function createComparison(t) {
  const expected = make('strong', {});
  const draws = make('strong', {});
  const curvesLine = make('p', {}, t('compare.expected'), expected);
  const drawsLine = make('p', {}, t('compare.draws'), draws);
  const node = make('section', { class: 'comparison' }, curvesLine, drawsLine);

  function show(log, al, delta) {
    const { grid } = log.run;
    const judged = log.panes.filter(({ rule }) => WITH_DELTA.has(rule));
    curvesLine.hidden = !onVerifier(log);
    drawsLine.hidden = judged.length === 0;
    node.hidden = curvesLine.hidden && drawsLine.hidden;
    if (al) {
      const here = interpolate(grid, al, delta);
      expected.textContent = t('compare.pair', {
        sps: al[0].toFixed(2), cactus: (here.exact ? '' : '≈ ') + here.value.toFixed(2), delta: deltaText(delta),
      });
    } else expected.textContent = t('compare.waiting');
    draws.textContent = judged.map((pane) => t('compare.draws_pane', {
      al: fixed(2)(sameDraws(pane.rounds, delta)), label: pane.label,
    })).join(' · ');
  }

  return { node, show };
}

// ---- the invitation to the tour ----

function createInvitation(t, start) {
  const button = make('button', { type: 'button', class: 'tour-start', click: start }, t('tour.start'));
  const node = make('div', { class: 'invitation' }, button, make('span', { class: 'quiet' }, t('tour.invite')));
  return {
    node, button,
    /** A tour that was left says where it goes on. */
    show(tour) {
      button.textContent = tour.at() === 0 ? t('tour.start') : t('tour.resume', { step: tour.at() + 1, steps: tour.steps });
      button.setAttribute('aria-expanded', tour.isOpen());
    },
  };
}

// ---- the token in the address ----

/** What an address asks for: [pane, number], or null where it names no token. Anyone can write an address. */
function askedToken() {
  return TOKEN_HASH.exec(location.hash)?.slice(1).map(Number) ?? null;
}

function writeHash(hash) {
  if (hash || TOKEN_HASH.test(location.hash)) history.replaceState(history.state, '', location.pathname + location.search + hash);
}

// ---- the whole ----

function createViewer(root, t, ask) {
  const log = emptyLog();
  const plots = createPlots(t);
  let delta = 0;
  let opening = null; // the run that the page opens with, the only one that an address can name tokens of
  let asked = askedToken();
  let views = [];
  let parts = null;
  let linked = null;
  let pointed = null; // the pass whose row is pointed at
  let compared = 0;
  let differs = false;
  let different = null; // the two tokens that differ first, until their passes are marked
  let highest = NO_KL;
  let undrawn = []; // rounds whose bars and rows wait for an idle moment
  let steps = null;
  let tour = null;
  let frame = 0;
  let plotTimer = 0;
  let statusTimer = 0;

  function runDelta() {
    return (log.run.panes.find(({ rule }) => rule === 'cactus') ?? log.run.panes.find(({ rule }) => rule === 'sps'))?.delta ?? 0;
  }

  function start() {
    delta = runDelta();
    compared = 0;
    differs = false;
    different = null;
    linked = null;
    pointed = null;
    plots.mark([]);
    highest = NO_KL;
    undrawn = [];
    steps?.stop();
    steps = null;
    const detail = createDetail(t, () => delta, createValues(log.run, t, ask), nameToken);
    opening ??= JSON.stringify(log.run);
    const actions = { open: detail.open, link, showPass: (pane, round) => steps?.show(pane, round) };
    views = log.panes.map((pane, at) => createPane(pane, at, t, actions));
    parts = {
      detail,
      control: deltaControl(log.run, runDelta(), t, setDelta),
      legend: createLegend(root, log.panes, t, (on) => root.classList.toggle('show-discarded', on)),
      comparison: createComparison(t),
      status: make('p', { class: 'status quiet', role: 'status' }),
      difference: make('p', { class: 'quiet difference', hidden: '' }, t('pane.differs')),
      steps: make('section', { class: 'steps', 'aria-label': t('step.title') }, make('h4', {}, t('step.title'))),
    };
    root.classList.remove('show-discarded');
    delete root.dataset.only;
    delete root.dataset.pinned;
    root.style.setProperty('--kl-top', highest);
    root.replaceChildren(
      sourceLine(log.run, t), make('div', { class: 'opening' }, promptBox(log.run, t), invitation.node), parts.control.node,
      make('div', { class: 'work' },
        make('div', { class: 'main' },
          make('div', { class: 'reading' }, parts.legend.node, make('div', { class: 'panes' }, ...views.map((view) => view.node))),
          parts.status, parts.difference, parts.comparison.node, parts.steps),
        detail.node),
      plots.node, ...(tour?.nodes ?? []),
    );
    parts.control.show(delta);
    drawPlots();
  }

  function clear() {
    steps?.stop();
    steps = null;
    Object.assign(log, emptyLog());
    views = [];
    if (parts) writeHash('');
    parts = null;
    root.replaceChildren(make('p', { class: 'quiet' }, t('run.none')));
  }

  function link(index) {
    if (index === linked) return;
    for (const view of views) {
      if (linked !== null) view.link(linked, false);
      if (index !== null) view.link(index, true);
    }
    if (linked !== null) steps?.link(linked, false);
    if (index !== null) steps?.link(index, true);
    linked = index;
    markBars();
  }

  function markBars() {
    const passes = views.map(({ pane, passAt }) => ({ pane, round: passAt(linked) }));
    plots.mark(pointed ? [pointed] : passes.filter(({ round }) => round));
  }

  /** A pass that is on the stage, or pointed at in its row, is framed in its pane. */
  function markPass(pane, round, current) {
    for (const view of views) view.markPass(view.pane === pane ? round : null, current ? 'current-pass' : 'pointed-pass');
    if (current) return;
    pointed = round && { pane, round };
    markBars();
  }

  function openPiece(pane, token, from) {
    parts.detail.open(views[log.panes.indexOf(pane)].entryOf(token), from);
  }

  function nameToken(entry) {
    if (JSON.stringify(log.run) !== opening) return;
    writeHash(entry ? `#token=${log.panes.indexOf(entry.pane)}.${entry.number}` : '');
  }

  /** Opens the token that the address asks for, once the log holds it. */
  function openAsked() {
    if (!asked || !parts) return;
    const [pane, number] = asked;
    const entry = views[pane]?.entryAt(number);
    if (!entry || JSON.stringify(log.run) !== opening) return;
    asked = null;
    entry.element.scrollIntoView({ block: 'nearest' });
    parts.detail.open(entry);
  }

  /** Rows and bars lie below the first screen: they are drawn when the browser is idle. */
  async function drawUndrawn() {
    const { createSteps } = await import('./steps.js');
    if (!parts) return;
    steps ??= createSteps(parts.steps, log.panes, t, { open: openPiece, link, markPass });
    const rounds = undrawn;
    undrawn = [];
    views.forEach((view, at) => {
      const own = rounds.filter((round) => round.pane === at);
      view.addSpending(own);
      steps.add(at, own);
    });
    const finite = rounds.flatMap(spendingOf).map(({ kl }) => kl).filter(Number.isFinite);
    highest = Math.max(highest, ...finite);
    root.style.setProperty('--kl-top', highest);
    markDifferentPasses();
  }

  function plotModel() {
    return {
      ...curves(log.sums), grid: log.run.grid, delta, onVerifier: onVerifier(log), panes: log.panes, frontier: log.frontier,
      most: log.run.settings.num_draft_tokens,
      points: log.panes.filter((pane) => pane.stats).map(({ label, delta: at, stats }) => (
        { label, delta: at, al: stats.al, al_se: stats.al_se, kl: stats.kl }
      )),
    };
  }

  function drawPlots() {
    clearTimeout(plotTimer);
    plotTimer = 0;
    plots.draw(plotModel());
  }

  function showOverlays() {
    parts.legend.showDelta(delta);
    views.forEach((view, at) => parts.legend.showOverlays(view.overlays, at));
    parts.comparison.show(log, curves(log.sums).al, delta);
  }

  function paintDelta() {
    frame = 0;
    for (const view of views) view.rejudgeAll(delta);
    showOverlays();
    parts.detail.refresh();
    plots.point(plotModel());
    tour?.update();
  }

  function setDelta(next) {
    if (!parts || !parts.control.isValid(next)) return;
    delta = next;
    parts.control.show(delta);
    frame ||= requestAnimationFrame(paintDelta);
  }

  function findDifference() {
    if (differs || views.length < 2) return;
    const [left, right] = log.panes.map((pane) => pane.kept);
    const at = firstDifference(left, right, compared);
    compared = Math.min(left.length, right.length);
    if (at < 0) return;
    differs = true;
    views[0].markDifference(left[at].i);
    views[1].markDifference(right[at].i);
    different = [left[at], right[at]];
    parts.difference.hidden = false;
  }

  function markDifferentPasses() {
    if (!different) return;
    different.forEach((token, at) => steps.markDifference(at, views[at].entryOf(token).round));
    different = null;
  }

  function progress(pane) {
    const values = { label: pane.label, rounds: pane.rounds.length, tokens: pane.kept.length };
    return pane.end ? t('run.progress_end', { ...values, reason: t(`end.${pane.end.reason}`) }) : t('run.progress', values);
  }

  function showStatus() {
    statusTimer = 0;
    parts.status.textContent = log.panes.map(progress).join(' · ');
  }

  function drawRounds(rounds) {
    views.forEach((view, at) => {
      const before = view.size();
      view.addRounds(rounds.filter((round) => round.pane === at));
      view.rejudgeFrom(before, delta);
      view.showStats(log.baseline);
      parts.legend.showCounts(view.pane, at);
    });
    findDifference();
    showOverlays();
    if (rounds.length > 0 && undrawn.length === 0) whenIdle(drawUndrawn);
    undrawn.push(...rounds);
  }

  function append(records) {
    let rounds = [];
    let fresh = false;
    for (const record of records) {
      addRecord(log, record);
      if (record.k === 'run') {
        start();
        rounds = [];
        fresh = true;
      }
      if (record.k === 'round') rounds.push(record);
      if (record.k === 'end') views[record.pane].showEnd();
    }
    if (!parts) return;
    drawRounds(rounds);
    openAsked();
    if (fresh) tour?.renew();
    plotTimer ||= setTimeout(drawPlots, PLOT_PAUSE_MS);
    if (log.panes.every((pane) => pane.end)) {
      clearTimeout(statusTimer);
      showStatus();
    } else statusTimer ||= setTimeout(showStatus, STATUS_PAUSE_MS);
    tour?.update();
  }

  // ---- the tour ----

  const places = {
    tokens: (pane = log.panes[0]) => views[log.panes.indexOf(pane)].node.querySelector('.tokens'),
    token: ({ pane, token }) => views[log.panes.indexOf(pane)].entryOf(token).element,
    steps: () => parts.steps.querySelector('.player') ?? parts.steps,
    delta: () => parts.control.node,
    gain: () => (onVerifier(log) ? plots.figures.al : plots.figures.hist),
    cost: () => (onVerifier(log) ? plots.figures.kl : views.at(-1).node.querySelector('.budget')),
    playPass(pane, round) {
      steps?.show(pane, round);
      steps?.play();
    },
    pausePass: () => steps?.stop(),
    setDelta,
    /** A budget of nothing shows nothing. */
    liftDelta: () => { if (delta === 0) setDelta(runDelta() || EXAMPLE_DELTA); },
  };

  async function startTour() {
    const { createTour } = await import('./tour.js');
    if (!parts) return;
    if (!tour) {
      tour = createTour(root, t, places, () => ({ log, delta }), () => invitation.show(tour));
      root.append(...tour.nodes);
    }
    parts.detail.shut();
    tour.start(invitation.button);
  }

  const invitation = createInvitation(t, startTour);

  addEventListener('hashchange', () => {
    asked = askedToken();
    openAsked();
  });
  root.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') parts?.detail.shut();
  });
  clear();
  return {
    append, clear, setDelta,
    takeFocus: () => parts?.detail.takeFocus(),
    delta: () => delta,
    plainText: (at) => plainText(log.panes[at].kept),
  };
}

/**
 * Draws props.value, a log of JSON lines to which the server only appends, and keeps up with it. server: Gradio's, with the functions
 * of the component.
 * @returns  a function that gives the focus to a token that the address opened: nothing can have it before the page is shown
 */
export function mount(element, props, watch, server) {
  const root = element.querySelector('.cactus-viewer') ?? element;
  const viewer = createViewer(root, wording(props.strings), server.all_values);
  let done = '';

  function read() {
    const value = props.value ?? '';
    if (!value.startsWith(done)) {
      viewer.clear();
      done = '';
    }
    const lines = value.slice(done.length).split('\n').filter((line) => line !== '');
    done = value;
    if (lines.length > 0) viewer.append(lines.map((line) => JSON.parse(line)));
  }

  read();
  watch('value', read);
  const { delta, setDelta, plainText: text } = viewer;
  window.cactusViewer = { delta, setDelta, plainText: text };
  return viewer.takeFocus;
}
