"""The kernels of a model, from the code that Inductor generates for a GPU.

Without a GPU the model is sent to a child process as shapes, for what stands in for CUDA there
cannot be taken away again. `ampgraph.explain` has the door. What stands in is imported where it is
needed, for it brings Inductor and Triton with it.
"""

import contextlib
import pickle
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampgraph.capture import WhichDoor, captured_by, run_backward
from ampgraph.errors import AmpgraphError, FakeCudaError
from ampgraph.fakecuda.child import in_child
from ampgraph.fakecuda.gpus import GPU, gpu_named
from ampgraph.fakecuda.ship import shipped
from ampgraph.internals.autocast import ambient_autocast
from ampgraph.internals.dynamo import inductor
from ampgraph.launches import KernelCode, Kernels, Launch, Run
from ampgraph.options import Options

Enter = Callable[[Any], Callable[..., Any]]  # makes the callable that is run of a model


@dataclass(frozen=True)
class Setting:
    """How a program is run.

    Attributes:
        gpu: a name in `fakecuda.gpus`.
        options: of our compiler.
        door: "compile" or "backend", as for explain.
        backward: run that too.
        grad: whether gradients are enabled.
        ambient: the caller's own autocast dtype, None where it is off.
        precision: of float32 matmuls.
    """

    gpu: str
    options: Options
    door: WhichDoor
    backward: bool
    grad: bool
    ambient: torch.dtype | None
    precision: str

    @classmethod
    def here(cls, gpu: str, options: Options, door: WhichDoor, backward: bool) -> "Setting":
        """With the caller's state of torch."""
        ambient = ambient_autocast()
        return cls(
            gpu,
            options,
            door,
            backward,
            torch.is_grad_enabled(),
            ambient.get("cuda", ambient.get("cpu")),
            torch.get_float32_matmul_precision(),
        )

    @property
    def dtype(self) -> torch.dtype | None:
        """That torch.autocast is asked for, to compare with."""
        if isinstance(self.options.dtype, torch.dtype):
            return self.options.dtype
        return self.ambient or (None if self.options.dtype == "ambient" else torch.bfloat16)


def kernels_of(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], setting: Setting
) -> Kernels:
    """The kernels of `model(*args, **kwargs)` on the GPU, and of its backward if asked for.

    A model on a GPU of that name runs there; any other is compiled for it in a child process.

    Raises:
        OptionError: no such GPU is known. FakeCudaError: the model cannot be sent or run without
        values, or this machine lacks a C++ compiler.
    """
    gpu = gpu_named(setting.gpu)
    if _is_on(setting.gpu, model, args, kwargs):
        return _real(model, args, kwargs, setting)
    program = shipped((model, tuple(args), dict(kwargs)))
    try:
        found: Kernels = in_child(_faked, program, setting)
    except AmpgraphError:
        raise
    except Exception as error:
        raise FakeCudaError(
            f"on {gpu.name} the model fails: {_first_line(error)}",
            cure="take out what needs a tensor's value (.item(), bool()) or makes tensors on a "
            "device of its own: there, tensors have no values, and all are on the GPU",
        ) from error
    return found


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def _is_on(name: str, *program: Any) -> bool:
    """Whether a tensor of the program is on a GPU of that name."""
    modules = [leaf for leaf in pytree.tree_leaves(program) if isinstance(leaf, nn.Module)]
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    tensors += [leaf for leaf in pytree.tree_leaves(program) if isinstance(leaf, Tensor)]
    return any(
        tensor.is_cuda and name.lower() in torch.cuda.get_device_name(tensor.device).lower()
        for tensor in tensors
        if torch.cuda.is_available()
    )


def _faked(program: bytes, setting: Setting) -> Kernels:
    """The child's side."""
    from ampgraph.fakecuda.machine import fake_cuda
    from ampgraph.fakecuda.pretend import gpu_pretended

    gpu = gpu_named(setting.gpu)
    torch.set_float32_matmul_precision(setting.precision)
    recordings: list[Any] = []
    for enter in (_ours(setting), _autocast(setting)):
        with fake_cuda(gpu) as recording:
            model, args, kwargs = pickle.loads(program)
            _run(enter(model), args, kwargs, setting)
        recordings.append(recording)
    with gpu_pretended(gpu):
        return _told(gpu, recordings, real=False)


def _real(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], setting: Setting) -> Kernels:
    """On the GPU that is here, by the same recording."""
    from ampgraph.fakecuda.record import inductor_recorded

    recordings: list[Any] = []
    for enter in (_ours(setting), _autocast(setting)):
        with inductor_recorded(launch=True) as recording:
            _run(enter(model), args, kwargs, setting)
        recordings.append(recording)
    return _told(gpu_named(setting.gpu), recordings, real=True)


def _ours(setting: Setting) -> Enter:
    return lambda model: captured_by(setting.door, model, setting.options)


def _autocast(setting: Setting) -> Enter:
    """torch.compile under torch.autocast, in a cache of its own."""

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = inductor(None, {})(gm, inputs)
        return compiled

    def enter(model: Any) -> Callable[..., Any]:
        compiled: Any = torch.compile(model, backend=backend)

        def run(*args: Any, **kwargs: Any) -> Any:
            with _autocast_region(setting.dtype):
                return compiled(*args, **kwargs)

        return run

    return enter


@contextlib.contextmanager
def _autocast_region(dtype: torch.dtype | None) -> Generator[None]:
    if dtype is None:
        yield
        return
    with torch.autocast("cuda", dtype):
        yield


def _run(run: Callable[..., Any], args: Any, kwargs: Any, setting: Setting) -> None:
    with torch.set_grad_enabled(setting.grad or setting.backward):
        with _autocast_region(setting.ambient):
            out = run(*args, **kwargs)
        if setting.backward:
            run_backward(out)


def _told(gpu: GPU, recordings: Sequence[Any], *, real: bool) -> Kernels:
    """Both runs, each kernel compiled once."""
    known: dict[str, KernelCode] = {}
    ours, autocast = (_launches(recording, known) for recording in recordings)
    return Kernels(gpu.name, gpu.bandwidth, Run(ours), Run(autocast), real)


def _launches(recording: Any, known: dict[str, KernelCode]) -> tuple[Launch, ...]:
    return tuple(
        Launch(
            call.kind,
            call.name,
            graph.backward,
            call.dtypes,
            call.bytes,
            _code(graph.kernels[call.name], known) if call.kind == "triton" else None,
            call.kind == "triton" and graph.kernels[call.name].is_cast,
        )
        for graph in recording.graphs
        for call in graph.calls
    )


def _code(kernel: Any, known: dict[str, KernelCode]) -> KernelCode:
    from ampgraph.fakecuda.binaries import binaries_of

    if kernel.source not in known:
        binaries = binaries_of(kernel.function, kernel.source)
        known[kernel.source] = KernelCode(
            kernel.source,
            kernel.ops,
            tuple(b.assembly for b in binaries),
            tuple(b.registers for b in binaries),
            tuple(b.spilled for b in binaries),
        )
    return known[kernel.source]
