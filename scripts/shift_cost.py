"""What the shifted logit costs an engine: prints its time in passes of torch.softmax over the same logits, medians of alternating runs.

python scripts/shift_cost.py [--runs 40] [--threads 1] [--device cpu]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from cactus.rules import shift_logits_

SHAPES = ((64, 151_936), (4, 49_152), (1, 49_152))  # 8 requests of 8 positions of Qwen 3; one request's block of the embedded pair


def medians(rows: int, vocabulary: int, runs: int, device: str) -> tuple[float, float]:
    """Median seconds of (softmax, shift and restore) over `runs` alternating runs."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(rows, vocabulary, generator=generator).to(device)
    n = torch.randint(vocabulary, (rows,), generator=generator).to(device)
    delta = torch.full((rows,), 0.5, device=device)

    def shift_and_restore() -> None:
        before = logits.gather(-1, n[:, None])
        shift_logits_(logits, n, delta)
        logits.scatter_(-1, n[:, None], before)

    tasks = (lambda: torch.softmax(logits, -1), shift_and_restore)
    times = [[_seconds(task, device) for task in tasks] for _ in range(runs + 2)][2:]
    softmax, shift = (statistics.median(column) for column in zip(*times, strict=True))
    return softmax, shift


def _seconds(task: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    task()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(" rows  vocabulary  softmax, ms  shift and restore, ms  softmax passes")
    for rows, vocabulary in SHAPES:
        softmax, shift = medians(rows, vocabulary, args.runs, args.device)
        print(f"{rows:5} {vocabulary:11} {softmax * 1e3:12.3f} {shift * 1e3:22.3f} {shift / softmax:15.2f}")


if __name__ == "__main__":
    main()
