"""Run a random program: under eager autocast, and rewritten by this compiler; compare the two."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ampgraph.pipeline import Rewritten, rewrite_graph
from ampgraph.policy import Policy
from ampgraph.state import AutocastState
from programs import EAGER, Program, traced

Ambient = torch.dtype | None  # the dtype of the region around the program; None: no region


@contextlib.contextmanager
def ambient(dtype: Ambient) -> Generator[None]:
    """The caller's region, without the cache that would share casts between uses."""
    with torch.autocast("cpu", dtype or torch.bfloat16, dtype is not None, cache_enabled=False):
        yield


@dataclasses.dataclass
class Outcome:
    """What a run returned, what it left in its inputs, and the gradients, by name."""

    outputs: dict[str, Any]
    written: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    backward_error: str = ""
    folded: int = 0  # casts that the compiler inserted and then removed


def run(program: Program, call: Callable[..., Any], root: nn.Module, grad: bool) -> Outcome:
    """Call with fresh arguments; `root` holds the parameters and buffers that `call` uses."""
    arguments = dict(zip(program.named("x"), program.arguments(), strict=True))
    held = {n: getattr(root, n) for n in program.named("p") + program.named("b")}
    torch.manual_seed(7)
    with contextlib.nullcontext() if grad else torch.no_grad():
        out = call(*arguments.values())
    leaves = {n: t for n, t in {**arguments, **held}.items() if t.requires_grad}
    outcome = Outcome(
        dict(zip(program.outputs, out, strict=True)),
        {n: t.detach() for n, t in {**arguments, **held}.items()},
        {},
    )
    if grad and leaves:
        try:
            outcome.grads = _gradients(program, outcome.outputs, leaves)
        except RuntimeError as error:  # saved for the backward, then written to
            outcome.backward_error = str(error)
    return outcome


def _gradients(
    program: Program, outputs: Mapping[str, Any], leaves: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    sure = {n: t for n, t in outputs.items() if n not in program.inexact}
    ends = [t for t in sure.values() if t.requires_grad]
    if not ends:
        return {}
    generator = torch.Generator().manual_seed(3)
    wanted = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in ends]
    found = torch.autograd.grad(ends, list(leaves.values()), wanted, allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def eager(program: Program, dtype: Ambient, grad: bool) -> Outcome:
    """The oracle."""
    root = program.module(EAGER)

    def call(*args: Tensor) -> Any:
        with ambient(dtype):
            return root(*args)

    return run(program, call, root, grad)


def capture(program: Program, dtype: Ambient, grad: bool) -> fx.GraphModule:
    """The program as a graph whose nodes have the values they would have under a region."""
    gm = traced(program)
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)

    def convert(tensor: Tensor) -> Tensor:
        return mode.from_tensor(tensor, static_shapes=True)

    def call(node: fx.Node, args: Any, kwargs: Any) -> Any:
        with mode:
            value = called_node(node, args, kwargs)
        env.pending_fresh_unbacked_symbols.clear()
        return value

    with ambient(dtype), torch.set_grad_enabled(grad):
        annotate(program, gm, convert, call, lambda value: value)
    return gm


def annotate(
    program: Program,
    gm: fx.GraphModule,
    convert: Callable[[Tensor], Tensor],
    call: Callable[[fx.Node, Any, Any], Any],
    shown: Callable[[Any], Any],
) -> None:
    """Run the graph node by node and keep in each node what Dynamo would have kept."""
    values: dict[fx.Node, Any] = {}
    arguments = iter(program.arguments())
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            real = next(arguments) if node.op == "placeholder" else getattr(gm, node.target)
            values[node] = convert(real)
            # A copy: t_() changes the value, and not what Dynamo says of the placeholder.
            alias = shown(values[node].detach()).requires_grad_(real.requires_grad)
            node.meta["example_value"] = alias
        elif node.op != "output":
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
            values[node] = call(node, args, kwargs)
            node.meta["example_value"] = shown(values[node])


def called_node(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """What a node returns."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def rewritten(gm: fx.GraphModule, policy: Policy, dtype: Ambient, grad: bool) -> Rewritten:
    """The graph, rewritten for the CPU tensors of this test under any policy."""
    state = AutocastState.of({"cpu": dtype} if dtype else {})
    return rewrite_graph(gm, policies={"cpu": policy}, state=state, outputs="autocast", grad=grad)


def ours(
    program: Program, gm: fx.GraphModule, policy: Policy, dtype: Ambient, grad: bool
) -> Outcome:
    """The captured graph rewritten, and run with autocast off."""
    result = rewritten(gm, policy, dtype, grad)
    outcome = run(program, result.after, result.after, grad)
    return dataclasses.replace(outcome, folded=result.casts.removed)


def assert_same(program: Program, wanted: Outcome, got: Outcome) -> None:
    """Equal dtypes and bits; NaN equals NaN. The message shows the program."""
    assert not got.backward_error or wanted.backward_error, got.backward_error
    kinds = ["outputs", "written"] + (["grads"] if not wanted.backward_error else [])
    for kind in kinds:
        expected, found = getattr(wanted, kind), getattr(got, kind)
        assert expected.keys() == found.keys(), f"{kind}: {expected.keys()} {found.keys()}"
        for name, value in expected.items():
            if name in program.inexact:
                assert found[name].dtype == value.dtype, f"{name}: {found[name].dtype}"
                continue
            told = functools.partial(_told, program, f"{kind} {name}")
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True, msg=told)


def _told(program: Program, what: str, message: str) -> str:
    return f"{what}: {message}\n\n{program.text()}"
