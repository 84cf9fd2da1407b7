"""Insert what was planned into a copy of the graph; decide nothing.

One cast for every use while gradients are wanted: a cast shared by n uses would sum its n
gradients in low precision, one cast each sums them in the operand's own. Where no gradient flows
a cast is shared until something in the graph writes in place.

    linear(x, w)   ->   x_bf16 = _to_copy(x, bf16); w_bf16 = ...; linear(x_bf16, w_bf16)

The input graph is left alone: Dynamo still reads its placeholders after the backend returns.
"""

import copy
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ampgraph.graph import CAST, KEPT, PASS, VALUE, WRITES, captured, is_mutable, like, references
from ampgraph.internals.autocast import enter_autocast, exit_autocast
from ampgraph.internals.dynamo import copy_dynamo_source, new_graph_like
from ampgraph.internals.tensors import FakeTensorMode
from ampgraph.passes.plan import Cast, Plan, Plans

SHORT = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64"}
SITE = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")


class Inserter:
    """Copies one graph, node by node, with its plans carried out."""

    def __init__(self, gm: fx.GraphModule, plans: Plans, mode: FakeTensorMode, grad: bool) -> None:
        self.gm, self.plans, self.mode, self.grad = gm, plans, mode, grad
        self.graph = new_graph_like(gm.graph)
        self.attributes: dict[str, Any] = {}
        self.env: dict[fx.Node, Any] = {}
        self.shared: dict[Any, fx.Node] = {}

    def run(self) -> fx.GraphModule:
        for node in self.gm.graph.nodes:
            plan = self.plans.of.get(node, Plan())
            if plan.erase:
                self.env[node] = None
            elif plan.inline is not None:
                self._inline(node, plan)
            else:
                entered = [self._enter(node, *on) for on in plan.region]
                self._copy(node, plan)
                for region in reversed(entered):
                    self._site(self.graph.call_function(exit_autocast, (region,)), node, KEPT)
            if plan.mutates:
                self.shared.clear()
        self._forget_replaced_bodies()
        self._keep_requires_grad()
        return self._module()

    def _enter(self, node: fx.Node, device: str, dtype: torch.dtype, on: bool) -> fx.Node:
        """Without a cast cache, as everywhere: it would sum gradients in low precision."""
        region = self.graph.call_function(enter_autocast, (device, dtype, on, False))
        self._site(region, node, KEPT)
        return region

    def _keep_requires_grad(self) -> None:
        """Outputs still say whether they need a gradient: invoke_subgraph asks them."""
        before, after = (_outputs(graph) for graph in (self.gm.graph, self.graph))
        if len(before) != len(after):
            return  # a tuple-valued output was opened, which bodies and Dynamo's graphs never have
        for old, new in zip(before, after, strict=True):
            was = captured(old) if isinstance(old, fx.Node) else None
            now = captured(new) if isinstance(new, fx.Node) else None
            if not isinstance(was, Tensor) or not isinstance(now, Tensor):
                continue
            if was.requires_grad and not now.requires_grad:
                new.meta[VALUE] = now.detach().requires_grad_()

    def _forget_replaced_bodies(self) -> None:
        """A body that was rewritten at each of its calls is no longer part of the program."""
        for node in reversed(self.graph.nodes):
            if node.op == "get_attr" and not node.users:
                self.graph.erase_node(node)

    def _module(self) -> fx.GraphModule:
        root = {**_attributes(self.gm), **self.attributes}
        after = fx.GraphModule(root, self.graph, self.gm.__class__.__name__)
        after.meta = dict(self.gm.meta)
        after.train(self.gm.training)
        for name in ("_param_name_to_source", "shape_env"):
            if hasattr(self.gm, name):
                setattr(after, name, getattr(self.gm, name))
        return after

    def _copy(self, node: fx.Node, plan: Plan) -> None:
        members = self._member(node)
        if members is not None:
            self.env[node] = members
            return
        args, kwargs = self._arguments(node, plan)
        new = self.graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        new.meta = copy.copy(node.meta)
        if plan.mutates:
            new.meta[WRITES] = True
        copy_dynamo_source(node, new)
        for key in {VALUE, "val"} & node.meta.keys() if node in self.plans.of else ():
            new.meta[key] = plan.value
        was, now = captured(node), self.plans.env.get(node)
        if node.op == "placeholder" and isinstance(was, Tensor) and isinstance(now, Tensor):
            if was.dtype != now.dtype:  # a body's operand, now low
                new.meta[VALUE] = like(was, now.dtype, self.mode)
        self.env[node] = new

    def _member(self, node: fx.Node) -> Any:
        """`getitem(opened, i)`, where the opened composite is no longer one node."""
        if node.target not in (operator.getitem, getattr) or not isinstance(node.args[0], fx.Node):
            return None
        whole = self.env[node.args[0]]
        if isinstance(whole, fx.Node) or whole is None:
            return None
        reach: Any = node.target
        return reach(whole, node.args[1])

    def _arguments(self, node: fx.Node, plan: Plan) -> tuple[Any, Any]:
        made = self._cast_operands(node, plan)
        bodies = dict(plan.bodies)
        count = iter(range(1 << 30))

        def fill(reference: fx.Node) -> Any:
            index = next(count)
            if index in bodies:
                return self._body(reference, bodies[index])
            return made[index] if index in made else self.env[reference]

        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), fill)
        args, kwargs = _with_literals(args, kwargs, dict(plan.literals))
        args = tuple(dict(plan.positional).get(i, a) for i, a in enumerate(args))
        return args, {**kwargs, **dict(plan.kwargs)}

    def _cast_operands(self, node: fx.Node, plan: Plan) -> dict[int, Any]:
        """The operands that are cast, by occurrence, made in the plan's order."""
        made: dict[int, Any] = {}
        operands = references(node) if plan.casts else []
        for cast in plan.casts:
            index = cast.at[0]
            new = made.get(index, self.env[operands[index]])
            made[index] = self._cast_member(node, operands[index], new, cast)
        return made

    def _cast_member(self, node: fx.Node, reference: fx.Node, new: Any, cast: Cast) -> Any:
        path, value = cast.at[1], self.plans.env[reference]
        if not path:
            return self._cast(node, new, value, cast, self._wants_grad(reference))
        if isinstance(new, fx.Node):  # a tuple-valued node: take it apart
            new = [self._getitem(node, new, i, member) for i, member in enumerate(value)]
        members = list(new)
        key = path[0].idx
        member_value = pytree.key_get(value, path)
        members[key] = self._cast(node, members[key], member_value, cast, True)
        return members

    def _getitem(self, node: fx.Node, whole: fx.Node, index: int, value: Any) -> fx.Node:
        new = self.graph.call_function(operator.getitem, (whole, index))
        self._site(new, node)
        new.meta[VALUE] = value
        return new

    def _wants_grad(self, reference: fx.Node) -> bool:
        """Whether a gradient may flow into the operand: then each use has its own cast."""
        value = captured(reference)
        known = isinstance(value, Tensor)
        return self.grad and not (known and not value.requires_grad)

    def _cast(self, node: fx.Node, new: fx.Node, value: Tensor, cast: Cast, grad: bool) -> fx.Node:
        key = (new, cast.dtype, cast.clamp)
        if not grad and key in self.shared:
            return self.shared[key]
        made = new
        if cast.clamp:
            limit = torch.finfo(cast.dtype).max
            made = self.graph.call_function(torch.ops.aten.clamp.default, (new, -limit, limit))
            self._site(made, node)
            made.meta[VALUE] = value
        made = self.graph.create_node(
            "call_function",
            torch.ops.aten._to_copy.default,
            (made,),
            {"dtype": cast.dtype},
            name=f"{new.name}_{SHORT.get(cast.dtype, 'cast')}",
        )
        self._site(made, node)
        made.meta[CAST] = node.name
        made.meta[VALUE] = like(value, cast.dtype, self.mode)
        self.shared[key] = made
        return made

    def _site(self, new: fx.Node, node: fx.Node, by: str = "insert_casts") -> None:
        new.meta.update({k: node.meta[k] for k in SITE if k in node.meta})
        new.meta[PASS] = by

    def _body(self, reference: fx.Node, body: fx.GraphModule) -> fx.Node:
        name = f"{reference.target}_amp"
        while name in self.attributes or hasattr(self.gm, name):
            name += "_"
        self.attributes[name] = body
        new = self.graph.create_node("get_attr", name)
        new.meta = copy.copy(reference.meta)
        return new

    def _inline(self, node: fx.Node, plan: Plan) -> None:
        assert plan.inline is not None, "only called with an opened composite"
        given = iter([self._operand(node, *position) for position in plan.inputs])
        env: dict[fx.Node, Any] = {}
        for inner in plan.inline.graph.nodes:
            if inner.op == "placeholder":
                env[inner] = next(given)
            elif inner.op == "output":
                self.env[node] = fx.map_arg(inner.args[0], lambda n: env[n])
            else:
                env[inner] = self._copy_inner(node, inner, plan.inline, env)

    def _copy_inner(
        self, node: fx.Node, inner: fx.Node, body: fx.GraphModule, env: dict[fx.Node, Any]
    ) -> fx.Node:
        target = inner.target
        if inner.op == "get_attr":
            value = operator.attrgetter(str(target))(body)
            target = f"{node.name}_{str(target).strip('_').replace('.', '_')}"
            self.attributes[target] = value
        args, kwargs = fx.map_arg((inner.args, dict(inner.kwargs)), lambda n: env[n])
        new = self.graph.create_node(inner.op, target, args, kwargs, f"{node.name}_{inner.name}")
        self._site(new, node)
        new.meta.update({k: inner.meta[k] for k in SITE if k in inner.meta})
        new.meta[PASS] = "open_composite"
        if is_mutable(target):
            new.meta[WRITES] = True
        if CAST in inner.meta:
            new.meta[CAST] = node.name
        new.meta[VALUE] = captured(inner)
        return new

    def _operand(self, node: fx.Node, index: int, path: tuple[Any, ...]) -> Any:
        reference = references(node)[index]
        new, value = self.env[reference], self.plans.env[reference]
        for key in path:
            value = key.get(value)
            new = (
                self._getitem(node, new, key.idx, value)
                if isinstance(new, fx.Node)
                else key.get(new)
            )
        return new


def _with_literals(
    args: Sequence[Any], kwargs: Mapping[str, Any], swap: Mapping[float, float]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with numbers replaced, but for those in lists, which are sizes."""

    def one(leaf: Any) -> Any:
        number = isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
        return swap.get(leaf, leaf) if number else leaf

    return tuple(map(one, args)), {name: one(value) for name, value in kwargs.items()}


def _outputs(graph: fx.Graph) -> list[Any]:
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    return pytree.tree_leaves(output.args[0])


def _attributes(gm: fx.GraphModule) -> dict[str, Any]:
    return {
        str(n.target): operator.attrgetter(str(n.target))(gm)
        for n in gm.graph.nodes
        if n.op in ("get_attr", "call_module")
    }


def insert_casts(
    gm: fx.GraphModule, plans: Plans, mode: FakeTensorMode, grad: bool
) -> fx.GraphModule:
    """A copy of `gm` with `plans` carried out."""
    return Inserter(gm, plans, mode, grad).run()
