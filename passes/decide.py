"""Decide, for every node, what precision its ops compute in and why; edit nothing.

The graph is walked once in order, on fake tensors that carry the dtypes of the *rewritten*
program. Regions keep a stack; each other node is run under the law (`ampgraph.dispatch`), which
shows the ops autocast would see and what it would do to them. From that a `Plan` is written:
casts on the node's own operands where its op is one dispatcher op, the opened composite where a
listed op hides deeper, nothing where nothing changes.

Sound because the walk is autocast's own dispatch, op by op, in program order: a decision depends
only on the op, its arguments' dtypes and the state, all of which are known at that point.
"""

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ampgraph.decision import Decision
from ampgraph.dispatch import Call, DataDependentError, Law, Listener, tensors, widest
from ampgraph.errors import AmpgraphError, RewriteError
from ampgraph.graph import (
    Operand,
    arguments,
    call,
    captured,
    error_trace,
    fresh,
    like,
    module_of,
    module_stack,
    no_guards,
    op_name,
    operands,
    source_of,
)
from ampgraph.internals import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    disable_autocast,
    functorch_level,
    functorch_unwound,
    pre_dispatch,
    quiet_fake_errors,
    schema_of,
)
from ampgraph.oplists.scalars import CARRIERS, FACTORIES, VALUE_SCALARS
from ampgraph.passes.bodies import plan_higher_order
from ampgraph.passes.open_composite import open_composite
from ampgraph.passes.plan import Cast, Plan, Plans, Position
from ampgraph.passes.regions import is_region, step
from ampgraph.passes.transforms import transformed
from ampgraph.policy import Category, Policy
from ampgraph.state import LOW_DTYPES, AutocastState


class Decider:
    """One walk over one graph. `policies` by device type, `state` at the graph's entry."""

    def __init__(
        self,
        gm: fx.GraphModule,
        mode: FakeTensorMode,
        policies: Mapping[str, Policy],
        state: AutocastState,
        grad: bool = True,
    ) -> None:
        self.gm, self.mode, self.policies, self.state = gm, mode, policies, state
        self.grad = grad
        self.plans = Plans()
        self.env = self.plans.env
        self.regions: dict[fx.Node, Any] = {}
        self.lowered: set[fx.Node] = set()  # made low by our casts
        self.huge: set[fx.Node] = set()  # may hold a finite constant beyond a low dtype's range
        self.cache: dict[Any, Plan] = {}
        self.bodies: dict[Any, Any] = {}  # rewritten bodies of nested regions, by version

    def run(self, inputs: Sequence[Any] | None = None) -> Plans:
        """Plan the whole graph; `inputs` replace the captured values of its placeholders."""
        given = iter(inputs) if inputs is not None else None
        with functorch_unwound():
            self._walk(given)
        return self.plans

    def _walk(self, given: Iterator[Any] | None) -> None:
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                value = next(given) if given is not None else captured(node)
                self.env[node] = fresh(value, self.mode)
            elif node.op == "get_attr":
                self.env[node] = self._attribute(node)
            elif node.op == "output":
                self.plans.output = arguments(node, self.env)[0][0]
            else:
                plan = self._plan(node)
                self.plans.of[node], self.env[node] = plan, plan.value

    def nested(
        self, body: fx.GraphModule, inputs: Sequence[Any] | None, state: AutocastState
    ) -> Plans:
        """Plan the body of a higher-order op, under the same policies."""
        return Decider(body, self.mode, self.policies, state, self.grad).run(inputs)

    def _attribute(self, node: fx.Node) -> Any:
        value: Any = operator.attrgetter(str(node.target))(self.gm)
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, FakeTensor):
            return fresh(value, self.mode)
        return fresh(self.mode.from_tensor(value, static_shapes=True), self.mode)

    def _plan(self, node: fx.Node) -> Plan:
        if is_region(node):
            self.state = step(node, self.state, self.regions)
            return Plan(erase=True)
        if isinstance(node.target, HigherOrderOperator):
            return plan_higher_order(self, node)
        inside = transformed(node, self.env, self.quiet)
        if inside is not None:
            return Plan(value=inside[0])
        here = operands(node, self.env)
        opaque = node.op == "call_module"  # left by inline_modules: it computes nothing
        if opaque or not any(isinstance(o.value, Tensor) for o in here):
            return self._without_tensors(node)
        law = self.law(node)
        key = _key(node, here, law)
        if key is None or key not in self.cache:
            plan = self._decide(node, here, law)
            if key is not None:
                self.cache[key] = plan
        else:
            plan = _renamed(self.cache[key], node)
        plan = self._kept_finite(node, plan)
        self._taint(node, plan)
        return plan

    def law(self, node: fx.Node) -> Law:
        """The law at this node: the state, and the innermost module rule that matches it."""
        stack = module_stack(node)
        state, rule = self.state, None
        for device_type in state.enabled():
            found = self.policy(device_type).module_rule_for(stack)
            if found is not None and found.dtype == torch.float32:
                rule = found
            elif found is not None:
                state = state.entering(device_type, found.dtype, True)
        lowered = any(r in self.lowered for r in node.all_input_nodes)
        return Law(self.policies, state, rule, lowered)

    def policy(self, device_type: str) -> Policy:
        return self.policies.get(device_type) or Policy.autocast(device_type)

    def _without_tensors(self, node: fx.Node) -> Plan:
        """Sizes, flags, factories: nothing autocast would see, so the captured value stands."""
        value = captured(node)
        if value is None and node.target in _PURE:
            args, kwargs = arguments(node, self.env)
            value = call(node, args, kwargs)
        if op_name(node.target) in FACTORIES and self._is_huge(node.args, node.kwargs):
            self.huge.add(node)
        return Plan(value=fresh(value, self.mode))

    def _decide(self, node: fx.Node, here: list[Operand], law: Law) -> Plan:
        args, kwargs = arguments(node, self.env)
        listener = Listener(law)
        try:
            with self.quiet(), pre_dispatch(listener):
                value = call(node, args, kwargs)
        except DataDependentError:
            return self._unseen(node, here, law, listener.calls)
        except AmpgraphError as error:
            error.where = error.where or _where(node)
            raise
        except Exception as error:
            raise RewriteError(
                f"{op_name(node.target)} does not run with the dtypes autocast gives it: "
                f"{error_trace(error)}",
                where=_where(node),
                cure="keep this op in float32 with Policy.deny(op) or a module rule, or cast its "
                "inputs to one dtype in the model",
            ) from error
        return self._plan_of_calls(node, here, law, listener.calls, value)

    @contextlib.contextmanager
    def quiet(self) -> Generator[None]:
        """Fake tensors, no autocast, no autograd, no new guards."""
        with disable_autocast(), torch.no_grad(), no_guards(self.mode), quiet_fake_errors():
            with self.mode:
                yield

    def _plan_of_calls(
        self, node: fx.Node, here: list[Operand], law: Law, calls: list[Call], value: Any
    ) -> Plan:
        mutates = any(schema_of(c.op).is_mutable for c in calls)
        if not any(c.acts for c in calls):
            rows = (_row(node, calls),) if calls else ()
            return Plan(rows=rows, value=value, mutates=mutates)
        direct = _direct(node, here, calls)
        if direct is None:
            opened = self._opened(node, here, law, calls)
            return dataclasses.replace(opened, mutates=mutates)
        return dataclasses.replace(direct, value=value, mutates=mutates)

    def _opened(self, node: fx.Node, here: list[Operand], law: Law, calls: list[Call]) -> Plan:
        varying = [o for o in here if isinstance(o.value, (Tensor, *_SYMS))]
        function = _as_function(node, self.env, varying)
        with self.quiet():
            body, found = open_composite(function, [o.value for o in varying], law, calls)
        rows = tuple(
            _row_of(node, op_name(op), verdict.category, verdict.because, dtypes, (), casts)
            for op, verdict, dtypes, casts in found
        )
        value = fx.map_arg(_output(body), captured)
        notes = tuple(f"{r.node}: {r.op} {r.because}" for r in rows if r.category in _NOTED)
        return Plan(
            rows=rows,
            inline=body,
            inputs=tuple((o.index, o.path) for o in varying),
            value=fresh(value, self.mode),
            notes=notes,
        )

    def _unseen(self, node: fx.Node, here: list[Operand], law: Law, calls: list[Call]) -> Plan:
        """The plan of a node whose result depends on elements: fake tensors cannot run it.

        Its own rule is known; a composite is kept whole, for what is deeper cannot be seen.
        """
        single = len(calls) == 1 and not calls[0].inner
        now = calls[0].dtypes_in if single else [t.dtype for t in tensors([o.value for o in here])]
        value = self._remapped(node, [d for d in now if d.is_floating_point])
        if single:
            return self._plan_of_calls(node, here, law, calls, value)
        rows = (_row(node, calls),) if calls else ()
        floats = any(t.is_floating_point() for t in tensors(value))
        note = f"{node.name}: {op_name(node.target)} depends on elements inside: kept as captured"
        return Plan(rows=rows, value=value, notes=(note,) if floats else ())

    def _remapped(self, node: fx.Node, now: Sequence[torch.dtype]) -> Any:
        """The captured value of a data-dependent op, in the dtype of its input now."""
        before = [
            leaf.dtype
            for reference in node.all_input_nodes
            for leaf in tensors(captured(reference))
            if leaf.is_floating_point()
        ]
        table = dict(zip(before, now, strict=False))

        def one(leaf: object) -> object:
            if not isinstance(leaf, Tensor) or leaf.dtype not in table:
                return leaf
            return like(leaf, table[leaf.dtype], self.mode)

        return fresh(pytree.tree_map(one, captured(node)), self.mode)

    # constants that do not fit -----------------------------------------------------------------

    def _limit(self) -> float:
        low = [d for d in self.state.enabled().values() if d in LOW_DTYPES]
        return min((torch.finfo(d).max for d in low), default=float("inf"))

    def _is_huge(self, *arguments: object) -> bool:
        limit = self._limit()
        found: list[float] = []
        for leaf in pytree.tree_leaves(arguments):
            if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
                found.append(abs(float(leaf)))
        return any(limit < v < float("inf") for v in found)

    def _taint(self, node: fx.Node, plan: Plan) -> None:
        low = [t for t in tensors(plan.value) if t.dtype in LOW_DTYPES]
        if low and (
            any(c.dtype in LOW_DTYPES for c in plan.casts)
            or plan.inline is not None
            or any(r in self.lowered for r in node.all_input_nodes)
        ):
            self.lowered.add(node)
        names = {"aten::" + row.op.partition(".")[2] for row in plan.rows}
        born = bool(names & VALUE_SCALARS.keys()) and self._is_huge(node.args, node.kwargs)
        carried = names <= CARRIERS and any(r in self.huge for r in node.all_input_nodes)
        if born or carried:
            self.huge.add(node)
            if plan.mutates and node.all_input_nodes:
                self.huge.add(node.all_input_nodes[0])

    def _kept_finite(self, node: fx.Node, plan: Plan) -> Plan:
        """Clamp where a cast to a low dtype would turn a large constant into infinity."""
        if not self.huge or not plan.casts:
            return plan
        sources = list(_occurrences(node))
        casts = tuple(
            dataclasses.replace(c, clamp=c.dtype in LOW_DTYPES and sources[c.at[0]] in self.huge)
            for c in plan.casts
        )
        if not any(c.clamp for c in casts):
            return plan
        note = f"{node.name}: a constant beyond the low dtype's range is kept finite (clamped)"
        return dataclasses.replace(plan, casts=casts, notes=(*plan.notes, note))


_PURE = (operator.getitem, getattr, operator.add, operator.mul, operator.sub, operator.floordiv)
_SYMS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NOTED = ("repair", "constant")


def _occurrences(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _where(node: fx.Node) -> str:
    source = source_of(node)
    return f"node {node.name}" + (f", {source}" if source else "")


def _output(body: fx.GraphModule) -> Any:
    return next(n for n in reversed(body.graph.nodes) if n.op == "output").args[0]


def _as_function(
    node: fx.Node, env: Mapping[fx.Node, Any], varying: Sequence[Operand]
) -> Callable[..., Any]:
    """The node as a function of its tensors and symbolic sizes, everything else fixed."""
    places = {(o.index, o.path): i for i, o in enumerate(varying)}

    def function(*values: Any) -> Any:
        occurrences = itertools.count()

        def fill(reference: fx.Node) -> Any:
            index = next(occurrences)

            def one(path: Any, leaf: Any) -> Any:
                place = places.get((index, tuple(path)))
                return leaf if place is None else values[place]

            return pytree.tree_map_with_path(one, env[reference])

        args, kwargs = fx.map_arg((node.args, node.kwargs), fill)
        return call(node, args, kwargs)

    return function


def _direct(node: fx.Node, here: list[Operand], calls: list[Call]) -> Plan | None:
    """The plan where the node *is* one dispatcher op, so that it can stay as the user wrote it."""
    if len(calls) != 1 or calls[0].inner:
        return None
    verdict = calls[0].verdict
    if verdict.op is not calls[0].op:
        return None  # another overload is to be called
    places: dict[int, list[Position]] = {}
    for operand in here:
        places.setdefault(id(operand.value), []).append((operand.index, operand.path))
    if not verdict.casts.keys() <= places.keys():
        return None  # the op is called with tensors the node only makes inside
    if verdict.kwargs and not _takes_dtype(node, calls[0]):
        return None
    casts = _casts(calls[0], places)
    literals = _literals(node, verdict.clamp, calls[0])
    if literals is None:
        return None
    rows = (_row(node, calls),)
    notes = tuple(f"{node.name}: {r.op} {r.because}" for r in rows if r.category in _NOTED)
    return Plan(
        rows=tuple(dataclasses.replace(r, casts=len(casts)) for r in rows),
        casts=casts,
        kwargs=tuple(verdict.kwargs.items()),
        literals=literals,
        notes=notes,
    )


def _casts(made: Call, places: Mapping[int, Sequence[Position]]) -> tuple[Cast, ...]:
    """The op's casts as casts of the node's operands, in the op's order.

    A tensor's first use in the op is its first use in the node, and so on.
    """
    uses = [id(t) for t in made.inputs]
    found: dict[Position, Cast] = {}
    for i in made.order:
        dtype, nth = made.verdict.casts.get(uses[i]), uses[:i].count(uses[i])
        if dtype is not None and nth < len(places[uses[i]]):
            at = places[uses[i]][nth]
            found[at] = Cast(at, dtype)
    for t, dtype in made.verdict.casts.items():
        for at in places[t]:
            found.setdefault(at, Cast(at, dtype))
    return tuple(found.values())


def _takes_dtype(node: fx.Node, made: Call) -> bool:
    """Whether `dtype=` can be written on the node itself: same name as the op, none given."""
    return op_name(node.target).rpartition(".")[2] == schema_of(made.op).name.split("::")[1]


def _literals(
    node: fx.Node, clamp: Mapping[str, float], made: Call
) -> tuple[tuple[float, float], ...] | None:
    if not clamp:
        return ()
    big = [
        leaf
        for leaf in pytree.tree_leaves((node.args, dict(node.kwargs)))
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
    ]
    pairs: list[tuple[float, float]] = []
    for new in clamp.values():
        found = [v for v in big if abs(v) > abs(new) and (v > 0) == (new > 0)]
        if not found:
            return None
        pairs.append((found[0], new))
    return tuple(pairs)


# --- rows ---------------------------------------------------------------------------------------


def _row(node: fx.Node, calls: list[Call]) -> Decision:
    """One row for a node that stays whole: its own op, or the listed op that speaks for it."""
    first = calls[0]
    leaves = [leaf for c in calls for leaf in c.leaves()]
    lead = next((c for c in leaves if c.verdict.category != Category.FOLLOW), first)
    because = lead.verdict.because
    if lead.op is not first.op:
        because = f"{op_name(lead.op)} inside: {because}"
    name = op_name(first.op) if len(calls) == 1 else op_name(node.target)
    made = leaves[-1]
    return _row_of(
        node,
        name,
        lead.verdict.category,
        because,
        lead.dtypes_in or first.dtypes_in,
        first.dtypes_out or made.dtypes_out,
        0,
        fp32=bool(lead.verdict.kwargs),
    )


def _row_of(
    node: fx.Node,
    name: str,
    category: str,
    because: str,
    dtypes_in: tuple[torch.dtype, ...],
    dtypes_out: tuple[torch.dtype, ...],
    casts: int,
    fp32: bool = False,
) -> Decision:
    floating = [d for d in dtypes_out if d.is_floating_point] or [
        d for d in dtypes_in if d.is_floating_point
    ]
    dtype = widest(floating) if floating else None
    return Decision(
        op=name if "." in name else f"aten.{name}",
        node=node.name,
        dtype=torch.float32 if fp32 else dtype,
        category=str(category),
        because=because,
        module=module_of(node),
        source=source_of(node),
        dtypes_in=dtypes_in,
        dtypes_out=dtypes_out,
        casts=casts,
    )


def _renamed(plan: Plan, node: fx.Node) -> Plan:
    """A cached plan told of another node of the same call."""
    where: dict[str, Any] = {
        "node": node.name,
        "module": module_of(node),
        "source": source_of(node),
    }
    rows = tuple(dataclasses.replace(row, **where) for row in plan.rows)
    notes = tuple(f"{r.node}: {r.op} {r.because}" for r in rows if r.category in _NOTED)
    return dataclasses.replace(plan, rows=rows, notes=notes)


def _key(node: fx.Node, here: list[Operand], law: Law) -> Any:
    """What a plan depends on: the call, its arguments' shapes and dtypes, the law.

    None inside vmap and the like, whose tensors belong to a level that ends.
    """
    if functorch_level():
        return None
    seen: dict[int, int] = {}
    described: list[Any] = []
    for o in here:
        if isinstance(o.value, Tensor):
            first = seen.setdefault(id(o.value), len(seen))
            t = o.value
            layout = () if t.layout != torch.strided else tuple(map(str, t.stride()))
            described.append((first, t.dtype, t.device, tuple(map(str, t.shape)), layout))
        else:
            described.append((type(o.value).__name__, str(o.value)))
    constants = repr(fx.map_arg((node.args, node.kwargs), lambda _: "·"))
    if " at 0x" in constants:
        return None
    module = law.module.match if law.module else None
    target = node.target
    return (node.op, target, constants, tuple(described), law.state, module, law.lowered)
