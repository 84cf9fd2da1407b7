"""Step through the levels of torch.func: vmap is run, derivatives are only given their dtypes.

Dynamo writes `torch.func.grad` and its kin as calls that open a level, wrap tensors, ask autograd
and close the level. Levels are really opened, for shapes inside vmap depend on them. Derivatives
are not computed: the walk records no history. Sound because a gradient or tangent has the dtype
and shape of the tensor it belongs to, whatever happened in between.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ampgraph.graph import arguments, call
from ampgraph.internals.tensors import functorch_unwrapped, is_functorch


def transformed(
    node: fx.Node, env: dict[fx.Node, Any], quiet: Callable[[], Any]
) -> tuple[Any] | None:
    """What a call of torch.func's machinery returns, in a tuple; None for any other node."""
    if not is_functorch(node.target):
        return None
    args, kwargs = arguments(node, env)
    stand_in = _STAND_INS.get(getattr(node.target, "__name__", ""))
    with quiet():
        return (call(node, args, kwargs) if stand_in is None else stand_in(*args),)


def _gradients(outputs: Any, inputs: Any, grad_outputs: Any = (), *_: Any) -> tuple[Any, ...]:
    """One gradient an input, batched where the gradients that come in are."""
    return tuple(_batched_with(t, grad_outputs) for t in inputs)


def _batched_with(tensor: Tensor, others: Any) -> Tensor:
    found = [t for t in pytree.tree_leaves(others) if isinstance(t, Tensor)]
    sums = [t.sum().to(tensor.dtype) for t in found]
    return functools.reduce(operator.add, sums, functorch_unwrapped(tensor)).clone()


def _first(value: Any, *_: Any) -> Any:
    return value


def _dual(primal: Tensor, tangent: Tensor, *_: Any) -> Tensor:
    return _batched_with(primal, tangent)


def _primal_and_tangent(dual: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return dual, dual.clone()


def _nothing(*_: Any) -> None:
    """Global switches of autograd: the walk has them off."""


_STAND_INS: dict[str, Callable[..., Any]] = {
    "_autograd_grad": _gradients,
    "_set_tensor_requires_grad": _first,
    "_make_dual": _dual,
    "_unpack_dual": _primal_and_tangent,
    "_enter_dual_level": _nothing,
    "_exit_dual_level": _nothing,
    "_maybe_load_decompositions": _nothing,
    "_saved_tensors_hooks_disable": _nothing,
    "_saved_tensors_hooks_enable": _nothing,
    "_set_fwd_grad_enabled": _nothing,
    "set_inplace_requires_grad_allowed": _nothing,
}
