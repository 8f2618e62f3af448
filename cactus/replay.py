"""Looking back at a run: what acceptance and divergence would be at other budgets, from the recorded rows, without any model.

Exact for the recorded contexts and only those: after the first changed decision a real run takes another path. Where rows end in a
lump (no top-k or top-p), acceptance is an upper and KL a lower bound.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cactus.divergences import DIVERGENCES, entropy, kl, taylor_critical_delta
from cactus.rules import TAS, Cactus, Fuzzy, Interpolation, Lenience, Mentored, Rule, SortedRows, SpS, TopK, certificate
from cactus.trace import DraftedToken, Round, Trace

GRID = (
    0.0, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.07,
    0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0,
)  # fmt: skip
"""The budgets that the page's slider and curves offer: roughly logarithmic, every value a round number."""


class Replay:
    """The drafted tokens of some rounds as tensors: N tokens, rows padded to V entries with the lump last.

    Tokens drafted after an end token are left out: no rule could ever reach them.
    """

    def __init__(self, rounds: Iterable[Round], eos_ids: Sequence[int]):
        self.blocks = [_reachable(round.drafted, eos_ids) for round in rounds]
        self.tokens = [token for block in self.blocks for token in block]
        width = max((len(token.row.ids) for token in self.tokens), default=0) + 1
        p, q = torch.zeros(2, len(self.tokens), width, dtype=torch.float64)
        for i, token in enumerate(self.tokens):
            size = len(token.row.ids)
            p[i, :size], q[i, :size] = torch.tensor(token.row.p), torch.tensor(token.row.q)
            p[i, -1], q[i, -1] = token.row.p_rest, token.row.q_rest
        self.rows = SortedRows(p, q)
        self.p, self.q, self.u = (self._column(name) for name in ("p", "q", "u"))
        self._known: dict[Rule, Tensor] = {}
        self.judged = torch.tensor([token.judged for token in self.tokens], dtype=torch.bool)

    def _column(self, name: str) -> Tensor:
        return torch.tensor([getattr(token, name) for token in self.tokens], dtype=torch.float64)

    def acceptance(self, rules: Sequence[Rule]) -> Tensor:
        """(R, N) expected acceptance Σ min(p, gamma) at every drafted position, for each rule."""
        return torch.minimum(self.rows.p, self._gammas(rules)).sum(-1)

    def effective(self, rules: Sequence[Rule]) -> Tensor:
        """(R, N, V) h_alg of each rule at every drafted position, in the order of the sorted rows."""
        if all(isinstance(rule, SpS) for rule in rules):
            return self.rows.effective(self._gammas(rules))
        return torch.stack([rule.effective(self.rows.p, self.rows.q) for rule in rules])

    def divergence(self, rules: Sequence[Rule]) -> Tensor:
        """(R, N) KL(h_alg ‖ q) in nats at every drafted position, for each rule."""
        return kl(self.effective(rules), self.rows.q)

    def phi(self, rules: Sequence[Rule]) -> Tensor:
        """(R, N) acceptance probability of each drafted token itself."""
        return (self._drafted_gammas(rules) / self.p).clamp_max(1.0)

    def expected_lengths(self, rules: Sequence[Rule]) -> Tensor:
        """(R, B) expected accepted tokens of each block, given its start: Σ_k (Π_{i<k} phi_i) alpha_k over its drafted tokens."""
        alpha, phi, lengths = self.acceptance(rules), self.phi(rules), []
        start = 0
        for block in self.blocks:
            end = start + len(block)
            reached = torch.cat([torch.ones(len(rules), 1, dtype=torch.float64), phi[:, start:end].cumprod(-1)[:, :-1]], -1)
            lengths.append((reached[:, : len(block)] * alpha[:, start:end]).sum(-1))
            start = end
        return torch.stack(lengths, -1) if lengths else torch.zeros(len(rules), 0, dtype=torch.float64)

    def critical_deltas(self) -> list[float | None]:
        """Per drafted token the Taylor rule's delta beyond which its own draw accepts it: 0 if SpS does, None if q excludes it."""
        values = taylor_critical_delta(self.q, self.u * self.p).tolist()
        return [None if value == float("inf") else value for value in values]

    def limits(self) -> Tensor:
        """(N,) KL(p ‖ q) in nats, which no Cactus run can pass; infinite where the draft puts mass on what the verifier's filters cut."""
        return kl(self.rows.p, self.rows.q)

    def certificates(self, rule: SpS) -> Tensor:
        """(N,) Σ h_alg ln(gamma/q) of SpS or Cactus: never below KL(h_alg ‖ q), and no sum over drafted tokens is needed for it."""
        return certificate(rule, self.rows.p, self.rows.q)

    def critical_blocks(self) -> list[list[float | None]]:
        """critical_deltas, block by block."""
        values = iter(self.critical_deltas())
        return [[next(values) for _ in block] for block in self.blocks]

    def _gammas(self, rules: Sequence[Rule]) -> Tensor:
        """(R, N, V) in the order of the sorted rows; each rule's once, since some search for it."""
        for rule in rules:
            if rule not in self._known:
                self._known[rule] = rule.gamma(self.rows.p, self.rows.q)
        return torch.stack([self._known[rule] for rule in rules])

    def _drafted_gammas(self, rules: Sequence[Rule]) -> Tensor:
        """(R, N) gamma of the drafted token, which stands where the sorting put it."""
        places = torch.tensor([token.row.at(token.id) for token in self.tokens], dtype=torch.long)
        sorted_places = (self.rows.order == places[:, None]).long().argmax(-1) if self.tokens else places
        gammas = self._gammas(rules)
        return gammas.gather(-1, sorted_places.expand(len(rules), -1)[..., None])[..., 0]


@dataclass(frozen=True)
class Outlook:
    """What a rule would do at the recorded contexts: means over judged positions, but expected_al over verifier passes.

    acceptance: Σ min(p, gamma); kl, tv: of h_alg from q; own: the divergence that the rule's delta limits (kl where it names none);
    entropy: of h_alg, entropy_q: of q, all in nats but tv; rescued and lost: judged tokens that the same draws would accept although
    they were rejected, or reject although they were kept.
    """

    rule: Rule
    acceptance: float
    expected_al: float
    kl: float
    tv: float
    own: float
    entropy: float
    entropy_q: float
    rescued: int
    lost: int


def outlook(trace: Trace, rules: Sequence[Rule]) -> list[Outlook]:
    """Every rule at the contexts of `trace`, no model run. Raises ValueError for a trace that judged no token."""
    replay = _judged(trace)
    judged, q = replay.judged, replay.rows.q[replay.judged]
    h = replay.effective(rules)[:, judged]
    accepted = replay.u * replay.p < replay._drafted_gammas(rules)
    kept = torch.tensor([token.kept for token in replay.tokens])
    columns = (
        replay.acceptance(rules)[:, judged].mean(-1),
        replay.expected_lengths(rules).mean(-1),
        kl(h, q).mean(-1),
        DIVERGENCES["tv"].between(h, q).mean(-1),
        torch.stack(
            [DIVERGENCES[getattr(rule, "divergence", "kl")].between(one, q).mean() for rule, one in zip(rules, h, strict=True)]
        ),
        entropy(h).mean(-1),
        entropy(q).mean().expand(len(rules)),
        (accepted & ~kept & judged).sum(-1),
        (~accepted & kept & judged).sum(-1),
    )
    return [Outlook(rule, *(column[i].item() for column in columns)) for i, rule in enumerate(rules)]


@dataclass(frozen=True)
class Family:
    """A rule along its own parameter."""

    label: str
    make: Callable[[float], Rule]
    parameters: tuple[float, ...]


FAMILIES = (
    Family("SpS", lambda _: SpS(), (0.0,)),
    Family("Cactus (Taylor)", Cactus, (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0)),
    Family("Cactus (exact KL)", lambda delta: Cactus(delta, "exact"), (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0)),
    Family("Typical acceptance", lambda epsilon: TAS(epsilon, math.sqrt(epsilon)), (0.01, 0.03, 0.09, 0.2, 0.3, 0.5)),
    Family("Interpolation", Interpolation, (0.05, 0.1, 0.25, 0.5, 0.75)),
    Family("Top-k acceptance", lambda k: TopK(int(k)), (1, 2, 3, 5, 10)),
    Family("Lenience", Lenience, (0.9, 0.7, 0.5, 0.3, 0.1)),
    Family("Mentored", Mentored, (0.003, 0.01, 0.03, 0.1, 0.2)),
    Family("Fuzzy", Fuzzy, (0.02, 0.05, 0.1, 0.2, 0.4)),
)
WIDTHS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)  # ln a along the optimum


@dataclass(frozen=True)
class Gain:
    """How much of what was possible a rule takes at its own divergence: its acceptance beyond SpS over that of the best rule at the
    same mean KL, and over that of the best at the same mean TV (interpolation); None where there is nothing to gain."""

    outlook: Outlook
    parameter: float
    of_kl_optimum: float | None
    of_tv_optimum: float | None


def frontier(trace: Trace, families: Sequence[Family] = FAMILIES) -> dict[str, list[Gain]]:
    """Acceptance against divergence for every rule along its own parameter, by label; each with its share of the possible gain."""
    base = outlook(trace, [SpS()])[0].acceptance
    points = {family.label: outlook(trace, [family.make(value) for value in family.parameters]) for family in families}
    # zip asks for a parameter first, so none of these is lost between families.
    best = iter(best_acceptance(_judged(trace), [point.kl for row in points.values() for point in row]))
    return {
        family.label: [
            Gain(
                point,
                parameter,
                _share(point.acceptance - base, accepted - base) if math.isfinite(point.kl) else None,
                _share(point.acceptance - base, min(point.tv, 1 - base)),
            )
            for parameter, point, accepted in zip(family.parameters, points[family.label], best, strict=False)
        ]
        for family in families
    }


def optimum_curve(trace: Trace) -> list[tuple[float, float]]:
    """(mean KL, mean acceptance) along the best possible rule: no rule lies above it."""
    spent, accepted = _optimum(_judged(trace), torch.tensor(WIDTHS, dtype=torch.float64))
    return list(zip(spent.tolist(), accepted.tolist(), strict=True))


def best_acceptance(replay: Replay, budgets: Sequence[float]) -> list[float]:
    """For each budget the highest mean acceptance over judged positions at a mean KL of at most so many nats: the multiplier is one for
    all positions, since a nat should buy the same everywhere."""
    budget = torch.tensor(budgets, dtype=torch.float64)
    least, most = torch.zeros_like(budget), torch.full_like(budget, WIDTHS[-1])
    for _ in range(40):
        middle = (least + most) / 2
        within = _optimum(replay, middle)[0] <= budget
        least, most = torch.where(within, middle, least), torch.where(within, most, middle)
    return _optimum(replay, least)[1].tolist()


def _optimum(replay: Replay, widths: Tensor) -> tuple[Tensor, Tensor]:
    """Mean KL and mean acceptance over judged positions of the optimum at each ln a of (W,) widths."""
    h = replay.rows.clipped(widths[:, None, None])
    spent, accepted = kl(h, replay.rows.q), torch.minimum(replay.rows.p, h).sum(-1)
    return spent[:, replay.judged].mean(-1), accepted[:, replay.judged].mean(-1)


def _share(gained: float, possible: float) -> float | None:
    return gained / possible if possible > 1e-9 else None


LARGEST_DELTA = 1e6


def auto_delta(trace: Trace, *, kl_budget: float | None = None, al: float | None = None) -> float:
    """The largest delta whose mean KL(h_alg ‖ q) stays within `kl_budget` nats on this trace, or the smallest whose expected acceptance
    length reaches `al` (Taylor rule; both are non-decreasing in delta).

    Raises ValueError unless exactly one wish is given, and where no delta meets it, with the range that can be had.
    """
    if (kl_budget is None) == (al is None):
        raise ValueError("Give either a KL budget per token or a wished acceptance length.")
    wish, name = (kl_budget, "kl") if al is None else (al, "expected_al")

    def value(delta: float) -> float:
        return getattr(outlook(trace, [Cactus(delta)])[0], name)

    low, high = value(0.0), value(LARGEST_DELTA)
    if al is not None and not low <= wish <= high:
        raise ValueError(
            f"On this trace the expected acceptance length lies between {low:.3f} (SpS) and {high:.3f}, not at {wish:g}."
        )
    if kl_budget is not None and not wish >= 0:
        raise ValueError(f"A KL budget is a number of nats from 0 up, got {wish:g}.")
    if kl_budget is not None and wish >= high:
        return LARGEST_DELTA
    least, most = 0.0, LARGEST_DELTA
    for _ in range(80):
        # Budgets span many orders: halve the exponent where there is one, the value near 0.
        middle = math.sqrt(least * most) if least > 0 else most / 1000 if most > 1e-12 else 0.0
        below = value(middle) <= wish if al is None else value(middle) < wish
        least, most = (middle, most) if below else (least, middle)
    return least if al is None else most


def first_difference(one: Trace, other: Trace) -> tuple[int, str] | None:
    """Where two runs on one prompt and seed part: the index of the token, and what differs there first: "verdict" (one accepted what the
    other rejected), "replacement" (both rejected, another token came), or "length" (one goes on where the other ended). None if they
    never do."""
    ours, theirs = ([token for round in trace.rounds for token in round.emitted] for trace in (one, other))
    for a, b in zip(ours, theirs, strict=False):
        if a.id != b.id:
            drafted = isinstance(a, DraftedToken), isinstance(b, DraftedToken)
            return a.index, "verdict" if drafted[0] != drafted[1] else "replacement"
    return None if len(ours) == len(theirs) else (min(len(ours), len(theirs)), "length")


def _judged(trace: Trace) -> Replay:
    replay = Replay(trace.rounds, trace.eos_ids)
    if not replay.judged.any():
        raise ValueError("This trace judged no drafted token, so there is nothing to look back at.")
    return replay


def _reachable(drafted: Sequence[DraftedToken], eos_ids: Sequence[int]) -> list[DraftedToken]:
    end = next((i + 1 for i, token in enumerate(drafted) if token.id in eos_ids), len(drafted))
    return list(drafted[:end])
