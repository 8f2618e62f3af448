"""Cactus inside transformers' generate: a decoding loop of our own, or one shifted logit in transformers' assisted generation.

    model.generate(**inputs, custom_generate=cactus_generate, draft=draft_model, delta=0.5)
    with cactus_assisted(delta=0.5): model.generate(**inputs, assistant_model=draft_model, do_sample=True)

The first runs any rule of cactus.rules on p and q warped alike and counts what was accepted; the second runs Cactus alone and keeps what
transformers does around it. One text at a time in both. Draws come from torch's global generator: torch.manual_seed repeats a run.
"""

import copy
import inspect
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, StoppingCriteriaList, StopStringCriteria
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationMode,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    utils,
)

from cactus.rules import Cactus, Rule, shift_logits_
from cactus.sampling import draw

# They count their own calls, and here a position is processed twice, for p and for q, discarded positions too.
STATEFUL = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


@dataclass
class CactusOutput(GenerateDecoderOnlyOutput):
    """What generate returns with return_dict_in_generate=True, and two numbers for each verifier pass.

    drafted: tokens the draft proposed, those after an accepted stop left out; accepted: how many of them are in the text. The mean of
    `accepted` is the acceptance length. scores and logits are the verifier's, processed and raw.
    """

    drafted: tuple[int, ...] | None = None
    accepted: tuple[int, ...] | None = None


def cactus_generate(
    model,
    input_ids: Tensor,
    logits_processor,
    stopping_criteria,
    generation_config,
    *,
    draft=None,
    delta: float | None = None,
    rule: Rule | None = None,
    num_draft_tokens: int = 5,
    streamer=None,
    **model_kwargs,
) -> CactusOutput | Tensor:
    """Speculative decoding of `model`, the verifier, with any rule: for `model.generate(custom_generate=cactus_generate, …)`.

    draft: a causal language model of transformers with the verifier's tokenizer; delta is short for rule=Cactus(delta);
    num_draft_tokens: m, tokens drafted per verifier pass. The other arguments are what generate prepares. Logits processors see each
    position's own prefix and treat draft and verifier alike, so they must be functions of (prefix, scores). Tokens after a stop are cut.

    transformers 5.24 does not hand `streamer` and `tokenizer` on to a callable: bind the first, custom_generate=partial(cactus_generate,
    streamer=streamer), or call `generate` of this module, which takes both.

    Returns (1, prompt + new) ids, or CactusOutput with return_dict_in_generate=True. Raises ValueError with a sentence, before any
    model runs unless a cache shows only when filled that it cannot be rolled back.
    """
    config = generation_config
    rule = _chosen_rule(delta, rule)
    _check(model, draft, input_ids, logits_processor, config, num_draft_tokens, model_kwargs)
    verifier = Reader(model, "verifier", model_kwargs)
    drafter = Reader(draft, "draft", _draft_kwargs(draft, model_kwargs))
    kept = config.return_dict_in_generate
    scores, logits = () if kept and config.output_scores else None, () if kept and config.output_logits else None
    drafted, accepted, stopped = [], [], False

    while not stopped:
        start = input_ids.shape[1]
        m = min(num_draft_tokens, stopping_criteria.max_length - start - 1)
        text, p = input_ids, []
        for _ in range(m):
            p.append(_law(logits_processor(text, drafter.read(text, 1)), config.do_sample))
            text = torch.cat([text, draw(p[-1], _uniforms(1, text.device))[:, None]], 1)
        raw = verifier.read(text, m + 1)
        rows = [logits_processor(text[:, : start + i], raw[i : i + 1]) for i in range(m + 1)]
        emitted, passed = _judge(rule, torch.cat(p) if p else None, _law(torch.cat(rows), config.do_sample), text[0, start:])

        for i, token in enumerate(emitted):
            input_ids = torch.cat([input_ids, token.view(1, 1)], 1)
            scores = scores if scores is None else (*scores, rows[i])
            logits = logits if logits is None else (*logits, raw[i : i + 1])
            if streamer is not None:
                streamer.put(token.view(1).cpu())
            stopped = bool(stopping_criteria(input_ids, scores).all())
            if stopped:
                break
        length = input_ids.shape[1]
        drafted.append(m if length - start > passed else length - start)
        accepted.append(min(passed, length - start))
        for reader in (verifier, drafter):
            reader.rewind(length - 1)

    if streamer is not None:
        streamer.end()
    if not kept:
        return input_ids
    return CactusOutput(input_ids, scores, logits, cache=verifier.cache, drafted=tuple(drafted), accepted=tuple(accepted))


def generate(
    model,
    inputs=None,
    *,
    streamer=None,
    tokenizer=None,
    stop_strings=None,
    stopping_criteria=None,
    generation_config=None,
    **arguments,
):
    """`model.generate(…, custom_generate=cactus_generate)` with two arguments more that work: `streamer`, and `stop_strings` with
    `tokenizer`. Takes every argument of generate and of cactus_generate; what `custom_generate/generate.py` hands out."""
    config = generation_config
    if stop_strings is None and config is not None and config.stop_strings is not None:
        config = copy.copy(config)
        stop_strings, config.stop_strings = config.stop_strings, None
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError("Stop strings are searched for in text: pass the model's tokenizer as tokenizer=, too.")
        stopping_criteria = StoppingCriteriaList([*(stopping_criteria or []), StopStringCriteria(tokenizer, stop_strings)])
    return model.generate(
        inputs,
        custom_generate=partial(cactus_generate, streamer=streamer),
        streamer=streamer,  # generate itself puts the prompt
        stopping_criteria=stopping_criteria,
        generation_config=config,
        **arguments,
    )


class Reader:
    """One model that reads the text, and its cache where it has one. kwargs: what generate prepared for it, at the prompt."""

    def __init__(self, model, side: str, kwargs: dict):
        self.model, self.side, self.kwargs = model, side, kwargs
        self.cache, self.first = kwargs.get("cache"), True
        if self.cache is not None:
            self.cache.activate_past_recording()  # windows that have moved on could not be rolled back

    def read(self, ids: Tensor, rows: int) -> Tensor:
        """(rows, V) float32 logits after each of the last `rows` tokens of ids (1, length); computes what the cache lacks of them.
        Raises ValueError where the cache, once filled, cannot be rolled back."""
        length = ids.shape[1]
        inputs = self.model.prepare_inputs_for_generation(
            ids, next_sequence_length=length - self._cached(), is_first_iteration=self.first, **_grown(self.kwargs, length)
        )
        if self.model._supports_logits_to_keep():
            inputs["logits_to_keep"] = rows
        outputs = self.model(**inputs, return_dict=True)
        if self.first and self.cache is not None and not self.cache.is_croppable:
            raise ValueError(
                f"The {self.side}'s cache cannot be rolled back: choose a model with plain attention caches, or pass use_cache=False."
            )
        self.first = False
        return outputs.logits[0, -rows:].to(ids.device, torch.float32)

    def rewind(self, length: int) -> None:
        """Keep the first `length` entries of the cache."""
        if self.cache is not None and not self.first:
            self.cache.crop(min(0, length - self._cached()))  # 0 is no idle call: windows shrink back to their size

    def _cached(self) -> int:
        return 0 if self.cache is None else int(self.cache.get_seq_length())


def _grown(kwargs: dict, length: int) -> dict:
    """kwargs of the prompt, their per-token entries continued to `length` tokens."""
    grown = dict(kwargs)
    for name in ("attention_mask", "position_ids", "token_type_ids"):
        if (value := kwargs.get(name)) is not None:
            more = value[..., -1:].expand(*value.shape[:-1], length - value.shape[-1])
            if name == "attention_mask":
                more = torch.ones_like(more)
            elif name == "position_ids":
                more = more + torch.arange(1, more.shape[-1] + 1, device=more.device)
            grown[name] = torch.cat([value, more], -1)
    return grown


def _draft_kwargs(draft, kwargs: dict) -> dict:
    """The verifier's mask and positions where the draft takes them, and a cache of its own where the verifier has one."""
    takes = inspect.signature(draft.forward).parameters
    shared = {name: kwargs[name] for name in ("attention_mask", "position_ids") if name in takes and name in kwargs}
    cache = {"cache": DynamicCache(config=draft.config)} if kwargs.get("cache") is not None else {}
    return shared | cache | {"use_cache": bool(cache)}


def _law(scores: Tensor, sampled: bool) -> Tensor:
    """(..., V) float32 distribution of processed scores: their softmax, or one-hot at the largest."""
    if sampled:
        return scores.softmax(-1)
    return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)


def _judge(rule: Rule, p: Tensor | None, q: Tensor, n: Tensor) -> tuple[Tensor, int]:
    """The tokens of one block, (passed + 1,), and how many drafted ones passed. p: (m, V), None where m is 0; q: (m + 1, V); n: (m,).
    Raises ValueError for laws that are NaN."""
    m, passed = len(n), 0
    if m:
        gamma, p_drafted = rule.gamma_at(p, q[:m], n), p.gather(-1, n[:, None])[:, 0].double()
        passed = int((_uniforms(m, n.device) * p_drafted < gamma).long().cumprod(0).sum())
    law = rule.recovery(p[passed], q[passed], n[passed]) if passed < m else q[m].double()
    if law.isnan().any() or (m and p_drafted.isnan().any()):
        raise ValueError("A model gave logits that are not finite: load it in bfloat16 or float32.")
    return torch.cat([n[:passed], draw(law, _uniforms(1, n.device)[0])[None]]), passed


def _uniforms(count: int, device: torch.device) -> Tensor:
    return torch.rand(count, dtype=torch.float64, device=device)


def _chosen_rule(delta: float | None, rule: Rule | None) -> Rule:
    if (delta is None) == (rule is None):
        raise ValueError("Say how tokens are accepted, once: delta=0.5 for Cactus, or rule= with a rule of cactus.rules.")
    return rule if delta is None else Cactus(delta)


def _check(model, draft, input_ids: Tensor, processors, config, num_draft_tokens: int, kwargs: dict) -> None:
    """Raises ValueError with a sentence for what cannot be decoded."""
    if not hasattr(draft, "prepare_inputs_for_generation"):
        raise ValueError(
            "No draft: pass draft=, a causal language model with the verifier's tokenizer (generate does not hand "
            "assistant_model= on to a custom_generate callable)."
        )
    if isinstance(num_draft_tokens, bool) or num_draft_tokens != int(num_draft_tokens) or num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens must be a whole number from 1 up, got {num_draft_tokens}.")
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"Cactus samples or decodes greedily, but these settings ask for {mode.value.replace('_', ' ')} (num_beams is "
            f"{config.num_beams}): leave num_beams and the settings of other modes at their defaults."
        )
    if len(input_ids) != 1:
        raise ValueError(
            f"Cactus decodes one text at a time, got {len(input_ids)}: call generate once for each, with num_return_sequences=1."
        )
    for side, one in (("verifier", model), ("draft", draft)):
        if one.config.is_encoder_decoder:
            raise ValueError(f"The {side} is an encoder–decoder model: choose a decoder-only one.")
        if one._is_stateful:
            raise ValueError(f"The {side} keeps a state that cannot be rolled back: choose a model with plain attention caches.")
    sizes = [one.config.get_text_config().vocab_size for one in (model, draft)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"The verifier's vocabulary has {sizes[0]} entries, the draft's {sizes[1]}: choose a draft with the verifier's tokenizer "
            "and as many embeddings."
        )
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError("The draft cannot read the verifier's inputs_embeds: pass input_ids.")
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise ValueError("Attentions and hidden states are not collected: leave out output_attentions and output_hidden_states.")
    if config.prefill_chunk_size is not None:
        raise ValueError("The prompt is read at once: leave out prefill_chunk_size.")
    for processor in processors:
        if isinstance(processor, STATEFUL):
            raise ValueError(f"{type(processor).__name__} counts its own calls and cannot judge drafted tokens: leave it out.")
    cached = int(kwargs["cache"].get_seq_length()) if kwargs.get("cache") is not None else 0
    mask = kwargs.get("attention_mask")
    whole = mask.shape[1] if mask is not None else getattr(config, "_mask_length", input_ids.shape[1])
    if cached and (cached >= input_ids.shape[1] or whole != input_ids.shape[1]):
        raise ValueError(
            f"The cache holds {cached} tokens, but input_ids are not the whole text ({input_ids.shape[1]} tokens): the draft has to read "
            "all of it, so pass the cached tokens and the new ones."
        )


# What transformers 5.24 calls by place and by name.
ASSISTED = ("candidate_input_ids", "candidate_logits", "candidate_length", "new_logits", "assistant_ensemble_weight")
_budget: ContextVar[float | None] = ContextVar("cactus_budget", default=None)
_lock = threading.Lock()
_entered = 0
_original = None


@contextmanager
def cactus_assisted(delta: float):
    """Within it, transformers' assisted generation with do_sample=True accepts as Cactus does.

    Its private `_speculative_sampling` gets the verifier's logits with one entry per drafted token shifted (cactus.rules.shift_logits_),
    after the logits processors, and does the rest; delta 0 leaves everything as it was, to the bit. Greedy runs and drafts without
    logits (prompt look-up) do not come there. May be nested: the innermost delta counts. It holds in the thread, or the asyncio task,
    that entered it: a thread that generates has to enter for itself.

    Raises ValueError for a delta below 0 or not finite, and while it holds for assistant_ensemble_weight, which is another rule;
    RuntimeError where this transformers has no such function or one with other arguments.
    """
    global _entered, _original
    Cactus(delta)
    with _lock:
        if not _entered:
            _original = _assisted_function()
            utils._speculative_sampling = _shifted
        _entered += 1
    token = _budget.set(delta)
    try:
        yield
    finally:
        _budget.reset(token)
        with _lock:
            _entered -= 1
            if not _entered:
                utils._speculative_sampling = _original


def _shifted(candidate_input_ids, candidate_logits, candidate_length, new_logits, assistant_ensemble_weight=None):
    if delta := _budget.get():
        if assistant_ensemble_weight is not None:
            raise ValueError("assistant_ensemble_weight and Cactus are two rules for one decision: leave one of them out.")
        new_logits = new_logits.clone()  # generate returns the rows as scores
        shift_logits_(new_logits[:, :candidate_length], candidate_input_ids[:, -candidate_length:], delta)
    return _original(candidate_input_ids, candidate_logits, candidate_length, new_logits, assistant_ensemble_weight)


def _assisted_function():
    function = getattr(utils, "_speculative_sampling", None)
    arguments = tuple(inspect.signature(function).parameters) if function else ()
    if arguments != ASSISTED:
        there = f"takes ({', '.join(arguments)})" if function else "is gone"
        raise RuntimeError(
            f"transformers {transformers.__version__} is not one that cactus_assisted knows: its private _speculative_sampling {there}. "
            "Use custom_generate=cactus_generate, or transformers 5.24."
        )
    return function
