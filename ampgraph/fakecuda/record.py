"""What is launched, noted instead of done: the kernels and calls of Inductor's code, eager ops."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch._inductor.config as inductor_config
import torch._inductor.fx_passes.joint_graph as joint_graph
import torch._inductor.utils as inductor_utils
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampgraph.fakecuda.pretend import on_cpu
from ampgraph.fakecuda.replace import replaced, there
from ampgraph.fakecuda.traffic import TensorType, moved, size

# Ops that move nothing: they make another view, or room.
FREE = frozenset(
    "_reshape_alias _unsafe_view alias as_strided detach device empty empty_like empty_strided "
    "permute set_ size stride t transpose view".split()
)
CONFIG: dict[str, Any] = {
    "compile_threads": 1,  # a pool would compile elsewhere, where nothing is replaced
    "force_disable_caches": True,  # what comes from a cache is not recorded
    "profile_bandwidth": True,  # each kernel then knows its bytes; the code is the same
    "shape_padding": False,  # decides by benchmarks
    "triton.cudagraphs": False,
}


@dataclass(frozen=True)
class Call:
    """One launch of a Triton kernel, or one op that is called as it is ("extern").

    Attributes:
        kind: which of the two.
        name: of the kernel, or of the op's overload ("aten.mm.out").
        inputs, outputs: types of the tensors; of a kernel all are among its inputs.
        bytes: read and written.
    """

    kind: Literal["triton", "extern"]
    name: str
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    bytes: int

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the inputs, in order."""
        return tuple(t.dtype for t in self.inputs)


@dataclass
class Graph:
    """One compiled graph: its wrapper, kernels and, once it was run, its calls.

    Attributes:
        code: the Python that Inductor wrote around the kernels.
        backward: whether it is the backward of another.
        kernels: Triton sources by name.
        calls: of the last run, in order.
    """

    code: str
    backward: bool
    kernels: dict[str, str] = field(default_factory=dict[str, str])
    calls: list[Call] = field(default_factory=list[Call])

    @property
    def bytes(self) -> int:
        """All that its calls read and write."""
        return sum(call.bytes for call in self.calls)

    def of(self, kind: Literal["triton", "extern"]) -> list[Call]:
        """Its calls of one kind."""
        return [call for call in self.calls if call.kind == kind]


@dataclass
class Recording:
    """Everything compiled so far, in order."""

    graphs: list[Graph] = field(default_factory=list[Graph])

    @property
    def forward(self) -> list[Graph]:
        """The graphs that are not a backward."""
        return [graph for graph in self.graphs if not graph.backward]

    @property
    def backward(self) -> list[Graph]:
        """The backward graphs."""
        return [graph for graph in self.graphs if graph.backward]


class OpLog(TorchDispatchMode):
    """Notes each ATen op with its bytes. Ops that only write to what they are given are not run."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = "out" in kwargs
        out = kwargs["out"] if given else func(*args, **kwargs)
        if func._schema.name.split("::")[1] not in FREE:
            inputs = _types((args, {k: v for k, v in kwargs.items() if k != "out"}))
            count = moved(func, args, kwargs, out)
            self.calls.append(Call("extern", str(func), inputs, _types(out), count))
        return out


class Launcher:
    """Stands for a kernel in the generated code: launching it is noted."""

    def __init__(self, graph: Graph, name: str, source: str) -> None:
        self.graph, self.name = graph, name
        counted = re.search(r"'kernel_num_gb': ([0-9.e+-]+)", source)
        self.bytes = round(float(counted[1]) * 1e9) if counted else None
        signature = re.search(r"^def \w+\(([^)]*)\)", source, re.MULTILINE)
        self.names = [] if signature is None else re.findall(r"(\w+)[^,]*", signature[1])

    def run(self, *args: Any, **options: Any) -> None:
        """In place of a launch."""
        count = self._counted(args) if self.bytes is None else self.bytes
        self.graph.calls.append(Call("triton", self.name, _types(args), (), count))

    def _counted(self, args: Sequence[Any]) -> int:
        """Foreach kernels and users' own: each pointer once, one for both ways twice."""
        names = itertools.chain(self.names, itertools.repeat(""))
        return sum(
            size(value) * (2 if name.startswith("in_out_ptr") else 1)
            for name, value in zip(names, args, strict=False)
            if isinstance(value, Tensor)
        )


def _types(tree: object) -> tuple[TensorType, ...]:
    leaves = pytree.tree_leaves(tree)
    return tuple(TensorType.of(leaf) for leaf in leaves if isinstance(leaf, Tensor))


@contextlib.contextmanager
def inductor_recorded() -> Generator[Recording]:
    """Inside, Inductor's code for fake CUDA tensors is recorded, and runs without launching."""
    recording = Recording()
    with (
        inductor_config.patch(CONFIG),
        _compiling_recorded(recording),
        _constants_on_cpu(),
        _run_time_faked(),
    ):
        yield recording


@contextlib.contextmanager
def _compiling_recorded(recording: Recording) -> Generator[None]:
    compile_to_module: Any = GraphLowering.compile_to_module

    def save(code: str) -> None:
        recording.graphs.append(Graph(code, bool(V.graph.is_backward)))

    def launcher(self: Any, name: str, source: str, device_str: str = "cuda") -> Launcher:
        graph = recording.graphs[-1]
        graph.kernels[name] = source
        return Launcher(graph, name, source)

    def module_of(self: Any) -> Any:
        before = len(recording.graphs)
        module = compile_to_module(self)
        if len(recording.graphs) > before:
            module.call = _noting(recording.graphs[-1], module.call)
        return module

    new = {"save_output_code": staticmethod(save), "compile_to_module": module_of}
    with replaced(AsyncCompile, {"triton": launcher}), replaced(GraphLowering, new):
        yield


def _noting(graph: Graph, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(args: Any) -> Any:
        graph.calls.clear()
        with OpLog(graph.calls):
            return call(args)

    return run


@contextlib.contextmanager
def _constants_on_cpu() -> Generator[None]:
    """Inductor folds constants with real tensors on the graph's device."""
    folder: Any = joint_graph.UniformValueConstantFolder

    def folded(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with on_cpu():
                return function(*args, **kwargs)

        return run

    names = there(folder, ["run", "_add_peephole_patterns"])
    with replaced(folder, {name: folded(getattr(folder, name)) for name in names}):
        yield


@contextlib.contextmanager
def _run_time_faked() -> Generator[None]:
    """What the generated code imports to make and view tensors reads their addresses."""
    guards: Any = torch._C._dynamo.guards
    new: dict[str, Any] = {
        "_empty_strided_cuda": _empty_strided,
        "_reinterpret_tensor": _reinterpret,
    }
    # copy_if_misaligned is 2.13's and later, copy_misaligned 2.12's.
    new |= dict.fromkeys(there(guards, ["copy_if_misaligned", "copy_misaligned"]), _as_given)
    new |= dict.fromkeys(there(guards, ["assert_alignment"]), _nothing)
    copied: dict[str, Any] = {"copy_misaligned_inputs": _none_copied}  # 2.11
    with replaced(guards, new), replaced(inductor_utils, copied):
        yield


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    return torch.as_strided(tensor, size, stride, int(tensor.storage_offset()) + offset)


def _as_given(*tensors: Tensor) -> Any:
    return tensors[0] if len(tensors) == 1 else tensors


def _nothing(*args: Any) -> None:
    return None


def _none_copied(*args: Any, **kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    return [], []
