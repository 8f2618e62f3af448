"""The recorded runs that the page shows before any model is loaded: prompts of our own, and how they are recorded."""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from cactus.decoding import run
from cactus.rules import TAS, Cactus, Rule, SpS
from cactus.trace import Settings, Trace, read_traces

FOLDER = Path(__file__).parent.parent / "assets" / "traces"
BASELINE_TOKENS = 48  # enough to time the verifier alone


@dataclass(frozen=True)
class Recording:
    """One comparison: SpS beside another rule on one prompt and seed."""

    name: str
    prompt: str
    rule: Rule
    seed: int
    settings: Settings = field(default_factory=Settings)

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.jsonl.gz"


RECORDINGS = (
    Recording("explanation", "Why do leaves turn red and yellow in autumn?", Cactus(0.1), 7),
    Recording("story", "Write a short story about a lighthouse keeper who finds a map.", Cactus(0.1), 8),
    Recording("arithmetic", "A baker sells 12 loaves a day at 3 euros each. How much does she earn in 5 days?", Cactus(0.1), 3),
    Recording("code", "Write a Python function that returns the largest number in a list.", Cactus(0.1), 5),
    Recording("large-delta", "Describe a walk through an old town by the sea.", Cactus(2.0), 11),
    Recording("typical-acceptance", "Give me three tips for a good night's sleep.", TAS(), 2),
)


def record(pair, recording: Recording) -> Iterator[Trace]:
    """Run the models: yields the traces of SpS, of the other rule, and of the verifier alone, each when it is finished."""
    settings = replace(recording.settings, seed=recording.seed)
    alone = replace(settings, num_draft_tokens=0, max_new_tokens=BASELINE_TOKENS)
    for rule, how in ((SpS(), settings), (recording.rule, settings), (SpS(), alone)):
        trace, rounds = run(pair, recording.prompt, rule, how)
        for _ in rounds:
            pass
        yield trace


def write(path: Path, traces: list[Trace]) -> None:
    """A gzipped file of JSON Lines, the same bytes for the same traces."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(line + "\n" for trace in traces for line in trace.lines())
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(path: Path) -> list[Trace]:
    """The traces of a file of JSON Lines, gzipped or not; in a recorded one SpS, the other rule, the verifier alone. Raises ValueError
    for a file that cannot be read or holds something else."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a trace: {error}.") from error
    return read_traces(text.split("\n"))
