"""python -m cactus serve: composes the vllm serve command that runs a verifier and a draft under Cactus, and becomes it."""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cactus.integrations.vllm_plugin import VARIABLE, parse_delta

MOST = 128  # drafted tokens a block that vLLM's V1 sampler allows
SPECULATIVE = ("--speculative-config", "--speculative_config", "-sc", "--spec-")
LIST_PLUGINS = "import importlib.metadata as m; print([e.name for e in m.entry_points(group='vllm.general_plugins')])"


def add_command(commands: argparse._SubParsersAction) -> None:
    """The parser of `serve`; what followed -- on the command line is expected in the namespace as vllm_arguments."""
    parser = commands.add_parser("serve", help="serve a pair with vLLM and Cactus; what follows -- goes to vllm serve")
    parser.add_argument("verifier", help="Hub id or folder")
    parser.add_argument("--draft", required=True, help="Hub id or folder, of the same vocabulary")
    parser.add_argument("--delta", type=float, default=0.1, help="divergence budget of every request (default 0.1; 0 is lossless)")
    parser.add_argument("--num-draft-tokens", "-m", type=int, default=5, help=f"per block, 1 to {MOST} (default 5)")
    parser.add_argument("--dry-run", action="store_true", help="print the command instead of running it")
    parser.set_defaults(command=run)


def compose(
    verifier: str, draft: str, delta: float, num_draft_tokens: int, passed_on: list[str]
) -> tuple[dict[str, str], list[str]]:
    """(variables to set, command). The draft samples, as the rule asks for: vLLM's own default is a draft that never does.

    Raises ValueError for a bad delta or number of drafted tokens, and where passed_on holds a speculative configuration of its own.
    """
    parse_delta(delta, "--delta")
    if not 1 <= num_draft_tokens <= MOST:
        raise ValueError(f"--num-draft-tokens must lie between 1 and {MOST}, got {num_draft_tokens}.")
    if double := [argument for argument in passed_on if argument.startswith(SPECULATIVE)]:
        raise ValueError(
            f"{double[0]} comes from --draft and --num-draft-tokens: leave it out after --, or run vllm serve yourself."
        )
    speculation = {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": num_draft_tokens,
        "draft_sample_method": "probabilistic",
    }
    return {VARIABLE: f"{delta:g}"}, ["vllm", "serve", verifier, "--speculative-config", json.dumps(speculation), *passed_on]


def run(args: argparse.Namespace) -> None:
    """Print the command, or replace this process by it. Raises ValueError where vLLM or, in vLLM's environment, the plugin is missing."""
    variables, command = compose(args.verifier, args.draft, args.delta, args.num_draft_tokens, args.vllm_arguments)
    if args.dry_run:
        print(" ".join(f"{name}={value}" for name, value in variables.items()), shlex.join(command))
        return
    own = str(Path(sys.executable).parent)
    vllm = shutil.which(command[0], path=os.pathsep.join((own, os.environ.get("PATH", os.defpath))))
    if vllm is None:
        raise ValueError("There is no vllm command here: install vLLM 0.31 to 0.33, or use --dry-run to see what would be run.")
    check_plugin(Path(vllm))
    os.execve(vllm, command, os.environ | variables)


def check_plugin(vllm: Path) -> None:
    """Raises ValueError where vLLM would not load the plugin: it would then serve with standard sampling and not say so."""
    python = vllm.resolve().with_name("python")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "cactus" not in allowed.split(","):
        raise ValueError(f"VLLM_PLUGINS={allowed} keeps vLLM from loading Cactus: add cactus to it, or unset it.")
    if python.exists():
        found = subprocess.run([python, "-c", LIST_PLUGINS], capture_output=True, text=True).stdout
        if "'cactus'" not in found:
            source = Path(__file__).parents[2]
            raise ValueError(f"{vllm} does not have the plugin: run {python} -m pip install --no-deps {source}")
