"""Two rules on one prompt, interleaved round by round: what the Generate button runs. Yields lines of the viewer's log."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cactus.decoding import run
from cactus.metrics import summary
from cactus.page.models import Key, Models
from cactus.page.records import Pane, baseline_line, end_line, frontier_lines, run_line
from cactus.pairs import Pair
from cactus.rules import Rule, SpS
from cactus.trace import Settings

try:
    import spaces
except ImportError:  # only Hugging Face Spaces with ZeroGPU have it
    spaces = None

BASELINE_TOKENS = 24
GPU_SECONDS_PER_TOKEN, GPU_SECONDS_TO_START = 0.15, 15

models: Models | None = None  # set by the page; a module's own, since ZeroGPU runs `compare` in a forked process
_baselines: dict[tuple, float] = {}


@dataclass(frozen=True)
class Request:
    """What a visitor asked for, checked. auto: m follows from the measured costs, the one in the settings is the most."""

    prompt: str
    rules: tuple[Rule, ...]
    settings: Settings
    chat: bool
    key: Key
    auto: bool = False


def gpu_seconds(request: Request) -> int:
    """GPU time to ask ZeroGPU for: visitors pay for what is asked, so it follows the length."""
    return int(GPU_SECONDS_TO_START + GPU_SECONDS_PER_TOKEN * len(request.rules) * request.settings.max_new_tokens)


def compare(request: Request) -> Iterator[tuple[str, int | None]]:
    """One line at a time, with the number of the pane that it ends: the run, rounds of the rules in turn, all rules at the contexts
    of SpS, and, once per pair and settings, the verifier alone. Raises PromptError before any model runs. Closing it frees all caches."""
    pair = models.loaded()
    settings = replace(request.settings, costs=pair.costs) if request.auto else request.settings
    runs = [run(pair, request.prompt, rule, settings, request.chat) for rule in request.rules]
    panes = [Pane(i, trace) for i, (trace, _) in enumerate(runs)]
    yield run_line([trace for trace, _ in runs], live=True), None
    known = (pair.name, pair.provenance["device"], request.settings.sampling)
    if known in _baselines:
        yield baseline_line(_baselines[known]), None
    active = {pane: rounds for pane, (_, rounds) in zip(panes, runs, strict=True)}
    try:
        while active:
            for pane in list(active):
                round = next(active[pane], None)
                if round:
                    yield pane.round_line(round), None
                else:
                    del active[pane]
                    yield end_line(pane.number, pane.trace.stop), pane.number
        for line in frontier_lines(runs[0][0]):
            yield line, None
        if known not in _baselines:
            _baselines[known] = verifier_alone(pair, request)
            yield baseline_line(_baselines[known]), None
    finally:
        for _, rounds in runs:
            rounds.close()


def verifier_alone(pair: Pair, request: Request) -> float:
    """Tokens per second of the verifier alone on the same prompt, in the same engine and process."""
    settings = replace(request.settings, num_draft_tokens=0, max_new_tokens=BASELINE_TOKENS)
    trace, rounds = run(pair, request.prompt, SpS(), settings, request.chat)
    for _ in rounds:
        pass
    return summary(trace).tokens_per_s


if spaces:
    compare = spaces.GPU(duration=gpu_seconds)(compare)


class Pace:
    """Lets through at most one page update per interval; the last one always is."""

    def __init__(self, seconds: float = 0.1):
        self.seconds, self.last = seconds, 0.0

    def due(self) -> bool:
        now = time.monotonic()
        if now - self.last < self.seconds:
            return False
        self.last = now
        return True
