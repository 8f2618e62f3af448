"""All values of a position: what a browser may ask, what the models answer, and when they do not."""

import json
import math
import threading
from dataclasses import replace

import pytest
from test_decoding import PLAIN, run
from test_page import page_pair

from cactus import recordings
from cactus.decoding import run as decode
from cactus.page import comparison, vocabulary
from cactus.page.choices import described
from cactus.page.models import MODEL_THREAD, Choice, Models
from cactus.page.strings import STRINGS
from cactus.pairs import EMBEDDED, identity
from cactus.rules import TAS, Cactus, SpS
from cactus.sampling import Sampling
from cactus.trace import Settings

# The verifier reads the text in one piece instead of block by block.
ROUNDING = 5e-5
FILTERED = Sampling(0.8, 6, 0.95)


@pytest.fixture(autouse=True)
def nothing_kept():
    vocabulary._kept.clear()


@pytest.fixture
def toy():
    """A loaded toy pair."""
    models = Models([Choice("toy", lambda bits, progress: page_pair(), has_bits=False)])
    comparison.models = models
    return models.request(models.key("toy", 0)).result()


def positions(trace):
    """(token, ids before it, how the draft read them, the draft judged there or None) of every token of a trace."""
    ids, chunks = list(trace.prompt_ids), [trace.prompt_ids[:-1]] if len(trace.prompt_ids) > 1 else []
    for round in trace.rounds:
        drafted = [token.id for token in round.drafted]
        chunks = [*chunks, ids[sum(map(len, chunks)) :]] if drafted else chunks
        for place, token in enumerate(round.drafted):
            yield token, ids + drafted[:place], [*map(len, chunks), *[1] * place], token
        if round.replacement:
            rejected = next((token for token in round.drafted if token.outcome == "rejected"), None)
            before = ids + drafted[: round.accepted]
            rest = len(before) - sum(map(len, chunks))
            yield round.replacement, before, [*map(len, chunks), *([1] * rest if drafted else [rest] * bool(rest))], rejected
        chunks = chunks + [[token] for token in drafted[: min(round.accepted, len(drafted) - 1)]]
        ids = ids + [token.id for token in round.emitted]


def question(trace, token, ids, steps, judged, **changes):
    """What the page asks for this token."""
    pane, sampling = described(trace.rule), trace.settings.sampling
    return {
        "made_by": identity(trace.provenance), "ids": ids, "steps": steps, "token": (judged or token).id, "drafted": judged is not None,
        "rule": pane["rule"], "delta": pane["delta"], "parameter": pane["parameter"] and pane["parameter"]["value"],
        "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "find": "", "by": "largest",
    } | changes  # fmt: skip


def ask(asked, generating=False):
    """The answer as the browser gets it."""
    return json.loads(json.dumps(vocabulary.answer(asked, generating), allow_nan=False))


def toy_trace(toy, rule, sampling=PLAIN):
    trace = run(toy, rule, Settings(sampling, 4, 30, 5))
    trace.provenance |= toy.provenance
    return trace


def first(trace):
    return question(trace, *next(positions(trace)))


def column(got, name):
    place = got["columns"].index(name) + 2
    return {row[0]: row[place] for row in got["rows"]}


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED, Sampling(0.0)])
@pytest.mark.parametrize("rule", [SpS(), Cactus(0.3), Cactus(0.3, "exact", "tv"), TAS()])
def test_values_are_those_of_the_run(toy, rule, sampling):
    """p and q of every recorded row, h(n) = gamma for rules with a target, raw rows that only temperature and filters part from p and
    q; at drafted, resampled and bonus positions."""
    trace = toy_trace(toy, rule, sampling)
    for token, ids, steps, judged in positions(trace):
        got = ask(question(trace, token, ids, steps, judged))
        assert got["found"] == got["size"] == len(got["rows"]) == 12
        p, q = column(got, "p"), column(got, "q")
        row = (judged or token).row
        assert [q[i] for i in row.ids] == pytest.approx(row.q, abs=1e-6)
        assert sum(value > 0 for value in map(max, p.values(), q.values())) == got["positive"]
        if judged:
            assert [p[i] for i in row.ids] == pytest.approx(row.p, abs=1e-6)
            assert got["at"] == pytest.approx([judged.p, judged.q], abs=1e-6)
        assert ("h" in got["columns"]) == (judged is not None)
        if judged and isinstance(rule, SpS):
            assert column(got, "h")[judged.id] == pytest.approx(judged.gamma, abs=1e-6)
        assert got["sums"] == pytest.approx([1] * len(got["columns"]), abs=1e-6)
        for name, model in (("p_raw", toy.draft), ("q_raw", toy.verifier)):
            assert column(got, name) == pytest.approx(dict(enumerate(model.logits(ids).softmax(-1).tolist())), abs=1e-6)


def test_values_of_a_run_of_the_embedded_pair(pair):
    """Every value in the rows of the tokens looked at, on whatever kernels: the draft reads in the steps of the run, or eight-bit
    kernels would be off by a hundredth and more; and the text of all 49,152 tokens is in reach of a search."""
    models = Models([Choice(EMBEDDED, lambda bits, progress: pair, has_bits=True)])
    comparison.models = models
    models.request(models.key(EMBEDDED, 5)).result()
    for rule in (SpS(), Cactus(0.5)):
        trace, rounds = decode(pair, "Tell me about the sea.", rule, Settings(max_new_tokens=48, seed=4))
        list(rounds)
        looked_at = list(positions(trace))
        for token, ids, steps, judged in looked_at[:: len(looked_at) // 12]:
            got = ask(question(trace, token, ids, steps, judged))
            row, p, q = (judged or token).row, column(got, "p"), column(got, "q")
            assert [q[i] for i in row.ids] == pytest.approx(row.q, abs=ROUNDING)
            if judged:
                assert [p[i] for i in row.ids] == pytest.approx(row.p, abs=ROUNDING)
                assert column(got, "h")[judged.id] == pytest.approx(judged.gamma, abs=ROUNDING)
            assert got["size"] == 49_152 and len(got["rows"]) == vocabulary.ROWS
            assert got["sums"] == pytest.approx([1] * len(got["columns"]), abs=1e-5)
    found = ask(question(trace, token, ids, steps, judged, find=" lighthouse"))
    assert " lighthouse" in [row[1] for row in found["rows"]]


def test_a_recording_is_of_the_pair_at_its_bits_on_any_kernels(pair):
    recorded = recordings.read(recordings.RECORDINGS[0].path)[0].provenance
    at = {name: value.replace("6 bits", "5 bits") for name, value in identity(recorded).items()}
    assert at == identity(pair.provenance) != identity(pair.provenance | {"draft": pair.provenance["draft"].replace("5", "4")})


BAD = {
    "not a question": (None, "reload it"),
    "a list": ([1, 2], "reload it"),
    "nothing": ({}, "reload it"),
    "ids that are text": ({"ids": ["1"]}, "reload it"),
    "ids that are truths": ({"ids": [True]}, "reload it"),
    "ids that are fractions": ({"ids": [1.0]}, "reload it"),
    "steps that are text": ({"steps": "1"}, "reload it"),
    "steps that stand still": ({"steps": [0, 3]}, "reload it"),
    "steps that go back": ({"steps": [4, -1]}, "reload it"),
    "steps beyond the text": ({"steps": [10**400]}, "reload it"),
    "ids that are no list": ({"ids": "12"}, "reload it"),
    "no ids": ({"ids": [], "steps": []}, "has 0 tokens; this pair reads from 1 to 4096"),
    "more ids than the models read": ({"ids": [1] * 4097, "steps": [4097]}, "has 4097 tokens"),
    "an id beyond the vocabulary": ({"ids": [1, 12], "steps": [2]}, "outside the vocabulary of the loaded pair, 0 to 11"),
    "an id below 0": ({"ids": [-1], "steps": [1]}, "outside the vocabulary"),
    "an id beyond any": ({"ids": [10**400], "steps": [1]}, "outside the vocabulary"),
    "a token beyond the vocabulary": ({"token": 12}, "outside the vocabulary"),
    "no token": ({"token": None}, "reload it"),
    "drafted as a number": ({"drafted": 1}, "reload it"),
    "a pair that is text": ({"made_by": "toy"}, "reload it"),
    "a pair of numbers": ({"made_by": {"verifier": 1}}, "reload it"),
    "another pair": ({"made_by": {"verifier": "toy", "draft": "other"}}, "The loaded pair, toy, did not make this run"),
    "a search that is too long": ({"find": "x" * 101}, "reload it"),
    "a search that is no text": ({"find": 5}, "reload it"),
    "an unknown order": ({"by": "__class__"}, "The order must be one of largest, p, q"),
    "an unknown rule": ({"rule": "magic"}, "A rule must be one of sps"),
    "a rule that is no text": ({"rule": ["sps"]}, "reload it"),
    "delta beyond the page's": ({"delta": 3}, "between 0 and 2, got 3"),
    "delta as text": ({"delta": "0.1"}, "between 0 and 2"),
    "delta as a truth": ({"delta": True}, "between 0 and 2"),
    "delta as a list": ({"delta": [0.1]}, "between 0 and 2"),
    "delta missing": ({"delta": None, "rule": "cactus"}, "delta must be a number from 0 up"),
    "a parameter out of range": ({"rule": "mentored", "parameter": -1}, "budget must lie between"),
    "a parameter beyond any float": ({"rule": "mentored", "parameter": 10**400}, "budget must lie between"),
    "temperature as text": ({"temperature": "hot"}, "Temperature must lie between 0"),
    "temperature that is none": ({"temperature": math.nan}, "Temperature must lie between 0"),
    "top-k below 0": ({"top_k": -1}, "Top-k must be a whole number"),
    "top-k as a list": ({"top_k": [5]}, "Top-k must be a whole number"),
    "top-p beyond 1": ({"top_p": 1.5}, "Top-p must lie between 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_question_is_one_sentence_and_runs_no_model(toy, case):
    changes, sentence = BAD[case]
    asked = first(toy_trace(toy, SpS())) | changes if isinstance(changes, dict) and changes else changes
    before = toy.verifier.forwards
    answer = ask(asked)
    assert list(answer) == ["error"]
    assert sentence in answer["error"] and answer["error"].endswith(".")
    assert toy.verifier.forwards == before


def test_models_that_are_not_there_are_said_not_waited_for(toy):
    asked = first(toy_trace(toy, SpS()))
    comparison.models = models = Models([Choice("toy", lambda bits, progress: go_on.wait(60) and page_pair(), has_bits=False)])
    go_on = threading.Event()
    assert ask(asked)["error"] == STRINGS["values.not_loaded"]
    loading = models.request(models.key("toy", 0))
    assert ask(asked)["error"] == STRINGS["values.loading"]
    go_on.set()
    loading.result()
    assert "rows" in ask(asked)


def test_a_run_goes_first_but_what_is_known_is_searched_beside_it(toy, monkeypatch):
    trace = toy_trace(toy, SpS())
    one, other = [question(trace, *position) for position in list(positions(trace))[:2]]
    assert "rows" in ask(one)
    forwards = toy.verifier.forwards
    assert ask(other, generating=True)["error"] == STRINGS["values.busy"]
    assert ask(one | {"find": "a"}, generating=True)["found"] == 1
    # The thread is taken although no run is: a load that was asked for meanwhile.
    monkeypatch.setattr(vocabulary, "WAIT_S", 0.05)
    go_on = threading.Event()
    MODEL_THREAD.submit(go_on.wait, 60)
    assert ask(other)["error"] == STRINGS["values.busy"]
    go_on.set()
    assert MODEL_THREAD.submit(lambda: toy.verifier.forwards).result() == forwards
    assert "rows" in ask(other)


def test_a_model_that_fails_says_so_and_its_caches_are_freed(toy):
    asked = first(toy_trace(toy, SpS()))
    law, toy.verifier.law = toy.verifier.law, out_of_memory
    assert ask(asked) == {"error": "out of memory"}
    toy.verifier.law = law
    assert "rows" in ask(asked)
    assert all(context.closed for model in (toy.verifier, toy.draft) for context in model.contexts)


def test_a_long_text_is_read_in_pieces_and_given_up_in_time(toy, monkeypatch):
    """The models are one for all visitors: a crafted context may not hold them for minutes."""
    trace = toy_trace(toy, SpS())
    position = list(positions(trace))[-1]
    at_once = ask(question(trace, *position))
    vocabulary._kept.clear()
    monkeypatch.setattr(vocabulary, "PIECE", 4)
    assert ask(question(trace, *position)) == at_once
    vocabulary._kept.clear()
    monkeypatch.setattr(vocabulary, "READ_S", -1.0)
    forwards = toy.draft.forwards
    assert "tokens, more than this machine reads" in ask(question(trace, *position))["error"]
    assert toy.draft.forwards == forwards
    assert all(context.closed for model in (toy.verifier, toy.draft) for context in model.contexts)


def out_of_memory(ids):
    raise RuntimeError("out of memory")


def test_only_some_positions_are_kept(toy):
    trace = toy_trace(toy, SpS())
    for position in list(positions(trace))[: vocabulary.KEPT + 3]:
        ask(question(trace, *position))
    assert len(vocabulary._kept) == vocabulary.KEPT


class Named:
    """A tokenizer whose twelve tokens are these."""

    texts = ("a", " a", "A", "ab", "\n", "\n\n", "\t", " ", "5", "b7", "<img src=x onerror=alert(1)>", "é")
    all_special_ids, chat_template = (), None

    def decode(self, ids, **_):
        return "".join(self.texts[token] for token in ids)

    def convert_ids_to_tokens(self, token):
        return self.texts[token]


@pytest.mark.parametrize(
    ("find", "found", "whole"),
    [
        ("", set(range(12)), 0),
        ("a", {0, 1, 2, 3, 10}, 3),
        (" a", {1}, 1),
        ("AB", {3}, 1),
        ("⏎", {4, 5}, 1),
        ("→", {6}, 1),
        ("5", {8, 5}, 2),
        ("7", {9, 7}, 1),
        ("011", {11}, 1),
        ("É", {11}, 1),
        ("<img", {10}, 0),
        ("nowhere", set(), 0),
        ("9" * 99, set(), 0),
    ],
)
def test_search_finds_by_text_or_id_whole_matches_first(toy, find, found, whole):
    """Ignoring case, and with the marks that the page writes for what has no glyph."""
    trace = toy_trace(toy, SpS())
    models = Models([Choice("toy", lambda bits, progress: replace(toy, tokenizer=Named()), has_bits=False)])
    models.request(models.key("toy", 0)).result()
    comparison.models = models
    got = ask(first(trace) | {"find": find})
    ids = [row[0] for row in got["rows"]]
    assert (set(ids), got["found"]) == (found, len(found))
    assert [row[1] for row in got["rows"]] == [Named.texts[i] for i in ids]
    for part in (got["rows"][:whole], got["rows"][whole:]):
        largest = [max(row[2:4]) for row in part]
        assert largest == sorted(largest, reverse=True)
    totals = [sum(column(got, name).values()) for name in got["columns"]]
    assert got["sums"] == pytest.approx(totals, abs=1e-6)


@pytest.mark.parametrize("by", vocabulary.COLUMNS)
def test_order_follows_the_column_and_zeros_the_raw_values(toy, by):
    trace = toy_trace(toy, Cactus(0.3), FILTERED)
    got = ask(first(trace) | {"by": by})
    raw = [max(row[-2:]) for row in got["rows"]]
    keys = list(zip([row[got["columns"].index(by) + 2] for row in got["rows"]], raw, strict=True))
    assert keys == sorted(keys, reverse=True)
    assert sum(key[0] == 0 for key in keys) >= 2 or by.endswith("raw")
