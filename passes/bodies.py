"""Rewrite the bodies of higher-order ops (checkpoint, cond, loops, autograd.Function, ...).

A body is a graph of its own that runs in the state of the node that calls it, so it is decided
and rewritten by the same passes, on the dtypes its operands now have. What a kind of op demands
of its bodies is kept: the branches of a cond agree, a loop's carried values keep their dtypes.
The backward body of an autograd.Function runs as if autocast were off, as in eager.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ampgraph.graph import arguments, call, captured, fresh, like, references
from ampgraph.passes.cast_outputs import cast_outputs
from ampgraph.passes.flex_attention import flex_attention
from ampgraph.passes.insert_casts import insert_casts
from ampgraph.passes.plan import Cast, Plan, Plans, Walk
from ampgraph.state import OFF, AutocastState
from ampgraph.verdict import widest


@dataclasses.dataclass
class Body:
    """A rewritten body, the value it returns, and what was decided inside."""

    gm: fx.GraphModule
    out: Any
    plans: Plans


def plan_higher_order(decider: Walk, node: fx.Node) -> Plan:
    """The plan for a call of a higher-order op; unknown ones keep what they were captured with."""
    kind = str(getattr(node.target, "_name", node.target))
    planner = _KINDS.get(kind, _unknown)
    return planner(decider, node)


def _rewrite(
    decider: Walk,
    body: fx.GraphModule,
    inputs: Sequence[Any] | None,
    state: AutocastState | None = None,
) -> Body:
    plans = decider.nested(body, inputs, decider.state if state is None else state)
    gm = insert_casts(body, plans, decider.mode, decider.grad)
    return Body(gm, plans.output, plans)


def _module(decider: Walk, reference: object) -> fx.GraphModule:
    assert isinstance(reference, fx.Node), f"a body is a get_attr node, not {reference!r}"
    value = decider.env[reference]
    assert isinstance(value, fx.GraphModule), f"{reference} is not a graph module"
    return value


def _retyped(decider: Walk, body: fx.GraphModule, values: Sequence[Any]) -> list[Any]:
    """The body's captured inputs, in the dtypes of the operands that reach it."""
    found: list[Any] = []
    places = [n for n in body.graph.nodes if n.op == "placeholder"]
    for place, value in zip(places, values, strict=True):
        was = captured(place)
        if isinstance(was, Tensor) and isinstance(value, Tensor) and was.dtype != value.dtype:
            was = like(was, value.dtype, decider.mode)
        found.append(value if was is None else was)
    return found


def _dtypes(value: Any) -> list[torch.dtype | None]:
    return [t.dtype if isinstance(t, Tensor) else None for t in pytree.tree_leaves(value)]


def _agree(decider: Walk, body: Body, wanted: Sequence[torch.dtype | None], why: str) -> Body:
    """The body with its floating outputs cast to `wanted`."""
    now = _dtypes(body.out)
    casts = {
        i: to
        for i, (is_, to) in enumerate(zip(now, wanted, strict=True))
        if to is not None and is_ is not None and to != is_
    }
    cast_outputs(body.gm, casts, decider.mode, why)
    leaves, spec = pytree.tree_flatten(body.out)
    leaves = [
        like(leaf, casts[i], decider.mode) if i in casts else leaf for i, leaf in enumerate(leaves)
    ]
    return dataclasses.replace(body, out=pytree.tree_unflatten(leaves, spec))


def _plan(
    decider: Walk, node: fx.Node, bodies: dict[int, Body], dtypes: Sequence[Any], **more: Any
) -> Plan:
    """The node with `bodies` in place and its captured value in the dtypes the bodies return."""
    leaves, spec = pytree.tree_flatten(captured(node))
    value = [
        like(leaf, dtype, decider.mode)
        if isinstance(leaf, Tensor) and dtype is not None and leaf.dtype != dtype
        else leaf
        for leaf, dtype in zip(leaves, dtypes, strict=True)
    ]
    return Plan(
        rows=tuple(row for body in bodies.values() for row in body.plans.rows),
        bodies=tuple((i, body.gm) for i, body in bodies.items()),
        notes=tuple(note for body in bodies.values() for note in body.plans.notes),
        value=fresh(pytree.tree_unflatten(value, spec), decider.mode),
        mutates=any(p.mutates for body in bodies.values() for p in body.plans.of.values()),
        **more,
    )


def _occurrence(node: fx.Node, reference: object) -> int:
    return references(node).index(reference)  # type: ignore[arg-type]


def _values(decider: Walk, args: Any) -> list[Any]:
    """The operands' values, nested lists flattened (FX lists are not registered pytrees)."""
    plain = fx.map_arg(args, lambda n: decider.env[n])
    return list(pytree.tree_leaves(_unfrozen(plain)))


def _unfrozen(tree: Any) -> Any:
    if isinstance(tree, (list, tuple)):
        return [_unfrozen(leaf) for leaf in tree]
    return tree


def _called(at: int) -> Callable[[Walk, fx.Node], Plan]:
    """One body, argument `at`, called with those after it and returning what the op returns."""

    def planner(decider: Walk, node: fx.Node) -> Plan:
        module = _module(decider, node.args[at])
        inputs = _retyped(decider, module, _values(decider, node.args[at + 1 :]))
        body = _rewrite(decider, module, inputs)
        return _plan(decider, node, {0: body}, _dtypes(body.out))

    return planner


def _region(decider: Walk, node: fx.Node) -> Plan:
    """torch.export's `wrap_with_autocast`: its body in the region's state, without the region."""
    device_type, dtype, enabled, _, reference = node.args[:5]
    module = _module(decider, reference)
    inputs = _retyped(decider, module, _values(decider, node.args[5:]))
    state = decider.state.entering(str(device_type), dtype, bool(enabled))  # type: ignore[arg-type]
    body = _rewrite(decider, module, inputs, state)
    return Plan(
        rows=body.plans.rows,
        inline=body.gm,
        inputs=tuple((i, ()) for i in range(1, len(references(node)))),
        value=body.out,
        mutates=any(p.mutates for p in body.plans.of.values()),
        notes=body.plans.notes,
    )


def _invoke_subgraph(decider: Walk, node: fx.Node) -> Plan:
    """Its identifier is a cache key downstream: one for each version of the body."""
    module = _module(decider, node.args[0])
    inputs = _retyped(decider, module, _values(decider, node.args[2:]))
    key = (id(module), tuple(_dtypes(inputs)), decider.state)
    if key not in decider.bodies:
        version = f"{node.args[1]}_amp{len(decider.bodies)}"
        decider.bodies[key] = (version, _rewrite(decider, module, inputs))
    version, body = decider.bodies[key]
    return _plan(decider, node, {0: body}, _dtypes(body.out), positional=((1, version),))


def _cond(decider: Walk, node: fx.Node) -> Plan:
    sides = [_module(decider, node.args[1]), _module(decider, node.args[2])]
    values = _values(decider, node.args[3])
    bodies = [_rewrite(decider, side, _retyped(decider, side, values)) for side in sides]
    pairs = zip(*(_dtypes(body.out) for body in bodies), strict=True)
    wanted = [a if a == b or a is None or b is None else widest([a, b]) for a, b in pairs]
    bodies = [_agree(decider, body, wanted, "cond: branches agree") for body in bodies]
    places = [_occurrence(node, node.args[i]) for i in (1, 2)]
    return _plan(decider, node, dict(zip(places, bodies, strict=True)), wanted)


def _while_loop(decider: Walk, node: fx.Node) -> Plan:
    test, step = _module(decider, node.args[0]), _module(decider, node.args[1])
    carried = _values(decider, node.args[2])
    values = carried + _values(decider, node.args[3] if len(node.args) > 3 else ())
    tested = _rewrite(decider, test, _retyped(decider, test, values))
    body = _rewrite(decider, step, _retyped(decider, step, values))
    wanted = _dtypes(carried)
    body = _agree(decider, body, wanted, "while_loop: carried values keep their dtype")
    places = [_occurrence(node, node.args[i]) for i in (0, 1)]
    return _plan(decider, node, dict(zip(places, (tested, body), strict=True)), wanted)


def _scan(decider: Walk, node: fx.Node) -> Plan:
    module = _module(decider, node.args[0])
    first = _values(decider, node.args[1])
    inputs = _retyped(decider, module, _values(decider, node.args[1:]))
    body = _rewrite(decider, module, inputs)
    wanted = [*_dtypes(first), *_dtypes(body.out)[len(first) :]]
    body = _agree(decider, body, wanted, "scan: the carry keeps its dtype")
    return _plan(decider, node, {0: body}, wanted)


def _associative_scan(decider: Walk, node: fx.Node) -> Plan:
    module = _module(decider, node.args[0])
    scanned = _values(decider, node.args[1])
    extra = _values(decider, node.args[2] if len(node.args) > 2 else ())
    inputs = _retyped(decider, module, [*scanned, *scanned, *extra])
    body = _rewrite(decider, module, inputs)
    wanted = _dtypes(scanned)
    body = _agree(decider, body, wanted, "associative_scan: keeps the dtype of what it scans")
    return _plan(decider, node, {0: body}, wanted)


def _autograd_function(decider: Walk, node: fx.Node) -> Plan:
    forward, backward = _module(decider, node.args[0]), _module(decider, node.args[1])
    inputs = _retyped(decider, forward, _values(decider, node.args[2:]))
    body = _rewrite(decider, forward, inputs)
    outs, saved = body.out
    values = [v for v in (*pytree.tree_leaves(outs), *pytree.tree_leaves(saved))]
    places = [n for n in backward.graph.nodes if n.op == "placeholder"]
    grads = None
    if len(places) == len(values):
        grads = _retyped(decider, backward, values)
    undone = _rewrite(decider, backward, grads, OFF)
    return _plan(decider, node, {0: body, 1: undone}, _dtypes(outs))


def _hook(decider: Walk, node: fx.Node) -> Plan:
    """`register_hook`: the tensor passes through; the hook runs in backward, on its gradient."""
    value = decider.env[references(node)[0]]
    module = _module(decider, node.args[1])
    inputs = _retyped(decider, module, [value, *_values(decider, node.args[2:])])
    body = _rewrite(decider, module, inputs, OFF)
    body = _agree(decider, body, [value.dtype], "hook: a gradient has its tensor's dtype")
    return _plan(decider, node, {1: body}, [value.dtype])


def _print(decider: Walk, node: fx.Node) -> Plan:
    """Prints what is there."""
    return Plan(value=captured(node))


def _unknown(decider: Walk, node: fx.Node) -> Plan:
    """An op we know nothing of gets what it was captured with, and runs with autocast off."""
    casts: list[Cast] = []
    env: dict[fx.Node, Any] = {}
    for index, reference in enumerate(references(node)):
        was, now = captured(reference), decider.env[reference]
        env[reference] = now
        if isinstance(was, Tensor) and isinstance(now, Tensor) and was.dtype != now.dtype:
            casts.append(Cast((index, ()), was.dtype))
            env[reference] = like(now, was.dtype, decider.mode)
    note = f"{node.name}: {node.target} is kept in the dtypes it was captured with"
    value = fresh(_without_autocast(decider, node, env), decider.mode)
    return Plan(casts=tuple(casts), value=value, notes=(note,), mutates=True)


def _without_autocast(decider: Walk, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    """What the op returns outside of any region; its captured value where it cannot be run."""
    args, kwargs = arguments(node, env)
    try:
        with decider.quiet():
            return call(node, args, kwargs)
    except Exception:
        return captured(node)


_KINDS: dict[str, Callable[[Walk, fx.Node], Plan]] = {
    "wrap": _called(0),
    "tag_activation_checkpoint": _called(0),
    "wrap_activation_checkpoint": _called(0),
    "wrap_with_set_grad_enabled": _called(1),
    "wrap_with_autocast": _region,
    "invoke_subgraph": _invoke_subgraph,
    "map_impl": _called(0),
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "associative_scan": _associative_scan,
    "autograd_function_apply": _autograd_function,
    "flex_attention": flex_attention,
    "foreach_map": _called(0),
    "hints_wrapper": _called(0),
    "strict_mode": _called(0),
    "register_hook": _hook,
    "print": _print,
}
