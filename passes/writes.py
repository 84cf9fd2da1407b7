"""What a graph writes to, seen by running it on fake tensors, whatever the spelling."""

from typing import Any

import torch
from torch import Tensor, fx

from ampgraph.errors import RewriteError
from ampgraph.graph import arguments, attribute, call, captured, fresh, no_guards
from ampgraph.internals.ops import TorchDispatchMode
from ampgraph.internals.tensors import FakeTensorMode, storage_of
from ampgraph.verdict import written


class Writes(TorchDispatchMode):
    """Notes the storage of every tensor that an op writes to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.storages |= {storage_of(t) for t in written(func, args, kwargs or {})}
        return func(*args, **(kwargs or {}))


def run_on_fakes(
    gm: fx.GraphModule, mode: FakeTensorMode
) -> tuple[dict[fx.Node, Tensor], set[int]]:
    """Run the graph on fake tensors: its inputs, each once, and the storages it wrote to."""
    env: dict[fx.Node, Any] = {}
    owned: dict[fx.Node, int] = {}
    first: dict[str, fx.Node] = {}  # an attribute may be read twice
    with mode, torch.no_grad(), no_guards(mode), Writes() as writes:
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                env[node] = fresh(captured(node), mode)
            elif node.op == "get_attr":
                same = first.setdefault(str(node.target), node)
                env[node] = env[same] if same in env else attribute(gm, node, mode)
            elif node.op != "output":
                env[node] = call(node, *arguments(node, env))
                continue
            if isinstance(env.get(node), Tensor):
                owned[node] = storage_of(env[node])
    inputs = [n for n in env if n.op == "placeholder" or first.get(str(n.target)) is n]
    values = {node: env[node] for node in inputs if isinstance(env[node], Tensor)}
    for node, value in values.items():
        if storage_of(value) != owned[node]:
            raise RewriteError(
                f"the step gives {node.name} other memory", cure="write in place, as with copy_"
            )
    return values, writes.storages
