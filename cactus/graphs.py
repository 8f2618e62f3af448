"""Short passes on a GPU as CUDA graphs: launching hundreds of kernels one by one costs the host more than they take a small model.

The forward is transformers' own, over key/value buffers of fixed size whose filled length lies on the device; one graph per number of
tokens. On a CPU the same buffers are read without graphs, which is how their use is tested where there is no GPU.
"""

import torch
from torch import Tensor, nn

from cactus.engine import turns_alike

FIRST_CAPACITY = 1024  # tokens; masked entries are read too, so the buffers start small and double
LONGEST = 33  # tokens of a pass that becomes a graph: a verifier pass at the largest m
KEPT = 2  # closed contexts whose buffers and graphs the next run takes over


def fixes(module: nn.Module) -> bool:
    """Whether this model can run on fixed buffers: every layer attends to everything before it, and positions turn alike in any text."""
    config = module.config
    if not turns_alike(module):
        return False
    if kinds := getattr(config, "layer_types", None):
        return set(kinds) == {"full_attention"}
    return not getattr(config, "sliding_window", None)  # Mistral and Phi 3 name one window for all layers, and no kinds


class FixedModel:
    """A causal language model of transformers whose contexts have fixed buffers."""

    def __init__(self, module: nn.Module, vocab_size: int):
        self.module = module.eval()
        self.vocab_size, self.device = vocab_size, module.device
        self.closed: list[FixedContext] = []

    def open(self) -> "FixedContext":
        """An empty context, with the graphs of a closed one where there is one."""
        context = self.closed.pop() if self.closed else FixedContext(self)
        context.length = 0
        return context


class FixedContext:
    """One text being read: buffers, how much of them counts, and a graph per number of tokens read at once.

    The logits that `forward` returns are overwritten by the next pass over as many tokens.
    """

    def __init__(self, model: FixedModel):
        self.model, self.device, self.vocab_size, self.length = model, model.device, model.vocab_size, 0
        self._start = torch.zeros((), dtype=torch.long, device=model.device)
        self._allocate(FIRST_CAPACITY)

    def _allocate(self, capacity: int) -> None:
        from transformers.cache_utils import Cache

        layers = [fixed_layer(capacity, self._start) for _ in range(self.model.module.config.num_hidden_layers)]
        self.capacity, self._cache, self._graphs = capacity, Cache(layers=layers), {}

    @torch.inference_mode()
    def forward(self, ids: Tensor, rows: int) -> Tensor:
        """Append ids (n,); returns the logits after the last `rows` of them, (rows, V) float32."""
        n = len(ids)
        if self.length + n > self.capacity:
            self._grow(2 * (self.length + n))
        self._start.fill_(self.length)
        self.length += n
        if self.device.type != "cuda" or n > LONGEST:
            return self._pass(ids[None], rows)
        if n not in self._graphs:
            self._graphs[n] = self._capture(n)
        graph, held, logits = self._graphs[n]
        held.copy_(ids[None])
        graph.replay()
        return logits[n - rows :]

    def _pass(self, ids: Tensor, rows: int) -> Tensor:
        # Places and mask are given: left to itself the forward looks at the filled length on the host.
        places = self._start + torch.arange(ids.shape[1], device=self.device)
        hidden = torch.arange(self.capacity, device=self.device) > places[:, None]
        mask = torch.zeros_like(hidden, dtype=self.model.module.dtype).masked_fill_(
            hidden, torch.finfo(self.model.module.dtype).min
        )
        out = self.model.module(
            input_ids=ids,
            position_ids=places[None],
            attention_mask=mask[None, None],
            cache=self._cache,
            use_cache=True,
            logits_to_keep=rows,
        )
        return out.logits[0, -rows:, : self.vocab_size].float()

    def _capture(self, n: int) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        ids = torch.zeros(1, n, dtype=torch.long, device=self.device)
        # What a pass sets up on its first call must be there before it is recorded.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._pass(ids, n)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._pass(ids, n)
        return graph, ids, logits

    def _grow(self, capacity: int) -> None:
        filled = [(layer.keys, layer.values) for layer in self._cache.layers if layer.is_initialized]
        self._allocate(capacity)
        for layer, (keys, values) in zip(self._cache.layers, filled, strict=False):
            layer.lazy_initialization(keys, values)
            layer.keys[:, :, : keys.shape[2]] = keys
            layer.values[:, :, : values.shape[2]] = values

    def crop(self, length: int) -> None:
        """Keep the first `length` entries."""
        self.length = min(self.length, length)

    def close(self) -> None:
        """Leave buffers and graphs to the next run, or free them."""
        if len(self.model.closed) < KEPT:
            self.model.closed.append(self)


def fixed_layer(capacity: int, start: Tensor):
    """A layer of transformers' static cache that writes where `start`, shared by all layers, says; rolling back is setting it."""
    from transformers.cache_utils import StaticLayer

    class FixedLayer(StaticLayer):
        def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            places = torch.arange(key_states.shape[-2], device=self.device) + self.cumulative_length
            self.keys.index_copy_(2, places, key_states)
            self.values.index_copy_(2, places, value_states)
            return self.keys, self.values

    layer = FixedLayer(capacity)
    layer.cumulative_length = start
    return layer
