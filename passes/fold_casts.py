"""Fold an inserted cast that undoes a widening: the value was that narrow all along.

Sound for values: a widening is exact, and nothing writes in place after it, so the narrow tensor
still holds them. Sound for gradients: nothing but this cast reads the widened value, so its
gradient was rounded to the narrow dtype at the same place; and at most two gradients meet in the
narrow tensor, whose sum does not depend on their order. Where none flows, neither matters. Views
on the way are replayed on the narrow tensor, if its elements then lie as the cast's would. A
user's narrowing cast stays, for it is not marked as inserted.

    f = x.float(); v = f.view(s); c = _to_copy(v, bf16)   ->   c = x.view(s)        (x is bf16)
"""

from dataclasses import dataclass

import torch
from torch import fx

from ampgraph.graph import (
    CAST,
    PASS,
    VALUE,
    WRITES,
    captured,
    fresh,
)
from ampgraph.internals.tensors import FakeTensorMode, is_functorch_wrapped
from ampgraph.passes.views import layout, name_of_call, only_operand, replay, uses, way_to
from ampgraph.verdict import widens

WIDENINGS = frozenset("to float double type _to_copy".split())


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
    node, views = way_to(cast.args[0])
    if not isinstance(node, fx.Node) or name_of_call(node) not in WIDENINGS:
        return None
    narrow = only_operand(node)
    if narrow is None:
        return None
    before, wide, after = captured(narrow), captured(node), captured(cast)
    plain = before.layout == torch.strided and not is_functorch_wrapped(before)
    exact = widens(before.dtype, wide.dtype) and before.device == wide.device
    returns = before.dtype == after.dtype
    return Detour(narrow, node, tuple(views), cast) if plain and exact and returns else None


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
