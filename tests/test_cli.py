"""The command line on the embedded pair: traces on standard output, everything else on standard error."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cactus import cli, embedded, pairs, recordings
from cactus.trace import read_traces

SHORT = ["--max-new-tokens", "12", "--seed", "7"]


@pytest.fixture
def loaded(pair, monkeypatch):
    """The pair that is loaded already, so that not every test loads it again."""
    monkeypatch.setattr(pairs, "load_embedded", lambda bits, progress=None: pair)


def test_json_is_a_trace_and_nothing_else(tmp_path):
    """The documented command as a user types it, in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "cactus",
        "generate",
        "Name three fruits.",
        "--rule",
        "cactus",
        "--delta",
        "0.5",
        "--json",
        *SHORT,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (trace,) = read_traces(done.stdout.splitlines())
    assert (trace.rule.delta, trace.settings.seed, len(trace.ids)) == (0.5, 7, 12)
    assert trace.provenance["verifier"] == "SmolLM2-135M-Instruct, Q4_1 weights dequantised to float32"
    assert "acceptance length" in done.stderr


def test_plain_output_is_the_text(loaded, capsys):
    cli.main(["generate", "Name three fruits.", "--json", *SHORT])
    (trace,) = read_traces(capsys.readouterr().out.splitlines())
    cli.main(["generate", "Name three fruits.", *SHORT])
    assert capsys.readouterr().out == trace.text + "\n"


def test_coloured_output_shows_rejected_tokens_too(loaded, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    arguments = ["generate", "Tell me about rivers.", "--rule", "sps", "--max-new-tokens", "40", "--seed", "3"]
    cli.main(arguments)
    out = capsys.readouterr().out
    cli.main([*arguments, "--json"])
    (trace,) = read_traces(capsys.readouterr().out.splitlines())
    for outcome, style in cli.STYLES.items():
        tokens = [token for round in trace.rounds for token in (*round.drafted, round.replacement) if token]
        assert (style in out) == any(token.outcome == outcome for token in tokens)


def test_control_characters_cannot_drive_the_terminal():
    assert cli._printable("a\x1b[31mb\tc\nd é😀") == "a\ufffd[31mb\tc\nd é😀"


def test_other_rules_and_divergences(loaded, capsys):
    for arguments in (["--rule", "lenience", "--parameter", "0.5"], ["--solver", "exact", "--divergence", "js"]):
        cli.main(["generate", "Name three fruits.", "--json", *SHORT, *arguments])
        (trace,) = read_traces(capsys.readouterr().out.splitlines())
        assert len(trace.ids) == 12
        assert arguments[1] in (trace.rule.name, getattr(trace.rule, "solver", None))


def test_verifier_alone(loaded, capsys):
    cli.main(["generate", "Name three fruits.", "--rule", "verifier", "--json", *SHORT])
    (trace,) = read_traces(capsys.readouterr().out.splitlines())
    assert len(trace.rounds) == len(trace.ids) == 12
    assert not trace.drafted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["  "], "prompt is empty"),
        (["word " * 9000], r"has \d+ tokens, but with 96 new tokens this pair has room for 8096"),
        (["hi", "--delta", "-1"], "delta must be a number from 0 up, got -1.0"),
        (["hi", "--delta", "nan"], "delta must be a number from 0 up, got nan"),
        (["hi", "-m", "0"], "must lie between 1 and 32, got 0"),
        (["hi", "-m", "99"], "must lie between 1 and 32, got 99"),
        (["hi", "--temperature", "nan"], "Temperature must lie"),
        (["hi", "--max-new-tokens", "0"], "length must be at least 1"),
        (["hi", "--seed", "-4"], "seed must be a whole number"),
        (["hi", "--draft", "somewhere"], "need --verifier"),
        (["hi", "--rule", "lenience"], "--rule lenience needs its --parameter"),
        (["hi", "--rule", "topk", "--parameter", "0"], "k must be a whole number from 1"),
        (["hi", "--divergence", "tv"], "tv has no Taylor form"),
        (["hi", "--bits", "9"], "bits must be a whole number from 3 to 8"),
    ],
)
def test_bad_input_is_one_sentence(pair, monkeypatch, capsys, arguments, message):
    def load(bits, progress=None):
        if bits is not None:
            embedded.check_bits(bits)
        return pair

    monkeypatch.setattr(pairs, "load_embedded", load)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", *arguments])
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if line.startswith("cactus: ")]
    assert re.search(message, line)


def test_a_word_for_m_is_told_what_m_may_be(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "hi", "-m", "many"])
    assert "must be a whole number or auto, got 'many'" in capsys.readouterr().err


def test_an_interrupt_while_loading_ends_quietly(monkeypatch):
    """With the status of a command that SIGINT ended, not with a traceback."""

    def interrupted(bits, progress=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(pairs, "load_embedded", interrupted)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", "hi"])
    assert stopped.value.code == 130


def test_a_damaged_recording_is_refused_with_a_sentence(tmp_path):
    """Guards against zlib's own error, which a flipped byte comes as before any checksum is read."""
    data = bytearray(Path(STORY).read_bytes())
    for place in range(40, 4000, 90):
        damaged = data.copy()
        damaged[place] ^= 0xFF
        (tmp_path / "t.jsonl.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"cannot be read as a trace|not part of a Cactus trace"):
            recordings.read(tmp_path / "t.jsonl.gz")


def test_a_reader_that_leaves_early_is_no_error():
    """| head -1: the pipe closes while tokens still come."""
    command = f"{sys.executable} -m cactus generate 'Count to twenty.' --json --max-new-tokens 64 | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300, env=os.environ)
    assert json.loads(done.stdout)["record"] == "run"
    assert "Traceback" not in done.stderr


STORY = str(recordings.FOLDER / "story.jsonl.gz")


def test_replay_as_documented(capsys):
    cli.main(["replay", STORY, "--deltas", "0:2:41", "--frontier", "--kl-budget", "0.05", "--al", "4", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert [point["delta"] for point in data["deltas"]] == pytest.approx([i / 20 for i in range(41)])
    lengths, spent = ([point[name] for point in data["deltas"]] for name in ("expected_al", "kl"))
    assert lengths == sorted(lengths)
    assert spent[0] == pytest.approx(0, abs=1e-9)
    rejected = [token for token in recordings.read(recordings.RECORDINGS[1].path)[0].drafted if token.outcome == "rejected"]
    assert [token["index"] for token in data["critical"]] == [token.index for token in rejected]
    assert data["frontier"]["Interpolation"][0]["kl"] is None
    assert 0 < data["delta_for_kl_budget"] < 2
    cli.main(["replay", STORY, "--deltas", "0,0.1", "--frontier", "--kl-budget", "0.05"])
    assert "rejected tokens, and the delta beyond which" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl cannot be read as a trace"),
        (["README.md"], "Line 1 is not part of a Cactus trace"),
        ([STORY, "--deltas", "a"], "--deltas takes first:last:count"),
        ([STORY, "--deltas", "0:1:0"], "--deltas takes first:last:count"),
        ([STORY, "--deltas=-1:2:3"], "delta must be a number from 0 up"),
        ([STORY, "--al", "40"], "lies between"),
    ],
)
def test_replay_refuses_with_a_sentence(capsys, arguments, message):
    with pytest.raises(SystemExit):
        cli.main(["replay", *arguments])
    assert message in capsys.readouterr().err


def test_recorded_traces_are_real_and_whole():
    """Every recording the page offers is in the repository, says what it ran on, and follows its own rule's verdicts."""
    for recording in recordings.RECORDINGS:
        sps, other, alone = recordings.read(recording.path)
        assert (sps.rule.name, other.rule, alone.settings.num_draft_tokens) == ("sps", recording.rule, 0)
        for trace in (sps, other, alone):
            assert trace.prompt == recording.prompt
            assert trace.settings.seed == recording.seed
            assert trace.stop in ("eos", "length")
            assert trace.provenance["verifier"].startswith("SmolLM2-135M-Instruct")
            for token in trace.drafted:
                if token.judged:
                    assert token.kept == (token.u * token.p < token.gamma)


def test_recording_again_gives_the_same_tokens(pair):
    """Reproducible by the repository's own command: the same prompt and seed give the recorded tokens (on the same kind of machine;
    elsewhere rounding may part them, so only the first eight are held to it)."""
    recording = next(item for item in recordings.RECORDINGS if item.name == "arithmetic")
    recorded, *_ = recordings.read(recording.path)
    again = next(recordings.record(pair, recording))
    assert again.ids[:8] == recorded.ids[:8]
    assert again.prompt_ids == recorded.prompt_ids


def test_an_unknown_recording_names_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        cli.main(["record", "nonsense"])
    assert "No recording is called 'nonsense'; there are explanation, story" in capsys.readouterr().err
