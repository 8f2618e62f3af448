"""The numbers under a pane, on hand-counted rounds."""

import math

import pytest
from test_decoding import PLAIN, run
from toys import toy_pair

from cactus.metrics import RoundFigures, figures, summarise, summary
from cactus.rules import Cactus, SpS
from cactus.sampling import Sampling
from cactus.trace import Settings


def rounds(accepted, m=4):
    return [RoundFigures(a + 1, a, min(a + 1, m), m, 0.0, (), 0.3, 0.5, -1.0, 0.5) for a in accepted]


def test_both_lengths_and_both_rates_under_their_own_names():
    """Accepted per pass [3, 0, 4, 1] with m = 4: mean 2.0, with the verifier's own token 3.0; 8/16 drafted, 8/11 judged."""
    numbers = summarise(rounds([3, 0, 4, 1]))
    assert (numbers.al, numbers.tokens_per_pass, numbers.tokens) == (2.0, 3.0, 12)
    assert numbers.accepted_per_drafted == 0.5
    assert numbers.accepted_per_judged == pytest.approx(8 / 11)
    assert numbers.al_se == pytest.approx(math.sqrt((1 + 4 + 4 + 1) / 3 / 4))
    assert numbers.tokens_per_s == 6.0


def test_nothing_to_divide_by_is_none():
    numbers = summarise([])
    assert numbers.passes == 0
    assert all(value is None for name, value in numbers.to_json().items() if name not in ("tokens", "passes"))
    alone = summary(run(toy_pair(), SpS(), Settings(PLAIN, 0, 5)))
    assert (alone.accepted_per_judged, alone.accepted_per_drafted, alone.kl, alone.al) == (None, None, None, 0.0)


def test_figures_count_what_the_classes_say():
    trace = run(toy_pair(), Cactus(0.3), Settings(PLAIN, 4, 61, 3))
    numbers, counts = summary(trace), {}
    for token in trace.drafted:
        counts[token.outcome] = counts.get(token.outcome, 0) + 1
    kept = counts["accepted"] + counts["rescued"]
    assert numbers.tokens == len(trace.ids) == kept + len(trace.rounds) == 61
    assert numbers.accepted_per_judged == pytest.approx(kept / (kept + counts["rejected"]))
    assert numbers.accepted_per_drafted == pytest.approx(kept / (kept + counts["rejected"] + counts["discarded"]))
    assert numbers.al * numbers.passes == pytest.approx(kept)
    assert sum(len(figures(round, trace.rule, ()).kls) for round in trace.rounds) == kept + counts["rejected"]


def test_cut_tokens_are_in_no_figure():
    pair = toy_pair(noise=0.0)
    ids = run(pair, SpS(), Settings(Sampling(0), 5, 12)).ids
    end = next(i for i in range(1, 5) if ids[i] not in ids[:i])
    trace = run(toy_pair(noise=0.0, eos_ids=(ids[end],)), SpS(), Settings(Sampling(0), 5, 12))
    last = figures(trace.rounds[-1], trace.rule, trace.eos_ids)
    assert (last.tokens, last.accepted, last.judged, last.drafted, len(last.kls)) == (end + 1,) * 5


def test_lossless_rule_has_no_divergence():
    assert summary(run(toy_pair(), SpS(), Settings(PLAIN, 4, 60))).kl == pytest.approx(0, abs=1e-12)
