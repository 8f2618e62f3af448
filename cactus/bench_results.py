"""What the benchmark found: one record per run and per pass, the statistics over them, what they should show, and how they are written.

Compared are only runs of the same repetition and prompts. Speeds are pooled over the prompts, so an answer that ends early weighs as
much as it is long.
"""

import importlib.util
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
DELTAS = (0.1, 0.5, 1.0)
GENERATE, LOOKUP, ASSISTED = "transformers generate", "transformers prompt lookup", "transformers assisted"
ALONE, SPS, TYPICAL = "verifier alone", "SpS", "TAS"
CACTUS = {f"Cactus δ {delta:g}": delta for delta in DELTAS}
METHODS = (GENERATE, LOOKUP, ASSISTED, ALONE, SPS, *CACTUS, TYPICAL)


@dataclass(frozen=True)
class Run:
    """One method on one prompt in one repetition.

    passes: verifier forwards; accepted, judged: drafted tokens that were kept, and those plus the rejected ones. parts, for this
    engine: seconds of prefill, of draft, verify, rule and rest (cactus.trace.Round) summed over blocks, of the forwards of the
    blocks, and of writing the trace's lines afterwards, which is not part of `seconds`. ended: whether an end token ended it.
    """

    method: str
    repeat: int
    prompt: str
    tokens: int
    seconds: float
    passes: int
    accepted: int
    judged: int
    ended: bool
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Forward:
    """One kind of forward: median, least and most seconds; bytes of weights it reads; two lower bounds in seconds: reading those
    bytes once, and multiplying as many rows with plain matrices of as many weights on the same kernels."""

    name: str
    rows: int
    median: float
    least: float
    most: float
    weight_bytes: int
    read_floor: float
    matrix_floor: float


@dataclass
class Result:
    """All that was measured, in the units of its parts; fields are filled as the measurement goes on.

    bandwidth: bytes per second of reading a buffer beyond every cache; gflops: of plain matrices, by kernels and rows; peak_bytes:
    resident set of processes of their own and of this one; acceptance: mean Σ min(p, q) of both drafts over the same positions;
    rows_seconds: picking the rows that one block's record keeps.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    prompts: list[str]
    peak_bytes: dict[str, int] = field(default_factory=dict)
    bandwidth: float | None = None
    gflops: dict[str, float] = field(default_factory=dict)
    forwards: list[Forward] = field(default_factory=list)
    acceptance: dict[str, float] = field(default_factory=dict)
    rows_seconds: float | None = None
    runs: list[Run] = field(default_factory=list)

    def forward(self, name: str, rows: int) -> Forward | None:
        return next((item for item in self.forwards if (item.name, item.rows) == (name, rows)), None)


@dataclass(frozen=True)
class Spread:
    """Median, least and most of some values."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Claim:
    """What a measurement should show: `value` at least or at most `limit`. value None: not measured."""

    text: str
    value: float | None
    limit: float
    at_least: bool
    unit: str = "x"

    @property
    def holds(self) -> bool:
        return self.value is not None and (self.value >= self.limit if self.at_least else self.value <= self.limit)


# --- statistics ---


def spread(values: Sequence[float]) -> Spread | None:
    """None of nothing."""
    return Spread(statistics.median(values), min(values), max(values)) if values else None


def speed(runs: Iterable[Run]) -> float:
    """Tokens per second over all of them: tokens together by seconds together."""
    runs = list(runs)
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def speeds(runs: Sequence[Run], method: str) -> list[float]:
    """Tokens per second in each repetition, over the prompts it ran on."""
    return [speed(group.values()) for group in _by_repeat(runs, method).values()]


def ratios(runs: Sequence[Run], method: str, base: str) -> list[float]:
    """How many times as fast as `base`, in each repetition, over the prompts that both ran on in it."""
    ours, theirs = _by_repeat(runs, method), _by_repeat(runs, base)
    found = []
    for repeat in ours:
        if shared := ours[repeat].keys() & theirs.get(repeat, {}).keys():
            found.append(speed(ours[repeat][name] for name in shared) / speed(theirs[repeat][name] for name in shared))
    return found


def _by_repeat(runs: Sequence[Run], method: str) -> dict[int, dict[str, Run]]:
    groups: dict[int, dict[str, Run]] = {}
    for run in runs:
        if run.method == method:
            groups.setdefault(run.repeat, {})[run.prompt] = run
    return groups


def outside(runs: Sequence[Run], method: str) -> float | None:
    """Share of the blocks' time that passes outside the models' forwards."""
    parts = [(run.seconds - run.parts["prefill"], run.parts["forwards"]) for run in runs if run.method == method and run.parts]
    whole, forwards = (sum(column) for column in zip(*parts, strict=True)) if parts else (0.0, 0.0)
    return 1 - forwards / whole if whole else None


def recording(result: Result, method: str) -> float | None:
    """Share of the blocks' time that keeping a trace takes: picking its rows, making its records, writing its lines."""
    runs = [run for run in result.runs if run.method == method and run.parts]
    if not runs or result.rows_seconds is None:
        return None
    seconds = sum(run.parts["rest"] + run.parts["lines"] + run.passes * result.rows_seconds for run in runs)
    return seconds / sum(run.seconds - run.parts["prefill"] + run.parts["lines"] for run in runs)


def claims(result: Result) -> list[Claim]:
    """What the measurement should show, with what it shows."""
    m = result.settings["num_draft_tokens"]

    def times(method: str, base: str) -> float | None:
        found = spread(ratios(result.runs, method, base))
        return found and found.median

    def quotient(one: tuple[str, int], other: tuple[str, int]) -> float | None:
        first, second = result.forward(*one), result.forward(*other)
        return first.median / second.median if first and second else None

    best = "Cactus δ 0.5"
    memory = result.peak_bytes.get("this engine")
    return [
        Claim(f"{ALONE} beside {GENERATE}", times(ALONE, GENERATE), 1.7, True),
        Claim(f"{best} beside {GENERATE}", times(best, GENERATE), 1.9, True),
        Claim(f"SpS beside {GENERATE}", times(SPS, GENERATE), 1.5, True),
        *(Claim(f"{best} beside {base}", times(best, base), 1.0, True) for base in (LOOKUP, ASSISTED, ALONE)),
        Claim(f"outside the forwards, {best}", _percent(outside(result.runs, best)), 5.0, False, "% of a block"),
        Claim("draft step beside verifier step", quotient(("draft", 1), ("verifier", 1)), 0.65, False),
        Claim("verifier pass of 5 beside transformers' of 1", quotient(("verifier", 5), ("transformers", 1)), 1.0, False),
        Claim(f"keeping a trace, {best}, m = {m}", _percent(recording(result, best)), 3.0, False, "% of a block"),
        Claim("peak memory", memory and memory / 1e9, 2.0, False, " GB"),
    ]


def _percent(share: float | None) -> float | None:
    return share and 100 * share


# --- what is written ---


def to_json(result: Result) -> dict[str, Any]:
    """Everything measured, and what follows from it."""
    lines = {method: _line(result, method) for method in _methods(result)}
    judged = [asdict(claim) | {"holds": claim.holds} for claim in claims(result)]
    return {"schema": SCHEMA, **asdict(result), "methods": lines, "claims": judged}


def read_result(path: Path) -> Result:
    """The measurement that --json wrote. Raises ValueError for anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("schema") != SCHEMA:
            raise ValueError(f"its schema is not the {SCHEMA} that this version reads")
        for name in ("methods", "claims"):
            del data[name]
        data["runs"] = [Run(**run) for run in data["runs"]]
        data["forwards"] = [Forward(**forward) for forward in data["forwards"]]
        result = Result(**data)
        list(report(result))  # what it lacks shows when it is written
        return result
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not what bench --json writes: {error}.") from error


def _methods(result: Result) -> list[str]:
    return [method for method in METHODS if any(run.method == method for run in result.runs)]


def _line(result: Result, method: str) -> dict[str, Any]:
    """One method in numbers; None where there is nothing to divide by."""
    runs = [run for run in result.runs if run.method == method]
    tokens, passes, accepted, judged = (
        sum(getattr(run, name) for run in runs) for name in ("tokens", "passes", "accepted", "judged")
    )
    split = {part: sum(run.parts[part] for run in runs) / passes for part in ("draft", "verify", "rule", "rest") if runs[0].parts}
    gain = spread(ratios(result.runs, method, GENERATE))
    return {
        "tokens_per_s": asdict(spread(speeds(result.runs, method))),
        "times_generate": gain and asdict(gain),
        "al": accepted / passes if judged else None,
        "passes_per_token": passes / tokens,
        "accepted_per_judged": accepted / judged if judged else None,
        "tokens_per_run": tokens / len(runs),
        "ended": sum(run.ended for run in runs) / len(runs),
        "seconds_per_block": split or None,
        "outside_forwards": outside(result.runs, method),
    }


def report(result: Result) -> Iterator[str]:
    """The measurement as Markdown."""
    machine, settings = result.machine, result.settings
    yield (
        f"{machine.get('pair', 'No pair loaded')}, {machine.get('dtype', '')}; {machine.get('device', machine['system'])}, "
        f"{machine['cores']} cores, load {machine['load']:.1f} at the start; {machine['date'][:10]}; "
        + ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
        + f". {len(result.prompts)} prompts, {settings['max_new_tokens']} new tokens at most, m = {settings['num_draft_tokens']}, "
        f"T {settings['sampling']['temperature']:g}, top-k {settings['sampling']['top_k']}, top-p {settings['sampling']['top_p']:g}, "
        f"seed {settings['seed']}, {settings['repeats']} repetitions; median (least–most). Tokens per second of the whole call."
    )
    yield ""
    planned = settings["repeats"] * len(result.prompts) * len(METHODS)
    if len(result.runs) < planned:
        yield f"**Interrupted after {len(result.runs)} of {planned} runs.**"
        yield ""
    lines = {method: _line(result, method) for method in _methods(result)}
    if lines:
        yield "| method | tokens/s | × generate | AL | passes per token | accepted/judged | tokens per run, ended by end token |"
        yield "|---|---|---|---|---|---|---|"
    for method, line in lines.items():
        yield (
            f"| {method} | {_range(line['tokens_per_s'], 1)} | {_range(line['times_generate'], 2)} | {_number(line['al'], 2)} "
            f"| {_number(line['passes_per_token'], 3)} | {_number(line['accepted_per_judged'], 3)} "
            f"| {line['tokens_per_run']:.0f}, {line['ended']:.0%} |"
        )
    if blocks := {method: line for method, line in lines.items() if line["seconds_per_block"]}:
        yield ""
        yield "| ms per block | draft | verify | rule | rest | outside forwards |"
        yield "|---|---|---|---|---|---|"
    for method, line in blocks.items():
        cells = " | ".join(f"{1e3 * seconds:.1f}" for seconds in line["seconds_per_block"].values())
        yield f"| {method} | {cells} | {line['outside_forwards']:.1%} |"
    if result.forwards:
        yield ""
        yield "| one pass | tokens | ms | floor: weights read once | floor: as many weights in plain matrices |"
        yield "|---|---|---|---|---|"
    for item in result.forwards:
        yield (
            f"| {item.name} | {item.rows} | {1e3 * item.median:.1f} ({1e3 * item.least:.1f}–{1e3 * item.most:.1f}) "
            f"| {1e3 * item.read_floor:.1f} ({item.weight_bytes / 1e6:.0f} MB) | {1e3 * item.matrix_floor:.1f} |"
        )
    yield ""
    if result.bandwidth:
        by_rows = ", ".join(f"{name}: {value:.0f}" for name, value in result.gflops.items())
        yield f"Memory is read at {result.bandwidth / 1e9:.1f} GB/s; plain matrices multiply at, GFLOP/s by kernels and rows, {by_rows}."
    if result.peak_bytes:
        yield "Peak memory: " + ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in result.peak_bytes.items()) + "."
    if result.acceptance:
        both = ", ".join(f"{name} {value:.3f}" for name, value in result.acceptance.items())
        yield f"Σ min(p, q) of the draft on the verifier's own text: {both}."
    yield ""
    for claim in claims(result):
        verdict = "not measured" if claim.value is None else "holds" if claim.holds else "falls short"
        value = "" if claim.value is None else f"{claim.value:.2f}{claim.unit}, "
        yield f"- {claim.text}: {value}{'at least' if claim.at_least else 'at most'} {claim.limit:g}{claim.unit}: **{verdict}**"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _range(values: dict[str, float] | None, digits: int) -> str:
    return "–" if values is None else "{median:.{0}f} ({least:.{0}f}–{most:.{0}f})".format(digits, **values)


def write_plot(result: Result, path: Path) -> None:
    """Bars of tokens per second, with their spread and what one read of the verifier's weights per token would allow, as one HTML file
    that needs no network."""
    import plotly.graph_objects as go

    lines = {method: spread(speeds(result.runs, method)) for method in reversed(_methods(result))}
    figure = go.Figure(
        go.Bar(
            x=[line.median for line in lines.values()],
            y=list(lines),
            orientation="h",
            error_x={
                "array": [line.most - line.median for line in lines.values()],
                "arrayminus": [line.median - line.least for line in lines.values()],
            },
        )
    )
    if alone := result.forward("verifier", 1):
        figure.add_vline(1 / alone.read_floor, line_dash="dot", annotation_text="one read of the verifier's weights per token")
    machine = result.machine
    figure.update_layout(
        title=f"{machine.get('pair', '')}<br><sup>{machine.get('device', '')}; {machine['date'][:10]}</sup>",
        xaxis_title="tokens per second, median and least to most of the repetitions",
        template="plotly_white",
    )
    figure.write_html(path, include_plotlyjs=True)


def need_plotly() -> None:
    if importlib.util.find_spec("plotly") is None:
        raise ValueError("--plot needs plotly: pip install plotly, or leave the option out.")
