"""Tiny models with hand-made laws, in the shape the decoder asks for: every logit depends on the whole text before it, so that a
stale, missing or misplaced cache entry changes what comes out."""

import string

import torch

from cactus.pairs import Pair

LETTERS = string.ascii_lowercase + " ."


class ToyTokenizer:
    """Ids are letters; the last id is the end token «$»."""

    all_special_ids = (len(LETTERS),)
    chat_template = None

    def decode(self, ids, **_):
        return "".join((LETTERS + "$")[token] for token in ids)

    def convert_ids_to_tokens(self, token):
        return (LETTERS + "$")[token]


class ToyModel:
    """logits(text) = shared(text) + own(text): standard normal rows keyed by the text; `noise` sets how far a draft strays."""

    device = torch.device("cpu")

    def __init__(self, vocab_size=12, noise=0.0, seed=0, sharpness=2.0, law=None):
        self.vocab_size, self.noise, self.seed, self.sharpness, self.law = vocab_size, noise, seed, sharpness, law
        self.contexts, self.forwards = [], 0

    def open(self):
        self.contexts.append(ToyContext(self))
        return self.contexts[-1]

    def logits(self, ids):
        if self.law:
            return self.law(ids)
        shared = torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(hash(tuple(ids)) % 2**40))
        own = torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(hash((self.seed, *ids)) % 2**40))
        return self.sharpness * (shared + self.noise * own)


class ToyContext:
    def __init__(self, model):
        self.model, self.ids, self.closed = model, [], False
        self.device, self.vocab_size = model.device, model.vocab_size

    @property
    def length(self):
        return len(self.ids)

    def forward(self, ids, rows):
        assert len(ids) and not self.closed
        self.model.forwards += 1
        out = []
        for token in ids.tolist():
            self.ids.append(token)
            out.append(self.model.logits(self.ids))
        return torch.stack(out[-rows:])

    def crop(self, length):
        del self.ids[length:]

    def close(self):
        self.closed = True


def toy_pair(vocab_size=12, noise=0.7, eos_ids=(), sharpness=2.0, laws=(None, None), max_length=4096):
    verifier = ToyModel(vocab_size, 0.0, sharpness=sharpness, law=laws[0])
    draft = ToyModel(vocab_size, noise, seed=1, sharpness=sharpness, law=laws[1])
    return Pair("toy", verifier, draft, ToyTokenizer(), eos_ids, max_length, {"verifier": "toy"})
