"""The packed forward against transformers, on small random Llamas and on the embedded verifier."""

import pytest
import torch
from test_pairs import small
from transformers import LlamaConfig, LlamaForCausalLM

from cactus import embedded, engine, graphs, pairs
from cactus.engine import FIRST_CAPACITY, Float32, Int8, PackedModel


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


CHANGING = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 600,
    },
}  # fmt: skip
LASTING = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.7, "original_max_position_embeddings": 512},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}  # fmt: skip


def scaled(rope):
    return llama(rope_parameters={"rope_theta": 10_000.0, **rope}, max_position_embeddings=1000)


@pytest.mark.parametrize("rope", CHANGING.values(), ids=CHANGING)
def test_rotations_that_change_with_the_length_are_left_to_transformers(rope):
    """Guards against a table made for twice the length of the text, whose frequencies are those of a longer text: logits were off
    by up to 10 from position 513 on."""
    model = scaled(rope)
    assert not engine.packs(model) and not graphs.fixes(model)
    assert isinstance(pairs._model(model, 50, "verifier"), pairs.Model)


@pytest.mark.parametrize("rope", LASTING.values(), ids=LASTING)
def test_other_scaled_rotations_are_those_of_transformers(rope):
    """Beyond the first table; with yarn they are no pure rotations."""
    context, plain = PackedModel(scaled(rope), 50).open(), pairs.Model(scaled(rope), 50).open()
    for size in (FIRST_CAPACITY - 2, 1, 4, 300):
        ids = torch.randint(50, (size,), generator=torch.Generator().manual_seed(size))
        torch.testing.assert_close(context.forward(ids, size), plain.forward(ids, size), atol=2e-4, rtol=2e-4)


def test_a_shorter_table_from_another_thread_does_no_harm():
    """Guards against a table read anew after it was grown: another context may have put a shorter one there meanwhile."""
    model = PackedModel(llama(), 50)
    first, longer = model._turns, model._rotations(3 * FIRST_CAPACITY)

    class Raced(PackedModel):
        _turns = property(lambda self: first, lambda self, table: None)

    model.__dict__.pop("_turns")
    model.__class__ = Raced
    start = 2 * FIRST_CAPACITY
    torch.testing.assert_close(model.turns(start, start + 3), longer[start : start + 3])


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


LONG = {"factor": 4.0, "original_max_position_embeddings": 600, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "longrope", **LONG}])
def test_rotary_embeddings_that_follow_the_length_run_in_transformers(rope):
    """Guards against a table made for twice the text: within what the model was trained for, it held the angles of longer texts."""
    model = llama(max_position_embeddings=600, rope_parameters={"rope_theta": 10000.0, **rope})
    context, ids = pairs._model(model, 50, "verifier").open(), torch.arange(550) % 50
    context.forward(ids[:400], 1)
    with torch.inference_mode():
        torch.testing.assert_close(context.forward(ids[400:], 1)[0], model(input_ids=ids[None]).logits[0, -1], atol=1e-3, rtol=1e-3)


def test_a_packed_model_that_is_wrong_is_not_used(monkeypatch):
    """On a machine whose kernels give other numbers the pair falls back to transformers."""
    right = Float32.__call__
    monkeypatch.setattr(Float32, "__call__", lambda self, x, onto=None: right(self, x * 1.1, onto))
    assert isinstance(pairs._model(llama(), 50, "verifier"), pairs.Model)


@pytest.mark.skipif(not engine.int8_runs(), reason="no eight-bit kernels on this machine")
def test_eight_bit_products_are_those_of_whole_numbers(monkeypatch):
    """Against the same rounding done by hand, with outliers in x and in the weights, on the full range and on that of kernels
    without VNNI; a row gives the same whatever stands beside it."""
    torch.manual_seed(0)
    weight, gain, x, onto = torch.randn(40, 64), torch.rand(64) + 0.5, torch.randn(5, 64), torch.randn(5, 40)
    weight[3] *= 50
    x[2, 7] = 100
    for levels in {Int8.levels, 63}:
        monkeypatch.setattr(Int8, "levels", levels)
        scale, reach = weight.abs().amax(1) / 127, (x * gain).abs().amax(1)[:, None]
        whole = (x * gain / reach * levels).round() @ (weight / scale[:, None]).round().T
        expected = whole * scale * reach / levels
        matrix = Int8(weight, gain)
        torch.testing.assert_close(matrix(x), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(matrix(x, onto), expected + onto, atol=1e-4, rtol=1e-4)
        assert torch.equal(matrix(x[2:3]), matrix(x)[2:3])


def test_an_eight_bit_row_of_zeros_gives_zeros():
    """Guards against 0 / 0: a gate can close a whole row."""
    matrix = Int8(torch.randn(8, 16)) if engine.int8_runs() else Float32(torch.randn(8, 16))
    assert matrix(torch.zeros(1, 16)).abs().sum() == 0


def test_without_eight_bit_kernels_the_draft_is_in_float(monkeypatch):
    """The same rounded weights; provenance says which kernels ran."""
    monkeypatch.setattr(engine, "int8_runs", lambda: False)
    verifier = pairs._model(llama(), 50, "verifier")
    draft = pairs._rounded(llama(), verifier, 5)
    ids = torch.arange(9)
    expected = pairs.Model(embedded.draft_from(llama(), 5), 50).open().forward(ids, 9)
    torch.testing.assert_close(draft.open().forward(ids, 9), expected, atol=1e-4, rtol=1e-4)
    assert engine.kernels() == "float32"


def test_saturating_kernels_are_not_used(monkeypatch):
    """Guards against kernels that add two products in 16 bits on a range of x that needs more."""
    right = Int8.__call__
    monkeypatch.setattr(Int8, "__call__", lambda self, x, onto=None: right(self, x, onto).clamp(-40, 40))
    assert not engine.int8_runs.__wrapped__()


def test_the_embedded_verifier(pair, verifier_module):
    ids = torch.tensor(pair.encode("Explain why the sea is salty, in two sentences.", chat=True))
    with torch.inference_mode():
        expected = verifier_module(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(pair.verifier.open().forward(ids, len(ids)), expected, atol=2e-4, rtol=0)
    assert pair.draft.embedding is pair.verifier.embedding


def test_default_bits_keep_acceptance_where_it_shows(monkeypatch):
    """Between 78 and 90 % on every kind of kernels that the table knows."""
    for name, table in pairs.draft_quality().items():
        monkeypatch.setattr(engine, "kernels", lambda name=name: name)
        assert 0.78 <= table[str(pairs.default_bits())] <= 0.9
