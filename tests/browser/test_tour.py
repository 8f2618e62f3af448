"""The guided tour: it starts when asked, shows the numbers of the log, asks a question, and gives everything back on leaving."""

import pytest

from cactus import recordings
from cactus.metrics import summary
from cactus.page.strings import STRINGS

pytestmark = pytest.mark.browser

FIRST = next(recording for recording in recordings.RECORDINGS if recording.name == "story")
STEPS = 7


def start(page):
    page.page.locator(".tour-start").click()
    page.page.locator(".tour-card:not([hidden])").wait_for()


def go_to(page, step):
    while page.page.locator(".tour-counter").inner_text() != STRINGS["tour.place"].format(step=step, steps=STEPS):
        page.page.locator(".tour-next").click()


def card(page):
    return page.page.locator(".tour-card").inner_text()


def asked(page):
    """The token of the question: q and u·p as the card says them, and its critical delta from the trace."""
    text = page.page.locator(".tour-body p").first.inner_text()
    q, up = (float(text.split(f"{name} = ")[1].split(",")[0].split(". ")[0]) for name in ("q", "u·p"))
    tokens = [token for token in recordings.read(FIRST.path)[0].drafted if token.outcome == "rejected" and token.q > 0]
    token = min(tokens, key=lambda token: abs(token.q - q) + abs(token.u * token.p - up))
    return token, (token.u * token.p - token.q) ** 2 / (2 * token.q * (1 - token.q))


def answer(page):
    return page.page.locator(".tour-answer")


def test_tour_starts_only_when_asked_and_walks_through(visit, offline_server):
    page = visit(offline_server.url)
    page.page.locator(".rows li").first.wait_for(state="attached")
    assert page.page.locator(".tour-card").count() == 0
    start(page)
    for step in range(1, STEPS + 1):
        assert page.page.locator(".tour-counter").inner_text() == STRINGS["tour.place"].format(step=step, steps=STEPS)
        text = card(page)
        assert "{" not in text.replace("min{", "") and "NaN" not in text and "undefined" not in text
        assert page.page.locator(".tour-card h3").evaluate("(title) => title === document.activeElement")
        page.page.locator(".tour-next").click()
    assert page.page.locator(".tour-card").is_hidden()
    assert page.page.locator(".tour-start").evaluate("(button) => button === document.activeElement")
    assert page.page.locator(".tour-start").inner_text() == STRINGS["tour.start"]
    assert page.complaints == []


def test_escape_leaves_and_the_button_goes_on_where_it_was(visit, offline_server):
    page = visit(offline_server.url)
    start(page)
    go_to(page, 3)
    page.page.keyboard.press("Escape")
    assert page.page.locator(".tour-card").is_hidden() and page.page.locator(".tour-light").is_hidden()
    button = page.page.locator(".tour-start")
    assert button.evaluate("(button) => button === document.activeElement")
    assert button.inner_text() == STRINGS["tour.resume"].format(step=3, steps=STEPS)
    start(page)
    assert page.page.locator(".tour-counter").inner_text() == STRINGS["tour.place"].format(step=3, steps=STEPS)


def test_steps_carry_the_numbers_of_a_rejected_token(visit, offline_server):
    page = visit(offline_server.url)
    start(page)
    go_to(page, 3)
    text = card(page)
    tokens = [token for token in recordings.read(FIRST.path)[0].drafted if token.outcome == "rejected"]
    token = next(token for token in tokens if f"‹{token.piece.text.strip()}›" in text and f"p = {token.p:.3g}" in text)
    assert f"{token.u:.3g} · {token.p:.3g}" in text
    go_to(page, 4)
    critical = (token.u * token.p - token.q) ** 2 / (2 * token.q * (1 - token.q))
    assert f"= {critical:.3g}" in card(page)
    for delta, words in ((critical * 0.9, "still rejects"), (critical * 1.1, "keeps")):
        page.type_delta(f"{delta:.6f}")
        assert words in card(page)


def test_gain_says_what_is_left_as_speed(visit, offline_server):
    """Of recorded runs faster than the verifier alone, not that the draft is too dear to save time."""
    page = visit(offline_server.url)
    start(page)
    go_to(page, 5)
    *traces, alone = recordings.read(FIRST.path)
    times = [summary(trace).tokens_per_s / summary(alone).tokens_per_s for trace in traces]
    assert min(times) > 1
    speedups = ", ".join(f"{label} {time:.2f}×" for label, time in zip(("SpS", "Cactus"), times, strict=True))
    assert STRINGS["tour.gain_faster"].format(list=speedups) in card(page)


def test_question_is_judged_against_the_critical_delta(visit, offline_server):
    page = visit(offline_server.url)
    start(page)
    go_to(page, STEPS)
    page.settle()
    assert page.page.evaluate("cactusViewer.delta()") == 0
    assert answer(page).get_attribute("class").endswith("low")
    _, critical = asked(page)
    for delta, verdict in ((critical * 0.98, "low"), (critical * 1.001, "right"), (2, "high")):
        page.type_delta(f"{delta:.7f}")
        assert answer(page).get_attribute("class").split() == ["tour-answer", verdict]


def test_slider_alone_finds_the_answer(visit, offline_server):
    page = visit(offline_server.url)
    start(page)
    go_to(page, STEPS)
    page.page.locator(".cactus-viewer").get_by_label(STRINGS["delta.slider"]).focus()
    verdicts = []
    for _ in range(24):
        page.page.keyboard.press("ArrowRight")
        page.settle()
        verdicts.append(answer(page).get_attribute("class").split()[-1])
    assert verdicts == sorted(verdicts, key=["low", "right", "high"].index) and verdicts.count("right") == 1


def test_tab_stays_between_the_card_and_the_lit_part(visit, offline_server):
    page = visit(offline_server.url)
    start(page)
    go_to(page, STEPS)
    inside = "document.activeElement.closest('.tour-card, section.delta') !== null"
    for key in ["Tab"] * 8 + ["Shift+Tab"] * 8:
        page.page.keyboard.press(key)
        assert page.page.evaluate(inside)


@pytest.mark.parametrize("recording", recordings.RECORDINGS, ids=lambda recording: recording.name)
def test_tour_works_on_every_recording(visit, offline_server, recording):
    page = visit(offline_server.url)
    if recording != FIRST:
        page.open_settings()
        page.page.locator("#recording input").click()
        page.page.get_by_role("option", name=STRINGS[f"recording.{recording.name}"]).click()
        page.page.wait_for_function("(text) => document.querySelector('.prompt-text').textContent === text", arg=recording.prompt)
    start(page)
    for step in range(1, STEPS + 1):
        go_to(page, step)
        assert all(bad not in card(page) for bad in ("NaN", "undefined", "null", "Infinity"))
    assert page.complaints == []


def test_phone_gets_a_sheet_and_the_target_stays_in_view(visit, offline_server):
    page = visit(
        offline_server.url, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, reduced_motion="reduce"
    )
    page.page.locator(".tour-start").tap()
    for step in range(1, STEPS + 1):
        go_to(page, step)
        page.settle()
        sheet = page.page.locator(".tour-card").bounding_box()
        light = page.page.locator(".tour-light").bounding_box()
        assert sheet["x"] >= 0 and sheet["x"] + sheet["width"] <= 390
        assert sheet["y"] + sheet["height"] == pytest.approx(844, abs=1)
        assert -20 <= light["y"] < sheet["y"]
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.complaints == []
