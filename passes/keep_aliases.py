"""Let outputs that shared memory when they were captured share it still, once they are cast.

The code after a graph break may write to one and read the other. So what they look at is cast
once, and the way from it to each of them is taken again on the cast.

    return h, h[0]   ->   c = _to_copy(h, fp32); return c, c[0]        (h is bf16, was fp32)

Sound where each step of that way still hands on the elements as they are: as a view, or as a copy
that widens them (`h.float()`, which was `h` itself) and to which nothing is written afterwards.
Anything else is refused: the program would mean something else in low precision.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ampgraph.errors import RewriteError
from ampgraph.graph import (
    PASS,
    VALUE,
    arguments,
    call,
    captured,
    fresh,
    like,
    no_guards,
    references,
    source_of,
)
from ampgraph.internals.tensors import FakeTensorMode, is_functorch_wrapped, storage_of
from ampgraph.passes.cast_outputs import cast_before, output_of
from ampgraph.passes.plan import Plan, Plans
from ampgraph.verdict import tensors, widens


@dataclass(frozen=True)
class Way:
    """How an output was reached from the tensor it looks at: (from, to), one step a node."""

    base: fx.Node
    steps: tuple[tuple[fx.Node, fx.Node], ...]


class Keeper:
    """Replaces groups of outputs. `made` has the new graph's node for each captured one."""

    def __init__(
        self,
        before: fx.GraphModule,
        after: fx.GraphModule,
        plans: Plans,
        made: Mapping[fx.Node, Any],
        mode: FakeTensorMode,
    ) -> None:
        self.before, self.after, self.plans, self.made, self.mode = before, after, plans, made, mode
        self.order = {node: i for i, node in enumerate(before.graph.nodes)}

    def run(self, changed: Mapping[int, torch.dtype]) -> set[int]:
        """Replace the outputs that share memory; the positions of those it replaced."""
        was = pytree.tree_leaves(output_of(self.before).args[0])
        output = output_of(self.after)
        leaves, spec = pytree.tree_flatten(output.args[0])
        done: set[int] = set()
        for memory, group in _groups(was).items():
            ways = {i: self._way(was[i], memory) for i in group}
            shared = len(group) > 1 or any(way.base.op == "placeholder" for way in ways.values())
            if shared and changed.keys() & group:
                leaves = self._replace(output, leaves, ways)
                done |= set(group)
        output.args = (pytree.tree_unflatten(leaves, spec),)
        if done:
            self.after.recompile()
        return done

    def _way(self, node: fx.Node, memory: int) -> Way:
        steps: list[tuple[fx.Node, fx.Node]] = []
        source = _looks_at(node, memory)
        while source is not None:
            steps.insert(0, (source, node))
            node, source = source, _looks_at(source, memory)
        if steps and not isinstance(captured(node), Tensor):
            node = steps.pop(0)[1]  # made by an op that returns several
        return Way(node, tuple(steps))

    def _replace(self, output: fx.Node, leaves: list[Any], ways: Mapping[int, Way]) -> list[Any]:
        base = next(iter(ways.values())).base
        for way in ways.values():
            if way.base is not base:
                raise _refused(way.base, "is made beside others in the same memory")
            for step in way.steps:
                self._check(*step)
        wanted, now = captured(base), self.plans.env[base]
        new = self.made[base]
        if now.dtype != wanted.dtype:
            new = cast_before(output, new, wanted.dtype, self.mode, "outputs='original'")
        return [
            self._again(output, new, ways[i]) if i in ways else leaf
            for i, leaf in enumerate(leaves)
        ]

    def _check(self, source: fx.Node, node: fx.Node) -> None:
        """Raise where the step changes elements, or is a copy that misses a later write."""
        before, after = self.plans.env[source], self.plans.env[node]
        plan = self.plans.of.get(node, Plan())
        in_place = plan.mutates and not (plan.inline or plan.region or plan.bodies)
        if in_place or (not plan.changes and self._is_view(source, node)):
            return
        exact = all(
            a.dtype == b.dtype or widens(b.dtype, a.dtype)
            for a, b in zip(tensors(after), tensors(before), strict=False)
        )
        if plan.inline is not None or not exact:
            raise _refused(node, "computes in another precision now")
        if any(self.order[n] > self.order[node] for n in self._writes(source)):
            raise _refused(node, "is a copy now, and is written to or what it was copied from is")

    def _is_view(self, source: fx.Node, node: fx.Node) -> bool:
        value = fresh(self.plans.env[source], self.mode)
        return _shares(self._called(source, node, value), value)

    def _called(self, source: fx.Node, node: fx.Node, value: Any) -> Any:
        args, kwargs = arguments(node, {**self.plans.env, source: value})
        with self.mode, torch.no_grad(), no_guards(self.mode):
            return call(node, args, kwargs)

    def _writes(self, source: fx.Node) -> Iterator[fx.Node]:
        """The nodes that write to the memory that `source` had when it was captured."""
        for node, plan in self.plans.of.items():
            if plan.mutates and any(
                _shares(captured(r), captured(source)) for r in references(node)
            ):
                yield node

    def _again(self, output: fx.Node, base: fx.Node, way: Way) -> fx.Node:
        """The way once more, starting at the new base."""
        new, value = base, like(captured(base), captured(base).dtype, self.mode)
        start = value
        for source, node in way.steps:
            if _layout(captured(source)) == _layout(captured(node)):
                continue  # an op in place, or one with nothing to do
            if self.plans.of.get(node, Plan()).mutates:
                raise _refused(node, "changes the shape in place")
            value = self._called(source, node, value)
            if not _shares(value, start):
                raise _refused(node, "copies what lies in another order now")
            new = self._copy(output, source, node, new)
            new.meta[VALUE] = value
        reached = way.steps[-1][1] if way.steps else way.base
        if captured(way.base).requires_grad and not captured(reached).requires_grad:
            with output.graph.inserting_before(output):
                new = output.graph.call_method("detach", (new,))
            new.meta |= {PASS: "keep_aliases", VALUE: value.detach()}
        return new

    def _copy(self, output: fx.Node, source: fx.Node, node: fx.Node, new: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda n: new if n is source else self.made[n]
        )
        with output.graph.inserting_before(output):
            again = output.graph.create_node(node.op, node.target, args, kwargs, node.name)
        again.meta = {**node.meta, PASS: "keep_aliases"}
        return again


def _groups(outputs: list[Any]) -> dict[int, list[int]]:
    """The positions of output tensors by the memory they had when captured."""
    found: dict[int, list[int]] = {}
    for i, node in enumerate(outputs):
        value = captured(node) if isinstance(node, fx.Node) else None
        if isinstance(value, Tensor) and value.layout == torch.strided:
            found.setdefault(storage_of(value), []).append(i)
    return found


def _looks_at(node: fx.Node, memory: int) -> fx.Node | None:
    """The operand in this memory, where the node is a view of one."""
    for reference in references(node):
        if memory in _memories(captured(reference)):
            return reference
    return None


def _memories(value: Any) -> set[int]:
    return {storage_of(t) for t in tensors(value) if _has_memory(t)}


def _has_memory(tensor: Tensor) -> bool:
    """Sparse tensors and those inside of vmap and the like have none of their own."""
    return tensor.layout == torch.strided and not is_functorch_wrapped(tensor)


def _shares(one: Any, other: Any) -> bool:
    return bool(_memories(one) & _memories(other))


def _layout(value: Any) -> Any:
    """Where the elements lie, as text: comparing symbolic sizes would leave guards."""
    if not isinstance(value, Tensor):
        return value
    return value.dtype, str((value.size(), value.stride(), value.storage_offset()))


def _refused(node: fx.Node, why: str) -> RewriteError:
    source = source_of(node)
    return RewriteError(
        f"outputs='original' returns tensors that share memory, of which {node.name} {why}",
        where=f"node {node.name}" + (f", {source}" if source else ""),
        cure="take outputs='autocast', or ampgraph.compile, which captures the program as it runs "
        "under autocast",
    )


def keep_aliases(
    before: fx.GraphModule,
    after: fx.GraphModule,
    plans: Plans,
    made: Mapping[fx.Node, Any],
    mode: FakeTensorMode,
    changed: Mapping[int, torch.dtype],
) -> set[int]:
    """Cast the outputs that share memory, `changed` among them; the positions that were done."""
    return Keeper(before, after, plans, made, mode).run(changed)
