"""Write the rows that explain a plan."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ampgraph.decision import Decision
from ampgraph.graph import module_of, op_name, source_of
from ampgraph.listener import Call
from ampgraph.passes.open_composite import Inner
from ampgraph.passes.plan import Plan
from ampgraph.policy import Category
from ampgraph.verdict import CONSTANT, FUSED, KERNEL, REPAIR, widest

_NOTED = (
    REPAIR,
    CONSTANT,
    KERNEL,
    FUSED,
)  # what differs from autocast is told beside the rows, too


def notes_of(rows: Sequence[Decision]) -> tuple[str, ...]:
    """A sentence for each row that tells of more than autocast's own rules."""
    return tuple(f"{r.node}: {r.op} {r.because}" for r in rows if r.category in _NOTED)


def row(node: fx.Node, calls: list[Call]) -> Decision:
    """One row for a node that stays whole: its own op, or the listed op that speaks for it."""
    first = calls[0]
    leaves = [leaf for c in calls for leaf in c.leaves()]
    lead = next((c for c in leaves if c.verdict.category != Category.FOLLOW), first)
    because = lead.verdict.because
    if lead.op is not first.op:
        because = f"{op_name(lead.op)} inside: {because}"
    name = op_name(first.op) if len(calls) == 1 else op_name(node.target)
    made = leaves[-1]
    return row_of(
        node,
        name,
        lead.verdict.category,
        because,
        lead.dtypes_in or first.dtypes_in,
        first.dtypes_out or made.dtypes_out,
        0,
        fp32=bool(lead.verdict.kwargs),
    )


def row_of(
    node: fx.Node,
    name: str,
    category: str,
    because: str,
    dtypes_in: tuple[torch.dtype, ...],
    dtypes_out: tuple[torch.dtype, ...],
    casts: int,
    fp32: bool = False,
) -> Decision:
    floating = [d for d in dtypes_out if d.is_floating_point] or [
        d for d in dtypes_in if d.is_floating_point
    ]
    dtype = widest(floating) if floating else None
    return Decision(
        op=name if "." in name else f"aten.{name}",
        node=node.name,
        dtype=torch.float32 if fp32 else dtype,
        category=str(category),
        because=because,
        module=module_of(node),
        source=source_of(node),
        dtypes_in=dtypes_in,
        dtypes_out=dtypes_out,
        casts=casts,
    )


def renamed(plan: Plan, node: fx.Node) -> Plan:
    """A cached plan told of another node of the same call."""
    where: dict[str, Any] = {
        "node": node.name,
        "module": module_of(node),
        "source": source_of(node),
    }
    rows = tuple(dataclasses.replace(row, **where) for row in plan.rows)
    return dataclasses.replace(plan, rows=rows, notes=notes_of(rows))


def rows_inside(node: fx.Node, found: Sequence[Inner]) -> tuple[Decision, ...]:
    """A row for each op of an opened composite."""
    return tuple(
        row_of(
            node,
            op_name(inner.op),
            inner.verdict.category,
            inner.verdict.because,
            inner.dtypes_in,
            inner.dtypes_out,
            len(inner.verdict.casts),
            fp32=bool(inner.verdict.kwargs),
        )
        for inner in found
    )
