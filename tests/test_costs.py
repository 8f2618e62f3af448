"""Choosing m: the best length at given costs, what it may know, and that the output keeps its law."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from laws import transforms
from scipy.stats import chisquare, kstest
from test_decoding import PLAIN, PROMPT, run
from toys import toy_pair

from cactus.costs import LONGEST, Costs
from cactus.rules import Cactus, SpS
from cactus.trace import Settings, read_traces

CHEAP = Costs(0.1, tuple(1 + 0.05 * i for i in range(LONGEST + 1)))
SPS = SpS()
DEAR = Costs(0.8, tuple(1 + 0.3 * i for i in range(LONGEST + 1)))


def speed(costs, alpha, m):
    return sum(alpha**k for k in range(m + 1)) / (m * costs.draft + costs.verify[m])


@pytest.mark.parametrize("costs", [CHEAP, DEAR])
@pytest.mark.parametrize(("accepted", "judged"), [(0, 0), (0, 50), (25, 50), (45, 50), (500, 500)])
def test_no_other_length_is_faster(costs, accepted, judged):
    """At α = (accepted + 4) / (judged + 5), by trying every length."""
    alpha = (accepted + 4) / (judged + 5)
    best = costs.best_length(accepted, judged)
    assert speed(costs, alpha, best) == pytest.approx(max(speed(costs, alpha, m) for m in range(1, LONGEST + 1)))


@pytest.mark.parametrize("bad", [(0.0, (1.0,)), (1.0, (1.0, 0.0)), (float("nan"), (1.0,)), (1.0, (float("inf"),))])
def test_costs_that_no_clock_measures_are_refused(bad):
    """Guards against a division by zero in the middle of a run."""
    with pytest.raises(ValueError, match="seconds above 0"):
        Costs(*bad)


def test_better_drafts_and_cheaper_steps_make_longer_blocks():
    lengths = [CHEAP.best_length(accepted, 100) for accepted in range(0, 101, 10)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 1 and lengths[-1] == LONGEST
    assert DEAR.best_length(70, 100) < CHEAP.best_length(70, 100)


def auto(seed, rule=SPS, length=40, pair=None):
    return run(pair or toy_pair(), rule, Settings(PLAIN, LONGEST, length, seed, costs=CHEAP))


def test_lengths_follow_from_the_trace_alone():
    """Guards against an m that knows a clock or discarded tokens: costs in the settings and judged tokens give every one again."""
    trace = auto(3)
    accepted = judged = made = 0
    for block in trace.rounds:
        assert len(block.drafted) == min(CHEAP.best_length(accepted, judged), 40 - made - 1)
        accepted += block.accepted
        judged += sum(token.judged for token in block.drafted)
        made += len(block.emitted)
    assert len({len(block.drafted) for block in trace.rounds}) > 2
    assert trace.ids == auto(3).ids
    assert read_traces(trace.lines()) == [trace]
    assert "verify" in json.loads(next(trace.lines()))["settings"]["costs"]


@pytest.mark.parametrize("rule", [SpS(), Cactus(0.3)])
def test_emitted_tokens_keep_their_law(rule):
    """Probability-integral transform of all tokens of 60 runs; Kolmogorov–Smirnov at 1e-6 on fixed seeds."""
    numbers = [number for seed in range(60) for number in transforms(auto(seed, rule), seed)]
    assert len(numbers) == 60 * 40
    assert kstest(numbers, "uniform").pvalue > 1e-6


def test_whole_texts_follow_the_verifier():
    """SpS with chosen lengths: the joint law of the first four tokens over three letters is the verifier's own, chi-square at 1e-6.
    A length that looked at the draws of discarded positions would show here, not in single tokens."""
    pair, runs = toy_pair(3, noise=1.5), 6000
    counts = Counter(tuple(auto(seed, pair=pair, length=8).ids[:4]) for seed in range(runs))
    expected = {}

    def extend(ids, mass):
        if len(ids) == 4:
            expected[tuple(ids)] = mass * runs
            return
        for token, q in enumerate(pair.verifier.logits([*PROMPT, *ids]).softmax(-1).tolist()):
            extend([*ids, token], mass * q)

    extend([], 1.0)
    common = [text for text, count in expected.items() if count >= 5]
    observed = [counts[text] for text in common]
    rest = runs - sum(expected[text] for text in common)
    observed.append(runs - sum(observed))
    assert chisquare(observed, [*(expected[text] for text in common), rest]).pvalue > 1e-6


def test_measured_costs_of_a_pair(pair):
    """Every length has its seconds, longer passes take no less than the shortest, and the table can be asked for again."""
    costs = pair.costs
    assert len(costs.verify) == LONGEST + 1 and costs.draft > 0
    assert min(costs.verify) > 0
    assert pair.costs is costs
    assert replace(costs) == Costs(**json.loads(json.dumps({"draft": costs.draft, "verify": costs.verify})))
