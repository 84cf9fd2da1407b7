"""Unscale gradients, find what is not finite in them, and sum their squares, in one read.

The ops are `unscale`, which makes new tensors, `unscale_`, which writes in place, and `check`,
which only reads; `torch.ops.ampgraph` has them under the same names.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import triton_op

__all__ = ["check", "check_reference", "unscale", "unscale_", "unscale_reference"]


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
    checked = results if check_output else grads
    return results, _found_inf(checked, scale), _sum_of_squares(wide, scale)


def check_reference(grads: Sequence[Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
    """found_inf of the gradients and the sum of |grad * scale|^2, as `unscale_reference`'s."""
    wide = [_scaled(grad, scale, divide=False) for grad in grads]
    return _found_inf(grads, scale), _sum_of_squares(wide, scale)


def _scaled(grad: Tensor, scale: Tensor, divide: bool) -> Tensor:
    """One gradient unscaled, in the dtype it is computed in."""
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    factor = scale.reshape(())
    return wide / factor if divide else wide * factor


def _found_inf(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """float32 []: 1.0 if an element of the tensors is inf or nan, else 0.0."""
    if not tensors:
        return like.new_zeros((), dtype=torch.float32)
    finite = torch.stack([t.isfinite().all() for t in tensors])
    return finite.all().logical_not().to(torch.float32)


def _sum_of_squares(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """float32 []: the sum of |t|^2 over all elements."""
    if not tensors:
        return like.new_zeros((), dtype=torch.float32)
    squares = [(t.abs() if t.is_complex() else t).square().sum() for t in tensors]
    return torch.stack([s.to(torch.float32) for s in squares]).sum()


@triton_op("ampgraph::unscale", mutates_args=())
def unscale(
    grads: Sequence[Tensor],
    scale: Tensor,
    divide: bool = False,
    check_output: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The op of `unscale_reference`."""
    return unscale_reference(grads, scale, divide, check_output, dtype)


@triton_op("ampgraph::unscale_", mutates_args={"grads"})
def unscale_(
    grads: Sequence[Tensor], scale: Tensor, divide: bool = False, check_output: bool = False
) -> tuple[Tensor, Tensor]:
    """As `unscale`, each result written over its gradient; returns found_inf, sum of squares."""
    results, found_inf, squares = unscale_reference(grads, scale, divide, check_output)
    for grad, result in zip(grads, results, strict=True):
        grad.copy_(result)
    return found_inf, squares


@triton_op("ampgraph::check", mutates_args=())
def check(grads: Sequence[Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
    """The op of `check_reference`."""
    return check_reference(grads, scale)
