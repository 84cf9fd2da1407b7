"""Fuse the unscaling of gradients with the finite check, and the norm, of the same tensors.

    y = x * s; ok = isfinite(x).all(); n = vector_norm(y)
    ->  (y,), found, squares = ampgraph.unscale([x], s); ok = found == 0; n = sqrt(squares)

One op for all tensors that share a scale and a flag, in place where the products are. Sound
because it is only done where the op computes what the products compute (same dtype, the scale
rounded as they round it), no write lies between what becomes one read, nothing else reads what
disappears, and autograd records none of it. A norm is only taken from float32 results: there the
sum of their squares is the op's own; it may differ in how the sum is rounded.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from ampgraph.decision import Decision
from ampgraph.graph import PASS, VALUE, WRITES, captured, like, op_name
from ampgraph.internals.tensors import FakeTensorMode
from ampgraph.kernels.unscale import OPS
from ampgraph.passes.effects import Effects
from ampgraph.passes.insert_casts import SHORT, SITE
from ampgraph.passes.rows import row_of
from ampgraph.passes.scaling_facts import read
from ampgraph.passes.scaling_groups import Group, apart, groups, is_list, makes_new, takes
from ampgraph.passes.scaling_patterns import Product, Reader
from ampgraph.passes.spellings import called
from ampgraph.verdict import FP32, FUSED

CHECKS = frozenset("isfinite isnan isinf amp_unscale".split())


def fuse_scaling(gm: fx.GraphModule, mode: FakeTensorMode, grad: bool) -> tuple[Decision, ...]:
    """Fuse what can be, in place; one row for each op that was made."""
    rows: list[Decision] = []
    checks = [node for node in gm.graph.nodes if called(node) in CHECKS]
    if not checks or any(map(_unknown, checks)):
        return ()
    while True:  # a group may stand in another's way until that is rewritten
        reader = Reader(Effects(gm, grad))
        read(reader)
        found = apart(reader, groups(reader)) if reader.effects.known else []
        if not found:
            break
        order = list(gm.graph.nodes)
        for group in found:
            rows.append(_Rewriter(gm, mode, reader.facts, group, order[group.at]).run())
        gone = set[fx.Node]().union(*(group.gone for group in found))
        for node in reversed(order):
            if node in gone:
                gm.graph.erase_node(node)
    if rows:
        gm.recompile()
    return tuple(rows)


# --- rewriting ------------------------------------------------------------------------------------


def _unknown(node: fx.Node) -> bool:
    """Whether nothing says what a check returns, as in a graph that Dynamo did not make."""
    return called(node) != "amp_unscale" and not isinstance(captured(node), Tensor)


class _Rewriter:
    """Puts one group's op before a node, and its results in place of what the group made."""

    def __init__(
        self,
        gm: fx.GraphModule,
        mode: FakeTensorMode,
        facts: dict[fx.Node, Any],
        group: Group,
        before: fx.Node,
    ) -> None:
        self.graph, self.mode, self.facts = gm.graph, mode, facts
        self.group, self.before = group, before

    def run(self) -> Decision:
        g, ops = self.group, OPS
        reads_only = not makes_new(g) and not g.check_output and not g.products[0].divide
        makes = ops.check.default if reads_only else ops.unscale.default
        fused = self._fused(ops.unscale_.default if g.in_place else makes)
        parts = len(fused.meta[VALUE])
        found = self._part("found_inf", fused, parts - 2)
        self._results(fused)
        self._flags(found)
        if g.norms:
            self._norms(self._part("sum_of_squares", fused, parts - 1))
        elif not found.users:
            self.graph.erase_node(found)
        return self._row(fused)

    def _fused(self, op: Any) -> fx.Node:
        g, first = self.group, self.group.products[0]
        xs, scale = [p.x for p in g.products], self._scale(first)
        asked = {"divide": first.divide, "check_output": g.check_output}
        kwargs = {name: True for name, wanted in asked.items() if wanted}
        number = self._number(first.tensor.device)
        made = [_result(p) for p in g.products] if op is OPS.unscale.default else None
        value = (number, number) if made is None else (made, number, number)
        name = op_name(op).rpartition(".")[2]
        node = self._node(name, op, (xs, scale), value, first.node, **kwargs)
        if g.in_place:
            node.meta[WRITES] = True
        return node

    def _scale(self, first: Product) -> fx.Node:
        """The scale in float32, rounded as the products round it."""
        scale = first.scale
        for dtype in (first.rounded, FP32):
            if dtype is not None and captured(scale).dtype != dtype:
                cast = like(captured(scale), dtype, self.mode)
                to_copy = torch.ops.aten._to_copy.default
                name = f"{scale.name}_{SHORT[dtype]}"
                scale = self._node(name, to_copy, (scale,), cast, first.node, dtype=dtype)
        return scale

    def _number(self, device: torch.device) -> Tensor:
        with self.mode:
            return torch.empty((), dtype=FP32, device=device)

    def _node(
        self,
        name: str,
        target: Any,
        args: tuple[Any, ...],
        value: Any,
        of: fx.Node,
        **kwargs: Any,
    ) -> fx.Node:
        with self.graph.inserting_before(self.before):
            new = self.graph.create_node("call_function", target, args, kwargs, name)
        new.meta.update({k: of.meta[k] for k in SITE if k in of.meta})
        new.meta |= {PASS: "fuse_scaling", VALUE: value}
        return new

    def _part(self, name: str, whole: fx.Node, index: int) -> fx.Node:
        value, of = whole.meta[VALUE][index], self.group.products[0].node
        return self._node(name, operator.getitem, (whole, index), value, of)

    def _results(self, fused: fx.Node) -> None:
        """The products' users read the op's results, or what was written in place."""
        g = self.group
        made = fused.target is OPS.unscale.default
        results = self._part("unscaled", fused, 0) if made else None
        for i, p in enumerate(g.products):
            old = [n for n in p.node.users if takes(n) and n.args[1] == p.index]
            old = old if is_list(p.node) else [p.node]
            if p.in_place:
                new = p.x
            elif results is not None and any(not set(n.users) <= g.gone for n in old):
                new = self._part("unscaled", results, i)
            else:
                continue
            for node in old:
                self._replace(node, new)
        if results is not None and is_list(g.products[0].node):
            self._replace(g.products[0].node, results)
        if results is not None and not results.users:
            self.graph.erase_node(results)

    def _flags(self, found: fx.Node) -> None:
        g, aten = self.group, torch.ops.aten
        for old in g.flags:
            fine = self.facts[old].what == "fine"
            name, op = ("finite", aten.eq.Scalar) if fine else ("not_finite", aten.ne.Scalar)
            self._replace(old, self._node(name, op, (found, 0), captured(old), old))
        if g.amp is not None:
            into: Any = g.amp.args[1]
            flag = self._node("not_finite", aten.ne.Scalar, (found, 0), self._flag(found), g.amp)
            filled = (into, flag, 1.0)
            value = captured(into)
            new = self._node("found_inf", aten.masked_fill_.Scalar, filled, value, g.amp)
            new.meta[WRITES] = True

    def _flag(self, found: fx.Node) -> Tensor:
        with self.mode:
            return torch.empty((), dtype=torch.bool, device=captured(found).device)

    def _norms(self, squares: fx.Node) -> None:
        for old in self.group.norms:
            new = squares
            if self.facts[old].what == "norms":
                sqrt = torch.ops.aten.sqrt.default
                new = self._node("norm", sqrt, (squares,), captured(old), old)
            self._replace(old, new)

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        gone = self.group.gone
        old.replace_all_uses_with(new, lambda user: user not in gone)

    def _row(self, fused: fx.Node) -> Decision:
        g = self.group
        done = "unscale + finite check" + (" + norm" if g.norms else "")
        number = len(g.products)
        because = f"fused: {done} of {number} tensor{'s' if number > 1 else ''}"
        dtypes = tuple(p.tensor.dtype for p in g.products)
        name = op_name(fused.target)
        return row_of(fused, name, FUSED, because, dtypes, dtypes, 0, fp32=True)


def _result(product: Product) -> Any:
    value = captured(product.node)
    return value if product.index is None else value[product.index]
