"""Replay against the run it looks back at, against exact enumeration, and against the decoder's own verdicts."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from test_decoding import PLAIN, run
from toys import toy_pair

from cactus.replay import FAMILIES, GRID, Replay, auto_delta, best_acceptance, first_difference, frontier, optimum_curve, outlook
from cactus.rules import TAS, Cactus, SpS, acceptance
from cactus.sampling import Sampling
from cactus.trace import Settings


def test_critical_delta_agrees_with_the_verdicts():
    trace = run(toy_pair(), Cactus(0.1), Settings(PLAIN, 4, 120, 1))
    replay = Replay(trace.rounds, ())
    critical = replay.critical_deltas()
    for token, delta in zip(replay.tokens, critical, strict=True):
        if token.judged:
            assert token.kept == (delta < 0.1 if delta else token.u * token.p < token.q or token.q > 0)
            assert (token.outcome == "rescued") == (token.kept and token.u * token.p >= token.q)
    assert any(token.outcome == "rescued" for token in replay.tokens)


@pytest.mark.parametrize("delta", [0.0, 0.05, 0.7])
def test_the_same_draws_at_another_delta_are_what_a_run_does(delta):
    """Block by block, as long as the texts are the same, the run at delta accepts what critical deltas of the SpS run say."""
    settings = Settings(PLAIN, 4, 80, 2)
    sps, other = run(toy_pair(), SpS(), settings), run(toy_pair(), Cactus(delta), settings)
    compared = 0
    for ours, theirs in zip(sps.rounds, other.rounds, strict=False):
        kept = 0
        for token, critical in zip(ours.drafted, Replay([ours], ()).critical_deltas(), strict=True):
            if token.u * token.p < token.q or (critical is not None and delta > critical):
                kept += 1
            else:
                break
        assert theirs.accepted == kept
        compared += 1
        if [t.id for t in ours.emitted] != [t.id for t in theirs.emitted]:
            break
    assert compared


def test_expected_length_is_unbiased():
    """Enumerate every draft of a two-step block whose law depends on the drafted prefix: the mean of Σ (Π phi) alpha is the true
    expected length, while the mean of Σ Π alpha is not (.96 for a true 1.12 in the theory's example)."""
    rows = {
        (): (torch.tensor([0.8, 0.2]), torch.tensor([0.4, 0.6])),
        (0,): (torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5])),
        (1,): (torch.tensor([0.9, 0.1]), torch.tensor([0.1, 0.9])),
    }
    rule = SpS()
    true, estimate, naive = 0.0, 0.0, 0.0
    for first, second in itertools.product(range(2), repeat=2):
        (p1, q1), (p2, q2) = rows[()], rows[(first,)]
        weight = p1[first] * p2[second]
        phi1, phi2 = min(1, q1[first] / p1[first]), min(1, q2[second] / p2[second])
        alpha1, alpha2 = acceptance(rule, p1, q1), acceptance(rule, p2, q2)
        true += weight * (phi1 + phi1 * phi2)
        estimate += weight * (alpha1 + phi1 * alpha2)
        naive += weight * (alpha1 + alpha1 * alpha2)
    assert estimate.item() == pytest.approx(true.item(), abs=1e-6)
    assert abs(naive - true) > 0.01


def test_expected_lengths_match_realised_ones():
    """Over 20 runs the realised mean lies within 5 standard errors of the expected one: a false alarm in 1.7 million."""
    for rule in (SpS(), Cactus(0.3), TAS()):
        gaps = []
        for seed in range(20):
            trace = run(toy_pair(), rule, Settings(PLAIN, 4, 60, seed))
            expected = Replay(trace.rounds, ()).expected_lengths([rule])[0]
            gaps += [round.accepted - e for round, e in zip(trace.rounds, expected.tolist(), strict=True)]
        gaps = torch.tensor(gaps)
        assert abs(gaps.mean()) < 5 * gaps.std() / len(gaps) ** 0.5


def test_many_rules_at_once_equal_one_at_a_time():
    trace = run(toy_pair(), SpS(), Settings(Sampling(0.7, 6, 0.9), 4, 60, 5))
    replay, rules = Replay(trace.rounds, ()), [Cactus(delta) for delta in GRID]
    for i, rule in enumerate(rules):
        assert torch.allclose(replay.divergence(rules)[i], replay.divergence([rule])[0], atol=1e-12)
        assert torch.equal(replay.acceptance(rules)[i], replay.acceptance([rule])[0])
    alpha, spent = replay.acceptance(rules), replay.divergence(rules)
    assert (alpha.diff(dim=0) >= -1e-12).all()
    assert (spent.diff(dim=0) >= -1e-9).all()
    assert spent[0].abs().max() < 1e-12


def test_tokens_after_a_drafted_end_token_do_not_count():
    pair = toy_pair(noise=0.0)
    ids = run(pair, SpS(), Settings(Sampling(0), 5, 12)).ids
    end = next(i for i in range(1, 5) if ids[i] not in ids[:i])
    trace = run(toy_pair(noise=0.0, eos_ids=(ids[end],)), SpS(), Settings(Sampling(0), 5, 12))
    replay = Replay(trace.rounds, trace.eos_ids)
    assert len(replay.blocks[0]) == end + 1
    assert replay.expected_lengths([SpS()])[0, 0] == end + 1


def test_a_run_without_drafts_replays_to_nothing():
    trace = run(toy_pair(), SpS(), Settings(PLAIN, 0, 5))
    replay = Replay(trace.rounds, ())
    assert replay.expected_lengths([SpS()]).tolist() == [[0.0] * 5]
    assert Replay([], ()).expected_lengths([SpS()]).shape == (1, 0)


@pytest.fixture(scope="module")
def trace():
    return run(toy_pair(), SpS(), Settings(Sampling(0.9, 8, 0.97), 4, 120, 6))


def test_outlook_of_the_rule_that_ran_is_what_happened(trace):
    (sps,) = outlook(trace, [SpS()])
    assert (sps.rescued, sps.lost) == (0, 0)
    assert sps.kl == pytest.approx(0, abs=1e-12)
    assert sps.entropy == pytest.approx(sps.entropy_q)
    judged = [token for token in trace.drafted if token.judged]
    for delta in (0.05, 0.5):
        point = outlook(trace, [Cactus(delta)])[0]
        again = [token for token in judged if token.u * token.p < Cactus(delta).gamma(None, torch.tensor(token.q))]
        assert point.rescued == len(again) - sum(token.kept for token in judged)
        assert point.lost == 0
        assert point.acceptance - sps.acceptance == pytest.approx(point.tv, abs=1e-9)


def test_every_rule_stays_below_the_optimum_and_takes_its_share(trace):
    gains = frontier(trace)
    assert set(gains) == {family.label for family in FAMILIES}
    for label, points in gains.items():
        for gain in points:
            if gain.of_kl_optimum is not None:
                assert gain.of_kl_optimum <= 1 + 1e-6, label
            if gain.of_tv_optimum is not None:
                assert gain.of_tv_optimum <= 1 + 1e-6, label
    # Interpolation is the optimum under TV; the mentored rule under KL at each position, though not over all of them.
    assert all(gain.of_tv_optimum == pytest.approx(1, abs=1e-9) for gain in gains["Interpolation"])
    assert all(gain.of_kl_optimum > 0.9 for gain in gains["Mentored"] if gain.of_kl_optimum)
    curve = optimum_curve(trace)
    assert curve == sorted(curve)
    assert [accepted for _, accepted in curve] == sorted(accepted for _, accepted in curve)


def test_one_price_for_a_nat_beats_equal_budgets(trace):
    """At the same mean KL, one multiplier over all positions accepts at least what the same budget at each position does."""
    from cactus.rules import Mentored

    replay = Replay(trace.rounds, ())
    for budget in (0.01, 0.1):
        equal = outlook(trace, [Mentored(budget)])[0]
        (shared,) = best_acceptance(replay, [equal.kl])
        assert shared >= equal.acceptance - 1e-6


def test_a_rule_is_measured_in_its_own_divergence_too(trace):
    js, kl_rule = outlook(trace, [Cactus(0.05, "exact", "js"), Cactus(0.05)])
    assert 0 < js.own < js.kl
    assert kl_rule.own == pytest.approx(kl_rule.kl, abs=1e-9)


def test_auto_delta_meets_the_wish(trace):
    for budget in (0.001, 0.02, 0.1):
        delta = auto_delta(trace, kl_budget=budget)
        assert outlook(trace, [Cactus(delta)])[0].kl == pytest.approx(budget, abs=1e-6)
    low, high = (outlook(trace, [Cactus(delta)])[0].expected_al for delta in (0.0, 1e6))
    wish = (low + high) / 2
    delta = auto_delta(trace, al=wish)
    assert outlook(trace, [Cactus(delta)])[0].expected_al == pytest.approx(wish, abs=1e-6)
    assert auto_delta(trace, al=low) == pytest.approx(0, abs=1e-9)
    with pytest.raises(ValueError, match=r"lies between \d+\.\d+ \(SpS\) and \d+\.\d+, not at 9"):
        auto_delta(trace, al=9)
    with pytest.raises(ValueError, match="either a KL budget"):
        auto_delta(trace)
    with pytest.raises(ValueError, match="from 0 up"):
        auto_delta(trace, kl_budget=-1)
    with pytest.raises(ValueError, match="from 0 up, got nan"):
        auto_delta(trace, kl_budget=math.nan)


def test_first_difference_between_two_runs():
    settings = Settings(PLAIN, 4, 60, 3)
    sps, zero, cactus = (run(toy_pair(), rule, settings) for rule in (SpS(), Cactus(0.0), Cactus(0.7)))
    assert first_difference(sps, zero) is None
    index, kind = first_difference(sps, cactus)
    assert sps.ids[:index] == cactus.ids[:index]
    assert sps.ids[index] != cactus.ids[index]
    assert kind in ("verdict", "replacement")
    shorter = replace(sps, rounds=sps.rounds[:3])
    assert first_difference(sps, shorter) == (len(shorter.ids), "length")


def test_a_trace_without_judged_tokens_cannot_be_looked_back_at():
    with pytest.raises(ValueError, match="judged no drafted token"):
        outlook(run(toy_pair(), SpS(), Settings(PLAIN, 0, 5)), [SpS()])


def test_certificates_and_limits_bound_the_divergence(trace):
    replay = Replay(trace.rounds, ())
    for delta in (0.01, 0.1, 1.0):
        spent = replay.divergence([Cactus(delta)])[0]
        assert (spent <= replay.certificates(Cactus(delta)) + 1e-9).all()
        assert (spent <= replay.limits() + 1e-9).all()
