"""Find the groups of products, checks and norms that can become one op, and where it may stand."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ampgraph.graph import captured
from ampgraph.passes.scaling_facts import read
from ampgraph.passes.scaling_patterns import Fact, Product, Reader, Value
from ampgraph.passes.spellings import called, given, is_plain
from ampgraph.verdict import FP32


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


def apart(r: Reader, found: Iterator[Group]) -> list[Group]:
    """Groups that can be rewritten at once: none has a node of another, or writes what it reads."""
    taken: list[Group] = []
    for group in found:
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


def groups(r: Reader) -> Iterator[Group]:
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
        wanted = [n for n, f in r.facts.items() if _is_check(f) and _outside(r, n)]
        combined = {n for n in wanted if len(n.users) > len(_outside(r, n))} - r.stop
        if not combined:
            return [n for n in wanted if tuple(getattr(captured(n), "shape", (1,))) == ()]
        r.stop |= combined
        read(r)


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
    g.gone |= {user for n in set(g.gone) if is_list(n) for user in n.users if takes(user)}
    _add_norms(r, g)
    alike = _one_device(g) and _whole_lists(g) and _not_recorded(r, g)
    apart = not g.in_place or _disjoint(r, g)
    rest = g.gone.difference(_replaced(g))
    dies = all(set(node.users) <= g.gone for node in rest)
    return alike and apart and dies and _wanted(g) and any(_sound(r, g, at) for at in _places(r, g))


def is_list(node: fx.Node) -> bool:
    return called(node) in ("_foreach_mul", "_foreach_div", "_foreach_mul_", "_foreach_div_")


def takes(node: fx.Node) -> bool:
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
        lists = is_list(node) and not set(node.users) <= g.gone
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
    return g.in_place or bool(g.norms) or makes_new(g)


def makes_new(g: Group) -> bool:
    """Whether the program reads the products."""
    made = _replaced(g).difference(g.flags, g.norms)
    return g.in_place or any(not set(n.users) <= g.gone for n in made)


def _replaced(g: Group) -> set[fx.Node]:
    """The nodes whose results the op gives in another way."""
    products = {p.node for p in g.products}
    members = {n for n in g.gone if takes(n) and n.args[0] in products}
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
