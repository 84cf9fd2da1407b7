"""Keep code whole where only torch.autocast itself can run it.

Three kinds of it reach a graph: a function with a backward of its own (opening it would lose the
backward), a function that asks for the autocast state or changes it, and an op whose library wrote
an autocast kernel for it, which is code that cannot be read. Each stays one node, in a region that
turns on what the caller's program had on: what comes out is what eager autocast computes.

    f(x)   ->   r = _enter_autocast("cpu", bf16, True, False); f(x); _exit_autocast(r)

Sound because the function is run once, on fake tensors in that very region, and watched.
"""

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ampgraph.graph import arguments, call, fresh, op_name
from ampgraph.internals.autocast import autocast_as, autocast_asked
from ampgraph.internals.tensors import has_python_backward
from ampgraph.passes.plan import Plan, Walk


def kept_function(walk: Walk, node: fx.Node) -> Plan | None:
    """The plan for a function that torch.autocast must run; None for every other node."""
    if not _is_users(node.target):
        return None
    given = _wanting_gradients(arguments(node, walk.env))
    try:
        with (
            walk.quiet(),
            autocast_as(_region(walk)),
            torch.enable_grad(),
            autocast_asked() as asks,
        ):
            out = call(node, *given)
    except Exception:
        return None  # it is tried again, with a better error
    if has_python_backward(out):
        return _kept(walk, node, out, "has a backward of its own")
    return _kept(walk, node, out, "asks for the autocast state") if asks else None


def kept_kernel(walk: Walk, node: fx.Node, op: str) -> Plan:
    """The plan for a node that calls `op`, whose library's autocast kernel is code."""
    args, kwargs = arguments(node, walk.env)
    with walk.quiet(), autocast_as(_region(walk)):
        out = call(node, args, kwargs)
    return _kept(walk, node, out, f"calls {op}, whose library wrote an autocast kernel")


def _kept(walk: Walk, node: fx.Node, out: Any, why: str) -> Plan:
    note = f"{node.name}: {op_name(node.target)} {why}: torch.autocast runs it"
    value = fresh(pytree.tree_map_only(Tensor, Tensor.detach, out), walk.mode)
    notes = (note,) if walk.state.enabled() else ()
    return Plan(value=value, region=_region(walk), notes=notes, mutates=True)


def _region(walk: Walk) -> tuple[tuple[str, torch.dtype, bool], ...]:
    """What the function can ask about: also the dtype of a device that is off."""
    return tuple((name, s.dtype, s.enabled) for name, s in walk.state.devices.items())


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
