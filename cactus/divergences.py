"""Divergences and the raised probability gamma that a budget delta buys (THEORY: Cactus, Theorem 1).

Everything here is computed in float64, whatever float type comes in: the same function then serves the decoder, which judges
float32 rows, and the replay of a recorded trace, to the last bit.
"""

import torch
from torch import Tensor

BISECTIONS = 60  # halvings of [q, 1]: the root is known to 1e-18, below float64's own resolution


def kl(h: Tensor, q: Tensor) -> Tensor:
    """KL(h ‖ q) in nats.

    h, q: (..., V) distributions. Returns (...) float64, at least 0; infinite where h puts mass on a token that q excludes.
    """
    h, q = h.double(), q.double()
    terms = torch.where(h > 0, torch.xlogy(h, h) - torch.xlogy(h, q), 0.0)
    return terms.sum(-1).clamp_min(0.0)


def binary_kl(gamma: Tensor, q: Tensor) -> Tensor:
    """KL between two coins, gamma ln(gamma/q) + (1−gamma) ln((1−gamma)/(1−q)), elementwise, in nats, float64."""
    return kl(torch.stack([gamma, 1 - gamma.double()], -1), torch.stack([q, 1 - q.double()], -1))


def taylor_gamma(q: Tensor, delta: float | Tensor) -> Tensor:
    """The paper's rule: the KL budget to second order, gamma = min(q + √(2 delta q (1−q)), 1).

    q: any shape, the verifier's probability of the drafted token. Returns the same shape, float64; 0 where q is 0.
    """
    q = q.double()
    return (q + (2 * delta * q * (1 - q)).sqrt()).clamp_max(1.0)


def exact_gamma(q: Tensor, delta: float) -> Tensor:
    """The largest gamma in [q, 1] with binary_kl(gamma, q) ≤ delta: 1 once delta ≥ −ln q, else the root by bisection.

    q: any shape. Returns the same shape, float64, within 1e-12; 0 where q is 0, q itself where delta is 0.
    """
    q = q.double()
    low, high = q.clone(), torch.ones_like(q)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        within = binary_kl(middle, q) <= delta
        low, high = torch.where(within, middle, low), torch.where(within, high, middle)
    gamma = torch.where(-torch.log(q) <= delta, 1.0, low)
    return torch.where((q > 0) & (delta > 0), gamma, q)


def critical_delta(q: Tensor, raised: Tensor) -> Tensor:
    """The budget at which the Taylor rule's gamma reaches `raised`: a token with draw u is accepted iff delta exceeds
    critical_delta(q, u·p). Zero where q already exceeds it (accepted at every delta), infinite where q is 0.

    q, raised: any shape. Returns the same shape, float64: (raised − q)² / (2 q (1−q)).
    """
    q, raised = q.double(), raised.double()
    delta = (raised - q).clamp_min(0.0) ** 2 / (2 * q * (1 - q))
    delta = torch.where(raised < q, 0.0, delta)
    return torch.where(q > 0, delta, torch.inf)
