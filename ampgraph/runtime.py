"""Run a compiled graph with the caller's autocast out of the way, forward and backward."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ampgraph.internals.autocast import ambient_autocast, disable_autocast
from ampgraph.internals.dynamo import untraced
from ampgraph.internals.tensors import queue_backward_callback


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with autocast off inside; the backward of what it returns runs without it too.

    Needed for inner backends that leave eager autograd in charge ("eager"): AOTAutograd's own
    runtime does the same for the others (see internals/autocast.py: autocast_off_at_run_time).
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with disable_autocast():
            out = function(*args)
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(_backward_without_autocast)
        return out

    return run


@untraced
def _backward_without_autocast(grads: tuple[Tensor, ...]) -> None:
    """Turn autocast off until the running backward pass ends: the casts are in the graph.

    Where the caller of backward() is compiled, Dynamo would trace hooks too.
    """
    on = ambient_autocast()
    if not on:
        return

    def restore() -> None:
        for device_type in on:
            torch.set_autocast_enabled(device_type, True)

    for device_type in on:
        torch.set_autocast_enabled(device_type, False)
    queue_backward_callback(restore)
