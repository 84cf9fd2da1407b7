"""Plan a node that is one dispatcher op: it stays as the user wrote it, its operands are cast."""

import dataclasses
from collections.abc import Mapping, Sequence

from torch import fx
from torch.utils import _pytree as pytree

from ampgraph.graph import Operand, op_name
from ampgraph.internals.ops import schema_of
from ampgraph.listener import Call
from ampgraph.passes.plan import Cast, Plan, Position
from ampgraph.passes.rows import notes_of, row


def direct(node: fx.Node, here: list[Operand], calls: list[Call]) -> Plan | None:
    """The plan where the node *is* one dispatcher op, so that it can stay as the user wrote it."""
    if len(calls) != 1 or calls[0].inner:
        return None
    verdict = calls[0].verdict
    if verdict.op is not calls[0].op:
        return None  # another overload is to be called
    places: dict[int, list[Position]] = {}
    for operand in here:
        places.setdefault(id(operand.value), []).append((operand.index, operand.path))
    if not verdict.casts.keys() <= places.keys():
        return None  # the op is called with tensors the node only makes inside
    if verdict.kwargs and not _takes_dtype(node, calls[0]):
        return None
    casts = _casts(calls[0], places)
    literals = _literals(node, verdict.clamp, calls[0])
    if literals is None:
        return None
    told = dataclasses.replace(row(node, calls), casts=len(casts))
    return Plan(
        rows=(told,),
        casts=casts,
        kwargs=tuple(verdict.kwargs.items()),
        literals=literals,
        notes=notes_of([told]),
    )


def _casts(made: Call, places: Mapping[int, Sequence[Position]]) -> tuple[Cast, ...]:
    """The op's casts as casts of the node's operands, in the op's order.

    A tensor's first use in the op is its first use in the node, and so on.
    """
    uses = [id(t) for t in made.inputs]
    found: dict[Position, Cast] = {}
    for i in made.order:
        dtype, nth = made.verdict.casts.get(uses[i]), uses[:i].count(uses[i])
        if dtype is not None and nth < len(places[uses[i]]):
            at = places[uses[i]][nth]
            found[at] = Cast(at, dtype)
    for t, dtype in made.verdict.casts.items():
        for at in places[t]:
            found.setdefault(at, Cast(at, dtype))
    return tuple(found.values())


def _takes_dtype(node: fx.Node, made: Call) -> bool:
    """Whether `dtype=` can be written on the node itself: same name as the op, none given."""
    return op_name(node.target).rpartition(".")[2] == schema_of(made.op).name.split("::")[1]


def _literals(
    node: fx.Node, clamp: Mapping[str, float], made: Call
) -> tuple[tuple[float, float], ...] | None:
    if not clamp:
        return ()
    big = [
        leaf
        for leaf in pytree.tree_leaves((node.args, dict(node.kwargs)))
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
    ]
    pairs: list[tuple[float, float]] = []
    for new in clamp.values():
        found = [v for v in big if abs(v) > abs(new) and (v > 0) == (new > 0)]
        if not found:
            return None
        pairs.append((found[0], new))
    return tuple(pairs)
