"""The composed vllm serve command and the example client, without vLLM."""

import json
import os
import re
import runpy
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cactus import cli

ROOT = Path(__file__).parent.parent


def printed(capsys, *arguments: str) -> list[str]:
    cli.main(["serve", "big", "--draft", "small", "--dry-run", *arguments])
    return shlex.split(capsys.readouterr().out)


def test_the_command_can_be_pasted_into_a_shell(capsys):
    words = printed(capsys, "--delta", "1", "-m", "10", "--", "--port", "8001", "--served-model-name", "two words")
    assert words[:4] == ["CACTUS_DELTA=1", "vllm", "serve", "big"]
    assert words[4] == "--speculative-config"
    assert json.loads(words[5]) == {
        "method": "draft_model",
        "model": "small",
        "num_speculative_tokens": 10,
        "draft_sample_method": "probabilistic",
    }
    assert words[6:] == ["--port", "8001", "--served-model-name", "two words"]


def test_defaults(capsys):
    words = printed(capsys)
    assert words[0] == "CACTUS_DELTA=0.1"
    assert json.loads(words[5])["num_speculative_tokens"] == 5
    assert len(words) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--delta", "-1"], "--delta must be a number from 0 up"),
        (["--delta", "nan"], "--delta must be a number from 0 up"),
        (["-m", "0"], "must lie between 1 and 128, got 0"),
        (["-m", "129"], "must lie between 1 and 128, got 129"),
        (["--", "--speculative-config", "{}"], "--speculative-config comes from --draft"),
        (["--", "-sc", "{}"], "-sc comes from --draft"),
    ],
)
def test_bad_input_is_one_sentence(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        printed(capsys, *arguments)
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A folder that is all of PATH, for commands of our own."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return tmp_path


def program(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def refusal(capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["serve", "big", "--draft", "small"])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_without_vllm_it_says_so(environment, capsys):
    assert "There is no vllm command here" in refusal(capsys)


def test_a_vllm_without_the_plugin_is_refused(environment, capsys, monkeypatch):
    """Guards against vLLM serving with standard sampling, silently, when the plugin is not in its environment or not allowed there."""
    program(environment, "vllm", "exit 1")
    program(environment, "python", "echo \"['lora_filesystem_resolver']\"")
    assert f"python -m pip install --no-deps {ROOT}" in refusal(capsys)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "VLLM_PLUGINS=other keeps vLLM from loading Cactus" in refusal(capsys)


def test_it_becomes_vllm(environment):
    program(environment, "vllm", 'echo "delta $CACTUS_DELTA"; for word in "$@"; do echo "$word"; done')
    program(environment, "python", "echo \"['cactus']\"")
    command = [sys.executable, "-m", "cactus", "serve", "big", "--draft", "small", "--delta", "0.5", "--", "--port", "8001"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["delta 0.5", "serve", "big"] and lines[-2:] == ["--port", "8001"]


class TestClient:
    @pytest.fixture
    def client(self):
        return runpy.run_path(str(ROOT / "examples" / "vllm_client.py"))

    METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 1.0e+01
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 160.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 96.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 38.0
"""

    def test_counters_are_summed_over_engines(self, client):
        blocks, drafted, accepted = client["counters"](self.METRICS)
        assert (blocks, drafted, accepted) == (40, 160, 96)
        assert client["Measured"](0.5, blocks, drafted, accepted).acceptance_length == 2.4

    def test_a_server_without_speculation_is_one_sentence(self, client):
        with pytest.raises(client["ClientError"], match="it must speculate"):
            client["counters"]("vllm:num_requests_running 0.0\n")
        with pytest.raises(client["ClientError"], match="drafted nothing"):
            _ = client["Measured"](0.5, 0, 0, 0).acceptance_length

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "give --url for one server"),
            (["--server", "http://localhost:8000"], "a server is written DELTA=URL, got 'http"),
            (["--server", "x=http://localhost:8000"], "delta must be a number from 0 up, got 'x'"),
            (["--server=-1=http://localhost:8000"], "delta must be a number from 0 up, got '-1'"),
            (["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1/v1/models does not answer"),
            (["--url", "http://127.0.0.1:1", "--deltas", "0,x"], "delta must be a number from 0 up, got 'x'"),
        ],
    )
    def test_bad_input_is_one_sentence(self, arguments, message):
        command = [sys.executable, str(ROOT / "examples" / "vllm_client.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0 and "Traceback" not in done.stderr
        assert re.search(message, done.stderr)
