"""The gradients of an optimizer in the form the kernels read: local, dense, real, by device."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampgraph.internals import local_part, shard_groups


@dataclass
class Part:
    """Gradients on one device, whose other shards are on the other ranks of `groups`."""

    device: torch.device
    groups: tuple[Any, ...]
    grads: list[Tensor]


def parts_of(optimizer: Optimizer, allow_fp16: bool) -> list[Part]:
    """Views of every `.grad`, through which it can be written; a sparse one is coalesced first.

    Coalescing adds up duplicates, which may overflow in half precision and count once in a norm
    (pytorch issue 36786).

    Raises:
        ValueError: fp16 gradients that are not allowed. AssertionError: a parameter that is no
            tensor. Both as torch.amp.GradScaler.
    """
    parts: dict[Any, Part] = {}
    for param in _parameters(optimizer):
        if param.grad is None:
            continue
        if not allow_fp16 and param.grad.dtype == torch.float16:
            raise ValueError("Attempting to unscale FP16 gradients.")
        if param.grad.is_sparse:
            param.grad = param.grad.coalesce()
        groups, grad = tuple(shard_groups(param.grad)), _readable(param.grad)
        place = (grad.device, groups)
        if place not in parts:
            parts[place] = Part(grad.device, groups, [])
        parts[place].grads.append(grad)
    return list(parts.values())


def _readable(grad: Tensor) -> Tensor:
    local = local_part(grad.detach())
    values = local._values() if local.is_sparse else local
    return torch.view_as_real(values) if values.is_complex() else values


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not isinstance(param, Tensor):
                raise AssertionError(
                    f"expected param to be torch.Tensor, got {type(param).__name__}"
                )
            yield param
