"""Pieces of text: joined they are decode(all ids) at every step, whatever the tokenizer does with bytes and spaces."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cactus.text import UNFINISHED, Transcript

TEXTS = [
    "👩‍🚀 said: ě, e\u0301 and 日本語のテスト.",
    " leading space, two  spaces,\ttab\n\nand   \n lines ",
    "<b>&lt;</b> ${alert(1)} {{x}} \\u0041 `<img src=x onerror=alert(1)>` </script>",
    "مرحبا بالعالم and 한국어",
    "<|im_start|>user\nhi<|im_end|>\n",
]


@pytest.fixture(scope="module")
def byte_level(embedded_folder):
    return AutoTokenizer.from_pretrained(embedded_folder)


@pytest.fixture(scope="module")
def sentencepiece_like():
    """Spaces as ▁, unknown characters as <0xNN> bytes, the first space dropped: like Gemma's and Llama 2's."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ["▁", "a", "b", "▁a", "▁b", "s", "d", "i", ":", ","]:
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.fixture(params=["byte_level", "sentencepiece_like"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("step", [1, 3])
def test_pieces_join_to_the_decoded_text_at_every_step(tokenizer, text, step):
    """Guards against decode([id]) per token: boxes for emoji, glued words, lost spaces."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    transcript, shown = Transcript(tokenizer), ""
    for start in range(0, len(ids), step):
        now = ids[start : start + step]
        shown += "".join(piece.text for piece in transcript.pieces(now))
        transcript.commit(now)
        decoded = tokenizer.decode(ids[: start + step], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert transcript.text == decoded
        if not decoded.endswith(UNFINISHED):
            assert shown == decoded
    assert shown == text.removeprefix(" ") if tokenizer.vocab_size < 1000 else shown == text


def test_incomplete_bytes_are_shown_as_hex(tokenizer):
    ids = tokenizer("👩‍🚀", add_special_tokens=False).input_ids
    pieces = Transcript(tokenizer).pieces(ids)
    assert any(piece.hex for piece in pieces)
    assert not any(piece.hex and piece.text for piece in pieces)
    if tokenizer.vocab_size > 1000:
        assert "".join(piece.text for piece in pieces) == "👩‍🚀"
        assert pieces[0].hex == "F0 9F"


def test_rejected_drafts_leave_the_text_alone(byte_level):
    """An emoji that is only half accepted: what was drafted beyond it changes nothing."""
    emoji = byte_level("😀", add_special_tokens=False).input_ids
    other = byte_level("x", add_special_tokens=False).input_ids
    transcript = Transcript(byte_level)
    transcript.pieces(emoji)
    transcript.commit(emoji[:1])
    piece = transcript.pieces(other)[0]
    transcript.commit(other)
    assert transcript.text == byte_level.decode(emoji[:1] + other)
    assert piece.text == transcript.text


def test_special_tokens_are_marked_and_named(byte_level):
    end = byte_level.convert_tokens_to_ids("<|im_end|>")
    (piece,) = Transcript(byte_level).pieces([end])
    assert (piece.text, piece.special, piece.hex) == ("<|im_end|>", True, None)
    emoji = byte_level("😀", add_special_tokens=False).input_ids
    assert Transcript(byte_level).name(emoji[0]) == "<F0 9F>"
    assert Transcript(byte_level).name(end) == "<|im_end|>"


def test_a_long_text_stays_exact(byte_level):
    ids = byte_level(" ".join(TEXTS * 6), add_special_tokens=False).input_ids
    transcript = Transcript(byte_level)
    for token in ids:
        transcript.commit([token])
    assert transcript.text == byte_level.decode(ids, clean_up_tokenization_spaces=False)
