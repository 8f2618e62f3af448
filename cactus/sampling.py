"""From logits to probabilities to draws: one warping function for draft and verifier, keyed uniforms, inverse-CDF draws.

No global random state is read or touched: a draw is a function of (run key, stream, index of the generated token).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DRAFT, ACCEPT, REPLACE = range(3)  # streams: drawing the draft token, accepting it, its replacement or the bonus token
GREEDY_BELOW = 1e-4  # temperatures up to this one are greedy: the top two logits would have to lie within about 1e-3
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Sampling:
    """Temperature (0 = greedy), then top-k (0 = off), then top-p (1 = off). Raises ValueError with a sentence."""

    temperature: float = 0.6
    top_k: int = 20
    top_p: float = 0.95

    def __post_init__(self):
        if not 0 <= self.temperature <= 100:
            raise ValueError(f"Temperature must lie between 0 (greedy) and 100, got {self.temperature}.")
        if self.top_k != int(self.top_k) or self.top_k < 0:
            raise ValueError(f"Top-k must be a whole number from 0 (off) up, got {self.top_k}.")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"Top-p must lie between 0 (only the likeliest token) and 1 (off), got {self.top_p}.")


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that is sampled, judged and shown.

    logits: (..., V) float. Returns (..., V) float32, rows summing to 1: temperature, then the top_k likeliest tokens, then the
    smallest set of them whose mass reaches top_p (always at least one token). Greedy gives the one-hot argmax. Logits that are NaN
    or +∞ give NaN, greedy ones too.
    """
    ids, probs = warp_kept(logits, sampling)
    return probs if probs.shape == logits.shape else torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, ids, probs)


def warp_kept(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The same distribution as the tokens it may hold: ids (..., C), ascending, and their probabilities (..., C), some of them 0.

    C is top_k, 1 for greedy, V without top-k: what follows costs as much as is kept, not as much as there is.
    """
    logits, size = logits.float(), logits.shape[-1]
    if sampling.temperature <= GREEDY_BELOW:
        most, ids = logits.max(-1, keepdim=True)
        return ids, torch.where(most.isfinite(), 1.0, torch.nan)
    kept = min(sampling.top_k, size) or size
    if kept == size and sampling.top_p == 1:
        return _all_ids(logits), torch.softmax((logits - logits.amax(-1, keepdim=True)) / sampling.temperature, -1)
    top, ids = logits.topk(kept) if kept < size else logits.sort(dim=-1, descending=True, stable=True)
    probs = torch.softmax((top - top[..., :1]) / sampling.temperature, -1)
    # Before the first token lies exactly nothing, so that any top_p above 0 keeps it.
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill_(before >= max(sampling.top_p, torch.finfo(torch.float32).tiny), 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    if kept == size:
        return _all_ids(logits), torch.zeros_like(logits).scatter_(-1, ids, probs)
    ids, order = ids.sort(-1)
    return ids, probs.gather(-1, order)


def _all_ids(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[-1], device=logits.device).expand(logits.shape).contiguous()


def run_key(seed: int, prompt_id: int = 0) -> tuple[int, int]:
    """The 128-bit key that all draws of a run share; rules that are compared share it too. In a sweep over prompts, prompt_id
    keeps them apart. Raises ValueError for a seed outside 0..2⁶³−1."""
    if isinstance(seed, bool) or seed != int(seed) or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"The seed must be a whole number between 0 and {MAX_SEED}, got {seed}.")
    low, high = np.random.SeedSequence([int(seed), prompt_id]).generate_state(2, np.uint64)
    return int(low), int(high)


def uniform(key: tuple[int, int], stream: int, index: int) -> float:
    """The uniform in [0, 1), 53 bits, of one stream at one token. Philox counts: nothing has to be drawn before it."""
    bits = np.random.Philox(key=np.array(key, np.uint64), counter=np.array([0, index, stream, 0], np.uint64)).random_raw()
    return (int(bits) >> 11) * 2.0**-53


def uniforms(key: tuple[int, int], stream: int, start: int, count: int) -> Tensor:
    """(count,) float64, the uniforms of `stream` at indices start, start+1, …"""
    return torch.tensor([uniform(key, stream, start + i) for i in range(count)], dtype=torch.float64)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF draws: the first id whose cumulative mass exceeds u times the total, never one of probability 0.

    probs: (..., V), not necessarily normalised; u: (...) float64 in [0, 1). Returns (...) int64, an id also where probs are NaN, since
    an index beyond the rows would end a process on a GPU; so who draws asks whether there was any.
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:].contiguous()
    drawn = torch.searchsorted(cumulative, u[..., None] * total, right=True)
    last = torch.searchsorted(cumulative, total)  # u·total may round up to the total itself
    # Where the law is NaN both lie beyond the end: on a GPU an index out of bounds would end the process.
    return torch.minimum(drawn, last)[..., 0].clamp_max_(probs.shape[-1] - 1)
