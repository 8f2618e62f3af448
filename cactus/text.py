"""The text of a growing list of token ids, piece by piece: the pieces of all tokens, joined, are decode(all ids).

One token is not one character: bytes of an emoji may be spread over several tokens, and a tokenizer may drop a leading space. So a
piece is the difference that a token makes to the decoded text, never decode([id]).
"""

from transformers.convert_slow_tokenizer import bytes_to_unicode

from cactus.trace import Piece

UNFINISHED = "\ufffd"  # what decoders show for the bytes of a character that is not complete yet
ANCHOR = 4  # tokens of context that are decoded again with each new one
BYTE_OF = {char: byte for byte, char in bytes_to_unicode().items()}


class Transcript:
    """Text of the committed ids. The tokenizer needs decode(ids, …), convert_ids_to_tokens(id) and all_special_ids."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self._special = set(tokenizer.all_special_ids)
        self._anchor = 0  # decoding starts here; the text before it is complete
        self._before = ""  # text of ids[:_anchor]
        self._shown = 0  # characters that are complete
        self._names: dict[int, str] = {}

    @property
    def text(self) -> str:
        """decode(all ids), special tokens included; an unfinished character at the end shows as U+FFFD."""
        return self._before + self._decode(self.ids[self._anchor :])

    def pieces(self, ids: list[int]) -> list[Piece]:
        """The pieces of `ids`, were they to follow the committed ones; commits nothing."""
        texts = self._additions(ids)[0]
        return [
            Piece(text, None if text else self._hex(token), token in self._special) for token, text in zip(ids, texts, strict=True)
        ]

    def commit(self, ids: list[int]) -> None:
        """Append ids to the text."""
        self._shown = self._additions(ids)[1]
        self.ids.extend(ids)
        anchor = len(self.ids) - ANCHOR
        if anchor > self._anchor:
            head = self._decode(self.ids[self._anchor : anchor])
            rest = self._decode(self.ids[anchor:])
            # Only where decoding the two parts alone gives the same text, now and later, may the first be frozen: a run of byte
            # tokens is decoded as one, and falls to pieces again while a later character of it is unfinished.
            same = head + rest == self._decode(self.ids[self._anchor :]) and not head.endswith(UNFINISHED)
            if same and not all(self._byte(token) for token in self.ids[anchor - 1 : anchor + 1]):
                self._before, self._anchor = self._before + head, anchor

    def _additions(self, ids: list[int]) -> tuple[list[str], int]:
        """What each of `ids` adds, and how many characters are complete after them. A decoder may take a complete character back while
        the bytes after it are unfinished; it was shown, so only what goes beyond it counts."""
        context, start = self.ids[self._anchor :], len(self._before)
        shown, texts = self._shown - start, []
        for token in ids:
            context = [*context, token]
            complete = self._decode(context).rstrip(UNFINISHED)
            texts.append(complete[shown:])
            shown = max(shown, len(complete))
        return texts, start + shown

    def name(self, token: int) -> str:
        """A token on its own, for lists of alternatives: its text, or the bytes it holds of a character as <F0 9F>."""
        if token not in self._names:
            text = self._decode([token])
            self._names[token] = f"<{self._hex(token)}>" if UNFINISHED in text and self._hex(token) else text
        return self._names[token]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _hex(self, token: int) -> str | None:
        if byte := self._byte(token):
            return byte
        symbol = self.tokenizer.convert_ids_to_tokens(token)
        known = all(char in BYTE_OF for char in symbol)
        return " ".join(f"{BYTE_OF[char]:02X}" for char in symbol) if symbol and known else None

    def _byte(self, token: int) -> str | None:
        symbol = self.tokenizer.convert_ids_to_tokens(token)
        return symbol[3:-1] if symbol.startswith("<0x") and symbol.endswith(">") else None
