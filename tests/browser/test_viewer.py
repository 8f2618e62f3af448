"""The page without any model: what a visitor sees, counts, moves, opens and copies on recorded runs."""

import json
from collections import Counter
from urllib.parse import urlparse

import pytest

from cactus import recordings
from cactus.page.strings import STRINGS
from cactus.replay import Replay
from cactus.rules import Cactus
from cactus.trace import OUTCOMES

pytestmark = pytest.mark.browser

FIRST = next(recording for recording in recordings.RECORDINGS if recording.name == "story")
RUN_DELTA = FIRST.rule.delta
OVERLAYS = {"would_accept": "accept", "would_reject": "reject", "would_discard": "discard"}
VERDICTS = {"accepted": "accept", "rescued": "accept", "rejected": "reject", "discarded": "discard"}
CONTRAST = 4.5  # WCAG AA for text


def traces(recording):
    """SpS and the other rule."""
    return recordings.read(recording.path)[:2]


def outcomes(trace):
    """Outcome to number of tokens."""
    return Counter(token.outcome for round in trace.rounds for token in (*round.drafted, round.replacement) if token)


def without_special(trace):
    """The generated text as a reader wants it."""
    return trace.text.replace("<|im_end|>", "")


def overlays(trace, delta):
    """Verdict to number of drafted tokens that get it at `delta` and had another in the run: the critical deltas decide, and
    nothing behind a block's first rejection is judged."""
    replay = Replay(trace.rounds, trace.eos_ids)
    critical, changed = iter(replay.critical_deltas()), Counter()
    for block in replay.blocks:
        verdict = "accept"
        for token in block:
            edge = next(critical)
            kept = token.u * token.p < token.q or (edge is not None and delta > edge)
            verdict = ("accept" if kept else "reject") if verdict == "accept" else "discard"
            changed[verdict] += token.outcome != "cut" and verdict != VERDICTS[token.outcome]
    return changed


def curve_values(trace, delta):
    """Expected acceptance length and mean KL(h_alg‖q) of Cactus at `delta` at the contexts of `trace`."""
    replay, rules = Replay(trace.rounds, trace.eos_ids), [Cactus(delta)]
    return replay.expected_lengths(rules).mean().item(), replay.divergence(rules)[0, replay.judged].mean().item()


def number(text):
    return float(text.replace("≈", "").strip())


def significant(x):
    """A number as the page writes it, to three digits."""
    return 0 if abs(x) < 1e-9 else float(f"{x:.3g}")


def test_recorded_run_is_there_without_a_click_and_says_so(visit, offline_server):
    page = visit(offline_server.url)
    page.wait_for_status("No models")
    assert page.page.locator(".badge").inner_text() == STRINGS["run.recorded"]
    assert page.token_texts(0) and page.token_texts(1)
    assert page.page.locator(".prompt-text").inner_text() == FIRST.prompt
    page.page.locator(".plot .main-svg").first.wait_for()
    assert page.complaints == []


def test_page_needs_no_other_host(visit, offline_server):
    page = visit(offline_server.url)
    page.page.locator(".plot .main-svg").first.wait_for()
    assert {urlparse(url).netloc for url in page.asked} - {""} == {urlparse(offline_server.url).netloc}


def test_generate_without_models_says_why_and_breaks_nothing(visit, offline_server):
    page = visit(offline_server.url)
    page.wait_for_status("No models")
    reason = page.status()
    assert "could not be downloaded" in reason and "\n" not in reason
    before = page.text(0)
    page.page.locator("#generate").click()
    toast = page.page.locator(".toast-body")
    toast.wait_for()
    assert "could not be downloaded" in toast.inner_text()
    assert "Traceback" not in page.page.locator("body").inner_text()
    page.wait_for_status("No models")
    assert page.text(0) == before
    page.type_delta(1)
    assert page.legend()["would_accept"][0] == overlays(traces(FIRST)[0], 1)["accept"]
    assert page.complaints == []


def test_all_values_without_models_are_one_sentence(visit, offline_server):
    page = visit(offline_server.url)
    page.wait_for_status("No models")
    page.pane(0).locator(".token").first.click()
    detail = page.page.locator(".detail-body").inner_text()
    page.viewer.get_by_role("button", name=STRINGS["values.ask"]).click()
    said = page.page.locator(".values-status")
    said.get_by_text(STRINGS["values.not_loaded"]).wait_for()
    assert page.page.locator(".values table").count() == 0
    assert page.page.locator(".detail-body").inner_text() == detail
    page.page.keyboard.press("ArrowRight")  # another token, another position
    assert said.inner_text() == ""
    assert page.complaints == []


@pytest.mark.parametrize("recording", recordings.RECORDINGS, ids=lambda recording: recording.name)
def test_every_recording_shows_what_its_file_holds(visit, offline_server, recording):
    """Class counts of the legend = token elements = the file; the text of each pane is the text of its trace."""
    page = visit(offline_server.url)
    if recording != FIRST:
        page.open_settings()
        page.choose_recording(recording.name)
    legend = page.legend()
    for at, trace in enumerate(traces(recording)):
        expected = outcomes(trace)
        assert {name: legend[name][at] for name in OUTCOMES} == {name: expected[name] for name in OUTCOMES}
        assert {name: len(page.token_texts(at, name)) for name in OUTCOMES} == {name: expected[name] for name in OUTCOMES}
        assert page.text(at) == without_special(trace)
        totals = page.page.locator("section.legend .total .counts span").nth(at)
        assert int(totals.inner_text()) == sum(expected.values())
    assert page.complaints == []


def test_keyboard_moves_delta_and_zero_is_sps(visit, offline_server):
    page = visit(offline_server.url)
    slider = page.viewer.get_by_label(STRINGS["delta.slider"])
    slider.focus()
    page.page.keyboard.press("Home")
    page.settle()
    assert page.viewer.locator(".sentence").inner_text() == STRINGS["delta.zero"]
    assert slider.get_attribute("aria-valuetext") == "δ = 0"
    assert page.legend()["would_accept"] == [0, 0]
    cactus = traces(FIRST)[1]
    assert page.legend()["would_reject"][1] == overlays(cactus, 0)["reject"] > 0

    page.page.keyboard.press("End")
    page.page.keyboard.press("ArrowLeft")
    page.settle()
    assert slider.get_attribute("aria-valuetext") == "δ = 1.5"
    assert page.legend()["would_accept"] == [overlays(trace, 1.5)["accept"] for trace in traces(FIRST)]
    assert page.complaints == []


@pytest.mark.parametrize("delta", [0, 0.02, 0.0137, RUN_DELTA, 0.5, 2])
def test_any_delta_rejudges_like_the_trace(visit, offline_server, delta):
    """Counts, marked tokens and the values of both curves, on the grid and between its points, against Replay."""
    page = visit(offline_server.url)
    page.page.locator(".plot .main-svg").nth(1).wait_for()
    page.type_delta(delta)
    legend, both = page.legend(), traces(FIRST)
    for at, trace in enumerate(both):
        expected = overlays(trace, delta)
        assert {name: legend[name][at] for name in OVERLAYS} == {name: expected[verdict] for name, verdict in OVERLAYS.items()}
        assert {name: len(page.token_texts(at, name)) for name in OVERLAYS} == {name: legend[name][at] for name in OVERLAYS}
    length, divergence = curve_values(both[0], delta)
    on_grid = delta != 0.0137
    here = [page.viewer.locator(f".plot-dot.{name} span").inner_text() for name in ("al", "kl")]
    assert number(here[0]) == pytest.approx(length, abs=0.0051 if on_grid else 0.02)
    assert number(here[1]) == pytest.approx(divergence, rel=0.051 if on_grid else 0.1)
    assert ("≈" in here[0]) == (not on_grid)


def test_curves_are_the_trace_replayed_at_every_delta(visit, offline_server):
    page = visit(offline_server.url)
    page.page.locator(".plot .main-svg").nth(1).wait_for()
    drawn = page.page.evaluate("[...document.querySelectorAll('.plot')].slice(0, 2).map((plot) => ({...plot.data[0]}))")
    sps = traces(FIRST)[0]
    for at in range(2):
        expected = [curve_values(sps, float(delta))[at] for delta in drawn[at]["text"]]
        assert drawn[at]["y"] == pytest.approx(expected, rel=1e-5, abs=1e-9)
    heights = page.page.locator(".plot").evaluate_all("(plots) => plots.map((plot) => plot.clientHeight)")
    assert min(heights) > 150


@pytest.mark.parametrize("typed", ["3", "-0.1", ""])
def test_a_delta_out_of_range_gets_a_sentence_and_changes_nothing(visit, offline_server, typed):
    page = visit(offline_server.url)
    before = page.legend()
    page.type_delta(typed)
    assert page.page.locator("#cactus-delta-message").inner_text() == STRINGS["delta.invalid"]
    assert page.legend() == before
    assert page.page.evaluate("cactusViewer.delta()") == RUN_DELTA


def element_of(page, at, trace, token):
    """The element of a drafted token."""
    alike = [other for other in trace.drafted if other.outcome == token.outcome]
    return page.pane(at).locator(f".token.{token.outcome}").nth(alike.index(token))


# Which token, and how the sentence about it ends.
VERDICT_SENTENCES = {
    "accepted": (lambda token: token.outcome == "accepted", "SpS would keep it as well."),
    "rescued": (lambda token: token.outcome == "rescued", "kept only thanks to δ."),
    "rejected": (lambda token: token.outcome == "rejected" and token.q > 0, ": rejected."),
    "impossible": (lambda token: token.outcome == "rejected" and token.q == 0, "so γ = 0 and it is rejected."),
}


@pytest.mark.parametrize("case", VERDICT_SENTENCES)
@pytest.mark.parametrize("by", ["click", "Enter"])
def test_a_token_opens_with_the_numbers_of_its_verdict(visit, offline_server, case, by):
    page = visit(offline_server.url)
    wanted, ending = VERDICT_SENTENCES[case]
    at, trace, token = next(
        (at, trace, token) for at, trace in reversed(list(enumerate(traces(FIRST)))) for token in trace.drafted if wanted(token)
    )
    element = element_of(page, at, trace, token)
    if by == "click":
        element.click()
    else:
        element.focus()
        page.page.keyboard.press("Enter")
    detail = page.viewer.locator(".detail")
    figures = dict(zip(detail.locator("dt").all_inner_texts(), map(float, detail.locator("dd").all_inner_texts()), strict=True))
    expected = {"p": token.p, "q": token.q, "γ": token.gamma, "φ": token.phi, "u": token.u}
    assert figures == {name: significant(value) for name, value in expected.items()}
    assert detail.locator(".verdict").inner_text().endswith(ending)
    assert detail.locator(".big-token").inner_text().strip(" ·") == token.piece.text.strip()

    page.page.keyboard.press("Escape")
    assert page.viewer.locator(".detail.open").count() == 0
    assert element.evaluate("(token) => token === document.activeElement")
    assert page.complaints == []


def test_the_address_keeps_the_opened_token(visit, offline_server):
    page = visit(offline_server.url)
    address = "() => location.hash"
    token = page.pane(1).locator(".token.rescued").first
    token.click()
    named = page.page.evaluate(address)
    assert named.startswith("#token=1.")
    shown = page.viewer.locator(".detail-body").inner_text()
    again = visit(f"{offline_server.url}{named}")
    again.viewer.locator(".detail .figures").wait_for()
    assert again.viewer.locator(".detail-body").inner_text() == shown
    assert again.pane(1).locator(".token.opened").text_content() == token.text_content()
    again.page.wait_for_function("document.activeElement.matches('.detail h3')")
    again.page.keyboard.press("ArrowRight")  # the next token, and its name
    assert again.page.evaluate(address) not in (named, "")
    for each, close in (
        (page, lambda: page.viewer.locator(".close").click()),
        (again, lambda: again.page.keyboard.press("Escape")),
    ):
        close()
        assert each.page.evaluate(address) == ""
        assert each.viewer.locator(".detail.open").count() == 0
        assert each.complaints == []


def test_another_run_takes_the_token_out_of_the_address(visit, offline_server):
    """An address opens the first recorded run: a token of another one would name a wrong one there."""
    page = visit(offline_server.url)
    page.pane(0).locator(".token").first.click()
    page.open_settings()
    page.choose_recording("code")
    assert page.page.evaluate("location.hash") == ""
    page.pane(0).locator(".token").first.click()
    assert page.viewer.locator(".detail.open").count() == 1
    assert page.page.evaluate("location.hash") == ""


@pytest.mark.parametrize("hash", ["token=9.3", "token=0.999999", "token=-1.0", "token=0.constructor", "token=0.1<img src=x>", "%"])
def test_an_address_that_names_no_token_opens_none(visit, offline_server, hash):
    page = visit(f"{offline_server.url}#{hash}")
    page.page.locator(".plot .main-svg").first.wait_for()
    assert page.viewer.locator(".detail.open").count() == 0
    assert page.complaints == []


def test_columns_of_the_detail_sum_to_one(visit, offline_server):
    page = visit(offline_server.url)
    for outcome in ("accepted", "rescued", "rejected", "resampled", "bonus"):
        page.pane(1).locator(f".token.{outcome}").first.click()
        sums = page.viewer.locator(".detail tfoot td").all_inner_texts()
        assert set(sums) - {"–"} == {"1.000"}


def test_detail_follows_delta(visit, offline_server):
    """A rejected token with a critical delta: rejected just below it, accepted just above it."""
    page = visit(offline_server.url)
    trace = traces(FIRST)[1]
    replay = Replay(trace.rounds, trace.eos_ids)
    token, edge = next(
        (token, edge)
        for token, edge in zip(replay.tokens, replay.critical_deltas(), strict=True)
        if token.outcome == "rejected" and edge and edge < 1.9
    )
    element_of(page, 1, trace, token).click()
    for delta, words in ((edge * 0.99, "would reject it"), (edge * 1.01, "would accept it")):
        page.type_delta(f"{delta:.9f}")
        assert words in page.viewer.locator(".detail-body").inner_text()


def test_arrows_move_within_a_pane_which_is_one_tab_stop(visit, offline_server):
    page = visit(offline_server.url)
    stops = page.page.locator(".tokens").evaluate_all(
        "(lists) => lists.map((list) => list.querySelectorAll('[tabindex=\"0\"]').length)"
    )
    assert stops == [1, 1]
    shown = page.pane(0).locator(".token:visible")
    shown.first.focus()
    visited = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home", "ArrowDown", "ArrowUp"):
        page.page.keyboard.press(key)
        visited.append(shown.evaluate_all("(tokens) => tokens.indexOf(document.activeElement)"))
    second_block = page.pane(0).locator(".block").first.locator(".token:visible").count()
    assert visited == [1, 2, 1, shown.count() - 1, 0, second_block, 0]
    page.page.keyboard.press("ArrowRight")
    page.page.keyboard.press("Tab")
    assert not page.pane(0).locator(".tokens").evaluate("(list) => list.contains(document.activeElement)")
    page.page.keyboard.press("Shift+Tab")
    assert shown.nth(1).evaluate("(token) => token === document.activeElement")


def test_every_token_has_a_name_for_screen_readers(visit, offline_server):
    page = visit(offline_server.url)
    labels = page.page.locator(".tokens .token").evaluate_all("(tokens) => tokens.map((token) => token.getAttribute('aria-label'))")
    assert all(label.startswith("token ") and "{" not in label for label in labels)
    rejected = page.pane(0).locator(".token.rejected").first.get_attribute("aria-label")
    assert STRINGS["class.rejected"] in rejected and ", p " in rejected and ", q " in rejected


IN_SIGHT = "(element) => { const box = element.getBoundingClientRect(); return box.top >= 0 && box.bottom <= innerHeight; }"


def test_first_screen_holds_text_legend_and_both_acceptance_lengths(visit, offline_server):
    page = visit(offline_server.url)
    page.wait_for_status("No models")
    assert page.viewer.locator(".legend ul").evaluate(IN_SIGHT)
    for at, trace in enumerate(traces(FIRST)):
        length = page.pane(at).locator(".head-al")
        assert length.evaluate(IN_SIGHT)
        mean = sum(round.accepted for round in trace.rounds) / len(trace.rounds)
        assert length.inner_text().startswith(STRINGS["pane.al"].format(value=f"{mean:.2f}"))
        lines = (
            page.pane(at)
            .locator(".token:visible")
            .evaluate_all(
                """(tokens) => new Set(tokens.map((token) => token.getBoundingClientRect()).filter((box) => box.bottom <= innerHeight)
                 .map((box) => Math.round(box.top))).size"""
            )
        )
        assert lines > 5


@pytest.mark.parametrize("width", [1280, 390])
def test_legend_stays_in_sight_over_the_panes(visit, offline_server, width):
    """Gradio's frame was a scroll container, so that nothing could; on a phone it keeps to one line."""
    page = visit(offline_server.url, viewport={"width": width, "height": 844})
    page.pane(1).locator(".token").last.evaluate("(token) => token.scrollIntoView({block: 'end'})")
    legend = page.viewer.locator(".legend ul")
    assert legend.evaluate(IN_SIGHT)
    assert legend.bounding_box()["height"] < (100 if width == 1280 else 50)
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    legend.get_by_role("button").nth(2).hover()
    assert page.viewer.get_attribute("data-only") == "rejected"


def test_pointing_at_a_token_marks_the_same_place_in_the_other_pane(visit, offline_server):
    page = visit(offline_server.url)
    page.pane(0).locator(".token:visible").nth(8).hover()
    linked = page.page.locator(".token.linked").evaluate_all(
        "(tokens) => tokens.map((t) => t.getAttribute('aria-label').split(' ')[1])"
    )
    assert len(linked) >= 2 and len(set(linked)) == 1
    page.page.locator("h1").hover()
    assert page.page.locator(".token.linked").count() == 0


def test_pointing_at_a_token_outlines_the_bars_that_count_its_passes(visit, offline_server):
    """In each pane the pass at the token's place; the outline lies on plotly's own bar."""
    page = visit(offline_server.url)
    chart = page.page.locator(".plots figure").nth(2)
    chart.scroll_into_view_if_needed()
    chart.locator(".bars .point path").first.wait_for()
    token = page.pane(1).locator(".token.rescued").first
    token.focus()
    index = int(token.get_attribute("aria-label").split()[1].rstrip(":"))
    outlines = chart.locator(".plot-bar")
    assert outlines.count() == 2
    for at, trace in enumerate(traces(FIRST)):
        pass_ = next(round for round in trace.rounds if any(token.index == index for token in round.emitted))
        bar = chart.locator(".barlayer .trace").nth(at).locator(".point path").nth(pass_.accepted).bounding_box()
        outline = outlines.nth(at).bounding_box()
        assert all(outline[side] == pytest.approx(bar[side], abs=1.5) for side in ("x", "y", "width", "height"))
    page.page.evaluate("document.activeElement.blur()")
    page.page.mouse.move(5, 5)
    assert outlines.count() == 0
    assert page.complaints == []


def test_discarded_drafts_show_on_request(visit, offline_server):
    page = visit(offline_server.url)
    discarded = page.pane(0).locator(".token.discarded")
    assert discarded.count() > 0 and discarded.locator("visible=true").count() == 0
    page.viewer.get_by_label(STRINGS["legend.show_discarded"]).check()
    assert discarded.locator("visible=true").count() == discarded.count()


def test_copy_button_and_copied_selection_give_exactly_the_text(visit, offline_server):
    page = visit(offline_server.url, permissions=["clipboard-read", "clipboard-write"])
    for at, trace in enumerate(traces(FIRST)):
        page.pane(at).locator(".copy").click()
        assert page.page.evaluate("navigator.clipboard.readText()") == without_special(trace)
        page.page.evaluate("navigator.clipboard.writeText('')")
        page.pane(at).locator(".tokens").evaluate("(list) => getSelection().selectAllChildren(list)")
        page.page.keyboard.press("Control+C")
        assert page.page.evaluate("navigator.clipboard.readText()") == without_special(trace)


def test_a_part_selected_across_rejected_tokens_is_copied_without_them(visit, offline_server):
    """From within one token to within another some lines below, in either direction."""
    page = visit(offline_server.url, permissions=["clipboard-read", "clipboard-write"])
    kept = page.kept(0)
    text = kept.all_text_contents()
    expected = text[2][1:] + "".join(text[3:40]) + text[40][:1]
    for order in ("start, 1, end, 1", "end, 1, start, 1"):
        kept.evaluate_all(
            f"""(tokens) => {{
              const [start, end] = [tokens[2].firstChild, tokens[40].firstChild];
              getSelection().setBaseAndExtent({order});
            }}"""
        )
        page.page.keyboard.press("Control+C")
        assert page.page.evaluate("navigator.clipboard.readText()") == expected
        page.page.evaluate("navigator.clipboard.writeText('')")


def test_phone_has_no_sideways_scroll_and_stacks_the_panes(visit, offline_server):
    page = visit(offline_server.url, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.page.locator(".plot .main-svg").first.wait_for()
    page.open_settings()
    width = page.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1] == 390
    first, second = page.pane(0).bounding_box(), page.pane(1).bounding_box()
    assert second["y"] >= first["y"] + first["height"] and first["x"] == second["x"]
    page.pane(0).locator(".token.rejected").first.tap()
    sheet = page.viewer.locator(".detail.open").bounding_box()
    assert sheet["x"] >= 0 and sheet["x"] + sheet["width"] <= 390
    assert sheet["y"] + sheet["height"] == pytest.approx(844, abs=1)
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
    thumb = page.viewer.locator(".slider").evaluate("(slider) => getComputedStyle(slider).getPropertyValue('--thumb')")
    assert thumb.strip() == "44px"
    assert page.complaints == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_token_text_has_contrast(visit, offline_server, theme):
    """Text of every shown class, as marked at another delta too, against all the grounds that lie under it."""
    page = visit(f"{offline_server.url}?__theme={theme}")
    assert page.page.evaluate("document.body.classList.contains('dark')") == (theme == "dark")
    page.viewer.get_by_label(STRINGS["legend.show_discarded"]).check()
    page.type_delta(1)
    ratios = page.page.evaluate(CONTRASTS)
    assert set(ratios) >= {"accepted", "rescued", "rejected", "resampled", "bonus", "discarded"}
    assert min(ratios.values()) >= CONTRAST, json.dumps(ratios)


# A canvas blends and reads every colour syntax a style may come in.
CONTRAST_OF = """(element) => {
  const context = Object.assign(document.createElement('canvas'), {width: 1, height: 1}).getContext('2d', {willReadFrequently: true});
  const paint = (colour) => { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); };
  const luminance = () => {
    const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((byte) => byte / 255)
      .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const grounds = [];
  for (let at = element; at; at = at.parentElement) grounds.unshift(getComputedStyle(at).backgroundColor);
  paint('white');
  grounds.forEach(paint);
  const below = luminance();
  paint(getComputedStyle(element).color);
  const ink = luminance();
  return (Math.max(ink, below) + 0.05) / (Math.min(ink, below) + 0.05);
}"""
CONTRASTS = f"""() => {{
  const contrast = {CONTRAST_OF};
  const least = {{}};
  for (const token of document.querySelectorAll('.tokens .token')) {{
    for (const name of [...token.classList].slice(1)) least[name] = Math.min(least[name] ?? Infinity, contrast(token));
  }}
  return least;
}}"""


def test_the_ticked_box_is_there(visit, offline_server):
    """Gradio's styles made it white on white once ticked."""
    page = visit(offline_server.url)
    box = page.viewer.get_by_label(STRINGS["legend.show_discarded"])
    box.check()
    assert box.evaluate("(box) => getComputedStyle(box).appearance") == "auto"


def test_words_come_in_one_font(visit, offline_server):
    """Gradio's semibold face has an A and hardly anything else: the page brings the bold one in its place."""
    page = visit(offline_server.url)
    page.page.evaluate("document.fonts.ready")
    session = page.page.context.new_cdp_session(page.page)
    for domain in ("DOM", "CSS"):
        session.send(f"{domain}.enable")
    root = session.send("DOM.getDocument")["root"]["nodeId"]
    heading = session.send("DOM.querySelector", {"nodeId": root, "selector": ".plots figure:nth-child(4) h4"})["nodeId"]
    assert len(session.send("CSS.getPlatformFontsForNode", {"nodeId": heading})["fonts"]) == 1


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_explanations_in_the_settings_have_contrast(visit, offline_server, theme):
    page = visit(f"{offline_server.url}?__theme={theme}")
    page.open_settings()
    assert page.page.locator("#auto .info-text").evaluate(f"(text) => ({CONTRAST_OF})(text)") >= CONTRAST


@pytest.mark.parametrize("width", [1280, 390])
def test_legends_of_the_charts_name_everything_within_them(visit, offline_server, width):
    """On a phone the names were stacked beyond the upper edge."""
    page = visit(offline_server.url, viewport={"width": width, "height": 844})
    page.page.locator("figure").nth(3).scroll_into_view_if_needed()
    page.page.locator(".chart .main-svg").nth(1).wait_for()
    for figure in page.page.locator(".plots figure").all():
        frame = figure.locator(".plot-frame").bounding_box()
        names = [name.bounding_box() for name in figure.locator(".legendtext").all()]
        assert len(names) > 1
        for name in names:
            assert name["y"] >= frame["y"] and name["x"] >= frame["x"]
            assert name["x"] + name["width"] <= frame["x"] + frame["width"]


def test_number_at_the_mark_does_not_lie_on_the_point_of_a_run(visit, offline_server):
    """At the delta of the recorded run the point that it reached lay over the number."""
    page = visit(offline_server.url)
    page.page.locator(".plot .main-svg").nth(1).wait_for()
    page.settle()
    number = page.viewer.locator(".plot-dot.al span").bounding_box()
    for point in page.page.locator(".plot").first.locator(".scatterlayer .points path").all():
        box = point.bounding_box()
        apart = number["y"] + number["height"] <= box["y"] or box["y"] + box["height"] <= number["y"]
        assert apart or number["x"] + number["width"] <= box["x"] or box["x"] + box["width"] <= number["x"]


def test_reduced_motion_is_respected(visit, offline_server):
    page = visit(offline_server.url, reduced_motion="reduce")
    moving = page.page.locator(".tokens .token").evaluate_all(
        "(tokens) => tokens.filter((token) => parseFloat(getComputedStyle(token).transitionDuration) > 0).length"
    )
    assert moving == 0
    page.type_delta(1)
    assert page.complaints == []


def test_reset_brings_every_default_back(visit, offline_server):
    page = visit(offline_server.url)
    page.open_settings()
    controls = "prompt", "m", "length", "seed", "temperature", "top_k", "top_p"
    fields = {name: page.page.locator(f"#{name} textarea, #{name} input[type=number]").first for name in controls}
    chosen = "#bits input:checked, #chat input:checked"

    def state():
        radios = page.page.locator(chosen).evaluate_all("(inputs) => inputs.map((input) => input.value)")
        recording = page.page.locator("#recording input").input_value()
        return (
            {name: field.input_value() for name, field in fields.items()},
            radios,
            recording,
            page.text(0),
            page.text(1),
            page.legend(),
        )

    before = state()
    for name in controls:
        page.set(name, "Another prompt" if name == "prompt" else "1")
    page.page.locator("#chat input").nth(1).check()
    page.page.locator("#bits input").first.check()
    page.choose_recording("code")
    page.type_delta(1.5)
    assert all(now != then for now, then in zip(state(), before, strict=True))

    page.page.locator("#reset").click()
    page.page.wait_for_function("(text) => document.querySelector('.prompt-text').textContent === text", arg=FIRST.prompt)
    page.page.wait_for_function("(delta) => cactusViewer.delta() === delta", arg=RUN_DELTA)
    page.settle()
    assert state() == before
    assert page.complaints == []
