"""A model run once through one of the two doors, to see what it is made of."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ampgraph.backend import Backend
from ampgraph.compiler import Door
from ampgraph.internals.dynamo import supported
from ampgraph.options import Options

WhichDoor = Literal["compile", "backend"]


def captured_by(door: WhichDoor, model: Any, options: Options) -> Callable[..., Any]:
    """The model behind a door of its own, with a cache of its own: no trace is left in Dynamo's."""
    alone = supported(isolate_recompiles=True)
    if door == "backend":
        return torch.compile(model, backend=Backend(options), **alone)
    outputs = options.outputs or "autocast"
    entry = Door(model, dataclasses.replace(options, outputs=outputs), alone)
    return lambda *a, **k: entry.call(entry.compiled, a, k)


def run_backward(out: Any) -> None:
    """From every floating output, as from its sum."""
    leaves = [
        t
        for t in pytree.tree_leaves(out)
        if isinstance(t, Tensor) and t.requires_grad and t.is_floating_point()
    ]
    if leaves:
        torch.autograd.backward(leaves, [torch.ones_like(t) for t in leaves])
