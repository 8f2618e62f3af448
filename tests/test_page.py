"""The page without a browser: the door, the log, what the server hands out."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from test_decoding import PLAIN, run
from toys import toy_pair

from cactus import pairs, recordings
from cactus.metrics import summary
from cactus.page import app, comparison, door, launch
from cactus.page.choices import CHOICES, described
from cactus.page.comparison import Request
from cactus.page.models import Choice, Models, offered
from cactus.page.records import Pane, recorded_log
from cactus.page.strings import STRINGS
from cactus.replay import GRID, Replay
from cactus.rules import Cactus, SpS
from cactus.sampling import Sampling
from cactus.trace import Settings


class Words:
    """A toy tokenizer that reads letters, so that prompts of any length can be counted."""

    def __init__(self, toy):
        self.decode, self.convert_ids_to_tokens = toy.decode, toy.convert_ids_to_tokens
        self.all_special_ids, self.chat_template = toy.all_special_ids, None

    def __call__(self, text, add_special_tokens=True):
        return type("Ids", (), {"input_ids": [ord(char) % 10 for char in text]})


def page_pair(**more):
    pair = toy_pair(**more)
    pair.tokenizer, pair.provenance = Words(pair.tokenizer), {"verifier": "toy", "draft": "toy", "device": "CPU"}
    return pair


@pytest.fixture
def models():
    models = Models([Choice("toy", lambda bits, progress: page_pair(max_length=600), has_bits=True)])
    models.request(models.key("toy", 5)).result()
    comparison.models = models
    return models


GOOD = {
    "prompt": "abc", "delta": 0.1, "m": 4, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "length": 40, "seed": 3, "chat": False,
    "pair": "toy", "bits": 5, "left": "sps", "right": "cactus", "left_parameter": None, "right_parameter": None,
    "auto": False,
}  # fmt: skip


def said(models, **changes):
    return {
        field: answer["message"]
        for field, answer in zip(GOOD, door.door(models)(**GOOD | changes), strict=True)
        if answer["message"]
    }


def test_good_input_passes_the_door(models):
    assert said(models) == {}
    assert said(models, seed=420.0, m=5.0, top_k=20.0) == {}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt", "", "prompt is empty"),
        ("prompt", " \n", "prompt is empty"),
        ("prompt", "x" * 590, "has 590 tokens, but with 40 new tokens this pair has room for 560 (context 600)"),
        ("prompt", "x" * 30_000, "30000 characters; this page takes 20000"),
        ("delta", None, "between 0 and 2, got nothing"),
        ("delta", -1, "between 0 and 2, got -1"),
        ("delta", math.nan, "between 0 and 2, got nan"),
        ("delta", 2.5, "between 0 and 2, got 2.5"),
        ("m", 0, "m must lie between 1 and 16, got 0"),
        ("m", 2.5, "m must be a whole number, got 2.5"),
        ("m", None, "m must be a whole number, got nothing"),
        ("temperature", math.nan, "Temperature must lie between 0"),
        ("temperature", None, "Temperature must lie between 0"),
        ("top_k", -3, "Top-k must be a whole number from 0"),
        ("top_p", 1.5, "Top-p must lie between 0"),
        ("length", 0, "between 1 and 512, got 0"),
        ("seed", None, "The seed must be a whole number, got nothing"),
        ("seed", "", "The seed must be a whole number"),
        ("seed", -1, "The seed must be a whole number between 0"),
        ("seed", 2.0**63, "The seed must be a whole number between 0"),
        ("pair", "<b>other</b>", "This server offers toy"),
        ("bits", 17, "must lie between 3 and 8, got 17"),
        ("left", "magic", "A rule must be one of sps, cactus"),
        ("right", None, "A rule must be one of sps, cactus"),
    ],
)
def test_bad_input_is_one_sentence_at_its_field(models, field, value, message):
    answers = said(models, **{field: value})
    assert message in answers[field]
    assert answers[field].endswith(".")
    forwards = models.loaded().verifier.forwards
    assert forwards == 0


def request(models, **changes):
    return door.request(models, *(GOOD | changes).values())


def records(lines):
    return [json.loads(line) for line, _ in lines]


def test_comparison_interleaves_and_equals_solo_runs(models):
    got = records(comparison.compare(request(models)))
    assert [record["k"] for record in got[:3]] == ["run", "round", "round"]
    assert [record["pane"] for record in got[1:7]] == [0, 1] * 3
    assert {record["k"] for record in got[-3:]} == {"round", "end", "baseline"} or got[-1]["k"] == "baseline"
    for pane, rule in enumerate((SpS(), Cactus(0.1))):
        alone = run(page_pair(), rule, Settings(PLAIN, 4, 40, 3), [ord(char) % 10 for char in "abc"])
        shown = [record for record in got if record["k"] == "round" and record["pane"] == pane]
        ids = [t["id"] for r in shown for t in [*r["drafted"], *([r["emitted"]] if r["emitted"] else [])] if t["c"] in KEPT]
        assert ids == alone.ids


KEPT = ("accepted", "rescued", "resampled", "bonus")


def test_baseline_is_measured_once_per_settings(models):
    comparison._baselines.clear()
    first, second = (records(comparison.compare(request(models))) for _ in range(2))
    assert [record["k"] for record in first].index("baseline") == len(first) - 1
    assert [record["k"] for record in second].index("baseline") == 1


def test_on_zero_gpu_one_pair_is_offered_and_nothing_is_tried_on_the_device(monkeypatch):
    """There the device answers only while a request runs, and only for what was loaded before the page started."""
    assert len(offered("some/model", None, "cpu", "auto").choices) == 2
    monkeypatch.setenv("SPACES_ZERO_GPU", "1")
    assert list(offered("some/model", None, "cpu", "auto").choices) == ["some/model"]
    module = SimpleNamespace(device=torch.device("cuda"), config=SimpleNamespace(model_type="llama"), eval=lambda: module)
    assert isinstance(pairs._model(module, 11, "verifier"), pairs.Model)


def test_chosen_lengths_stay_below_the_one_asked_for(models):
    """With m by cost the log says so, and every block drafts what the measured costs and the tokens judged before it give."""
    lines = records(comparison.compare(request(models, auto=True)))
    costs, most = models.loaded().costs, lines[0]["settings"]["num_draft_tokens"]
    assert lines[0]["settings"]["auto"]
    accepted = judged = made = 0
    for line in lines:
        if line["k"] == "round" and line["pane"] == 0:
            outcomes = [token["c"] for token in line["drafted"]]
            assert len(outcomes) == min(most, costs.best_length(accepted, judged), 40 - made - 1)
            kept = sum(outcome in KEPT for outcome in outcomes)
            accepted, judged = accepted + kept, judged + kept + outcomes.count("rejected")
            made += kept + (line["emitted"] is not None)


def test_closing_a_comparison_closes_both_runs(models):
    lines = comparison.compare(request(models))
    for _ in range(4):
        next(lines)
    lines.close()
    pair = models.loaded()
    assert all(context.closed for model in (pair.verifier, pair.draft) for context in model.contexts)


def test_stop_and_failure_keep_the_log_and_say_why(models):
    """Stop ends between two rounds; a model that fails ends with its reason; what was logged before stays."""
    wanted = request(models)
    stream = app._stream(wanted, "visitor")
    log = next(stream)[0]
    app.stopped.add("visitor")
    *_, (last, _) = stream
    app.stopped.clear()
    assert last.startswith(log)
    assert [json.loads(line).get("reason") for line in last.splitlines()[-2:]] == ["stopped", "stopped"]

    models.loaded().verifier.law = fail
    stream, shown = app._stream(wanted, "visitor"), []
    with pytest.raises(RuntimeError, match="out of memory"):
        for log, _ in stream:
            shown.append(log)
    assert [json.loads(line).get("message") for line in shown[-1].splitlines()[-2:]] == ["out of memory"] * 2


def fail(ids):
    raise RuntimeError("out of memory")


def test_two_visitors_do_not_touch_each_other(models):
    """Runs of two visitors taken in turn equal their own solo runs."""
    wanted = [request(models), request(models, prompt="zyx", delta=1.0, seed=9)]
    alone = [records(comparison.compare(one)) for one in wanted]
    streams, mixed = [comparison.compare(one) for one in wanted], [[], []]
    while any(streams):
        for i, stream in enumerate(streams):
            line, _ = next(stream, (None, None)) if stream else (None, None)
            if line:
                mixed[i].append(json.loads(line))
            else:
                streams[i] = None
    for ours, theirs in zip(alone, mixed, strict=True):
        assert [r.get("drafted") for r in ours if r["k"] == "round"] == [r.get("drafted") for r in theirs if r["k"] == "round"]


def test_changing_bits_and_a_failed_load():
    calls = []

    def load(bits, progress):
        calls.append(bits)
        if len(calls) == 1:
            raise RuntimeError("The network is away: plug it in.")
        return page_pair()

    models = Models([Choice("toy", load, has_bits=True)])
    assert models.status() == STRINGS["status.idle"]
    with pytest.raises(RuntimeError):
        models.request(models.key("toy", 5)).result()
    assert "The network is away: plug it in. Press Generate to try again." in models.status()
    models.request(models.key("toy", 5)).result()
    models.request(models.key("toy", 5)).result()
    models.request(models.key("toy", 4)).result()
    assert calls == [5, 5, 4]
    assert models.status().startswith("Ready")


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("filters", [{}, {"top_k": 4, "top_p": 0.9}])
def test_every_rule_runs_in_either_pane(models, name, filters):
    """Under filters too, where some rules reach an infinite divergence, which JSON cannot hold."""
    wanted = request(models, left=name, right=name, delta=0.2, **filters)
    shown = records(comparison.compare(wanted))
    panes = shown[0]["panes"]
    assert panes[0] == panes[1] == described(wanted.rules[0])
    rounds = [[record["drafted"] for record in shown if record["k"] == "round" and record["pane"] == pane] for pane in (0, 1)]
    assert rounds[0] == rounds[1]
    assert not [record for record in shown if record["k"] == "end" and record["reason"] == "error"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tas", 2, "epsilon must lie in 0..1"),
        ("interpolation", -0.1, "weight must lie between 0 and 1"),
        ("topk", 0, "k must be a whole number from 1"),
        ("topk", 2.5, "k must be a whole number from 1"),
        ("lenience", 0, "lenience must lie between"),
        ("mentored", math.nan, "budget must lie between"),
        ("fuzzy", -1, "threshold must lie between"),
    ],
)
def test_a_parameter_out_of_range_is_said_at_its_field(models, name, value, message):
    assert message in said(models, right=name, right_parameter=value)["right_parameter"]


def test_alternatives_are_what_the_decoder_drew():
    """A rejected token's alternative is the replacement that really came: the log repeats the decoder's own draw."""
    for rule in (SpS(), Cactus(0.3)):
        trace = run(page_pair(), rule, Settings(PLAIN, 4, 80, 5))
        pane = Pane(0, trace)
        for round in trace.rounds:
            record = json.loads(pane.round_line(round))
            for token in record["drafted"]:
                if token["c"] == "rejected" and token["alt"]:
                    assert token["alt"][0] == record["emitted"]["id"]
                assert token["klh"] is not None or token["c"] in ("cut",)
                if token["kl"] is not None:
                    assert token["kl"] <= min(token["cert"], token["klp"] or math.inf) + 1e-6
                    assert token["grow"] == sorted(token["grow"])


def test_log_agrees_with_trace_and_metrics():
    sps = run(page_pair(), SpS(), Settings(Sampling(0.8, 6, 0.95), 4, 60, 2))
    sps.provenance |= {"date": "2026-01-01", "verifier": "v", "draft": "d", "device": "c"}
    log = [json.loads(line) for line in recorded_log([sps], None).splitlines()]
    rounds = [record for record in log if record["k"] == "round"]
    for record, round in zip(rounds, sps.rounds, strict=True):
        assert [(t["id"], t["c"], t["p"], t["q"], t["u"], t["g"]) for t in record["drafted"]] == [
            (t.id, t.outcome, t.p, t.q, t.u, t.gamma) for t in round.drafted
        ]
        for token in record["drafted"]:
            for column in (2, 3):
                assert sum(entry[column] for entry in token["top"]) + token["rest"][column - 2] == pytest.approx(1, abs=1e-6)
    numbers = summary(sps)
    assert rounds[-1]["stats"]["al"] == pytest.approx(numbers.al)
    assert rounds[-1]["stats"]["tokens"] == len(sps.ids)
    curve = [sum(values) / len(rounds) for values in zip(*(r["curve"]["expected_al"] for r in rounds), strict=True)]
    assert curve[0] == pytest.approx(numbers.expected_al, abs=1e-6)
    replay = Replay(sps.rounds, sps.eos_ids)
    expected = replay.expected_lengths([Cactus(delta) for delta in GRID]).mean(-1)
    assert curve == pytest.approx(expected.tolist(), abs=1e-6)
    assert sum(r["curve"]["judged"] for r in rounds) == sum(token.judged for token in sps.drafted)


def test_hostile_text_cannot_leave_the_log():
    pair = page_pair()
    pair.tokenizer.decode = lambda ids, **_: "</script><img src=x onerror=alert(1)>${alert(1)}{{x}}" * len(ids)
    trace = run(pair, SpS(), Settings(PLAIN, 2, 6))
    line = Pane(0, trace).round_line(trace.rounds[0])
    assert "<" not in line
    assert json.loads(line)["drafted"][0]["t"].startswith("</script><img")


def test_every_recording_is_offered_and_drawn():
    for recording in recordings.RECORDINGS:
        assert f"recording.{recording.name}" in STRINGS
        assert app._recorded(recording.name).count('"k":"end"') == 2
    with pytest.raises(app.gr.Error):
        app._recorded("../../etc/passwd")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft", "somewhere"], "--draft needs --verifier"),
        (["--bits", "0"], "bits must be a whole number from 3 to 8, got 0"),
        pytest.param(
            ["--device", "cuda"],
            "No CUDA device answers",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device answers"),
        ),
    ],
)
def test_arguments_that_cannot_be_served_start_nothing(capsys, arguments, message):
    """Guards against a page that comes up with the embedded pair, whatever else was asked for."""
    with pytest.raises(SystemExit) as stopped:
        launch.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_gpu_time_follows_the_length(models):
    short, long = (comparison.gpu_seconds(request(models, length=length)) for length in (16, 256))
    assert isinstance(short, int)
    assert short < long <= 120
    assert isinstance(request(models), Request)
