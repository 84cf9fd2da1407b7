"""Read parameters from low-precision copies that are kept beside them, instead of casting them.

Each copy is a new input of the graph, which the caller of the compiled graph hands over; it must
hold what the cast would have returned. While gradients are wanted each use keeps its own, in the
parameter's dtype.

    w_bf16 = _to_copy(w, bf16)   ->   w_bf16 = shadow_cast(w, low)        (just `low` without grad)

Sound because the parameter has, where the cast stands, the value it came with: nothing in the graph
writes to it; and because nobody else gets hold of the copy: an op that writes to its operand or
hands it on as a view keeps its cast. Views on the way are replayed on the copy, if its elements
then lie as the cast's would.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ampgraph.graph import (
    CAST,
    PASS,
    VALUE,
    WRITES,
    arguments,
    call,
    captured,
    fresh,
    input_path,
    is_mutable,
    like,
    no_guards,
    references,
)
from ampgraph.internals.dynamo import is_from_fsdp, mark_static_input, real_input, source_name
from ampgraph.internals.ops import HigherOrderOperator
from ampgraph.internals.ranks import is_flattened
from ampgraph.internals.tensors import FakeTensorMode, functorch_level, storage_of
from ampgraph.passes.effects import Effects
from ampgraph.passes.insert_casts import SHORT, SITE
from ampgraph.passes.spellings import is_plain
from ampgraph.passes.views import layout, replay, uses, way_to
from ampgraph.passes.writes import run_on_fakes
from ampgraph.shadow import shadow_cast
from ampgraph.state import LOW_DTYPES
from ampgraph.verify import graphs

# They return a new tensor, and are asked most often; others are tried on fake tensors.
_NEW = frozenset(
    {
        operator.matmul,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.baddbmm,
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        nn.functional.linear,
        torch.ops.aten.linear.default,
        torch.ops.aten.matmul.default,
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.baddbmm.default,
    }
)


@dataclass(frozen=True)
class Read:
    """A copy that the graph reads: an input after those it was captured with.

    Attributes:
        name: where the user keeps the parameter.
        place: the parameter's position among the inputs; None for an attribute of the graph.
        attribute: its name, or "".
        dtype: the copy's dtype.
        bytes: the memory the copy takes, shared by all graphs that read it (0 for symbolic sizes).
    """

    name: str
    place: int | None
    attribute: str
    dtype: torch.dtype
    bytes: int


@dataclass
class Copies:
    """The copies that a graph reads, in the order of its new inputs.

    Attributes:
        casts: how many casts they stand in for.
        notes: what is cast as usual, and why.
    """

    reads: list[Read] = field(default_factory=list[Read])
    casts: int = 0
    notes: list[str] = field(default_factory=list[str])


def read_copies(gm: fx.GraphModule, mode: FakeTensorMode, grad: bool) -> Copies:
    """Replace the casts of parameters to a low dtype, in place."""
    reader = CopyReader(gm, mode, grad)
    for node in list(gm.graph.nodes):
        if CAST in node.meta and captured(node).dtype in LOW_DTYPES:
            reader.read(node)
    gm.recompile()
    return reader.finish()


class CopyReader:
    """Rewrites one graph; its bodies keep their casts."""

    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode, grad: bool) -> None:
        self.gm, self.mode, self.grad = gm, mode, grad
        self.inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.last_input = self.inputs[-1] if self.inputs else None
        self.effects = Effects(gm, grad)
        self.written: set[str] | None = None
        self.found = Copies()
        self.lows: dict[tuple[str, torch.dtype], fx.Node] = {}
        self.refused: dict[str, dict[str, None]] = {}

    def read(self, cast: fx.Node) -> None:
        """Read the copy in this cast's place, if it is one of a parameter that has one."""
        param, views = _way(cast)
        if param is None:
            return
        reason = self._refusal(cast, param, views)
        if reason:
            self.refused.setdefault(reason, {})[_name(param)] = None
            return
        with self.gm.graph.inserting_before(cast):
            new = self._read(cast, param)
            for view in views:
                value = captured(view)
                new = self.gm.graph.create_node(
                    view.op, view.target, (new, *view.args[1:]), view.kwargs
                )
                new.meta = {**view.meta, PASS: "read_copies"}
                new.meta[VALUE] = like(value, captured(cast).dtype, self.mode)
        cast.replace_all_uses_with(new)
        self.found.casts += 1
        for node in (cast, *reversed(views)):
            if not node.users:
                self.gm.graph.erase_node(node)

    def _read(self, cast: fx.Node, param: fx.Node) -> fx.Node:
        dtype = captured(cast).dtype
        low = self._low(param, dtype)
        if not self._wants_grad(param):
            return low
        name = f"{param.name}_{SHORT[dtype]}"
        new = self.gm.graph.create_node("call_function", shadow_cast, (param, low), name=name)
        new.meta.update({k: cast.meta[k] for k in SITE if k in cast.meta})
        new.meta[PASS] = "read_copies"
        new.meta[VALUE] = like(captured(param), dtype, self.mode)
        return new

    def _wants_grad(self, param: fx.Node) -> bool:
        return self.grad and bool(captured(param).requires_grad)

    def _low(self, param: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The input for the copy, one for each parameter and dtype."""
        key = (str(param.target), dtype)
        if key not in self.lows:
            self.lows[key] = self._new_input(param, dtype)
        return self.lows[key]

    def _new_input(self, param: fx.Node, dtype: torch.dtype) -> fx.Node:
        value = like(captured(param), dtype, self.mode).detach()
        graph, first = self.gm.graph, next(iter(self.gm.graph.nodes))
        after = self.last_input
        with graph.inserting_before(first) if after is None else graph.inserting_after(after):
            new = graph.placeholder(f"{param.name}_{SHORT[dtype]}_copy")
        new.meta |= {VALUE: value, PASS: "read_copies"}
        mark_static_input(new)
        self.last_input = new
        known = all(type(size) is int for size in value.shape)
        whole = value.numel() * dtype.itemsize if known else 0
        given = param.op == "placeholder"
        place = self.inputs.index(param) if given else None
        attribute = "" if given else str(param.target)
        self.found.reads.append(Read(_name(param), place, attribute, dtype, whole))
        return new

    def _refusal(self, cast: fx.Node, param: fx.Node, views: Sequence[fx.Node]) -> str:
        """Why the cast stays, "" if it need not."""
        value, real = captured(param), real_input(self.gm, param)
        if not isinstance(value, nn.Parameter):
            return "not a parameter"
        if not is_plain(value) or is_flattened(real if real is not None else value):
            return "sharded, or of a class of its own"
        if is_from_fsdp(param):
            return "FullyShardedDataParallel gathers it for each use"
        if real is not None and real.is_inference():
            return "an inference tensor, which counts no writes"
        if not self.effects.known or functorch_level():
            return "in a graph that transforms functions or gives tensors other memory"
        if self._writes_to(param):
            return "the graph may write to it"
        if views and not self._same_through(cast, param, views):
            return "looked at in a way that a copy would not have the layout or gradient of"
        users = [u for u in cast.users if self._hands_on(u, cast)]
        return f"{users[0].name} may hand it on or write to it" if users else ""

    def _writes_to(self, param: fx.Node) -> bool:
        """Whether the graph writes to it; tried where a look at the ops does not rule it out."""
        if not self.effects.version(param, len(self.effects.place)):
            return False
        if self.written is None:
            self.written = self._written()
        return str(param.target) in self.written

    def _written(self) -> set[str]:
        """The inputs that the graph writes to; all of them where it cannot be tried."""
        try:
            values, memory = run_on_fakes(self.gm, self.mode)
        except RuntimeError:
            return {str(node.target) for node in self.effects.place}
        return {str(n.target) for n, value in values.items() if storage_of(value) in memory}

    def _same_through(self, cast: fx.Node, param: fx.Node, views: Sequence[fx.Node]) -> bool:
        """Whether views of the copy lie as the cast does, and their gradients add up the same.

        At most two gradients meet in the parameter, so that their order does not matter.
        """
        if self._wants_grad(param) and not (uses(param) <= 2 and all(uses(v) == 1 for v in views)):
            return False
        low = like(captured(param), captured(cast).dtype, self.mode)
        values = replay(views, low, self.mode)
        return bool(values) and layout(values[-1]) == layout(captured(cast))

    def _hands_on(self, user: fx.Node, operand: fx.Node) -> bool:
        """Whether the node may write to its operand, or return what shares its memory."""
        if user.op not in ("call_function", "call_method") or WRITES in user.meta:
            return True
        if is_mutable(user.target) or isinstance(user.target, HigherOrderOperator):
            return True
        return user.target not in _NEW and self._shares(user, operand)

    def _shares(self, user: fx.Node, operand: fx.Node) -> bool:
        env: dict[fx.Node, Any] = {r: fresh(captured(r), self.mode) for r in references(user)}
        args, kwargs = arguments(user, env)
        try:
            with self.mode, torch.no_grad(), no_guards(self.mode):
                out = call(user, args, kwargs)
        except RuntimeError:
            return True
        memory = storage_of(env[operand])
        leaves = pytree.tree_leaves(out)
        return any(storage_of(leaf) == memory for leaf in leaves if isinstance(leaf, Tensor))

    def finish(self) -> Copies:
        """What was found, with a note for each reason to cast as usual."""
        inside = [
            _name(node)
            for body in list(graphs(self.gm))[1:]
            for node in body.graph.nodes
            if isinstance(captured(node), nn.Parameter)
            and any(CAST in user.meta for user in node.users)
        ]
        if inside:
            self.refused["cast in the body of a higher-order op"] = dict.fromkeys(inside)
        for reason, names in self.refused.items():
            told = f"{', '.join(names)} ({reason})"
            self.found.notes.append(f"weight copies: still cast in each call: {told}")
        return self.found


def _way(cast: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
    """The graph's input that is cast, if it is one, and the views on the way from it."""
    node, views = way_to(cast.args[0])
    held = isinstance(node, fx.Node) and node.op in ("placeholder", "get_attr")
    if not held or not isinstance(node, fx.Node) or not isinstance(captured(node), Tensor):
        return None, []
    return node, views


def _name(node: fx.Node) -> str:
    return input_path(source_name(node)) or str(node.target)
