"""Acceptance rules: pure functions of the draft's p, the verifier's q and the drafted token n.

    p, q   (..., V) distributions of draft and verifier, after the same temperature and filters
    n      (...)    drafted token, n ~ p
    gamma  the raised probability of n: n is accepted iff u·p(n) < gamma(n), u uniform in [0, 1)
    h      the target once n is drafted: gamma at n, the rest of q scaled to fill up
    h_alg  what really comes out, averaged over n and over accepting or replacing it

A rule says what gamma is and what replaces a rejected token; everything else follows. Results are float64. SpS and Cactus come first,
then the rules they are compared with. Rules whose verdict depends on later positions (block verification, vLLM's FLy) lie outside this
one-step picture.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cactus.divergences import DIVERGENCES, check_distributions, entropy
from cactus.divergences import kl as kl_divergence


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
        gamma = self.gamma_at(p, q, n)
        scale = _rest_scale(gamma, _at(q, n))
        return (q.double() * scale[..., None]).scatter(-1, n[..., None], gamma[..., None])

    def recovery(self, p: Tensor, q: Tensor, n: Tensor) -> Tensor:
        """(..., V) distribution of the replacement after n was rejected: (h − p)₊ normalised.

        In exact arithmetic its mass is at least p(n) − gamma > 0; where rounding leaves none, h itself.
        """
        h = self.target(p, q, n)
        return _normalised((h - p.double()).clamp_min(0.0), otherwise=h)

    def effective(self, p: Tensor, q: Tensor) -> Tensor:
        """(..., V) h_alg, exact, in O(V log V)."""
        check_distributions(p=p, q=q)
        rows = SortedRows(p, q)
        return rows.unsort(rows.effective(self.gamma(rows.p, rows.q)))


@dataclass(frozen=True)
class Cactus(SpS):
    """Constrained acceptance: raise q(n) as far as D(h ‖ q) ≤ delta allows, accept with min(1, gamma/p(n)).

    Source: Hao and Mou, ICLR 2026. solver "taylor" with KL is the paper's closed form, "exact" the root of the budget itself;
    divergence: a name in DIVERGENCES. delta = 0 is SpS; where q(n) = 0 nothing is ever accepted. Raises ValueError for a delta below 0
    or NaN, an unknown solver or divergence, and Taylor where there is none.
    """

    delta: float
    solver: str = "taylor"
    divergence: str = "kl"

    name = "cactus"

    def __post_init__(self):
        if not 0 <= self.delta < float("inf"):
            raise ValueError(f"delta must be a number from 0 up, got {self.delta}.")
        if self.solver not in ("taylor", "exact"):
            raise ValueError(f"solver must be taylor or exact, got {self.solver!r}.")
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"divergence must be one of {', '.join(DIVERGENCES)}, got {self.divergence!r}.")
        if self.solver == "taylor" and DIVERGENCES[self.divergence].curvature is None:
            raise ValueError(f"{self.divergence} has no Taylor form: choose the exact solver.")

    def gamma(self, p: Tensor, q: Tensor) -> Tensor:
        """(...) elementwise, from q alone."""
        divergence = DIVERGENCES[self.divergence]
        return (divergence.taylor_gamma if self.solver == "taylor" else divergence.exact_gamma)(q, self.delta)


class OneReplacement:
    """Rules whose replacement is drawn from the same distribution whatever token was rejected."""

    def gamma_at(self, p: Tensor, q: Tensor, n: Tensor) -> Tensor:
        """(...) gamma of the drafted tokens; reads whole rows."""
        return _at(self.gamma(p, q), n)

    def recovery(self, p: Tensor, q: Tensor, n: Tensor) -> Tensor:
        """(..., V) distribution of the replacement after a rejection."""
        return self.replacement(p, q)

    def effective(self, p: Tensor, q: Tensor) -> Tensor:
        """(..., V) h_alg: p where accepted, the rejected mass spread over the replacement."""
        check_distributions(p=p, q=q)
        kept = torch.minimum(p.double(), self.gamma(p, q))
        rejected = (p.double().sum(-1, keepdim=True) - kept.sum(-1, keepdim=True)).clamp_min(0.0)
        return kept + rejected * self.replacement(p, q)


@dataclass(frozen=True)
class TAS(OneReplacement):
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
        return (self.alpha * torch.exp(-entropy(q))).clamp_max(self.epsilon)

    def gamma(self, p: Tensor, q: Tensor) -> Tensor:
        """(..., V) 1 where a token would be accepted whatever the draw, else 0."""
        return (q.double() > self.threshold(q)[..., None]).double()

    def replacement(self, p: Tensor, q: Tensor) -> Tensor:
        """(..., V) the one-hot argmax of q."""
        return torch.zeros_like(q, dtype=torch.float64).scatter(-1, q.argmax(-1, keepdim=True), 1.0)


@dataclass(frozen=True)
class Interpolation(OneReplacement):
    """Sample from the mixture h = weight·p + (1−weight)·q, losslessly for that h.

    Source: transformers' assistant_ensemble_weight w = 1 − weight; the static ensemble of DIVERSED (arXiv 2604.07622). Guarantee:
    output h, TV(h, q) = weight·TV(p, q), the best acceptance at that TV; weight 0 is SpS, 1 accepts everything. Under filters it
    accepts tokens that the verifier excludes, so KL(h ‖ q) is infinite there.
    """

    weight: float

    name = "interpolation"

    def __post_init__(self):
        _check_range("weight", self.weight, 0, 1)

    def gamma(self, p: Tensor, q: Tensor) -> Tensor:
        """(...) elementwise: the mixture."""
        return self.weight * p.double() + (1 - self.weight) * q.double()

    def replacement(self, p: Tensor, q: Tensor) -> Tensor:
        """(..., V) (h − p)₊ normalised, which is (q − p)₊ normalised."""
        h = self.gamma(p, q)
        return _normalised((h - p.double()).clamp_min(0.0), otherwise=h)


@dataclass(frozen=True)
class TopK(OneReplacement):
    """Accept iff n is among the k likeliest tokens of q (ties with the k-th included); else draw from (1[top-k] − p)₊.

    Source: the official implementation of Cactus. No divergence is bounded; the replacement forgets q's own weights.
    """

    k: int

    name = "topk"

    def __post_init__(self):
        if self.k != int(self.k) or self.k < 1:
            raise ValueError(f"k must be a whole number from 1 up, got {self.k}.")

    def gamma(self, p: Tensor, q: Tensor) -> Tensor:
        """(..., V) 1 on the top-k tokens that q allows, else 0."""
        least = q.topk(min(int(self.k), q.shape[-1])).values[..., -1:]
        return ((q >= least) & (q > 0)).double()

    def replacement(self, p: Tensor, q: Tensor) -> Tensor:
        """(..., V) (1[top-k] − p)₊ normalised."""
        top = self.gamma(p, q)
        return _normalised((top - p.double()).clamp_min(0.0), otherwise=top)


@dataclass(frozen=True)
class Lenience(OneReplacement):
    """Accept with min(1, q(n)/(lenience·p(n))), else draw from (q − lenience·p)₊.

    Source: Leviathan et al. 2023, appendix A.5. Guarantee: h_alg(x) ≤ q(x)/lenience. lenience 1 is SpS.
    """

    lenience: float

    name = "lenience"

    def __post_init__(self):
        _check_range("lenience", self.lenience, 1e-9, 1)

    def gamma(self, p: Tensor, q: Tensor) -> Tensor:
        """(...) elementwise: q/lenience, at most 1."""
        return (q.double() / self.lenience).clamp_max(1.0)

    def replacement(self, p: Tensor, q: Tensor) -> Tensor:
        """(..., V) (q − lenience·p)₊ normalised."""
        return _normalised((q.double() - self.lenience * p.double()).clamp_min(0.0), otherwise=q.double())


@dataclass(frozen=True)
class Mentored(OneReplacement):
    """The best possible acceptance at a KL budget: sample losslessly from h = clip(p, q/Z, a·q/Z), KL(h ‖ q) = budget.

    Source: V. Tran-Thien, mentored decoding, 2023. h does not depend on n, but has to be searched for over the whole vocabulary.
    budget 0 is SpS; from KL(p ‖ q) on everything that q allows is accepted.
    """

    budget: float

    name = "mentored"

    def __post_init__(self):
        _check_range("budget", self.budget, 0, float("inf"))

    def gamma(self, p: Tensor, q: Tensor) -> Tensor:
        """(..., V) h itself."""
        return optimal(p, q, self.budget)

    def effective(self, p: Tensor, q: Tensor) -> Tensor:
        """(..., V) h: sampling is lossless for it."""
        check_distributions(p=p, q=q)
        return optimal(p, q, self.budget)

    def replacement(self, p: Tensor, q: Tensor) -> Tensor:
        """(..., V) (h − p)₊ normalised."""
        h = self.gamma(p, q)
        return _normalised((h - p.double()).clamp_min(0.0), otherwise=h)


@dataclass(frozen=True)
class Fuzzy(OneReplacement):
    """Accept whatever was drafted where JS(p, q) lies below a threshold, else draw from q.

    Source: Holsman et al. 2025, fuzzy speculative decoding. threshold 0 draws every token from q (lossless, but nothing is accepted);
    above ln 2 everything is. Each position is either p or q: where it is p, tokens outside the verifier's filters come out too.
    """

    threshold: float

    name = "fuzzy"

    def __post_init__(self):
        _check_range("threshold", self.threshold, 0, float("inf"))

    def gamma(self, p: Tensor, q: Tensor) -> Tensor:
        """(..., V) 1 on whole rows that are close enough, 0 on the others."""
        close = DIVERGENCES["js"].between(p, q) < self.threshold
        return close[..., None].double().expand(q.shape)

    def replacement(self, p: Tensor, q: Tensor) -> Tensor:
        """(..., V) q."""
        return q.double()


Rule = SpS | Cactus | OneReplacement


def accept_prob(rule: Rule, p: Tensor, q: Tensor) -> Tensor:
    """(..., V) phi = min(1, gamma/p) of every token, were it the drafted one; 1 where p is 0 and gamma is not."""
    check_distributions(p=p, q=q)
    gamma, p = rule.gamma(p, q), p.double()
    return torch.where(p > gamma, gamma / p, (gamma > 0).double())


def acceptance(rule: Rule, p: Tensor, q: Tensor) -> Tensor:
    """(...) expected acceptance of one drafted token, Σ min(p, gamma)."""
    check_distributions(p=p, q=q)
    return torch.minimum(p.double(), rule.gamma(p, q)).sum(-1)


def certificate(rule: Rule, p: Tensor, q: Tensor) -> Tensor:
    """(...) Σ h_alg ln(gamma/q) in nats, for SpS and Cactus: since h_alg(x) ≤ gamma(x), never below KL(h_alg ‖ q)."""
    h, gamma, q = rule.effective(p, q), rule.gamma(p, q), q.double()
    return torch.where(h > 0, torch.xlogy(h, gamma) - torch.xlogy(h, q), 0.0).sum(-1)


SEARCH = 60  # halvings when a multiplier of the optimum is searched for
WIDEST = 700.0  # ln of the largest ratio of the two multipliers: beyond it nothing changes in float64


def optimal(p: Tensor, q: Tensor, budget: float | Tensor) -> Tensor:
    """The h with KL(h ‖ q) ≤ budget that accepts most: clip(p, c·q, a·c·q), the frontier of mentored decoding.

    p, q: (..., V); budget: nats, a number or (...). Returns (..., V) float64. a is searched for so that the budget is met, c follows
    from a, both on prefix sums of the sorted rows.
    """
    rows = SortedRows(p, q)
    budget = torch.as_tensor(budget, dtype=torch.float64, device=p.device).expand(p.shape[:-1])[..., None]
    least, most = torch.zeros_like(rows.p[..., :1]), torch.full_like(rows.p[..., :1], WIDEST)
    for _ in range(SEARCH):
        middle = (least + most) / 2
        within = kl_divergence(rows.clipped(middle), rows.q)[..., None] <= budget
        least, most = torch.where(within, middle, least), torch.where(within, most, middle)
    return rows.unsort(rows.clipped(least))


class SortedRows:
    """Rows of p and q sorted by the ratio p/q, with what h_alg needs and no delta changes: sort once, then one
    O(V log V) pass for each gamma instead of a sum over every pair of tokens.

    (q·s − p)₊ is non-zero exactly where p/q < s, so the residual of a rejected n is a prefix of the sorted row.
    """

    def __init__(self, p: Tensor, q: Tensor):
        # Float32 rows sum to 1 only within rounding, which would show as divergence where there is none.
        p, q = (row.double() / row.double().sum(-1, keepdim=True) for row in (p, q))
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

    def clipped(self, log_a: Tensor) -> Tensor:
        """clip(p, c·q, a·c·q) in sorted order, with the c in [1/a, 1] that makes it sum to 1; log_a ≥ 0 broadcasts against (..., 1).

        a = 1 gives q, a → ∞ gives p on the support of q. The same a at several positions maximises their summed acceptance at a summed
        KL, since 1/ln a is the price of a nat.
        """
        a, p_below, q_below = log_a.exp(), self._p_below, self._q_below
        least, most = (-log_a).exp() + 0 * q_below[..., -1:], torch.ones_like(log_a) + 0 * q_below[..., -1:]
        shape = (*least.shape[:-1], -1)
        # Summed from the far end, so that nothing is left where nothing lies: a may magnify it without limit.
        q_above = torch.cat([self.q.flip(-1).cumsum(-1).flip(-1), torch.zeros_like(self.q[..., :1])], -1)
        ratio = self.ratio.expand(shape).contiguous()
        p_below, q_below, q_above = (mass.expand(shape) for mass in (p_below, q_below, q_above))
        c = most
        for _ in range(SEARCH):
            # The mass is piecewise linear in c: Newton's step lands on the root of its piece, halving guards the rest.
            low, high = torch.searchsorted(ratio, c), torch.searchsorted(ratio, a * c)
            below, above = q_below.gather(-1, low), q_above.gather(-1, high)
            excess = c * below + p_below.gather(-1, high) - p_below.gather(-1, low) + a * c * above - 1
            if (excess.abs() < 1e-15).all():
                break
            least, most = torch.where(excess >= 0, least, c), torch.where(excess >= 0, c, most)
            step = c - excess / (below + a * above)
            c = torch.where((step >= least) & (step <= most), step, least.sqrt() * most.sqrt())
        h = torch.minimum(torch.maximum(self.p, c * self.q), a * c * self.q)
        return h / h.sum(-1, keepdim=True)

    def unsort(self, values: Tensor) -> Tensor:
        """(..., V) values in sorted order, put back in vocabulary order."""
        return torch.zeros_like(values).scatter(-1, self.order, values)


def shift_logits_(logits: Tensor, n: Tensor, delta: float | Tensor) -> Tensor:
    """Cactus as one shifted logit, in place: softmax of the result is h, since only l[n] has to change,

        l'[n] = logsumexp over x≠n of l  +  ln gamma  −  ln(1 − gamma)  =  l[n]  +  ln(1 − q) − ln q  +  ln gamma − ln(1 − gamma).

    logits: (..., V) float, after temperature and filters; n: (...) drafted tokens; delta: a number or (...), one per row.
    Rows whose delta is 0 and rows where n alone or n never has probability are left as they are, to the bit: so a mask is a delta of 0, and
    ids that stand for no token must be replaced by one and masked. Returns logits. No value leaves the device, no shape depends on one.

    q is float32, yet h is as exact as q also where 1 − q is nothing but rounding: gamma is 1 there unless delta is smaller still, and then
    gamma is next to q.
    """
    delta = torch.as_tensor(delta, dtype=torch.float32, device=logits.device)
    before, q = _at(logits, n), _probability(logits, n)
    not_q, least = 1 - q, torch.finfo(torch.float32).tiny
    raise_by = (2 * delta * q * not_q).sqrt_()
    raised = before + ((not_q / q).log_() + (q + raise_by).clamp_max_(1).log_() - (not_q - raise_by).clamp_min_(least).log_())
    after = torch.where((delta > 0) & (q >= least) & (q < 1), raised.to(logits.dtype), before)
    return logits.scatter_(-1, n[..., None], after[..., None])


CPU_CHUNK, CHUNK = 1 << 18, 1 << 26  # logits exponentiated at a time: 1 MB stays in a core's cache; 256 MB on an accelerator


def _probability(logits: Tensor, n: Tensor) -> Tensor:
    """(...) float32, softmax at n, a few rows at a time so that no second copy of the logits is made."""
    rows = max(1, (CPU_CHUNK if logits.device.type == "cpu" else CHUNK) // logits.shape[-1])
    chunks = zip(logits.reshape(-1, logits.shape[-1]).split(rows), n.reshape(-1).split(rows), strict=True)
    return torch.cat([_at(torch.softmax(chunk, -1, dtype=torch.float32), ids) for chunk, ids in chunks]).view(n.shape)


def _at(rows: Tensor, n: Tensor) -> Tensor:
    return rows.gather(-1, n[..., None])[..., 0]


def _rest_scale(gamma: Tensor, q: Tensor) -> Tensor:
    """(1−gamma)/(1−q): what is left for the other tokens; 0 where q is 1 and there are none."""
    rest = 1 - q.double()
    return torch.where(rest > 0, (1 - gamma) / rest, 0.0).clamp_min(0.0)


def _sum_beyond(values: Tensor) -> Tensor:
    """(..., V+1) to (..., V): entry i becomes the sum of the entries after i."""
    return values.flip(-1).cumsum(-1).flip(-1)[..., 1:]


def _normalised(residual: Tensor, otherwise: Tensor) -> Tensor:
    """Rows scaled to sum 1; where a row is empty, `otherwise` scaled so."""
    mass = residual.sum(-1, keepdim=True)
    return torch.where(mass > 0, residual, otherwise) / torch.where(mass > 0, mass, otherwise.sum(-1, keepdim=True))


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must lie between {low:g} and {high:g}, got {value}.")
