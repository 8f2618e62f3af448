"""Model Runner V2 on a machine without a GPU: its own Triton kernels under Triton's interpreter. To be imported before vLLM.

Four helps, each for a thing that the interpreter cannot do and none in what is tested: a CPU backend for vLLM to find, since it takes
Triton for absent without one; log1p, which is a CUDA library call; and two small kernels without optional pointers and without a mask of
one element, since the interpreter takes a None handed to a nested kernel for a pointer.
"""

import os
import types

os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl
from triton.backends import backends


class Driver:
    """An active driver, which is all that vLLM asks."""

    @staticmethod
    def is_active() -> bool:
        return True


backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)

from vllm.v1.worker.gpu.sample import gumbel  # noqa: E402
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils as kernels  # noqa: E402

gumbel_noised_argmax = gumbel.gumbel_noised_argmax


@triton.jit
def block_argmax(
    logits, block, mask, row, mapping_ptr, temp_ptr, seed_ptr, pos_ptr, cache_ptr, cache_stride_0, cache_stride_1, column_ptr,
    source_ptr, source_stride, vocab_size, IS_DRAFTING: tl.constexpr, APPLY_TEMPERATURE: tl.constexpr, USE_FP64: tl.constexpr,
    PER_TOKEN_COL: tl.constexpr = False,
):  # fmt: skip
    slot = tl.load(mapping_ptr + row).to(tl.int64)
    if IS_DRAFTING:
        source = tl.load(source_ptr + row * source_stride + block, mask=mask)
        tl.store(cache_ptr + slot * cache_stride_0 + tl.load(column_ptr) * cache_stride_1 + block, source, mask=mask)
    return gumbel_noised_argmax(
        logits, block, mask, tl.load(seed_ptr + slot), tl.load(pos_ptr + row), tl.load(temp_ptr + slot).to(tl.float32),
        IS_DRAFTING=IS_DRAFTING, USE_FP64=USE_FP64, APPLY_TEMPERATURE=APPLY_TEMPERATURE,
    )  # fmt: skip


@triton.jit
def resample_argmax(
    logits, block, mask, row, mapping_ptr, temp_ptr, seed_ptr, pos_ptr, vocab_size, USE_FP64: tl.constexpr
):  # fmt: skip
    slot = tl.load(mapping_ptr + row).to(tl.int64)
    return gumbel_noised_argmax(
        logits, block, mask, tl.load(seed_ptr + slot), tl.load(pos_ptr + row), tl.load(temp_ptr + slot).to(tl.float32),
        IS_DRAFTING=False, USE_FP64=USE_FP64, APPLY_TEMPERATURE=False,
    )  # fmt: skip


@triton.jit
def log1p(x):
    return tl.log(1.0 + x)


gumbel.gumbel_block_argmax = block_argmax
kernels._seeded_resample_argmax = resample_argmax
kernels.tldevice = types.SimpleNamespace(log1p=log1p)
