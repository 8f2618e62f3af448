"""How fast this engine is beside transformers' own decoding, measured in one process on the same prompts, seeds and settings.

Every method runs once on every prompt in every repetition, in an order that is rotated from prompt to prompt, so that a machine that
slows down slows all of them. Tokens per second are new tokens divided by the seconds of the whole call, reading of the prompt
included, for every method alike. Runs stop at an end token, as a user's would: text after it is read by nobody, and is accepted at
other rates than answers. What comes out of it: cactus.bench_results. Measuring the memory of processes needs a Unix.
"""

import argparse
import functools
import json
import logging
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cactus import decoding, embedded, engine, pairs, recordings
from cactus.bench_results import (
    ALONE,
    ASSISTED,
    CACTUS,
    GENERATE,
    LOOKUP,
    METHODS,
    SPS,
    TYPICAL,
    Forward,
    Result,
    Run,
    need_plotly,
    read_result,
    report,
    spread,
    to_json,
    write_plot,
)
from cactus.decoding import decode
from cactus.rules import TAS, Cactus, Rule, SpS
from cactus.sampling import run_key, warp, warp_kept
from cactus.trace import Settings

log = logging.getLogger("cactus")

ENGINE: dict[str, Rule] = {SPS: SpS(), **{name: Cactus(delta) for name, delta in CACTUS.items()}, TYPICAL: TAS()}

FORWARD_ROUNDS = 25
BUFFER_BYTES = 2**28  # larger than any cache


@dataclass(frozen=True)
class Choice:
    """The pair as the command line names it; verifier None is the embedded one, draft None the verifier at `bits`."""

    verifier: str | None
    draft: str | None
    bits: int | None
    device: str
    dtype: str

    def arguments(self) -> list[str]:
        """The same as options of the command line."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return [part for name, value in given.items() for part in (f"--{name}", str(value))]


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
    draft = part(choice.draft) if choice.draft else embedded.draft_from(verifier, choice.bits or pairs.default_bits())
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


def gflops(rows: int, model: pairs.AnyModel, dtype: torch.dtype, size: int = 2048) -> float:
    """GFLOP per second of multiplying `rows` rows with square matrices that lie in memory, on the kernels that run this model's."""
    x = torch.randn(rows, size, device=model.device, dtype=dtype)
    matrix = model.matrix if isinstance(model, engine.PackedModel) else lambda weight: functools.partial(F.linear, weight=weight)
    count = BUFFER_BYTES // (size * size * dtype.itemsize)
    matrices = [matrix(torch.randn(size, size, device=model.device, dtype=dtype)) for _ in range(count)]

    def all_of_them():
        for multiply in matrices:
            multiply(x)

    with torch.inference_mode():
        best = min(_seconds(all_of_them, model.device) for _ in range(20))
    return 2e-9 * rows * size * size * count / best


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
    return weights(module) * model.matrix.bytes_per_weight


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
    more = text.repeat(m + 5)  # of a prompt of one token, too
    for context in contexts.values():
        context.forward(text, 1)
    taken: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    for _ in range(FORWARD_ROUNDS):
        for name, rows in kinds:
            laps: list[float] = []
            TimedContext(contexts[name], laps).forward(more[:rows], rows)
            contexts[name].crop(len(ids))
            taken[name, rows] += laps
    for (name, rows), seconds in taken.items():
        model, module = sides[name]
        read = weight_bytes(model, module)
        floors = (
            read / result.bandwidth,
            2e-9 * rows * weights(module) / result.gflops[f"{'draft' if name == 'draft' else 'verifier'} {rows}"],
        )
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
    logits = torch.randn(m + 1, contest.pair.verifier.vocab_size, device=contest.pair.device) * 4
    ids, law = warp_kept(logits, Settings().sampling)
    pick = functools.partial(decoding._rows, ids, law, law, torch.zeros(m, 1, dtype=torch.long, device=law.device))
    return statistics.median(_seconds(lambda: pick().tolist(), law.device) for _ in range(FORWARD_ROUNDS))


def peak_memory(command: list[str]) -> int:
    """Largest resident set of `python command` in a process of its own, in bytes. Raises ValueError with its last words where it fails.

    A process starts with what its parent holds, so this is asked before anything is loaded here.
    """
    # Wherever this runs: the package may be a checkout that is found from its own folder only.
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *command], env=environment, **streams) as process:
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
            prompts[f"{data['category']} {data['question_id']}"] = data["turns"][0] + ""  # text, or a TypeError
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"Prompt {number} of {path} has no category, question_id and turns: {error!r}.") from error
    return prompts


def rotated(repeat: int, prompt: int) -> tuple[str, ...]:
    """The order of the methods for one prompt in one repetition: each comes first, second, … about equally often."""
    first = (repeat + prompt) % len(METHODS)
    return METHODS[first:] + METHODS[:first]


# --- the whole measurement ---


def run(args: argparse.Namespace, load_pair: Callable[[argparse.Namespace], pairs.Pair]) -> None:
    """The command: measure (or read an earlier measurement), print the tables, write what --json and --plot name."""
    if args.plot:
        need_plotly()
    for path in (args.json, args.plot):
        if path and not path.absolute().parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {path.parent}.")
        if path and (path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK)):
            raise ValueError(f"{path} cannot be written: it is a folder, or not yours to write. Name another file.")
    result = read_result(args.source) if args.source else _measured(args, load_pair)
    # The tables first: they are there even if a disk is full by now.
    print("\n".join(report(result)), flush=True)
    try:
        if args.json:
            args.json.write_text(json.dumps(to_json(result), ensure_ascii=False, indent=1), encoding="utf-8")
        if args.plot:
            write_plot(result, args.plot)
    except OSError as error:
        raise ValueError(f"The measurement cannot be written ({error}); what it found stands above.") from error


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
    # Behind --, since a prompt may begin with a dash.
    command = ["-m", "cactus", "generate", "--rule", "sps", "--max-new-tokens", "8", *choice.arguments(), "--", first]
    result.peak_bytes["this engine"] = peak_memory(command)
    alone = f"from cactus import bench; bench.assisted_alone(bench.Choice(**{asdict(choice)!r}))"
    result.peak_bytes[ASSISTED] = peak_memory(["-c", alone])

    pair = load_pair()
    result.machine |= {"pair": pair.name, "threads": torch.get_num_threads(), **pair.provenance}
    ids = {name: pair.encode(prompt, chat=bool(pair.tokenizer.chat_template)) for name, prompt in prompts.items()}
    for prompt_ids in ids.values():
        pair.check(prompt_ids, settings)
    contest = Contest(pair, *load_transformers(choice, settings.num_draft_tokens))

    log.info("floors and single passes …")
    result.bandwidth = bandwidth(pair.device)
    for rows in sorted({1, 5, settings.num_draft_tokens + 1}):
        result.gflops[f"verifier {rows}"] = gflops(rows, pair.verifier, contest.verifier.dtype)
    result.gflops["draft 1"] = gflops(1, pair.draft, contest.draft.dtype)
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
