"""The decoder: draft m tokens, verify them in one pass, keep the accepted ones, replace the first rejected one or add a bonus token.

It knows token ids and two models that can be rolled back, not where they come from or what a page shows. Models come as a Pair
(cactus.pairs): `open()` gives a context with `length`, `forward(ids, rows)`, `crop(length)` and `close()`.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count

import torch
from torch import Tensor

from cactus.rules import Rule
from cactus.sampling import ACCEPT, DRAFT, REPLACE, draw, run_key, uniforms, warp_kept
from cactus.text import Transcript
from cactus.trace import DraftedToken, Replacement, Round, Row, Settings, Trace

ROW_TOKENS = 128  # tokens of a row that a trace keeps; what is left is recorded as one lump
ROW_TEXTS = 8  # of which so many with their text


def run(pair, prompt: str, rule: Rule, settings: Settings, chat: bool = True) -> tuple[Trace, Iterator[Round]]:
    """A trace that fills as its rounds are read. Raises PromptError (cactus.pairs) before any model runs."""
    ids = pair.encode(prompt, chat)
    pair.check(ids, settings)
    about = pair.provenance | {"chat": chat, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    trace = Trace(rule, settings, prompt, ids, list(pair.eos_ids), about)
    return trace, trace.follow(decode(pair, ids, rule, settings))


def decode(pair, prompt_ids: list[int], rule: Rule, settings: Settings) -> Iterator[Round]:
    """Generate after `prompt_ids`, one Round per verifier pass; m = 0 decodes with the verifier alone. Where the settings have costs, m
    follows from them and from what was judged so far.

    Between rounds the verifier's cache holds all committed tokens but the last one, the draft's the same, or one fewer after a fully
    accepted block. Closing the generator frees both caches. Raises PromptError (cactus.pairs) before any model runs, ValueError where
    one gives logits that are not finite.
    """
    pair.check(prompt_ids, settings)
    key, committed, transcript = run_key(settings.seed, settings.prompt_id), list(prompt_ids), Transcript(pair.tokenizer)
    # All draws there can be, once: to bring some to the device between two passes would wait for it.
    draws = [uniforms(key, stream, 0, settings.max_new_tokens).to(pair.device) for stream in (DRAFT, ACCEPT, REPLACE)]
    verifier, draft = pair.verifier.open(), pair.draft.open() if settings.num_draft_tokens else None
    contexts = [verifier, draft] if draft else [verifier]
    kept = judged_so_far = 0
    try:
        prefix = torch.tensor(committed[:-1], dtype=torch.long, device=pair.device)
        for context in contexts:
            if len(prefix):
                context.forward(prefix, 1)
        for block in count():
            made = len(committed) - len(prompt_ids)
            longest = settings.costs.best_length(kept, judged_so_far) if settings.costs else settings.num_draft_tokens
            m = min(longest, settings.num_draft_tokens, settings.max_new_tokens - made - 1)
            watch = Stopwatch(pair.device)
            u = [stream[made : made + m + 1] for stream in draws]
            judged = _draft_and_judge(draft, verifier, committed, m, u, rule, settings, watch)
            round = _record(judged, block, made, settings, pair.eos_ids, transcript, watch)
            committed += [token.id for token in round.emitted]
            kept += round.accepted
            judged_so_far += sum(token.judged for token in round.drafted)
            for context in contexts:
                context.crop(min(context.length, len(committed) - 1))
            yield round
            if round.stop:
                return
    finally:
        for context in contexts:
            context.close()


@dataclass
class Judged:
    """One block, on the host. k drafted tokens; rows has k + 1 entries, the last for the bonus position."""

    tokens: list[int]
    p: list[float]
    q: list[float]
    gamma: list[float]
    u: list[float]
    accepted: int  # leading tokens with u·p < gamma
    replacement: int
    replacement_q: float
    rows: list[Row]


@torch.inference_mode()
def _draft_and_judge(draft, verifier, committed, m, u, rule, settings, watch) -> Judged:
    device, size, (u_draft, u_accept, u_replace) = verifier.device, verifier.vocab_size, u
    u_accept = u_accept[:m]
    # What the draft has not read yet ends with the one token that the verifier has not.
    pending = torch.tensor(committed[(draft or verifier).length :], device=device)
    last = pending[-1:]

    # 1) draft: m tokens, each from the very row that will judge it
    drafted, laws = torch.empty(m, dtype=torch.long, device=device), []
    for i in range(m):
        ids, p = warp_kept(draft.forward(drafted[i - 1 : i] if i else pending, 1)[0], settings.sampling)
        drafted[i] = ids[draw(p, u_draft[i])]
        laws.append((ids, p))
    watch.lap("draft")

    # 2) verify: one pass over the last committed token and the drafted ones gives all rows of q
    logits = verifier.forward(torch.cat([last, drafted]), m + 1)
    watch.lap("verify")

    # 3) judge: count the leading accepted ones; replace the first rejected one, or draw the bonus
    ids_q, q = warp_kept(logits, settings.sampling)
    laws.append((ids_q[m], torch.zeros_like(q[m])))
    ids, p, q = _over_the_same(*(torch.stack(parts) for parts in zip(*laws, strict=True)), ids_q, q, size)
    n = torch.searchsorted(ids[:m], drafted[:, None])
    gamma = rule.gamma_at(p[:m], q[:m], n[:, 0])
    p_drafted, q_drafted = (rows[:m].gather(-1, n)[:, 0].double() for rows in (p, q))
    accepted = (u_accept * p_drafted < gamma).long().cumprod(0).sum()[None]
    # An index on the device stays there: p[accepted] would fetch the number and wait for it.
    columns = (ids, p, q, torch.cat([n[:, 0], n.new_zeros(1)]), u_replace)
    ids_there, p_there, q_there, n_there, u_there = (column.index_select(0, accepted)[0] for column in columns)
    law = torch.where(accepted < m, rule.recovery(p_there, q_there, n_there), q_there.double())
    place = draw(law, u_there)[None]

    # 4) everything to the host at once
    rows = _rows(ids, p, q, n)
    numbers = torch.cat([
        drafted.double(), p_drafted, q_drafted, gamma, u_accept,
        accepted.double(), ids_there.gather(0, place).double(), q_there.gather(0, place).double(), rows.flatten(),
    ]).tolist()  # fmt: skip
    if math.isnan(sum(numbers)):
        raise ValueError("A model gave logits that are not finite: choose --dtype bfloat16 or float32.")
    watch.lap("rule")
    columns = [numbers[i * m : (i + 1) * m] for i in range(5)]
    accepted, replacement, replacement_q, *flat = numbers[5 * m :]
    return Judged(
        [int(token) for token in columns[0]],
        *columns[1:],
        accepted=int(accepted),
        replacement=int(replacement),
        replacement_q=replacement_q,
        rows=[_row(flat[i * rows[0].numel() : (i + 1) * rows[0].numel()], bonus=i == m) for i in range(m + 1)],
    )


def _over_the_same(ids_p: Tensor, p: Tensor, ids_q: Tensor, q: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two laws over their own C ascending ids as two over the ids of either, (rows, 2·C) ascending; an id that both hold stands twice,
    its second place empty. Laws over the whole vocabulary stay as they are."""
    if q.shape[-1] == size:
        return ids_q, p, q
    ids = torch.cat([ids_p, ids_q], -1).sort(-1).values
    again = torch.cat([torch.zeros_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] == ids[:, :-1]], -1)

    def spread(own: Tensor, law: Tensor) -> Tensor:
        place = torch.searchsorted(own, ids).clamp_max_(own.shape[-1] - 1)
        return torch.where((own.gather(-1, place) == ids) & ~again, law.gather(-1, place), 0.0)

    return ids, spread(ids_p, p), spread(ids_q, q)


def _rows(ids: Tensor, p: Tensor, q: Tensor, n: Tensor) -> Tensor:
    """(m+1, 3·K+2) float64: ids, p and q of the K tokens of a row with most mass in either, the drafted one always first among them, and
    what is left of p and q. n: (m, 1) places of the drafted tokens."""
    score = torch.maximum(p, q)
    score[: len(n)].scatter_(-1, n, 2.0)
    kept = score.topk(min(ROW_TOKENS, score.shape[-1])).indices
    rest = [row.scatter(-1, kept, 0.0).sum(-1, keepdim=True) for row in (p, q)]  # exactly 0 where a row is complete
    return torch.cat([column.gather(-1, kept).double() for column in (ids, p, q)] + rest, -1)


def _row(numbers: list[float], bonus: bool) -> Row:
    size = (len(numbers) - 2) // 3
    columns = zip(numbers[:size], numbers[size : 2 * size], numbers[2 * size : -2], strict=True)
    ids, p, q = zip(*((int(token), p, q) for token, p, q in columns if p > 0 or q > 0), strict=True)
    return Row(ids, (), None if bonus else p, q, numbers[-2], numbers[-1])


def _record(judged: Judged, block: int, made: int, settings: Settings, eos_ids, transcript: Transcript, watch) -> Round:
    """The block as it is remembered: where it ends, what became of every token, what text came out."""
    kept = judged.tokens[: judged.accepted]
    end = next((i + 1 for i, token in enumerate(kept) if token in eos_ids), None)
    outcomes = []
    for i in range(len(judged.tokens)):
        if end is not None and i >= end:
            outcomes.append("cut")
        elif i < judged.accepted:
            outcomes.append("accepted" if judged.u[i] * judged.p[i] < judged.q[i] else "rescued")
        else:
            outcomes.append("rejected" if i == judged.accepted else "discarded")
    rows = [replace(row, texts=tuple(transcript.name(token) for token in row.ids[:ROW_TEXTS])) for row in judged.rows]
    columns = zip(
        range(made, made + len(outcomes)),
        judged.tokens,
        transcript.pieces(judged.tokens),
        judged.p,
        judged.q,
        judged.gamma,
        judged.u,
        outcomes,
        rows[:-1],
        strict=True,
    )
    drafted = tuple(DraftedToken(*values) for values in columns)
    transcript.commit(kept[:end])
    replacement = None
    if end is None:
        replacement = Replacement(
            made + judged.accepted,
            judged.replacement,
            transcript.pieces([judged.replacement])[0],
            judged.replacement_q,
            "bonus" if judged.accepted == len(judged.tokens) else "resampled",
            rows[-1] if judged.accepted == len(judged.tokens) else None,
        )
        transcript.commit([judged.replacement])
    full = len(transcript.ids) >= settings.max_new_tokens
    stop = "eos" if end is not None or replacement.id in eos_ids else "length" if full else None
    text = transcript.text
    watch.lap("rest")
    return Round(block, drafted, replacement, text, watch.seconds(), stop)


class Stopwatch:
    """Seconds per part of a block. On a GPU the parts are CUDA events, read once the block's one sync has happened anyway."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.laps = []
        self.lap("start")

    def lap(self, name: str) -> None:
        """End the part called `name`."""
        event = None
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.laps.append((name, time.perf_counter(), event))

    def seconds(self) -> dict[str, float]:
        if self.cuda:
            self.laps[-1][2].synchronize()
        return {
            name: before[2].elapsed_time(event) / 1e3 if event else now - before[1]
            for before, (name, now, event) in zip(self.laps, self.laps[1:], strict=False)
        }
