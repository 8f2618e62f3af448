"""The rules against brute force: the oracle's vectors, exact enumeration, and hand-made rows with p ≠ q."""

import json
import math
import os
from pathlib import Path

import pytest
import torch

from cactus.divergences import DIVERGENCES, KL, kl, taylor_critical_delta
from cactus.rules import (
    TAS,
    Cactus,
    Fuzzy,
    Interpolation,
    Lenience,
    Mentored,
    SortedRows,
    SpS,
    TopK,
    accept_prob,
    acceptance,
    optimal,
    shift_logits_,
)

VECTORS = Path(os.environ.get("CACTUS_VECTORS", Path(__file__).parent / "data" / "vectors.json"))
CASES = json.loads(VECTORS.read_text())["cases"]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}


EVERY_RULE = [
    SpS(),
    Cactus(0.01),
    Cactus(0.5),
    Cactus(3.0, "exact"),
    *(Cactus(0.1, "exact", name) for name in DIVERGENCES),
    *(Cactus(0.1, "taylor", name) for name, divergence in DIVERGENCES.items() if divergence.curvature),
    TAS(),
    Interpolation(0.3),
    TopK(3),
    Lenience(0.5),
    Mentored(0.05),
    Fuzzy(0.2),
]


def row(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def close(got, expected, tolerance):
    torch.testing.assert_close(got.double(), row(expected), atol=tolerance, rtol=0, check_dtype=False)


def brute_force_effective(rule, p, q):
    """h_alg by summing over every drafted token: the O(V²) oracle."""
    gamma = rule.gamma(p, q).double()
    out = torch.minimum(p.double(), gamma)
    for n in range(len(p)):
        rejected = (p[n].double() - gamma[n]).clamp_min(0)
        if rejected > 0:
            out = out + rejected * rule.recovery(p, q, torch.tensor(n))
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
class TestVectors:
    def test_sps(self, case, dtype):
        p, q = row(case["p"], dtype), row(case["q"], dtype)
        close(acceptance(SpS(), p, q), case["sps"]["acceptance"], TOLERANCE[dtype])
        close(SpS().effective(p, q), case["q"], TOLERANCE[dtype])
        if case["sps"]["residual"]:
            n = accept_prob(SpS(), p, q).argmin()
            mass = 1 - case["sps"]["acceptance"]  # normalising by a small mass magnifies the rounding of the inputs
            close(SpS().recovery(p, q, n), case["sps"]["residual"], TOLERANCE[dtype] / min(1, mass))
        if case["kl_p_q"] is None:
            assert kl(p, q) == math.inf
        else:
            close(kl(p, q), case["kl_p_q"], TOLERANCE[dtype])

    def test_cactus(self, case, dtype):
        p, q = row(case["p"], dtype), row(case["q"], dtype)
        for expected in case["cactus"]:
            rule, tolerance = Cactus(expected["delta"], expected["solver"]), TOLERANCE[dtype]
            close(rule.gamma(p, q), expected["gamma"], tolerance)
            drafted = p > 0
            close(accept_prob(rule, p, q)[drafted], row(expected["accept_prob"])[drafted].tolist(), tolerance)
            close(acceptance(rule, p, q), expected["acceptance"], tolerance)
            effective = rule.effective(p, q)
            close(effective, expected["effective"], tolerance)
            close(kl(effective, q), expected["kl_effective_q"], tolerance)
            close((effective - q).abs().sum() / 2, expected["tv_effective_q"], tolerance)

    def test_tas(self, case, dtype):
        p, q = row(case["p"], dtype), row(case["q"], dtype)
        for expected in case["tas"]:
            rule = TAS(expected["epsilon"], expected["alpha"])
            close(rule.threshold(q), expected["threshold"], TOLERANCE[dtype])
            assert rule.gamma(p, q).bool().tolist() == expected["accept"]
            close(acceptance(rule, p, q), expected["acceptance"], TOLERANCE[dtype])
            close(rule.effective(p, q), expected["effective"], TOLERANCE[dtype])

    def test_interpolation(self, case, dtype):
        p, q = row(case["p"], dtype), row(case["q"], dtype)
        for expected in case["interp"]:
            rule = Interpolation(expected["alpha"])
            close(acceptance(rule, p, q), expected["acceptance"], TOLERANCE[dtype])
            close(rule.effective(p, q), expected["effective"], TOLERANCE[dtype])

    def test_optimum(self, case, dtype):
        p, q = row(case["p"], dtype), row(case["q"], dtype)
        for expected in case["optimal"]:
            h = optimal(p, q, expected["kl_budget"])
            close(h, expected["effective"], TOLERANCE[dtype])
            close(torch.minimum(p.double(), h).sum(), expected["acceptance"], TOLERANCE[dtype])
            close(kl(h, q), expected["kl"], TOLERANCE[dtype])
            close(Mentored(expected["kl_budget"]).effective(p, q), expected["effective"], TOLERANCE[dtype])

    def test_critical_delta(self, case, dtype):
        p, q = row(case["p"], dtype), row(case["q"], dtype)
        for expected in case["critical_delta"]:
            n = expected["token"]
            got = taylor_critical_delta(q[n], expected["u"] * p[n].double())
            if expected["delta"] is None:
                assert got == math.inf
            else:
                relative = 1e-5 if dtype == torch.float32 else 1e-10
                assert got.item() == pytest.approx(expected["delta"], rel=relative, abs=TOLERANCE[dtype])


def test_worked_example():
    p, q, n = row([0.05, 0.80, 0.15]), row([0.30, 0.35, 0.35]), torch.tensor(1)
    assert accept_prob(SpS(), p, q)[1].item() == pytest.approx(0.4375)
    rule = Cactus(0.2112)
    h = rule.target(p, q, n)
    close(h, [0.16, 0.66, 0.18], 0.005)
    assert accept_prob(rule, p, q)[1].item() == pytest.approx(0.82, abs=0.01)
    assert kl(h, q).item() == pytest.approx(0.1983, abs=1e-3)
    assert acceptance(Cactus(0.1), p, q).item() == pytest.approx(0.76, abs=0.005)


def test_replacement_is_the_normalised_positive_part():
    """Guards against drawing the replacement from q, or from a softmax of the residual."""
    p, q, n = row([0.7, 0.2, 0.1]), row([0.2, 0.5, 0.3]), torch.tensor(0)
    close(SpS().recovery(p, q, n), [0, 0.6, 0.4], 1e-12)
    rule = Cactus(0.02)
    assert rule.gamma_at(p, q, n).item() == pytest.approx(0.28)
    close(rule.target(p, q, n), [0.28, 0.45, 0.27], 1e-12)
    close(rule.recovery(p, q, n), [0, 0.25 / 0.42, 0.17 / 0.42], 1e-12)
    close(SpS().effective(p, q), q.tolist(), 1e-12)


def test_empty_residual_falls_back_to_the_target():
    """Guards against 0/0 when rounding leaves no residual although the token was rejected."""
    p = torch.tensor([0.5, 0.5])
    q = torch.tensor([0.4999999, 0.4999999])
    recovery = SpS().recovery(p, q, torch.tensor(0))
    assert recovery.isfinite().all() and recovery.sum().item() == pytest.approx(1)
    certain = torch.tensor([1.0, 0.0])
    for delta in (0.0, 0.1, 2.0):
        close(Cactus(delta).target(p, certain, torch.tensor(0)), [1, 0], 0)


def test_entropy_of_filtered_rows_is_finite():
    """Guards against 0·log 0 making the threshold NaN, which rejects everything."""
    q = torch.softmax(torch.tensor([2.0, 1.0, -torch.inf, -torch.inf]), -1)
    assert TAS().threshold(q).item() == pytest.approx(min(0.09, 0.3 * math.exp(-0.5822)), abs=1e-4)
    assert TAS().gamma_at(q, q, torch.tensor(0)) == 1
    one_hot = torch.tensor([0.0, 1.0, 0.0])
    assert TAS().gamma(one_hot, one_hot).tolist() == [0, 1, 0]


def test_kl_is_never_negative_or_nan():
    """Guards against 0·log 0, rounding below zero and swapped arguments."""
    q = torch.tensor([0.7, 0.3, 0.0, 0.0])
    assert kl(q, q) == 0
    assert kl(torch.tensor([0.5, 0.0, 0.5, 0.0]), q) == math.inf
    assert kl(row([0.28, 0.45, 0.27]), row([0.2, 0.5, 0.3])).item() == pytest.approx(0.01835, abs=1e-5)
    # The square-root gamma may spend more than its budget: nothing may promise KL(h ‖ q) ≤ delta.
    assert KL.taylor_gamma(row(0.8), 0.02).item() == pytest.approx(0.88)
    assert KL.binary(row(0.88), row(0.8)).item() == pytest.approx(0.0226, abs=1e-4)


def test_gamma_limits():
    q = row([0.0, 1e-30, 1e-9, 0.3, 1 - 1e-9, 1.0])
    for solver in (KL.taylor_gamma, KL.exact_gamma):
        assert solver(q, 0.0).tolist() == q.tolist()
        for delta in (1e-6, 0.1, 5.0):
            gamma = solver(q, delta)
            assert gamma[0] == 0 and gamma[-1] == 1
            assert ((gamma >= q) & (gamma <= 1)).all()
    inner = row([1e-6, 0.01, 0.3, 0.6])
    assert torch.allclose(KL.binary(KL.exact_gamma(inner, 0.2), inner), row([0.2] * 4), atol=1e-12)


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_effective_equals_the_sum_over_drafted_tokens(rule):
    generator = torch.Generator().manual_seed(1)
    for size in (2, 3, 17, 200):
        for sharpness in (0.3, 2.0, 8.0):
            p, q = torch.softmax(sharpness * torch.randn(2, size, generator=generator, dtype=torch.float64), -1)
            q = torch.where(torch.rand(size, generator=generator) < 0.2, 0.0, q)
            q = q / q.sum()
            close(rule.effective(p, q), brute_force_effective(rule, p, q).tolist(), 1e-12)
    batch = torch.softmax(torch.randn(2, 3, 5, 11, generator=generator), -1)
    whole = rule.effective(*batch)
    assert torch.equal(whole[1, 2], rule.effective(batch[0, 1, 2], batch[1, 1, 2]))
    assert torch.allclose(whole.sum(-1), torch.ones(3, 5, dtype=torch.float64), atol=1e-6)


def test_guarantee_and_coupling():
    """KL(h_alg ‖ q) ≤ KL(p ‖ q), never falls with delta, and p and h_alg are coupled optimally."""
    p, q = torch.softmax(3 * torch.randn(2, 64, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64), -1)
    spent = []
    for delta in (0, 0.01, 0.1, 1, 10):
        effective = Cactus(float(delta)).effective(p, q)
        assert torch.allclose(torch.minimum(p, effective).sum(-1), acceptance(Cactus(float(delta)), p, q))
        assert (effective <= Cactus(float(delta)).gamma(p, q) + 1e-12).all()
        spent.append(kl(effective, q))
    spent = torch.stack(spent)
    assert (spent.diff(dim=0) >= -1e-12).all() and (spent <= kl(p, q) + 1e-12).all()


def test_sorted_rows_keep_the_vocabulary_order():
    p, q = row([0.2, 0.5, 0.3]), row([0.6, 0.1, 0.3])
    rows = SortedRows(p, q)
    assert rows.unsort(rows.p).tolist() == p.tolist()
    assert rows.ratio.tolist() == sorted((p / q).tolist())


@pytest.mark.parametrize("size", [5, 1000, 49152])
def test_one_shifted_logit_gives_the_target(size):
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(6, size, generator=generator)
    logits[:3, 1] = -torch.inf
    n = torch.tensor([0, 2, 4, 0, 3, 1])
    deltas = torch.tensor([0.01, 0.1, 2.0, 0.5, 0.0, 1.0])
    q, before = torch.softmax(logits.double(), -1), logits.clone()
    shifted = torch.softmax(shift_logits_(logits, n, deltas).double(), -1)
    for i, delta in enumerate(deltas.tolist()):
        torch.testing.assert_close(shifted[i], Cactus(delta).target(q[i], q[i], n[i]), atol=2e-5, rtol=0)
    assert torch.equal(logits[4], before[4])
    changed = logits != before
    assert changed.sum(-1).le(1).all()


@pytest.mark.parametrize("rest", [1e-2, 1e-4, 1e-6, 1e-7])
@pytest.mark.parametrize("delta", [1e-8, 1e-6, 1e-3, 1.0])
def test_one_shifted_logit_of_a_nearly_certain_token(rest, delta):
    """Guards against the cancellation in 1 − q: h stays within the rounding of q."""
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(4))
    n = torch.tensor([0, 10, 500, 999])
    others = logits.scatter(-1, n[:, None], -torch.inf).logsumexp(-1)
    logits.scatter_(-1, n[:, None], (others + math.log((1 - rest) / rest))[:, None])
    q = torch.softmax(logits.double(), -1)
    shifted = torch.softmax(shift_logits_(logits, n, delta).double(), -1)
    torch.testing.assert_close(shifted, Cactus(delta).target(q, q, n), atol=1e-6, rtol=0)


def test_shift_leaves_impossible_and_certain_tokens():
    logits = torch.tensor([[1.0, -torch.inf, 0.5], [2.0, -torch.inf, -torch.inf]])
    shifted = shift_logits_(logits.clone(), torch.tensor([1, 0]), 0.5)
    assert torch.equal(shifted, logits)


@pytest.mark.parametrize("delta", [-1, math.nan, math.inf])
def test_bad_delta_is_refused(delta):
    with pytest.raises(ValueError, match="delta must be a number from 0 up"):
        Cactus(delta)
