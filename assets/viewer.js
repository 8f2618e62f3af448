// The page's one component: draws the run log of both panes, lets delta move, and explains single tokens.
// Token text is hostile: it only ever passes through text nodes and setAttribute.

import { createPlots } from './plots.js';
import {
  CLASSES, addRecord, blockThresholds, curves, emptyLog, firstDifference, gamma, gridPosition, interpolate, isBehindEnd, isKept,
  nearestIndex, phi, plainText, recordedVerdict, rowsOf, sameDraws, targetRows, verdictAt,
} from './rejudge.js';

const OVERLAY = { accept: 'would_accept', reject: 'would_reject', discard: 'would_discard' };
const OVERLAYS = Object.values(OVERLAY);
const WITH_DELTA = new Set(['sps', 'cactus']); // typical acceptance knows no delta, no draw and no h
const UNJUDGED = new Set(['discarded', 'cut']);
const SLIDER_LABELS = [0, 0.01, 0.1, 1, 2];
const EXAMPLE_Q = 0.3;
const STATUS_PAUSE_MS = 1500;
const PLOT_PAUSE_MS = 250;

// ---- small helpers ----

/** An element; attributes that are functions become listeners, strings among the children text. */
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === 'function') node.addEventListener(name, value);
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function wording(strings) {
  return (key, values = {}) => (strings[key] ?? key).replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}

const known = (x) => x !== null && x !== undefined;
const orDash = (format) => (x) => (known(x) ? format(x).replace('-', '−') : '–');
const fixed = (digits) => orDash((x) => x.toFixed(digits));
const percent = orDash((x) => `${(100 * x).toFixed(1)} %`);
const significant = orDash((x) => (Math.abs(x) < 1e-9 ? '0' : Number(x.toPrecision(3)).toString()));
const probability = orDash((x) => (x > 0 && x < 0.0005 ? '<0.001' : x.toFixed(3)));

function deltaText(delta) {
  return Number(delta.toPrecision(6)).toString();
}

/** Two numbers with enough digits to be told apart: a verdict must not read "0.3 is below 0.3". */
function apart(a, b) {
  for (let digits = 3; digits < 16; digits += 1) {
    const pair = [a, b].map((x) => Number(x.toPrecision(digits)).toString());
    if (pair[0] !== pair[1]) return pair;
  }
  return [String(a), String(b)];
}

/** A token's text where it stands alone, outside the running text. */
function visible(token) {
  if (token.x) return `<${token.x}>`;
  if (token.t === '') return '∅';
  const text = token.t.replace(/\n/g, '⏎').replace(/\t/g, '→');
  return /^ +$/.test(text) ? text.replace(/ /g, '·') : text;
}

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
    make('span', { class: 'quiet' }, t('run.settings', settings)),
    ...(run.draft_note ? [make('p', { class: 'note' }, run.draft_note)] : []),
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
    noteText.textContent = t(delta === runDelta ? 'delta.at_run' : 'delta.rejudged', { delta: text });
    note.classList.toggle('at-run', delta === runDelta);
    back.hidden = delta === runDelta;
  }

  return { node, show, isValid };
}

// ---- legend ----

function createLegend(root, panes, t, onDiscarded) {
  let pinned = null;
  const cells = new Map(); // class or overlay name -> one number per pane
  const overlayTitle = make('li', { class: 'overlay-title quiet' });
  const dim = (name) => { if (name) root.dataset.only = name; else delete root.dataset.only; };

  function entry(name) {
    const overlay = OVERLAYS.includes(name);
    const button = make('button', {
      type: 'button', 'aria-pressed': 'false', title: t(`explain.${name}`),
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
    const places = panes.map((pane) => make('span', { title: pane.label }, '0'));
    cells.set(name, places);
    return make('span', { class: 'counts' }, ...places);
  }

  const explanations = make('details', { class: 'explanations' }, make('summary', {}, t('legend.explain')),
    make('dl', {}, ...[...CLASSES, ...OVERLAYS].flatMap((name) => [
      make('dt', {}, t(`class.${name}`)), make('dd', {}, t(`explain.${name}`)),
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
      OVERLAYS.forEach((name) => set(name, at, overlays[name]));
    },
  };
}

// ---- figures under a pane ----

const STATS = [
  ['tokens_per_pass', fixed(2)], ['accepted_per_judged', percent], ['accepted_per_drafted', percent],
  ['kl', significant], ['log_q', fixed(2)], ['tokens_per_s', fixed(1)], ['speedup', orDash((x) => `${x.toFixed(2)}×`)],
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

  const error = make('span', { class: 'error' });
  const expected = make('span', { class: 'quiet' });
  const node = make('div', { class: 'stats' },
    stat('al', error, expected), ...STATS.map(([name]) => stat(name)), definition);

  function show(stats, baseline) {
    const all = { ...stats, speedup: baseline && known(stats.tokens_per_s) ? stats.tokens_per_s / baseline : null };
    values.get('al').textContent = fixed(2)(all.al);
    error.textContent = known(all.al_se) ? `± ${all.al_se.toFixed(2)}` : '';
    expected.textContent = t('stat.expected', { value: fixed(2)(all.expected_al) });
    for (const [name, format] of STATS) values.get(name).textContent = format(all[name]);
  }

  return { node, show };
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

function createPane(pane, at, t, actions) {
  const entries = [];
  const byElement = new WeakMap();
  const byIndex = new Map();
  const overlays = Object.fromEntries(OVERLAYS.map((name) => [name, 0]));
  let current = null;

  const list = make('div', {
    class: 'tokens', role: 'list', dir: 'auto', 'aria-label': t('pane.tokens', { label: pane.label }),
    click: (event) => withEntry(event, actions.open),
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
  const node = make(
    'section', { class: 'pane', 'aria-label': pane.label },
    make('div', { class: 'pane-head' },
      make('h3', {}, pane.label, ' ', ...(WITH_DELTA.has(pane.rule)
        ? [make('span', { class: 'pane-delta' }, t('pane.delta', { delta: deltaText(pane.delta) }))] : [])),
      copy, make('p', { class: 'quiet' }, t(`pane.${pane.rule}`))),
    list, ending, stats.node,
  );

  function withEntry(event, action) {
    const entry = byElement.get(event.target.closest('.token'));
    if (entry) action(entry);
  }

  function makeCurrent(entry) {
    current?.element.setAttribute('tabindex', '-1');
    current = entry;
    entry.element.setAttribute('tabindex', '0');
  }

  function addToken(token, round, thresholds) {
    const element = make('span', { class: `token ${token.c}`, role: 'button', tabindex: '-1' }, token.t);
    dress(element, token);
    const entry = { token, round, pane, view, element, thresholds, overlay: null, differs: false };
    element.setAttribute('aria-label', ariaLabel(entry, t));
    byElement.set(element, entry);
    entries.push(entry);
    if (!byIndex.has(token.i)) byIndex.set(token.i, []);
    byIndex.get(token.i).push(entry);
    return make('span', { role: 'listitem' }, element);
  }

  function addRounds(rounds) {
    const fragment = document.createDocumentFragment();
    for (const round of rounds) {
      const thresholds = blockThresholds(round.drafted);
      const tokens = readingOrder(round).map((token) => addToken(token, round, thresholds[round.drafted.indexOf(token)]));
      fragment.append(make('span', { class: 'block', role: 'presentation' }, ...tokens));
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
      else if (event.key === 'Enter' || event.key === ' ') actions.open(entry);
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
    link(index, on) { for (const { element } of byIndex.get(index) ?? []) element.classList.toggle('linked', on); },
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

// ---- one token's detail ----

function dieRoll(token, raised, t) {
  const sps = phi(token.p, token.q);
  const all = phi(token.p, raised);
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

function dieKey(t) {
  const key = (name, text) => make('span', {}, make('i', { class: name }), t(text));
  return make('p', { class: 'die-key quiet' }, key('by-sps', 'detail.legend_sps'), key('by-delta', 'detail.legend_delta'),
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

function recordedSentence(token, pane, t) {
  if (!WITH_DELTA.has(pane.rule) && !UNJUDGED.has(token.c)) {
    return t(isKept(token) ? 'verdict.tas_kept' : 'verdict.tas_rejected', { q: significant(token.q) });
  }
  if (token.c === 'rejected' && token.q === 0) return t('verdict.impossible');
  const limit = token.c === 'accepted' ? token.q : token.g;
  const [up, against] = apart(token.u * token.p, limit);
  return t(`verdict.${token.c}`, { up, q: token.c === 'rescued' ? significant(token.q) : against, gamma: against });
}

function whatIf(entry, delta, t) {
  const { token } = entry;
  const [up, raised] = apart(token.u * token.p, gamma(token.q, delta));
  return t(`whatif.${verdictAt(entry.thresholds, delta)}`, { up, gamma: raised });
}

function draftedDetail(entry, delta, t) {
  const { token, pane } = entry;
  const rows = targetRows(token, token, token.g);
  const columns = [...P_AND_Q];
  const parts = [make('p', { class: 'verdict' }, recordedSentence(token, pane, t))];
  if (WITH_DELTA.has(pane.rule)) {
    columns.push({ key: 'h', name: t('detail.h_run', { delta: deltaText(pane.delta) }), class: 'h', summed: true });
    parts.push(
      figures([['p', token.p], ['q', token.q], ['γ', token.g], ['φ', phi(token.p, token.g)], ['u', token.u]]),
      make('h5', {}, t('detail.run', { delta: deltaText(pane.delta) })), dieRoll(token, token.g, t),
    );
  }
  if (delta !== pane.delta || !WITH_DELTA.has(pane.rule)) {
    const raised = gamma(token.q, delta);
    const moved = targetRows(token, token, raised);
    rows.forEach((row, at) => { row.moved = moved[at].h; });
    columns.push({ key: 'moved', name: t('detail.h_run', { delta: deltaText(delta) }), class: 'h', summed: true });
    parts.push(
      make('h5', {}, t('detail.slider', { delta: deltaText(delta) })), dieRoll(token, raised, t),
      ...(isBehindEnd(token) ? [] : [make('p', {}, whatIf(entry, delta, t))]),
    );
  }
  parts.push(
    dieKey(t), make('p', { class: 'critical' }, criticalText(token, t)), distributionTable(columns, rows, t),
    make('p', { class: 'quiet' }, t('detail.columns')),
    ...(token.lumped ? [make('p', { class: 'quiet' }, t('detail.lumped'))] : []),
  );
  return parts;
}

function emittedDetail(entry, t) {
  const { token, round, pane } = entry;
  const rejected = round.drafted.find((draft) => draft.c === 'rejected');
  if (token.c === 'resampled' && rejected && WITH_DELTA.has(pane.rule)) {
    // The row of the rejected draft is the row of this position.
    const rows = targetRows(rejected, rejected, rejected.g, [rejected, token]).map((row) => (
      { ...row, chosen: row.id === token.id, residual: row.id === null ? null : Math.max(0, row.h - row.p) }
    ));
    const columns = [
      ...P_AND_Q, { key: 'h', name: 'h', class: 'h', summed: true },
      { key: 'residual', name: t('detail.residual'), class: 'residual' },
    ];
    return [
      make('p', { class: 'verdict' }, t('verdict.resampled', { rejected: visible(rejected) })),
      distributionTable(columns, rows, t), make('p', { class: 'quiet' }, t('detail.columns_residual')),
    ];
  }
  const rows = rowsOf(token, [token]).map((row) => ({ ...row, chosen: row.id === token.id }));
  const origin = token.c === 'resampled' ? 'tas_resampled' : round.drafted.length > 0 ? 'bonus' : 'nothing_drafted';
  return [
    make('p', { class: 'verdict' }, t(`verdict.${origin}`)),
    distributionTable(P_AND_Q.slice(rows.every((row) => !known(row.p)) ? 1 : 0), rows, t),
  ];
}

function covers(sheet, element) {
  const [above, below] = [sheet.getBoundingClientRect(), element.getBoundingClientRect()];
  return above.top < below.bottom && above.bottom > below.top && above.left < below.right && above.right > below.left;
}

function createDetail(t, currentDelta) {
  let shown = null;
  const title = make('h3', { tabindex: '-1' }, t('detail.title'));
  const close = make('button', {
    type: 'button', class: 'close', 'aria-label': t('detail.close'), hidden: '', click: shut,
  }, '×');
  const body = make('div', { class: 'detail-body' });
  const node = make('aside', { class: 'detail', 'aria-label': t('detail.label'), keydown: onKey },
    make('div', { class: 'detail-head' }, title, close), body);

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
    const parts = shown.thresholds ? draftedDetail(shown, currentDelta(), t) : emittedDetail(shown, t);
    body.replaceChildren(
      make('p', { class: 'quiet' }, t('detail.place', { label: pane.label, index: token.i, block: round.block }), ' · ',
        make('span', { class: `token ${token.c}` }, t(`class.${token.c}`))),
      ...parts,
    );
  }

  function open(entry) {
    shown?.element.classList.remove('opened');
    shown = entry;
    entry.element.classList.add('opened');
    title.replaceChildren(make('bdi', { class: 'big-token' }, visible(entry.token)));
    close.hidden = false;
    node.classList.add('open');
    // An embedding page that stretches the frame to its content has no bottom edge to hold a sheet.
    node.classList.toggle('framed', 'parentIFrame' in window);
    node.style.setProperty('--token-bottom', `${entry.element.offsetTop + entry.element.offsetHeight}px`);
    refresh();
    title.focus({ preventScroll: true });
    if (covers(node, entry.element)) entry.element.scrollIntoView({ block: 'start' });
  }

  function shut() {
    if (!shown) return;
    const { element } = shown;
    element.classList.remove('opened');
    shown = null;
    close.hidden = true;
    node.classList.remove('open');
    explain();
    element.focus({ preventScroll: true });
  }

  function onKey(event) {
    if (!shown || !event.key.startsWith('Arrow') || event.key === 'ArrowUp' || event.key === 'ArrowDown') return;
    open(shown.view.neighbour(shown, event.key));
    event.preventDefault();
  }

  explain();
  return { node, open, shut, refresh };
}

// ---- the line under the panes ----

function createComparison(t) {
  const expected = make('strong', {});
  const draws = make('strong', {});
  const node = make('section', { class: 'comparison' },
    make('p', {}, t('compare.expected'), expected), make('p', {}, t('compare.draws'), draws));

  function show(log, al, delta) {
    const { grid } = log.run;
    if (al) {
      const here = interpolate(grid, al, delta);
      expected.textContent = t('compare.pair', {
        sps: al[0].toFixed(2), cactus: (here.exact ? '' : '≈ ') + here.value.toFixed(2), delta: deltaText(delta),
      });
    } else expected.textContent = t('compare.waiting');
    draws.textContent = log.panes.map((pane) => t('compare.draws_pane', {
      al: fixed(2)(sameDraws(pane.rounds, delta)), label: pane.label,
    })).join(' · ');
  }

  return { node, show };
}

// ---- the whole ----

function createViewer(root, t) {
  const log = emptyLog();
  const plots = createPlots(make, t);
  let delta = 0;
  let views = [];
  let parts = null;
  let linked = null;
  let compared = 0;
  let differs = false;
  let frame = 0;
  let plotTimer = 0;
  let statusTimer = 0;

  function runDelta() {
    return (log.run.panes.find((pane) => pane.rule !== 'sps') ?? log.run.panes[0]).delta;
  }

  function start() {
    delta = runDelta();
    compared = 0;
    differs = false;
    linked = null;
    const detail = createDetail(t, () => delta);
    const actions = { open: detail.open, link };
    views = log.panes.map((pane, at) => createPane(pane, at, t, actions));
    parts = {
      detail,
      control: deltaControl(log.run, runDelta(), t, setDelta),
      legend: createLegend(root, log.panes, t, (on) => root.classList.toggle('show-discarded', on)),
      comparison: createComparison(t),
      status: make('p', { class: 'status quiet', role: 'status' }),
      difference: make('p', { class: 'quiet difference', hidden: '' }, t('pane.differs')),
    };
    root.classList.remove('show-discarded');
    delete root.dataset.only;
    delete root.dataset.pinned;
    root.replaceChildren(
      sourceLine(log.run, t), promptBox(log.run, t), parts.control.node, parts.legend.node, parts.status,
      make('div', { class: 'work' }, make('div', { class: 'panes' }, ...views.map((view) => view.node)), detail.node),
      parts.difference, parts.comparison.node, plots.node,
    );
    parts.control.show(delta);
    drawPlots();
  }

  function clear() {
    Object.assign(log, emptyLog());
    views = [];
    parts = null;
    root.replaceChildren(make('p', { class: 'quiet' }, t('run.none')));
  }

  function link(index) {
    if (index === linked) return;
    for (const view of views) {
      if (linked !== null) view.link(linked, false);
      if (index !== null) view.link(index, true);
    }
    linked = index;
  }

  function plotModel() {
    return {
      ...curves(log.sums), grid: log.run.grid, delta,
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
    parts.difference.hidden = false;
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
  }

  function append(records) {
    let rounds = [];
    for (const record of records) {
      addRecord(log, record);
      if (record.k === 'run') {
        start();
        rounds = [];
      }
      if (record.k === 'round') rounds.push(record);
      if (record.k === 'end') views[record.pane].showEnd();
    }
    if (!parts) return;
    drawRounds(rounds);
    plotTimer ||= setTimeout(drawPlots, PLOT_PAUSE_MS);
    if (log.panes.every((pane) => pane.end)) {
      clearTimeout(statusTimer);
      showStatus();
    } else statusTimer ||= setTimeout(showStatus, STATUS_PAUSE_MS);
  }

  root.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') parts?.detail.shut();
  });
  clear();
  return {
    append, clear, setDelta,
    delta: () => delta,
    plainText: (at) => plainText(log.panes[at].kept),
  };
}

/** Draws props.value, a log of JSON lines to which the server only appends, and keeps up with it. */
export function mount(element, props, watch) {
  const root = element.querySelector('.cactus-viewer') ?? element;
  const viewer = createViewer(root, wording(props.strings));
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
}
