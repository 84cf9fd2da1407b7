"""Decide, for every node, what precision its ops compute in and why; edit nothing.

The graph is walked once in order, on fake tensors that carry the dtypes of the *rewritten*
program. Regions keep a stack; each other node is run under the law (`ampgraph.listener`), which
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

from ampgraph.errors import AmpgraphError, RewriteError
from ampgraph.graph import (
    Operand,
    arguments,
    attribute,
    call,
    captured,
    error_trace,
    fresh,
    like,
    no_guards,
    op_name,
    operands,
    source_of,
)
from ampgraph.internals.autocast import disable_autocast
from ampgraph.internals.ops import HigherOrderOperator, pre_dispatch, schema_of
from ampgraph.internals.tensors import (
    FakeTensorMode,
    functorch_level,
    functorch_unwound,
    quiet_fake_errors,
)
from ampgraph.listener import Call, DataDependentError, LibraryKernelError, Listener
from ampgraph.passes.bodies import plan_higher_order
from ampgraph.passes.direct import direct
from ampgraph.passes.follow_asserts import followed_assert
from ampgraph.passes.keep_finite import LargeConstants
from ampgraph.passes.keep_functions import kept_function, kept_kernel
from ampgraph.passes.open_composite import open_composite
from ampgraph.passes.plan import Plan, Plans
from ampgraph.passes.regions import is_region, step
from ampgraph.passes.rows import notes_of, renamed, row, rows_inside
from ampgraph.passes.transforms import transformed
from ampgraph.place import NOWHERE, Place
from ampgraph.policy import Policy
from ampgraph.state import AutocastState
from ampgraph.verdict import Law, tensors


class Decider:
    """One walk over one graph. `policies` by device type, `state` at the graph's entry."""

    def __init__(
        self,
        gm: fx.GraphModule,
        mode: FakeTensorMode,
        policies: Mapping[str, Policy],
        state: AutocastState,
        grad: bool = True,
        place: Place = NOWHERE,
    ) -> None:
        self.gm, self.mode, self.policies, self.state = gm, mode, policies, state
        self.grad, self.place = grad, place
        self.plans = Plans()
        self.env = self.plans.env
        self.regions: dict[fx.Node, Any] = {}
        self.large = LargeConstants()
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
                self.env[node] = attribute(self.gm, node, self.mode)
            elif node.op == "output":
                self.plans.output = arguments(node, self.env)[0][0]
            else:
                plan = self._plan(node)
                self.plans.of[node], self.env[node] = plan, plan.value

    def nested(
        self, body: fx.GraphModule, inputs: Sequence[Any] | None, state: AutocastState
    ) -> Plans:
        """Plan the body of a higher-order op, under the same policies."""
        return Decider(body, self.mode, self.policies, state, self.grad, self.place).run(inputs)

    def _plan(self, node: fx.Node) -> Plan:
        if is_region(node):
            self.state = step(node, self.state, self.regions)
            return Plan(erase=True)
        if isinstance(node.target, HigherOrderOperator):
            return plan_higher_order(self, node)
        inside = transformed(node, self.env, self.quiet)
        if inside is not None:
            return Plan(value=inside[0])
        whole = followed_assert(self, node) or kept_function(self, node)
        if whole is not None:
            return whole
        here = operands(node, self.env)
        opaque = node.op == "call_module"  # left by inline_modules: it computes nothing
        if opaque or not any(isinstance(o.value, Tensor) for o in here):
            return self._without_tensors(node)
        law = self.law(node)
        key = _key(node, here, law)
        if key is None or key not in self.cache:
            plan = self._decide(node, here, law)
            if key is not None and not plan.mutates:
                self.cache[key] = plan
        else:
            known = self.cache[key]
            # A value of its own: composites ask whether two of their arguments are one tensor.
            plan = dataclasses.replace(renamed(known, node), value=fresh(known.value, self.mode))
        return self.large.kept(node, plan, self.env, self.state)

    def law(self, node: fx.Node) -> Law:
        """The law at this node: the state, and the innermost module rule that matches it."""
        stack = self.place.stack(node)
        state, rule = self.state, None
        for device_type in state.enabled():
            found = self.policy(device_type).module_rule_for(stack)
            if found is not None and found.dtype == torch.float32:
                rule = found
            elif found is not None:
                state = state.entering(device_type, found.dtype, True)
        return Law(self.policies, state, rule, self.large.reaches_low(node))

    def policy(self, device_type: str) -> Policy:
        return self.policies.get(device_type) or Policy.autocast(device_type)

    def _without_tensors(self, node: fx.Node) -> Plan:
        """Sizes, flags, factories: nothing autocast would see, so the captured value stands."""
        value = captured(node)
        if value is None and node.target in _PURE:
            args, kwargs = arguments(node, self.env)
            value = call(node, args, kwargs)
        plan = Plan(value=fresh(value, self.mode))
        return self.large.kept(node, plan, self.env, self.state)

    def _decide(self, node: fx.Node, here: list[Operand], law: Law) -> Plan:
        args, kwargs = arguments(node, self.env)
        listener = Listener(law)
        try:
            with self.quiet(), pre_dispatch(listener):
                value = call(node, args, kwargs)
        except DataDependentError:
            return self._unseen(node, here, law, listener.calls)
        except LibraryKernelError as found:
            return kept_kernel(self, node, str(found))
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
            rows = (row(node, calls),) if calls else ()
            return Plan(rows=rows, value=value, mutates=mutates, notes=notes_of(rows))
        plan = direct(node, here, calls)
        if plan is None:
            opened = self._opened(node, here, law, calls)
            return dataclasses.replace(opened, mutates=mutates)
        return dataclasses.replace(plan, value=value, mutates=mutates)

    def _opened(self, node: fx.Node, here: list[Operand], law: Law, calls: list[Call]) -> Plan:
        varying = [o for o in here if isinstance(o.value, (Tensor, *_SYMS))]
        function = _as_function(node, self.env, varying)
        with self.quiet():
            body, found = open_composite(function, [o.value for o in varying], law, calls)
        rows = rows_inside(node, found)
        value = fx.map_arg(_output(body), captured)
        return Plan(
            rows=rows,
            inline=body,
            inputs=tuple((o.index, o.path) for o in varying),
            value=fresh(value, self.mode),
            notes=notes_of(rows),
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
        rows = (row(node, calls),) if calls else ()
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


_PURE = (operator.getitem, getattr, operator.add, operator.mul, operator.sub, operator.floordiv)
_SYMS = (torch.SymInt, torch.SymFloat, torch.SymBool)


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
