"""A lean forward for Llama-like models in float32 on a CPU: packed, fused weights and key/value buffers that are never copied.

The same logits as transformers' within rounding, at a fraction of the time. Per layer four matrix products instead of seven (q, k and v
fused, gate and up fused), norms and scales folded into the weights, and the LM head only for the rows that are asked for. A verifier
keeps float32 weights, packed for oneDNN; a draft may have eight-bit ones, whose products take a third of the time. Anything else runs
in transformers itself (cactus.pairs).
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS_HINT = 8  # the number of tokens that oneDNN chooses its blocking for: a verifier pass
FIRST_CAPACITY = 512


def turns_alike(module: nn.Module) -> bool:
    """Whether the rotary embedding of a position is the same however long the text gets: not with dynamic NTK scaling or LongRoPE."""
    return (getattr(module.config, "rope_parameters", None) or {}).get("rope_type") not in ("dynamic", "longrope")


def packs(module: nn.Module) -> bool:
    """Whether this model can run here: a plain Llama in float32 on a CPU that oneDNN serves."""
    config = module.config
    return (
        config.model_type == "llama"
        and module.device.type == "cpu"
        and module.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and config.hidden_act == "silu"
        and not config.attention_bias
        and not config.mlp_bias
        and turns_alike(module)  # here the rotary embedding is a table made ahead
    )


class Float32:
    """(x · gain) @ weight.T, added to `onto` where that is given, with packed float32 weights.

    weight: (out, in); gain: (in,), what a norm before this matrix multiplies by; x: (n, in); onto: (n, out)
    """

    bytes_per_weight = 4

    def __init__(self, weight: Tensor, gain: Tensor | None = None):
        scaled = weight if gain is None else weight * gain
        self.packed = torch.ops.mkldnn._reorder_linear_weight(scaled.contiguous(), ROWS_HINT)

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        if onto is None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, onto, self.packed, None, "add")


class Int8:
    """What `Float32` computes, with weights in eight bits, one scale per output, and x in eight bits, one scale per row.

    One scale for all rows would let the largest token of a prompt decide how coarse the others are. The gain stays with x, whose
    largest entries it evens out: folded into the weights it would cost a twentieth of the accepted tokens.
    """

    bytes_per_weight = 1
    # Without VNNI the kernel adds two products in 16 bits, which holds for seven bits of x only.
    levels = 127 if torch.cpu._is_vnni_supported() else 63

    def __init__(self, weight: Tensor, gain: Tensor | None = None):
        self.gain = gain
        scale = (torch.linalg.vector_norm(weight, math.inf, 1) / 127).clamp_min_(1e-30)
        # In pieces: of an LM head the quotients alone would take as much memory as the whole draft.
        pieces = zip(weight.split(4096), scale.split(4096), strict=True)
        whole = torch.cat([(rows / by[:, None]).round_().to(torch.int8) for rows, by in pieces])
        zeros = torch.zeros(len(scale), dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's quantised tensors are deprecated; where they are gone, `int8_runs` says so
            quantised = torch._make_per_channel_quantized_tensor(whole, scale.double(), zeros, 0)
        self.packed = torch.ops.quantized.linear_prepack(quantised, None)

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        if self.gain is not None:
            x = x * self.gain
        reach = torch.linalg.vector_norm(x, math.inf, -1, keepdim=True).clamp_min_(1e-30)
        y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x / reach, 1 / self.levels, self.levels + 1, self.packed
        )
        return y.mul_(reach) if onto is None else torch.addcmul(onto, y, reach)


Matrix = Float32 | Int8


@cache
def int8_runs() -> bool:
    """Whether this machine's torch multiplies eight-bit matrices, and rightly: tried on the largest values there are."""
    x = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]]).repeat_interleave(32, 1)
    weight = torch.cat([torch.ones(16, 64), -torch.ones(16, 64)])
    try:
        return torch.allclose(Int8(weight)(x), x @ weight.T, atol=0.5)
    except (AttributeError, RuntimeError):
        return False


def kernels() -> str:
    """What a rounded draft is multiplied with on this machine: "int8" (VNNI), "int8 on 7 bits" (without), or "float32"."""
    if not int8_runs():
        return "float32"
    return "int8" if Int8.levels == 127 else "int8 on 7 bits"


@dataclass
class Layer:
    """One decoder layer as four matrices."""

    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix


class PackedModel:
    """A Llama whose weights are packed once; `open()` gives contexts as the decoder wants them."""

    def __init__(
        self,
        module: nn.Module,
        vocab_size: int,
        matrix: type[Matrix] = Float32,
        rounded: Callable[[Tensor], Tensor] = lambda weight: weight,
        embedding: Tensor | None = None,
    ):
        """module: a transformers model that `packs`, not needed afterwards

        vocab_size: how many ids of it are used
        matrix: what its linear layers and LM head become
        rounded: what is done to the weights of the decoder layers before
        embedding: (≥ vocab_size, d) the table to look tokens up in, where it is at hand already; else the module's is copied
        """
        config, attention = module.config, module.model.layers[0].self_attn
        self.vocab_size, self.device, self.matrix = vocab_size, module.device, matrix
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, attention.head_dim
        self.width = config.hidden_size
        self.root = torch.tensor(math.sqrt(self.width * config.rms_norm_eps))
        # A copy: the table itself may be a piece of a mapped file, all of which it would hold in memory.
        self.embedding = module.model.embed_tokens.weight.detach()[:vocab_size].clone() if embedding is None else embedding
        with torch.no_grad():
            # The head first: what it takes on the way is the most memory that anything here does.
            self.head = matrix(module.lm_head.weight[:vocab_size], self._gain(module.model.norm))
            self.layers = [self._pack(layer, matrix, rounded) for layer in module.model.layers]
        self._rotary = module.model.rotary_emb
        self._turns = self._rotations(FIRST_CAPACITY)

    def _pack(self, layer: nn.Module, matrix: type[Matrix], rounded: Callable[[Tensor], Tensor]) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        q, k, v = (rounded(part.weight) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
        qkv = torch.cat([self._paired(q) * attention.scaling, self._paired(k), v])
        gate_up = torch.cat([rounded(mlp.gate_proj.weight), rounded(mlp.up_proj.weight)])
        return Layer(
            matrix(qkv, self._gain(layer.input_layernorm)),
            matrix(rounded(attention.o_proj.weight)),
            matrix(gate_up, self._gain(layer.post_attention_layernorm)),
            matrix(rounded(mlp.down_proj.weight)),
        )

    def _gain(self, norm: nn.Module) -> Tensor:
        """What is left of RMSNorm once a row x is divided by hypot(‖x‖, root)."""
        return norm.weight.detach() * math.sqrt(self.width)

    def _paired(self, weight: Tensor) -> Tensor:
        """Rows of q or k so ordered that the two numbers which the rotary embedding turns together are neighbours: a complex number."""
        halves = weight.view(-1, 2, self.head_dim // 2, weight.shape[-1])
        return halves.transpose(1, 2).reshape(weight.shape)

    def open(self) -> "PackedContext":
        """A new, empty context."""
        return PackedContext(self)

    def level(self, x: Tensor) -> Tensor:
        """RMSNorm without its gain: x (n, d), each row over √(‖x‖² + d·eps)."""
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.root)

    def turns(self, start: int, end: int) -> Tensor:
        """The rotary embedding at positions start..end as complex numbers, (n, 1, head_dim / 2)."""
        turns = self._turns  # another thread may put a shorter table in its place
        if end > len(turns):
            turns = self._turns = self._rotations(2 * end)
        return turns[start:end]

    @torch.inference_mode()
    def _rotations(self, positions: int) -> Tensor:
        cos, sin = self._rotary(self.embedding[:1, None], torch.arange(positions)[None])
        half = self.head_dim // 2
        return torch.complex(cos[0, :, :half], sin[0, :, :half])[:, None]


class PackedContext:
    """One text being read: keys and values of every layer in one buffer, and how much of it counts."""

    def __init__(self, model: PackedModel):
        self.model, self.device, self.vocab_size, self.length = model, model.device, model.vocab_size, 0
        self._buffer = self._allocate(FIRST_CAPACITY)

    def _allocate(self, capacity: int) -> Tensor:
        return torch.zeros(len(self.model.layers), 2 * self.model.kv_heads, capacity, self.model.head_dim)

    @torch.inference_mode()
    def forward(self, ids: Tensor, rows: int) -> Tensor:
        """Append ids (n,); returns the logits after the last `rows` of them, (rows, V) float32."""
        model, n, start = self.model, len(ids), self.length
        end = start + n
        if end > self._buffer.shape[2]:
            grown = self._allocate(2 * end)
            grown[:, :, :start] = self._buffer[:, :, :start]
            self._buffer = grown
        turns, group = model.turns(start, end), model.heads // model.kv_heads
        fresh = self._buffer[:, :, start:end].transpose(1, 2).unbind()
        keys, values = (part.unbind() for part in self._buffer[:, :, :end].split(model.kv_heads, 1))
        # One token sees everything before it; several see each other only backwards.
        mask = None if n == 1 else torch.full((n, end), -math.inf).triu(start + 1).repeat(group, 1)

        x = F.embedding(ids, model.embedding)
        for i, layer in enumerate(model.layers):
            fused = layer.qkv(model.level(x)).view(n, -1, model.head_dim)
            turned = fused[:, : -model.kv_heads].unflatten(-1, (-1, 2))
            torch.view_as_complex(turned).mul_(turns)
            fresh[i].copy_(fused[:, model.heads :])
            # The queries that share a key head are one batch: (kv_heads, group·n, head_dim)
            query = (
                fused[:, : model.heads].unflatten(1, (-1, group)).permute(1, 2, 0, 3).reshape(model.kv_heads, -1, model.head_dim)
            )
            scores = query @ keys[i].mT if mask is None else torch.baddbmm(mask, query, keys[i].mT)
            seen = (torch.softmax(scores, -1) @ values[i]).unflatten(1, (group, n))
            x = layer.o(seen.permute(2, 0, 1, 3).reshape(n, -1), x)
            gate, up = layer.gate_up(model.level(x)).chunk(2, -1)
            x = layer.down(F.silu(gate) * up, x)
        self.length = end
        return model.head(model.level(x[n - rows :]))

    def crop(self, length: int) -> None:
        """Keep the first `length` entries."""
        self.length = min(self.length, length)

    def close(self) -> None:
        """Free the buffer."""
        self._buffer = None
