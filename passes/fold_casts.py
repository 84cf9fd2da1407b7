"""Fold an inserted cast that undoes a widening: the value was that narrow all along.

Sound for values: a widening is exact, and nothing writes in place after it, so the narrow tensor
still holds them. Sound for gradients: nothing but this cast reads the widened value, so its
gradient was rounded to the narrow dtype at the same place; and at most two gradients meet in the
narrow tensor, whose sum does not depend on their order. Where none flows, neither matters. Views
on the way are replayed on the narrow tensor, if its elements then lie as the cast's would. A
user's narrowing cast stays, for it is not marked as inserted.

    f = x.float(); v = f.view(s); c = _to_copy(v, bf16)   ->   c = x.view(s)        (x is bf16)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ampgraph.graph import (
    CAST,
    PASS,
    VALUE,
    WRITES,
    arguments,
    call,
    captured,
    fresh,
    no_guards,
    op_name,
    references,
)
from ampgraph.internals.tensors import FakeTensorMode, is_functorch_wrapped
from ampgraph.verdict import widens

WIDENINGS = frozenset("to float double type _to_copy".split())

# Their gradients move elements and add none up, as that of `expand` does: it would round more
# often on a narrow tensor.
VIEWS = frozenset(
    "view reshape flatten unflatten unsqueeze squeeze transpose swapaxes permute movedim t "
    "contiguous getitem select narrow".split()
)


@dataclass(frozen=True)
class Detour:
    """A tensor that is widened, looked at through `views` and cast back."""

    narrow: fx.Node
    widening: fx.Node
    views: tuple[fx.Node, ...]
    cast: fx.Node


def fold_casts(gm: fx.GraphModule, mode: FakeTensorMode, grad: bool) -> int:
    """Remove inserted casts that undo a widening; how many were removed."""
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    last_write = max((i for node, i in place.items() if WRITES in node.meta), default=-1)
    removed = 0
    for node in place:
        found = _detour(node) if CAST in node.meta else None
        if found is None or place[found.widening] < last_write:
            continue
        if _same_gradient(found) or not (grad and _may_need_grad(found.narrow)):
            removed += _fold(gm, found, mode)
    if removed:
        gm.recompile()
    return removed


def _detour(cast: fx.Node) -> Detour | None:
    """The way from a narrow tensor to the cast back to its dtype."""
    views: list[fx.Node] = []
    node = cast.args[0]
    while isinstance(node, fx.Node) and is_view(node):
        views.insert(0, node)
        node = node.args[0]
    narrow = _operand(node) if isinstance(node, fx.Node) and _name(node) in WIDENINGS else None
    if narrow is None or not isinstance(node, fx.Node):
        return None
    before, wide, after = captured(narrow), captured(node), captured(cast)
    plain = before.layout == torch.strided and not is_functorch_wrapped(before)
    exact = widens(before.dtype, wide.dtype) and before.device == wide.device
    returns = before.dtype == after.dtype
    return Detour(narrow, node, tuple(views), cast) if plain and exact and returns else None


def _name(node: fx.Node) -> str:
    name = str(node.target) if node.op == "call_method" else op_name(node.target)
    return name.rpartition(".")[2] if node.op.startswith("call") else ""


def _operand(node: fx.Node) -> fx.Node | None:
    """The first argument, where it is the only tensor and the result is a tensor as well."""
    first = node.args[0] if node.args else None
    tensors = [r for r in references(node) if isinstance(captured(r), Tensor)]
    whole = isinstance(captured(node), Tensor)
    return first if whole and isinstance(first, fx.Node) and tensors == [first] else None


def is_view(node: fx.Node) -> bool:
    """A view or a copy of some elements, each once, with their bits as they are."""
    base = _operand(node) if _name(node) in VIEWS else None
    if base is None or captured(base).dtype != captured(node).dtype:
        return False
    index = node.args[1] if _name(node) == "getitem" else ()
    parts = index if isinstance(index, tuple) else (index,)
    return not any(isinstance(part, (list, bool)) for part in parts)  # these gather elements


def uses(node: fx.Node) -> int:
    """How often a node is an operand."""
    return sum(references(user).count(node) for user in node.users)


def _same_gradient(found: Detour) -> bool:
    """Whether the narrow tensor's gradient is the same sum, rounded as often."""
    alone = all(uses(node) == 1 for node in (found.widening, *found.views))
    others = uses(found.narrow) - 1
    return alone and (others == 0 or others + uses(found.cast) <= 2)


def _may_need_grad(node: fx.Node) -> bool:
    """A value made in the graph may; only an input says for sure that it does not."""
    return node.op != "placeholder" or captured(node).requires_grad


def _fold(gm: fx.GraphModule, found: Detour, mode: FakeTensorMode) -> int:
    """Put the narrow tensor in the cast's place, unless its elements would lie elsewhere."""
    values = replay(found.views, fresh(captured(found.narrow), mode), mode)
    if not values or layout(values[-1]) != layout(captured(found.cast)):
        return 0
    new = found.narrow
    for view, value in zip(found.views, values[1:], strict=True):
        args = (new, *view.args[1:])
        with gm.graph.inserting_before(found.cast):
            new = gm.graph.create_node(view.op, view.target, args, view.kwargs)
        new.meta = {**view.meta, PASS: "fold_casts"}
        new.meta.update(dict.fromkeys({VALUE, "val"} & view.meta.keys(), value))
    found.cast.replace_all_uses_with(new)
    for node in (found.cast, *reversed(found.views), found.widening):
        if not node.users:
            gm.graph.erase_node(node)
    return 1


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
