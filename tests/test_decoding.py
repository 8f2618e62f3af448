"""The loop on toy models whose every logit depends on the whole text: laws, caches, stopping, seeds."""

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch
from laws import transforms
from scipy.stats import kstest
from toys import toy_pair

from cactus import decoding
from cactus.decoding import decode
from cactus.pairs import PromptError
from cactus.rules import TAS, Cactus, Fuzzy, Interpolation, Lenience, Mentored, SpS, TopK
from cactus.sampling import Sampling, warp
from cactus.trace import Settings, Trace

PROMPT = [3, 1, 4, 1, 5]
PLAIN = Sampling(1.0, 0, 1.0)
GREEDY = Sampling(0)


def run(pair, rule, settings, prompt=PROMPT):
    trace = Trace(rule, settings, "", prompt, list(pair.eos_ids), {})
    for _ in trace.follow(decode(pair, prompt, rule, settings)):
        pass
    return trace


def greedy_ids(pair, count, prompt=PROMPT):
    """Plain greedy decoding of the verifier, no cache."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count and ids[-1] not in pair.eos_ids:
        ids.append(pair.verifier.logits(ids).argmax().item())
    return ids[len(prompt) :]


RULES = [SpS(), Cactus(0.1), Cactus(1.0), Cactus(0.3, "exact"), TAS()]


BASELINES = [
    Cactus(0.1, "exact", "js"),
    Cactus(0.1, "exact", "tv"),
    Interpolation(0.4),
    TopK(3),
    Lenience(0.5),
    Mentored(0.1),
    Fuzzy(0.3),
]


@pytest.mark.parametrize("rule", RULES + BASELINES)
@pytest.mark.parametrize("sampling", [PLAIN, Sampling(0.8, 5, 0.9)])
@pytest.mark.parametrize("m", [3])
def test_emitted_tokens_follow_their_law(rule, sampling, m):
    """About 600 tokens per case; Kolmogorov–Smirnov at 1e-5, so over the 24 cases a false alarm comes once in 4,000 seeds."""
    pair = toy_pair()
    numbers = []
    for seed in range(12):
        numbers += transforms(run(pair, rule, Settings(sampling, m, 50, seed)), seed)
    assert kstest(numbers, "uniform").pvalue > 1e-5


SKEWED = torch.tensor([0.6, 0.2, 0.1, 0.05, 0.05]).log(), torch.tensor([0.1, 0.15, 0.2, 0.25, 0.3]).log()
FAULTS = ["draft draw accepts too", "same draw everywhere", "other temperature for q", "replacement from q", "bonus from p"]


def skewed_numbers():
    """The same law at every position, p far from q, so that any fault leans the same way at each of 1,200 tokens."""
    numbers = []
    for seed in range(24):
        pair = toy_pair(vocab_size=5, laws=(lambda ids: SKEWED[1], lambda ids: SKEWED[0]))
        numbers += transforms(with_true_rows(run(pair, SpS(), Settings(PLAIN, 3, 50, seed))), seed)
    return numbers


def with_true_rows(trace):
    """The trace with the rows the models really have: a faulty decoder may record what it used."""
    p, q = (tuple(warp(law, PLAIN).tolist()) for law in SKEWED)

    def true(row):
        return row and replace(row, ids=tuple(range(5)), p=row.p and p, q=q)

    for i, round in enumerate(trace.rounds):
        drafted = tuple(replace(token, row=true(token.row)) for token in round.drafted)
        trace.rounds[i] = replace(round, drafted=drafted, replacement=replace(round.replacement, row=true(round.replacement.row)))
    return trace


def test_the_law_test_passes_where_nothing_is_wrong():
    assert kstest(skewed_numbers(), "uniform").pvalue > 1e-5


@pytest.mark.parametrize("fault", FAULTS)
def test_the_law_test_catches_faults(fault, monkeypatch):
    """The same test must fail loudly on a decoder that is wrong: p-value below 1e-5 on the same number of tokens."""
    right_warp, right_uniforms = decoding.warp_kept, decoding.uniforms
    if fault == "draft draw accepts too":
        monkeypatch.setattr(decoding, "ACCEPT", decoding.DRAFT)
    if fault == "same draw everywhere":
        monkeypatch.setattr(decoding, "uniforms", lambda key, stream, start, n: right_uniforms(key, stream, 0, 1).expand(n))
    if fault == "other temperature for q":
        monkeypatch.setattr(
            decoding, "warp_kept", lambda logits, s: right_warp(logits, s if logits.dim() == 1 else Sampling(0.5, 0, 1))
        )
    if fault == "replacement from q":
        monkeypatch.setattr(SpS, "recovery", lambda self, p, q, n: q.double())
    if fault == "bonus from p":
        monkeypatch.setattr(SpS, "recovery", lambda self, p, q, n: torch.softmax(SKEWED[0], -1).double())
    assert kstest(skewed_numbers(), "uniform").pvalue < 1e-5


def test_recorded_rows_are_the_models_own():
    """p and q in the trace are the warped rows of both models after exactly that text, discarded positions included."""
    pair, sampling = toy_pair(), Sampling(0.7, 6, 0.9)
    done = list(PROMPT)
    for round in run(pair, Cactus(0.2), Settings(sampling, 4, 60, 5)).rounds:
        text = list(done)
        for token in round.drafted:
            p, q = warp(pair.draft.logits(text), sampling), warp(pair.verifier.logits(text), sampling)
            assert {i: (x, y) for i, x, y in zip(token.row.ids, token.row.p, token.row.q, strict=True)} == {
                i: (p[i].item(), q[i].item()) for i in range(12) if p[i] > 0 or q[i] > 0
            }
            assert (token.p, token.q) == (p[token.id].item(), q[token.id].item())
            text.append(token.id)
        done += [token.id for token in round.emitted]


@pytest.mark.parametrize("m", [1, 2, 4, 8])
@pytest.mark.parametrize("wrong_every", [0, 3])
def test_caches_after_every_round(m, wrong_every):
    """Guards against a draft cache trimmed by one too many, stale rejected entries, and a lost last drafted token."""
    pair = toy_pair(noise=0.0)
    if wrong_every:
        pair.draft.law = lambda ids: pair.verifier.logits(ids).roll(int(len(ids) % wrong_every == 0))
    done = list(PROMPT)
    for round in decode(pair, PROMPT, SpS(), Settings(GREEDY, m, 40)):
        done += [token.id for token in round.emitted]
        verifier, draft = pair.verifier.contexts[-1], pair.draft.contexts[-1]
        full = bool(round.drafted) and round.accepted == len(round.drafted)
        if not round.stop:
            assert verifier.length == len(done) - 1
            assert draft.length == len(done) - (2 if full else 1)
        assert verifier.ids == done[: verifier.length]
        assert draft.ids == done[: draft.length]
    if not wrong_every:
        assert all(context.closed for context in pair.verifier.contexts + pair.draft.contexts)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("m", range(1, 9))
def test_greedy_is_the_verifiers_greedy(rule, m):
    pair = toy_pair(noise=0.5)
    assert run(pair, rule, Settings(GREEDY, m, 40)).ids == greedy_ids(pair, 40)


def test_greedy_self_draft_accepts_everything():
    pair = toy_pair(noise=0.0)
    trace = run(pair, SpS(), Settings(GREEDY, 4, 60))
    assert all(token.outcome == "accepted" for token in trace.drafted)
    sampled = run(toy_pair(noise=0.0), SpS(), Settings(PLAIN, 4, 500))
    assert sum(token.outcome == "rejected" for token in sampled.drafted) <= 1


@pytest.mark.parametrize("m", [1, 2, 5])
def test_end_token_anywhere_in_a_block(m):
    """Whichever of the first tokens is declared the end token, generation stops right there, mid-block too."""
    pair = toy_pair(noise=0.0)
    whole = greedy_ids(pair, 2 * (m + 1))
    for k, token in enumerate(whole):
        if token in whole[:k]:
            continue
        pair = toy_pair(noise=0.0, eos_ids=(token,))
        trace = run(pair, SpS(), Settings(GREEDY, m, 60))
        assert trace.ids == whole[: k + 1]
        assert (trace.stop, trace.rounds[-1].stop) == ("eos", "eos")
        last = trace.rounds[-1]
        cut = [token for token in last.drafted if token.outcome == "cut"]
        assert len(last.emitted) + len(cut) == len(last.drafted) + (last.replacement is not None)
        if last.drafted and last.accepted and last.emitted[-1].outcome == "accepted":
            assert last.replacement is None


@pytest.mark.parametrize("m", [1, 3, 5])
def test_token_budget_is_exact(m):
    for noise in (0.0, 0.8):
        for count in (1, m, m + 1, m + 2, 2 * m + 3):
            trace = run(toy_pair(noise=noise), SpS(), Settings(PLAIN, m, count))
            assert len(trace.ids) == count
            assert trace.stop == "length"
            for round, made in zip(trace.rounds, made_before(trace), strict=True):
                assert len(round.drafted) <= count - made - 1
    assert not run(toy_pair(), SpS(), Settings(PLAIN, 5, 1)).drafted


def made_before(trace):
    made = 0
    for round in trace.rounds:
        yield made
        made += len(round.emitted)


def test_end_token_wins_over_the_budget():
    pair = toy_pair(noise=0.0)
    ids = greedy_ids(pair, 8)
    end = next(i for i in range(1, 8) if ids[i] not in ids[:i])
    pair = toy_pair(noise=0.0, eos_ids=(ids[end],))
    trace = run(pair, SpS(), Settings(GREEDY, 4, end + 1))
    assert (trace.ids, trace.stop) == (ids[: end + 1], "eos")


def test_any_of_several_end_ids_stops():
    pair = toy_pair(noise=0.0)
    ids = greedy_ids(pair, 8)
    pair = toy_pair(noise=0.0, eos_ids=(99, ids[3], ids[6]))
    assert run(pair, SpS(), Settings(GREEDY, 4, 40)).ids == ids[: min(ids.index(ids[3]), ids.index(ids[6])) + 1]


def test_replacement_comes_from_the_rejected_position():
    """Guards against a replacement of position 0 whatever was rejected: drafts 0, 9, 2 against argmaxes 0, 1, 2."""

    def verifier(ids):
        return 50.0 * torch.nn.functional.one_hot(torch.tensor(max(len(ids) - len(PROMPT), 0)), 12).float()

    def draft(ids):
        wrong = len(ids) == len(PROMPT) + 1
        return 50.0 * torch.nn.functional.one_hot(torch.tensor(9 if wrong else max(len(ids) - len(PROMPT), 0)), 12).float()

    for rule in (SpS(), Cactus(0.5), TAS()):
        for sampling in (GREEDY, PLAIN):
            pair = toy_pair(laws=(verifier, draft))
            first = next(decode(pair, PROMPT, rule, Settings(sampling, 3, 8)))
            assert [token.outcome for token in first.drafted] == ["accepted", "rejected", "discarded"]
            assert [token.id for token in first.emitted] == [0, 1]
            assert (first.replacement.outcome, first.accepted) == ("resampled", 1)


@pytest.mark.parametrize("sampling", [PLAIN, Sampling(0.6, 8, 0.95)])
def test_delta_zero_is_sps_token_for_token(sampling):
    for seed in range(5):
        settings = Settings(sampling, 4, 60, seed)
        sps, zero = run(toy_pair(), SpS(), settings), run(toy_pair(), Cactus(0.0), settings)
        assert [(r.drafted, r.replacement) for r in sps.rounds] == [(r.drafted, r.replacement) for r in zero.rounds]
        assert not any(token.outcome == "rescued" for token in zero.drafted)


def test_same_seed_same_run_and_interleaved_equals_solo():
    settings = Settings(PLAIN, 4, 60, 0)
    solo = [run(toy_pair(), rule, settings) for rule in (SpS(), Cactus(0.5))]
    pair = toy_pair()
    runs = [decode(pair, PROMPT, rule, settings) for rule in (SpS(), Cactus(0.5))]
    mixed, state = [[], []], torch.get_rng_state()
    while any(runs):
        for i, rounds in enumerate(runs):
            round = next(rounds, None) if rounds else None
            if round:
                mixed[i].append(round)
            else:
                runs[i] = None
    for trace, rounds in zip(solo, mixed, strict=True):
        assert [(r.drafted, r.replacement, r.text) for r in trace.rounds] == [(r.drafted, r.replacement, r.text) for r in rounds]
    assert torch.equal(state, torch.get_rng_state())
    assert run(toy_pair(), SpS(), Settings(PLAIN, 4, 60, 1)).ids != solo[0].ids
    assert run(toy_pair(), SpS(), Settings(PLAIN, 4, 60, 0, prompt_id=1)).ids != solo[0].ids


def test_rules_share_their_draws_until_the_first_different_decision():
    sps, cactus = (run(toy_pair(), rule, Settings(PLAIN, 4, 60, 3)) for rule in (SpS(), Cactus(0.5)))
    for ours, theirs in zip(sps.rounds, cactus.rounds, strict=False):
        assert [(t.id, t.u, t.p, t.q) for t in ours.drafted] == [(t.id, t.u, t.p, t.q) for t in theirs.drafted]
        if [t.id for t in ours.emitted] != [t.id for t in theirs.emitted]:
            break


def test_verifier_alone_is_the_baseline():
    pair = toy_pair()
    trace = run(pair, SpS(), Settings(GREEDY, 0, 30))
    assert trace.ids == greedy_ids(pair, 30)
    assert not pair.draft.contexts
    assert all(not round.drafted and round.replacement.outcome == "bonus" for round in trace.rounds)


def test_one_token_prompt():
    pair = toy_pair()
    assert run(pair, SpS(), Settings(GREEDY, 3, 10), [7]).ids == greedy_ids(pair, 10, [7])


def test_closing_stops_the_models_and_frees_the_caches():
    """Guards against a model that goes on after the reader left: three rounds, close, no further forward, contexts closed."""
    pair = toy_pair()
    trace = Trace(SpS(), Settings(PLAIN, 3, 500), "", PROMPT, [], {})
    rounds = trace.follow(decode(pair, PROMPT, SpS(), trace.settings))
    for _ in range(3):
        next(rounds)
    contexts = [weakref.ref(model.contexts[-1]) for model in (pair.verifier, pair.draft)]
    assert not any(context().closed for context in contexts)
    rounds.close()
    forwards = pair.verifier.forwards
    assert all(context().closed for context in contexts)
    assert (len(trace.rounds), trace.stop) == (3, "stopped")
    for model in (pair.verifier, pair.draft):
        model.contexts.clear()
    gc.collect()
    assert not any(context() for context in contexts)
    assert pair.verifier.forwards == forwards


def test_a_failing_model_keeps_the_trace_so_far():
    pair = toy_pair()
    trace = Trace(SpS(), Settings(PLAIN, 3, 500), "", PROMPT, [], {})
    with pytest.raises(RuntimeError, match="out of memory"):
        for round in trace.follow(decode(pair, PROMPT, SpS(), trace.settings)):
            if round.block == 2:
                pair.verifier.law = fail
    assert (len(trace.rounds), trace.stop, trace.message) == (3, "error", "out of memory")
    assert all(context.closed for context in pair.verifier.contexts + pair.draft.contexts)


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(), Sampling(1.0, 0, 1.0), Sampling(1.0, 0, 0.9)], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_logits_that_are_no_numbers_end_a_run_with_a_sentence(sampling, value, side):
    """Guards against an index beyond the row, which ends a process on a GPU, and against greedy text made of NaN."""
    laws = [None, None]
    laws[side] = lambda ids: torch.arange(12.0).index_fill(0, torch.tensor([3]), value)
    for m in (0, 3) if side == 0 else (3,):
        with pytest.raises(ValueError, match="logits that are not finite"):
            list(decode(toy_pair(laws=laws), PROMPT, Cactus(0.1), Settings(sampling, m, 6)))


def fail(ids):
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("sampling", [PLAIN, GREEDY, Sampling()])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_logits_that_are_not_finite_are_said(side, bad, sampling):
    """Guards against half precision that overflows: an index out of bounds when sampled, token 0 for ever when greedy."""
    laws = [lambda ids: torch.arange(12.0), lambda ids: torch.arange(12.0)]
    laws[side] = lambda ids: torch.arange(12.0).index_fill(0, torch.tensor([4]), bad if len(ids) > 9 else 0.0)
    with pytest.raises(ValueError, match="logits that are not finite"):
        run(toy_pair(laws=laws), Cactus(0.1), Settings(sampling, 3, 20))


def test_too_long_a_prompt_names_both_numbers_and_runs_nothing():
    pair = toy_pair(max_length=40)
    with pytest.raises(PromptError, match=r"has 30 tokens, but with 20 new tokens this pair has room for 20 \(context 40\)"):
        next(decode(pair, [1] * 30, SpS(), Settings(PLAIN, 3, 20)))
    with pytest.raises(PromptError, match="no tokens"):
        next(decode(pair, [], SpS(), Settings(PLAIN, 3, 20)))
    assert pair.verifier.forwards == 0


@pytest.mark.parametrize(
    "bad",
    [{"num_draft_tokens": -1}, {"num_draft_tokens": 33}, {"num_draft_tokens": math.nan}, {"num_draft_tokens": 2.5},
     {"max_new_tokens": 0}, {"max_new_tokens": math.nan}, {"max_new_tokens": 9.5}],
)  # fmt: skip
def test_settings_out_of_range(bad):
    with pytest.raises(ValueError, match=r"must .*got"):
        Settings(**bad)


def test_wide_rows_are_cut_to_a_lump_that_holds_the_rest():
    pair = toy_pair(vocab_size=400, sharpness=0.5)
    pair.tokenizer.decode = lambda ids, **_: "x" * len(ids)
    pair.tokenizer.convert_ids_to_tokens = lambda token: "x"
    trace = run(pair, SpS(), Settings(PLAIN, 3, 20))
    for token in trace.drafted:
        assert len(token.row.ids) == 128
        assert token.row.at(token.id) is not None
        assert sum(token.row.p) + token.row.p_rest == pytest.approx(1, abs=1e-6)
        assert sum(token.row.q) + token.row.q_rest == pytest.approx(1, abs=1e-6)
        assert token.row.q_rest > 0.1
