"""Make an optimizer's step unscale its gradients and keep no write where a flag says overflow.

    p.add_(g, alpha=-lr)   ->   old = p.clone(); p.add_(g * factor, alpha=-lr)
                                p.copy_(where(found_inf > 0, old, p))

Sound because the graph is all of the step: what it writes to is seen by running it on fake tensors,
whatever the spelling, so parameters, moments and step counters keep their bits; and `where`
discards the NaN of an overflow instead of multiplying it by zero. Functionalization turns the clone
and the copy into one select inside the kernel that makes the new value.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ampgraph.errors import RewriteError
from ampgraph.graph import (
    PASS,
    VALUE,
    fake_mode_of,
    fresh,
    no_guards,
)
from ampgraph.internals.dynamo import copy_dynamo_source, mark_new_input, new_graph_like
from ampgraph.internals.tensors import FakeTensorMode, storage_of
from ampgraph.passes.writes import run_on_fakes
from ampgraph.state import LOW_DTYPES


@dataclass(frozen=True)
class Predicated:
    """The new graph, whose inputs end in `factor, found_inf` for each of `devices`."""

    graph: fx.GraphModule
    devices: tuple[torch.device, ...]


def predicate_writes(gm: fx.GraphModule, grads: Iterable[str]) -> Predicated:
    """A copy of the graph of one whole optimizer step that unscales, and writes only if it may.

    Args:
        gm: Dynamo's graph of the step; it is not changed.
        grads: the names of the placeholders that are gradients.

    Raises:
        RewriteError: state on another device than the gradients, whose flag would have to be
            waited for; a tensor that is given other memory (`p.data = ...`), to which nothing
            can be copied back. What fake tensors raise on a node that they cannot run.
    """
    mode = fake_mode_of(gm)
    values, storages = run_on_fakes(gm, mode)
    wanted = set(grads)
    scaled = [n for n in gm.graph.nodes if n.op == "placeholder" and n.name in wanted]
    changed = [node for node, value in values.items() if storage_of(value) in storages]
    devices = tuple(dict.fromkeys(values[node].device for node in scaled))
    for node in changed:
        if values[node].device not in devices:
            raise RewriteError(
                f"the step writes to {node.name} on {values[node].device}, where no gradient is",
                cure="keep the optimizer's state on the device of its parameters",
            )
    with mode, torch.no_grad(), no_guards(mode):
        graph = Predicator(values, scaled, changed, devices, mode).run(gm)
    after = fx.GraphModule(gm, graph, gm.__class__.__name__)
    after.meta = dict(gm.meta)
    return Predicated(after, devices)


class Predicator:
    """Copies the graph, with a factor on what is `scaled` and a choice after what is `written`."""

    def __init__(
        self,
        values: Mapping[fx.Node, Tensor],
        scaled: Sequence[fx.Node],
        written: Sequence[fx.Node],
        devices: Sequence[torch.device],
        mode: FakeTensorMode,
    ) -> None:
        self.values, self.scaled, self.written, self.devices = values, scaled, written, devices
        self.mode = mode
        self.env: dict[fx.Node, fx.Node] = {}
        self.old: dict[fx.Node, fx.Node] = {}
        self.given: dict[fx.Node, fx.Node] = {}  # gradients that are written, as they come
        self.factor: dict[torch.device, fx.Node] = {}
        self.skip: dict[torch.device, fx.Node] = {}

    def run(self, gm: fx.GraphModule) -> fx.Graph:
        """The new graph; `gm` is left alone."""
        self.graph = new_graph_like(gm.graph)
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        rest = [n for n in gm.graph.nodes if n.op != "placeholder"]
        for node in inputs:
            self._copy(node)
        self._scalars()
        for node in self.scaled:
            self._unscale(node)
        for node in inputs:
            self._keep(node)
        for node in rest:
            if node.op == "output":
                self._choose()
            self._copy(node)
            self._keep(node)
        return self.graph

    def _copy(self, node: fx.Node) -> None:
        self.env[node] = self.graph.node_copy(node, lambda n: self.env[n])
        copy_dynamo_source(node, self.env[node])

    def _scalars(self) -> None:
        found: dict[torch.device, fx.Node] = {}
        for i, device in enumerate(self.devices):
            self.factor[device] = self._scalar(f"factor_{i}", device)
            found[device] = self._scalar(f"found_inf_{i}", device)
        for device, node in found.items():
            flag = torch.empty((), dtype=torch.bool, device=device)
            self.skip[device] = self._call(torch.gt, (node, 0), flag)

    def _scalar(self, name: str, device: torch.device) -> fx.Node:
        new = self.graph.placeholder(name)
        new.meta[VALUE] = torch.empty((), device=device)
        mark_new_input(new)
        return new

    def _unscale(self, node: fx.Node) -> None:
        """In float32, for the inverse of a scale is a small number in fp16."""
        grad, value = self.env[node], self.values[node]
        low = value.dtype in LOW_DTYPES
        factor = self.factor[value.device]
        wide = self._call(Tensor.float, (grad,), value.float()) if low else grad
        scaled = self._call(torch.mul, (wide, factor), value.float() if low else value)
        if node in self.written:
            self.given[node] = grad
        self.env[node] = self._call(Tensor.to, (scaled, value.dtype), value) if low else scaled

    def _keep(self, node: fx.Node) -> None:
        if node in self.given:
            self.old[node] = self.given[node]
        elif node in self.written:
            self.old[node] = self._call(torch.clone, (self.env[node],), self.values[node])

    def _choose(self) -> None:
        """A gradient that the step has written to (zeroed, say) is left as a step leaves it."""
        for node, old in self.old.items():
            new, value = self.env[node], self.values[node]
            chosen = self._call(torch.where, (self.skip[value.device], old, new), value)
            self._call(Tensor.copy_, (self.given.get(node, new), chosen), value)

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], value: Tensor) -> fx.Node:
        """A new node at the end of the graph, whose result is like `value`."""
        if getattr(Tensor, function.__name__, None) is function:
            new = self.graph.call_method(function.__name__, args)
        else:
            new = self.graph.call_function(function, args)
        new.meta |= {VALUE: fresh(value, self.mode), PASS: "predicate_writes"}
        return new
