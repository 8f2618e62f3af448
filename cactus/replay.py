"""Looking back at a run: what acceptance and divergence would be at other budgets, from the recorded rows, without any model.

Exact for the recorded contexts and only those: after the first changed decision a real run takes another path. Where rows end in a
lump (no top-k or top-p), acceptance is an upper and KL a lower bound.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cactus.divergences import kl, taylor_critical_delta
from cactus.rules import Cactus, Rule, SortedRows
from cactus.trace import DraftedToken, Round

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
        self.judged = torch.tensor([token.judged for token in self.tokens], dtype=torch.bool)

    def _column(self, name: str) -> Tensor:
        return torch.tensor([getattr(token, name) for token in self.tokens], dtype=torch.float64)

    def acceptance(self, rules: Sequence[Rule]) -> Tensor:
        """(R, N) expected acceptance Σ min(p, gamma) at every drafted position, for each rule."""
        return torch.minimum(self.rows.p, self._gammas(rules)).sum(-1)

    def divergence(self, rules: Sequence[Rule]) -> Tensor:
        """(R, N) KL(h_alg ‖ q) in nats at every drafted position, for each rule."""
        if all(isinstance(rule, Cactus) for rule in rules):
            return kl(self.rows.effective(self._gammas(rules)), self.rows.q)
        return torch.stack([kl(rule.effective(self.rows.p, self.rows.q), self.rows.q) for rule in rules])

    def phi(self, rules: Sequence[Rule]) -> Tensor:
        """(R, N) acceptance probability of each drafted token itself."""
        drafted = torch.stack([rule.gamma_at(*self._drafted_in_rows()) for rule in rules])
        return torch.minimum(drafted / self.p, torch.ones_like(drafted))

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

    def _gammas(self, rules: Sequence[Rule]) -> Tensor:
        return torch.stack([rule.gamma(self.rows.p, self.rows.q) for rule in rules])

    def _drafted_in_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        places = torch.tensor([token.row.at(token.id) for token in self.tokens], dtype=torch.long)
        # Rows are sorted by p/q: the drafted token stands where its place in the recorded row went.
        sorted_place = (self.rows.order == places[:, None]).long().argmax(-1) if self.tokens else places
        return self.rows.p, self.rows.q, sorted_place


def _reachable(drafted: Sequence[DraftedToken], eos_ids: Sequence[int]) -> list[DraftedToken]:
    end = next((i + 1 for i, token in enumerate(drafted) if token.id in eos_ids), len(drafted))
    return list(drafted[:end])
