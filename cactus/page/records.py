"""From rounds to the lines the viewer draws: an append-only log, one JSON object per line. Nothing here knows a model or Gradio.

"run" (panes, grid, prompt and its ids, settings, source, the pair that made it), "round" (one verifier pass of one pane, with the pane's
numbers so far), "baseline" (the verifier alone), "frontier" (every rule at the contexts of SpS), "end" (of one pane). assets/viewer.js
and assets/rejudge.js read them.
"""

import json
import math
from collections.abc import Sequence
from itertools import zip_longest

import torch

from cactus.divergences import KL
from cactus.metrics import RoundFigures, Summary, figures, summarise, summary
from cactus.page.choices import described, name_of
from cactus.pairs import identity
from cactus.replay import FAMILIES, GRID, Replay, optimum_curve, outlook
from cactus.rules import Cactus, Rule, SpS
from cactus.sampling import REPLACE, draw, run_key, uniform
from cactus.trace import DraftedToken, Piece, Round, Row, Trace

TOP = 8  # tokens of a row that the detail shows
# The budgets of the sentence guarantee.growth, at which a token's detail shows the divergence of its position.
GROWTH_RULES = tuple(Cactus(delta) for delta in (0.01, 0.1, 0.5, 2.0))
GRID_RULES = tuple(Cactus(delta) for delta in GRID)


def recorded_log(traces: Sequence[Trace], alone: Trace | None) -> str:
    """The log of finished traces: panes in the order given, and the verifier alone as baseline."""
    panes = [Pane(i, trace) for i, trace in enumerate(traces)]
    lines = [run_line(traces, live=False)]
    for rounds in zip_longest(*(trace.rounds for trace in traces)):
        lines += [pane.round_line(round) for pane, round in zip(panes, rounds, strict=True) if round]
    if alone:
        lines.append(baseline_line(summary(alone).tokens_per_s))
    lines += frontier_lines(traces[0])
    lines += [end_line(i, trace.stop) for i, trace in enumerate(traces)]
    return "\n".join(lines) + "\n"


def run_line(traces: Sequence[Trace], live: bool) -> str:
    """The first line of a log: what runs, where, and since when."""
    settings, about = traces[0].settings, traces[0].provenance
    sampling = settings.sampling
    return _dump({
        "k": "run",
        "live": live,
        "source": f"{about['date'][:10]} · verifier: {about['verifier']} · draft: {about['draft']} · {about['device']}",
        "panes": [described(trace.rule) for trace in traces],
        "grid": GRID,
        "prompt": traces[0].prompt,
        "prompt_ids": traces[0].prompt_ids,
        "made_by": identity(about),
        "settings": {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "num_draft_tokens": settings.num_draft_tokens,
            "auto": settings.costs is not None,
            "max_new_tokens": settings.max_new_tokens,
            "seed": settings.seed,
        },
    })  # fmt: skip


def baseline_line(tokens_per_s: float | None) -> str:
    """Tokens per second of the verifier alone, against which speed-ups are taken."""
    return _dump({"k": "baseline", "tokens_per_s": tokens_per_s})


def frontier_lines(trace: Trace) -> list[str]:
    """Acceptance against KL for every rule along its own parameter, and for the best possible, at the judged positions of `trace`: one
    line, or none where nothing was judged or the contexts are not the verifier's own. Points of infinite KL are left out."""
    if trace.rule.name != "sps" or not any(token.judged for token in trace.drafted):
        return []
    rules = [
        {
            "rule": name_of(family.make(family.parameters[0])),
            "label": family.label,
            "points": [
                {"x": _round(point.kl), "y": _round(point.acceptance), "parameter": parameter}
                for parameter, point in zip(
                    family.parameters, outlook(trace, [family.make(value) for value in family.parameters]), strict=True
                )
                if math.isfinite(point.kl)
            ],
        }
        for family in FAMILIES
    ]
    optimum = [{"x": _round(x), "y": _round(y)} for x, y in optimum_curve(trace)]
    return [_dump({"k": "frontier", "contexts": "SpS", "rules": [rule for rule in rules if rule["points"]], "optimum": optimum})]


class Pane:
    """One run as it is shown: its lines, and the numbers under it so far."""

    def __init__(self, number: int, trace: Trace):
        self.number, self.trace = number, trace
        self.figures: list[RoundFigures] = []

    def round_line(self, round: Round) -> str:
        """One verifier pass. The curves over delta are drawn on SpS contexts, which are the verifier's own."""
        self.figures.append(figures(round, self.trace.rule, self.trace.eos_ids))
        replay = Replay([round], self.trace.eos_ids)
        rule, key = self.trace.rule, run_key(self.trace.settings.seed, self.trace.settings.prompt_id)
        columns = (
            replay.critical_deltas(),
            replay.limits().tolist(),
            self._costs(replay),
            self._certificates(replay),
            replay.divergence(GROWTH_RULES).T.tolist(),
        )
        extras = [
            {"dc": dc, "klp": _round(limit), "klh": _round(cost), "cert": _round(bound), "grow": [_round(kl) for kl in growth]}
            for dc, limit, cost, bound, growth in zip(*columns, strict=True)
        ]
        behind_end = {"dc": None, "klp": None, "klh": None, "cert": None, "grow": None}
        kls = iter(self.figures[-1].kls)
        return _dump({
            "k": "round",
            "pane": self.number,
            "block": round.block,
            "drafted": [
                _drafted(token, extra, next(kls) if token.judged else None, _alternative(token, rule, key))
                for token, extra in zip_longest(round.drafted, extras, fillvalue=behind_end)
            ],
            "emitted": _replacement(round),
            "stats": _stats(summarise(self.figures)),
            "curve": _curve(replay) if rule.name == "sps" else None,
        })  # fmt: skip

    def _costs(self, replay: Replay) -> list[float | None]:
        """KL(h ‖ q) of each drafted token's own target, for rules that have one."""
        if not isinstance(self.trace.rule, SpS):
            return [None] * len(replay.tokens)
        gamma = torch.tensor([token.gamma for token in replay.tokens], dtype=torch.float64)
        return KL.binary(gamma, replay.q).tolist()

    def _certificates(self, replay: Replay) -> list[float | None]:
        """What KL(h_alg ‖ q) can never pass at each position, for rules that have such a bound."""
        rule = self.trace.rule
        return replay.certificates(rule).tolist() if isinstance(rule, SpS) else [None] * len(replay.tokens)


def end_line(pane: int, reason: str, message: str | None = None) -> str:
    """Why a pane ended: eos, length, stopped or error."""
    return _dump({"k": "end", "pane": pane, "reason": reason, "message": message})


def _stats(numbers: Summary) -> dict:
    infinite = numbers.kl is not None and math.isinf(numbers.kl)
    return {name: _round(value) for name, value in numbers.to_json().items()} | {"kl_infinite": infinite}


def _curve(replay: Replay) -> dict:
    spent = replay.divergence(GRID_RULES)[:, replay.judged].sum(-1)
    return {
        "expected_al": [_round(value) for value in replay.expected_lengths(GRID_RULES)[:, 0].tolist()],
        "kl": [_round(value) for value in spent.tolist()],
        "judged": int(replay.judged.sum()),
    }


def _drafted(token: DraftedToken, extra: dict, kl: float | None, alternative: list | None) -> dict:
    # p, q and u go out whole: the page repeats the verdicts, and a rounded one could differ.
    numbers = {"p": token.p, "q": token.q, "g": token.gamma, "u": token.u, "kl": _round(kl), "alt": alternative}
    return {"i": token.index, "id": token.id, "c": token.outcome} | _piece(token.piece) | numbers | extra | _row(token.row)


def _alternative(token: DraftedToken, rule: Rule, key: tuple[int, int]) -> list | None:
    """What would be drawn here if this token were rejected: [id, text]. None where the row is cut, or the token has no text in it."""
    row = token.row
    if row.p_rest or row.q_rest:
        return None
    # The decoder draws over the whole vocabulary in its own order; zeros between the ids change nothing.
    order = sorted(range(len(row.ids)), key=row.ids.__getitem__)
    p, q = (torch.tensor([column[i] for i in order], dtype=torch.float32) for column in (row.p, row.q))
    law = rule.recovery(p, q, torch.tensor(order.index(row.at(token.id))))
    place = order[draw(law, torch.tensor(uniform(key, REPLACE, token.index), dtype=torch.float64)).item()]
    return [row.ids[place], row.texts[place]] if place < len(row.texts) else None


def _replacement(round: Round) -> dict | None:
    token = round.replacement
    if not token:
        return None
    # A resampled token shares the row of the rejected one it replaces.
    row = token.row or next(drafted.row for drafted in round.drafted if drafted.outcome == "rejected")
    place = row.at(token.id)
    numbers = {"p": row.p[place] if row.p and place is not None else None, "q": token.q}
    return {"i": token.index, "id": token.id, "c": token.outcome} | _piece(token.piece) | numbers | _row(row)


def _piece(piece: Piece) -> dict:
    return {"t": piece.text} | ({"x": piece.hex} if piece.hex else {}) | ({"sp": True} if piece.special else {})


def _row(row: Row) -> dict:
    p = row.p or (None,) * len(row.ids)
    shown = list(zip(row.ids, row.texts, p, row.q, strict=False))[:TOP]
    rest = [
        _round(max(0.0, 1 - sum(entry[2] for entry in shown))) if row.p else None,
        _round(max(0.0, 1 - sum(e[3] for e in shown))),
    ]
    return {
        "top": [[token, text, _round(x), _round(y)] for token, text, x, y in shown],
        "rest": rest,
        "lumped": row.p_rest > 0 or row.q_rest > 0,
    }


def _round(value: float | None) -> float | None:
    """Seven digits; None for what JSON cannot hold."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")


def _dump(data: dict) -> str:
    line = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return line.replace("<", "\\u003c")  # the log travels inside the page's own script once: no token may end it
