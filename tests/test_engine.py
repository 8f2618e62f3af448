"""The packed forward against transformers, on small random Llamas and on the embedded verifier."""

import pytest
import torch
from test_pairs import small
from transformers import LlamaConfig, LlamaForCausalLM

from cactus import engine, pairs
from cactus.engine import FIRST_CAPACITY, PackedModel


def llama(**changes):
    torch.manual_seed(1)
    shape = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**shape | {"num_key_value_heads": 2, "initializer_range": 0.2} | changes)).eval()


SHAPES = [{}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"tie_word_embeddings": True}, {"head_dim": 32}]


@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.parametrize("sizes", [[1], [7], [3, 1, 5, 1, 1, 9], [FIRST_CAPACITY - 2, 1, 1, 1, 4, 700]])
def test_logits_are_those_of_transformers(changes, sizes):
    """Whatever the pieces a text is read in, beyond the first buffers too."""
    model = llama(**changes)
    context, plain = PackedModel(model, 50).open(), pairs.Model(model, 50).open()
    for size in sizes:
        ids = torch.randint(50, (size,), generator=torch.Generator().manual_seed(size))
        torch.testing.assert_close(context.forward(ids, size), plain.forward(ids, size), atol=1e-4, rtol=1e-4)
        assert context.length == plain.length


def test_cropping_forgets_exactly():
    model = PackedModel(llama(), 50)
    context, fresh = model.open(), model.open()
    ids = torch.arange(20)
    context.forward(ids, 1)
    context.crop(6)
    fresh.forward(ids[:6], 1)
    other = torch.tensor([41, 7, 9])
    torch.testing.assert_close(context.forward(other, 3), fresh.forward(other, 3), atol=1e-5, rtol=1e-5)


def test_contexts_do_not_touch_each_other():
    model = PackedModel(llama(), 50)
    one, other, alone = model.open(), model.open(), model.open()
    ids = torch.arange(12)
    for i in range(12):
        mixed = one.forward(ids[i : i + 1], 1)
        other.forward(ids.flip(0)[i : i + 1], 1)
    torch.testing.assert_close(mixed[0], alone.forward(ids, 1)[0], atol=1e-5, rtol=1e-5)


def test_only_asked_rows_and_ids_come_back():
    assert PackedModel(llama(), 37).open().forward(torch.arange(9), 4).shape == (4, 37)


def test_what_does_not_pack_runs_in_transformers():
    for other in (small("gemma2"), llama().to(torch.bfloat16), llama(attention_bias=True), llama(hidden_act="gelu")):
        assert not engine.packs(other)
    assert isinstance(pairs._model(small("gemma2"), 11, "verifier"), pairs.Model)
    assert isinstance(pairs._model(llama(), 50, "verifier"), PackedModel)


def test_a_packed_model_that_is_wrong_is_not_used(monkeypatch):
    """On a machine whose kernels give other numbers the pair falls back to transformers."""
    monkeypatch.setattr(
        engine, "_linear", lambda x, packed: torch.ops.mkldnn._linear_pointwise(x * 1.1, packed, None, "none", [], "")
    )
    assert isinstance(pairs._model(llama(), 50, "verifier"), pairs.Model)


def test_the_embedded_verifier(pair):
    ids = torch.tensor(pair.encode("Explain why the sea is salty, in two sentences.", chat=True))
    with torch.inference_mode():
        expected = pair.verifier.module(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(pair.verifier.open().forward(ids, len(ids)), expected, atol=2e-4, rtol=0)
    assert pair.draft.head is pair.verifier.head
