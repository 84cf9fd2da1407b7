"""Views between a tensor and what is made of it: which they are, and the same of another tensor."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ampgraph.graph import arguments, call, captured, no_guards, op_name, references
from ampgraph.internals.tensors import FakeTensorMode

# Their gradients move elements and add none up, as that of `expand` does: it would round more
# often on a narrow tensor.
VIEWS = frozenset(
    "view reshape flatten unflatten unsqueeze squeeze transpose swapaxes permute movedim t "
    "contiguous getitem select narrow".split()
)


def name_of_call(node: fx.Node) -> str:
    """Of the function or method that the node calls, without its module; "" for no call."""
    name = str(node.target) if node.op == "call_method" else op_name(node.target)
    return name.rpartition(".")[2] if node.op.startswith("call") else ""


def only_operand(node: fx.Node) -> fx.Node | None:
    """The first argument, where it is the only tensor and the result is a tensor as well."""
    first = node.args[0] if node.args else None
    tensors = [r for r in references(node) if isinstance(captured(r), Tensor)]
    whole = isinstance(captured(node), Tensor)
    return first if whole and isinstance(first, fx.Node) and tensors == [first] else None


def is_view(node: fx.Node) -> bool:
    """A view or a copy of some elements, each once, with their bits as they are."""
    base = only_operand(node) if name_of_call(node) in VIEWS else None
    if base is None or captured(base).dtype != captured(node).dtype:
        return False
    index = node.args[1] if name_of_call(node) == "getitem" else ()
    parts = index if isinstance(index, tuple) else (index,)
    return not any(isinstance(part, (list, bool)) for part in parts)  # these gather elements


def way_to(node: Any) -> tuple[Any, list[fx.Node]]:
    """What lies under a stack of views, and the views from there up."""
    views: list[fx.Node] = []
    while isinstance(node, fx.Node) and is_view(node):
        views.insert(0, node)
        node = node.args[0]
    return node, views


def uses(node: fx.Node) -> int:
    """How often a node is an operand."""
    return sum(references(user).count(node) for user in node.users)


def replay(views: Sequence[fx.Node], narrow: Tensor, mode: FakeTensorMode) -> list[Tensor]:
    """The narrow tensor and its views; none where a view only works on the wide tensor's copy."""
    values: list[Tensor] = [narrow]
    env = {r: captured(r) for view in views for r in references(view)}
    for view in views:
        args, kwargs = arguments(view, env)
        try:
            with mode, torch.no_grad(), no_guards(mode):
                values.append(call(view, (values[-1], *args[1:]), kwargs))
        except RuntimeError:
            return []
    return values


def layout(tensor: Tensor) -> tuple[str, ...]:
    """Strides where they matter, as text: comparing symbolic ones would leave guards."""
    pairs = zip(map(str, tensor.size()), map(str, tensor.stride()), strict=True)
    return tuple("" if size == "1" else stride for size, stride in pairs)
