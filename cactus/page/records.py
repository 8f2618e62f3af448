"""From rounds to the lines the viewer draws: an append-only log, one JSON object per line. Nothing here knows a model or Gradio.

"run" (panes, grid, prompt, settings, source), "round" (one verifier pass of one pane, with the pane's numbers so far), "baseline" (the
verifier alone), "end" (of one pane). assets/viewer.js and assets/rejudge.js read them.
"""

import json
from collections.abc import Sequence
from itertools import zip_longest

from cactus.metrics import RoundFigures, figures, summarise, summary
from cactus.replay import GRID, Replay
from cactus.rules import Cactus
from cactus.trace import DraftedToken, Piece, Round, Row, Trace

TOP = 8  # tokens of a row that the detail shows
LABELS = {"sps": "SpS", "cactus": "Cactus", "tas": "Typical acceptance"}
GRID_RULES = tuple(Cactus(delta) for delta in GRID)


def recorded_log(traces: Sequence[Trace], alone: Trace | None) -> str:
    """The log of finished traces: panes in the order given, and the verifier alone as baseline."""
    panes = [Pane(i, trace) for i, trace in enumerate(traces)]
    lines = [run_line(traces, live=False)]
    for rounds in zip_longest(*(trace.rounds for trace in traces)):
        lines += [pane.round_line(round) for pane, round in zip(panes, rounds, strict=True) if round]
    if alone:
        lines.append(baseline_line(summary(alone).tokens_per_s))
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
        "panes": [{"rule": t.rule.name, "label": LABELS[t.rule.name], "delta": getattr(t.rule, "delta", 0)} for t in traces],
        "grid": GRID,
        "prompt": traces[0].prompt,
        "settings": {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "num_draft_tokens": settings.num_draft_tokens,
            "max_new_tokens": settings.max_new_tokens,
            "seed": settings.seed,
        },
    })  # fmt: skip


def baseline_line(tokens_per_s: float | None) -> str:
    """Tokens per second of the verifier alone, against which speed-ups are taken."""
    return _dump({"k": "baseline", "tokens_per_s": tokens_per_s})


class Pane:
    """One run as it is shown: its lines, and the numbers under it so far."""

    def __init__(self, number: int, trace: Trace):
        self.number, self.trace = number, trace
        self.figures: list[RoundFigures] = []

    def round_line(self, round: Round) -> str:
        """One verifier pass. The curves over delta are drawn on SpS contexts, which are the verifier's own."""
        self.figures.append(figures(round, self.trace.rule, self.trace.eos_ids))
        replay = Replay([round], self.trace.eos_ids)
        critical = iter(replay.critical_deltas())
        kls = iter(self.figures[-1].kls)
        reached = len(replay.tokens)
        return _dump({
            "k": "round",
            "pane": self.number,
            "block": round.block,
            "drafted": [
                _drafted(token, next(critical) if i < reached else None, next(kls) if token.judged else None)
                for i, token in enumerate(round.drafted)
            ],
            "emitted": _replacement(round),
            "stats": {name: _round(value) for name, value in summarise(self.figures).to_json().items()},
            "curve": _curve(replay) if self.trace.rule.name == "sps" else None,
        })  # fmt: skip


def end_line(pane: int, reason: str, message: str | None = None) -> str:
    """Why a pane ended: eos, length, stopped or error."""
    return _dump({"k": "end", "pane": pane, "reason": reason, "message": message})


def _curve(replay: Replay) -> dict:
    spent = replay.divergence(GRID_RULES)[:, replay.judged].sum(-1)
    return {
        "expected_al": [_round(value) for value in replay.expected_lengths(GRID_RULES)[:, 0].tolist()],
        "kl": [_round(value) for value in spent.tolist()],
        "judged": int(replay.judged.sum()),
    }


def _drafted(token: DraftedToken, critical: float | None, kl: float | None) -> dict:
    # p, q and u go out whole: the page repeats the verdicts, and a rounded one could differ.
    numbers = {"p": token.p, "q": token.q, "g": token.gamma, "u": token.u, "dc": critical, "kl": _round(kl)}
    return {"i": token.index, "id": token.id, "c": token.outcome} | _piece(token.piece) | numbers | _row(token.row)


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
    return None if value is None else float(f"{value:.7g}")


def _dump(data: dict) -> str:
    line = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return line.replace("<", "\\u003c")  # the log travels inside the page's own script once: no token may end it
