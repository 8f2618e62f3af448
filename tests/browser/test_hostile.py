"""Token texts that would break a page which treats them as anything but text: real rounds of toy models, drawn by the real viewer."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

sys.path.insert(0, str(Path(__file__).parents[1]))

from toys import toy_pair

from cactus.decoding import run
from cactus.page import comparison
from cactus.page.app import all_values
from cactus.page.models import Choice, Models
from cactus.page.records import recorded_log
from cactus.page.strings import STRINGS
from cactus.rules import Cactus, SpS
from cactus.sampling import Sampling
from cactus.trace import Settings

pytestmark = pytest.mark.browser

SPECIAL = "<|im_end|>"
HARMFUL = {"<img src=x onerror=window.pwned=1>", "<script>window.pwned=1</script>", "${window.pwned=1}", "{{x}}", "\\u"}
EMOJI = "👩‍🚀".encode()
TOKENS = [
    *(text.encode() for text in (
        "Hello", " ", "world", "\n", "\n\n", "\t", "  \t ", "", "<img src=x onerror=window.pwned=1>", "<script>window.pwned=1</script>",
        "</script>", "</span>", "<!--", "<b>", "'\"><svg onload=alert(1)>", "javascript:alert(1)", "${window.pwned=1}", "${alert(1)}",
        "{{x}}", "{class}", "\\u", "\\", "`", "&lt;", "&amp;", "%s", "\u200b", "שלום", "\u202eevil", "日本語", "é", "e\u0301", SPECIAL,
    )),
    *(EMOJI[i : i + 3] for i in range(0, len(EMOJI), 3)),
]  # fmt: skip


class Bytewise:
    """A byte-level tokenizer over TOKENS; characters may be split over several of them."""

    all_special_ids = (TOKENS.index(SPECIAL.encode()),)
    chat_template = None

    def __call__(self, prompt):
        return SimpleNamespace(input_ids=[0])

    def decode(self, ids, **_):
        return b"".join(TOKENS[token] for token in ids).decode(errors="replace")

    def convert_ids_to_tokens(self, token):
        return "".join(map(bytes_to_unicode().get, TOKENS[token]))


def in_order(strength, seed):
    """A law that says the tokens in order, now and then another."""

    def law(ids):
        logits = torch.randn(len(TOKENS), generator=torch.Generator().manual_seed(len(ids) * 1000 + seed))
        logits[len(ids) % len(TOKENS)] += strength
        return logits

    return law


@pytest.fixture(scope="module")
def pair():
    pair = replace(toy_pair(len(TOKENS), laws=(in_order(7, 1), in_order(5, 2))), tokenizer=Bytewise())
    pair.provenance = {"verifier": "<b>toy</b>", "draft": "${x}", "device": "{{y}} </script>"}
    return pair


@pytest.fixture(scope="module")
def traces(pair):
    """SpS and Cactus over all tokens, several times around."""
    settings = Settings(Sampling(1.0, 0, 1.0), 5, 4 * len(TOKENS), 3)
    both = []
    for rule in (SpS(), Cactus(0.5)):
        trace, rounds = run(pair, "<img src=x onerror=window.pwned=1> ${alert(1)} {{x}} </script>", rule, settings, chat=False)
        list(rounds)
        both.append(trace)
    return both


@pytest.fixture(scope="module")
def url(traces, pair, serve_log):
    comparison.models = models = Models([Choice("toy", lambda bits, progress: pair, has_bits=False)])
    models.request(models.key("toy", 0)).result()
    return serve_log(recorded_log(traces, None), all_values)


def reading_order(trace):
    """Pieces as the page lists them: what was judged, what the verifier added, what nobody judged."""
    for round in trace.rounds:
        judged = [token for token in round.drafted if token.judged]
        unjudged = [token for token in round.drafted if not token.judged]
        yield from (token.piece for token in (*judged, round.replacement, *unjudged) if token)


def plain(trace):
    """The generated text without special tokens and without a character cut off at the end."""
    return trace.text.replace(SPECIAL, "").rstrip("\ufffd")


def unharmed(page):
    """No script of a token ran, and none became an element."""
    assert page.page.evaluate("typeof window.pwned") == "undefined"
    assert page.page.locator(".cactus-viewer").evaluate("(viewer) => viewer.querySelectorAll('img, script, b').length") == 0
    assert page.complaints == []
    return True


def test_the_traces_hold_every_hostile_text(traces):
    """What the other tests here rest on."""
    for trace in traces:
        names = {token.id for round in trace.rounds for token in (*round.drafted, round.replacement) if token}
        assert names == set(range(len(TOKENS)))
        assert any(piece.hex for piece in reading_order(trace)) and EMOJI.decode() in trace.text


def test_every_token_is_shown_literally_and_no_script_runs(visit, url, traces):
    page = visit(url)
    for at, trace in enumerate(traces):
        assert page.token_texts(at) == [piece.text for piece in reading_order(trace)]
        assert page.text(at) == plain(trace)
    assert page.page.locator(".prompt-text").inner_text() == traces[0].prompt
    assert "<b>toy</b> · draft: ${x} · {{y}} </script>" in page.page.locator(".source").inner_text()
    assert unharmed(page)


def test_what_has_no_glyph_of_its_own_is_still_seen(visit, url, traces):
    """Newlines, blanks and tabs, empty tokens, bytes of an unfinished character and special tokens."""
    page = visit(url)
    shown = page.pane(0).locator(".tokens .token").evaluate_all(
        "(tokens) => tokens.map((token) => [token.dataset.glyph ?? null, token.classList.contains('special')])"
    )  # fmt: skip
    glyphs = {"\n": "⏎", "\n\n": "⏎⏎", " ": "·", "\t": "→\t", "  \t ": "··→\t·"}
    for piece, (glyph, special) in zip(reading_order(traces[0]), shown, strict=True):
        expected = glyphs.get(piece.text) if piece.text else f"<{piece.hex}>" if piece.hex else "∅"
        assert (glyph, special) == (expected, piece.special)
    widths = page.pane(0).locator(".tokens .token:visible").evaluate_all("(tokens) => tokens.map((token) => token.offsetWidth)")
    assert min(widths) > 0


def test_every_hostile_token_opens_harmlessly(visit, url, traces):
    """Title, sentences and the table of alternatives, whose rows are hostile texts as well."""
    page = visit(url)
    pieces = list(reading_order(traces[1]))
    tokens = page.pane(1).locator(".tokens .token")
    page.viewer.get_by_label(STRINGS["legend.show_discarded"]).check()
    for text in {piece.text for piece in pieces}:
        place = next(at for at, piece in enumerate(pieces) if piece.text == text)
        tokens.nth(place).evaluate("(token) => token.click()")
        title = page.page.locator(".big-token").evaluate("(title) => title.textContent")
        assert title == (text.replace("\n", "⏎").replace("\t", "→") if text.strip(" ") else title)
        assert page.page.locator(".detail tbody tr").count() > 1
        page.page.keyboard.press("Escape")
    assert unharmed(page)


def test_every_hostile_token_is_listed_harmlessly_among_all_values(visit, url):
    """In the order of the vocabulary's raw values, and as a search for it."""
    page = visit(url)
    page.pane(1).locator(".tokens .token").first.click()
    page.viewer.get_by_role("button", name=STRINGS["values.ask"]).click()
    rows = page.viewer.locator(".values tbody tr")
    rows.first.wait_for()
    shown = dict(zip(rows.locator("small").all_text_contents(), rows.locator("bdi").all_text_contents(), strict=True))
    assert len(shown) == len(TOKENS)
    assert {shown[str(TOKENS.index(text.encode()))] for text in HARMFUL} == HARMFUL
    for text in HARMFUL:
        page.viewer.get_by_label(STRINGS["values.find"]).fill(text)
        page.page.wait_for_function(
            "(text) => document.querySelector('.values tbody bdi')?.textContent === text"
            " && document.querySelector('.values-status').textContent.includes('match')", arg=text,
        )  # fmt: skip
    assert unharmed(page)


def test_copy_gives_exactly_the_generated_text(visit, url, traces):
    """By the button, and by selecting the whole pane."""
    page = visit(url, permissions=["clipboard-read", "clipboard-write"])

    def clipboard():
        return page.page.evaluate("navigator.clipboard.readText()")

    for at, trace in enumerate(traces):
        page.pane(at).locator(".copy").click()
        assert clipboard() == plain(trace)
        page.page.evaluate("navigator.clipboard.writeText('')")
        page.pane(at).locator(".tokens").evaluate("(list) => getSelection().selectAllChildren(list)")
        page.page.keyboard.press("Control+C")
        assert clipboard() == plain(trace)
    assert unharmed(page)


def test_a_log_that_grows_line_by_line_ends_like_one_drawn_at_once(visit, url):
    page = visit(url)
    panes = page.page.locator(".panes")
    page.page.wait_for_timeout(1500)  # some parts are drawn when the browser is idle
    at_once, legend = panes.inner_html(), page.legend()
    panes.evaluate("(panes) => { panes.dataset.old = ''; }")
    page.page.locator("#grow").click()
    page.page.wait_for_function("() => document.querySelectorAll('.panes:not([data-old]) .ending:not([hidden])').length === 2")
    page.page.wait_for_timeout(1500)
    assert panes.inner_html() == at_once
    assert page.legend() == legend
    assert unharmed(page)
