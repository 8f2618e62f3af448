"""Every number that is shown, defined once. A round gives its figures; a run's summary is made from them and from nothing else."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from cactus.divergences import entropy, kl
from cactus.replay import Replay
from cactus.rules import Rule
from cactus.trace import Round, Trace


@dataclass(frozen=True)
class RoundFigures:
    """One verifier pass. expected: accepted tokens to be expected given the block's start; kls: KL(h_alg ‖ q) of each of its judged
    positions, in nats; entropy, entropy_q: Σ over them of the entropy of h_alg and of q, in nats; log_q: Σ ln q of
    its emitted tokens; seconds: the block's wall time."""

    tokens: int
    accepted: int
    judged: int
    drafted: int
    expected: float
    kls: tuple[float, ...]
    entropy: float
    entropy_q: float
    log_q: float
    seconds: float


@dataclass(frozen=True)
class Summary:
    """A run in numbers; None where there is nothing to divide by.

    al: acceptance length, accepted draft tokens per verifier pass (the bonus or resampled token not counted); al_se its standard error
    over passes; expected_al the same with each pass replaced by its expectation. tokens_per_pass: emitted tokens per verifier pass.
    accepted_per_judged leaves discarded tokens out, accepted_per_drafted counts them. kl: mean KL(h_alg ‖ q) over judged positions,
    nats. entropy, entropy_q: mean entropy of h_alg and of q there, nats: far below it, the output drifts towards a deterministic one.
    log_q: mean ln q of the emitted tokens, nats; −∞ once a rule
    accepted what the verifier excludes. tokens_per_s: emitted tokens per second of decoding.
    """

    tokens: int
    passes: int
    al: float | None
    al_se: float | None
    expected_al: float | None
    tokens_per_pass: float | None
    accepted_per_judged: float | None
    accepted_per_drafted: float | None
    kl: float | None
    entropy: float | None
    entropy_q: float | None
    log_q: float | None
    tokens_per_s: float | None

    def to_json(self) -> dict:
        return asdict(self)


def figures(round: Round, rule: Rule, eos_ids: Sequence[int]) -> RoundFigures:
    """The figures of one round of a run by `rule`."""
    replay = Replay([round], eos_ids)
    h, q = replay.effective([rule])[0][replay.judged], replay.rows.q[replay.judged]
    return RoundFigures(
        tokens=len(round.emitted),
        accepted=round.accepted,
        judged=sum(token.judged for token in round.drafted),
        drafted=sum(token.outcome != "cut" for token in round.drafted),
        expected=replay.expected_lengths([rule])[0, 0].item() if replay.tokens else 0.0,
        kls=tuple(kl(h, q).tolist()),
        entropy=entropy(h).sum().item(),
        entropy_q=entropy(q).sum().item(),
        log_q=sum(math.log(token.q) if token.q else -math.inf for token in round.emitted),
        seconds=sum(round.seconds.values()),
    )


def summarise(rounds: Iterable[RoundFigures]) -> Summary:
    """The summary of a run so far."""
    rounds = list(rounds)
    passes, tokens = len(rounds), sum(round.tokens for round in rounds)
    accepted, judged = sum(round.accepted for round in rounds), sum(round.judged for round in rounds)
    al = _ratio(accepted, passes)
    variance = _ratio(sum((round.accepted - al) ** 2 for round in rounds), passes - 1) if passes > 1 else None
    return Summary(
        tokens=tokens,
        passes=passes,
        al=al,
        al_se=math.sqrt(variance / passes) if variance is not None else None,
        expected_al=_ratio(sum(round.expected for round in rounds), passes),
        tokens_per_pass=_ratio(tokens, passes),
        accepted_per_judged=_ratio(accepted, judged),
        accepted_per_drafted=_ratio(accepted, sum(round.drafted for round in rounds)),
        kl=_ratio(sum(sum(round.kls) for round in rounds), judged),
        entropy=_ratio(sum(round.entropy for round in rounds), judged),
        entropy_q=_ratio(sum(round.entropy_q for round in rounds), judged),
        log_q=_ratio(sum(round.log_q for round in rounds), tokens),
        tokens_per_s=_ratio(tokens, sum(round.seconds for round in rounds)),
    )


def summary(trace: Trace) -> Summary:
    """The summary of a whole trace."""
    return summarise(figures(round, trace.rule, trace.eos_ids) for round in trace.rounds)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
