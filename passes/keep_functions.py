"""Keep a user's function whole where a backward of its own hides in it.

`torch.compiler.allow_in_graph` and `nonstrict_trace` put Python functions into the graph, and an
`autograd.Function` may stand inside. Opening one would lose its backward, and `custom_fwd` asks
for the autocast state when it is called. So the function stays one node, inside a region that
turns on what the caller's program had on: what comes out is what eager autocast computes.

    f(x)   ->   r = _enter_autocast("cpu", bf16, True, None); f(x); _exit_autocast(r)
"""

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ampgraph.graph import arguments, call, fresh, op_name
from ampgraph.internals import autocast_as, has_python_backward
from ampgraph.passes.plan import Plan, Walk


def kept_function(walk: Walk, node: fx.Node) -> Plan | None:
    """The plan for a function with a backward of its own; None for every other node."""
    if not _is_users(node.target):
        return None
    args, kwargs = arguments(node, walk.env)
    on = walk.state.enabled()
    try:
        with walk.quiet(), autocast_as(on), torch.enable_grad():
            out = call(node, *_wanting_gradients((args, kwargs)))
    except Exception:
        return None  # it is tried again, with a better error
    if not has_python_backward(out):
        return None
    note = f"{node.name}: {op_name(node.target)} has a backward of its own: torch.autocast runs it"
    value = fresh(pytree.tree_map_only(Tensor, Tensor.detach, out), walk.mode)
    return Plan(value=value, region=tuple(on.items()), notes=(note,) if on else (), mutates=True)


def _is_users(target: Any) -> bool:
    """Whether the target is Python code from outside of torch, or wraps it."""
    owner = getattr(target, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return True
    wraps = getattr(target, "__name__", "").startswith("flat_apply")
    outside = not str(getattr(target, "__module__", "torch.")).startswith(("torch.", "_operator"))
    return wraps or (isinstance(target, types.FunctionType) and outside)


def _wanting_gradients(arguments: tuple[Any, Mapping[str, Any]]) -> Any:
    def one(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point())

    return pytree.tree_map_only(Tensor, one, arguments)
