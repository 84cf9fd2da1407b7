"""The oracle: eager torch.autocast(cache_enabled=False) beside the rewritten graph, bit for bit.

The rewritten graph runs with autocast off, checked before every node, and holds no autocast
region; so equality can only come from the casts that stand in it. `casts_made` counts what eager
autocast casts, below the dispatcher, for tests that say how many casts they expect.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampgraph.internals.autocast import enter_autocast, exit_autocast
from ampgraph.internals.tensors import detect_fake_mode
from ampgraph.pipeline import Rewritten, rewrite_graph
from ampgraph.policy import Policy
from ampgraph.state import AutocastState

REGION = (enter_autocast, exit_autocast, torch.set_autocast_enabled)


def leaves_of(tree: object) -> list[Tensor]:
    """The distinct tensors in a tree, in order."""
    found = {id(t): t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)}
    return list(found.values())


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a function: `leaves` are the tensors among its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    @property
    def leaves(self) -> list[Tensor]:
        return leaves_of((self.args, dict(self.kwargs)))

    def on(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other values in place of the leaves."""
        places = {id(old): new for old, new in zip(self.leaves, leaves, strict=True)}
        swap = lambda leaf: places.get(id(leaf), leaf)  # noqa: E731
        args, kwargs = pytree.tree_map(swap, (self.args, dict(self.kwargs)))
        return args, kwargs

    def __call__(self, leaves: Sequence[Tensor]) -> Any:
        args, kwargs = self.on(leaves)
        return self.function(*args, **kwargs)


def faked(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The leaves as fake tensors of one mode; fake ones stay."""
    if any(isinstance(leaf, FakeTensor) for leaf in leaves):
        return list(leaves)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return [mode.from_tensor(leaf, static_shapes=True) for leaf in leaves]


def graph_of(call: Call, target: Any = None) -> fx.GraphModule:
    """A graph of one node that makes the call; each tensor a placeholder with a fake value.

    `target` is a function to call, or a method's name; the call's own function if not given.
    """
    target = target or call.function
    graph = fx.Graph()
    places: list[fx.Node] = []
    for i, leaf in enumerate(faked(call.leaves)):
        places.append(graph.placeholder(f"x{i}"))
        places[-1].meta["example_value"] = leaf
    args, kwargs = call.on(places)
    kind = "call_method" if isinstance(target, str) else "call_function"
    graph.output(graph.create_node(kind, target, args, kwargs, name="made"))
    return fx.GraphModule(torch.nn.Module(), graph)


class AutocastOff(fx.Interpreter):
    """Runs a graph and insists that no autocast is on, and that no node turns one on."""

    def run_node(self, n: fx.Node) -> Any:
        assert not torch.is_autocast_enabled("cpu"), f"{n}: runs with autocast on"
        assert n.target not in REGION, f"{n}: an autocast region"
        return super().run_node(n)


class CastCounter(TorchDispatchMode):
    """Counts the casts that reach the backend, whoever asked for them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is not None:
            self.casts += kwargs["dtype"] != args[0].dtype
        return func(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run returned, left in its inputs, and gave as gradients."""

    out: list[Any]
    inputs: list[Tensor]
    grads: list[Tensor | None]


def seed(value: int) -> None:
    """torch.manual_seed for the CPU alone, a hundred times faster.

    42 is what torch's own samples of random ops seed with, inside the function that is compared.
    """
    torch.default_generator.manual_seed(value)


def copied(leaf: Tensor) -> Tensor:
    """A copy with the same strides and the same wish for a gradient."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def run(function: Callable[[Sequence[Tensor]], Any], leaves: Sequence[Tensor]) -> Result:
    """Run on copies of `leaves`, with gradients of every result to every leaf that wants one."""
    seed(42)
    own = [copied(leaf) for leaf in leaves]
    # In-place ops may not write to a leaf that wants a gradient: each gets a copy before it.
    given = [t.clone() if t.requires_grad else t for t in own]
    out = pytree.tree_leaves(function(given))
    return Result(out, [g.detach() for g in given], gradients(out, own))


def gradients(out: Sequence[Any], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients for fixed random cotangents, None where nothing flows."""
    roots = [o for o in out if isinstance(o, Tensor) and o.requires_grad]
    wanted = [t for t in leaves if t.requires_grad]
    if not roots or not wanted:
        return []
    seed(2)
    seeds = [torch.randn(r.shape, dtype=torch.float64).to(r.dtype) for r in roots]
    return list(torch.autograd.grad(roots, wanted, seeds, allow_unused=True))


def difference(ref: Result, got: Result) -> str | None:
    """What differs between two results, None where they are the same to the bit."""
    for what in ("out", "inputs", "grads"):
        one, two = getattr(ref, what), getattr(got, what)
        if len(one) != len(two):
            return f"{what}: {len(one)} and {len(two)} values"
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            found = _difference(a, b)
            if found:
                return f"{what}[{i}]: {found}"
    return None


def _difference(a: Any, b: Any) -> str | None:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None if type(a) is type(b) and (a == b or a != a) else f"{a} and {b}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.is_complex():
        a, b = (torch.view_as_real(t.resolve_conj()) for t in (a, b))
    same = torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return None if same else f"values differ by up to {(a - b).abs().max().item():g}"


def in_autocast(call: Call, dtype: torch.dtype) -> Callable[[Sequence[Tensor]], Any]:
    """The call as eager autocast makes it."""

    def eager(leaves: Sequence[Tensor]) -> Any:
        with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
            return call(leaves)

    return eager


@contextlib.contextmanager
def cuda_autocast(dtype: torch.dtype) -> Generator[None]:
    """Autocast for fake tensors on a GPU that is not there: torch.autocast would switch off."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
        torch.clear_autocast_cache()


def compare(call: Call, dtype: torch.dtype, eager: Result, target: Any = None) -> str | None:
    """What differs between eager autocast's result of the call and ours; casts count too."""
    after = without_autocast(rewritten(graph_of(call, target), dtype).after)
    found = difference(eager, run(after, call.leaves))
    if found is None:
        made = [casts_made(how, call.leaves) for how in (in_autocast(call, dtype), after)]
        found = None if made[0] == made[1] else f"{made[0]} casts and {made[1]}"
    return found


def rewritten(
    gm: fx.GraphModule,
    dtype: torch.dtype = torch.bfloat16,
    *,
    policy: Policy | None = None,
    device_type: str = "cpu",
    grad: bool = True,
) -> Rewritten:
    """The graph rewritten as under autocast(device_type, dtype), with any policy."""
    return rewrite_graph(
        gm,
        policies={device_type: policy or Policy.autocast(device_type)},
        state=AutocastState.of({device_type: dtype}),
        outputs="autocast",
        grad=grad,
    )


def without_autocast(gm: fx.GraphModule) -> Callable[[Sequence[Tensor]], Any]:
    """The graph as a function, run with autocast off."""
    return lambda leaves: AutocastOff(gm).run(*leaves)


def casts_made(function: Callable[[Sequence[Tensor]], Any], leaves: Sequence[Tensor]) -> int:
    """How many casts a run makes, the gradients left out."""
    counter = CastCounter()
    with counter:
        seed(42)
        function([t.clone() if t.requires_grad else t for t in map(copied, leaves)])
    return counter.casts


def on_cuda(leaf: Tensor) -> Tensor:
    """A fake cuda tensor of the same form, to be called inside a fake mode."""
    if leaf.layout != torch.strided:
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cuda:0")


def dtypes_and_casts(
    function: Callable[[Sequence[Tensor]], Any], leaves: Sequence[Tensor]
) -> tuple[list[torch.dtype], int]:
    """The dtypes of a run's results, and how many casts it made."""
    counter = CastCounter()
    with counter:
        out = function(leaves)
    return [t.dtype for t in leaves_of(out)], counter.casts


class _Captured(fx.Interpreter):
    """Leaves every node the fake value it had without autocast, as Dynamo does."""

    def run_node(self, n: fx.Node) -> Any:
        n.meta["example_value"] = super().run_node(n)
        return n.meta["example_value"]


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """A program as a graph, traced on symbols and captured without autocast."""
    gm = fx.symbolic_trace(function)
    leaves = faked(inputs)
    with detect_fake_mode(leaves) or FakeTensorMode():
        _Captured(gm).run(*leaves)
    return gm
