"""Which kernel scaled_dot_product_attention is, where torch cannot ask a GPU.

torch's C++ chooses by what the device and the build can do, and takes the plain maths where there
is none. Under Dynamo and AOTAutograd the choice of this module is made instead: flash attention
where its dtypes and shapes allow, else the memory-efficient kernel, as a recent GPU would. (Some
builds prefer cuDNN's kernel on Hopper, which moves the same bytes.)
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

import contextlib
from collections.abc import Generator
from typing import Any, Literal

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256  # that flash attention takes
aten: Any = torch.ops.aten


def choose(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Literal["flash", "mem", "math"]:
    """The kernel for [..., length, head] queries, keys and values; `sdpa_kernel` may forbid one."""
    del k  # as long as v
    fits = q.dtype in HALF and q.size(-1) == v.size(-1) <= LARGEST_HEAD
    if fits and mask is None and torch.backends.cuda.flash_sdp_enabled():
        return "flash"
    if q.dim() == 4 and torch.backends.cuda.mem_efficient_sdp_enabled():
        return "mem"
    return "math"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`aten.scaled_dot_product_attention` as one of the ops that are a kernel on a GPU."""
    chosen = choose(q, k, v, attn_mask) if q.dim() == 4 else "math"
    if chosen == "math":
        out = aten._scaled_dot_product_attention_math(
            *(q, k, v, attn_mask, dropout_p, is_causal, None),
            scale=scale,
            enable_gqa=enable_gqa,
        )
    elif chosen == "flash":
        out = aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, False, scale=scale
        )
    else:
        heads = q.size(1) // k.size(1) if enable_gqa else 1
        if heads > 1:
            k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
        out = aten._scaled_dot_product_efficient_attention(
            q, k, v, _bias(attn_mask, q, k), grad, dropout_p, is_causal, scale=scale
        )
    result: Tensor = out[0]
    return result


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as numbers to add, [batch, heads, queries, keys]."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(q.dtype)
    return mask.expand(q.size(0), q.size(1), q.size(2), k.size(2))


@contextlib.contextmanager
def attention_chosen() -> Generator[None]:
    """Inside, fake CUDA tensors take `attend`."""
    op: Any = torch.ops.aten.scaled_dot_product_attention.default
    keys = (torch._C.DispatchKey.AutogradCUDA, torch._C.DispatchKey.CUDA)
    before = {key: op.py_kernels.pop(key, None) for key in keys}
    op.py_kernels.update(dict.fromkeys(keys, attend))
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        for key, kernel in before.items():
            del op.py_kernels[key]
            if kernel is not None:
                op.py_kernels[key] = kernel
        op._dispatch_cache.clear()
