"""f-divergences: values by definition, gamma against an independent root, limits, and a divergence of one's own."""

import math

import pytest
import torch
from scipy.optimize import brentq

from cactus.divergences import DIVERGENCES, KL, Divergence, check_distributions, entropy, kl, taylor_critical_delta
from cactus.rules import Cactus

BY_DEFINITION = {
    "kl": lambda h, q: sum(a * math.log(a / b) for a, b in zip(h, q, strict=True) if a),
    "reverse_kl": lambda h, q: sum(b * math.log(b / a) for a, b in zip(h, q, strict=True)) if all(h) else math.inf,
    "chi2": lambda h, q: sum((a - b) ** 2 / b for a, b in zip(h, q, strict=True)),
    "tv": lambda h, q: sum(abs(a - b) for a, b in zip(h, q, strict=True)) / 2,
    "hellinger": lambda h, q: sum((math.sqrt(a) - math.sqrt(b)) ** 2 for a, b in zip(h, q, strict=True)) / 2,
    "js": lambda h, q: (
        (
            BY_DEFINITION["kl"](h, [(a + b) / 2 for a, b in zip(h, q, strict=True)])
            + BY_DEFINITION["kl"](q, [(a + b) / 2 for a, b in zip(h, q, strict=True)])
        )
        / 2
    ),
}
CERTAIN = {  # d_f(1 ‖ q)
    "kl": lambda q: -math.log(q),
    "reverse_kl": lambda q: math.inf,
    "chi2": lambda q: (1 - q) / q,
    "tv": lambda q: 1 - q,
    "hellinger": lambda q: 1 - math.sqrt(q),
    "js": lambda q: (-math.log((1 + q) / 2) + q * math.log(2 * q / (1 + q)) + (1 - q) * math.log(2)) / 2,
}
CURVATURE = {"kl": 1, "reverse_kl": 1, "chi2": 2, "tv": None, "hellinger": 1 / 4, "js": 1 / 4}
NAMES = list(DIVERGENCES)


def row(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_definition(name):
    h, q = [0.5, 0.3, 0.2, 0.0], [0.2, 0.5, 0.2, 0.1]
    assert DIVERGENCES[name].between(row(*h), row(*q)).item() == pytest.approx(BY_DEFINITION[name](h, q), rel=1e-12)
    assert DIVERGENCES[name].between(row(*q), row(*q)).item() == pytest.approx(0, abs=1e-15)
    assert DIVERGENCES[name].curvature == CURVATURE[name]


@pytest.mark.parametrize("name", NAMES)
def test_mass_where_the_verifier_has_none_costs_the_slope(name):
    h, q = row(0.5, 0.5), row(1.0, 0.0)
    near = row(1 - 1e-12, 1e-12)
    divergence = DIVERGENCES[name]
    got = divergence.between(h, q).item()
    assert got == math.inf if divergence.slope == math.inf else got == pytest.approx(divergence.between(h, near).item(), abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("delta", [1e-6, 0.01, 0.1, 0.5, 1.0, 4.0])
def test_exact_gamma_is_the_largest_root(name, delta):
    values = [1e-12, 1e-6, 0.01, 0.3, 0.5, 0.9, 0.999, 1 - 1e-9]
    gammas = DIVERGENCES[name].exact_gamma(row(*values), delta).tolist()
    for q, gamma in zip(values, gammas, strict=True):
        coins = lambda g, q=q: BY_DEFINITION[name]([g, 1 - g], [q, 1 - q]) - delta  # noqa: E731
        if delta >= CERTAIN[name](q):
            assert gamma == 1
        else:
            top = 1 - 1e-15 if name == "reverse_kl" else 1
            root = brentq(coins, q, top, xtol=1e-15, rtol=1e-14) if coins(top) > 0 else top
            assert gamma == pytest.approx(root, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_certain_acceptance_begins_where_the_table_says(name):
    for q in (0.1, 0.5, 0.9):
        assert DIVERGENCES[name].binary(row(1.0), row(q)).item() == pytest.approx(CERTAIN[name](q))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_limits_in_q_and_delta(name, dtype):
    q = torch.tensor([0.0, 1e-30, 1e-9, 0.3, 1 - 1e-6, 1.0], dtype=dtype)
    divergence = DIVERGENCES[name]
    solvers = [divergence.exact_gamma] + ([divergence.taylor_gamma] if divergence.curvature else [])
    for solver in solvers:
        assert solver(q, 0.0).tolist() == q.double().tolist()
        for delta in (1e-9, 0.1, 0.69, 5.0):
            gamma = solver(q, delta)
            assert gamma[0] == 0
            assert gamma[-1] == 1
            assert ((gamma >= q) & (gamma <= 1)).all()
        assert solver(torch.tensor(0.25, dtype=dtype), 0.1).shape == ()


def test_taylor_meets_the_exact_root_for_small_budgets():
    for name, divergence in DIVERGENCES.items():
        if divergence.curvature:
            q = row(0.1, 0.3, 0.5, 0.7)
            gap = (divergence.taylor_gamma(q, 1e-8) - divergence.exact_gamma(q, 1e-8)) / (divergence.exact_gamma(q, 1e-8) - q)
            assert gap.abs().max() < 1e-3, name


def test_chi_square_is_exact_in_closed_form():
    q = row(0.05, 0.4, 0.9)
    assert torch.allclose(DIVERGENCES["chi2"].taylor_gamma(q, 0.07), DIVERGENCES["chi2"].exact_gamma(q, 0.07), atol=1e-15)


def test_total_variation_has_no_taylor_form():
    with pytest.raises(ValueError, match="no Taylor form"):
        DIVERGENCES["tv"].taylor_gamma(row(0.5), 0.1)
    with pytest.raises(ValueError, match="no Taylor form"):
        Cactus(0.1, "taylor", "tv")


def test_a_divergence_of_ones_own():
    """Any convex f with f(1) = 0; here 2·KL, whose budget delta is KL's delta/2."""
    mine = Divergence("double", lambda t: 2 * torch.xlogy(t, t), curvature=2.0)
    q = row(1e-6, 0.2, 0.5, 0.95)
    assert torch.allclose(mine.exact_gamma(q, 0.2), KL.exact_gamma(q, 0.1), atol=1e-9)
    assert torch.allclose(mine.taylor_gamma(q, 0.2), KL.taylor_gamma(q, 0.1))


def test_taylor_overspends_its_budget_by_at_most_its_bound():
    """d_KL(gamma ‖ q) ≤ ln(1 + 2·delta), met only where gamma first reaches 1; above delta for large q."""
    q = torch.linspace(1e-4, 1 - 1e-4, 4001, dtype=torch.float64)
    for delta in (0.01, 0.1, 1.0):
        gamma = KL.taylor_gamma(q, delta)
        spent = KL.binary(gamma, q)
        below = gamma < 1
        assert (spent[below] <= math.log(1 + 2 * delta) + 1e-12).all()
        assert (spent > delta).any()
        edge = torch.tensor([1 / (1 + 2 * delta)], dtype=torch.float64)
        assert KL.binary(KL.taylor_gamma(edge, delta), edge).item() == pytest.approx(math.log(1 + 2 * delta), abs=1e-7)


def test_critical_deltas_invert_gamma():
    q, delta = row(0.05, 0.3, 0.6), 0.07
    assert torch.allclose(taylor_critical_delta(q, KL.taylor_gamma(q, delta)), row(delta, delta, delta))
    for divergence in DIVERGENCES.values():
        assert torch.allclose(divergence.critical_delta(q, divergence.exact_gamma(q, delta)), row(delta, delta, delta), atol=1e-9)
        assert divergence.critical_delta(row(0.5, 0.0), row(0.2, 0.3)).tolist() == [0, math.inf]


def test_entropy_and_kl_take_zeros():
    assert entropy(row(0.5, 0.5, 0.0)).item() == pytest.approx(math.log(2))
    assert kl(row(0.5, 0.5, 0.0), row(0.25, 0.5, 0.25)).item() == pytest.approx(0.5 * math.log(2))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(0.5, -0.1, 0.6), "q is no distribution: it has negative or NaN"),
        (row(0.5, math.nan, 0.5), "q is no distribution: it has negative or NaN"),
        (row(2.0, 1.0, 0.5), "q is no distribution: a row sums to 3.5, not 1"),
        (row(0.0, 0.0, 0.0), "a row sums to 0, not 1"),
    ],
)
def test_what_is_no_distribution_is_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        check_distributions(q=bad)
    with pytest.raises(ValueError, match=message):
        Cactus(0.1).effective(row(0.2, 0.3, 0.5), bad)
