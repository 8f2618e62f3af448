"""A lean forward for Llama-like models in float32 on a CPU: oneDNN-packed, fused weights and key/value buffers that are never copied.

The same logits as transformers' within rounding, at a fraction of the time: per layer four packed matrix products (q, k and v fused, gate
and up fused) instead of seven, no module calls, no cache objects, and the LM head only for the rows that are asked for. Packed, five
tokens cost little more than one, which is what a verifier pass needs. Anything else runs in transformers itself (cactus.pairs).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS_HINT = 8  # the number of tokens that oneDNN chooses its blocking for: a verifier pass
FIRST_CAPACITY = 512


def packs(module: torch.nn.Module) -> bool:
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
    )


@dataclass
class Layer:
    """One decoder layer: two norms as they are, four packed matrices."""

    norm_in: Tensor
    qkv: Tensor
    o: Tensor
    norm_post: Tensor
    gate_up: Tensor
    down: Tensor


def _pack_layer(layer: torch.nn.Module) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        layer.input_layernorm.weight.detach(),
        _pack(torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])),
        _pack(attention.o_proj.weight),
        layer.post_attention_layernorm.weight.detach(),
        _pack(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])),
        _pack(mlp.down_proj.weight),
    )


@torch.no_grad()
def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS_HINT)


def _linear(x: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


class PackedModel:
    """A Llama whose weights are packed once; `open()` gives contexts as the decoder wants them. `module` is the transformers model."""

    def __init__(self, module: torch.nn.Module, vocab_size: int, head: Tensor | None = None):
        """module: a model that `packs`; vocab_size: how many ids of it are used; head: the packed LM head of a model that shares it."""
        config = module.config
        self.module: torch.nn.Module | None = module
        self.vocab_size, self.device = vocab_size, module.device
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = module.model.layers[0].self_attn.head_dim, config.rms_norm_eps
        self.embedding = module.model.embed_tokens.weight.detach()
        self.norm = module.model.norm.weight.detach()
        self.head = _pack(module.lm_head.weight[:vocab_size]) if head is None else head
        self.layers = [_pack_layer(layer) for layer in module.model.layers]
        self._rotary = module.model.rotary_emb
        self._cos, self._sin = self._rotations(FIRST_CAPACITY)

    def release(self) -> "PackedModel":
        """Let go of the transformers model, whose linear weights are not needed any more; returns self."""
        self.module = None
        return self

    def open(self) -> "PackedContext":
        """A new, empty context."""
        return PackedContext(self)

    def rotations(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the rotary embedding at positions start..end, (n, head_dim) each."""
        if end > len(self._cos):
            self._cos, self._sin = self._rotations(2 * end)
        return self._cos[start:end], self._sin[start:end]

    @torch.inference_mode()
    def _rotations(self, positions: int) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(self.embedding[:1, None], torch.arange(positions)[None])
        return cos[0], sin[0]


class PackedContext:
    """One text being read: keys and values of every layer in two buffers, and how much of them counts."""

    def __init__(self, model: PackedModel):
        self.model, self.device, self.vocab_size, self.length = model, model.device, model.vocab_size, 0
        self._buffers = self._allocate(FIRST_CAPACITY)

    def _allocate(self, capacity: int) -> Tensor:
        shape = (2, len(self.model.layers), 1, self.model.kv_heads, capacity, self.model.head_dim)
        return torch.zeros(shape)

    @torch.inference_mode()
    def forward(self, ids: Tensor, rows: int) -> Tensor:
        """Append ids (n,); returns the logits after the last `rows` of them, (rows, V) float32."""
        model, n, start = self.model, len(ids), self.length
        end = start + n
        if end > self._buffers.shape[-2]:
            grown = self._allocate(2 * end)
            grown[..., :start, :] = self._buffers[..., :start, :]
            self._buffers = grown
        cos, sin = model.rotations(start, end)
        # One token sees everything before it; several see each other only backwards.
        mask = None if n == 1 else torch.ones(n, end, dtype=torch.bool).tril(start)[None, None]
        x = F.embedding(ids, model.embedding)
        for layer, keys, values in zip(model.layers, *self._buffers, strict=True):
            normed = F.rms_norm(x, x.shape[-1:], layer.norm_in, model.eps)
            turned, value = self._qkv(_linear(normed, layer.qkv), cos, sin)
            keys[0, :, start:end], values[0, :, start:end] = turned[model.heads :], value
            attended = F.scaled_dot_product_attention(
                turned[None, : model.heads], keys[:, :, :end], values[:, :, :end], attn_mask=mask, enable_gqa=True
            )
            x = x + _linear(attended[0].transpose(0, 1).reshape(n, -1), layer.o)
            gate, up = _linear(F.rms_norm(x, x.shape[-1:], layer.norm_post, model.eps), layer.gate_up).chunk(2, -1)
            x = x + _linear(F.silu(gate) * up, layer.down)
        self.length = end
        return _linear(F.rms_norm(x[n - rows :], x.shape[-1:], model.norm, model.eps), model.head)

    def _qkv(self, fused: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(n, (heads + 2·kv_heads)·head_dim) to rotated queries and keys (heads + kv_heads, n, head_dim) and values."""
        model = self.model
        both, value = (
            fused.view(len(fused), -1, model.head_dim).transpose(0, 1).split([model.heads + model.kv_heads, model.kv_heads])
        )
        half = model.head_dim // 2
        return both * cos + torch.cat((-both[..., half:], both[..., :half]), -1) * sin, value

    def crop(self, length: int) -> None:
        """Keep the first `length` entries."""
        self.length = min(self.length, length)

    def close(self) -> None:
        """Free the buffers."""
        self._buffers = None
