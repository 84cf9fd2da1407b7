"""One name for an op, however it is spelled: function, method, operator or ATen overload."""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from ampgraph.graph import op_name
from ampgraph.internals.ops import OpOverload
from ampgraph.internals.tensors import FakeTensor, is_functorch_wrapped

# Our name: the names in torch, torch.Tensor, torch.linalg, operator and ATen.
_SPELLED = {
    "mul": "mul multiply __mul__ __rmul__",
    "div": "div divide true_divide truediv __truediv__",
    "mul_": "mul_ multiply_ imul __imul__",
    "div_": "div_ divide_ true_divide_ itruediv __itruediv__",
    "and": "and_ __and__ bitwise_and logical_and",
    "or": "or_ __or__ bitwise_or logical_or",
    "ior": "ior __ior__ bitwise_or_ logical_or_",
    "iand": "iand __iand__ bitwise_and_ logical_and_",
    "not": "invert __invert__ bitwise_not logical_not",
    "add": "add __add__ __radd__",
    "pow": "pow __pow__",
    "vector_norm": "vector_norm linalg_vector_norm",
    "linalg_norm": "linalg_norm",
    "stack": "stack hstack vstack",
    "cat": "cat concat concatenate",
    "amp_unscale": "_amp_foreach_non_finite_check_and_unscale_",
}
_AS_THEY_ARE = (
    "isfinite isnan isinf all any sum sqrt square norm abs neg sub matmul mm addmm clone detach "
    "detach_ alias view reshape flatten to float bool _to_copy lift_fresh_copy where maximum "
    "zeros ones full tensor zeros_like ones_like empty_like full_like new_zeros new_ones new_full "
    "getitem setitem iadd isub _foreach_mul _foreach_div _foreach_mul_ _foreach_div_ _foreach_norm"
)
_NAMES = {name: name for name in _AS_THEY_ARE.split()} | {
    spelled: name for name, group in _SPELLED.items() for spelled in group.split()
}


def _functions() -> dict[Any, str]:
    """torch's and Python's own functions of these names; a user's `mul` is not among them."""
    spaces = (operator, torch.Tensor, torch.functional, torch)
    pairs = [(getattr(space, k, None), v) for space in spaces for k, v in _NAMES.items()]
    found = {function: name for function, name in pairs if function is not None}
    found[torch.linalg.vector_norm] = "vector_norm"
    found[torch.linalg.norm] = "linalg_norm"
    return found


_FUNCTIONS = _functions()


def called(node: fx.Node) -> str:
    """Our name of the op that the node calls, "" if it is none of ours."""
    if node.op == "call_method":
        return _NAMES.get(str(node.target), "")
    if node.op != "call_function":
        return ""
    if isinstance(node.target, OpOverload):
        space, _, name = op_name(node.target).partition(".")
        return _NAMES.get(name, "") if space == "aten" else ""
    try:
        return _FUNCTIONS.get(node.target, "")
    except TypeError:  # an unhashable callable
        return ""


def given(node: fx.Node, *names: str) -> dict[str, Any]:
    """The node's arguments by name: positional ones in the order of `names`, then numbered."""
    by_name = {_RENAMED.get(k, k): v for k, v in node.kwargs.items()}
    places = [*names, *map(str, range(len(names), len(node.args)))]
    return {**dict(zip(places, node.args, strict=False)), **by_name}


_RENAMED = {"self": "input", "x": "input", "A": "input", "tensors": "input", "ord": "p"}


def is_plain(tensor: Tensor) -> bool:
    """A dense tensor of torch's own, on no functorch level."""
    kinds = (Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
    known = type(tensor) in kinds or isinstance(tensor, FakeTensor)
    return known and tensor.layout == torch.strided and not is_functorch_wrapped(tensor)
