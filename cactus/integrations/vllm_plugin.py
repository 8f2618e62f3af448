"""Cactus in vLLM: a plugin of vLLM's entry point group vllm.general_plugins, which vLLM loads in each of its processes.

vLLM's own rejection sampler does the work. Handed logits in which one number per drafted token is shifted (`shift_logits_`), it accepts
with min(1, gamma/p(n)) and draws the replacement from (h − p)₊. So the plugin wraps the two functions called rejection_sample, of the V1
model runner and of Model Runner V2, and puts the logits back afterwards: processed logprobs stay the verifier's.

It does nothing until a delta is given, by the environment variable CACTUS_DELTA or additional_config={"cactus": {"delta": 1}}. On
Model Runner V2 a request may bring its own, SamplingParams(extra_args={"cactus_delta": 0.5}) or "vllm_xargs" over HTTP. Rows of greedy
requests (T = 0), placeholders and bonus rows are never touched, and no row is where delta is 0.

torch is all that is imported here; vLLM only once vLLM itself calls `register`. Nothing below reads a value off the device or makes a
shape depend on one, so the ranks of a tensor-parallel group do the same.
"""

import functools
import importlib
import inspect
import math
import operator
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cactus.rules import shift_logits_

VARIABLE = "CACTUS_DELTA"
ARGUMENT = "cactus_delta"
OLDEST, TOO_NEW = (0, 31), (0, 34)
REMEDY = f"This release of Cactus works with vLLM 0.31 to 0.33: install one of those, or unset {VARIABLE} to run without Cactus."

V1, V2 = "vllm.v1.sample.rejection_sampler", "vllm.v1.worker.gpu.spec_decode.rejection_sampler"


class UnsupportedVLLMError(RuntimeError):
    """This vLLM is not one that the plugin knows. The message names its version and what is different."""


def parse_delta(value: object, source: str) -> float:
    """A delta as the environment, a configuration or a request gives it. Raises ValueError, naming the source, unless it is a finite
    number from 0 up."""
    try:
        delta = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        delta = math.nan
    if not 0 <= delta < math.inf:
        raise ValueError(f"{source} must be a number from 0 up (0 is lossless), got {value!r}.")
    return delta


def configured_delta(additional_config: object, environment: Mapping[str, str]) -> float | None:
    """The delta an engine is to run with, None where nobody asked for Cactus.

    additional_config: vLLM's, of which the entry "cactus" counts. Raises ValueError for a bad delta, for an entry that is not
    {"delta": number}, and where the environment variable says something else.
    """
    given = []
    if text := environment.get(VARIABLE, "").strip():
        given.append(parse_delta(text, f"The environment variable {VARIABLE}"))
    entry = additional_config.get("cactus") if isinstance(additional_config, Mapping) else None
    if entry is not None:
        if not isinstance(entry, Mapping) or set(entry) != {"delta"}:
            raise ValueError(f'additional_config["cactus"] must be {{"delta": number}}, got {entry!r}.')
        given.append(parse_delta(entry["delta"], 'additional_config["cactus"]["delta"]'))
    if len(set(given)) > 1:
        raise ValueError(
            f"{VARIABLE} says {given[0]:g} and additional_config says {given[1]:g}: give one delta, or the same twice."
        )
    return given[0] if given else None


def check_request(value: object, delta: float | None, runs_v2: bool) -> None:
    """Admit a request with its own cactus_delta. delta: the engine's, None where it runs without Cactus. Raises ValueError: one sentence,
    why the request cannot have what it asks for."""
    if delta is None:
        raise ValueError(
            f"{ARGUMENT} needs a server that speculates with Cactus: start it with a draft and {VARIABLE}=0, or leave it out."
        )
    if not runs_v2:
        raise ValueError(
            f"{ARGUMENT} needs Model Runner V2, but this server runs vLLM's V1 model runner, where every request has delta {delta:g}: "
            "leave it out, or start one server per delta."
        )
    parse_delta(value, ARGUMENT)


def v1_rows(draft_token_ids: Tensor, cu_num_draft_tokens: Tensor, temperature: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """(n, delta) of every row of the V1 runner's logits, (R,) each: one row per drafted token, request after request.

    draft_token_ids: (R,), −1 stands for no token; cu_num_draft_tokens: (B,) drafted tokens up to and with each request; temperature: (B,),
    0 is greedy. Greedy rows and placeholders get delta 0.
    """
    counts = cu_num_draft_tokens.diff(prepend=cu_num_draft_tokens.new_zeros(1))
    sampled = (temperature > 0).repeat_interleave(counts, output_size=len(draft_token_ids))
    return draft_token_ids.clamp_min(0).long(), delta * (sampled & (draft_token_ids >= 0))


def v2_rows(
    draft_sampled: Tensor, cu_num_logits: Tensor, expanded_idx_mapping: Tensor, temperature: Tensor, deltas: Tensor
) -> tuple[Tensor, Tensor]:
    """(n, delta) of every row of Model Runner V2's logits, (R,) each.

    Row i judges draft_sampled[i + 1], except a request's last row, from which the bonus token is drawn. draft_sampled: (R,), −1 stands for
    no token; cu_num_logits: (B + 1,) from 0, rows up to each request; expanded_idx_mapping: (R,) each row's request slot; temperature,
    deltas: (slots,). Bonus rows, greedy rows and placeholders get delta 0.
    """
    following, slots = draft_sampled.roll(-1), expanded_idx_mapping.long()
    judged = torch.ones_like(following, dtype=torch.bool).index_fill_(0, cu_num_logits[1:].long() - 1, False)
    judged &= (following >= 0) & (temperature[slots] > 0)
    return torch.where(judged, following, 0).long(), torch.where(judged, deltas[slots], 0.0)


@contextmanager
def shifted(logits: Tensor, n: Tensor, delta: Tensor) -> Iterator[None]:
    """Inside the block the softmax of each row is Cactus's target h; afterwards the logits are the verifier's again, to the bit.

    logits: (R, V) float32; n, delta: (R,).
    """
    before = logits.gather(-1, n[:, None])
    shift_logits_(logits, n, delta)
    try:
        yield
    finally:
        logits.scatter_(-1, n[:, None], before)


class RequestDeltas:
    """The delta of each request slot of Model Runner V2. To vLLM's sampler it is a logits processor that changes no logits.

    slots: vLLM's UvaBackedTensor, float32, where the sampler keeps temperatures too: `np` on the host, `gpu` on the device.
    """

    def __init__(self, default: float, slots: Any):
        self.default, self.slots = default, slots

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Note the delta of a request that enters a slot; False: its logits are not changed here."""
        self.slots.np[req_idx] = parse_delta((sampling_params.extra_args or {}).get(ARGUMENT, self.default), ARGUMENT)
        return False

    def apply_staged_writes(self) -> None:
        """Called by the sampler once per step, before the forward pass."""
        self.slots.copy_to_uva()

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """(R, V) logits as they are: here they have neither temperature nor filters yet."""
        return logits


def v1_with_cactus(original: Any, delta: float) -> Any:
    """The V1 runner's rejection_sample, judging by h instead of q."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def rejection_sample(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        logits, metadata = given["target_logits"], given["sampling_metadata"]
        if delta == 0 or metadata.all_greedy or not len(logits):
            return original(*args, **kwargs)
        with shifted(logits, *v1_rows(given["draft_token_ids"], given["cu_num_draft_tokens"], metadata.temperature, delta)):
            return original(*args, **kwargs)

    return rejection_sample


def v2_with_cactus(original: Any, deltas: RequestDeltas) -> Any:
    """Model Runner V2's rejection_sample, judging by h instead of q."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def rejection_sample(*args, **kwargs):
        if not deltas.slots.np.any():
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        # At T = 1 without filters the model's own logits come here, in its own dtype, too coarse for the shift.
        logits = given["target_logits"] = given["target_logits"].float()
        draft = given["draft_logits"]
        names = ("draft_sampled", "cu_num_logits", "expanded_idx_mapping", "temperature")
        n, delta = v2_rows(*(given[name] for name in names), deltas.slots.gpu)
        # The kernels read no further than the draft's vocabulary, which may lack the verifier's padding.
        with shifted(logits if draft is None else logits[:, : draft.shape[-1]], n, delta):
            return original(*bound.args, **bound.kwargs)

    return rejection_sample


def expand_to_rows(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """(B,) to (num_tokens,), each entry once per token of its request: what vLLM's expand_batch_to_tokens is meant to do.

    Without Triton, on a CPU, vLLM writes the result into a temporary copy and divides the logits by uninitialised memory instead of the
    temperature, whatever the acceptance rule (vLLM issue 55005).
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=num_tokens)


@functools.cache
def register() -> None:
    """The entry point; vLLM calls it in every process, maybe more than once.

    Raises ValueError for a bad CACTUS_DELTA, and UnsupportedVLLMError where Cactus is asked for and this vLLM is not one it knows: never
    is a delta given and ignored. Without CACTUS_DELTA the latter is a warning.
    """
    from vllm.logger import init_logger

    wanted = configured_delta(None, os.environ) is not None
    try:
        _install()
    except UnsupportedVLLMError as error:
        if wanted:
            raise
        init_logger("vllm.cactus").warning("%s Until then Cactus is off.", error)


def _install() -> None:
    import vllm
    from vllm.triton_utils import HAS_TRITON

    check_version(vllm.__version__)
    admission, _ = find("vllm.v1.engine.input_processor", "InputProcessor._validate_params", ("params",), vllm.__version__)
    find(V1, "rejection_sample", ("draft_token_ids", "cu_num_draft_tokens", "target_logits", "sampling_metadata"), vllm.__version__)
    find(V1, "expand_batch_to_tokens", tuple(inspect.signature(expand_to_rows).parameters), vllm.__version__)
    v1, _ = find(V1, "RejectionSampler.__init__", ("spec_config",), vllm.__version__)
    if HAS_TRITON:  # without it vLLM itself falls back to the V1 runner
        needed = ("target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "expanded_idx_mapping", "temperature")
        find(V2, "rejection_sample", needed, vllm.__version__)
        find("vllm.v1.worker.gpu.buffer_utils", "UvaBackedTensor.copy_to_uva", (), vllm.__version__)
        v2, _ = find(V2, "RejectionSampler.__init__", ("sampler", "spec_config"), vllm.__version__)
        _prepare(v2, _activate_v2)
    _prepare(v1, _activate_v1)
    _guard_admission(admission)


def check_version(version: str) -> None:
    """Raises UnsupportedVLLMError unless vLLM's version, such as "0.32.0+cpu", lies in the range that was read and tested."""
    try:
        parts = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        parts = ()
    if not OLDEST <= parts < TOO_NEW:
        raise UnsupportedVLLMError(f"vLLM {version} has not been tried with Cactus. {REMEDY}")


def find(module: str, name: str, arguments: tuple[str, ...], version: str) -> tuple[ModuleType, Any]:
    """(module, function) of vLLM, the name dotted. Raises UnsupportedVLLMError where it is missing or does not take these arguments."""
    try:
        home = importlib.import_module(module)
        function = operator.attrgetter(name)(home)
    except (ImportError, AttributeError) as error:
        raise UnsupportedVLLMError(f"vLLM {version} has no {module}.{name} ({error}). {REMEDY}") from error
    if missing := [argument for argument in arguments if argument not in inspect.signature(function).parameters]:
        raise UnsupportedVLLMError(f"In vLLM {version}, {module}.{name} takes no {', '.join(missing)}. {REMEDY}")
    return home, function


def _prepare(module: ModuleType, activate: Any) -> None:
    """Decide at the construction of an engine's RejectionSampler, when its configuration is known, how the module samples from then on."""
    from vllm.config import get_current_vllm_config

    construct = module.RejectionSampler.__init__
    signature = inspect.signature(construct)
    originals = {name: getattr(module, name) for name in ("rejection_sample", "expand_batch_to_tokens") if hasattr(module, name)}

    @functools.wraps(construct)
    def __init__(self, *args, **kwargs):  # noqa: N807
        construct(self, *args, **kwargs)
        delta = configured_delta(get_current_vllm_config().additional_config, os.environ)
        replaced = {}
        if delta is not None:
            check_speculation(signature.bind(self, *args, **kwargs).arguments.get("spec_config"))
            replaced = activate(self, delta, originals)
        vars(module).update(originals | replaced)

    module.RejectionSampler.__init__ = __init__


def check_speculation(spec_config: Any) -> None:
    """Raises ValueError where vLLM's speculative configuration decides acceptance by another rule than rejection sampling."""
    method = getattr(spec_config, "rejection_sample_method", "standard")
    if method != "standard":
        raise ValueError(
            f"Cactus replaces the target of standard rejection sampling, but rejection_sample_method is {method!r}: "
            f"leave it out of the speculative config, or unset {VARIABLE}."
        )
    if getattr(spec_config, "method", None) == "draft_model" and spec_config.draft_sample_method != "probabilistic":
        from vllm.logger import init_logger

        init_logger("vllm.cactus").warning(
            "draft_sample_method is %r: the draft always proposes its likeliest token, accepted with probability gamma. "
            "For min(1, gamma/p), as in the paper, add \"draft_sample_method\": \"probabilistic\" to the speculative config.",
            spec_config.draft_sample_method,
        )  # fmt: skip


def _activate_v1(sampler: Any, delta: float, originals: Mapping[str, Any]) -> dict[str, Any]:
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    _announce(f"delta {delta:g} for every request, V1 model runner")
    replaced = {"rejection_sample": v1_with_cactus(originals["rejection_sample"], delta)}
    if current_platform.is_cpu() and not HAS_TRITON:
        replaced["expand_batch_to_tokens"] = expand_to_rows
    return replaced


def _activate_v2(rejection_sampler: Any, delta: float, originals: Mapping[str, Any]) -> dict[str, Any]:
    from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

    sampler = rejection_sampler.sampler
    deltas = RequestDeltas(delta, UvaBackedTensor(sampler.sampling_states.max_num_reqs, dtype=torch.float32))
    sampler.logits_processors.append(deltas)
    _announce(f"delta {delta:g} unless a request brings its own, Model Runner V2")
    return {"rejection_sample": v2_with_cactus(originals["rejection_sample"], deltas)}


def _announce(what: str) -> None:
    import vllm
    from vllm.logger import init_logger

    init_logger("vllm.cactus").info("Cactus is active: %s, vLLM %s", what, vllm.__version__)


def _guard_admission(module: ModuleType) -> None:
    """Refuse a bad cactus_delta when the request comes in, as HTTP 400, instead of in the engine."""
    from vllm.exceptions import VLLMValidationError

    validate = module.InputProcessor._validate_params

    @functools.wraps(validate)
    def _validate_params(self, params, *args, **kwargs):
        extra = getattr(params, "extra_args", None) or {}
        if ARGUMENT in extra:
            config = self.vllm_config
            delta = configured_delta(config.additional_config, os.environ) if config.speculative_config else None
            try:
                check_request(extra[ARGUMENT], delta, config.use_v2_model_runner)
            except ValueError as error:
                raise VLLMValidationError(str(error), parameter=ARGUMENT) from error
        return validate(self, params, *args, **kwargs)

    module.InputProcessor._validate_params = _validate_params
