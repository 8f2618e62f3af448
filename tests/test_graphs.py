"""Fixed buffers against transformers' own growing cache. The graphs themselves need a GPU; what they record is tested here."""

import pytest
import torch
from test_pairs import small
from torch.utils._python_dispatch import TorchDispatchMode
from toys import toy_pair
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from cactus import decoding, graphs, pairs
from cactus.decoding import decode
from cactus.graphs import FIRST_CAPACITY, FixedModel
from cactus.rules import TAS, Cactus, SpS
from cactus.sampling import Sampling
from cactus.trace import Settings


def qwen():
    torch.manual_seed(2)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=40, num_key_value_heads=2, initializer_range=0.4, **shape)).eval()


@pytest.mark.parametrize("module", [small(vocab=40), qwen()], ids=["llama", "qwen3"])
@pytest.mark.parametrize("sizes", [[1], [6, 1, 1, 2, 7], [FIRST_CAPACITY - 3, 1, 5, 40]])
def test_logits_are_those_of_a_growing_cache(module, sizes):
    """Whatever the pieces, beyond the first buffers too, and after rolling back."""
    module.config.max_position_embeddings = 4096
    fixed, plain = FixedModel(module, 40).open(), pairs.Model(module, 40).open()
    for size in sizes:
        ids = torch.randint(40, (size,), generator=torch.Generator().manual_seed(size))
        torch.testing.assert_close(fixed.forward(ids, size), plain.forward(ids, size), atol=1e-4, rtol=1e-4)
        for context in (fixed, plain):
            context.crop(context.length - size // 3)
        assert fixed.length == plain.length


def test_a_closed_context_is_taken_over_empty():
    """Guards against a run that reads the entries of the one before."""
    model = FixedModel(small(), 11)
    first = model.open()
    ids = torch.tensor([2, 3, 4])
    expected = first.forward(ids, 3)
    first.forward(torch.tensor([5, 6, 7]), 1)
    first.close()
    again = model.open()
    assert again is first
    torch.testing.assert_close(again.forward(ids, 3), expected)


def test_sliding_windows_keep_their_own_cache():
    """Guards against Mistral's window, which no layer types announce: fixed buffers would show all entries to every layer."""
    mistral = MistralForCausalLM(
        MistralConfig(
            vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, sliding_window=8
        )
    )
    assert not graphs.fixes(mistral)
    mistral.config.sliding_window = None
    assert graphs.fixes(mistral)
    assert not graphs.fixes(small("gemma2"))
    assert graphs.fixes(qwen())


class Fetches(TorchDispatchMode):
    """Notes operations that make a host wait for its device: fetching a number, or shapes that depend on values."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "is_nonzero", "equal"):
            self.seen.append(func)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("rule", [SpS(), Cactus(0.3), TAS()])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0)])
def test_a_block_fetches_nothing_before_its_end(rule, sampling, monkeypatch):
    """Guards against p[accepted] and its like: on a GPU each would wait for everything before it. The one fetch at the end goes through
    tolist, which is not seen here."""
    inner, seen = decoding._draft_and_judge, []

    def watched(*args):
        with Fetches() as fetches:
            judged = inner(*args)
        seen.append(fetches.seen)
        return judged

    monkeypatch.setattr(decoding, "_draft_and_judge", watched)
    fixed = pairs.Pair("fixed", FixedModel(qwen(), 40), FixedModel(qwen(), 40), toy_pair().tokenizer, (), 500)
    monkeypatch.setattr(fixed.tokenizer, "decode", lambda ids, **_: "x" * len(ids), raising=False)
    monkeypatch.setattr(type(fixed.tokenizer), "convert_ids_to_tokens", lambda self, token: "x")
    assert len(list(decode(fixed, [2, 3], rule, Settings(sampling, 4, 20)))) > 1
    assert not any(seen)
