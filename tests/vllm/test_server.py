"""A real vLLM server on the loopback, started by the documented command, with the embedded pair. One server per configuration.

CACTUS_TEST_VERIFIER and CACTUS_TEST_DRAFT name the two model folders; tests/vllm/run makes them.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

VERIFIER, DRAFT = os.environ["CACTUS_TEST_VERIFIER"], os.environ["CACTUS_TEST_DRAFT"]
CLIENT = Path(__file__).parents[2] / "examples" / "vllm_client.py"
PROMPTS = ("The capital of France is", "Count: 1, 2, 3, 4, 5, 6,", "A recipe for soup:", "The sky is blue because")
ENGINE = ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--max-num-seqs", "4", "--host", "127.0.0.1"]
START_SECONDS = 400


@dataclass(frozen=True)
class Server:
    """A running server and the file with all it prints."""

    url: str
    log: Path

    def complete(self, prompt: str, **body) -> str:
        """The continuation, 40 tokens unless max_tokens says otherwise."""
        answer = ask(f"{self.url}/v1/completions", {"model": VERIFIER, "prompt": prompt, "max_tokens": 40, "seed": 7} | body)
        return json.loads(answer)["choices"][0]["text"]


@contextmanager
def serving(folder: Path, *arguments: str, interpreted: bool = False) -> Iterator[Server]:
    """vLLM started by `arguments` of python -m cactus serve, or of vllm serve where they name no draft, until the block ends.

    interpreted: on Model Runner V2, by the command that --dry-run prints.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [Path(sys.executable).with_name("vllm"), "serve", VERIFIER, *ENGINE, "--port", port]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if "--draft" in arguments:
        command = [sys.executable, "-m", "cactus", "serve", VERIFIER, *arguments, "-m", "4", "--", *ENGINE, "--port", port]
    if interpreted:
        command.insert(4, "--dry-run")
        variable, _, *rest = shlex.split(
            subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout
        )
        command = [sys.executable, Path(__file__).with_name("v2_server.py"), *rest]
        environment |= [variable.split("=")]
    log = folder / f"{port}.log"
    with (
        log.open("w") as output,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(url, process, log)
            yield Server(url, log)
        finally:
            process.terminate()


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            ask(f"{url}/health")
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"The server did not start:\n{log.read_text()[-5000:]}")


def ask(url: str, body: dict | None = None) -> str:
    request = urllib.request.Request(url, body and json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read().decode()


def counted(url: str) -> dict[str, float]:
    """The server's counters of blocks, drafted and accepted tokens."""
    found = re.findall(r"^vllm:spec_decode_num_(\w+)_total\{[^}]*\} (\S+)$", ask(f"{url}/metrics"), re.MULTILINE)
    return {name: float(value) for name, value in found}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def plain_greedy(folder):
    """What vLLM says at T = 0 without any draft."""
    with serving(folder) as server:
        texts = [server.complete(prompt, temperature=0) for prompt in PROMPTS]
        assert "Cactus is active" not in server.log.read_text()
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.complete("Hello", vllm_xargs={"cactus_delta": 0.5})
        assert refused.value.code == 400
        assert "cactus_delta needs a server that speculates with Cactus" in refused.value.read().decode()
    return texts


def test_a_draft_equal_to_the_verifier_is_always_accepted(folder):
    """At δ = 0 min(1, q/p) is 1. Guards against temperatures or logits that differ between what drafted and what judges."""
    with serving(folder, "--draft", VERIFIER, "--delta", "0") as server:
        for prompt in PROMPTS[:2]:
            server.complete(prompt, temperature=0.7, ignore_eos=True)
        seen = counted(server.url)
    assert seen["draft_tokens"] >= 60 and seen["accepted_tokens"] == seen["draft_tokens"]


def test_a_budget_raises_acceptance_and_greedy_text_stays(folder, plain_greedy):
    """Two servers, δ = 0 and 1, the same seeds: T = 0 gives plain vLLM's text, T > 0 more accepted tokens at δ = 1.

    The example client reads the counters. About 0.65 and 0.8 of some 800 drafted tokens are accepted: five standard errors apart even where
    the tokens of a block fall together, so that the wrong order has odds below 1e-6.
    """
    with (
        serving(folder, "--draft", DRAFT, "--delta", "0") as lossless,
        serving(folder, "--draft", DRAFT, "--delta", "1") as lossy,
    ):
        for server, delta in ((lossless, 0), (lossy, 1)):
            assert [server.complete(prompt, temperature=0) for prompt in PROMPTS] == plain_greedy
            active = re.findall(
                r"\((?:EngineCore|Worker).*Cactus is active: delta (\S+) for every request, V1", server.log.read_text()
            )
            assert active == [str(delta)]
        before = counted(lossy.url)
        with pytest.raises(urllib.error.HTTPError) as refused:
            lossy.complete("Hello", vllm_xargs={"cactus_delta": 0.5})
        assert refused.value.code == 400
        assert "this server runs vLLM's V1 model runner, where every request has delta 1" in refused.value.read().decode()
        assert counted(lossy.url) == before

        plot = folder / "al.html"
        servers = [f"--server=0={lossless.url}", f"--server=1={lossy.url}"]
        command = [sys.executable, CLIENT, *servers, "--max-tokens", "96", "--output", plot]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    rates = [float(line.split()[4]) for line in done.stdout.splitlines()[1:]]
    assert len(rates) == 2 and rates[0] < rates[1]
    assert "plotly" in plot.read_text()


def test_requests_bring_their_own_delta_on_v2(folder, plain_greedy):
    """A whole engine on Model Runner V2: a delta per request, refused where it is bad, without effect at T = 0.

    At δ = 10⁶ gamma is 1 for every q(n) above 10⁻⁶, so all is accepted; at δ = 0 about 0.7 of 40 drafted tokens, all of them with odds
    below 1e-5.
    """
    with serving(folder, "--draft", DRAFT, "--delta", "0", interpreted=True) as server:
        log = server.log.read_text()
        assert "Cactus is active: delta 0 unless a request brings its own, Model Runner V2" in log
        for value in (-1, "much"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                server.complete("Hello", vllm_xargs={"cactus_delta": value})
            assert refused.value.code == 400
            assert f"cactus_delta must be a number from 0 up (0 is lossless), got {value!r}" in refused.value.read().decode()
        text = server.complete(PROMPTS[0], temperature=0, max_tokens=8, vllm_xargs={"cactus_delta": 1})
        assert len(text) > 8 and plain_greedy[0].startswith(text)

        command = [sys.executable, CLIENT, "--url", server.url, "--deltas", "0,1e6", "--max-tokens", "12"]
        prompts = folder / "prompts.txt"
        prompts.write_text("\n".join(PROMPTS[:2]))
        command += ["--temperature", "1", "--top-k", "0", "--top-p", "1", "--prompts", prompts, "--concurrency", "2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    lossless, everything = ([int(word) for word in line.split()[2:4]] for line in done.stdout.splitlines()[1:])
    assert lossless[0] > lossless[1] and everything[0] == everything[1]


def test_a_bad_delta_stops_the_server():
    vllm = Path(sys.executable).with_name("vllm")
    environment = os.environ | {"CACTUS_DELTA": "plenty"}
    done = subprocess.run([vllm, "serve", VERIFIER, *ENGINE], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "The environment variable CACTUS_DELTA must be a number from 0 up (0 is lossless), got 'plenty'." in done.stderr
