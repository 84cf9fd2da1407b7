"""torch's own CUDA autocast without a GPU: on fake tensors, recorded, and replayed on the CPU.

The CUDA autocast kernels are in every build. Under a FakeTensorMode they cast fake tensors on
"cuda:0", and a trace below them holds every cast as a node. The same trace on CPU tensors then
computes what CUDA autocast would, up to the kernels that differ between the devices.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ampgraph.internals.autocast import enter_autocast, exit_autocast
from program_runs import Outcome, annotate, called_node, run
from programs import EAGER, NAME, Program, called, traced

FACTORIES = (torch.ones, torch.full, torch.arange)


@contextlib.contextmanager
def region(
    device: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool = False
) -> Generator[None]:
    """`torch.autocast`, which for "cuda" would switch itself off without a GPU."""
    if device != "cuda":
        with torch.autocast(device, dtype, enabled, cache_enabled):
            yield
        return
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    cached = torch.is_autocast_cache_enabled()
    _set(enabled, dtype or before[1], cache_enabled)
    try:
        yield
    finally:
        _set(*before, cached)


def _set(enabled: bool, dtype: torch.dtype, cache_enabled: bool) -> None:
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_cache_enabled(cache_enabled)


def _device(function: object) -> dict[str, str]:
    return {"device": "cuda"} if function in FACTORIES else {}


def make(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `called`, with factories on the fake GPU."""
    return called(function, *args, **_device(function), **kwargs)


NAMES = {**EAGER, "autocast": region, "make": make, "DEVICE": "cuda", "FOREIGN": "cpu"}


def fake(tensor: Tensor, mode: FakeTensorMode, device: str = "cuda:0") -> Tensor:
    """A fake tensor on a device; without gradients, for which torch would look for a real one."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def with_grad(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def recorded(call: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """What CUDA autocast, as it is set now, makes of a call: ATen ops and explicit casts.

    The graph is then moved to the CPU.
    """
    mode = FakeTensorMode()
    with torch.no_grad():
        gm = make_fx(call)(*[fake(t, mode) for t in inputs])
    for node in gm.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
    gm.recompile()
    return gm


def evaluated(text: str, space: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """A call on CPU tensors as CUDA autocast would make it."""
    names = [n for n in dict.fromkeys(NAME.findall(text)) if isinstance(values[n], Tensor)]

    def call(*given: Tensor) -> Any:
        return eval(text, dict(space), {**values, **dict(zip(names, given, strict=True))})

    gm = recorded(call, [values[n] for n in names])
    with torch._C._DisableAutocast():
        return gm(*[values[n] for n in names])


def replayed(program: Program, dtype: torch.dtype, grad: bool) -> Outcome:
    """The oracle: the whole program as CUDA autocast would run it."""

    def forward(*values: Tensor) -> Any:
        given = dict(zip(program.inputs, values, strict=True))
        with region("cuda", dtype):
            return program.module(NAMES, given)(*[given[n] for n in program.named("x")])

    gm = recorded(forward, list(program.inputs.values()))
    root = program.module(EAGER)
    held = dict(root.named_parameters()) | dict(root.named_buffers())

    def call(*args: Tensor) -> Any:
        given = {**held, **dict(zip(program.named("x"), args, strict=True))}
        return gm(*[given[name] for name in program.inputs])

    return run(program, call, root, grad)


def capture(program: Program, dtype: torch.dtype) -> fx.GraphModule:
    """The program as a graph on the CPU, whose nodes have the dtypes of CUDA autocast."""
    gm = traced(program)
    mode = FakeTensorMode()

    def call(node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.target is enter_autocast:
            device, wanted, enabled, _ = args
            entered = region("cuda" if device == "cpu" else "cpu", wanted, enabled)
            entered.__enter__()
            return entered
        if node.target is exit_autocast:
            return args[0].__exit__(None, None, None)
        with mode, torch.no_grad():
            return called_node(node, args, {**kwargs, **_device(node.target)})

    def shown(value: Any) -> Any:
        """On the CPU, where every value may need a gradient."""
        on_cpu = pytree.tree_map_only(Tensor, lambda t: fake(t, mode, "cpu"), value)
        return pytree.tree_map_only(Tensor, with_grad, on_cpu)

    with region("cuda", dtype):
        annotate(program, gm, lambda t: fake(t, mode), call, shown)
    return gm
