"""The V1 runner's sampler with its own kernels, replayed exactly in float64 with the engine's random numbers."""

from collections import Counter
from types import SimpleNamespace

import pytest
import reference
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler as engine
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from cactus.integrations import vllm_plugin

VOCABULARY = 64
BATCHES = 250
TEMPERATURES = (0.7, 0.0, 1.3, 1.0, 0.0, 0.4)
SPECULATION = {"method": "draft_model", "draft_sample_method": "probabilistic", "rejection_sample_method": "standard"}


@pytest.fixture(scope="module", autouse=True)
def plugin():
    """What vLLM does in each worker before it builds one."""
    vllm_plugin.register()
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


def build(delta: float | None, logprobs_mode: str = "raw_logprobs", **speculation) -> engine.RejectionSampler:
    """The engine's sampler under a configuration that asks for delta."""
    additional = {} if delta is None else {"cactus": {"delta": delta}}
    with set_current_vllm_config(VllmConfig(additional_config=additional)):
        return engine.RejectionSampler(Sampler(logprobs_mode), SimpleNamespace(**SPECULATION | speculation), torch.device("cpu"))


class Batch:
    """Six requests, greedy and sampled, of 0 to 3 drafted tokens, some of them placeholders, filters on; each has its own generator."""

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.seed, self.counts = seed, [3, *torch.randint(0, 4, (5,), generator=generator).tolist()]
        self.temperature = torch.tensor(TEMPERATURES)
        self.cumulative = torch.tensor(self.counts).cumsum(0).int()
        rows = sum(self.counts)
        self.raw = 2 * torch.randn(rows, VOCABULARY, generator=generator)
        # vLLM's C++ kernel looks a placeholder up one entry before its row: a token that the filters cut makes that a rejection.
        self.raw[:, -1] = -30
        noise = 0.8 * torch.randn(rows, VOCABULARY, generator=generator)
        self.p = torch.softmax(self.heated() + noise, -1)
        self.drafted = torch.multinomial(self.p, 1, generator=generator)[:, 0].int()
        agrees = torch.rand(rows, generator=generator) < 0.7
        self.drafted = torch.where(agrees & (self.rows_of(self.temperature) == 0), self.raw.argmax(-1).int(), self.drafted)
        self.drafted[1:][torch.rand(rows - 1, generator=generator) < 0.05] = -1
        self.bonus = torch.randint(VOCABULARY, (6, 1), generator=generator)

    def rows_of(self, values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(torch.tensor(self.counts))

    def heated(self) -> torch.Tensor:
        """The logits over their own request's temperature; greedy rows as they are."""
        return self.raw / self.rows_of(torch.where(self.temperature > 0, self.temperature, 1.0))[:, None]

    def metadata(self, **changes) -> SamplingMetadata:
        generators = {i: torch.Generator().manual_seed(1000 * self.seed + i) for i in range(6)}
        settings = {
            "temperature": self.temperature, "all_greedy": False, "all_random": False, "generators": generators,
            "top_k": torch.full((6,), 20, dtype=torch.int32), "top_p": torch.full((6,), 0.95), "max_num_logprobs": None,
            "no_penalties": True, "prompt_token_ids": None, "output_token_ids": [[] for _ in range(6)],
            "frequency_penalties": torch.zeros(6), "presence_penalties": torch.zeros(6), "repetition_penalties": torch.ones(6),
            "allowed_token_ids_mask": None, "bad_words_token_ids": {}, "logitsprocs": LogitsProcessors(),
        }  # fmt: skip
        return SamplingMetadata(**settings | changes)

    def draws(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(u, race) of request i, as the engine takes them from the request's generator."""
        generator = torch.Generator().manual_seed(1000 * self.seed + i)
        u = torch.empty(self.counts[i], dtype=torch.float64).uniform_(generator=generator)
        return u, 1 / torch.empty(VOCABULARY).exponential_(generator=generator).double().expand(self.counts[i], -1)

    def filtered(self) -> torch.Tensor:
        return engine.apply_sampling_constraints(self.raw.clone(), self.cumulative, self.metadata())

    def run(self, logits: torch.Tensor, with_p: bool = True) -> list[list[int]]:
        """What the engine's rejection_sample, wrapped or not, answers; logits as the filters leave them."""
        out = engine.rejection_sample(
            self.drafted, self.counts, max(self.counts), self.cumulative, self.p if with_p else None, logits, self.bonus, self.metadata()
        )  # fmt: skip
        return [[token for token in row if token >= 0] for row in out.tolist()]

    def expected(self, i: int, logits: torch.Tensor, delta: float, with_p: bool) -> reference.Answer:
        """The reference's answer for request i, without the bonus token."""
        first = sum(self.counts[:i])
        rows = slice(first, first + self.counts[i])
        drafted = self.drafted[rows].tolist()
        if self.temperature[i] == 0:
            return reference.greedy(logits[rows], drafted)
        if not drafted:
            return reference.Answer([], 0, False)
        one_hot = torch.zeros(len(drafted), VOCABULARY, dtype=torch.float64)
        for row, n in zip(one_hot, drafted, strict=True):
            row[n] = float(n >= 0)
        p = self.p[rows].double() if with_p else one_hot
        return reference.sampled(torch.softmax(logits[rows].double(), -1), p, drafted, delta, *self.draws(i), with_p)


@pytest.mark.parametrize("delta", [0.0, 0.5])
@pytest.mark.parametrize("with_p", [True, False], ids=["sampled drafts", "argmax drafts"])
def test_every_request_equals_the_reference(delta, with_p):
    """1,500 requests, none of them different. A decision nearer to a tie than float32 resolves is not counted; there may be 15."""
    build(delta)
    seen = Counter()
    for seed in range(BATCHES):
        batch = Batch(seed)
        logits = batch.filtered()
        before = logits.clone()
        for i, got in enumerate(batch.run(logits, with_p)):
            answer = batch.expected(i, logits, delta, with_p)
            tokens = answer.tokens + ([batch.bonus[i].item()] if answer.accepted == batch.counts[i] else [])
            seen["requests"] += 1
            seen["accepted"] += answer.accepted
            seen["close"] += answer.close
            seen["placeholders"] += -1 in batch.drafted[sum(batch.counts[:i]) : sum(batch.counts[: i + 1])]
            assert got == tokens or answer.close, (seed, i)
        assert torch.equal(logits, before)
    print(dict(seen))
    assert seen["requests"] == 6 * BATCHES and seen["close"] <= 15 and min(seen["accepted"], seen["placeholders"]) > 100


def test_delta_raises_acceptance():
    """Paired on the same draws: of the sampled requests none accepts fewer tokens at δ = 1, and many accept more."""
    lengths = {}
    for delta in (0.0, 1.0):
        build(delta)
        lengths[delta] = [len(row) for seed in range(40) for batch in [Batch(seed)] for row in batch.run(batch.filtered())]
    gains = [more - fewer for fewer, more in zip(lengths[0.0], lengths[1.0], strict=True)]
    assert min(gains) >= 0 and sum(gains) > 20


@pytest.mark.parametrize("delta", [None, 0.0])
def test_without_a_budget_nothing_is_different(delta):
    build(0.5)
    build(None)
    assert not hasattr(engine.rejection_sample, "__wrapped__")
    batches = [Batch(seed) for seed in range(20)]
    plain = [batch.run(batch.heated()) for batch in batches]
    build(delta)
    assert [batch.run(batch.heated()) for batch in batches] == plain


def test_temperatures_reach_their_rows():
    """Guards against vLLM's uninitialised temperatures on a CPU: rows must be divided by their own request's."""
    build(0.5)
    for seed in range(20):
        batch = Batch(seed)
        filtered = batch.filtered()
        kept = filtered.isfinite()
        assert torch.equal(filtered[kept], batch.heated()[kept]) and kept.any(-1).all()


def test_processed_logprobs_stay_the_verifiers():
    """Guards against reporting the shifted distribution: logprobs of a whole forward pass are those of the filtered verifier."""
    sampler = build(1.0, "processed_logprobs")
    batch = Batch(3)
    counts = torch.tensor(batch.counts)
    starts = (counts + 1).cumsum(0) - counts - 1
    target = torch.cat([start + torch.arange(count) for start, count in zip(starts, batch.counts, strict=True)])
    bonus = starts + counts
    logits = torch.randn(sum(batch.counts) + 6, VOCABULARY, generator=torch.Generator().manual_seed(5))
    logits[target] = batch.raw
    metadata = SpecDecodeMetadata(
        batch.drafted, batch.counts, batch.cumulative, (counts + 1).cumsum(0).int(), target, bonus, torch.arange(len(logits))
    )
    out = sampler(metadata, batch.p, logits.clone(), batch.metadata(max_num_logprobs=0))
    verifier = torch.log_softmax(batch.filtered(), -1)
    compared = 0
    for i, row in enumerate(out.sampled_token_ids.tolist()):
        first = sum(batch.counts[:i])
        for j, token in enumerate(row[: batch.counts[i]]):
            if token >= 0:
                reported = out.logprobs_tensors.logprobs.view(6, -1)[i, j]
                assert reported.item() == verifier[first + j, token].item()
                compared += 1
    assert compared >= 6


def test_rules_that_decide_by_themselves_are_refused():
    with pytest.raises(ValueError, match="rejection_sample_method is 'block': leave it out of the speculative config"):
        build(0.5, rejection_sample_method="block")
    build(None, rejection_sample_method="block")
