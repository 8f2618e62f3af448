"""The run pass by pass: rows, the stage and its animation, links with the panes, and what the charts and strips add up."""

from collections import Counter

import pytest

from cactus import recordings
from cactus.metrics import figures
from cactus.page.strings import STRINGS

pytestmark = pytest.mark.browser

FIRST = next(recording for recording in recordings.RECORDINGS if recording.name == "story")
PHASES = "step.tell_draft", "step.tell_verify", "step.tell_verdict", "step.tell_add"


def traces():
    return recordings.read(FIRST.path)[:2]


def opened(visit, server, **options):
    page = visit(server.url, **options)
    page.page.locator(".rows li").first.wait_for(state="attached")
    page.page.wait_for_function("(many) => document.querySelectorAll('.rows li').length === many", arg=passes())
    return page


def passes():
    return sum(len(trace.rounds) for trace in traces())


def counted(round):
    """drafted, kept, refused, discarded of a round as the sentence must say them."""
    outcomes = Counter(token.outcome for token in round.drafted)
    return len(round.drafted), outcomes["accepted"] + outcomes["rescued"], outcomes["rejected"], outcomes["discarded"]


def place(page):
    return page.page.locator(".step-place").inner_text()


def test_one_row_per_pass_with_its_counts_and_addition(visit, offline_server):
    page = opened(visit, offline_server)
    for at, trace in enumerate(traces()):
        rows = page.page.locator(".rows").nth(at).locator("li .row-sentence").all_inner_texts()
        assert len(rows) == len(trace.rounds)
        for text, round in zip(rows, trace.rounds, strict=True):
            drafted, kept, refused, discarded = counted(round)
            assert text.startswith(f"drafted {drafted}, kept {kept}")
            assert (f"replaced {refused}" in text) == (refused > 0)
            assert (f"discarded {discarded}" in text) == (discarded > 0)
            if round.replacement:
                assert "the verifier added ‹" in text and ("as a bonus" in text) == (round.replacement.outcome == "bonus")
    assert page.complaints == []


def test_rows_mark_where_the_texts_part(visit, offline_server):
    page = opened(visit, offline_server)
    first, second = traces()
    i = next(i for i, (a, b) in enumerate(zip(first.ids, second.ids, strict=False)) if a != b)
    for at, trace in enumerate((first, second)):
        marked = page.page.locator(".rows").nth(at).locator("li:has(.row-differs:not([hidden]))")
        round = next(k for k, round in enumerate(trace.rounds) if any(token.index == i for token in round.emitted))
        assert marked.locator(".row-number").all_inner_texts() == [str(round + 1)]


def test_keys_and_buttons_change_the_pass(visit, offline_server):
    page = opened(visit, offline_server)
    many = len(traces()[0].rounds)
    page.page.locator(".stage").focus()
    for key, number in (("ArrowRight", 2), ("ArrowDown", 3), ("ArrowLeft", 2), ("End", many), ("Home", 1)):
        page.page.keyboard.press(key)
        assert place(page) == STRINGS["step.place"].format(label="SpS", number=number, many=many)
    back, forth = (page.page.get_by_role("button", name=STRINGS[f"step.{way}"]) for way in ("back", "next"))
    assert back.is_disabled()
    forth.click()
    assert place(page).startswith("SpS, pass 2 ") and back.is_enabled()
    page.page.locator(".step-tabs button").nth(1).click()
    assert place(page).startswith("Cactus, pass 1 ")


def test_pass_and_text_are_linked_both_ways(visit, offline_server):
    page = opened(visit, offline_server)
    trace = traces()[0]
    page.page.locator(".rows").first.locator("li").nth(4).click()
    framed = page.pane(0).locator(".current-pass .token").evaluate_all("(tokens) => tokens.map((token) => token.textContent)")
    round = trace.rounds[4]
    tokens = [*round.drafted, *([round.replacement] if round.replacement else [])]
    assert sorted(framed) == sorted(token.piece.text for token in tokens)

    element = page.pane(0).locator(".token.rejected").nth(3)
    index = element.get_attribute("aria-label").split(" ")[1]
    element.hover()
    assert page.page.locator(".rows").first.locator("li.linked").count() >= 1
    assert f"position {index}," in page.pane(0).locator(".bar.linked").first.get_attribute("aria-label")
    element.click()
    number = next(
        k + 1
        for k, round in enumerate(trace.rounds)
        if any(t.index == int(index) and t.outcome == "rejected" for t in round.drafted)
    )
    assert place(page).startswith(f"SpS, pass {number} ")


def test_play_shows_the_order_of_events(visit, offline_server):
    page = opened(visit, offline_server)
    page.page.get_by_label(STRINGS["step.speed"]).first.select_option("4")
    page.page.evaluate(
        """() => {
             window.told = [];
             const line = document.querySelector('.told');
             new MutationObserver(() => told.push([line.textContent, document.querySelector('.step-place').textContent]))
               .observe(line, {childList: true, characterData: true, subtree: true});
           }"""
    )
    page.page.locator(".play").click()
    page.page.wait_for_function("() => document.querySelector('.step-place').textContent.includes('pass 3 of')")
    page.page.locator(".play").click()
    told = [text for text, where in page.page.evaluate("told") if "pass 2 of" in where]
    starts = [STRINGS[phase].split("{")[0] for phase in PHASES]
    seen = [next((k for k, start in enumerate(starts) if text.startswith(start)), 4) for text in told]
    # The addition and the closing sentence may fall together, as the last event of the pass.
    assert seen == sorted(seen) and {0, 1, 2} <= set(seen) and told[-1].startswith("drafted ")
    here = place(page)
    page.page.wait_for_timeout(1500)
    assert place(page) == here
    assert page.complaints == []


def test_verifier_shows_all_its_probabilities_at_once(visit, offline_server):
    page = opened(visit, offline_server)
    page.page.locator(".stage").focus()
    page.page.keyboard.press("ArrowRight")
    page.page.locator(".play").click()
    shown = page.page.evaluate(
        """async () => {
             const seen = new Set();
             const cards = () => [...document.querySelectorAll('.card:not(.bonus-card)')];
             for (let end = performance.now() + 4500; performance.now() < end;) {
               const read = document.querySelector('.cards').classList.contains('read');
               seen.add(`${cards().filter((card) => card.classList.contains('proposed')).length} ${read}`);
               await new Promise(requestAnimationFrame);
             }
             return [...seen];
           }"""
    )
    assert "1 false" in shown and "5 true" in shown
    assert not any(state.endswith("true") and not state.startswith("5") for state in shown)


def test_reduced_motion_steps_without_animation(visit, offline_server):
    page = opened(visit, offline_server, reduced_motion="reduce")
    page.page.locator(".play").click()
    page.page.wait_for_function("() => document.querySelector('.step-place').textContent.includes('pass 2 of')")
    assert page.page.locator(".told").inner_text().startswith("drafted ")
    assert page.page.locator(".cactus-viewer .card:not(.bonus-card):not(.proposed)").count() == 0
    page.page.locator(".play").click()


def test_strips_sum_the_divergence_of_the_trace(visit, offline_server):
    page = opened(visit, offline_server)
    for at, trace in enumerate(traces()):
        spent = [x for round in trace.rounds for x in figures(round, trace.rule, trace.eos_ids).kls]
        assert page.pane(at).locator(".bar").count() == len(spent)
        text = page.pane(at).locator(".budget-sum").inner_text()
        assert f"{float(f'{sum(spent):.3g}') if sum(spent) > 1e-9 else 0:g} nats over {len(spent)} judged" in text
        assert "upper bound on the divergence of the whole text" in page.pane(at).locator(".budget").inner_text()


def test_a_bar_opens_its_token_and_gets_the_focus_back(visit, offline_server):
    page = opened(visit, offline_server)
    bars = page.pane(1).locator(".bar")
    assert page.pane(1).locator(".bars [tabindex='0']").count() == 1
    bars.first.focus()
    page.page.keyboard.press("ArrowRight")
    page.page.keyboard.press("Enter")
    assert page.page.locator(".detail.open").count() == 1
    page.page.keyboard.press("Escape")
    assert bars.nth(1).evaluate("(bar) => bar === document.activeElement")


def test_histogram_counts_every_pass(visit, offline_server):
    page = opened(visit, offline_server)
    page.page.locator("figure").nth(2).scroll_into_view_if_needed()
    page.page.wait_for_function("() => document.querySelector('.chart')?.data")
    bars = page.page.locator(".chart").first.evaluate("(chart) => chart.data.map((bar) => [...bar.y])")
    for drawn, trace in zip(bars, traces(), strict=True):
        kept = Counter(round.accepted for round in trace.rounds)
        assert drawn == [kept[k] for k in range(len(drawn))]
    assert page.page.locator(".chart").first.evaluate("(chart) => chart.clientHeight") > 150


def test_phone_shows_one_list_and_does_not_scroll_sideways(visit, offline_server):
    page = opened(visit, offline_server, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    assert page.page.locator(".row-column:visible").count() == 1
    page.page.locator(".step-tabs button").nth(1).tap()
    assert page.page.locator(".row-column:visible h5").inner_text().startswith("Cactus")
    page.page.locator(".play").tap()
    page.page.wait_for_timeout(800)
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.complaints == []


# Moves of single parts of the viewer: what Gradio's own controls push down above it is no matter of the viewer.
SHIFTS = """
window.shifted = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) {
    if (entry.sources.some(({node}) => node?.closest?.('.cactus-viewer'))) shifted += entry.value;
  }
}).observe({type: 'layout-shift', buffered: true});
"""


@pytest.mark.parametrize("width", [1280, 390])
def test_late_parts_of_the_viewer_move_nothing(browser, offline_server, width):
    context = browser.new_context(viewport={"width": width, "height": 900})
    try:
        page = context.new_page()
        page.add_init_script(SHIFTS)
        page.goto(offline_server.url)
        page.wait_for_function("(many) => document.querySelectorAll('.rows li').length === many", arg=passes())
        page.locator(".plot .main-svg").first.wait_for()
        for y in range(0, 4000, 400):
            page.evaluate("(y) => scrollTo(0, y)", y)
            page.wait_for_timeout(50)
        assert page.evaluate("shifted") < 0.1
    finally:
        context.close()
