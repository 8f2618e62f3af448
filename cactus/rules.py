"""Acceptance rules: pure functions of the draft's p, the verifier's q and the drafted token n.

    p, q   (..., V) distributions of draft and verifier, after the same temperature and filters
    n      (...)    drafted token, n ~ p
    gamma  the raised probability of n: n is accepted iff u·p(n) < gamma(n), u uniform in [0, 1)
    h      the target once n is drafted: gamma at n, the rest of q scaled to fill up
    h_alg  what really comes out, averaged over n and over accepting or replacing it

A rule says what gamma is and what replaces a rejected token; everything else follows. Results are float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cactus.divergences import exact_gamma, taylor_gamma


@dataclass(frozen=True)
class SpS:
    """Speculative sampling, lossless: accept with min(1, q(n)/p(n)), else draw from (q − p)₊.

    Source: Leviathan et al. 2023, Chen et al. 2023. Guarantee: the output is distributed as q.
    """

    name = "sps"

    def gamma(self, p: Tensor, q: Tensor) -> Tensor:
        """(...) elementwise: gamma = q."""
        return q.double()

    def gamma_at(self, p: Tensor, q: Tensor, n: Tensor) -> Tensor:
        """(...) gamma of the drafted tokens alone; reads p and q at n only."""
        return self.gamma(_at(p, n), _at(q, n))

    def target(self, p: Tensor, q: Tensor, n: Tensor) -> Tensor:
        """(..., V) h: gamma at n, q(x)·(1−gamma)/(1−q(n)) elsewhere."""
        gamma, scale = self.gamma_at(p, q, n), _rest_scale(self.gamma_at(p, q, n), _at(q, n))
        return (q.double() * scale[..., None]).scatter(-1, n[..., None], gamma[..., None])

    def recovery(self, p: Tensor, q: Tensor, n: Tensor) -> Tensor:
        """(..., V) distribution of the replacement after n was rejected: (h − p)₊ normalised.

        In exact arithmetic its mass is at least p(n) − gamma > 0; where rounding leaves none, h itself.
        """
        h = self.target(p, q, n)
        residual = (h - p.double()).clamp_min(0.0)
        mass = residual.sum(-1, keepdim=True)
        return torch.where(mass > 0, residual, h) / torch.where(mass > 0, mass, h.sum(-1, keepdim=True))

    def effective(self, p: Tensor, q: Tensor) -> Tensor:
        """(..., V) h_alg, exact."""
        rows = SortedRows(p, q)
        return rows.unsort(rows.effective(self.gamma(rows.p, rows.q)))


@dataclass(frozen=True)
class Cactus(SpS):
    """Constrained acceptance: raise q(n) as far as D(h ‖ q) ≤ delta allows, accept with min(1, gamma/p(n)).

    Source: Hao and Mou, ICLR 2026. solver "taylor" is the paper's closed form, "exact" the root of the KL budget itself.
    delta = 0 is SpS; where q(n) = 0 nothing is ever accepted. Raises ValueError for a delta below 0, NaN, or an unknown solver.
    """

    delta: float
    solver: str = "taylor"

    name = "cactus"

    def __post_init__(self):
        if not 0 <= self.delta < float("inf"):
            raise ValueError(f"delta must be a number from 0 up, got {self.delta}.")
        if self.solver not in ("taylor", "exact"):
            raise ValueError(f"solver must be taylor or exact, got {self.solver!r}.")

    def gamma(self, p: Tensor, q: Tensor) -> Tensor:
        """(...) elementwise, from q alone."""
        return (taylor_gamma if self.solver == "taylor" else exact_gamma)(q, self.delta)


@dataclass(frozen=True)
class TAS:
    """Typical acceptance: accept iff q(n) > min(epsilon, alpha·e^(−H(q))), else emit argmax q. p is not read.

    Source: Cai et al. 2024 (Medusa). H is the entropy of q after temperature and filters. No divergence is bounded:
    it constrains cross-entropy, so the output drifts towards a deterministic one.
    """

    epsilon: float = 0.09
    alpha: float = 0.3

    name = "tas"

    def __post_init__(self):
        if not (0 <= self.epsilon <= 1 and 0 <= self.alpha < float("inf")):
            raise ValueError(f"epsilon must lie in 0..1 and alpha from 0 up, got {self.epsilon} and {self.alpha}.")

    def threshold(self, q: Tensor) -> Tensor:
        """(...) what q(n) must exceed."""
        entropy = torch.special.entr(q.double()).sum(-1)
        return (self.alpha * torch.exp(-entropy)).clamp_max(self.epsilon)

    def gamma(self, p: Tensor, q: Tensor) -> Tensor:
        """(..., V) 1 where a token would be accepted whatever the draw, else 0."""
        return (q.double() > self.threshold(q)[..., None]).double()

    def gamma_at(self, p: Tensor, q: Tensor, n: Tensor) -> Tensor:
        """(...) gamma of the drafted tokens; reads whole rows of q for their entropy."""
        return (_at(q, n).double() > self.threshold(q)).double()

    def target(self, p: Tensor, q: Tensor, n: Tensor) -> Tensor:
        """(..., V) where n would be accepted, n for sure; else the one-hot argmax of q."""
        emitted = torch.where(self.gamma_at(p, q, n) > 0, n, q.argmax(-1))
        return torch.zeros_like(q, dtype=torch.float64).scatter(-1, emitted[..., None], 1.0)

    def recovery(self, p: Tensor, q: Tensor, n: Tensor) -> Tensor:
        """(..., V) the one-hot argmax of q."""
        return torch.zeros_like(q, dtype=torch.float64).scatter(-1, q.argmax(-1, keepdim=True), 1.0)

    def effective(self, p: Tensor, q: Tensor) -> Tensor:
        """(..., V) h_alg: p where accepted, the rejected mass on argmax q."""
        kept = p.double() * self.gamma(p, q)
        rejected = (p.double().sum(-1, keepdim=True) - kept.sum(-1, keepdim=True)).clamp_min(0.0)
        return kept.scatter_add(-1, q.argmax(-1, keepdim=True), rejected)


Rule = SpS | Cactus | TAS


def accept_prob(rule: Rule, p: Tensor, q: Tensor) -> Tensor:
    """(..., V) phi = min(1, gamma/p) of every token, were it the drafted one; 1 where p is 0 and gamma is not."""
    gamma, p = rule.gamma(p, q), p.double()
    return torch.where(p > gamma, gamma / p, (gamma > 0).double())


def acceptance(rule: Rule, p: Tensor, q: Tensor) -> Tensor:
    """(...) expected acceptance of one drafted token, Σ min(p, gamma)."""
    return torch.minimum(p.double(), rule.gamma(p, q)).sum(-1)


class SortedRows:
    """Rows of p and q sorted by the ratio p/q, with what h_alg needs and no delta changes: sort once, then one
    O(V log V) pass for each gamma instead of a sum over every pair of tokens.

    (q·s − p)₊ is non-zero exactly where p/q < s, so the residual of a rejected n is a prefix of the sorted row.
    """

    def __init__(self, p: Tensor, q: Tensor):
        p, q = p.double(), q.double()
        ratio = torch.where(q > 0, p / q, torch.inf)
        self.ratio, self.order = ratio.sort(-1)
        self.p, self.q = p.gather(-1, self.order), q.gather(-1, self.order)
        pad = torch.zeros_like(self.p[..., :1])
        self._p_below = torch.cat([pad, self.p.cumsum(-1)], -1)  # mass of the first i tokens, i from 0 to V
        self._q_below = torch.cat([pad, self.q.cumsum(-1)], -1)

    def effective(self, gamma: Tensor) -> Tensor:
        """h_alg in sorted order, for gamma in sorted order: (..., V), or (D, ..., V) for D rules at once.

        Each rejectable n spreads its weight p(n) − gamma(n) over the tokens with p/q < s(n), s = (1−gamma)/(1−q(n)).
        """
        scale = _rest_scale(gamma, self.q)
        weight = (self.p - gamma).clamp_min(0.0)
        reach = torch.searchsorted(self.ratio.expand_as(scale).contiguous(), scale)  # how many tokens have p/q < s
        below = [mass.expand(*scale.shape[:-1], -1) for mass in (self._q_below, self._p_below)]
        mass = scale * below[0].gather(-1, reach) - below[1].gather(-1, reach)
        # The residual of a rejected n holds at least its weight; rounding may not say otherwise.
        share = torch.where(weight > 0, weight / torch.maximum(mass, weight), 0.0)
        spread = torch.zeros_like(below[0])
        by_q = _sum_beyond(spread.scatter_add(-1, reach, share * scale))
        by_p = _sum_beyond(spread.scatter_add(-1, reach, share))
        return torch.minimum(self.p, gamma) + (self.q * by_q - self.p * by_p).clamp_min(0.0)

    def unsort(self, values: Tensor) -> Tensor:
        """(..., V) values in sorted order, put back in vocabulary order."""
        return torch.zeros_like(values).scatter(-1, self.order, values)


def shift_logits_(logits: Tensor, n: Tensor, delta: float | Tensor) -> Tensor:
    """Cactus as one shifted logit, in place: softmax of the result is h, since only l[n] has to change,

        l'[n] = logsumexp over x≠n of l  +  ln gamma  −  ln(1 − gamma).

    logits: (..., V) float, after temperature and filters; n: (...) drafted tokens; delta: a number or (...), one per row.
    Rows whose delta is 0 and rows where n alone has probability are left as they are, to the bit. Returns logits.
    """
    delta = torch.as_tensor(delta, dtype=torch.float32, device=logits.device).expand(n.shape)
    before = _at(logits, n)
    rest = logits.scatter_(-1, n[..., None], -torch.inf).float().logsumexp(-1)
    z = before.float() - rest
    q, not_q = torch.sigmoid(z), torch.sigmoid(-z)
    raise_by = (2 * delta * q * not_q).sqrt()
    after = rest + (q + raise_by).log() - (not_q - raise_by).clamp_min(torch.finfo(torch.float32).tiny).log()
    shifted = torch.where((delta > 0) & (rest > -torch.inf), after, before.float()).to(logits.dtype)
    return logits.scatter_(-1, n[..., None], torch.where(delta > 0, shifted, before)[..., None])


def _at(rows: Tensor, n: Tensor) -> Tensor:
    return rows.gather(-1, n[..., None])[..., 0]


def _rest_scale(gamma: Tensor, q: Tensor) -> Tensor:
    """(1−gamma)/(1−q): what is left for the other tokens; 0 where q is 1 and there are none."""
    rest = 1 - q.double()
    return torch.where(rest > 0, (1 - gamma) / rest, 0.0).clamp_min(0.0)


def _sum_beyond(values: Tensor) -> Tensor:
    """(..., V+1) to (..., V): entry i becomes the sum of the entries after i."""
    return values.flip(-1).cumsum(-1).flip(-1)[..., 1:]
