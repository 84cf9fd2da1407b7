"""What a graph says about unscaled tensors: values, products and facts.

A product makes a value of another; a fact is what an array of the graph tells of values, and is
worked out in `scaling_facts`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ampgraph.graph import captured
from ampgraph.passes.effects import Effects
from ampgraph.passes.spellings import called, given
from ampgraph.state import LOW_DTYPES
from ampgraph.verdict import FP32


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
    """Everything read from one graph: products at once, facts by `scaling_facts.read`.

    Facts of the nodes in `stop` are not built upon.
    """

    def __init__(self, effects: Effects) -> None:
        self.effects = effects
        self.stop: set[fx.Node] = set()
        self.products = [p for node in effects.place for p in self._products(node)]
        self.results = {p.result for p in self.products}
        self.facts: dict[fx.Node, Any] = {}

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
                return self.member(inner, node, node.args[1], at)
            if name in _SAME_ELEMENTS and isinstance(captured(inner), Tensor):
                seen = self.value(inner, at)
                # A reshape may also be a copy, which a later write does not reach.
                return seen if seen == self.value(inner, made) else self._own(node, None, at)
        return self._own(node, None, at)

    def _own(self, node: fx.Node, index: int | None, at: int) -> Value:
        return Value(node, index, self.effects.version(node, at))

    def member(self, whole: fx.Node, node: fx.Node, index: int, at: int) -> Value:
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
        if found is not None or not isinstance(of, fx.Node) or not is_fp32(captured(of)):
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


def is_fp32(value: Any) -> bool:
    """Whether it is a float32 tensor."""
    return isinstance(value, Tensor) and value.dtype == FP32


def _is_scale(of: Any) -> bool:
    value = captured(of) if isinstance(of, fx.Node) else None
    return isinstance(value, Tensor) and value.dim() == 0 and value.dtype in (FP32, *LOW_DTYPES)


def _keeps_dtype(x: Any, y: Any) -> bool:
    both = isinstance(x, Tensor) and isinstance(y, Tensor)
    return both and x.dtype == y.dtype and x.dtype in (FP32, *LOW_DTYPES)


def _rounding(x: Tensor, scale: Tensor, reverse: bool) -> torch.dtype | None:
    """A scale wider than the tensor is rounded first: on a CPU only as the left factor."""
    keeps = x.dtype in (FP32, scale.dtype) or (x.device.type == "cpu" and not reverse)
    return None if keeps else x.dtype


def _rounds_alike(x: Tensor, scale: Tensor) -> bool:
    """A low number beside a wider scale is computed wide on a GPU, unlike a low vector."""
    return bool(x.dim()) or x.dtype in (FP32, scale.dtype) or x.device.type == "cpu"
