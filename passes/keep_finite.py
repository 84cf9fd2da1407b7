"""Follow large constants to where a low dtype would turn them into infinity, and keep them finite.

A mask filled with -1e9 or finfo(float32).min is finite in float32 and infinite in float16; a row
masked whole then is NaN after softmax. Three things are mended, each with a note:

    torch.full(s, -1e9, dtype=float16); y[m] = -1e9  ->  the literal becomes -65504
    bmm(mask, v), mask of -1e9, cast by the law      ->  clamp(mask, -65504, 65504), then the cast
    where(m, y, tensor(-1e9)), mask.to(y.dtype)      ->  the same, where the op itself narrows

Only values that come from a literal of the program through ops that pass elements on are followed,
and only tensors that are low because of autocast are mended, so ordinary activations are never
clamped, and a program's own float16 inputs behave as torch has them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ampgraph.graph import op_name, references
from ampgraph.oplists.scalars import CARRIERS, FILLS, VALUE_SCALARS
from ampgraph.passes.plan import Cast, Plan
from ampgraph.state import LOW_DTYPES, AutocastState
from ampgraph.verdict import tensors

NOTE = "a constant beyond the low dtype's range is kept finite (clamped)"


class LargeConstants:
    """Which nodes of a walk may hold a large constant, and which are low because of autocast."""

    def __init__(self) -> None:
        self.huge: set[fx.Node] = set()
        self.lowered: set[fx.Node] = set()

    def reaches_low(self, node: fx.Node) -> bool:
        """Whether an input of the node is low because of autocast."""
        return any(r in self.lowered for r in node.all_input_nodes)

    def kept(
        self, node: fx.Node, plan: Plan, env: Mapping[fx.Node, Any], state: AutocastState
    ) -> Plan:
        """The plan with the node's large constants kept finite; what it passes on is noted."""
        limit = _limit(state)
        if limit < float("inf"):
            plan = self._literal(node, plan, env, state)
            plan = self._clamped(node, plan, env) if self.huge else plan
            self._follow(node, plan, env, limit)
        return plan

    def _literal(
        self, node: fx.Node, plan: Plan, env: Mapping[fx.Node, Any], state: AutocastState
    ) -> Plan:
        """Another literal for what a low tensor is filled with."""
        low = _destination(node, plan, env)
        place = _fill(node)
        wanted = low in state.enabled().values() and not plan.casts
        if place is None or low is None or not wanted or self._is_users(node):
            return plan
        where, value = place
        new = _within(value, torch.finfo(low).max)
        if new == value:
            return plan
        told = dataclasses.replace(plan, notes=(*plan.notes, f"{node.name}: {NOTE}"))
        if isinstance(where, int):
            return dataclasses.replace(told, positional=(*plan.positional, (where, new)))
        return dataclasses.replace(told, kwargs=(*plan.kwargs, (where, new)))

    def _is_users(self, node: fx.Node) -> bool:
        """Whether the node fills like a tensor that was low before autocast."""
        like = node.all_input_nodes[0] if node.all_input_nodes else None
        return like is not None and like not in self.lowered

    def _clamped(self, node: fx.Node, plan: Plan, env: Mapping[fx.Node, Any]) -> Plan:
        """A clamp before each narrowing of a large constant, by the law or by the op itself."""
        sources = references(node)
        casts = [
            dataclasses.replace(c, clamp=c.dtype in LOW_DTYPES and sources[c.at[0]] in self.huge)
            for c in plan.casts
        ]
        low = _destination(node, plan, env)
        known = {c.at[0] for c in casts}
        for i, source in enumerate(sources):
            if low is None or plan.inline is not None:
                break
            if source in self.huge and i not in known and isinstance(env[source], Tensor):
                casts.append(Cast((i, ()), low, clamp=True))
        if not any(c.clamp for c in casts):
            return plan
        note = f"{node.name}: {NOTE}"
        return dataclasses.replace(plan, casts=tuple(casts), notes=(*plan.notes, note))

    def _follow(self, node: fx.Node, plan: Plan, env: Mapping[fx.Node, Any], limit: float) -> None:
        if _destination(node, plan, env) is not None:
            given = [v.dtype for r in node.all_input_nodes for v in tensors(env[r])]
            low = any(dtype in LOW_DTYPES for dtype in given)
            if plan.casts or plan.inline is not None or self.reaches_low(node) or not low:
                self.lowered.add(node)
            return  # nothing in it is beyond the range any more
        names = {"aten::" + row.op.partition(".")[2] for row in plan.rows}
        born = bool(names & VALUE_SCALARS.keys()) or _fill(node) is not None
        carried = names <= CARRIERS and any(r in self.huge for r in node.all_input_nodes)
        if carried or (born and _is_huge(node, limit)):
            self.huge.add(node)
            if plan.mutates and node.all_input_nodes:
                self.huge.add(node.all_input_nodes[0])


def _limit(state: AutocastState) -> float:
    """The largest value of the smallest low dtype in force."""
    low = [d for d in state.enabled().values() if d in LOW_DTYPES]
    return min((torch.finfo(d).max for d in low), default=float("inf"))


def _destination(node: fx.Node, plan: Plan, env: Mapping[fx.Node, Any]) -> torch.dtype | None:
    """The dtype the node's elements end up in, its result's or what it writes, if it is low."""
    first = node.args[0] if node.args else None
    written = env[first] if isinstance(first, fx.Node) else None
    ends = tensors(plan.value) or (tensors(written) if _fill(node) or plan.mutates else [])
    found = {t.dtype for t in ends if t.is_floating_point()}
    return found.pop() if len(found) == 1 and found <= set(LOW_DTYPES) else None


def _fill(node: fx.Node) -> tuple[int | str, Any] | None:
    """Where a node's fill value stands, and what it is; None if the node fills nothing."""
    name = str(node.target) if node.op == "call_method" else op_name(node.target)
    place = FILLS.get(name.rpartition(".")[2])
    if place is None:
        return None
    position, keyword = place
    if keyword in node.kwargs:
        return keyword, node.kwargs[keyword]
    return (position, node.args[position]) if position < len(node.args) else None


def _within(value: Any, limit: float) -> Any:
    """The value, or the tree of values, with finite numbers beyond the limit brought to it."""

    def one(leaf: Any) -> Any:
        return max(-limit, min(limit, float(leaf))) if _beyond(leaf, limit) else leaf

    return pytree.tree_map(one, value)


def _beyond(leaf: object, limit: float) -> bool:
    if isinstance(leaf, bool) or not isinstance(leaf, (int, float)):
        return False
    return limit < abs(leaf) < float("inf")


def _is_huge(node: fx.Node, limit: float) -> bool:
    """Whether a value that the node gives its elements is finite and beyond the limit."""
    place = _fill(node)
    values = place[1] if place else (node.args, dict(node.kwargs))
    return any(_beyond(leaf, limit) for leaf in pytree.tree_leaves(values))
