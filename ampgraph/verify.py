"""The laws of a rewritten graph, checked after the passes have run.

Cheap, always: the graph is well formed, no autocast node is left, and every inserted cast changes
a floating dtype. Full, on request (AMPGRAPH_VERIFY=full): the graph is run again on fake tensors
with autocast off, and every node must return the dtype that was decided for it.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ampgraph.errors import VerifyError
from ampgraph.graph import CAST, KEPT, PASS, captured, source_of
from ampgraph.internals.autocast import enter_autocast, exit_autocast


def graphs(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graph and the bodies of the higher-order ops it calls, at any depth."""
    yield gm
    for node in gm.graph.nodes:
        value = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(value, fx.GraphModule):
            yield from graphs(value)


def count_casts(gm: fx.GraphModule) -> int:
    """Casts inserted by the compiler, bodies included."""
    return sum(CAST in node.meta for g in graphs(gm) for node in g.graph.nodes)


def _no_region(node: fx.Node) -> str | None:
    wraps = getattr(node.target, "_name", "") == "wrap_with_autocast"
    kept = node.meta.get(PASS) == KEPT
    if wraps or (node.target in (enter_autocast, exit_autocast) and not kept):
        return "an autocast region is left in the graph"
    return None


def _cast_changes_dtype(node: fx.Node) -> str | None:
    if CAST not in node.meta:
        return None
    source = node.args[0]
    before, after = captured(source), captured(node)  # type: ignore[arg-type]
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return "a cast whose tensor is not known"
    if before.dtype == after.dtype:
        return f"a cast to {after.dtype}, which the tensor already has"
    if not (before.is_floating_point() and after.is_floating_point()):
        return f"a cast from {before.dtype} to {after.dtype}: only floating tensors are cast"
    return None


def _cast_of_cast(node: fx.Node) -> str | None:
    source = node.args[0] if CAST in node.meta and node.args else None
    if isinstance(source, fx.Node) and CAST in source.meta and CAST in node.meta:
        return f"a cast of a cast ({source.name})"
    return None


LAWS: tuple[Callable[[fx.Node], str | None], ...] = (
    _no_region,
    _cast_changes_dtype,
    _cast_of_cast,
)


def verify(gm: fx.GraphModule) -> None:
    """Check every law on every node, bodies included; raises VerifyError at the first breach."""
    for graph in graphs(gm):
        graph.graph.lint()
        for node in graph.graph.nodes:
            for law in LAWS:
                wrong = law(node)
                if wrong:
                    raise VerifyError(wrong, where=f"node {node.name} {source_of(node)}")


def same_dtypes(node: fx.Node, value: object) -> None:
    """Raise VerifyError where `value`, computed anew, differs in dtype from what was decided."""
    decided = [t.dtype for t in pytree.tree_leaves(captured(node)) if isinstance(t, Tensor)]
    found = [t.dtype for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
    if decided and decided != found:
        raise VerifyError(
            f"decided {_names(decided)}, computes {_names(found)}",
            where=f"node {node.name} {source_of(node)}",
        )


def _names(dtypes: list[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
