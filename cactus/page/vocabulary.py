"""Every value of one position, asked of the loaded models: what a token's detail shows beyond the rows that the log holds.

The browser sends the ids of the context; whatever is wrong with them, or with the moment, comes back as one sentence.
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import TimeoutError
from dataclasses import dataclass
from functools import lru_cache
from heapq import nsmallest
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from cactus.page import comparison, door
from cactus.page.models import MODEL_THREAD
from cactus.page.strings import STRINGS
from cactus.pairs import AnyModel, Pair, identity
from cactus.rules import Rule, SpS
from cactus.sampling import Sampling, warp
from cactus.text import Transcript

ROWS = 300  # tokens in one answer; a search finds the others
COLUMNS = ("p", "q", "h", "p_raw", "q_raw")
LARGEST = "largest"  # the order by the larger of p and q
KEPT = 8  # positions that can be searched without the models
WAIT_S = 2.0
PIECE = 1024  # ids read at a time: the models must not be held much longer than READ_S
READ_S = 20.0
MAX_CHARS = 100
GPU_SECONDS = 30
SHOWN_AS = str.maketrans("⏎→·", "\n\t ")  # how the page writes what has no glyph

_kept: OrderedDict["Position", Tensor] = OrderedDict()
_one_at_a_time = Lock()


@dataclass(frozen=True)
class Position:
    """Where a run stood: what made it, the ids before the position, how many of them the draft read at a time, and the token
    drafted there (None: the verifier's own turn)."""

    made_by: tuple[tuple[str, str], ...]
    ids: tuple[int, ...]
    steps: tuple[int, ...]
    sampling: Sampling
    rule: Rule
    drafted: int | None


def answer(asked: Any, generating: bool) -> dict:
    """The rows of one position that a visitor searches: {columns, rows [[id, text, *values]], found, positive, size, sums, at}, or
    {error: a sentence}.

    asked: {made_by, ids, steps, token, drafted, rule, delta, parameter, temperature, top_k, top_p, find, by} as a browser sent it.
    found: tokens whose text or id matches, all for an empty search; at most ROWS of them come back, whole matches first, then by the
    column `by`. positive: tokens with p or q above 0; sums: over what was found; at: p and q of `token`. generating: whether a run has
    the models, which this never waits for.
    """
    try:
        position, token, find, by = _checked(asked)
        pair = _pair(position)
        _check_ids(pair, [*position.ids, token])
        return _page(_columns(position, generating), _names(pair.tokenizer, pair.verifier.vocab_size), token, find, by)
    except (ValueError, RuntimeError) as error:
        return {"error": str(error)}


def _checked(asked: Any) -> tuple[Position, int, str, str]:
    """Types and ranges, as far as they can be told without the pair. Raises ValueError with a sentence."""
    if not isinstance(asked, dict):
        raise ValueError(STRINGS["values.malformed"])
    made_by, ids, steps, token, find, by = (asked.get(name) for name in ("made_by", "ids", "steps", "token", "find", "by"))
    rule = asked.get("rule")
    shaped = (
        isinstance(made_by, dict)
        and all(isinstance(text, str) for text in made_by.values())
        and isinstance(ids, list)
        and isinstance(steps, list)
        and all(type(number) is int for number in (*ids, *steps, token))
        and all(step > 0 for step in steps)
        and sum(steps) == len(ids)
        and isinstance(asked.get("drafted"), bool)
        and all(isinstance(text, str) and len(text) <= MAX_CHARS for text in (find, by, rule))
    )
    if not shaped:
        raise ValueError(STRINGS["values.malformed"])
    if by not in (LARGEST, *COLUMNS):
        raise ValueError(STRINGS["values.column"].format(names=", ".join((LARGEST, *COLUMNS))))
    delta = asked.get("delta")
    if delta is not None:
        door.within(delta, 0, door.MAX_DELTA, STRINGS["control.delta"])
    sampling = Sampling(
        door.number(asked.get("temperature")), door.whole(asked.get("top_k"), "Top-k"), door.number(asked.get("top_p"))
    )
    judged_by = door.rule(rule, delta, asked.get("parameter"))
    position = Position(
        tuple(sorted(made_by.items())), tuple(ids), tuple(steps), sampling, judged_by, token if asked["drafted"] else None
    )
    return position, token, find, by


def _pair(position: Position) -> Pair:
    """The pair in memory, if it is the one that made the run. Raises ValueError with a sentence where it is not."""
    models = comparison.models
    pair = models.loaded()
    if pair and position.made_by == tuple(sorted(identity(pair.provenance).items())):
        return pair
    if pair:
        raise ValueError(STRINGS["values.other_pair"].format(pair=pair.name))
    raise ValueError(STRINGS["values.loading" if models.busy() else "values.not_loaded"])


def _check_ids(pair: Pair, ids: list[int]) -> None:
    if not 1 < len(ids) <= pair.max_length + 1:
        raise ValueError(STRINGS["values.length"].format(length=len(ids) - 1, limit=pair.max_length))
    if not all(0 <= number < pair.verifier.vocab_size for number in ids):
        raise ValueError(STRINGS["values.ids"].format(last=pair.verifier.vocab_size - 1))


def _columns(position: Position, generating: bool) -> Tensor:
    """(4 or 5, V) of the position, computed once. Raises ValueError where the models have other work."""
    kept = _kept.get(position)
    if kept is not None:
        return kept
    if generating or not _one_at_a_time.acquire(timeout=WAIT_S):
        raise ValueError(STRINGS["values.busy"])
    try:
        # A pair that is being loaded has the thread as well: what has not begun by then is given up.
        work = MODEL_THREAD.submit(columns_at, position)
        try:
            columns = work.result(WAIT_S)
        except TimeoutError:
            if work.cancel():
                raise ValueError(STRINGS["values.busy"]) from None
            columns = work.result()
        _kept[position] = columns
        if len(_kept) > KEPT:
            _kept.popitem(last=False)
        return columns
    finally:
        _one_at_a_time.release()


@torch.inference_mode()
def columns_at(position: Position) -> Tensor:
    """Reads the context with both models, if that is done within READ_S: (5, V) float64 on the CPU, rows as in COLUMNS; without h,
    (4, V), where nothing was drafted. Raises ValueError with a sentence.

    p and q are warped as in the run; p_raw and q_raw are at temperature 1 without filters. h is the target of the drafted token for
    rules that have one, h_alg for the others.
    """
    pair, until = _pair(position), time.monotonic() + READ_S
    ids = torch.tensor(position.ids)
    rows = [_read(pair.draft, ids.split(position.steps), until), _read(pair.verifier, [ids], until)]
    p, q = (warp(row, position.sampling) for row in rows)
    columns = [p, q, *_law(position, p, q), *(row.double().softmax(-1) for row in rows)]
    return torch.stack([column.double() for column in columns]).cpu()


def _read(model: AnyModel, steps: Sequence[Tensor], until: float) -> Tensor:
    """(V,) logits after ids that are read step by step. Raises ValueError with a sentence once it is later than `until`."""
    context = model.open()
    try:
        for piece in (piece for step in steps for piece in step.split(PIECE)):
            if time.monotonic() > until:
                raise ValueError(STRINGS["values.slow"].format(length=sum(map(len, steps)), seconds=READ_S))
            logits = context.forward(piece.to(model.device), 1)
        return logits[0]
    finally:
        context.close()


def _law(position: Position, p: Tensor, q: Tensor) -> list[Tensor]:
    if position.drafted is None:
        return []
    if isinstance(position.rule, SpS):
        return [position.rule.target(p, q, torch.tensor(position.drafted, device=p.device))]
    return [position.rule.effective(p, q)]


if comparison.spaces:
    columns_at = comparison.spaces.GPU(duration=GPU_SECONDS)(columns_at)


@lru_cache(maxsize=1)
def _names(tokenizer, size: int) -> tuple[list[str], list[str]]:
    """Every token's text, and the same for searches that ignore case."""
    transcript = Transcript(tokenizer)
    names = [transcript.name(token) for token in range(size)]
    return names, [name.casefold() for name in names]


def _page(columns: Tensor, names: tuple[list[str], list[str]], token: int, find: str, by: str) -> dict:
    texts, folded = names
    labels = COLUMNS if len(columns) == len(COLUMNS) else tuple(name for name in COLUMNS if name != "h")
    p, q, *_, p_raw, q_raw = columns
    wanted = {find.casefold(), find.casefold().translate(SHOWN_AS)}
    number = int(find) if find.strip().isdecimal() else -1
    found = [i for i, text in enumerate(folded) if i == number or any(part in text for part in wanted)]
    whole = {i for i in found if find and (i == number or any(part.strip(" ") == folded[i].strip(" ") for part in wanted))}
    # Most tokens are 0 once filtered: among those the raw values tell which came closest.
    first = columns[labels.index(by)] if by in labels else torch.maximum(p, q)
    keys = [values.tolist() for values in (first, torch.maximum(p_raw, q_raw))]
    shown = nsmallest(ROWS, found, key=lambda i: (i not in whole, -keys[0][i], -keys[1][i], i))
    return {
        "columns": labels,
        "rows": [[i, texts[i], *(_digits(value) for value in columns[:, i].tolist())] for i in shown],
        "found": len(found),
        "positive": int(((p > 0) | (q > 0)).sum()),
        "size": len(texts),
        "sums": [_digits(value) for value in columns[:, found].sum(-1).tolist()],
        "at": columns[:2, token].tolist(),
    }


def _digits(value: float) -> float:
    return float(f"{value:.7g}")
