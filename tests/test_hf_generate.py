"""Cactus in transformers' generate, on tiny random models: the loop against generate itself and against the laws, the folder, the shift
inside assisted generation; the embedded pair once."""

import random
import runpy
import subprocess
import sys
import threading
from collections import Counter
from copy import deepcopy
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import transformers
from scipy.stats import chisquare, kstest
from test_pairs import small
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    T5Config,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    TopKLogitsWarper,
)
from transformers.dynamic_module_utils import get_imports
from transformers.generation import utils

from cactus import embedded
from cactus.integrations import hf_generate
from cactus.integrations.hf_generate import CactusOutput, cactus_assisted, cactus_generate
from cactus.rules import TAS, Cactus, SpS

ROOT = Path(__file__).parent.parent
PROMPT = torch.tensor([[0, 3, 4, 5]])
FALSE_ALARM = 1e-6


def strayed(model, noise):
    """The model with noise on every weight: a draft that agrees with it now and then."""
    out, generator = deepcopy(model), torch.Generator().manual_seed(1)
    for parameter in out.parameters():
        parameter.data += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return out


def toy():
    torch.manual_seed(1)  # whose greedy text is varied
    shape = {"vocab_size": 11, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(**shape, max_position_embeddings=256, initializer_range=0.5, bos_token_id=0, eos_token_id=None)
    ).eval()


VERIFIER = toy()
DRAFT = strayed(VERIFIER, 0.25)
GPT2 = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=32, n_layer=1, n_head=2, n_positions=64, initializer_range=0.5)).eval()
GEMMA = small("gemma2", seed=2)  # windows of 8 tokens
LETTERS = Tokenizer(models.BPE({letter: i for i, letter in enumerate("abcdefghijk")}, []))
LETTERS.decoder = decoders.Fuse()
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=LETTERS)


def run(model=VERIFIER, inputs=PROMPT, draft=DRAFT, seed=0, **settings):
    settings = {"delta": 0.5, "max_new_tokens": 40, "eos_token_id": None, "custom_generate": cactus_generate} | settings
    torch.manual_seed(seed)
    return model.generate(inputs, draft=draft, **settings)


def plain(model=VERIFIER, inputs=PROMPT, **settings):
    return model.generate(inputs, **{"max_new_tokens": 40, "eos_token_id": None} | settings)


class Collected:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(value.tolist())

    def end(self):
        self.calls.append("end")


class Salted(LogitsProcessor):
    """Scores that depend on every token of the prefix and on its length: a wrong prefix gives other scores."""

    def __call__(self, input_ids, scores):
        salt = torch.Generator().manual_seed(hash(tuple(input_ids[0].tolist())) % 2**40)
        return scores + 3 * torch.randn(scores.shape, generator=salt)


class StopsAt(StoppingCriteria):
    """Stops once `token` has come twice; with scores, checks that there is one for each new token."""

    def __init__(self, token, scored=False):
        self.token, self.scored = token, scored

    def __call__(self, input_ids, scores, **_):
        assert not self.scored or len(scores) == input_ids.shape[1] - PROMPT.shape[1]
        return torch.tensor([(input_ids == self.token).sum() >= 2])


PADDED = {"inputs": torch.tensor([[1, 1, 3, 4, 5]]), "attention_mask": torch.tensor([[0, 0, 1, 1, 1]])}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2, "logits_processor": LogitsProcessorList([Salted()])},
        {"eos_token_id": [6, 9]},
        {"eos_token_id": [6, 9], "min_new_tokens": 30},
        {"stopping_criteria": StoppingCriteriaList([StopsAt(1)])},
        {"stopping_criteria": StoppingCriteriaList([StopStringCriteria(TOKENIZER, ["gh", "bj"])])},
        {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(60)])},  # generate puts it in the place of its own
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"max_new_tokens": 1},
        {"max_new_tokens": None, "max_length": 9},
        PADDED,
        {"model": GEMMA},
        {"model": GEMMA, "max_new_tokens": 1},
    ],
    ids=lambda settings: str(settings)[:40],
)
def test_greedy_is_generate_token_for_token(settings):
    """With a draft that strays, and with the verifier itself, whose blocks are accepted whole, so that stops fall inside them."""
    model = settings.get("model", VERIFIER)
    expected = plain(**settings, do_sample=False)
    assert torch.equal(run(**settings, do_sample=False, draft=strayed(model, 0.1)), expected)
    assert torch.equal(run(**settings, do_sample=False, draft=model, delta=None, rule=SpS(), num_draft_tokens=7), expected)


def test_what_is_cut_after_a_stop_is_not_counted():
    out = run(draft=VERIFIER, eos_token_id=[6, 9], do_sample=False, num_draft_tokens=7, return_dict_in_generate=True)
    assert out.accepted == out.drafted == (7, 3) and out.sequences.shape[1] == PROMPT.shape[1] + 11


def test_output_holds_what_generate_would():
    """Scores, logits, cache and stream of a greedy run; the cache can be continued from."""
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "do_sample": False, "temperature": None}
    asked |= {"repetition_penalty": 1.3, "stopping_criteria": StoppingCriteriaList([StopsAt(1, scored=True)])}
    ours, theirs = Collected(), Collected()
    expected = plain(**asked, streamer=theirs)
    out = run(**asked, streamer=ours, custom_generate=partial(cactus_generate, streamer=ours))
    assert isinstance(out, CactusOutput) and torch.equal(out.sequences, expected.sequences)
    assert ours.calls == theirs.calls and ours.calls[-1] == "end"
    for mine, its in ((out.scores, expected.scores), (out.logits, expected.logits)):
        torch.testing.assert_close(torch.cat(mine), torch.cat(its), atol=1e-4, rtol=1e-4)
    assert sum(out.accepted) + len(out.accepted) - out.sequences.shape[1] + PROMPT.shape[1] in (
        0,
        1,
    )  # 1: stopped at a drafted token
    assert out.cache.get_seq_length() == expected.cache.get_seq_length() == out.sequences.shape[1] - 1
    again = {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(run(inputs=out.sequences, cache=out.cache, **again), plain(inputs=out.sequences, **again))
    assert run().shape == (1, PROMPT.shape[1] + 40)


@pytest.mark.parametrize("model", [VERIFIER, GPT2], ids=lambda model: model.config.model_type)
def test_draft_and_verifier_see_the_same_prefix(model):
    """With the verifier as draft p is q but for rounding: one accepted with a wrong prefix or, in GPT-2, position would be luck."""
    settings = {"logits_processor": LogitsProcessorList([Salted()]), "repetition_penalty": 1.3, "do_sample": True}
    out = run(model, draft=model, delta=0.0, return_dict_in_generate=True, **settings, **PADDED)
    assert out.accepted == out.drafted == (5,) * 6 + (3,)


def test_a_draft_is_refilled_after_a_full_block_and_rolled_back_after_a_rejection():
    """The draft's forward passes read one token each, two after a fully accepted block; the verifier's the m drafted and one before."""
    seen = {"draft": [], "verifier": []}
    hooks = [
        model.register_forward_pre_hook(
            lambda _, __, kwargs, side=side: seen[side].append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        for side, model in (("draft", DRAFT), ("verifier", VERIFIER))
    ]
    out = run(do_sample=True, return_dict_in_generate=True, delta=1.0)
    for hook in hooks:
        hook.remove()
    full = [accepted == 5 for accepted in out.accepted]
    assert any(full) and not all(full)
    assert seen["verifier"] == [PROMPT.shape[1] + 5, *(drafted + 1 for drafted in out.drafted[1:])]
    expected = [PROMPT.shape[1] + 0, 1, 1, 1, 1]
    for before, drafted in zip(full, out.drafted[1:], strict=False):
        expected += [1 + before, *[1] * (drafted - 1)][:drafted]
    assert seen["draft"] == expected


WARPED = {"do_sample": True, "repetition_penalty": 1.3, "temperature": 0.9, "top_k": 7}


def laws_of(ids, first):
    """p and q, (new, V), of every new token, from one pass of each model over the whole text and processors of our own."""
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.9), TopKLogitsWarper(7)])
    with torch.no_grad():
        rows = [model(ids).logits[0].float() for model in (DRAFT, VERIFIER)]
    places = range(first, ids.shape[1])
    return [torch.cat([processors(ids[:, :i], each[i - 1][None]).softmax(-1) for i in places]) for each in rows]


@cache
def sampled(rule):
    """Four texts of 240 tokens."""
    settings = {"delta": None, "rule": rule, "num_draft_tokens": 3, "max_new_tokens": 240, "return_dict_in_generate": True}
    return [run(seed=seed, **settings, **WARPED) for seed in range(4)]


def places_in_law(rule, law):
    """Where each token sampled by `rule` falls in `law`, spread over its own mass: independent and uniform on [0, 1) if that is its
    law. h_alg at judged positions, q at bonus ones. Tokens in the order of p/q, so that a lean towards the draft or away from it adds
    up over contexts."""
    spread, numbers = random.Random(0), []
    for out in sampled(rule):
        p, q = laws_of(out.sequences, PROMPT.shape[1])
        h, ratio = law.effective(p, q), torch.nan_to_num(p / q, posinf=1e9)
        kinds = [i < drafted for drafted, accepted in zip(out.drafted, out.accepted, strict=True) for i in range(accepted + 1)]
        for place, (judged, token) in enumerate(zip(kinds, out.sequences[0, PROMPT.shape[1] :], strict=True)):
            row, order = (h if judged else q.double())[place], ratio[place]
            numbers.append((row[order < order[token]].sum() + spread.random() * row[order == order[token]].sum()).item())
    return numbers


@pytest.mark.parametrize("rule", [SpS(), Cactus(0.5), Cactus(0.3, solver="exact"), TAS()], ids=str)
def test_tokens_follow_their_law(rule):
    """Kolmogorov–Smirnov on 960 tokens, contexts and kinds of position mixed; false alarm 1e-6 on a machine of other rounding."""
    assert kstest(places_in_law(rule, rule), "uniform").pvalue > FALSE_ALARM


class Stubborn(SpS):
    """Draws the replacement of a rejected token from the draft again."""

    def recovery(self, p, q, n):
        return p.double()


@pytest.mark.parametrize(("rule", "law"), [(Stubborn(), SpS()), (Cactus(0.5), SpS()), (SpS(), Cactus(0.5))], ids=str)
def test_the_test_of_laws_sees_a_wrong_rule(rule, law):
    assert kstest(places_in_law(rule, law), "uniform").pvalue < FALSE_ALARM


@pytest.mark.parametrize("side", ["draft", "verifier"])
def test_logits_that_are_not_finite_are_said(side):
    """Guards against a draft whose every token is rejected, and a verifier whose last token is drawn, because their laws are NaN."""
    models = {"draft": DRAFT, "verifier": VERIFIER}
    handle = models[side].get_output_embeddings().register_forward_hook(lambda *arguments: arguments[2] * torch.nan)
    try:
        with pytest.raises(ValueError, match="logits that are not finite"):
            run(do_sample=True)
    finally:
        handle.remove()


def test_draws_come_from_torchs_generator():
    assert torch.equal(run(do_sample=True, seed=1), run(do_sample=True, seed=1))
    assert not torch.equal(run(do_sample=True, seed=1), run(do_sample=True, seed=2))


FOLDER = {"custom_generate": str(ROOT), "trust_remote_code": True}


@pytest.mark.parametrize("sampled", [False, True])
def test_the_folder_gives_what_the_callable_gives(sampled):
    """The folder takes streamer and stop strings as generate does; the callable needs them bound and as a criterion."""
    ours, theirs, strings = Collected(), Collected(), ["gh", "i"]
    common = {"do_sample": sampled, "return_dict_in_generate": True, "repetition_penalty": 1.2}
    bound = partial(cactus_generate, streamer=ours)
    stops = StoppingCriteriaList([StopStringCriteria(TOKENIZER, strings)])
    one = run(**common, custom_generate=bound, streamer=ours, stopping_criteria=stops)
    other = run(**common, **FOLDER, streamer=theirs, tokenizer=TOKENIZER, stop_strings=strings)
    config = GenerationConfig(**common, stop_strings=strings, max_new_tokens=40)
    torch.manual_seed(0)
    third = hf_generate.generate(VERIFIER, PROMPT, generation_config=config, tokenizer=TOKENIZER, draft=DRAFT, delta=0.5)
    assert one.sequences.shape[1] < PROMPT.shape[1] + 40 and config.stop_strings == strings
    for each in (other, third):
        assert torch.equal(one.sequences, each.sequences) and one.accepted == each.accepted
    assert ours.calls == theirs.calls


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match="pass the model's tokenizer as tokenizer="):
        run(**FOLDER, stop_strings=["gh"])


def test_a_text_streamer_ends():
    streamer = TextIteratorStreamer(TOKENIZER)
    out = run(**FOLDER, do_sample=False, streamer=streamer)
    assert "".join(streamer) == TOKENIZER.decode(out[0])


def test_the_folder_without_the_package_names_its_remedy(monkeypatch):
    """Regression: transformers, where it finds a missing import, tells the user to install `cactus`, on PyPI another project."""
    file = ROOT / "custom_generate/generate.py"
    assert get_imports(file) == []
    monkeypatch.setitem(sys.modules, "cactus.integrations.hf_generate", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[models\]' in a checkout"):
        runpy.run_path(str(file))


def test_the_folder_of_integrations_loads_nothing():
    code = "import sys, cactus.integrations; sys.exit('transformers' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def seq2seq():
    shape = {"vocab_size": 11, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**shape)).eval()


def filled_cache():
    return run(return_dict_in_generate=True, max_new_tokens=3, do_sample=False).cache


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft": None}, r"No draft: pass draft=.*assistant_model"),
        ({"draft": "a/name"}, "No draft: pass draft="),
        ({"draft": None, "assistant_model": DRAFT}, "No draft: pass draft="),
        ({"draft": small(vocab=12)}, "vocabulary has 11 entries, the draft's 12"),
        ({"draft": seq2seq()}, "draft is an encoder–decoder"),
        ({"model": seq2seq()}, "verifier is an encoder–decoder"),
        ({"draft": small("mamba")}, "draft keeps a state that cannot be rolled back"),
        ({"model": small("mamba")}, "verifier keeps a state"),
        ({"inputs": PROMPT.expand(2, -1)}, "one text at a time, got 2"),
        ({"num_return_sequences": 3, "do_sample": True}, "one text at a time, got 3"),
        ({"num_beams": 2}, r"ask for beam search \(num_beams is 2\)"),
        ({"prompt_lookup_num_tokens": 3}, "ask for assisted generation"),
        ({"delta": None}, "Say how tokens are accepted, once"),
        ({"rule": SpS()}, "Say how tokens are accepted, once"),
        ({"delta": -1}, "delta must be a number from 0 up"),
        ({"num_draft_tokens": 0}, "whole number from 1 up, got 0"),
        ({"num_draft_tokens": 2.5}, "whole number from 1 up, got 2.5"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "hidden states are not collected"),
        ({"prefill_chunk_size": 2}, "leave out prefill_chunk_size"),
        ({"guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidanceLogitsProcessor counts its own calls"),
        ({"cache": filled_cache}, "The cache holds 6 tokens"),
        ({"inputs": None, "inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds: pass input_ids"),
        (
            {"cache": filled_cache, "inputs": PROMPT.repeat(1, 2), "attention_mask": torch.ones(1, 14)},
            "not the whole text",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_decoded_is_refused_before_a_model_runs(settings, message):
    def never(*_):
        raise AssertionError("a model ran")

    settings = {name: value() if value is filled_cache else value for name, value in settings.items()}
    models = [one for one in (settings.get("model", VERIFIER), settings.get("draft", DRAFT)) if isinstance(one, torch.nn.Module)]
    hooks = [one.register_forward_pre_hook(never) for one in models]
    try:
        with pytest.raises(ValueError, match=message):
            run(**settings)
    finally:
        for hook in hooks:
            hook.remove()


def test_a_cache_that_cannot_be_rolled_back_is_refused():
    cache = DynamicCache(config=VERIFIER.config)
    cache.layers[0].is_croppable = False  # as quantised caches say of themselves
    with pytest.raises(ValueError, match="The verifier's cache cannot be rolled back"):
        run(cache=cache)


# The shift inside transformers' own assisted generation.


def assisted(delta=None, seed=0, tokens=150, **settings):
    """A run of transformers' assisted generation, within cactus_assisted if there is a delta, and how often the verifier ran."""
    passes = []
    hook = VERIFIER.register_forward_hook(lambda *_: passes.append(1))
    settings = {"do_sample": True, "return_dict_in_generate": True, "output_scores": True, "eos_token_id": None} | settings
    torch.manual_seed(seed)
    try:
        if delta is None:
            out = VERIFIER.generate(PROMPT, assistant_model=DRAFT, max_new_tokens=tokens, **settings)
        else:
            with cactus_assisted(delta):
                out = VERIFIER.generate(PROMPT, assistant_model=DRAFT, max_new_tokens=tokens, **settings)
    finally:
        hook.remove()
    return out, len(passes)


def test_delta_0_and_greedy_leave_assisted_generation_as_it_is():
    for delta, settings in ((0, {"temperature": 0.8, "top_k": 6}), (5.0, {"do_sample": False})):
        (expected, passes), (out, ours) = assisted(**settings, tokens=60), assisted(delta, **settings, tokens=60)
        assert torch.equal(out.sequences, expected.sequences) and passes == ours
        assert all(map(torch.equal, out.scores, expected.scores))


def test_assisted_generation_accepts_more_with_delta():
    """Fixed seeds; 150 tokens cost 111, 86 and 70 passes where this was written."""
    passes = [assisted(delta)[1] for delta in (0, 0.5, 2.0)]
    assert passes[0] > passes[1] > passes[2]


def test_scores_stay_the_verifiers():
    """Regression: a shift in place would come out of generate as scores that no model gave."""
    out, _ = assisted(2.0, tokens=20)
    with torch.no_grad():
        logits = VERIFIER(out.sequences).logits[0, PROMPT.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.cat(out.scores), logits, atol=1e-4, rtol=1e-4)


def first_tokens(delta, count, seed=0):
    """The first token that transformers' function emits for one drafted token, `count` times, and the two laws."""
    generator = torch.Generator().manual_seed(seed)
    draft, verifier = (torch.randn(1, rows, 6, generator=generator) * 1.5 for rows in (1, 2))
    p, q = draft[0, 0].softmax(-1), verifier[0, 0].softmax(-1)
    torch.manual_seed(seed)
    drafted = torch.multinomial(p, count, replacement=True)
    with cactus_assisted(delta):
        return [utils._speculative_sampling(n.view(1, 1), draft, 1, verifier)[0][0, 0].item() for n in drafted], p, q


def test_assisted_generation_emits_h_alg():
    """Chi-square over 6 tokens on 6,000 draws; false alarm 1e-6; SpS's law is told apart."""
    tokens, p, q = first_tokens(0.5, 6000)
    seen = [Counter(tokens)[token] for token in range(6)]
    for law, right in ((Cactus(0.5), True), (SpS(), False)):
        assert (chisquare(seen, law.effective(p, q) * 6000).pvalue > FALSE_ALARM) == right


def test_the_function_is_restored_nested_and_after_errors():
    before = utils._speculative_sampling
    with pytest.raises(KeyError), cactus_assisted(0.5):
        raise KeyError
    assert utils._speculative_sampling is before
    with cactus_assisted(0):
        with cactus_assisted(2.0):
            inner = assisted(None, tokens=40)[0].sequences
        outer = assisted(None, tokens=40)[0].sequences
        assert utils._speculative_sampling is not before
    assert utils._speculative_sampling is before
    assert torch.equal(inner, assisted(2.0, tokens=40)[0].sequences)
    assert torch.equal(outer, assisted(None, tokens=40)[0].sequences)
    assert not torch.equal(inner, outer)


def test_another_thread_is_left_alone():
    drawn = {}

    def draws(name):
        torch.manual_seed(0)
        logits = torch.zeros(1, 2, 6).index_fill(-1, torch.tensor(0), -2.0)
        drawn[name] = [
            utils._speculative_sampling(torch.zeros(1, 1, dtype=int), torch.zeros(1, 1, 6), 1, logits)[1].item() for _ in range(99)
        ]

    draws("plain")
    with cactus_assisted(2.0):
        thread = threading.Thread(target=draws, args=("thread",))
        thread.start()
        thread.join()
        draws("here")
    assert drawn["thread"] == drawn["plain"] and sum(drawn["here"]) > sum(drawn["plain"])


def test_what_cannot_be_shifted_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="delta must be a number"), cactus_assisted(-1):
        pass
    with pytest.raises(ValueError, match="two rules for one decision"):
        assisted(0.5, assistant_ensemble_weight=0.5)
    version = transformers.__version__
    monkeypatch.setattr(utils, "_speculative_sampling", lambda candidates, logits: None)
    with (
        pytest.raises(RuntimeError, match=rf"transformers {version} is not one .* takes \(candidates, logits\)"),
        cactus_assisted(1),
    ):
        pass
    monkeypatch.delattr(utils, "_speculative_sampling")
    with pytest.raises(RuntimeError, match="is gone"), cactus_assisted(1):
        pass


def test_the_embedded_pair(verifier_module, embedded_folder):
    """A chat's greedy answer is generate's, and comes through a streamer; more than one drafted token per pass is accepted."""
    verifier, tok = verifier_module, AutoTokenizer.from_pretrained(embedded_folder)
    chat = [{"role": "user", "content": "Name three rivers in Europe."}]
    inputs = tok.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    settings = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    expected = verifier.generate(**inputs, **settings).sequences
    streamer = TextIteratorStreamer(tok, skip_prompt=True)
    draft = embedded.draft_from(verifier, 5)
    out = verifier.generate(**inputs, **settings, **FOLDER, draft=draft, delta=0.1, streamer=streamer)
    assert torch.equal(out.sequences, expected) and sum(out.accepted) > len(out.accepted)
    assert "".join(streamer) == tok.decode(expected[0, inputs["input_ids"].shape[1] :])
