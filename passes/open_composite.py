"""Open a composite: trace one node into the ops autocast's dispatcher sees, casts included.

Sound because the trace runs at the PreDispatch key, above autograd: each op recorded is called
with the very arguments the dispatcher would pass on, in-place ops stay in place, and an op that
has a rule of its own is recorded whole, as autocast excludes itself below it.

    cross_entropy(h: bf16, t)   ->   log_softmax.int(h, 1, bf16); _to_copy(.., fp32); nll_loss
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ampgraph.dispatch import judge
from ampgraph.graph import CAST, captured, op_name
from ampgraph.internals.ops import OpOverload, composite_kernel, make_fx
from ampgraph.listener import Call, carry_out, opens
from ampgraph.mend import mend
from ampgraph.policy import Category
from ampgraph.verdict import REPAIR, Law, Verdict, tensors, widens


@dataclass
class Inner:
    """One op that was recorded: what was decided for it, and how it was called."""

    op: OpOverload
    verdict: Verdict
    dtypes_in: tuple[torch.dtype, ...]
    dtypes_out: tuple[torch.dtype, ...] = ()


class Opener:
    """The law in the form make_fx asks for: a decomposition for every op the node was seen to call.

    An op with nothing to do to it answers NotImplemented, and is recorded as it is; so does a
    composite in which nothing was seen to be done, such as a dropout between two listed ops.
    """

    def __init__(self, law: Law, calls: Sequence[Call]) -> None:
        self.law = law
        self.acting = {call.op for made in calls for call in made.all() if call.acts}
        self.mended = {
            _signature(call.op, call.inputs)
            for made in calls
            for call in made.all()
            if call.verdict.category == REPAIR
        }
        self.widened: dict[int, tuple[Tensor, Tensor]] = {}
        self.found: list[Inner] = []
        self.again: OpOverload | None = None  # called once more, its arguments now cast

    def table(self, calls: Sequence[Call]) -> dict[OpOverload, Callable[..., Any]]:
        """Decompositions for these ops and the ones inside them."""
        return {call.op: self._for(call.op) for made in calls for call in made.all()}

    def _for(self, op: OpOverload) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.apply(op, args, kwargs)

    def apply(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        verdict = judge(op, args, kwargs, self.law)
        if not verdict.acts and _signature(op, (args, kwargs)) in self.mended:
            verdict = mend(op, args, kwargs) or verdict
        if verdict.acts:
            new_args, new_kwargs = carry_out(verdict, args, kwargs, self.cast)
            self._note(op, verdict, new_args, new_kwargs)
            self.again = verdict.op
            out = verdict.op(*new_args, **new_kwargs)
            self.again = None
            return out
        follows = verdict.category == Category.FOLLOW and not verdict.closed and op in self.acting
        if follows and opens(op, tensors((args, kwargs))):
            return composite_kernel(op)(*args, **kwargs)
        if self.again is not op:
            self._note(op, verdict, args, kwargs)
        return NotImplemented

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The cast this compiler writes, recorded by the tracer as one node.

        What a repair has widened is cast from what it was before: the widening was exact.
        """
        narrow = self.widened.get(id(tensor), (tensor, tensor))[1]
        if narrow.dtype == dtype:
            return narrow
        made: Tensor = torch.ops.aten._to_copy.default(narrow, dtype=dtype)
        if widens(narrow.dtype, dtype):
            self.widened[id(made)] = (made, narrow)  # kept alive, so that its id stays its own
        return made

    def _note(self, op: OpOverload, verdict: Verdict, args: object, kwargs: object) -> None:
        self.found.append(Inner(op, verdict, tuple(t.dtype for t in tensors((args, kwargs)))))


def _signature(op: OpOverload, args: object) -> tuple[Any, ...]:
    return op, tuple(t.dtype for t in tensors(args))


def open_composite(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    law: Law,
    calls: Sequence[Call],
) -> tuple[fx.GraphModule, list[Inner]]:
    """Trace `function(*inputs)`, seen to make `calls`, under `law`: its graph and the ops in it."""
    opener = Opener(law, calls)
    gm = make_fx(
        function,
        decomposition_table=opener.table(calls),
        tracing_mode="fake",
        pre_dispatch=True,
        _allow_non_fake_inputs=True,
    )(*inputs)
    for node in reversed(gm.graph.nodes):
        if node.target is torch.ops.aten._to_copy.default:
            node.meta[CAST] = op_name(node.target)
            if not node.users:
                gm.graph.erase_node(node)
    _results(gm, opener.found)
    return gm, opener.found


def _results(gm: fx.GraphModule, found: Sequence[Inner]) -> None:
    """Note what the ops return: the same ops stand in the graph in the same order."""
    waiting = list(found)
    for node in gm.graph.nodes:
        if waiting and CAST not in node.meta and node.target is waiting[0].verdict.op:
            waiting.pop(0).dtypes_out = tuple(t.dtype for t in tensors(captured(node)))
