"""What the nodes of a graph may share, write and differentiate, on the safe side.

A tensor's roots are the storages it may live in: an input's own, the node of an op that is known
to make a new tensor, and for any other op those of all that it was given. Two values of one
tensor are the same if no write to its roots lies between them.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ampgraph.graph import WRITES, captured
from ampgraph.internals.ops import HigherOrderOperator, OpOverload, schema_of
from ampgraph.internals.tensors import is_functorch, set_grad_enabled, storage_of
from ampgraph.passes.spellings import called, is_plain

Root = Any  # a storage's address or a node, only ever compared

# These make new tensors, whatever they are given.
_FRESH = frozenset(
    "mul div add sub neg abs isfinite isnan isinf not and or any all sum pow square sqrt norm "
    "vector_norm stack cat clone _to_copy matmul mm addmm _foreach_mul _foreach_div _foreach_norm "
    "zeros ones full tensor zeros_like ones_like empty_like full_like new_zeros new_ones new_full "
    "where maximum lift_fresh_copy".split()
)
# They change which storage a tensor lives in.
_REBIND = frozenset("set_ resize_ resize_as_ set_data swap_tensors".split())


class Effects:
    """The roots, writes and gradients of one graph; `known` is False if they cannot be told."""

    def __init__(self, gm: fx.GraphModule, grad: bool) -> None:
        self.gm = gm
        self.place = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.known = True
        self._roots: dict[fx.Node, frozenset[Root]] = {}
        self._writes: dict[Root, list[int]] = defaultdict(list)
        self._wants: set[fx.Node] = set()  # inputs that want a gradient reach these
        self._tainted: set[Root] = set()  # as they do what lives here
        self._recorded: dict[fx.Node, bool] = {}
        self._walk(grad)

    def roots(self, node: fx.Node) -> frozenset[Root]:
        """The storages that the node's tensors may live in."""
        return self._roots[node]

    def version(self, node: fx.Node, at: int) -> int:
        """A number that differs if the node's tensor may have been written to in between."""
        return sum(bisect.bisect_left(self._writes[root], at) for root in self.roots(node))

    def touches(self, node: fx.Node, roots: frozenset[Root]) -> bool:
        """Whether the node may read or write what lives in these storages."""
        return any(self.roots(given) & roots for given in node.all_input_nodes)

    def differentiated(self, node: fx.Node) -> bool:
        """Whether autograd may record the node."""
        return self._recorded[node] and any(map(self._wanted, node.all_input_nodes))

    def records(self, node: fx.Node) -> bool:
        """Whether autograd is on where the node stands."""
        return self._recorded[node]

    def _wanted(self, node: fx.Node) -> bool:
        return node in self._wants or bool(self.roots(node) & self._tainted)

    def _walk(self, on: bool) -> None:
        for node, at in self.place.items():
            if node.target is set_grad_enabled:
                on = bool(node.args[0])
            self._recorded[node] = on
            name = called(node)
            self._roots[node] = self._roots_of(node, name)
            written = self._written(node, name)
            for root in written:
                self._writes[root].append(at)
            self._note_gradient(node, written)
            odd = is_functorch(node.target) or str(node.target) in _REBIND
            self.known = self.known and not odd

    def _note_gradient(self, node: fx.Node, written: frozenset[Root]) -> None:
        made = node.op in ("placeholder", "get_attr")
        leaves = pytree.tree_leaves(self._value(node)) if made else ()
        wants = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        asked = node.kwargs.get("requires_grad") or node.target == "requires_grad_"
        recorded = called(node) != "detach" and self.differentiated(node)
        # What an op returns that it wrote to is the tensor it was given.
        passed_on = bool(written) and any(map(self._wanted, node.all_input_nodes))
        if wants or asked or recorded or passed_on:
            self._wants.add(node)
        if recorded:
            self._tainted |= written

    def _value(self, node: fx.Node) -> Any:
        return _attribute(self.gm, node) if node.op == "get_attr" else captured(node)

    def _roots_of(self, node: fx.Node, name: str) -> frozenset[Root]:
        if node.op in ("placeholder", "get_attr"):
            leaves = pytree.tree_leaves(self._value(node))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            self.known = self.known and all(map(is_plain, tensors))
            return frozenset(storage_of(t) if is_plain(t) else node for t in tensors)
        if name in _FRESH and node.kwargs.get("out") is None:
            return frozenset([node])
        found = [self._roots[given] for given in node.all_input_nodes]
        return frozenset().union(*found) or frozenset([node])

    def _written(self, node: fx.Node, name: str) -> frozenset[Root]:
        """The storages that the node may write to."""
        if not node.op.startswith("call") or name == "detach_":  # writes no element
            return frozenset()
        given = node.all_input_nodes
        if isinstance(node.target, OpOverload):
            given = _nodes(list(_written_by_schema(node, node.target)))
        elif name == "amp_unscale":
            given = _nodes(node.args[:2])
        elif _in_place(node, name):
            given = _nodes(node.args[:1]) or given
        elif not _may_write(node):
            return frozenset()
        return frozenset().union(*(self._roots[n] for n in given))


def _nodes(args: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(args, found.append)
    return found


def _written_by_schema(node: fx.Node, op: OpOverload) -> Iterator[Any]:
    for i, argument in enumerate(schema_of(op).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)


def _in_place(node: fx.Node, name: str) -> bool:
    """An op that writes to its first argument, by its name."""
    spelled = name or str(getattr(node.target, "__name__", node.target))
    augmented = getattr(node.target, "__module__", "") == "_operator" and spelled[0] == "i"
    dunder = spelled.startswith("__i") and spelled.endswith("__")
    underscored = spelled.endswith("_") and not spelled.endswith("__")
    return underscored or augmented or dunder or spelled == "setitem"


def _may_write(node: fx.Node) -> bool:
    opaque = node.op == "call_module" or isinstance(node.target, HigherOrderOperator)
    asked = node.kwargs.get("out") is not None or bool(node.kwargs.get("inplace"))
    return WRITES in node.meta or opaque or asked


def _attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    value: Any = gm
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, Tensor) else None
