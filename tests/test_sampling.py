"""Warping and keyed draws, by exact enumeration where a vocabulary is small enough."""

import numpy as np
import pytest
import torch

from cactus.rules import TAS, Cactus, SpS
from cactus.sampling import ACCEPT, DRAFT, REPLACE, Sampling, draw, run_key, uniform, uniforms, warp

LOGITS_P = torch.tensor([2.0, 1.0, 0.0, -1.0])
LOGITS_Q = torch.tensor([1.5, 1.2, 0.2, -0.5])
SAMPLINGS = [
    Sampling(1.0, 0, 1.0),
    Sampling(0.5, 0, 1.0),
    Sampling(0.6, 3, 1.0),
    Sampling(0.7, 0, 0.8),
    Sampling(0.6, 3, 0.9),
    Sampling(0, 0, 1),
]


def enumerate_step(rule, p, q, grid=2000):
    """One step by the very draws a decoder makes: every drafted token, every u of a fine grid, every replacement.

    The acceptance draw is integrated on a midpoint grid, so the error is at most 1/grid per drafted token.
    """
    out = torch.zeros(len(p), dtype=torch.float64)
    u = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    for n in range(len(p)):
        if p[n] == 0:
            continue
        accepted = (u * p[n].double() < rule.gamma_at(p, q, torch.tensor(n))).double().mean()
        out[n] += p[n].double() * accepted
        if accepted < 1:
            out += p[n].double() * (1 - accepted) * rule.recovery(p, q, torch.tensor(n))
    return out


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("rule", [SpS(), Cactus(0.1), Cactus(1.0), Cactus(0.2, "exact"), TAS()])
def test_one_step_comes_out_as_promised(rule, sampling):
    """Guards against warping one model only, judging another row than the sampled one, and wrong replacements."""
    p, q = warp(LOGITS_P, sampling), warp(LOGITS_Q, sampling)
    out = enumerate_step(rule, p, q)
    torch.testing.assert_close(out, rule.effective(p, q), atol=1e-3, rtol=0)
    if rule == SpS():
        torch.testing.assert_close(out, q.double(), atol=1e-3, rtol=0)


def test_temperature_reaches_both_models():
    assert warp(LOGITS_Q, Sampling(0.5, 0, 1.0)).tolist() == pytest.approx([0.609, 0.334, 0.045, 0.011], abs=1e-3)


def test_filters_apply_before_the_rule():
    """Guards against judging with raw probabilities: acceptance .946 and marginal [.625, .375], not 100 % and [.571, .429]."""
    p = warp(torch.tensor([0.4, 0.3, 0.2, 0.1]).log(), Sampling(1.0, 2, 1.0))
    q = warp(torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), Sampling(1.0, 2, 1.0))
    assert enumerate_step(SpS(), p, q).tolist() == pytest.approx([0.625, 0.375, 0, 0], abs=1e-3)
    assert torch.minimum(p, q).sum().item() == pytest.approx(0.946, abs=1e-3)


def test_greedy_rows_are_one_hot():
    """Guards against a greedy draft judged with soft probabilities: token 0 of p must be rejected where q prefers token 1."""
    greedy = Sampling(0, 20, 0.95)
    p, q = warp(torch.tensor([0.45, 0.3, 0.25]).log(), greedy), warp(torch.tensor([0.4, 0.6, 0.0]).log(), greedy)
    assert p.tolist() == [1, 0, 0] and q.tolist() == [0, 1, 0]
    for rule in (SpS(), Cactus(2.0), TAS()):
        assert rule.gamma_at(p, q, torch.tensor(0)) == 0 and rule.recovery(p, q, torch.tensor(0)).tolist() == [0, 1, 0]


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-5, 1e-4, 1e-3, 1.0])
@pytest.mark.parametrize("top_p", [0, 1e-4, 0.5, 1])
@pytest.mark.parametrize("top_k", [0, 1, 1000])
def test_extreme_settings_give_distributions(temperature, top_p, top_k):
    logits = torch.tensor([[3.0, 5.0, 4.9, -torch.inf], [80.0, -80.0, 0.0, 79.0]])
    rows = warp(logits, Sampling(temperature, top_k, top_p))
    assert rows.isfinite().all() and (rows >= 0).all()
    assert torch.allclose(rows.sum(-1), torch.ones(2))
    if temperature <= 1e-3 or top_k == 1 or top_p <= 1e-4:
        assert rows.argmax(-1).tolist() == [1, 0] and (rows > 1e-6).sum(-1).tolist() == [1, 1]


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    rows = warp(torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), Sampling(1.0, 0, 0.8 - 1e-6))
    assert (rows > 0).tolist() == [True, True, False, False]
    assert rows[:2].tolist() == pytest.approx([0.625, 0.375])


BAD = [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_k": 1.5}, {"top_p": 1.1}]


@pytest.mark.parametrize("bad", BAD)
def test_bad_settings_are_refused_with_a_sentence(bad):
    with pytest.raises(ValueError, match=r"must .*, got .*\."):
        Sampling(**bad)


def test_uniforms_are_keyed():
    key = run_key(7)
    values = {(s, i): uniform(key, s, i) for s in (DRAFT, ACCEPT, REPLACE) for i in range(500)}
    assert len(set(values.values())) == 1500 and all(0 <= u < 1 for u in values.values())
    assert uniform(key, ACCEPT, 3) == values[ACCEPT, 3] != uniform(run_key(8), ACCEPT, 3)
    assert uniforms(key, DRAFT, 10, 3).tolist() == [values[DRAFT, i] for i in (10, 11, 12)]
    assert run_key(0) != run_key(1) and run_key(0, 1) != run_key(0)
    # Mean of 1500 uniforms: standard deviation .0075, so .05 is 6.7 of them, false alarm about 1e-11.
    assert abs(np.mean(list(values.values())) - 0.5) < 0.05


def test_global_random_state_is_untouched():
    before = torch.get_rng_state()
    uniform(run_key(1), DRAFT, 0)
    draw(torch.tensor([0.5, 0.5]), torch.tensor(0.3, dtype=torch.float64))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True])
def test_bad_seed_is_refused(seed):
    with pytest.raises(ValueError, match="seed must be a whole number"):
        run_key(seed)


def test_draws_follow_the_row_and_skip_zeros():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(probs.expand(6, 6), u).tolist() == [1, 1, 3, 3, 4, 4]
    tiny = torch.full((49152,), 1.0 / 49152)
    tiny[-7:] = 0
    assert draw(tiny, u[-1]).item() == 49152 - 8
