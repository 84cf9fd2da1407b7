"""Fold a narrowing cast of a widening cast: the value was that narrow all along.

Sound for values because widening is exact, and for gradients because the fold is made only where
the widened value has this one reader (its gradient is rounded to the low dtype at the same
place), or where no gradient flows. Views between the two casts are replayed on the narrow value.
Only casts that this compiler inserted are removed; a narrowing cast of the user's never is.

    f = x.float(); v = f.view(s); c = _to_copy(v, bf16)   ->   c = x.view(s)        (x is bf16)
"""

from typing import Any

import torch
from torch import Tensor, fx

from ampgraph.graph import CAST, PASS, VALUE, captured, like, op_name
from ampgraph.internals import FakeTensorMode, OpOverload, schema_of

VIEWS = frozenset(
    "view reshape transpose permute unsqueeze squeeze flatten expand t contiguous unflatten".split()
)


def fold_casts(gm: fx.GraphModule, mode: FakeTensorMode, grad: bool) -> int:
    """Remove inserted casts that undo a widening; how many were removed."""
    if any(_writes(node) for node in gm.graph.nodes):
        return 0  # the narrow value may be written to between its widening and the cast
    removed = sum(_fold(gm, node, mode, grad) for node in list(gm.graph.nodes) if CAST in node.meta)
    if removed:
        gm.recompile()
    return removed


def _fold(gm: fx.GraphModule, cast: fx.Node, mode: FakeTensorMode, grad: bool) -> int:
    dtype: Any = cast.kwargs["dtype"]
    chain: list[fx.Node] = []
    source = cast.args[0]
    while isinstance(source, fx.Node) and _is_view(source) and _only_reader(source, grad):
        chain.append(source)
        source = source.args[0]
    if not isinstance(source, fx.Node) or not _only_reader(source, grad):
        return 0
    narrow = _widened_from(source, dtype)
    if narrow is None:
        return 0
    new = narrow
    for view in reversed(chain):
        new = _replay(gm, cast, view, new, mode, dtype)
    cast.replace_all_uses_with(new)
    for node in (cast, *chain, source):
        if not node.users:
            gm.graph.erase_node(node)
    return 1


def _only_reader(node: fx.Node, grad: bool) -> bool:
    value = captured(node)
    if not grad:
        return True
    return len(node.users) == 1 or (isinstance(value, Tensor) and not _may_need_grad(node))


def _may_need_grad(node: fx.Node) -> bool:
    """A value made in the graph may; only an input says for sure that it does not."""
    value = captured(node)
    return node.op != "placeholder" or bool(getattr(value, "requires_grad", True))


def _is_view(node: fx.Node) -> bool:
    name = str(node.target) if node.op == "call_method" else op_name(node.target)
    return node.op.startswith("call") and name.rpartition(".")[2] in VIEWS


def _widened_from(node: fx.Node, dtype: object) -> fx.Node | None:
    """The narrow tensor of which `node` is the exact widening, if it is one."""
    name = str(node.target) if node.op == "call_method" else op_name(node.target)
    if name.rpartition(".")[2] not in ("to", "float", "_to_copy", "type", "double"):
        return None
    source, value = node.args[0], captured(node)
    before = captured(source) if isinstance(source, fx.Node) else None
    if not isinstance(before, Tensor) or not isinstance(value, Tensor):
        return None
    same_place = before.device == value.device
    wider = torch.promote_types(before.dtype, value.dtype) == value.dtype
    exact = wider and before.dtype == dtype and before.dtype != value.dtype
    return source if exact and same_place else None  # type: ignore[return-value]


def _replay(
    gm: fx.GraphModule,
    cast: fx.Node,
    view: fx.Node,
    base: fx.Node,
    mode: FakeTensorMode,
    dtype: torch.dtype,
) -> fx.Node:
    with gm.graph.inserting_before(cast):
        new = gm.graph.node_copy(view)
    new.args = (base, *view.args[1:])
    new.meta = {**view.meta, PASS: "fold_casts"}
    new.meta[VALUE] = like(captured(view), dtype, mode)
    return new


def _writes(node: fx.Node) -> bool:
    """Whether the node may write in place."""
    if node.op == "call_method":
        return str(node.target).endswith("_")
    if isinstance(node.target, OpOverload):
        return schema_of(node.target).is_mutable
    name = op_name(node.target)
    written = name.endswith("_") or name in _WRITERS or "out" in node.kwargs
    return node.op.startswith("call") and (written or bool(node.kwargs.get("inplace")))


_WRITERS = frozenset("setitem iadd isub imul itruediv iand ior ixor ipow imatmul".split())
