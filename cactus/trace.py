"""What happened: the records of a run, and JSON Lines out and in. The decoder fills them; no mean is computed here.

A trace file is a list of lines: one "run" (settings, prompt, provenance), one "round" per verifier pass, one "end". Several runs may
follow one another in one file. A stopped or failed run keeps its rounds.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

import numpy as np

from cactus.costs import Costs
from cactus.rules import TAS, Cactus, Fuzzy, Interpolation, Lenience, Mentored, Rule, SpS, TopK
from cactus.sampling import Sampling, run_key

SCHEMA = 1
RULES = {rule.name: rule for rule in (SpS, Cactus, TAS, Interpolation, TopK, Lenience, Mentored, Fuzzy)}
OUTCOMES = ("accepted", "rescued", "rejected", "resampled", "bonus", "discarded", "cut")
MAX_DRAFT_TOKENS = 32


@dataclass(frozen=True)
class Settings:
    """How to decode. num_draft_tokens is m, drafted tokens per block (0: the verifier alone); prompt_id keeps the draws of a sweep's
    prompts apart. With costs, every block has the m that pays best at them, num_draft_tokens at most. Raises ValueError with a
    sentence for anything out of range."""

    sampling: Sampling = field(default_factory=Sampling)
    num_draft_tokens: int = 5
    max_new_tokens: int = 96
    seed: int = 0
    prompt_id: int = 0
    costs: Costs | None = None

    def __post_init__(self):
        if not 0 <= self.num_draft_tokens <= MAX_DRAFT_TOKENS or self.num_draft_tokens != int(self.num_draft_tokens):
            raise ValueError(
                f"Drafted tokens per block, m, a whole number, must lie between 1 and {MAX_DRAFT_TOKENS}, got {self.num_draft_tokens}."
            )
        if not 1 <= self.max_new_tokens < math.inf or self.max_new_tokens != int(self.max_new_tokens):
            raise ValueError(f"The length must be at least 1 token, a whole number, got {self.max_new_tokens}.")
        run_key(self.seed, self.prompt_id)


@dataclass(frozen=True)
class Piece:
    """What one token adds to the text. `hex` holds its bytes where it completes no character and adds no text; `special` marks
    control tokens, which the token view shows and the plain text leaves out."""

    text: str
    hex: str | None = None
    special: bool = False


@dataclass(frozen=True)
class Row:
    """p and q at one position: the tokens that carry mass, and the rest of each as one lump.

    The drafted token comes first, the others by the larger of p and q; texts holds the first few as text, each on its own. Complete
    (both rests 0) where top-k or top-p leave few enough tokens. p is None where nothing was drafted (bonus positions).
    """

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    p: tuple[float, ...] | None
    q: tuple[float, ...]
    p_rest: float
    q_rest: float

    def at(self, token: int) -> int | None:
        """Where `token` stands in the row, None if it is in the lump or has no mass."""
        return self.ids.index(token) if token in self.ids else None


@dataclass(frozen=True)
class DraftedToken:
    """A token the draft proposed. index counts generated tokens from 0; p, q its probabilities; accepted iff u·p < gamma.

    outcome: accepted; rescued (accepted, but SpS would have rejected it with this draw); rejected; discarded (drafted after a
    rejection, never judged); cut (drafted after an accepted end token).
    """

    index: int
    id: int
    piece: Piece
    p: float
    q: float
    gamma: float
    u: float
    outcome: str
    row: Row

    @property
    def phi(self) -> float:
        """Acceptance probability min(1, gamma/p)."""
        return min(1.0, self.gamma / self.p)

    @property
    def kept(self) -> bool:
        return self.outcome in ("accepted", "rescued")

    @property
    def judged(self) -> bool:
        return self.kept or self.outcome == "rejected"


@dataclass(frozen=True)
class Replacement:
    """The token the verifier itself adds: resampled after a rejection (row None: it is the rejected token's), or the bonus after a
    fully accepted block (row: q alone). q is its probability under the verifier."""

    index: int
    id: int
    piece: Piece
    q: float
    outcome: str
    row: Row | None


@dataclass(frozen=True)
class Round:
    """One draft-verify block. text is decode(all ids generated so far); seconds: draft, verify, rule (warping of q, verdicts, draws)
    and rest (records). stop: None, "eos" or "length"."""

    block: int
    drafted: tuple[DraftedToken, ...]
    replacement: Replacement | None
    text: str
    seconds: dict[str, float]
    stop: str | None

    @property
    def emitted(self) -> list[DraftedToken | Replacement]:
        """The tokens this round added to the text, in order."""
        return [token for token in self.drafted if token.kept] + ([self.replacement] if self.replacement else [])

    @property
    def accepted(self) -> int:
        """Drafted tokens that were kept."""
        return sum(token.kept for token in self.drafted)

    def line(self) -> str:
        """The round as a line of JSON. p and q are float32 numbers and take the nine digits that tell those apart."""
        data = asdict(self)
        for token in [*data["drafted"], data["replacement"] or {"row": None}]:
            for holder in (token, token["row"] or {}):
                for name in ("p", "q"):
                    if holder.get(name) is not None:
                        holder[name] = _nine_digits(holder[name])
        return _dump({"record": "round", **data})


@dataclass
class Trace:
    """The product of a run. stop: "eos", "length", "stopped" (by the reader), "error" (message says which), None while it runs."""

    rule: Rule
    settings: Settings
    prompt: str
    prompt_ids: list[int]
    eos_ids: list[int]
    provenance: dict[str, Any]
    rounds: list[Round] = field(default_factory=list)
    stop: str | None = None
    message: str | None = None

    @property
    def ids(self) -> list[int]:
        """All generated ids."""
        return [token.id for round in self.rounds for token in round.emitted]

    @property
    def text(self) -> str:
        return self.rounds[-1].text if self.rounds else ""

    @property
    def drafted(self) -> list[DraftedToken]:
        return [token for round in self.rounds for token in round.drafted]

    @property
    def label(self) -> str:
        """The rule with its parameters, for headings and logs."""
        parameters = ", ".join(f"{name} = {value}" for name, value in asdict(self.rule).items())
        return f"{self.rule.name} ({parameters})" if parameters else self.rule.name

    def follow(self, rounds: Iterator[Round]) -> Iterator[Round]:
        """Yield `rounds` and keep each; however it ends, the trace says why, and the rounds so far stay."""
        self.stop = "stopped"
        try:
            for round in rounds:
                self.rounds.append(round)
                self.stop = round.stop or "stopped"
                yield round
        except Exception as error:
            self.stop, self.message = "error", str(error) or type(error).__name__
            raise
        finally:
            rounds.close()

    def lines(self) -> Iterator[str]:
        """The trace as JSON Lines, without line ends."""
        head = {name: getattr(self, name) for name in ("prompt", "prompt_ids", "eos_ids", "provenance")}
        yield _dump({"record": "run", "schema": SCHEMA, "rule": rule_to_json(self.rule), "settings": asdict(self.settings), **head})
        for round in self.rounds:
            yield round.line()
        yield _dump({"record": "end", "stop": self.stop, "message": self.message})


def rule_to_json(rule: Rule) -> dict:
    return {"name": rule.name, **asdict(rule)}


def rule_from_json(data: dict) -> Rule:
    """The rule that rule_to_json wrote. Raises ValueError for a name this version does not know."""
    parameters = dict(data)
    name = parameters.pop("name")
    if name not in RULES:
        raise ValueError(f"Unknown rule {name!r}; this version knows {', '.join(RULES)}.")
    return RULES[name](**parameters)


def read_traces(lines: Iterable[str] | TextIO) -> list[Trace]:
    """The traces in JSON Lines; equal to those written. Raises ValueError with the line's number for what is no trace."""
    traces: list[Trace] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            kind = data.pop("record")
            if kind == "run":
                schema = data.pop("schema")
                if schema != SCHEMA:
                    raise ValueError(f"schema {schema} is not the {SCHEMA} this version reads")
                settings = data.pop("settings")
                settings["sampling"] = Sampling(**settings["sampling"])
                settings["costs"] = Costs(**costs) if (costs := settings.get("costs")) else None
                traces.append(Trace(rule_from_json(data.pop("rule")), Settings(**settings), **data))
            elif kind == "round":
                traces[-1].rounds.append(_round(data))
            elif kind == "end":
                traces[-1].stop, traces[-1].message = data["stop"], data["message"]
            else:
                raise ValueError(f"unknown record {kind!r}")
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(f"Line {number} is not part of a Cactus trace: {error}.") from error
    return traces


def _round(data: dict) -> Round:
    data["drafted"] = tuple(_token(DraftedToken, token) for token in data["drafted"])
    data["replacement"] = data["replacement"] and _token(Replacement, data["replacement"])
    return Round(**data)


def _token(kind, data: dict):
    row = data["row"]
    if row:
        p = row["p"] and tuple(_float32(value) for value in row["p"])
        row = Row(
            tuple(row["ids"]), tuple(row["texts"]), p, tuple(_float32(value) for value in row["q"]), row["p_rest"], row["q_rest"]
        )
    single = {name: _float32(data[name]) for name in ("p", "q") if name in data}
    return kind(**data | single | {"piece": Piece(**data["piece"]), "row": row})


def _float32(value: float) -> float:
    return float(np.float32(value))


def _nine_digits(value):
    return [float(f"{item:.9g}") for item in value] if isinstance(value, tuple) else float(f"{value:.9g}")


def _dump(data: dict) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
