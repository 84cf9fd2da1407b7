"""Open a composite: trace one node into the ops autocast's dispatcher sees, casts included.

Sound because the trace runs at the PreDispatch key, above autograd: each op recorded is called
with the very arguments the dispatcher would pass on, in-place ops stay in place, and an op that
has a rule of its own is recorded whole, as autocast excludes itself below it.

    cross_entropy(h: bf16, t)   ->   _to_copy(h, fp32); log_softmax.int; nll_loss_nd
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ampgraph.decision import Decision
from ampgraph.dispatch import Law, Verdict, carry_out, judge, opens, repair, tensors
from ampgraph.graph import CAST, op_name
from ampgraph.internals import FakeTensorMode, OpOverload, composite_kernel, make_fx
from ampgraph.policy import Category


class LawTable(dict[Any, Any]):
    """A decomposition table that is the law: make_fx asks it about every op it meets."""

    def __init__(self, law: Law) -> None:
        super().__init__()
        self.law = law
        self.rows: list[tuple[OpOverload, Verdict, tuple[torch.dtype, ...], int]] = []

    def __contains__(self, op: object) -> bool:
        return isinstance(op, OpOverload)

    def __getitem__(self, op: OpOverload) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.apply(op, args, kwargs)

    def apply(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if op is torch.ops.aten._to_copy.default:
            return NotImplemented
        verdict = judge(op, args, kwargs, self.law)
        if verdict.acts:
            new_args, new_kwargs = carry_out(verdict, args, kwargs, cast)
            self._note(op, verdict, new_args, new_kwargs, len(verdict.casts))
            return verdict.op(*new_args, **new_kwargs)
        if verdict.category == Category.FOLLOW and opens(op, tensors((args, kwargs))):
            return composite_kernel(op)(*args, **kwargs)
        self._note(op, verdict, args, kwargs, 0)
        return NotImplemented

    def _note(
        self, op: OpOverload, verdict: Verdict, args: object, kwargs: object, casts: int
    ) -> None:
        if self.rows and casts == 0 and self.rows[-1][3] > 0 and self.rows[-1][1].op is op:
            return  # the same call again, its arguments now cast
        self.rows.append((op, verdict, tuple(t.dtype for t in tensors((args, kwargs))), casts))


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The cast this compiler writes, recorded by the tracer as one node."""
    return torch.ops.aten._to_copy.default(tensor, dtype=dtype)


def open_composite(
    function: Callable[..., Any], inputs: Sequence[Any], law: Law, mode: FakeTensorMode
) -> tuple[fx.GraphModule, list[tuple[OpOverload, Verdict, tuple[torch.dtype, ...], int]]]:
    """Trace `function(*inputs)` under `law`; its graph, and a row for each op in it."""
    table = LawTable(law)
    with torch.no_grad():
        gm = make_fx(
            function,
            decomposition_table=table,
            tracing_mode="fake",
            pre_dispatch=True,
            _allow_non_fake_inputs=True,
        )(*inputs)
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten._to_copy.default:
            node.meta[CAST] = op_name(node.target)
    return gm, table.rows


__all__ = ["Decision", "cast", "open_composite", "repair"]
