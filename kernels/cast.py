"""Copy many tensors into another dtype at once."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import triton_op

__all__ = ["cast", "cast_", "cast_reference", "cast_reference_"]


def cast_reference(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """New tensors of the same shapes and values in `dtype`, rounded to nearest even."""
    return [t.to(dtype, copy=True) for t in tensors]


def cast_reference_(to: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Write each of `tensors` over its partner in `to`, which has its shape and keeps its dtype."""
    for target, source in zip(to, tensors, strict=True):
        target.copy_(source)


@triton_op("ampgraph::cast", mutates_args=())
def cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The op of `cast_reference`."""
    return cast_reference(tensors, dtype)


@triton_op("ampgraph::cast_", mutates_args={"to"})
def cast_(to: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """The op of `cast_reference_`."""
    cast_reference_(to, tensors)
