"""f-divergences, and the raised probability gamma that a budget delta buys under each of them.

D_f(h ‖ q) = Σ q f(h/q) with f convex and f(1) = 0. Cactus maximises h(n) under D_f(h ‖ q) ≤ delta; the best h raises n and scales the
rest, so only the divergence of two coins counts, d_f(gamma ‖ q) = q f(gamma/q) + (1−q) f((1−gamma)/(1−q)), and gamma is its largest
root in [q, 1] (Hao and Mou, ICLR 2026).

Everything is computed in float64, whatever float type comes in: the same function then serves the decoder, which judges float32 rows,
and the replay of a recorded trace, to the last bit. Logarithmic divergences are in nats.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BISECTIONS = 60  # halvings of [q, 1]: the root is known to 1e-18, below float64's own resolution


@dataclass(frozen=True)
class Divergence:
    """One f-divergence.

    f: convex on [0, ∞), elementwise on float64 tensors, f(1) = 0, finite or infinite at 0
    slope: limit of f(t)/t for t → ∞, what mass on a token with q = 0 costs per unit
    curvature: f''(1), None where f has none: then there is no Taylor form
    closed: exact gamma from q in (0, 1) and delta > 0, where a closed form exists
    """

    name: str
    f: Callable[[Tensor], Tensor]
    slope: float = math.inf
    curvature: float | None = None
    closed: Callable[[Tensor, float], Tensor] | None = None

    def between(self, h: Tensor, q: Tensor) -> Tensor:
        """D_f(h ‖ q). h, q: (..., V) distributions. Returns (...) float64, at least 0, infinite where h and q forbid it."""
        h, q = h.double(), q.double()
        inside = torch.where(q > 0, q * self.f(torch.where(q > 0, h / q, 1.0)), 0.0)
        outside = torch.where((q <= 0) & (h > 0), self.slope * h, 0.0)
        return (inside + outside).sum(-1).clamp_min(0.0)

    def binary(self, gamma: Tensor, q: Tensor) -> Tensor:
        """d_f(gamma ‖ q) of two coins, elementwise, float64."""
        gamma, q = gamma.double(), q.double()
        return self.between(torch.stack([gamma, 1 - gamma], -1), torch.stack([q, 1 - q], -1))

    def taylor_gamma(self, q: Tensor, delta: float | Tensor) -> Tensor:
        """The budget to second order, gamma = min(q + √(2 delta q (1−q) / f''(1)), 1); for KL the paper's rule.

        q: any shape, the verifier's probability of the drafted token. Returns the same shape, float64; 0 where q is 0. Raises
        ValueError where f has no second derivative at 1.
        """
        if self.curvature is None:
            raise ValueError(f"{self.name} has no second derivative at 1, so no Taylor form: use the exact solver.")
        q = q.double()
        return (q + (2 * delta * q * (1 - q) / self.curvature).sqrt()).clamp_max(1.0)

    def exact_gamma(self, q: Tensor, delta: float) -> Tensor:
        """The largest gamma in [q, 1] with d_f(gamma ‖ q) ≤ delta: 1 once delta ≥ d_f(1 ‖ q), else in closed form or by bisection.

        q: any shape. Returns the same shape, float64, within 1e-12; 0 where q is 0, q itself where delta is 0.
        """
        q = q.double()
        certain = self.binary(torch.ones_like(q), q) <= delta
        gamma = (self.closed or self._root)(q, delta).clamp_max(1.0)
        # Whatever f: a token that the verifier excludes is never accepted, though a finite slope would let the bare optimum do so.
        return torch.where((q > 0) & (q < 1) & (delta > 0), torch.where(certain, 1.0, torch.maximum(gamma, q)), q)

    def _root(self, q: Tensor, delta: float) -> Tensor:
        low, high = q.clone(), torch.ones_like(q)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            within = self.binary(middle, q) <= delta
            low, high = torch.where(within, middle, low), torch.where(within, high, middle)
        return low

    def critical_delta(self, q: Tensor, raised: Tensor) -> Tensor:
        """The exact budget at which gamma reaches `raised`: d_f(raised ‖ q), 0 where q exceeds it, infinite where q is 0."""
        return torch.where(q > 0, torch.where(raised < q, 0.0, self.binary(raised, q)), torch.inf)


def _hellinger_gamma(q: Tensor, delta: float) -> Tensor:
    # With q = sin²θ the distance of two coins is 1 − cos of the difference of their angles.
    angle = torch.asin(q.sqrt()) + math.acos(max(1 - delta, 0.0))
    return torch.where(angle >= math.pi / 2, 1.0, torch.sin(angle) ** 2)


DIVERGENCES = {
    divergence.name: divergence
    for divergence in (
        Divergence("kl", lambda t: torch.xlogy(t, t), curvature=1.0),
        Divergence("reverse_kl", lambda t: -torch.log(t), slope=0.0, curvature=1.0),
        Divergence("chi2", lambda t: (t - 1) ** 2, curvature=2.0, closed=lambda q, delta: q + (delta * q * (1 - q)).sqrt()),
        Divergence("tv", lambda t: (t - 1).abs() / 2, slope=0.5, closed=lambda q, delta: q + delta),
        Divergence("hellinger", lambda t: (t.sqrt() - 1) ** 2 / 2, slope=0.5, curvature=0.25, closed=_hellinger_gamma),
        Divergence(
            "js",
            lambda t: (torch.xlogy(t, t) - torch.xlogy(1 + t, (1 + t) / 2)) / 2,
            slope=math.log(2) / 2,
            curvature=0.25,
        ),
    )
}
"""By name: kl (h to q), reverse_kl (q to h), chi2, tv (½·L1), hellinger (squared, ½·Σ(√h − √q)²), js (nats, at most ln 2)."""

KL = DIVERGENCES["kl"]


def kl(h: Tensor, q: Tensor) -> Tensor:
    """KL(h ‖ q) in nats, from logarithms of each row, so that tiny probabilities keep their digits.

    h, q: (..., V) distributions. Returns (...) float64, at least 0; infinite where h puts mass on a token that q excludes.
    """
    h, q = h.double(), q.double()
    return torch.where(h > 0, torch.xlogy(h, h) - torch.xlogy(h, q), 0.0).sum(-1).clamp_min(0.0)


def entropy(h: Tensor) -> Tensor:
    """Entropy of (..., V) distributions in nats, (...) float64."""
    return torch.special.entr(h.double()).sum(-1)


def taylor_critical_delta(q: Tensor, raised: Tensor) -> Tensor:
    """The budget at which the Taylor rule's gamma (KL) reaches `raised`: a token with draw u is accepted iff delta exceeds
    taylor_critical_delta(q, u·p). Zero where q already exceeds it (accepted at every delta), infinite where q is 0.

    q, raised: any shape. Returns the same shape, float64: (raised − q)² / (2 q (1−q)).
    """
    q, raised = q.double(), raised.double()
    delta = (raised - q).clamp_min(0.0) ** 2 / (2 * q * (1 - q))
    return torch.where(q > 0, torch.where(raised < q, 0.0, delta), torch.inf)


def check_distributions(**rows: Tensor) -> None:
    """Raises ValueError, with a sentence that names the argument, for rows that are no distributions: negative or NaN entries, or a sum
    that is not 1 within 1e-3 (half-precision rows pass, logits do not)."""
    for name, row in rows.items():
        if not (row >= 0).all():
            raise ValueError(f"{name} is no distribution: it has negative or NaN entries. Pass probabilities, not logits.")
        total = row.double().sum(-1)
        if not ((total - 1).abs() < 1e-3).all():
            raise ValueError(
                f"{name} is no distribution: a row sums to {total.flatten()[(total - 1).abs().argmax()].item():.6g}, not 1."
            )
