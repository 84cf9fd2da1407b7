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
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ampgraph.decision import Decision
from ampgraph.graph import PASS, VALUE, WRITES, captured, like, op_name
from ampgraph.internals import FakeTensorMode
from ampgraph.kernels import unscale as _ops  # noqa: F401  defines torch.ops.ampgraph
from ampgraph.passes.effects import Effects
from ampgraph.passes.insert_casts import SHORT, SITE
from ampgraph.passes.rows import row_of
from ampgraph.passes.scaling_patterns import Fact, Product, Reader, Value
from ampgraph.passes.spellings import called, given, is_plain
from ampgraph.verdict import FUSED

FP32 = torch.float32


@dataclass
class Group:
    """What becomes one op: products, the flags and norms of them, and nodes that disappear."""

    products: list[Product]
    check_output: bool = False
    flags: list[fx.Node] = field(default_factory=list[fx.Node])
    norms: list[fx.Node] = field(default_factory=list[fx.Node])
    gone: set[fx.Node] = field(default_factory=set[fx.Node])
    amp: fx.Node | None = None  # the one op that was all this already, but the norm
    at: int = 0

    @property
    def in_place(self) -> bool:
        return self.products[0].in_place


def fuse_scaling(gm: fx.GraphModule, mode: FakeTensorMode, grad: bool) -> tuple[Decision, ...]:
    """Fuse what can be, in place; one row for each op that was made."""
    rows: list[Decision] = []
    while True:  # a group may stand in another's way until that is rewritten
        reader = Reader(Effects(gm, grad))
        groups = _apart(reader, _groups(reader)) if reader.effects.known else []
        if not groups:
            break
        order = list(gm.graph.nodes)
        for group in groups:
            rows.append(_Rewriter(gm, mode, reader.facts, group, order[group.at]).run())
        for node in reversed(order):
            if any(node in group.gone for group in groups):
                gm.graph.erase_node(node)
    if rows:
        gm.recompile()
    return tuple(rows)


def _apart(r: Reader, groups: Iterator[Group]) -> list[Group]:
    """Groups that can be rewritten at once: none has a node of another, or writes what it reads."""
    taken: list[Group] = []
    for group in groups:
        if all(_independent(r, group, other) for other in taken):
            taken.append(group)
    return taken


def _independent(r: Reader, one: Group, two: Group) -> bool:
    mixed = (one.gone | set(_inputs(one))) & two.gone or one.gone & set(_inputs(two))
    written = _written(r, one) & _roots(r, two) or _written(r, two) & _roots(r, one)
    return not mixed and not written


def _inputs(g: Group) -> list[fx.Node]:
    return [*(p.x for p in g.products), g.products[0].scale]


def _roots(r: Reader, g: Group) -> frozenset[Any]:
    return frozenset().union(*(r.effects.roots(node) for node in _inputs(g)))


def _written(r: Reader, g: Group) -> frozenset[Any]:
    named = [p.x for p in g.products if p.in_place]
    return frozenset().union(*map(r.effects.roots, named))


# --- matching -------------------------------------------------------------------------------------


def _groups(r: Reader) -> Iterator[Group]:
    """The groups that can be fused, each by itself."""
    flags = _flags(r)
    amp = {p.node: None for p in r.products if called(p.node) == "amp_unscale"}
    found = [_of_amp(r, node) for node in amp]
    found += [_of_flags(r, values, sinks) for values, sinks in _by_values(r, flags).items()]
    return (group for group in found if group is not None)


def _of_amp(r: Reader, node: fx.Node) -> Group | None:
    products = [p for p in r.products if p.node is node]
    found_inf = node.args[1] if len(node.args) == 3 else None
    if not isinstance(found_inf, fx.Node) or node.users:
        return None
    group = Group(products, gone={node}, amp=node)
    apart = not r.effects.roots(found_inf) & _roots(r, group)
    return group if apart and _complete(r, group) else None


def _flags(r: Reader) -> list[fx.Node]:
    """The flags that the program reads, and does not only combine into others.

    A flag or mask that is read by itself as well cannot disappear: nothing is built upon it.
    """
    while True:
        read = [n for n, f in r.facts.items() if _is_check(f) and _outside(r, n)]
        combined = {n for n in read if len(n.users) > len(_outside(r, n))} - r.stop
        if not combined:
            return [n for n in read if captured(n).dim() == 0]
        r.stop |= combined
        r.read()


def _is_check(fact: Any) -> bool:
    return isinstance(fact, Fact) and fact.what in ("fine", "bad")


def _outside(r: Reader, node: fx.Node) -> list[fx.Node]:
    """The users that are not read as a fact that follows from the node's."""
    return [user for user in node.users if node not in _via(r, user)]


def _via(r: Reader, node: fx.Node) -> frozenset[fx.Node]:
    made = r.facts.get(node)
    facts = made if isinstance(made, tuple) else (made,)
    return frozenset().union(*(f.via for f in facts if f is not None))


def _by_values(r: Reader, flags: Sequence[fx.Node]) -> dict[frozenset[Value], list[fx.Node]]:
    """Flags by the tensors they check for nan and inf, each tensor only in one set of them."""
    found: dict[frozenset[Value], list[fx.Node]] = {}
    for node in flags:
        of = r.facts[node].of
        values = frozenset(value for _, value in of)
        if values and len(of) == 2 * len(values):
            found.setdefault(values, []).append(node)
    seen = Counter(value for values in found for value in values)
    return {values: nodes for values, nodes in found.items() if max(seen[v] for v in values) == 1}


def _of_flags(r: Reader, values: frozenset[Value], flags: list[fx.Node]) -> Group | None:
    for check_output in (False, True):
        for products in _sharing_a_scale(r, values, check_output):
            group = Group(products, check_output, flags)
            for node in flags:
                group.gone |= r.facts[node].via
            if _complete(r, group):
                return group
    return None


def _sharing_a_scale(
    r: Reader, values: frozenset[Value], check_output: bool
) -> Iterator[list[Product]]:
    """The products of all values (or resulting in them) with one scale, in the graph's order."""
    found: dict[Any, dict[Value, Product]] = {}
    for p in r.products:
        value = p.result if check_output else p.source
        if value in values and called(p.node) != "amp_unscale":
            version = r.effects.version(p.scale, r.effects.place[p.node])
            key = (p.scale, version, p.divide, p.in_place, p.rounded)
            found.setdefault(key, {}).setdefault(value, p)
    yield from (list(by.values()) for by in found.values() if len(by) == len(values))


def _complete(r: Reader, g: Group) -> bool:
    """Add the norms and the place to a group; False if it cannot be one op."""
    g.gone |= {p.node for p in g.products}
    g.gone |= {user for n in set(g.gone) if _is_list(n) for user in n.users if _takes(user)}
    _add_norms(r, g)
    alike = _one_device(g) and _whole_lists(g) and _not_recorded(r, g)
    apart = not g.in_place or _disjoint(r, g)
    rest = g.gone.difference(_replaced(g))
    dies = all(set(node.users) <= g.gone for node in rest)
    return alike and apart and dies and _wanted(g) and any(_sound(r, g, at) for at in _places(r, g))


def _is_list(node: fx.Node) -> bool:
    return called(node) in ("_foreach_mul", "_foreach_div", "_foreach_mul_", "_foreach_div_")


def _takes(node: fx.Node) -> bool:
    return called(node) == "getitem" and isinstance(node.args[1], int)


def _add_norms(r: Reader, g: Group) -> None:
    """Norms of all results, if nothing else reads what they are computed by."""
    results = frozenset(p.result for p in g.products)
    known = [(n, f) for n, f in r.facts.items() if isinstance(f, Fact) and f.of == results]
    norms = [n for n, f in known if f.what in ("norms", "squares") and captured(n).dim() == 0]
    norms = [n for n in norms if _outside(r, n)]
    if any(p.tensor.dtype != FP32 for p in g.products):
        return
    gone = frozenset().union(*(_via(r, n) for n in norms))
    if all(set(n.users) <= gone for n in gone.difference(norms)):
        g.norms, g.gone = norms, g.gone | gone


def _one_device(g: Group) -> bool:
    tensors = [captured(node) for node in _inputs(g)]
    return all(map(is_plain, tensors)) and len({t.device for t in tensors}) == 1


def _whole_lists(g: Group) -> bool:
    """Every product of each node is in the group, and its list is only read member by member."""
    for node in {p.node for p in g.products}:
        listed = given(node, "input").get("input")
        mine = [p for p in g.products if p.node is node]
        if isinstance(listed, (list, tuple)) and len(listed) != len(mine):
            return False
        lists = _is_list(node) and not set(node.users) <= g.gone
        if lists and (g.in_place or len(mine) != len(g.products)):
            return False
    return True


def _not_recorded(r: Reader, g: Group) -> bool:
    return not any(r.effects.differentiated(node) for node in g.gone)


def _disjoint(r: Reader, g: Group) -> bool:
    """Whether what is written in place is neither read nor written through another name."""
    roots = [r.effects.roots(node) for node in _inputs(g)]
    return len(frozenset().union(*roots)) == sum(map(len, roots))


def _wanted(g: Group) -> bool:
    return g.in_place or bool(g.norms) or _writes(g)


def _writes(g: Group) -> bool:
    """Whether the program reads the products."""
    made = _replaced(g).difference(g.flags, g.norms)
    return g.in_place or any(not set(n.users) <= g.gone for n in made)


def _replaced(g: Group) -> set[fx.Node]:
    """The nodes whose results the op gives in another way."""
    products = {p.node for p in g.products}
    members = {n for n in g.gone if _takes(n) and n.args[0] in products}
    return {*products, *members, *g.flags, *g.norms}


# --- where ----------------------------------------------------------------------------------------


def _places(r: Reader, g: Group) -> Iterator[int]:
    """Where the op might stand: what it is given has to be there."""
    place = r.effects.place
    ready = max(place[node] + 1 for node in _inputs(g))
    products = [place[p.node] for p in g.products]
    earliest = max(ready, min(place[node] for node in g.gone))
    for at in (max(products), min(products), earliest) if g.in_place else (earliest,):
        if at >= ready:
            g.at = at
            yield at


def _sound(r: Reader, g: Group, at: int) -> bool:
    """Whether all is the same if every product and check happens at `at`."""
    e, nodes = r.effects, list(r.effects.place)
    made = [n for n in g.gone if not g.in_place or n in g.flags or n in g.norms]
    if any(e.place[user] < at for n in made for user in n.users if user not in g.gone):
        return False
    products = [(p, e.place[p.node]) for p in g.products]
    if any(e.version(p.scale, was) != e.version(p.scale, at) for p, was in products):
        return False
    if not g.in_place:
        return all(e.version(p.x, was) == e.version(p.x, at) for p, was in products)
    for p, was in products:
        between = nodes[min(was, at) : max(was, at)]
        roots = e.roots(p.x)
        if any(n not in g.gone and e.touches(n, roots) for n in between):
            return False
    return True


# --- rewriting ------------------------------------------------------------------------------------


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
        g, ops = self.group, torch.ops.ampgraph
        reads_only = not _writes(g) and not g.check_output and not g.products[0].divide
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
        made = (
            [_result(p) for p in g.products] if op is torch.ops.ampgraph.unscale.default else None
        )
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
        made = fused.target is torch.ops.ampgraph.unscale.default
        results = self._part("unscaled", fused, 0) if made else None
        for i, p in enumerate(g.products):
            old = [n for n in p.node.users if _takes(n) and n.args[1] == p.index]
            old = old if _is_list(p.node) else [p.node]
            if p.in_place:
                new = p.x
            elif results is not None and any(not set(n.users) <= g.gone for n in old):
                new = self._part("unscaled", results, i)
            else:
                continue
            for node in old:
                self._replace(node, new)
        if results is not None and _is_list(g.products[0].node):
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
