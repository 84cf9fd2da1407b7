"""Follow large constants to where a cast would turn them into infinity, and clamp them there.

A mask filled with -1e9 or finfo(float32).min is finite in float32 and infinite in float16; a row
masked whole then is NaN after softmax. Only values that come from a literal of the program through
ops that pass elements on are followed, so ordinary activations are never clamped.
"""

import dataclasses

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ampgraph.graph import op_name, references
from ampgraph.oplists.scalars import CARRIERS, FACTORIES, VALUE_SCALARS
from ampgraph.passes.plan import Plan
from ampgraph.state import LOW_DTYPES, AutocastState
from ampgraph.verdict import tensors


class LargeConstants:
    """Which nodes of a walk may hold a large constant, and which were made low by our casts."""

    def __init__(self) -> None:
        self.huge: set[fx.Node] = set()
        self.lowered: set[fx.Node] = set()

    def reaches_low(self, node: fx.Node) -> bool:
        """Whether an input of the node was made low by this compiler."""
        return any(r in self.lowered for r in node.all_input_nodes)

    def factory(self, node: fx.Node, state: AutocastState) -> None:
        """Note a tensor filled with a large constant."""
        if op_name(node.target) in FACTORIES and _is_huge(node, state):
            self.huge.add(node)

    def follow(self, node: fx.Node, plan: Plan, state: AutocastState) -> None:
        """Note what a planned node passes on."""
        low = any(t.dtype in LOW_DTYPES for t in tensors(plan.value))
        cast_low = any(c.dtype in LOW_DTYPES for c in plan.casts) or plan.inline is not None
        if low and (cast_low or self.reaches_low(node)):
            self.lowered.add(node)
        names = {"aten::" + row.op.partition(".")[2] for row in plan.rows}
        born = bool(names & VALUE_SCALARS.keys()) and _is_huge(node, state)
        carried = names <= CARRIERS and any(r in self.huge for r in node.all_input_nodes)
        if born or carried:
            self.huge.add(node)
            if plan.mutates and node.all_input_nodes:
                self.huge.add(node.all_input_nodes[0])

    def clamped(self, node: fx.Node, plan: Plan) -> Plan:
        """The plan with a clamp before each cast of a large constant to a low dtype."""
        if not self.huge or not plan.casts:
            return plan
        sources = references(node)
        casts = tuple(
            dataclasses.replace(c, clamp=c.dtype in LOW_DTYPES and sources[c.at[0]] in self.huge)
            for c in plan.casts
        )
        if not any(c.clamp for c in casts):
            return plan
        note = f"{node.name}: a constant beyond the low dtype's range is kept finite (clamped)"
        return dataclasses.replace(plan, casts=casts, notes=(*plan.notes, note))


def _is_huge(node: fx.Node, state: AutocastState) -> bool:
    """Whether a finite literal of the node is beyond the range of a low dtype in force."""
    low = [d for d in state.enabled().values() if d in LOW_DTYPES]
    limit = min((torch.finfo(d).max for d in low), default=float("inf"))
    for leaf in pytree.tree_leaves((node.args, dict(node.kwargs))):
        number = isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
        if number and limit < abs(leaf) < float("inf"):
            return True
    return False
