"""The gradients of an optimizer in the form the kernels read: local, dense, real, by device."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampgraph.internals.ranks import (
    flat_shard_groups,
    is_flattened,
    laid_out_as,
    local_part,
    max_over_ranks,
    mesh_groups,
    min_over_ranks,
    shard_groups,
    sum_over_ranks,
)


@dataclass
class Part:
    """Gradients on one device, with the process groups of the ranks that have the rest of them.

    Attributes:
        ranks: groups whose ranks step these parameters together.
        groups: those of them whose ranks have other shards, and not copies.
        values: the gradients, local and dense, maybe complex.
    """

    device: torch.device
    ranks: tuple[Any, ...]
    groups: tuple[Any, ...]
    values: list[Tensor]

    @property
    def grads(self) -> list[Tensor]:
        """Real views of the values."""
        return [torch.view_as_real(v) if v.is_complex() else v for v in self.values]


def parts_of(optimizer: Optimizer, allow_fp16: bool, group: Any = None) -> list[Part]:
    """Views of every `.grad`, through which it can be written.

    A sparse one is coalesced first: that adds up duplicates, which may overflow in half precision
    and count once in a norm (pytorch issue 36786).

    The parts are told from the parameters, so that ranks which have shards make the same ones in
    the same order, whichever gradients a rank has: a part may be empty.

    Args:
        group: whose ranks step what FullyShardedDataParallel has flattened, None for all ranks.

    Raises:
        ValueError: fp16 gradients that are not allowed. AssertionError: a parameter that is no
            tensor. Both as torch.amp.GradScaler.
    """
    parts: dict[Any, Part] = {}
    for param in parameters_of(optimizer):
        if is_flattened(param):
            ranks, groups = (group,), flat_shard_groups(param, group)
        else:
            ranks, groups = mesh_groups(param), shard_groups(param)
        if param.grad is None and not ranks:
            continue
        key = (param.device, ranks, groups)
        part = parts.setdefault(key, Part(*key, []))
        if param.grad is not None:
            part.values.append(_values(param, allow_fp16))
    return list(parts.values())


def _values(param: Tensor, allow_fp16: bool) -> Tensor:
    assert param.grad is not None, "the caller has checked"
    if not allow_fp16 and param.grad.dtype == torch.float16:
        raise ValueError("Attempting to unscale FP16 gradients.")
    if param.grad.is_sparse:
        param.grad = param.grad.coalesce()
    laid_out = laid_out_as(param.grad, param)
    if laid_out is not param.grad:
        param.grad = laid_out.detach()
    local = local_part(param.grad.detach())
    return local._values() if local.is_sparse else local


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Every parameter; raises AssertionError at what is none, as torch.amp.GradScaler."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not isinstance(param, Tensor):
                raise AssertionError(
                    f"expected param to be torch.Tensor, got {type(param).__name__}"
                )
            yield param


def root_of(squares: Sequence[tuple[Part, Tensor]], like: Tensor) -> Tensor:
    """The 2-norm over all ranks, from each part's sum of squares on this one."""
    total = torch.zeros_like(like)
    for part, value in squares:
        total = total + sum_over_ranks(value.to(like.device), part.groups)
    return total.sqrt()


def norm_of(parts: Sequence[Part], p: float, like: Tensor) -> Tensor:
    """The p-norm over all ranks, times `like`, a number: read from the gradients, in float32."""
    norms = [_over_ranks(_norm(part.values, p, like), p, part.groups) for part in parts]
    return like * _norm(norms, p, like)


def _norm(values: Sequence[Tensor], p: float, like: Tensor) -> Tensor:
    """The p-norm of all values together; a shard may have no elements, of which there is none."""
    norms = [
        torch.linalg.vector_norm(v, p, dtype=torch.promote_types(v.dtype, like.dtype))
        for v in values
        if v.numel() > 0
    ]
    if not norms:
        return torch.full_like(like, math.inf if p < 0 else 0.0)
    together: Tensor = torch.linalg.vector_norm(torch.stack([n.to(like) for n in norms]), p)
    return together


def _over_ranks(norm: Tensor, p: float, groups: tuple[Any, ...]) -> Tensor:
    if not groups:
        return norm
    if math.isinf(p):
        return max_over_ranks(norm, groups) if p > 0 else min_over_ranks(norm, groups)
    return sum_over_ranks(norm**p, groups) ** (1 / p)
