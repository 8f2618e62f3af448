"""Loading pairs: vocabularies, widths, caches, prompts, on small random models of several architectures saved to folders."""

import gc
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
)

from cactus import pairs
from cactus.decoding import decode, run
from cactus.pairs import PairError, PromptError
from cactus.rules import TAS, Cactus, SpS
from cactus.sampling import Sampling
from cactus.trace import Settings

WORDS = ["<s>", "</s>", "hello", "world", "red", "green", "blue", "one", "two", "three", "."]
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }} {% endfor %}"


def tokenizer(words=WORDS, bos=False):
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="."))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    out = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token=".")
    out.chat_template = TEMPLATE
    return out


def small(kind="llama", vocab=11, seed=0):
    torch.manual_seed(seed)
    shape = {"vocab_size": vocab, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 1}
    attention = {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    attention["max_position_embeddings"] = 256
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape, **attention, initializer_range=0.5)).eval()
    if kind == "gemma2":
        return Gemma2ForCausalLM(Gemma2Config(**shape, **attention, initializer_range=0.5, sliding_window=8, pad_token_id=0)).eval()
    return MambaForCausalLM(MambaConfig(**shape, state_size=4, pad_token_id=0)).eval()


@pytest.fixture
def folder(tmp_path):
    def save(name, model=None, words=WORDS, bos=False):
        (model or small()).save_pretrained(tmp_path / name)
        tokenizer(words, bos).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save


def cacheless(model, size, ids):
    """The next logits without a cache: transformers' for one of its modules, else those of the whole text read at once."""
    with torch.inference_mode():
        if isinstance(model, torch.nn.Module):
            return model(input_ids=torch.tensor([ids])).logits[0, -1, :size].float()
        return model.open().forward(torch.tensor(ids), 1)[0, :size]


def plain_greedy(pair, prompt, count):
    ids = list(prompt)
    while len(ids) < len(prompt) + count and ids[-1] not in pair.eos_ids:
        ids.append(cacheless(pair.verifier, pair.verifier.vocab_size, ids).argmax().item())
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("m", [1, 3, 5])
def test_caches_stay_exact_beyond_any_window(folder, kind, m):
    """Guards against entries left after a roll-back and evicted ones that cannot come back: lengths as designed, next logits equal a
    cacheless forward within 1e-4, greedy equals the plain loop over 60 tokens, window 8."""
    modules = small(kind), small(kind, seed=1)
    loaded = pairs.load(folder("v", modules[0]), folder("d", modules[1]), device="cpu")
    loaded.eos_ids, prompt, spies = (), [2, 3, 4], []
    for model in (loaded.verifier, loaded.draft):
        open_plain = model.open
        model.open = lambda open_plain=open_plain: spies.append(open_plain()) or spies[-1]
    done = list(prompt)
    for round in decode(loaded, prompt, SpS(), Settings(Sampling(1.0, 0, 1), m, 30, 3)):
        done += [token.id for token in round.emitted]
        if round.stop:
            break
        full = bool(round.drafted) and round.accepted == len(round.drafted)
        assert [spy.length for spy in spies] == [len(done) - 1, len(done) - (2 if full else 1)]
        for spy, module in zip(spies, modules, strict=True):
            size = spy.length
            after = spy.forward(torch.tensor(done[size:]), 1)[0]
            spy.crop(size)
            torch.testing.assert_close(after, cacheless(module, after.shape[0], done), atol=1e-4, rtol=0)
    ids = [token.id for round in decode(loaded, prompt, SpS(), Settings(Sampling(0), m, 60)) for token in round.emitted]
    assert ids == plain_greedy(loaded, prompt, 60)


def test_transformers_crops_by_a_negative_count():
    """The library fact that Context.crop rests on; it changed between versions."""
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 5, 4), torch.zeros(1, 1, 5, 4), 0)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(3)
    cache.crop(-2)
    assert cache.get_seq_length() == 3


def test_a_cache_that_cannot_be_cropped_is_refused(folder):
    with pytest.raises(PairError, match="cache cannot be rolled back"):
        pairs.load(folder("v", small("mamba")), folder("d"), device="cpu")


@pytest.mark.parametrize("rule", [SpS(), Cactus(0.5), TAS()])
@pytest.mark.parametrize("widths", [(16, 11), (11, 16), (24, 16)])
def test_padded_embeddings_are_cut_to_the_tokenizer(folder, rule, widths):
    """Guards against different logit widths over one tokenizer, and against ids beyond it, even where a model puts its mass there."""
    verifier, draft = (small(vocab=width, seed=i) for i, width in enumerate(widths))
    for model in (verifier, draft):
        with torch.no_grad():
            model.get_output_embeddings().weight[len(WORDS) :] *= 50
    loaded = pairs.load(folder("v", verifier), folder("d", draft), device="cpu")
    loaded.eos_ids = ()
    rounds = list(decode(loaded, [2, 3], rule, Settings(Sampling(1.0, 0, 1), 3, 40)))
    for token in (token for round in rounds for token in round.drafted):
        assert max(token.row.ids) < len(WORDS)
        assert sum(token.row.p) == pytest.approx(1, abs=1e-5)
        assert sum(token.row.q) == pytest.approx(1, abs=1e-5)
    assert all(token.id < len(WORDS) for round in rounds for token in round.emitted)


def test_vocabularies_that_differ_are_refused_with_an_example(folder):
    """Equal sizes are not enough: two ids swapped."""
    swapped = [*WORDS]
    swapped[4], swapped[5] = swapped[5], swapped[4]
    with pytest.raises(PairError, match=r"token 'red' is id 4 in one and 5 in the other"):
        pairs.load(folder("v"), folder("d", words=swapped), device="cpu")
    with pytest.raises(PairError, match=r"token 'extra' \(id 11\) is only in the draft's"):
        pairs.load(folder("v"), folder("d", small(vocab=12), words=[*WORDS, "extra"]), device="cpu")


def test_exactly_one_beginning_token(folder):
    """Guards against a template that writes the token and a tokenizer that adds it again."""
    loaded = pairs.load(folder("v", bos=True), device="cpu")
    assert loaded.encode("hello world", chat=True) == [0, 2, 3]
    assert loaded.encode("hello world", chat=False) == [0, 2, 3]
    plain = pairs.load(folder("w", bos=False), device="cpu")
    assert plain.encode("hello world", chat=False) == [2, 3]


@pytest.mark.parametrize("prompt", ["", " ", "\n", "\t \n"])
def test_blank_prompts_are_refused(folder, prompt):
    loaded = pairs.load(folder("v"), device="cpu")
    for chat in (True, False):
        with pytest.raises(PromptError, match="prompt is empty"):
            run(loaded, prompt, SpS(), Settings(), chat)


@pytest.mark.parametrize("chat", [True, False])
def test_prompts_that_are_no_unicode_are_refused(folder, chat):
    """Guards against a TypeError of the tokenizer: bytes of another encoding on a command line come as lone surrogates."""
    with pytest.raises(PromptError, match="not valid Unicode"):
        pairs.load(folder("v"), device="cpu").encode("caf\udce9", chat)


def test_one_token_and_special_token_prompts_run(folder):
    loaded = pairs.load(folder("v"), device="cpu")
    loaded.eos_ids = ()
    for prompt in ("hello", "</s>"):
        ids = loaded.encode(prompt, chat=False)
        assert len(ids) == 1
        trace, rounds = run(loaded, prompt, SpS(), Settings(Sampling(0), 3, 12), chat=False)
        list(rounds)
        assert trace.ids == plain_greedy(loaded, ids, 12)


def test_half_a_character_is_refused(folder):
    """Guards against the tokenizer's TypeError: bytes that are not UTF-8 come from the command line as lone surrogates."""
    with pytest.raises(PromptError, match="not valid Unicode text"):
        pairs.load(folder("v"), device="cpu").encode("hello \udcff", chat=False)


def test_a_token_beyond_the_embeddings_is_refused(folder):
    """Guards against an index error on the CPU, and a dead process on a GPU, for a tokenizer with more tokens than the model knows."""
    loaded = pairs.load(folder("v", words=[*WORDS, "extra"]), device="cpu")
    with pytest.raises(PromptError, match="holds token 11, but draft and verifier both know ids up to 10 only"):
        loaded.encode("hello extra", chat=False)


def test_too_long_names_both_numbers(folder):
    loaded = pairs.load(folder("v"), device="cpu")
    with pytest.raises(PromptError, match=r"has 201 tokens, but with 96 new tokens this pair has room for 160 \(context 256\)"):
        run(loaded, "one " * 201, SpS(), Settings(), chat=False)


def test_no_template_says_so(folder):
    loaded = pairs.load(folder("v"), device="cpu")
    loaded.tokenizer.chat_template = None
    with pytest.raises(PromptError, match="no chat template: choose raw text"):
        loaded.encode("hello", chat=True)


def test_any_end_id_of_the_verifier_counts(folder):
    model = small()
    model.generation_config.eos_token_id = [1, 10]
    assert pairs.load(folder("v", model), device="cpu").eos_ids == (1, 10)


def test_what_cannot_be_loaded_is_one_sentence(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(PairError, match="could not be loaded as a causal language model"):
        pairs.load(str(tmp_path / "empty"), device="cpu")
    cut = Path(folder("cut")) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:1000])  # a download that broke off
    other = Path(folder("other")) / "config.json"
    other.write_text(other.read_text().replace('"hidden_size": 32', '"hidden_size": 64'))
    for broken in (cut, other):
        with pytest.raises(PairError, match="could not be loaded as a causal language model"):
            pairs.load(str(broken.parent), device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(PairError, match="No CUDA device answers"):
            pairs.load(folder("v"), device="cuda")
    with pytest.raises(PairError, match="is not Llama-like"):
        pairs.load(folder("m", small("mamba")), device="cpu")


def test_weights_that_are_not_sound_are_refused(folder):
    """Guards against blaming the cache for logits that are NaN."""
    broken = small()
    with torch.no_grad():
        broken.model.norm.weight[0] = torch.nan
    with pytest.raises(PairError, match=r"verifier's logits are not finite: choose --dtype"):
        pairs.load(folder("v", broken), folder("d"), device="cpu")


def test_provenance_names_what_ran(folder):
    about = pairs.load(folder("v"), folder("d"), device="cpu").provenance
    assert about["verifier"].endswith("v")
    assert about["draft"].endswith("d")
    assert about["verifier_revision"].startswith("local-")
    assert {"device", "dtype", "versions"} <= about.keys()


def test_closing_a_run_frees_its_caches(folder):
    loaded = pairs.load(folder("v", small("gemma2")), folder("d", small("gemma2")), device="cpu")
    loaded.eos_ids = ()

    def caches():
        gc.collect()
        return {id(thing) for thing in gc.get_objects() if isinstance(thing, DynamicCache)}

    others = caches()
    rounds = decode(loaded, [2, 3], SpS(), Settings(Sampling(1.0), 3, 100))
    next(rounds)
    assert len(caches() - others) == 2
    rounds.close()
    del rounds
    assert not caches() - others


@pytest.mark.cuda
def test_cuda_and_cpu_agree(folder):
    """The same seed gives the same tokens on both devices in float32, up to a first difference where two logits nearly tie."""
    where = folder("v", small()), folder("d", small(seed=1))
    settings = Settings(Sampling(0.8, 5, 0.95), 4, 60, 1)
    ids = []
    for device in ("cpu", "cuda"):
        loaded = pairs.load(*where, device=device, dtype="float32")
        ids.append([token.id for round in decode(loaded, [2, 3], Cactus(0.2), settings) for token in round.emitted])
    same = next((i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), len(ids[0]))
    assert same >= 20
