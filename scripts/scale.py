"""How the exact mathematics scales: prints a table of h_alg and KL over full vocabularies, and the time of a trace's replay.

python scripts/scale.py [--rows 200] [--vocabulary 49152] [--deltas 16]
"""

import argparse
import resource
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from cactus import recordings
from cactus.divergences import kl
from cactus.replay import Replay
from cactus.rules import Cactus, SortedRows


def full_rows(rows: int, vocabulary: int, deltas: int) -> float:
    """Seconds for h_alg and KL of `rows` positions at `deltas` budgets, sorted once, a few rows at a time."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.softmax(3 * torch.randn(rows, vocabulary, generator=generator), -1) for _ in range(2))
    start = time.perf_counter()
    for first in range(0, rows, 8):
        some = SortedRows(p[first : first + 8], q[first : first + 8])
        for i in range(deltas):
            kl(some.effective(Cactus(0.002 * 2**i).gamma(some.p, some.q)), some.q)
    return time.perf_counter() - start


def replayed(count: int, deltas: int) -> tuple[int, float]:
    """(tokens, seconds) of α, AL and KL at `deltas` budgets over recorded traces until `count` tokens were drafted."""
    rounds, tokens = [], 0
    for recording in recordings.RECORDINGS:
        for trace in recordings.read(recording.path)[:2]:
            rounds += trace.rounds
            tokens = len(Replay(rounds, trace.eos_ids).tokens)
            if tokens >= count:
                break
        if tokens >= count:
            break
    rules = [Cactus(2 * i / (deltas - 1)) for i in range(deltas)]
    start = time.perf_counter()
    replay = Replay(rounds, ())
    replay.acceptance(rules), replay.divergence(rules), replay.expected_lengths(rules), replay.critical_deltas()
    return len(replay.tokens), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--deltas", type=int, default=16)
    args = parser.parse_args()
    full_rows(8, 1000, 2)
    print("positions  vocabulary  deltas   seconds  µs per position, delta and 1000 tokens")
    shapes = [(args.rows, args.vocabulary // 4), (args.rows, args.vocabulary // 2), (args.rows // 2, args.vocabulary)]
    for rows, vocabulary in [*shapes, (args.rows, args.vocabulary)]:
        seconds = full_rows(rows, vocabulary, args.deltas)
        each = seconds / rows / args.deltas / vocabulary * 1e9
        print(f"{rows:9} {vocabulary:11} {args.deltas:7} {seconds:9.2f} {each:9.2f}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")
    replayed(400, 41)
    times = sorted(replayed(400, 41) for _ in range(5))
    print(f"replay of {times[2][0]} drafted tokens over 41 deltas: {times[2][1] * 1e3:.0f} ms (median of 5)")


if __name__ == "__main__":
    main()
