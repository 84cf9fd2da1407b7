"""Unscale gradients, find what is not finite in them, and sum their squares, in one read.

The ops are `unscale`, which makes new tensors, `unscale_`, which writes in place, and `check`,
which only reads; `torch.ops.ampgraph` has them under the same names. On a GPU one launch takes
all gradients, and a second, tiny one adds up what its programs found, always in the same order.
Where the launches are recorded each gradient has its own: a compiler then sees the kernel. On
other devices, and for float64 and complex, the ops are their twins in plain torch.
"""

# triton_op has no types.
# pyright: reportUntypedFunctionDecorator=false

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from ampgraph.kernels.lang import triton_dtype
from ampgraph.kernels.tables import (
    BLOCK,
    CODES,
    current_device,
    dense,
    on_gpu,
    rows,
    traced_or_captured,
)
from ampgraph.kernels.unscale_kernels import totals_kernel, unscale_kernel, unscale_rows_kernel

__all__ = ["OPS", "check", "check_reference", "unscale", "unscale_", "unscale_reference"]

# Elements of a program where each tensor has its own launch.
CHUNK = 8 * BLOCK


def unscale_reference(
    grads: Sequence[Tensor],
    scale: Tensor,
    divide: bool = False,
    check_output: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """y = grad * scale, or grad / scale, computed in float32 (float64 and complex in their own).

    Args:
        grads: floating or complex tensors of any shapes and dtypes, on one device.
        scale: float32, one element, on that device.
        divide: divide by the scale and do not multiply.
        check_output: look for inf and nan in the results, not in the gradients.
        dtype: of the results; None is each gradient's own.

    Returns:
        the results, shaped as the gradients; found_inf, float32 [], 1.0 if an element is inf or
        nan; and the sum of |y|^2 before y is rounded, float32 [].
    """
    wide = [_scaled(grad, scale, divide) for grad in grads]
    results = [y.to(dtype or grad.dtype, copy=True) for grad, y in zip(grads, wide, strict=True)]
    if check_output:
        finite = [_finite_in(y, result.dtype) for y, result in zip(wide, results, strict=True)]
    else:
        finite = [grad.isfinite() for grad in grads]
    return results, _found_inf(finite, scale), _sum_of_squares(wide, scale)


def check_reference(grads: Sequence[Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
    """found_inf of the gradients and the sum of |grad * scale|^2, as `unscale_reference`'s."""
    wide = [_scaled(grad, scale, divide=False) for grad in grads]
    return _found_inf([grad.isfinite() for grad in grads], scale), _sum_of_squares(wide, scale)


def _scaled(grad: Tensor, scale: Tensor, divide: bool) -> Tensor:
    """One gradient unscaled, in the dtype it is computed in."""
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    factor = scale.reshape(())
    return wide / factor if divide else wide * factor


def _finite_in(y: Tensor, dtype: torch.dtype) -> Tensor:
    """bool: where y rounded to `dtype` is finite.

    Said of y itself: Inductor keeps a result it has just rounded in the wider dtype, where a
    value that overflowed is finite still.
    """
    if y.dtype == dtype or y.is_complex():
        return y.isfinite()
    info = torch.finfo(dtype)
    largest_power = 2.0 ** (math.frexp(info.max)[1] - 1)
    return y.abs() < info.max + largest_power * info.eps / 2


def _found_inf(finite: Sequence[Tensor], like: Tensor) -> Tensor:
    """float32 []: 1.0 if an element is False, else 0.0."""
    if not finite:
        return like.new_zeros((), dtype=torch.float32)
    return torch.stack([t.all() for t in finite]).all().logical_not().to(torch.float32)


def _sum_of_squares(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """float32 []: the sum of |t|^2 over all elements."""
    if not tensors:
        return like.new_zeros((), dtype=torch.float32)
    squares = [(t.abs() if t.is_complex() else t).square().sum() for t in tensors]
    return torch.stack([s.to(torch.float32) for s in squares]).sum()


def launch_rows(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor] | None,
    scale: Tensor,
    divide: bool,
    check_output: bool,
) -> tuple[Tensor, Tensor]:
    """One launch for all of them, a second for the totals."""
    into = sources if targets is None else targets
    table = rows(sources, into)
    programs = table.shape[0]
    partials = scale.new_empty((2, programs), dtype=torch.float32)
    same = all(a.dtype == b.dtype for a, b in zip(sources, into, strict=True))
    if programs:
        unscale_rows_kernel[(programs,)](
            table,
            scale,
            partials,
            DIVIDE=divide,
            CHECK_OUTPUT=check_output,
            WRITE=targets is not None,
            TARGET=None if same else triton_dtype(into[0].dtype),
        )
    found_inf, squares = partials.new_empty(()), partials.new_empty(())
    totals_kernel[(1,)](partials, found_inf, squares, programs, BLOCK=1024)
    return found_inf, squares


def launch_each(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor] | None,
    scale: Tensor,
    divide: bool,
    check_output: bool,
) -> tuple[Tensor, Tensor]:
    """A launch for each of them, and plain torch for the totals."""
    partials = [scale.new_zeros((2, 1), dtype=torch.float32)]
    for i, source in enumerate(sources):
        if source.numel() == 0:
            continue
        programs = (source.numel() + CHUNK - 1) // CHUNK
        partials.append(scale.new_empty((2, programs), dtype=torch.float32))
        target = None if targets is None or targets[i] is source else targets[i]
        wrap_triton(unscale_kernel)[(programs,)](
            source,
            target,
            scale,
            partials[-1],
            source.numel(),
            DIVIDE=divide,
            CHECK_OUTPUT=check_output,
            WRITE=targets is not None,
            CHUNK=CHUNK,
            BLOCK=BLOCK if source.element_size() == 2 else BLOCK // 2,
        )
    flags, squares = torch.cat(partials, dim=1).unbind()
    return flags.amax(), squares.sum()


def _launch(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor] | None,
    scale: Tensor,
    divide: bool = False,
    check_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """Unscale dense tensors into targets of their layouts, maybe themselves; None: nowhere."""
    with current_device(scale):
        if traced_or_captured(scale):
            return launch_each(sources, targets, scale, divide, check_output)
        return launch_rows(sources, targets, scale, divide, check_output)


# Registered last: triton_op looks up the kernels that a body reaches, for the keys of caches.
@triton_op("ampgraph::unscale", mutates_args=())
def unscale(
    grads: Sequence[Tensor],
    scale: Tensor,
    divide: bool = False,
    check_output: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The op of `unscale_reference`."""
    if not on_gpu(grads, [scale]) or not (dtype is None or dtype in CODES):
        return unscale_reference(grads, scale, divide, check_output, dtype)
    sources = [dense(grad) for grad in grads]
    results = [torch.empty_like(source, dtype=dtype) for source in sources]
    return results, *_launch(sources, results, scale, divide, check_output)


@triton_op("ampgraph::unscale_", mutates_args={"grads"})
def unscale_(
    grads: Sequence[Tensor], scale: Tensor, divide: bool = False, check_output: bool = False
) -> tuple[Tensor, Tensor]:
    """As `unscale`, each result written over its gradient; returns found_inf, sum of squares."""
    if on_gpu(grads, [scale]):
        results = [dense(grad) for grad in grads]
        found_inf, squares = _launch(results, results, scale, divide, check_output)
    else:
        results, found_inf, squares = unscale_reference(grads, scale, divide, check_output)
    for grad, result in zip(grads, results, strict=True):
        if result is not grad:
            grad.copy_(result)
    return found_inf, squares


@triton_op("ampgraph::check", mutates_args=())
def check(grads: Sequence[Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
    """The op of `check_reference`."""
    if not on_gpu(grads, [scale]):
        return check_reference(grads, scale)
    return _launch([dense(grad) for grad in grads], None, scale)


OPS = torch.ops.ampgraph  # with the ops that this module defines
