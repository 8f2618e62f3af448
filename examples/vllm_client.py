"""Acceptance length against delta, measured on running vLLM servers: sends prompts, reads the servers' own counters, draws the curve.

One server on Model Runner V2, started with CACTUS_DELTA=0, where each request brings its delta:

    python examples/vllm_client.py --url http://localhost:8000 --deltas 0,0.1,0.5,1 --output al.html

or, on the V1 runner, one server per delta:

    python examples/vllm_client.py --server 0=http://localhost:8000 --server 1=http://localhost:8001 --output al.html

Needs plotly alone. The counters belong to the server: while this runs, nobody else should use it.
"""

import argparse
import json
import math
import re
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PROMPTS = (
    "The three largest rivers of South America are",
    "A recipe for a simple vegetable soup:",
    "Dear colleagues, I am writing to tell you that",
    "The difference between weather and climate is",
    "def fibonacci(n):",
    "Once upon a time, in a house at the edge of the forest,",
    "To change the tyre of a bicycle, first",
    "Question: Tom has 12 apples and gives away 5. How many are left? Answer:",
)
COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")
TIMEOUT = 600


class ClientError(RuntimeError):
    """What went wrong with a server, in one sentence."""


@dataclass(frozen=True)
class Measured:
    """What a server counted at one delta: blocks, drafted tokens, accepted tokens."""

    delta: float
    blocks: int
    drafted: int
    accepted: int

    @property
    def acceptance_length(self) -> float:
        """Accepted tokens per block, without the replaced or bonus token. Raises ClientError where nothing was drafted."""
        if not self.blocks:
            raise ClientError(
                f"At delta {self.delta:g} the server drafted nothing: is it running with a speculative configuration?"
            )
        return self.accepted / self.blocks


def counters(metrics: str) -> tuple[int, ...]:
    """(blocks, drafted, accepted) from the text of /metrics, summed over engines. Raises ClientError where they are missing."""
    totals = []
    for name in COUNTERS:
        values = re.findall(rf"^vllm:spec_decode_num_{name}_total(?:\{{[^}}]*\}})? (\S+)$", metrics, re.MULTILINE)
        if not values:
            raise ClientError(
                f"The server's /metrics has no vllm:spec_decode_num_{name}_total: it must speculate and log statistics."
            )
        totals.append(round(sum(map(float, values))))
    return tuple(totals)


def measure(url: str, delta: float, sampling: dict, prompts: list[str], concurrency: int) -> Measured:
    """Send the prompts and subtract the server's counters before from those after. sampling: the body of each completion request."""
    body = sampling | {"model": json.loads(ask(f"{url}/v1/models"))["data"][0]["id"]}
    before = counters(ask(f"{url}/metrics"))
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(lambda prompt: ask(f"{url}/v1/completions", body | {"prompt": prompt}), prompts))
    after = counters(ask(f"{url}/metrics"))
    return Measured(delta, *(late - early for early, late in zip(before, after, strict=True)))


def ask(url: str, body: dict | None = None) -> str:
    """What the server answers. Raises ClientError where it cannot be reached or refuses."""
    request = urllib.request.Request(url, body and json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        raise ClientError(f"{url} refused (HTTP {error.code}): {error.read().decode(errors='replace')[:500]}") from error
    except (OSError, ValueError) as error:
        raise ClientError(f"{url} does not answer ({error}): is the server up, and the address right?") from error


def plot(points: list[Measured], output: Path) -> None:
    """Write the curve as one HTML file that needs no network."""
    import plotly.graph_objects as go

    figure = go.Figure(go.Scatter(x=[p.delta for p in points], y=[p.acceptance_length for p in points], mode="lines+markers"))
    figure.update_layout(xaxis_title="δ", yaxis_title="acceptance length (accepted draft tokens per verifier pass)")
    figure.write_html(output, include_plotlyjs=True)


def delta_of(text: str) -> float:
    """A delta of the command line."""
    try:
        delta = float(text)
    except ValueError:
        delta = math.nan
    if not 0 <= delta < math.inf:
        raise argparse.ArgumentTypeError(f"delta must be a number from 0 up, got {text!r}")
    return delta


def server_of(text: str) -> tuple[float, str]:
    """DELTA=URL of the command line."""
    delta, separator, url = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"a server is written DELTA=URL, got {text!r}")
    return delta_of(delta), url.rstrip("/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a server where each request brings its delta")
    parser.add_argument("--deltas", default="0,0.05,0.1,0.5,1", help="for --url (default 0,0.05,0.1,0.5,1)")
    parser.add_argument("--server", action="append", type=server_of, default=[], metavar="DELTA=URL", help="may be repeated")
    parser.add_argument("--prompts", type=Path, help="a text file, one prompt a line (default: eight of our own)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--concurrency", type=int, default=4, help="requests at a time (default 4)")
    parser.add_argument("--output", type=Path, help="HTML file for the plot (default: only the table)")
    args = parser.parse_args()
    if bool(args.url) == bool(args.server):
        parser.error("give --url for one server with a delta per request, or --server DELTA=URL for each of several")
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": 1}
    sampling["ignore_eos"] = True
    try:
        prompts = args.prompts.read_text().splitlines() if args.prompts else list(PROMPTS)
        runs = [(delta, url, {}) for delta, url in sorted(args.server)]
        if args.url:
            deltas = sorted(map(delta_of, args.deltas.split(",")))
            runs = [(delta, args.url.rstrip("/"), {"vllm_xargs": {"cactus_delta": delta}}) for delta in deltas]
        points = []
        print("    delta  blocks  drafted  accepted  accepted/drafted  acceptance length")
        for delta, url, extra in runs:
            point = measure(url, delta, sampling | extra, prompts, args.concurrency)
            length, rate = point.acceptance_length, point.accepted / point.drafted
            print(f"{delta:9g} {point.blocks:7} {point.drafted:8} {point.accepted:9} {rate:17.3f} {length:18.2f}", flush=True)
            points.append(point)
        if args.output:
            plot(points, args.output)
    except (ClientError, OSError, ValueError, argparse.ArgumentTypeError) as error:
        sys.exit(f"vllm_client: {error}")


if __name__ == "__main__":
    main()
