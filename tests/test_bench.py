"""The benchmark: its statistics on numbers made by hand, its report, and whole runs on a small random model."""

import json
from dataclasses import replace

import pytest
import torch
from test_pairs import small, tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from cactus import bench, bench_results, cli, engine, recordings
from cactus.bench_results import ALONE, ASSISTED, GENERATE, METHODS, Forward, Result, Run
from cactus.embedded import draft_from

CACTUS = "Cactus δ 0.5"
MACHINE = {"date": "2026-01-02T03:04:05+00:00", "system": "Linux", "cores": 2, "threads": 2, "load": 0.0}
SETTINGS = {"sampling": {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, "num_draft_tokens": 5, "max_new_tokens": 96, "seed": 0}


def ran(method, repeat, prompt, tokens, seconds, passes=10, parts=None):
    return Run(method, repeat, prompt, tokens, seconds, passes, 30, 40, False, parts or {})


# The machine is half as fast in repetition 1; repetition 2 was interrupted before the second prompt of Cactus.
RUNS = [
    ran(GENERATE, 0, "a", 10, 1.0),
    ran(GENERATE, 0, "b", 30, 2.0),
    ran(CACTUS, 0, "a", 12, 0.5),
    ran(CACTUS, 0, "b", 28, 0.5),
    ran(GENERATE, 1, "a", 10, 2.0),
    ran(GENERATE, 1, "b", 30, 4.0),
    ran(CACTUS, 1, "a", 12, 1.0),
    ran(CACTUS, 1, "b", 28, 1.0),
    ran(GENERATE, 2, "a", 10, 1.0),
    ran(GENERATE, 2, "b", 30, 6.0),
    ran(CACTUS, 2, "a", 10, 0.5),
]


def a_result(**changes):
    return replace(Result(MACHINE, SETTINGS | {"repeats": 3}, ["a", "b"], runs=RUNS), **changes)


def test_speeds_are_pooled_over_prompts():
    assert bench_results.speeds(RUNS, GENERATE) == pytest.approx([40 / 3, 40 / 6, 40 / 7])
    assert bench_results.speeds(RUNS, ALONE) == []


def test_ratios_compare_the_same_repetition_and_prompts():
    """Guards against medians divided by medians, and against prompts that only one of the two has run."""
    assert bench_results.ratios(RUNS, CACTUS, GENERATE) == pytest.approx([3.0, 3.0, 2.0])
    assert bench_results.ratios(RUNS, CACTUS, ALONE) == []
    assert bench_results.spread([3.0, 1.0, 2.5, 9.0, 2.0]) == bench_results.Spread(2.5, 1.0, 9.0)
    assert bench_results.spread([]) is None


def test_every_method_takes_every_place():
    orders = [bench.rotated(repeat, 0) for repeat in range(len(METHODS))]
    for place in range(len(METHODS)):
        assert {order[place] for order in orders} == set(METHODS)


def test_shares_of_a_block():
    parts = {"prefill": 1.0, "draft": 2.0, "verify": 1.0, "rule": 0.5, "rest": 0.1, "forwards": 3.0, "lines": 0.0}
    runs = [ran(CACTUS, 0, "a", 10, 5.0, 10, parts), ran(CACTUS, 1, "a", 10, 5.0, 10, parts | {"forwards": 3.8})]
    assert bench_results.outside(runs, CACTUS) == pytest.approx(1 - 6.8 / 8)
    assert bench_results.outside(RUNS, GENERATE) is None
    result = a_result(runs=runs, rows_seconds=0.006)
    assert bench_results.recording(result, CACTUS) == pytest.approx(2 * (0.1 + 10 * 0.006) / 8)


def test_claims_say_what_holds_what_falls_short_and_what_was_not_measured():
    forwards = [
        Forward("verifier", 1, 0.04, 0.03, 0.05, 100, 0.01, 0.01),
        Forward("verifier", 5, 0.05, 0.03, 0.05, 100, 0.01, 0.01),
        Forward("draft", 1, 0.03, 0.03, 0.05, 100, 0.01, 0.01),
        Forward("transformers", 1, 0.06, 0.03, 0.09, 100, 0.01, 0.01),
    ]
    found = {claim.text: claim for claim in bench_results.claims(a_result(forwards=forwards))}
    faster = found[f"{CACTUS} beside {GENERATE}"]
    assert (faster.value, faster.holds) == (pytest.approx(3.0), True)
    step = found["draft step beside verifier step"]
    assert (step.value, step.holds) == (pytest.approx(0.75), False)
    assert found["verifier pass of 5 beside transformers' of 1"].holds
    assert found[f"SpS beside {GENERATE}"].value is None
    lines = list(bench_results.report(a_result(forwards=forwards)))
    assert f"- {CACTUS} beside {GENERATE}: 3.00x, at least 1.9x: **holds**" in lines
    assert "- draft step beside verifier step: 0.75x, at most 0.65x: **falls short**" in lines
    assert f"- SpS beside {GENERATE}: at least 1.5x: **not measured**" in lines


def test_an_earlier_measurement_gives_the_same_report(tmp_path):
    result = a_result(
        gflops={"verifier 1": 10.0, "verifier 6": 50.0}, bandwidth=2e10, acceptance={"this engine": 0.8, ASSISTED: 0.81}
    )
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(bench_results.to_json(result)))
    again = bench_results.read_result(path)
    assert again == result
    assert list(bench_results.report(again)) == list(bench_results.report(result))


def test_prompts(tmp_path):
    assert bench.read_prompts(None) == {recording.name: recording.prompt for recording in recordings.RECORDINGS}
    path = tmp_path / "prompts"
    path.write_text('Why?\n\n{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}\n')
    assert bench.read_prompts(path) == {"prompt 1": "Why?", "writing 81": "Write."}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "nowhere"], "nowhere cannot be read as a file of prompts"),
        (["--prompts", "empty"], "empty holds no prompt"),
        (["--prompts", "other"], "Prompt 1 of other has no category, question_id and turns"),
        (["--json", "nowhere/f"], "nowhere/f cannot be written: there is no folder nowhere"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["-m", "0"], "--num-draft-tokens must be at least 1"),
        (["--max-new-tokens", "0"], "length must be at least 1"),
        (["--from", "other"], "other is not what bench --json writes"),
        (["--from", "hollow"], "hollow is not what bench --json writes"),
        (["--json", "."], ". cannot be written: it is a folder"),
        (["--prompts", "number"], "Prompt 1 of number has no category, question_id and turns"),
        (["--verifier", "nowhere"], "nowhere could not be loaded"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "other").write_text('{"prompt": "Why?"}\n')
    (tmp_path / "number").write_text('{"category": "c", "question_id": 1, "turns": [7]}\n')
    hollow = {"schema": 1, "machine": {}, "settings": {}, "prompts": [], "runs": [], "forwards": [], "methods": {}, "claims": []}
    (tmp_path / "hollow").write_text(json.dumps(hollow))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *arguments])
    captured = capsys.readouterr()
    assert (stopped.value.code, captured.out) == (2, "")
    (line,) = [line for line in captured.err.splitlines() if line.startswith("cactus: ")]
    assert message in line


@pytest.fixture
def arguments(tmp_path):
    """The options of a short bench on a small random model that is quick to load."""
    small().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts").write_text("hello world\nred green blue one two\n")
    return ["--verifier", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts"), "--max-new-tokens", "8", "-m", "3"]


def test_a_whole_run(tmp_path, capsys, arguments):
    out, chart = tmp_path / "out.json", tmp_path / "out.html"
    cli.main(["bench", "--repeats", "1", "--json", str(out), "--plot", str(chart), *arguments])
    printed = capsys.readouterr().out
    data = json.loads(out.read_text())
    assert {(run["method"], run["prompt"]) for run in data["runs"]} == {(m, p) for m in METHODS for p in ("prompt 1", "prompt 2")}
    assert all(0 < run["tokens"] <= 8 and run["seconds"] > 0 for run in data["runs"])
    assert all(run["tokens"] == 8 or run["ended"] for run in data["runs"])
    for method, line in data["methods"].items():
        assert line["tokens_per_s"]["median"] > 0
        assert line["passes_per_token"] == 1 if method in (GENERATE, ALONE) else line["passes_per_token"] <= 1
    assert {(item["name"], item["rows"]) for item in data["forwards"]} >= {("verifier", 4), ("transformers", 4), ("draft", 1)}
    draft_bytes = 1 if engine.int8_runs() else 4
    for item in data["forwards"]:
        assert item["weight_bytes"] == bench.weights(small()) * (draft_bytes if item["name"] == "draft" else 4)
    assert data["acceptance"]["this engine"] == pytest.approx(data["acceptance"][ASSISTED], abs=0.05)
    assert {"this engine", ASSISTED} <= data["peak_bytes"].keys()
    assert "plotly" in chart.read_text()
    cli.main(["bench", "--from", str(out)])
    assert capsys.readouterr().out == printed


def test_a_full_disk_still_shows_what_was_measured(tmp_path, capsys, arguments):
    """Guards against minutes of measuring that end in a traceback: the tables come first. A prompt may begin with a dash."""
    (tmp_path / "prompts").write_text("- hello world\n")
    with pytest.raises(SystemExit):
        cli.main(["bench", "--repeats", "1", "--json", "/dev/full", *arguments])
    captured = capsys.readouterr()
    assert f"| {GENERATE} |" in captured.out
    assert "cactus: The measurement cannot be written" in captured.err


def test_a_short_prompt_is_not_measured_as_a_long_pass(monkeypatch, arguments):
    """Guards against passes over the two tokens of a prompt that were written down as passes over five."""
    pair, seen, forward = bench.pairs.load(arguments[1], device="cpu"), set(), bench.TimedContext.forward

    def noted(self, ids, rows):
        seen.add((len(ids), rows))
        return forward(self, ids, rows)

    monkeypatch.setattr(bench.TimedContext, "forward", noted)
    contest = bench.Contest(pair, *bench.load_transformers(bench.Choice(arguments[1], None, 5, "cpu", "auto"), 7))
    gflops = {f"{name} {rows}": 1.0 for name in ("verifier", "draft") for rows in (1, 5, 8)}
    bench.measure_forwards(contest, [2, 3], 7, bench_results.Result({}, {}, [], bandwidth=1.0, gflops=gflops))
    assert seen == {(1, 1), (5, 5), (8, 8)}


def test_an_interrupt_keeps_what_was_measured(tmp_path, monkeypatch, capsys, arguments):
    out, whole, calls = tmp_path / "out.json", bench.Contest.run, []

    def interrupted(self, *arguments):
        calls.append(arguments)
        if len(calls) == 2 * len(METHODS) + 5:  # a warm-up, every method on the first prompt, four on the second
            raise KeyboardInterrupt
        return whole(self, *arguments)

    monkeypatch.setattr(bench.Contest, "run", interrupted)
    cli.main(["bench", "--repeats", "2", "--json", str(out), *arguments])
    printed = capsys.readouterr().out
    assert len(json.loads(out.read_text())["runs"]) == len(METHODS) + 4
    assert f"| {GENERATE} |" in printed
    assert "**Interrupted after 13 of 36 runs.**" in printed


def test_drafts_of_assisted_generation_are_counted(tmp_path, arguments):
    """What the benchmark reads off transformers' inputs and stream, on a draft that is the verifier: all is accepted."""
    module = AutoModelForCausalLM.from_pretrained(arguments[1])
    _, draft = bench.load_transformers(bench.Choice(arguments[1], arguments[1], 5, "cpu", "auto"), 3)
    counted = bench.run_transformers(module, [2, 3, 4], bench.Settings(max_new_tokens=9), (), draft=draft)
    # 3 + 1 tokens a pass, and in the last one as many as there is room for: none, and the verifier's own
    assert (counted["tokens"], counted["passes"]) == (9, 3)
    assert counted["accepted"] == counted["judged"] == 6


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_draft_is_a_plain_llama(tmp_path, capsys, tied):
    model = small()
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    folder = tmp_path / "draft"
    cli.main(["export-draft", str(folder), "--verifier", str(tmp_path / "model"), "--bits", "4"])
    assert capsys.readouterr().out == f"{folder}\n"
    draft, ids = AutoModelForCausalLM.from_pretrained(folder), torch.tensor([[2, 3, 4, 5]])
    assert type(draft) is type(model)
    assert (draft.lm_head.weight is draft.model.embed_tokens.weight) == tied
    with torch.inference_mode():
        torch.testing.assert_close(draft(ids).logits, draft_from(model, 4)(ids).logits, atol=0, rtol=0)
        assert not torch.equal(draft(ids).logits, model(ids).logits)
    assert AutoTokenizer.from_pretrained(folder)("hello red").input_ids == [2, 4]
    text = model.generate(ids, assistant_model=draft, do_sample=False, max_new_tokens=12)
    assert torch.equal(text, model.generate(ids, do_sample=False, max_new_tokens=12))


def test_export_refuses_with_a_sentence(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    (tmp_path / "file").touch()
    for name, more, message in (
        ("full", [], "exists and is not an empty folder"),
        ("file", [], "exists and is not an empty folder"),
        ("new", ["--verifier", str(tmp_path / "nowhere")], "could not be loaded"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["export-draft", str(tmp_path / name), *more])
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    with pytest.raises(SystemExit):
        cli.main(["export-draft", str(tmp_path / ("x" * 300))])
    assert "cannot be used" in capsys.readouterr().err
