"""The order of the passes. Decide first, rewrite second, tidy third, check last."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ampgraph import settings
from ampgraph.decision import CastCounts, Decision
from ampgraph.graph import captured, fake_mode_of, op_name
from ampgraph.internals.tensors import FakeTensorMode
from ampgraph.passes.cast_outputs import cast_outputs, output_of
from ampgraph.passes.decide import Decider
from ampgraph.passes.fold_casts import fold_casts
from ampgraph.passes.fuse_scaling import fuse_scaling
from ampgraph.passes.insert_casts import Inserter
from ampgraph.passes.keep_aliases import keep_aliases
from ampgraph.passes.plan import Plans
from ampgraph.passes.read_copies import Copies, Read, read_copies
from ampgraph.passes.rows import notes_of
from ampgraph.place import NOWHERE, Place
from ampgraph.policy import Policy
from ampgraph.state import OFF, AutocastState
from ampgraph.verify import count_casts, graphs, same_dtypes, verify

log = logging.getLogger(__name__)
Outputs = Literal["autocast", "original"]


@dataclass
class Program:
    """What the passes hand on: the captured graph, the plans made for it, the graph after."""

    before: fx.GraphModule
    mode: FakeTensorMode
    policies: Mapping[str, Policy]
    state: AutocastState
    outputs: Outputs
    grad: bool
    strict: bool = False
    place: Place = NOWHERE
    weight_copies: bool = False
    plans: Plans = field(default_factory=Plans)
    after: fx.GraphModule | None = None
    made: Mapping[fx.Node, Any] = field(default_factory=dict[fx.Node, Any])  # from before to after
    inserted: int = 0
    fused: tuple[Decision, ...] = ()
    copies: Copies = field(default_factory=Copies)

    @property
    def graph(self) -> fx.GraphModule:
        """The graph as it stands."""
        return self.after if self.after is not None else self.before


def _decide(p: Program) -> None:
    p.plans = Decider(p.before, p.mode, p.policies, p.state, p.grad, p.place).run()


def _insert_casts(p: Program) -> None:
    inserter = Inserter(p.before, p.plans, p.mode, p.grad)
    p.after, p.made = inserter.run(), inserter.env


def _restore_outputs(p: Program) -> None:
    if p.outputs == "original":
        changed = _changed_outputs(p)
        done = keep_aliases(p.before, p.graph, p.plans, p.made, p.mode, changed)
        alone = {i: dtype for i, dtype in changed.items() if i not in done}
        cast_outputs(p.graph, alone, p.mode, "outputs='original'")
    p.inserted = count_casts(p.graph)


def _changed_outputs(p: Program) -> dict[int, Any]:
    """The positions of outputs whose dtype the rewrite changed, with the dtype they had."""
    before = pytree.tree_leaves(output_of(p.before).args[0])
    now = pytree.tree_leaves(p.plans.output)
    pairs = zip(before, now, strict=True)
    changed: dict[int, Any] = {}
    for i, (node, value) in enumerate(pairs):
        was = captured(node) if isinstance(node, fx.Node) else None
        if isinstance(was, Tensor) and isinstance(value, Tensor) and was.dtype != value.dtype:
            changed[i] = was.dtype
    return changed


def _fold_casts(p: Program) -> None:
    for gm in graphs(p.graph):
        fold_casts(gm, p.mode, p.grad)


def _fuse_scaling(p: Program) -> None:
    if not p.strict:  # a fused norm is rounded differently
        p.fused = fuse_scaling(p.graph, p.mode, p.grad)


def _read_copies(p: Program) -> None:
    if p.weight_copies:
        p.copies = read_copies(p.graph, p.mode, p.grad)


def _verify(p: Program) -> None:
    verify(p.graph)
    if settings.settings().verify == "full":
        again = Decider(p.graph, p.mode, p.policies, OFF, p.grad, p.place).run()
        for node, value in again.env.items():
            same_dtypes(node, value)


PASSES: tuple[Callable[[Program], None], ...] = (
    _decide,
    _insert_casts,
    _restore_outputs,
    _fold_casts,
    _fuse_scaling,
    _read_copies,
    _verify,
)


@dataclass(frozen=True)
class Rewritten:
    """A rewritten graph beside the captured one, and everything there is to say about it."""

    before: fx.GraphModule
    after: fx.GraphModule
    decisions: tuple[Decision, ...]
    casts: CastCounts
    seconds: float
    notes: tuple[str, ...]
    state: AutocastState
    grad: bool
    copies: tuple[Read, ...] = ()


def rewrite_graph(
    gm: fx.GraphModule,
    *,
    policies: Mapping[str, Policy],
    state: AutocastState,
    outputs: Outputs,
    grad: bool,
    strict: bool = False,
    place: Place = NOWHERE,
    weight_copies: bool = False,
) -> Rewritten:
    """Run every pass over a captured graph, which is left as it is.

    Args:
        gm: a Dynamo, symbolic or pre-dispatch graph whose nodes have fake values in their meta.
        policies: the policy of each device type; torch.autocast's own where none is given.
        state: the autocast state at the graph's entry.
        outputs: "autocast" returns what the ops return, "original" the captured dtypes.
        grad: whether gradients may be wanted: then every use has a cast of its own.
        strict: leave out what rounds differently from eager.
        place: the modules around the graph, which module rules may mean.
        weight_copies: read parameters from copies: the new graph's last inputs.
    """
    started = time.perf_counter()
    program = Program(
        gm, fake_mode_of(gm), policies, state, outputs, grad, strict, place, weight_copies
    )
    for run in PASSES:
        _logged(run, program)
    left, copied = count_casts(program.graph), program.copies.casts
    return Rewritten(
        before=gm,
        after=program.graph,
        decisions=program.plans.rows + program.fused,
        casts=CastCounts(program.inserted, program.inserted - copied - left, left, copied),
        seconds=time.perf_counter() - started,
        notes=(*program.plans.notes, *notes_of(program.fused), *program.copies.notes),
        state=state,
        grad=grad,
        copies=tuple(program.copies.reads),
    )


def _logged(run: Callable[[Program], None], program: Program) -> None:
    """Run one pass; at DEBUG level tell what it changed (TORCH_LOGS="+ampgraph")."""
    if not log.isEnabledFor(logging.DEBUG):
        run(program)
        return
    before = _op_counts(program.graph)
    run(program)
    after = _op_counts(program.graph)
    name = run.__name__.strip("_")
    changed = {op: after[op] - before[op] for op in before | after if after[op] != before[op]}
    told = ", ".join(f"{op} {count:+d}" for op, count in sorted(changed.items()))
    log.debug("%s: %s", name, told or "no change")


def _op_counts(gm: fx.GraphModule) -> Counter[str]:
    return Counter(op_name(n.target) for g in graphs(gm) for n in g.graph.nodes if "call" in n.op)
