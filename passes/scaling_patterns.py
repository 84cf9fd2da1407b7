"""Read what a graph says about unscaled tensors: products, finite checks and norms.

A `Fact` is what an array of a graph tells of tensors. Facts follow from facts by a small algebra,
so that any spelling of a check or norm is read as what it means:

    isfinite(x)                 fine {x}        and of fine arrays, or of bad ones: their union
    isnan(x), isinf(x)          bad {x}         not: fine is bad, bad is fine
    y                           norms {y}       all of fine, any of bad: a flag
    y * y, squares of norms     squares {y}     sum of squares: squares, norm of norms: norms
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ampgraph.graph import captured
from ampgraph.passes.effects import Effects
from ampgraph.passes.spellings import called, given

FP32 = torch.float32
_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Value:
    """What a node (or a member of a list) holds, until something is written to it."""

    node: fx.Node
    index: int | None
    version: int


@dataclass(frozen=True)
class Product:
    """`node` (or its `index`-th member) is `x * scale` or `x / scale`."""

    node: fx.Node
    index: int | None
    x: fx.Node
    scale: fx.Node
    divide: bool
    in_place: bool
    rounded: torch.dtype | None  # the dtype that the scale is rounded to before it is used
    source: Value
    result: Value

    @property
    def tensor(self) -> Tensor:
        value: Tensor = captured(self.x)
        return value


@dataclass(frozen=True)
class Fact:
    """What an array tells of the values `of`; `via` are the nodes that it was computed by.

    bad: an element is true if one of `of`, pairs of "nan" or "inf" and a value, occurs. fine: an
    element is false if. norms: the array's 2-norm is that of all. squares: its sum is theirs.
    """

    what: str
    of: frozenset[Any]
    via: frozenset[fx.Node] = frozenset()


class Reader:
    """Everything read from one graph. Facts of the nodes in `stop` are not built upon."""

    def __init__(self, effects: Effects) -> None:
        self.effects = effects
        self.stop: set[fx.Node] = set()
        self.products = [p for node in effects.place for p in self._products(node)]
        self.results = {p.result for p in self.products}
        self.facts: dict[fx.Node, Any] = {}
        self.read()

    def read(self) -> None:
        """Read the facts, in the graph's order."""
        self.facts.clear()
        for node in self.effects.place:
            read = _frozen if node.op == "get_attr" else _READERS.get(called(node))
            fact = read(self, node) if read is not None and _unwritten(node) else None
            if fact is not None:
                self.facts[node] = fact

    # --- values ---

    def value(self, node: fx.Node, at: int) -> Value:
        """What the node's tensor holds at a place of the graph, seen through views of all of it."""
        name = called(node)
        inner = node.args[0] if node.args else None
        if isinstance(inner, fx.Node):
            made = self.effects.place[node]
            if name in ("mul_", "div_"):
                return self.value(inner, at)
            if name == "getitem" and isinstance(node.args[1], int):
                return self._member(inner, node, node.args[1], at)
            if name in _SAME_ELEMENTS and isinstance(captured(inner), Tensor):
                seen = self.value(inner, at)
                # A reshape may also be a copy, which a later write does not reach.
                return seen if seen == self.value(inner, made) else self._own(node, None, at)
        return self._own(node, None, at)

    def _own(self, node: fx.Node, index: int | None, at: int) -> Value:
        return Value(node, index, self.effects.version(node, at))

    def _member(self, whole: fx.Node, node: fx.Node, index: int, at: int) -> Value:
        name, listed = called(whole), whole.args[0] if whole.args else None
        if name in ("_foreach_mul", "_foreach_div"):
            return self._own(whole, index, at)
        if name in ("_foreach_mul_", "_foreach_div_") and isinstance(listed, (list, tuple)):
            member = listed[index]
            if isinstance(member, fx.Node):
                return self.value(member, at)
        return self._own(node, None, at)

    # --- products ---

    def _products(self, node: fx.Node) -> Iterator[Product]:
        name = called(node)
        if name in ("mul", "div", "mul_", "div_"):
            yield from self._one_product(node, name)
        elif name == "amp_unscale":
            yield from self._checked_products(node)
        elif name.startswith("_foreach_") and name.strip("_")[8:] in ("mul", "div"):
            yield from self._listed_products(node, name)

    def _one_product(self, node: fx.Node, name: str) -> Iterator[Product]:
        args = given(node, "input", "other")
        x, scale = args.get("input"), args.get("other")
        reverse = not _is_scale(scale) and _is_scale(x) and name == "mul"
        if reverse:
            x, scale = scale, x
        if len(args) != 2 or not isinstance(x, fx.Node) or not isinstance(scale, fx.Node):
            return
        if x is scale or not _is_scale(scale) or not _keeps_dtype(captured(x), captured(node)):
            return
        if not _rounds_alike(captured(x), captured(scale)):
            return
        yield self._product(node, None, x, scale, name, reverse)

    def _listed_products(self, node: fx.Node, name: str) -> Iterator[Product]:
        args = given(node, "input", "other")
        listed: Any = args.get("input")
        scale: Any = args.get("other")
        if len(args) != 2 or not _is_scale(scale) or not isinstance(listed, (list, tuple)):
            return
        made = listed if name.endswith("_") else captured(node)
        for index, (x, y) in enumerate(zip(listed, made, strict=True)):
            after = captured(y) if isinstance(y, fx.Node) else y
            if not isinstance(x, fx.Node) or not _keeps_dtype(captured(x), after):
                continue
            if _rounds_alike(captured(x), captured(scale)):
                yield self._product(node, index, x, scale, name, False)

    def _checked_products(self, node: fx.Node) -> Iterator[Product]:
        """Those of torch's own fused op: in float32, whatever the tensors' dtype is."""
        args = given(node, "input", "found_inf", "inv_scale")
        at = self.effects.place[node]
        for index, x in enumerate(args["input"]):
            if isinstance(x, fx.Node) and _keeps_dtype(captured(x), captured(x)):
                source, result = self.value(x, at), self.value(x, at + 1)
                scale = args["inv_scale"]
                yield Product(node, index, x, scale, False, True, None, source, result)

    def _product(
        self, node: fx.Node, index: int | None, x: fx.Node, scale: Any, name: str, reverse: bool
    ) -> Product:
        at = self.effects.place[node]
        in_place = name.endswith("_")
        source = self.value(x, at)
        result = self.value(x, at + 1) if in_place else Value(node, index, 0)
        rounded = _rounding(captured(x), captured(scale), reverse)
        divide = "div" in name
        return Product(node, index, x, scale, divide, in_place, rounded, source, result)

    # --- facts ---

    def fact(self, of: Any) -> Fact | None:
        """What a node's tensor tells: what was read of it, or that it is an unscaled tensor."""
        if not isinstance(of, fx.Node) or of in self.stop:
            return None
        fact = self.facts.get(of)
        return fact if isinstance(fact, Fact) else None

    def norms(self, of: Any, at: int) -> Fact | None:
        """As `fact`; an unscaled float32 tensor is an array of norms, each that of one element."""
        found = self.fact(of)
        if found is not None or not isinstance(of, fx.Node) or not _is_fp32(captured(of)):
            return found
        value = self.value(of, at)
        return Fact("norms", frozenset([value])) if value in self.results else None

    def members(self, listed: Any) -> list[Fact | None]:
        """The facts of a list's members, in a list or made by one node."""
        if isinstance(listed, fx.Node):
            made = self.facts.get(listed)
            return list(made) if isinstance(made, tuple) else [None]
        return [self.fact(member) for member in listed] if listed else [None]


_SAME_ELEMENTS = frozenset("view reshape flatten detach alias".split())
_Read = Callable[[Reader, fx.Node], Any]


def _unwritten(node: fx.Node) -> bool:
    return node.kwargs.get("out") is None


def _is_fp32(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == FP32


def _is_scale(of: Any) -> bool:
    value = captured(of) if isinstance(of, fx.Node) else None
    return isinstance(value, Tensor) and value.dim() == 0 and value.dtype in (FP32, *_LOW)


def _keeps_dtype(x: Any, y: Any) -> bool:
    both = isinstance(x, Tensor) and isinstance(y, Tensor)
    return both and x.dtype == y.dtype and x.dtype in (FP32, *_LOW)


def _rounding(x: Tensor, scale: Tensor, reverse: bool) -> torch.dtype | None:
    """A scale wider than the tensor is rounded first: on a CPU only as the left factor."""
    keeps = x.dtype in (FP32, scale.dtype) or (x.device.type == "cpu" and not reverse)
    return None if keeps else x.dtype


def _rounds_alike(x: Tensor, scale: Tensor) -> bool:
    """A low number beside a wider scale is computed wide on a GPU, unlike a low vector."""
    return bool(x.dim()) or x.dtype in (FP32, scale.dtype) or x.device.type == "cpu"


def _via(node: fx.Node, *facts: Fact) -> frozenset[fx.Node]:
    return frozenset([node]).union(*(fact.via for fact in facts))


def _is_finite(r: Reader, node: fx.Node) -> Fact | None:
    args = given(node, "input")
    x: Any = args.get("input")
    value = captured(x) if isinstance(x, fx.Node) else None
    if len(args) != 1 or not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    seen = r.value(x, r.effects.place[node])
    kinds = {"isnan": ("nan",), "isinf": ("inf",)}.get(called(node), ("nan", "inf"))
    what = "fine" if called(node) == "isfinite" else "bad"
    return Fact(what, frozenset((kind, seen) for kind in kinds), _via(node))


def _not(r: Reader, node: fx.Node) -> Fact | None:
    args = given(node, "input")
    fact = r.fact(args.get("input"))
    opposite = {"fine": "bad", "bad": "fine"}
    if fact is None or len(args) != 1 or fact.what not in opposite:
        return None
    return Fact(opposite[fact.what], fact.of, _via(node, fact))


def _reduced(r: Reader, node: fx.Node) -> Fact | None:
    args = given(node, "input")
    fact = r.fact(args.get("input"))
    wanted = {"all": "fine", "any": "bad"}[called(node)]
    if fact is None or len(args) != 1 or fact.what != wanted:
        return None
    return Fact(fact.what, fact.of, _via(node, fact))


def _combined(r: Reader, node: fx.Node) -> Fact | None:
    """Or, and; in place only on a flag that nothing else reads."""
    args = given(node, "input", "other")
    name = called(node)
    one, two = r.fact(args.get("input")), r.fact(args.get("other"))
    if one is None or two is None or len(args) != 2 or _shapes(args["input"], args["other"]) != 1:
        return None
    if name in ("ior", "iand") and len(args["input"].users) != 1:
        return None
    wanted = "fine" if name in ("and", "iand") else "bad"
    if one.what != wanted or two.what != wanted:
        return None
    return Fact(wanted, one.of | two.of, _via(node, one, two))


def _shapes(*nodes: fx.Node) -> int:
    return len({tuple(map(str, captured(n).shape)) for n in nodes})


def _same(r: Reader, node: fx.Node) -> Fact | None:
    """A view or a cast that changes nothing."""
    args = given(node, "input")
    x = args.get("input")
    fact = r.fact(x)
    if fact is None or not isinstance(x, fx.Node):
        return None
    was, now = captured(x), captured(node)
    kept = isinstance(now, Tensor) and (was.dtype, was.device) == (now.dtype, now.device)
    return Fact(fact.what, fact.of, _via(node, fact)) if kept else None


def _constant(r: Reader, node: fx.Node) -> Fact | None:
    """A flag's first value: one that is made in the graph, so that nothing else can change it."""
    value = captured(node)
    if not isinstance(value, Tensor) or value.dtype != torch.bool or value.dim():
        return None
    first = node.args[0] if node.args else None
    fill = {"zeros": False, "ones": True}.get(called(node))
    if called(node) == "full":
        fill = bool(node.args[1]) if len(node.args) == 2 and isinstance(node.args[1], int) else None
    if called(node) == "tensor":
        fill = first if isinstance(first, bool) else None
    if fill is None:
        return None
    return Fact("fine" if fill else "bad", frozenset(), _via(node))


def _frozen(r: Reader, node: fx.Node) -> Fact | None:
    """A flag's first value that a tracer has kept as a constant, if nothing writes to it."""
    value = getattr(r.effects.gm, str(node.target), None)
    if not str(node.target).startswith("_tensor_constant") or type(value) is not Tensor:
        return None
    written = r.effects.version(node, len(r.effects.place))
    if value.dtype != torch.bool or value.dim() or value.device.type != "cpu" or written:
        return None
    return Fact("fine" if bool(value) else "bad", frozenset())


def _gathered(r: Reader, node: fx.Node) -> Fact | None:
    """A stack of flags, norms or squares."""
    facts = r.members(given(node, "input").get("input"))
    first = facts[0]
    if first is None or any(f is None or f.what != first.what for f in facts):
        return None
    return _union(node, [f for f in facts if f is not None])


def _union(node: fx.Node, facts: list[Fact]) -> Fact | None:
    """All that the facts tell; what is added up must not be added twice."""
    of: frozenset[Any] = frozenset().union(*(f.of for f in facts))
    adds = facts[0].what in ("norms", "squares")
    if adds and len(of) != sum(len(f.of) for f in facts):
        return None
    return Fact(facts[0].what, of, _via(node, *facts))


def _norm(r: Reader, node: fx.Node) -> Fact | None:
    args = given(node, "input", "p", "dim", "keepdim")
    x, p = args.pop("input", None), args.pop("p", None)
    fact = r.norms(x, r.effects.place[node])
    if fact is None or fact.what != "norms" or not _plain_reduction(args):
        return None
    vector = called(node) != "linalg_norm" or captured(x).dim() == 1
    wanted = (None, "fro", 2) if called(node) == "norm" else (None, 2) if vector else (None,)
    if p not in wanted or isinstance(p, bool) or not _is_fp32(captured(node)):
        return None
    return Fact("norms", fact.of, _via(node, fact))


def _plain_reduction(args: dict[str, Any]) -> bool:
    """Over all dimensions, in float32."""
    usual = {"dim": (None,), "keepdim": (False,), "dtype": (None, FP32), "out": (None,)}
    return all(key in usual and value in usual[key] for key, value in args.items())


def _listed_norms(r: Reader, node: fx.Node) -> tuple[Fact | None, ...] | None:
    args = given(node, "input", "p", "dtype")
    listed, p = args.pop("input", None), args.pop("p", 2)
    if p != 2 or isinstance(p, bool) or not _plain_reduction(args):
        return None
    at = r.effects.place[node]
    if isinstance(listed, fx.Node):
        facts = [_of_member(r, listed, i, at) for i in range(len(captured(listed) or ()))]
    else:
        facts = [r.norms(x, at) for x in listed]
    known = [f if f is not None and f.what == "norms" else None for f in facts]
    return tuple(f and Fact("norms", f.of, _via(node, f)) for f in known)


def _of_member(r: Reader, whole: fx.Node, index: int, at: int) -> Fact | None:
    value = r._member(whole, whole, index, at)
    known = value in r.results and _is_fp32(captured(whole)[index])
    return Fact("norms", frozenset([value])) if known else None


def _taken(r: Reader, node: fx.Node) -> Fact | None:
    whole, index = node.args
    made = r.facts.get(whole) if isinstance(whole, fx.Node) else None
    if not isinstance(made, tuple) or not isinstance(index, int):
        return None
    fact = made[index]
    return Fact(fact.what, fact.of, _via(node, fact)) if fact is not None else None


def _squared(r: Reader, node: fx.Node) -> Fact | None:
    args = given(node, "input", "other")
    x, other = args.get("input"), args.get("other", 2)
    same = other is x if called(node) == "mul" else _is_number(other, 2)
    if called(node) == "pow" and _is_number(args.get("other"), 0.5):
        return _root(r, node)
    fact = r.norms(x, r.effects.place[node]) if same and len(args) <= 2 else None
    if fact is None or fact.what != "norms" or not _is_fp32(captured(node)):
        return None
    return Fact("squares", fact.of, _via(node, fact))


def _is_number(value: Any, number: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == number


def _summed(r: Reader, node: fx.Node) -> Fact | None:
    args = given(node, "input", "dim", "keepdim")
    fact = r.fact(args.pop("input", None))
    if fact is None or fact.what != "squares" or not _plain_reduction(args):
        return None
    return Fact("squares", fact.of, _via(node, fact)) if _is_fp32(captured(node)) else None


def _added(r: Reader, node: fx.Node) -> Fact | None:
    args = given(node, "input", "other")
    if len(args) != 2:
        return None
    terms = [a for a in args.values() if not _is_number(a, 0)]
    facts = [r.fact(term) for term in terms]
    known = [f for f in facts if f is not None and f.what == "squares"]
    if not known or len(known) != len(facts) or _shapes(*terms) != 1:
        return None
    return _union(node, known)


def _root(r: Reader, node: fx.Node) -> Fact | None:
    """The root of a whole sum."""
    fact = r.fact(given(node, "input").get("input"))
    value = captured(node)
    if fact is None or fact.what != "squares" or not _is_fp32(value) or value.dim():
        return None
    return Fact("norms", fact.of, _via(node, fact))


_READERS: dict[str, _Read] = {
    **dict.fromkeys(("isfinite", "isnan", "isinf"), _is_finite),
    **dict.fromkeys(("all", "any"), _reduced),
    **dict.fromkeys(("and", "or", "iand", "ior"), _combined),
    **dict.fromkeys(("zeros", "ones", "full", "tensor"), _constant),
    **dict.fromkeys(("stack", "cat"), _gathered),
    **dict.fromkeys(("norm", "vector_norm", "linalg_norm"), _norm),
    **dict.fromkeys(("mul", "pow", "square"), _squared),
    **dict.fromkeys(
        ("view", "reshape", "flatten", "detach", "alias", "to", "bool", "float", "_to_copy"), _same
    ),
    "not": _not,
    "lift_fresh_copy": _same,
    "detach_": _same,
    "_foreach_norm": _listed_norms,
    "getitem": _taken,
    "sum": _summed,
    "add": _added,
    "sqrt": _root,
}
