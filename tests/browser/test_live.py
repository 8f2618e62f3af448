"""Live runs of the embedded pair: generating, stopping, leaving, waiting in the queue, and what is refused at the door."""

import json
import re
import urllib.request

import pytest

from cactus import recordings
from cactus.engine import kernels
from cactus.page.app import FIRST_RECORDING
from cactus.page.strings import STRINGS
from cactus.pairs import default_bits

pytestmark = pytest.mark.browser

# Chosen so that a run is over in seconds, and so that only a broken queue or Stop could be mistaken for a long one.
SHORT, LONG = 12, 512
PROMPT = "Tell me about the sea."
RECORDED = next(recordings.read(one.path)[1] for one in recordings.RECORDINGS if one.name == FIRST_RECORDING).provenance


@pytest.fixture(autouse=True)
def no_traceback(live_server):
    """Whatever a visitor does, nothing unexpected is raised on the server."""
    before = len(live_server.log.read_text())
    yield
    assert "Traceback" not in live_server.log.read_text()[before:]


@pytest.fixture
def client(live_server):
    from gradio_client import Client

    return Client(live_server.url, verbose=False)


def asked(**changes):
    """Arguments of the API's /generate."""
    return {
        "prompt": PROMPT, "delta": 0.5, "m": 5, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "length": SHORT, "seed": 4,
        "chat": True, "pair": "SmolLM2-135M-Instruct", "bits": default_bits(), "left": "sps", "right": "cactus", "left_parameter": None,
        "right_parameter": None, "auto": False,
    } | changes  # fmt: skip


def opened(visit, server, prompt=PROMPT, length=SHORT, seed=4, delta=0.5):
    """A visitor who has filled in the form and whose models are loaded."""
    page = visit(server.url)
    page.wait_for_status("Ready")
    page.open_settings()
    for name, value in (("prompt", prompt), ("length", length), ("seed", seed)):
        page.set(name, value)
    page.type_delta(delta)
    return page


def plain_texts(log):
    """The texts of both panes, from the lines of a log and without the viewer's code."""
    records = [json.loads(line) for line in log.splitlines()]
    kept = {"accepted", "rescued", "resampled", "bonus"}
    texts = ["", ""]
    for record in records:
        if record["k"] == "round":
            tokens = [*record["drafted"], *([record["emitted"]] if record["emitted"] else [])]
            texts[record["pane"]] += "".join(token["t"] for token in tokens if token["c"] in kept and not token.get("sp"))
    return texts


def tokens_shown(page):
    return page.page.locator(".tokens .token").count()


def test_generate_streams_both_panes_and_ends_ready(visit, live_server):
    page = opened(visit, live_server, length=24)
    page.generate()
    for at in range(2):
        page.pane(at).locator(".token").first.wait_for()
    assert page.page.locator(".ending:visible").count() == 0, "the first tokens came only with the end"
    assert page.status() == STRINGS["status.running"]
    page.wait_until_ended()
    # The stage counts all passes of a run, not only those it began with; rows are drawn when the browser is idle.
    page.page.wait_for_function(
        """() => {
             const passes = document.querySelector('.rows').children.length;
             return passes > 1 && document.querySelector('.step-place').textContent.endsWith(` of ${passes}`);
           }"""
    )
    headings = [page.pane(at).locator("h3").inner_text() for at in range(2)]
    assert headings == ["SpS δ = 0", "Cactus δ = 0.5"]
    assert all(page.pane(at).locator(".speedup strong").inner_text().endswith("×") for at in range(2))
    page.page.locator(".plot .main-svg").nth(1).wait_for()
    assert page.page.locator(".prompt-text").inner_text() == PROMPT
    assert page.complaints == []


def test_same_seed_gives_the_same_text_again_and_through_the_api(visit, live_server, client):
    page = opened(visit, live_server)
    page.run()
    texts, legend = [page.text(0), page.text(1)], page.legend()
    assert all(texts)
    page.page.locator(".panes").evaluate("(panes) => { panes.dataset.old = ''; }")
    page.page.locator("#generate").click()
    page.page.locator(".panes:not([data-old])").wait_for()
    page.wait_until_ended()
    assert ([page.text(0), page.text(1)], page.legend()) == (texts, legend)
    log, _ = client.predict(**asked(), api_name="/generate")
    assert plain_texts(log) == texts
    assert page.complaints == []


def test_tour_of_a_run_whose_blocks_vary_says_so(visit, live_server):
    """Blocks of one draft are not "1 tokens", and acceptance lengths of unequal blocks do not compare by themselves."""
    page = opened(visit, live_server)
    page.page.locator("#auto input").check()
    page.set("m", 1)
    page.run()
    page.page.locator(".tour-start").click()
    texts = []
    for _ in range(5):
        texts.append(page.page.locator(".tour-body").inner_text())
        page.page.locator(".tour-next").click()
    assert STRINGS["tour.draft_one"] in texts[1]
    assert STRINGS["tour.gain_auto"] in texts[4]
    assert page.complaints == []


def test_delta_zero_generates_the_text_of_sps(visit, live_server):
    page = opened(visit, live_server, delta=0)
    page.run()
    assert page.text(0) == page.text(1) != ""
    assert page.legend()["rescued"] == [0, 0]


def test_stop_keeps_the_partial_run_and_says_so(visit, live_server):
    page = opened(visit, live_server, length=LONG)
    page.generate()
    page.page.locator(".pane:nth-child(2) .block:nth-child(2)").wait_for()
    page.page.locator("#stop").click()
    page.page.wait_for_function("() => document.querySelectorAll('.ending:not([hidden])').length === 2", timeout=20_000)
    assert page.page.locator(".ending").all_inner_texts() == [STRINGS["end.stopped"]] * 2
    page.wait_for_status("Ready")
    shown = tokens_shown(page)
    assert shown > 4 and all(page.text(at) for at in range(2))
    page.page.wait_for_timeout(1500)  # longer than a block: nothing comes after Stop
    assert tokens_shown(page) == shown
    page.set("length", 4)
    page.page.locator("#generate").click()
    page.page.wait_for_function("() => document.querySelector('.source').textContent.includes('at most 4 tokens')")
    page.wait_until_ended()
    assert page.complaints == []


def test_leaving_the_page_frees_the_models_for_the_next_visitor(visit, live_server):
    leaver = opened(visit, live_server, length=LONG)
    leaver.generate()
    leaver.pane(1).locator(".token").first.wait_for()
    leaver.page.close()
    page = opened(visit, live_server, length=4)
    page.page.locator("#generate").click()
    page.page.locator(".badge.live").wait_for(timeout=30_000)  # the leaver's run would have taken minutes
    page.wait_until_ended()
    assert page.complaints == []


# How many of an element's surroundings hide what goes beyond them, this element among it.
CUT_OFF = """(element) => {
  const { top, bottom } = element.getBoundingClientRect();
  let many = 0;
  for (let at = element.parentElement; at; at = at.parentElement) {
    const box = at.getBoundingClientRect();
    many += getComputedStyle(at).overflowY === 'hidden' && (box.top > top || box.bottom < bottom);
  }
  return many;
}"""


def test_two_visitors_get_their_own_runs_one_after_the_other(visit, live_server):
    first = opened(visit, live_server, "Name three colours.", length=96, seed=1, delta=0.2)
    second = opened(visit, live_server, "Count from one to five.", length=8, seed=2, delta=1)
    first.generate()
    second.page.locator("#generate").click()
    place = second.page.locator("#status").get_by_text("queue")
    place.wait_for()
    assert place.evaluate(CUT_OFF) == 0, "the place in the queue is written where nobody sees it"
    assert second.page.locator(".badge.live").count() == 0
    second.type_delta(0.3)  # moving delta while waiting changes neither run
    second.page.locator(".badge.live").wait_for()
    assert first.page.locator(".ending:visible").count() == 2, "the second run began before the first had ended"
    for page, prompt, delta in ((first, "Name three colours.", "0.2"), (second, "Count from one to five.", "1")):
        page.wait_until_ended()
        assert page.page.locator(".prompt-text").inner_text() == prompt
        assert page.pane(1).locator("h3").inner_text() == f"Cactus δ = {delta}"
        assert page.complaints == []
    assert first.text(1) != second.text(1)


def all_values(page):
    """Ask the models for the values of the token that is open; its rows."""
    page.viewer.get_by_role("button", name=STRINGS["values.ask"]).click()
    page.viewer.locator(".values tbody tr").first.wait_for()
    return rows_shown(page)


def rows_shown(page):
    """Id to the texts of the cells, in the order of the table."""
    rows = page.viewer.locator(".values tbody").evaluate(
        """(body) => [...body.rows].map((row) => [
             row.querySelector('small').textContent, [...row.cells].map((cell) => (cell.querySelector('bdi') ?? cell).textContent)])"""
    )
    return dict(rows)


def recorded_rows(page):
    """Token to p and q as the detail shows them from the log."""
    return page.viewer.locator(".detail-body tbody").evaluate(
        """(body) => Object.fromEntries([...body.rows].filter((row) => row.querySelector('bdi')).map((row) => (
             [row.querySelector('bdi').textContent, [row.cells[1].textContent, row.cells[2].textContent]])))"""
    )


def agree(page, rows, columns=(0, 1)):
    """Whether p and q as the models say them are what the detail shows from the log, as far as that has three digits."""
    again = {cells[0]: [cells[1 + column] for column in columns] for cells in rows.values()}
    known = {token: [values[column] for column in columns] for token, values in recorded_rows(page).items()}
    close = [
        abs(float(one) - float(other)) <= 0.001 + 1e-9
        for token, values in known.items()
        for one, other in zip(values, again[token], strict=True)
        if "<" not in one
    ]
    return len(close) >= len(columns) and all(close)


def with_recorded_pair(visit, server, **options):
    """A visitor who sees the first recorded run and has the pair loaded that made it."""
    page = visit(server.url, **options)
    page.wait_for_status("Ready")
    bits = re.search(r"rounded to (\d) bits", RECORDED["draft"])[1]
    if f"{bits} bits" not in page.status():
        page.open_settings()
        page.page.locator("#bits label").get_by_text(bits, exact=True).click()
        page.set("length", 4)
        page.run()
        page.choose_recording(FIRST_RECORDING)
        assert f"{bits} bits" in page.status()
    return page


def test_all_values_of_a_recorded_token(visit, live_server):
    """By keyboard alone: the table, what it holds, a search, an order, and back to the tokens. Recorded on other kernels, p is another
    one, and the page says so; q is the same."""
    page = with_recorded_pair(visit, live_server)
    page.pane(1).locator(".token.rescued").first.focus()
    page.page.keyboard.press("Enter")
    for _ in range(2):
        page.page.keyboard.press("Tab")  # past the close button
    assert page.focused().inner_text() == STRINGS["values.ask"]
    page.page.keyboard.press("Enter")
    page.viewer.locator(".values tbody tr").first.wait_for()
    rows = rows_shown(page)
    same = RECORDED["draft"].endswith(f"{kernels()} kernels")
    assert len(rows) == 300 and agree(page, rows, (0, 1) if same else (1,))
    assert all(len(cells) == 6 for cells in rows.values())
    said = page.page.locator(".values-status")
    assert said.inner_text().endswith("Shown: 300 of 49152.")
    if same:
        assert page.viewer.get_by_text(STRINGS["values.agree"]).is_visible()
    else:
        assert "The run recorded p = " in page.viewer.locator(".values .note").inner_text()
    title = page.page.locator(".big-token").inner_text()
    page.page.keyboard.type(" lighthouse")
    said.get_by_text("match").wait_for()
    found = rows_shown(page)
    assert found and all(" lighthouse" in cells[0].casefold() for cells in found.values())
    page.page.keyboard.press("ArrowLeft")  # moves the caret, not the detail
    assert page.page.locator(".big-token").inner_text() == title
    page.viewer.get_by_label(STRINGS["values.find"]).fill("260")
    page.viewer.locator(".values tbody small", has_text="260").first.wait_for()
    assert next(iter(rows_shown(page).values()))[0] == " the"
    page.viewer.get_by_label(STRINGS["values.find"]).fill("")
    page.viewer.get_by_label(STRINGS["values.by"]).select_option("q_raw")
    page.viewer.locator(".values th[aria-sort]").get_by_text(STRINGS["values.q_raw"]).wait_for()
    said.get_by_text("Shown: 300 of 49152.").wait_for()
    page.viewer.get_by_label(STRINGS["values.find"]).focus()
    page.page.keyboard.press("Escape")
    assert page.viewer.locator(".values").is_hidden()
    assert page.complaints == []


def test_all_values_of_a_live_token_and_not_before_the_run_has_ended(visit, live_server):
    page = opened(visit, live_server, length=LONG)
    page.generate()
    page.pane(1).locator(".token").first.wait_for()
    page.pane(1).locator(".token").first.click()
    page.viewer.get_by_role("button", name=STRINGS["values.ask"]).click()
    page.page.locator(".values-status").get_by_text(STRINGS["values.busy"]).wait_for()
    for name in ("rejected", "bonus"):
        page.pane(0).locator(f".token.{name}").nth(1).wait_for()
    page.page.locator("#stop").click()
    page.wait_until_ended()
    accepted, rejected, bonus = (page.pane(0).locator(f".token.{name}") for name in ("accepted", "rejected", "bonus"))
    for token in (accepted.first, rejected.first, accepted.last, rejected.last):
        token.click()
        assert agree(page, all_values(page))
        assert page.viewer.get_by_text(STRINGS["values.agree"]).is_visible()
    bonus.first.click()
    all_values(page)
    assert page.viewer.get_by_text(STRINGS["values.agree_q"]).is_visible()
    assert page.complaints == []


def test_values_that_differ_from_the_recorded_ones_are_said(visit, live_server):
    """As if the run had been made elsewhere: the server's answer is changed on its way."""

    def shifted(route):
        answer = route.fetch()
        data = answer.json()
        route.fulfill(response=answer, json=data | {"at": [data["at"][0], data["at"][1] + 0.01]})

    page = with_recorded_pair(visit, live_server)
    page.page.route("**/component_server/", shifted)
    page.pane(1).locator(".token.rescued").first.click()
    all_values(page)
    said = page.viewer.locator(".values .note").inner_text()
    recorded, again = re.search(
        r"The run recorded .*q = ([\d.]+); computed again it is .*q = ([\d.]+): more than rounding", said
    ).groups()
    assert float(again) - float(recorded) == pytest.approx(0.01, abs=1e-4)
    assert page.complaints == []


def test_all_values_fit_a_phone(visit, live_server):
    """Six columns side by side, in sight once they are there, and nothing wider than the screen."""
    page = with_recorded_pair(visit, live_server, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.pane(1).locator(".token.rescued").first.tap()
    all_values(page)
    table = page.viewer.locator(".values table").bounding_box()
    assert table["x"] >= 0 and table["x"] + table["width"] <= 390
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
    box = page.viewer.get_by_label(STRINGS["values.find"]).bounding_box()
    assert 0 <= box["y"] <= 844 - box["height"]
    assert page.complaints == []


def test_a_run_of_another_pair_is_not_asked_of_this_one(visit, live_server):
    page = with_recorded_pair(visit, live_server)
    if not page.page.locator("#seed input").is_visible():
        page.open_settings()
    page.page.locator("#bits label").get_by_text("4", exact=True).click()
    page.set("length", 4)
    page.run()
    page.choose_recording(FIRST_RECORDING)
    page.pane(1).locator(".token").first.click()
    page.viewer.get_by_role("button", name=STRINGS["values.ask"]).click()
    page.page.locator(".values-status").get_by_text("at 4 bits, did not make this run").wait_for()
    assert page.complaints == []


def test_an_answer_that_never_comes_leaves_a_sentence(visit, live_server):
    page = visit(live_server.url)
    page.wait_for_status("Ready")
    page.page.route("**/component_server/", lambda route: route.fulfill(status=200, json=None))
    page.pane(1).locator(".token").first.click()
    page.viewer.get_by_role("button", name=STRINGS["values.ask"]).click()
    page.page.locator(".values-status").get_by_text(STRINGS["values.lost"]).wait_for()


# What is typed into which field, and what the sentence at the field says.
REFUSED = {
    "blank prompt": ("prompt", "   ", ["is empty"]),
    "cleared seed": ("seed", "", ["Seed", "must be a whole number"]),
    "negative seed": ("seed", "-1", ["Seed", "must be"]),
    "prompt with too many tokens": ("prompt", "7 " * 9000, ["tokens", "8192"]),
    "prompt with too many characters": ("prompt", "a" * 20_001, ["20001", "20000"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_gets_one_sentence_at_its_field_and_starts_nothing(visit, live_server, case):
    name, value, words = REFUSED[case]
    page = opened(visit, live_server)
    page.set(name, value)
    page.page.locator("#generate").click()
    said = page.page.locator(f"#{name} .validation-error").first
    said.wait_for()
    assert all(word.lower() in said.inner_text().lower() for word in words), said.inner_text()
    assert page.page.locator(".toast-body").count() == 0
    assert page.page.locator(".badge").inner_text() == STRINGS["run.recorded"]
    assert page.page.locator(".validation-error:is(div)").count() == 1
    assert "Traceback" not in page.page.locator("body").inner_text()
    page.set(name, 4 if name == "seed" else PROMPT)
    page.run()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"delta": -0.1}, "δ must lie between 0 and 2"),
        ({"delta": 2.5}, "δ must lie between 0 and 2"),
        ({"delta": None}, "δ must lie between 0 and 2"),
        ({"m": 2.5}, "m must be a whole number"),
        ({"seed": 2**63}, "The seed must be a whole number"),
        ({"prompt": ""}, "The prompt is empty"),
        # Beyond the ends of a slider or outside a list of choices, Gradio itself refuses.
        ({"m": 0}, "400 Bad Request"),
        ({"length": 100_000}, "400 Bad Request"),
        ({"temperature": -1}, "400 Bad Request"),
        ({"top_k": -3}, "400 Bad Request"),
        ({"top_p": 1.5}, "400 Bad Request"),
        ({"pair": "/etc/passwd"}, "400 Bad Request"),
        ({"bits": 9}, "400 Bad Request"),
    ],
)  # fmt: skip
def test_the_api_refuses_what_the_page_could_not_send(client, changes, words):
    with pytest.raises(Exception, match=words) as refusal:
        client.predict(**asked(**changes), api_name="/generate")
    assert "Traceback" not in str(refusal.value)


@pytest.mark.parametrize("delta", ["NaN", "Infinity", '"nan"', "[1]", "1e400"])
def test_the_api_survives_numbers_that_are_none(live_server, delta):
    """Sent as raw JSON, which a client would not write."""
    body = json.dumps(list(asked().values())).replace("0.5", delta, 1)
    request = urllib.request.Request(
        f"{live_server.url}gradio_api/call/generate", f'{{"data": {body}}}'.encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            event = json.load(answer)["event_id"]
    except urllib.error.HTTPError as refusal:
        assert refusal.code in (400, 422)
        return
    with urllib.request.urlopen(f"{live_server.url}gradio_api/call/generate/{event}", timeout=60) as stream:
        assert b"event: error" in stream.read()


def test_reset_after_a_live_run_brings_the_recorded_one_back(visit, live_server):
    page = visit(live_server.url)
    page.wait_for_status("Ready")
    recorded, prompt = page.text(1), page.page.locator("#prompt textarea").input_value()
    page.open_settings()
    page.set("prompt", PROMPT)
    page.set("length", 4)
    page.type_delta(1)
    page.run()
    page.page.locator("#reset").click()
    page.page.get_by_text(STRINGS["run.recorded"], exact=True).wait_for()
    page.page.wait_for_function("() => cactusViewer.delta() === 0.1")
    assert page.text(1) == recorded
    assert page.page.locator("#prompt textarea").input_value() == prompt
    assert page.status().startswith("Ready")
    assert page.complaints == []


@pytest.mark.parametrize("by", ["reset", "another recorded run"])
def test_a_live_run_ends_when_a_recorded_one_takes_its_place(visit, live_server, by):
    """Or the next block of the live run would bring it back."""
    page = opened(visit, live_server, length=LONG)
    page.generate()
    page.pane(1).locator(".token").first.wait_for()
    if by == "reset":
        page.page.locator("#reset").click()
    else:
        page.choose_recording("code")
    page.page.get_by_text(STRINGS["run.recorded"], exact=True).wait_for()
    page.wait_for_status("Ready")
    shown = tokens_shown(page)
    page.page.wait_for_timeout(3000)  # some blocks
    assert page.page.locator(".badge").inner_text() == STRINGS["run.recorded"]
    assert tokens_shown(page) == shown
    page.set("length", 4)
    page.run()
    assert page.complaints == []
