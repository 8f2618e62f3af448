"""Replays Model Runner V2's sampler exactly in float64 with its own random numbers: python v2_sampler.py prints one JSON object a scenario.

In a process of its own, since the interpreter must be chosen before Triton is imported.
"""

import json
import logging
import types
from collections import Counter

import interpreted  # noqa: F401 (before vLLM)
import reference
import torch
import triton
import triton.language as tl
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.gumbel import murmur3_uniform32, tl_rand32
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode import rejection_sampler as engine

from cactus.integrations import vllm_plugin

buffer_utils.is_uva_available = lambda: False  # no pinned memory here


@triton.jit
def draws(u_ptr, noise_ptr, seed_ptr, pos_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0), tl.arange(0, BLOCK)
    seed, pos = tl.load(seed_ptr + row), tl.load(pos_ptr + row)
    tl.store(u_ptr + row, tl_rand32(seed, pos, includes_zero=False))
    tl.store(noise_ptr + row * V + block, murmur3_uniform32(seed, pos, block), mask=block < V)


REQUESTS, SLOTS, MOST, VOCABULARY = 120, 150, 3, 40
CHOICES = ((0.7, None), (0.0, 1.0), (1.3, 0.1), (1.0, 2.0), (0.5, 0.0))  # temperature, and the request's own delta
DEFAULT = 0.5


def scenario(name: str, with_draft: bool, dtype: torch.dtype, padding: int) -> dict[str, int]:
    """Requests whose answer differs from the reference, and what they covered. padding: entries of the verifier beyond the draft's."""
    generator = torch.Generator().manual_seed(len(name))
    sampler = types.SimpleNamespace(sampling_states=SamplingStates(SLOTS, VOCABULARY), logits_processors=[])
    speculation = types.SimpleNamespace(
        num_speculative_tokens=MOST, enable_adaptive_verification=False, rejection_sample_method="standard",
        method="draft_model", draft_sample_method="probabilistic",
    )  # fmt: skip
    with set_current_vllm_config(VllmConfig(additional_config={"cactus": {"delta": DEFAULT}})):
        engine.RejectionSampler(sampler, speculation, torch.device("cpu"))
    (deltas,) = sampler.logits_processors

    slots = torch.randperm(SLOTS, generator=generator)[:REQUESTS].tolist()
    states, own = sampler.sampling_states, {}
    for i, slot in enumerate(slots):
        temperature, delta = CHOICES[i % len(CHOICES)]
        own[slot] = DEFAULT if delta is None else delta
        params = SamplingParams(temperature=temperature, seed=1000 + i, extra_args=delta is not None and {"cactus_delta": delta})
        states.add_request(slot, params)
        deltas.add_request(slot, params)
    states.apply_staged_writes()
    deltas.apply_staged_writes()

    counts = torch.randint(0, MOST + 1, (REQUESTS,), generator=generator)
    rows = (counts + 1).tolist()
    ends = (counts + 1).cumsum(0)
    mapping = torch.tensor(slots).repeat_interleave(counts + 1)
    local = torch.cat([torch.arange(count) for count in rows])
    temperature = states.temperature.gpu[mapping]
    scale = torch.where(temperature > 0, temperature, 1.0)[:, None]
    raw = 2 * torch.randn(len(mapping), VOCABULARY, generator=generator)
    logits = raw / scale
    logits[torch.rand(logits.shape, generator=generator) < 0.3] = -torch.inf
    logits = logits.to(dtype)
    draft_width = VOCABULARY - padding
    draft = torch.zeros(SLOTS, MOST, draft_width)
    drafted = torch.full((len(mapping),), 7)
    for row, (slot, i) in enumerate(zip(mapping.tolist(), local.tolist(), strict=True)):
        if row + 1 < len(mapping) and local[row + 1] > 0:
            draft[slot, i] = raw[row, :draft_width] + 0.8 * torch.randn(draft_width, generator=generator)
            p = torch.softmax(draft[slot, i] / scale[row], -1)
            drafted[row + 1] = (
                p.multinomial(1, generator=generator) if with_draft and temperature[row] else logits[row, :draft_width].argmax()
            )
    drafted[(local > 0) & (torch.rand(len(mapping), generator=generator) < 0.08)] = -1
    pos, before = local + 5, logits.clone()

    sampled, lengths = engine.rejection_sample(
        logits, draft if with_draft else None, drafted, torch.cat([torch.zeros(1), ends]).int(), pos, torch.tensor(slots).int(),
        mapping.int(), local.int(), states.temperature.gpu, states.seeds.gpu, MOST,
    )  # fmt: skip

    u, noise = torch.empty(len(mapping)), torch.empty(len(mapping), VOCABULARY)
    draws[(len(mapping),)](u, noise, states.seeds.gpu[mapping].contiguous(), pos, V=VOCABULARY, BLOCK=64)
    race = 1 / -torch.log1p(-noise.double())
    width = draft_width if with_draft else VOCABULARY
    seen = Counter(mismatches=0, close=0)
    for i, slot in enumerate(slots):
        last = ends[i].item() - 1
        judged = slice(last - counts[i].item(), last)
        tokens = drafted[judged.start + 1 : last + 1].tolist()
        q = torch.softmax(logits[:, :width].double(), -1)
        if states.temperature.gpu[slot] == 0:
            answer, bonus = reference.greedy(logits[judged, :width], tokens), logits[last, :width].argmax()
        else:
            p = (
                torch.softmax(draft[slot, : len(tokens)].double() / scale[last].double(), -1)
                if with_draft
                else one_hot(tokens, width)
            )
            answer = reference.sampled(q[judged], p, tokens, own[slot], u[judged], race[judged, :width], False)
            bonus = (q[last] * race[last, :width]).argmax()
        expected = answer.tokens + ([bonus.item()] if answer.accepted == len(tokens) else [])
        got = sampled[i, : lengths[i]].tolist()
        seen["mismatches"] += got != expected and not answer.close
        seen["close"] += answer.close
        seen["requests"] += 1
        seen["accepted"] += answer.accepted
        seen["placeholders"] += -1 in tokens
    return {"scenario": name, **seen, "restored": torch.equal(logits, before)}


def one_hot(tokens: list[int], width: int) -> torch.Tensor:
    rows = torch.zeros(len(tokens), width, dtype=torch.float64)
    for row, n in zip(rows, tokens, strict=True):
        row[n] = float(n >= 0)
    return rows


logging.basicConfig(level=logging.INFO)
vllm_plugin.register()
print(json.dumps(scenario("sampled drafts", True, torch.float32, 0)))
print(json.dumps(scenario("argmax drafts", False, torch.float32, 0)))
print(json.dumps(scenario("bfloat16 logits, verifier padded", True, torch.bfloat16, 4)))
