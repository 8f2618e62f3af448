"""How fast this engine is beside transformers' own decoding, measured in one process on the same prompts, seeds and settings.

Every method runs once on every prompt in every repetition, in an order that is rotated from prompt to prompt, so that a machine that
slows down slows all of them. Compared are only runs of the same repetition and prompts. Tokens per second are new tokens divided by
the seconds of the whole call, reading of the prompt included, for every method alike. Runs stop at an end token, as a user's
would: text after it is read by nobody, and is accepted at other rates than answers. Speeds are pooled over the prompts, so an
answer that ends early weighs as much as it is long.

Measuring the memory of processes needs a Unix.
"""

import argparse
import functools
import importlib.util
import json
import logging
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cactus import decoding, embedded, engine, pairs, recordings
from cactus.decoding import decode
from cactus.rules import TAS, Cactus, Rule, SpS
from cactus.sampling import run_key, warp
from cactus.trace import Settings

log = logging.getLogger("cactus")

SCHEMA = 1
DELTAS = (0.1, 0.5, 1.0)
GENERATE, LOOKUP, ASSISTED = "transformers generate", "transformers prompt lookup", "transformers assisted"
ALONE = "verifier alone"
ENGINE: dict[str, Rule] = {"SpS": SpS(), **{f"Cactus δ {delta:g}": Cactus(delta) for delta in DELTAS}, "TAS": TAS()}
METHODS = (GENERATE, LOOKUP, ASSISTED, ALONE, *ENGINE)

FORWARD_ROUNDS = 25
BUFFER_BYTES = 2**28  # larger than any cache


@dataclass(frozen=True)
class Choice:
    """The pair as the command line names it; verifier None is the embedded one, draft None the verifier at `bits`."""

    verifier: str | None
    draft: str | None
    bits: int
    device: str
    dtype: str

    def arguments(self) -> list[str]:
        """The same as options of the command line."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return [part for name, value in given.items() for part in (f"--{name}", str(value))]


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
    bytes once, and multiplying as many rows with plain matrices of as many weights in the verifier's type."""

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

    bandwidth: bytes per second of reading a buffer beyond every cache; gflops: of plain matrices, by rows; peak_bytes: resident set
    of processes of their own and of this one; acceptance: mean Σ min(p, q) of both drafts over the same positions;
    rows_seconds: picking the rows that one block's record keeps.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    prompts: list[str]
    peak_bytes: dict[str, int] = field(default_factory=dict)
    bandwidth: float | None = None
    gflops: dict[int, float] = field(default_factory=dict)
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


def rotated(repeat: int, prompt: int) -> tuple[str, ...]:
    """The order of the methods for one prompt in one repetition: each comes first, second, … about equally often."""
    first = (repeat + prompt) % len(METHODS)
    return METHODS[first:] + METHODS[:first]


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
    memory = [result.peak_bytes.get(name) for name in ("this engine", ASSISTED)]
    return [
        Claim(f"{ALONE} beside {GENERATE}", times(ALONE, GENERATE), 1.7, True),
        Claim(f"{best} beside {GENERATE}", times(best, GENERATE), 1.9, True),
        Claim(f"SpS beside {GENERATE}", times("SpS", GENERATE), 1.5, True),
        *(Claim(f"{best} beside {base}", times(best, base), 1.0, True) for base in (LOOKUP, ASSISTED, ALONE)),
        Claim(f"outside the forwards, {best}", _percent(outside(result.runs, best)), 5.0, False, "% of a block"),
        Claim("draft step beside verifier step", quotient(("draft", 1), ("verifier", 1)), 0.65, False),
        Claim("verifier pass of 5 beside transformers' of 1", quotient(("verifier", 5), ("transformers", 1)), 1.0, False),
        Claim(f"keeping a trace, {best}, m = {m}", _percent(recording(result, best)), 3.0, False, "% of a block"),
        Claim(f"peak memory beside {ASSISTED}", memory[0] / memory[1] if all(memory) else None, 1.0, False),
    ]


def _percent(share: float | None) -> float | None:
    return share and 100 * share


# --- the contestants ---


class Timed:
    """A model whose contexts note the seconds of their forwards in `laps`; on a GPU each is waited for."""

    def __init__(self, model, laps: list[float]):
        self._model, self._laps = model, laps

    def open(self) -> "TimedContext":
        return TimedContext(self._model.open(), self._laps)

    def __getattr__(self, name: str):
        return getattr(self._model, name)


class TimedContext:
    """A context of a Timed model."""

    def __init__(self, context, laps: list[float]):
        self._context, self._laps = context, laps

    def forward(self, ids: Tensor, rows: int) -> Tensor:
        start = time.perf_counter()
        logits = self._context.forward(ids, rows)
        if logits.is_cuda:
            torch.cuda.synchronize()
        self._laps.append(time.perf_counter() - start)
        return logits

    def __getattr__(self, name: str):
        return getattr(self._context, name)


def run_engine(pair: pairs.Pair, ids: list[int], rule: Rule, settings: Settings) -> dict[str, Any]:
    """This engine, its trace included; m = 0 is the verifier alone. Returns the fields of a Run that were measured."""
    laps: list[float] = []
    timed = replace(pair, verifier=Timed(pair.verifier, laps), draft=Timed(pair.draft, laps))
    start = time.perf_counter()
    rounds = list(decode(timed, ids, rule, settings))
    seconds = time.perf_counter() - start
    for round in rounds:
        round.line()
    lines = time.perf_counter() - start - seconds
    reads = (2 if settings.num_draft_tokens else 1) if len(ids) > 1 else 0
    split = {part: sum(round.seconds[part] for round in rounds) for part in ("draft", "verify", "rule", "rest")}
    return {
        "tokens": sum(len(round.emitted) for round in rounds),
        "seconds": seconds,
        "passes": len(rounds),
        "accepted": sum(round.accepted for round in rounds),
        "judged": sum(token.judged for round in rounds for token in round.drafted),
        "ended": rounds[-1].stop == "eos",
        "parts": split | {"prefill": sum(laps[:reads]), "forwards": sum(laps[reads:]), "lines": lines},
    }


class Counter:
    """A streamer of transformers' generate that notes how many tokens come at a time; the prompt comes first."""

    def __init__(self):
        self.counts: list[int] = []

    def put(self, ids: Tensor) -> None:
        self.counts.append(ids.numel())

    def end(self) -> None:
        pass


def run_transformers(
    module, ids: list[int], settings: Settings, eos_ids: Sequence[int], lookup: int | None = None, draft=None
) -> dict[str, Any]:
    """transformers' generate with the sampling of `settings`: plain, with `lookup` tokens copied from the text, or assisted by `draft`.

    What it drafted is read off the length of each of the module's inputs, what it kept off the stream; an end token that was drafted
    and kept looks like one of the verifier's own, so `accepted` may be one short in a run. Returns the fields of a Run that were measured.
    """
    from transformers import GenerationConfig

    sampling = settings.sampling
    config = GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        max_new_tokens=settings.max_new_tokens,
        eos_token_id=list(eos_ids) or None,
        pad_token_id=eos_ids[0] if eos_ids else None,
        prompt_lookup_num_tokens=lookup,
    )
    counter, lengths = Counter(), []
    hook = module.register_forward_pre_hook(lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[-1]), with_kwargs=True)
    prompt = torch.tensor([ids], device=module.device)
    torch.manual_seed(run_key(settings.seed, settings.prompt_id)[0] % 2**63)
    try:
        start = time.perf_counter()
        out = module.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_config=config, streamer=counter, assistant_model=draft
        )
        seconds = time.perf_counter() - start
    finally:
        hook.remove()
    accepted = [count - 1 for count in counter.counts[1:]]
    drafted = [length - 1 for length in (lengths[0] - len(ids) + 1, *lengths[1:])]
    return {
        "tokens": out.shape[-1] - len(ids),
        "seconds": seconds,
        "passes": len(lengths),
        "accepted": sum(accepted),
        "judged": sum(min(kept + 1, offered) for kept, offered in zip(accepted, drafted, strict=True)),
        "ended": out[0, -1].item() in eos_ids,
    }


@dataclass
class Contest:
    """Everything loaded once: the pair, and the same two models in transformers."""

    pair: pairs.Pair
    verifier: Any
    draft: Any

    def run(self, method: str, ids: list[int], settings: Settings) -> dict[str, Any]:
        """One run of a method of METHODS; the fields of a Run that were measured."""
        m = settings.num_draft_tokens
        if method == ALONE:
            return run_engine(self.pair, ids, SpS(), replace(settings, num_draft_tokens=0))
        if method in ENGINE:
            return run_engine(self.pair, ids, ENGINE[method], settings)
        lookup, draft = {GENERATE: (None, None), LOOKUP: (m, None), ASSISTED: (None, self.draft)}[method]
        return run_transformers(self.verifier, ids, settings, self.pair.eos_ids, lookup, draft)


def load_transformers(choice: Choice, m: int) -> tuple[Any, Any]:
    """Verifier and draft as transformers models of the bench's own: the draft set to propose m tokens every time, whatever its
    confidence, the verifier to nothing but what a call says."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    cuda = choice.verifier and choice.device != "cpu" and torch.cuda.is_available()
    auto = "bfloat16" if cuda else "float32"
    dtype = pairs.DTYPES[auto if choice.dtype == "auto" or not choice.verifier else choice.dtype]

    def part(name):
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map={"": "cuda" if cuda else "cpu"}).eval()

    verifier = part(choice.verifier or embedded.fetch())
    draft = part(choice.draft) if choice.draft else embedded.draft_from(verifier, choice.bits)
    verifier.generation_config = GenerationConfig()
    draft.generation_config = GenerationConfig(
        num_assistant_tokens=m, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    return verifier, draft


# --- floors, forwards, memory ---


def bandwidth(device: torch.device) -> float:
    """Bytes per second of reading memory: the best of forty sums over a buffer larger than the caches."""
    buffer = torch.ones(BUFFER_BYTES // 4, device=device)
    return BUFFER_BYTES / min(_seconds(buffer.sum, device) for _ in range(40))


def gflops(rows: int, device: torch.device, dtype: torch.dtype, size: int = 2048) -> float:
    """GFLOP per second of multiplying `rows` rows with matrices that lie in memory; float32 on a CPU packed, as in cactus.engine."""
    x = torch.randn(rows, size, device=device, dtype=dtype)
    matrices = [torch.randn(size, size, device=device, dtype=dtype) for _ in range(BUFFER_BYTES // (size * size * dtype.itemsize))]
    multiply = F.linear
    if dtype == torch.float32 and device.type == "cpu" and torch.backends.mkldnn.is_available():
        matrices = [torch.ops.mkldnn._reorder_linear_weight(matrix, engine.ROWS_HINT) for matrix in matrices]

        def multiply(x, matrix):
            return torch.ops.mkldnn._linear_pointwise(x, matrix, None, "none", [], "")

    def all_of_them():
        for matrix in matrices:
            multiply(x, matrix)

    with torch.inference_mode():
        best = min(_seconds(all_of_them, device) for _ in range(20))
    return 2e-9 * rows * size * size * len(matrices) / best


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def weights(module) -> int:
    """How many weights a pass multiplies with: all but the embedding table, unless the head is the same table."""
    table = module.get_input_embeddings().weight
    tied = module.get_output_embeddings().weight is table
    return sum(parameter.numel() for parameter in module.parameters()) - (0 if tied else table.numel())


def weight_bytes(model: pairs.AnyModel, module) -> int:
    """Bytes of weights that one pass of this model reads; module: what it was made of."""
    if not isinstance(model, engine.PackedModel):
        return weights(module) * module.dtype.itemsize
    tensors = [model.norm, model.head, *(tensor for layer in model.layers for tensor in vars(layer).values())]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def measure_forwards(contest: Contest, ids: list[int], m: int, result: Result) -> None:
    """Passes of one token and of more after `ids`, this engine's and transformers', taken in turns."""
    size = contest.pair.verifier.vocab_size
    sides = {
        "verifier": (contest.pair.verifier, contest.verifier),
        "draft": (contest.pair.draft, contest.draft),
        "transformers": (pairs.Model(contest.verifier, size), contest.verifier),
    }
    kinds = [(name, rows) for name in ("verifier", "transformers") for rows in sorted({1, 5, m + 1})] + [("draft", 1)]
    contexts = {name: model.open() for name, (model, _) in sides.items()}
    text = torch.tensor(ids, device=contest.pair.device)
    for context in contexts.values():
        context.forward(text, 1)
    taken: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    for _ in range(FORWARD_ROUNDS):
        for name, rows in kinds:
            laps: list[float] = []
            TimedContext(contexts[name], laps).forward(text[:rows], rows)
            contexts[name].crop(len(ids))
            taken[name, rows] += laps
    for (name, rows), seconds in taken.items():
        model, module = sides[name]
        read = weight_bytes(model, module)
        floors = (read / result.bandwidth, 2e-9 * rows * weights(module) / result.gflops[rows])
        result.forwards.append(Forward(name, rows, *asdict(spread(seconds)).values(), read, *floors))


@torch.inference_mode()
def measure_acceptance(contest: Contest, prompt_ids: list[int], text_ids: list[int]) -> dict[str, list[float]]:
    """Σ min(p, q) at every position of a text of the verifier's, for this engine's draft and for the one that transformers runs."""
    size, sampling = contest.pair.verifier.vocab_size, Settings().sampling
    ids = torch.tensor(prompt_ids + text_ids[:-1], device=contest.pair.device)

    def laws(model) -> Tensor:
        context = model.open()
        try:
            return warp(context.forward(ids, len(text_ids)), sampling)
        finally:
            context.close()

    both = {
        "this engine": (contest.pair.draft, contest.pair.verifier),
        ASSISTED: (pairs.Model(contest.draft, size), pairs.Model(contest.verifier, size)),
    }
    return {name: torch.minimum(laws(p), laws(q)).sum(-1).tolist() for name, (p, q) in both.items()}


@torch.inference_mode()
def measure_rows(contest: Contest, m: int) -> float:
    """Seconds of picking the rows of a block's record, median."""
    laws = warp(torch.randn(2, m + 1, contest.pair.verifier.vocab_size, device=contest.pair.device) * 4, Settings().sampling)
    drafted = laws[0, :m].argmax(-1)
    pick = functools.partial(decoding._rows, *laws, drafted)
    return statistics.median(_seconds(lambda: pick().tolist(), laws.device) for _ in range(FORWARD_ROUNDS))


def peak_memory(command: list[str]) -> int:
    """Largest resident set of `python command` in a process of its own, in bytes. Raises ValueError with its last words where it fails.

    A process starts with what its parent holds, so this is asked before anything is loaded here.
    """
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        words = process.stderr.read().strip().splitlines()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise ValueError(
            (words or ["a process whose memory was to be measured failed without a word."])[-1].removeprefix("cactus: ")
        )
    return _resident(usage)


def _resident(usage: resource.struct_rusage) -> int:
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def assisted_alone(choice: Choice) -> None:
    """What the peak memory of transformers is taken from: both models loaded, eight tokens by assisted generation."""
    module, draft = load_transformers(choice, 5)
    run_transformers(module, [1, 2, 3], Settings(max_new_tokens=8), (), draft=draft)


# --- prompts ---


def read_prompts(path: Path | None) -> dict[str, str]:
    """Prompts by name: those of the recorded traces, or of a file: Spec-Bench's JSON Lines (the first turn counts) or one prompt per
    line. Raises ValueError with a sentence."""
    if path is None:
        return {recording.name: recording.prompt for recording in recordings.RECORDINGS}
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a file of prompts: {error}.") from error
    if not lines:
        raise ValueError(f"{path} holds no prompt: write one per line, or JSON Lines with turns.")
    prompts = {}
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("{"):
            prompts[f"prompt {number}"] = line
            continue
        try:
            data = json.loads(line)
            prompts[f"{data['category']} {data['question_id']}"] = data["turns"][0]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"Prompt {number} of {path} has no category, question_id and turns: {error!r}.") from error
    return prompts


# --- the whole measurement ---


def run(args: argparse.Namespace, load_pair: Callable[[argparse.Namespace], pairs.Pair]) -> None:
    """The command: measure (or read an earlier measurement), print the tables, write what --json and --plot name."""
    if args.plot:
        _need_plotly()
    for path in (args.json, args.plot):
        if path and not path.absolute().parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {path.parent}.")
    result = read_result(args.source) if args.source else _measured(args, load_pair)
    if args.json:
        args.json.write_text(json.dumps(to_json(result), ensure_ascii=False, indent=1))
    if args.plot:
        write_plot(result, args.plot)
    print("\n".join(report(result)))


def _measured(args: argparse.Namespace, load_pair: Callable[[argparse.Namespace], pairs.Pair]) -> Result:
    settings = Settings(num_draft_tokens=args.num_draft_tokens, max_new_tokens=args.max_new_tokens, seed=args.seed)
    if settings.num_draft_tokens < 1:
        raise ValueError(f"--num-draft-tokens must be at least 1, got {settings.num_draft_tokens}.")
    if args.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {args.repeats}.")
    prompts = read_prompts(args.prompts)
    choice = Choice(args.verifier, args.draft, args.bits, args.device, args.dtype)
    machine = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }
    result = Result(machine, asdict(settings) | {"repeats": args.repeats}, list(prompts))
    try:
        measure(result, choice, lambda: load_pair(args), prompts, settings, args.repeats)
    except KeyboardInterrupt:
        log.info("Stopped by the keyboard; what was measured until then is kept.")
    return result


def measure(
    result: Result,
    choice: Choice,
    load_pair: Callable[[], pairs.Pair],
    prompts: dict[str, str],
    settings: Settings,
    repeats: int,
) -> None:
    """Fill `result`, part by part, so that what is there after an interrupt is whole. Raises PromptError before any run where a prompt
    is too long for the pair."""
    from tqdm import tqdm

    first = next(iter(prompts.values()))
    log.info("memory of processes of their own …")
    command = ["-m", "cactus", "generate", first, "--rule", "sps", "--max-new-tokens", "8", *choice.arguments()]
    result.peak_bytes["this engine"] = peak_memory(command)
    alone = f"from cactus import bench; bench.assisted_alone(bench.Choice(**{asdict(choice)!r}))"
    result.peak_bytes[ASSISTED] = peak_memory(["-c", alone])

    pair = load_pair()
    result.machine |= {"pair": pair.name, **pair.provenance}
    ids = {name: pair.encode(prompt, chat=bool(pair.tokenizer.chat_template)) for name, prompt in prompts.items()}
    for prompt_ids in ids.values():
        pair.check(prompt_ids, settings)
    contest = Contest(pair, *load_transformers(choice, settings.num_draft_tokens))

    log.info("floors and single passes …")
    result.bandwidth = bandwidth(pair.device)
    for rows in sorted({1, 5, settings.num_draft_tokens + 1}):
        result.gflops[rows] = gflops(rows, pair.device, contest.verifier.dtype)
    measure_forwards(contest, ids[next(iter(ids))], settings.num_draft_tokens, result)
    result.rows_seconds = measure_rows(contest, settings.num_draft_tokens)

    log.info("both drafts on the verifier's own text …")
    positions: dict[str, list[float]] = {}
    for prompt_ids in ids.values():
        text = [
            token.id for round in decode(pair, prompt_ids, SpS(), replace(settings, num_draft_tokens=0)) for token in round.emitted
        ]
        for name, values in measure_acceptance(contest, prompt_ids, text).items():
            positions.setdefault(name, []).extend(values)
    result.acceptance |= {name: statistics.fmean(values) for name, values in positions.items()}

    for method in METHODS:  # the first run of each is slower than the others
        contest.run(method, ids[next(iter(ids))], replace(settings, max_new_tokens=min(8, settings.max_new_tokens)))
    with tqdm(total=repeats * len(ids) * len(METHODS), unit="run", file=sys.stderr) as bar:
        for repeat in range(repeats):
            for number, (name, prompt_ids) in enumerate(ids.items()):
                how = replace(settings, seed=settings.seed + repeat, prompt_id=number)
                for method in rotated(repeat, number):
                    bar.set_description(method)
                    result.runs.append(Run(method, repeat, name, **contest.run(method, prompt_ids, how)))
                    bar.update()
    result.peak_bytes["this process, all models loaded"] = _resident(resource.getrusage(resource.RUSAGE_SELF))


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
        data["gflops"] = {int(rows): value for rows, value in data["gflops"].items()}
        return Result(**data)
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
        by_rows = ", ".join(f"{value:.0f} at {rows} row{'s' * (rows > 1)}" for rows, value in result.gflops.items())
        yield f"Memory is read at {result.bandwidth / 1e9:.1f} GB/s; plain matrices of the verifier's type multiply at {by_rows} GFLOP/s."
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


def _need_plotly() -> None:
    if importlib.util.find_spec("plotly") is None:
        raise ValueError("--plot needs plotly: pip install plotly, or leave the option out.")
