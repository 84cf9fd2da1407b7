"""Read checks, norms and sums as what they tell of tensors, in any spelling.

Facts follow from facts by a small algebra:

    isfinite(x)                 fine {x}        and of fine arrays, or of bad ones: their union
    isnan(x), isinf(x)          bad {x}         not: fine is bad, bad is fine
    y, an unscaled tensor       norms {y}       all of fine, any of bad: a flag
    y * y, squares of norms     squares {y}     sum of squares: squares, norm of norms: norms
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ampgraph.graph import captured
from ampgraph.passes.scaling_patterns import Fact, Reader, is_fp32
from ampgraph.passes.spellings import called, given
from ampgraph.verdict import FP32

_Read = Callable[[Reader, fx.Node], Any]


def read(r: Reader) -> None:
    """Read the facts of the graph again, in its order."""
    r.facts.clear()
    for node in r.effects.place:
        reads = _frozen if node.op == "get_attr" else _READERS.get(called(node))
        fact = reads(r, node) if reads is not None and _unwritten(node) else None
        if fact is not None:
            r.facts[node] = fact


def _unwritten(node: fx.Node) -> bool:
    return node.kwargs.get("out") is None


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
    if p not in wanted or isinstance(p, bool) or not is_fp32(captured(node)):
        return None
    return Fact("norms", fact.of, _via(node, fact))


def _plain_reduction(args: dict[str, Any]) -> bool:
    """Over all dimensions, in float32."""
    usual = {"dim": (None,), "keepdim": (False,), "dtype": (None, FP32), "out": (None,)}
    return all(key in usual and value in usual[key] for key, value in args.items())


def _listed_norms(r: Reader, node: fx.Node) -> tuple[Fact | None, ...] | None:
    args = given(node, "input", "p", "dtype")
    listed: Any = args.pop("input", None)
    p: Any = args.pop("p", 2)
    if type(p) is bool or p != 2 or not _plain_reduction(args):
        return None
    at = r.effects.place[node]
    if isinstance(listed, fx.Node):
        facts = [_of_member(r, listed, i, at) for i in range(len(captured(listed) or ()))]
    else:
        facts = [r.norms(x, at) for x in listed]
    known = [f if f is not None and f.what == "norms" else None for f in facts]
    return tuple(f and Fact("norms", f.of, _via(node, f)) for f in known)


def _of_member(r: Reader, whole: fx.Node, index: int, at: int) -> Fact | None:
    value = r.member(whole, whole, index, at)
    known = value in r.results and is_fp32(captured(whole)[index])
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
    if fact is None or fact.what != "norms" or not is_fp32(captured(node)):
        return None
    return Fact("squares", fact.of, _via(node, fact))


def _is_number(value: Any, number: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == number


def _summed(r: Reader, node: fx.Node) -> Fact | None:
    args = given(node, "input", "dim", "keepdim")
    fact = r.fact(args.pop("input", None))
    if fact is None or fact.what != "squares" or not _plain_reduction(args):
        return None
    return Fact("squares", fact.of, _via(node, fact)) if is_fp32(captured(node)) else None


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
    if fact is None or fact.what != "squares" or not is_fp32(value) or value.dim():
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
