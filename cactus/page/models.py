"""The pairs that the page offers: loaded in the background, one at a time, all model work on one thread.

One thread, because every thread that calls torch brings its own team of OpenMP threads, and teams beside one another on few cores
slow each other down.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from cactus import embedded, pairs
from cactus.page.strings import STRINGS

MODEL_THREAD = ThreadPoolExecutor(1, thread_name_prefix="models")

Key = tuple[str, int]


@dataclass(frozen=True)
class Choice:
    """A pair to choose. load(bits, progress) loads it; has_bits: the draft is the verifier itself, at a number of bits."""

    label: str
    load: Callable[[int, embedded.Progress], pairs.Pair]
    has_bits: bool


class Models:
    """The choices, and the one pair that is in memory."""

    def __init__(self, choices: list[Choice]):
        self.choices = {choice.label: choice for choice in choices}
        self._key: Key | None = None
        self._future: Future[pairs.Pair] | None = None
        self._stage: tuple[str, float | None] = ("load", None)

    def key(self, label: str, bits: int) -> Key:
        """What names a loaded pair; bits count only where the draft has them. Raises ValueError for a pair that is not offered."""
        if label not in self.choices:
            raise ValueError(f"This server offers {', '.join(self.choices)}; {label!r} is not among them.")
        return label, int(bits) if self.choices[label].has_bits else 0

    def request(self, key: Key) -> Future[pairs.Pair]:
        """The pair, loaded or being loaded; a failed load is tried again."""
        if key != self._key or (self._future.done() and self._future.exception()):
            before, self._key = self._key, key
            self._stage = ("load", None)
            kept = self.loaded() if before and before[0] == key[0] else None
            self._future = MODEL_THREAD.submit(self._load, key, kept)
        return self._future

    def loaded(self) -> pairs.Pair | None:
        """The pair in memory, if there is one."""
        return self._future.result() if self._future and self._future.done() and not self._future.exception() else None

    def current(self) -> Key | None:
        """The key of the pair that is loaded or being loaded."""
        return self._key

    def busy(self) -> bool:
        """Whether a pair is being loaded."""
        return self._future is not None and not self._future.done()

    def status(self) -> str:
        """One sentence for the page: what is being loaded and how far, what went wrong, or what is ready."""
        if not self._future:
            return STRINGS["status.idle"]
        if not self._future.done():
            stage, fraction = self._stage
            percent = "" if fraction is None else f" {fraction:.0%}"
            return STRINGS["status.loading"].format(stage=STRINGS[f"stage.{stage}"], percent=percent)
        if error := self._future.exception():
            return STRINGS["status.failed"].format(reason=error)
        pair = self._future.result()
        return STRINGS["status.ready"].format(pair=pair.name, device=pair.provenance["device"])

    def _load(self, key: Key, kept: pairs.Pair | None) -> pairs.Pair:
        def progress(stage: str, fraction: float | None) -> None:
            self._stage = (stage, fraction)

        label, bits = key
        if kept and self.choices[label].load is pairs.load_embedded:
            return pairs.load_embedded(bits, progress, kept.verifier)
        return self.choices[label].load(bits, progress)


def offered(verifier: str | None, draft: str | None, device: str, dtype: str) -> Models:
    """What this machine can offer, best first: the pair named on the command line; Qwen 3 where CUDA and the hub answer; the
    embedded pair."""
    choices = []
    if verifier:
        label = f"{verifier} + {draft}" if draft else verifier
        choices.append(Choice(label, lambda bits, _: pairs.load(verifier, draft, bits, device, dtype), has_bits=not draft))
    if device != "cpu" and torch.cuda.is_available() and pairs.on_hub(pairs.QWEN):
        big, small = pairs.QWEN
        choices.append(Choice("Qwen 3 8B + 0.6B", lambda bits, _: pairs.load(big, small, device="cuda"), has_bits=False))
    choices.append(Choice(pairs.EMBEDDED, pairs.load_embedded, has_bits=True))
    # ZeroGPU carries into its processes what was on the device before the page started: one pair, and no other later.
    return Models(choices[:1] if pairs.zero_gpu() else choices)
