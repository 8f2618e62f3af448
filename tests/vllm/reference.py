"""What a rejection sampler with Cactus must answer, in float64, one request at a time and with the engine's own random numbers."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cactus.rules import Cactus

CLOSE = 1e-4  # relative; nearer to a tie than this, float32 and float64 may decide differently


@dataclass(frozen=True)
class Answer:
    """Tokens that come out without the bonus, how many of them are drafted ones, and whether rounding may have decided."""

    tokens: list[int]
    accepted: int
    close: bool


def sampled(q: Tensor, p: Tensor, drafted: list[int], delta: float, u: Tensor, race: Tensor, placeholder_spares_p: bool) -> Answer:
    """Accept n with u·p(n) < gamma(n), else emit the winner of the race over (h − p)₊.

    q, p: (k, V) float64, p one-hot where the draft did not sample; drafted: k tokens, −1 never accepted; u: (k,); race: (k, V) positive,
    the token with the largest residual·race wins. placeholder_spares_p: a placeholder is replaced from (q − p)₊ instead of q.
    """
    rule, close = Cactus(delta), False
    for i, n in enumerate(drafted):
        residual = (q[i] - p[i]).clamp_min(0) if placeholder_spares_p else q[i]
        if n >= 0:
            token = torch.tensor(n)
            gamma = rule.gamma_at(p[i], q[i], token).item()
            threshold = u[i].item() * p[i, n].item()
            close |= math.isclose(gamma, threshold, rel_tol=CLOSE, abs_tol=1e-9)
            if p[i, n] > 0 and threshold < gamma:
                continue
            residual = (rule.target(p[i], q[i], token) - p[i]).clamp_min(0)
        (first, second), tokens = (residual * race[i]).topk(2)
        close |= math.isclose(first, second, rel_tol=CLOSE)
        return Answer([*drafted[:i], tokens[0].item()], i, close)
    return Answer(list(drafted), len(drafted), close)


def greedy(logits: Tensor, drafted: list[int]) -> Answer:
    """The argmax of each row (k, V) up to and with the first that is not the drafted token; delta does not count."""
    best = logits.argmax(-1).tolist()
    for i, (n, token) in enumerate(zip(drafted, best, strict=True)):
        if n != token:
            return Answer(best[: i + 1], i, False)
    return Answer(best, len(best), False)
