"""Give every node its fake value, and inline module calls so that their ops can be seen and cast.

Sound because a module's own forward is traced at the PreDispatch key, above autograd: the ops are
those it would call, and its parameters and buffers become get_attr nodes under their own names.

    h = self.lin(x)   ->   w = self.lin.weight; b = self.lin.bias; h = aten.linear(x, w, b)
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ampgraph.errors import RewriteError
from ampgraph.graph import PASS, VALUE, error_trace
from ampgraph.internals.ops import make_fx
from ampgraph.internals.tensors import FakeTensor, FakeTensorMode

INLINED = "ampgraph_inlined"


def inline_modules(gm: fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode) -> None:
    """Run the graph on fake inputs, region nodes included; edits `gm`, whose nodes get values."""
    with torch.no_grad():
        _Inliner(gm, mode).run(*[fake(value, mode) for value in inputs])
    for node in reversed(list(gm.graph.nodes)):
        inlined = node.op == "call_module" and INLINED in node.meta
        member = node.target is operator.getitem and not node.users
        if inlined or member:
            gm.graph.erase_node(node)
    gm.recompile()


def fake(value: Any, mode: FakeTensorMode) -> Any:
    """The value with a fake tensor in place of a real one."""
    real = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
    return mode.from_tensor(value, static_shapes=True) if real else value


class _Inliner(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(gm)
        self.mode = mode

    def run_node(self, n: fx.Node) -> Any:
        with self.mode:
            value = self._inline(n) if n.op == "call_module" else super().run_node(n)
        if n.op != "output":
            n.meta[VALUE] = value
        return value

    def fetch_attr(self, target: str) -> Any:
        return fake(super().fetch_attr(target), self.mode)

    def _inline(self, node: fx.Node) -> Any:
        module = self.fetch_attr(str(node.target))
        held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if len(leaves) != len(pytree.tree_leaves((node.args, dict(node.kwargs)))):
            raise _give_up(node, "takes a tuple that another node returns")
        varying = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def function(*values: Any) -> Any:
            given = [*leaves]
            for i, value in zip(varying, values, strict=False):
                given[i] = value
            a, k = pytree.tree_unflatten(given, spec)
            named = dict(zip(held, values[len(varying) :], strict=True))
            return torch.func.functional_call(module, named, a, k)

        values = [leaves[i] for i in varying] + [fake(t, self.mode) for t in held.values()]
        try:
            body = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*values)
        except Exception as error:
            raise _give_up(node, f"cannot be traced: {error_trace(error)}") from error
        if not any(n.op == "call_function" for n in body.graph.nodes):
            return super().run_node(node)  # a check of the inputs, say: nothing to cast inside
        node.meta[INLINED] = True
        return self._splice(node, module, body, varying, list(held))

    def _splice(
        self,
        node: fx.Node,
        module: nn.Module,
        body: fx.GraphModule,
        varying: Sequence[int],
        names: Sequence[str],
    ) -> Any:
        """Put the traced body before `node`, which is left without users."""
        graph, env = node.graph, dict[fx.Node, Any]()
        given = pytree.tree_leaves((node.args, dict(node.kwargs)))
        sources: list[Any] = [given[i] for i in varying]
        site = {"nn_module_stack": {str(node.target): (str(node.target), type(module))}}
        with graph.inserting_before(node):
            sources += [graph.get_attr(f"{node.target}.{name}") for name in names]
            places = iter(sources)
            for inner in body.graph.nodes:
                if inner.op == "placeholder":
                    env[inner] = next(places)
                elif inner.op != "output":
                    env[inner] = graph.node_copy(inner, lambda n: env[n])
                    env[inner].meta = {**site, PASS: "inline_modules"}
                new = env.get(inner)
                if isinstance(new, fx.Node) and new not in self.env:
                    new.meta |= {VALUE: inner.meta.get("val"), **site}
                    self.env[new] = inner.meta.get("val")
        output = next(n for n in reversed(body.graph.nodes) if n.op == "output")
        returned = fx.map_arg(output.args[0], lambda n: env[n])
        _replace_uses(node, returned)
        return fx.map_arg(returned, lambda n: self.env[n])


def _replace_uses(node: fx.Node, returned: Any) -> None:
    """Let the users of a module's result read the ops inlined for it, member by member."""
    if isinstance(returned, fx.Node):
        node.replace_all_uses_with(returned)
        return
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise _give_up(node, f"returns several values, which {user.name} takes whole")
        member = returned[user.args[1]]
        if isinstance(member, fx.Node):
            user.replace_all_uses_with(member)


def _give_up(node: fx.Node, why: str) -> RewriteError:
    return RewriteError(
        f"the module {str(node.target)!r} {why}",
        where=f"node {node.name}",
        cure="capture the model with torch.compile(backend='ampgraph') instead",
    )
