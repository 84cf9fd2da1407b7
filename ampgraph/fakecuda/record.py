"""What is launched, noted instead of done: the kernels and calls of Inductor's code, eager ops."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import contextlib
import functools
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
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampgraph.fakecuda.binaries import uses_of_pointers
from ampgraph.fakecuda.pretend import on_cpu
from ampgraph.fakecuda.replace import replaced, there
from ampgraph.fakecuda.traffic import TensorType, moved, size

# Ops that move nothing: they make another view, or room.
FREE = frozenset(
    "_reshape_alias _unsafe_view alias as_strided detach device empty empty_like empty_strided "
    "expand permute reshape set_ size slice squeeze stride t transpose unsqueeze view".split()
)
CASTS = frozenset(["aten._to_copy", "aten.to", "prims.convert_element_type"])
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


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel as Inductor wrote it.

    Attributes:
        name: one of its own in the graph.
        function: its name in the source.
        source: a Python module.
        ops: the ATen ops it is made of; none are known of a user's kernel.
    """

    name: str
    function: str
    source: str
    ops: tuple[str, ...] = ()

    @property
    def is_cast(self) -> bool:
        """Whether it does nothing but change a dtype, maybe of a view."""
        moving = {op for op in self.ops if op.removeprefix("aten.") not in FREE}
        return bool(moving) and CASTS.issuperset(moving)


@dataclass
class Graph:
    """One compiled graph: its wrapper, its kernels, and its calls as often as it was run.

    Attributes:
        code: the Python that Inductor wrote around the kernels.
        backward: whether it is the backward of another.
        kernels: by name.
        calls: in order.
    """

    code: str
    backward: bool
    kernels: dict[str, Kernel] = field(default_factory=dict[str, Kernel])
    calls: list[Call] = field(default_factory=list[Call])

    @property
    def bytes(self) -> int:
        """All that its calls read and write."""
        return sum(call.bytes for call in self.calls)

    @property
    def cast_bytes(self) -> int:
        """Those of its kernels that only cast."""
        kernels = [self.kernels[call.name] for call in self.of("triton")]
        calls = zip(kernels, self.of("triton"), strict=True)
        return sum(call.bytes for kernel, call in calls if kernel.is_cast)

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
    """Notes each ATen op with its bytes.

    Args:
        calls: the list to note them in.
        launch: run also what only writes to an `out=`; fake tensors need no such thing, and not
            every op can.
    """

    def __init__(self, calls: list[Call], launch: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls, self.launch = calls, launch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        skipped = "out" in kwargs and not self.launch
        out = kwargs["out"] if skipped else func(*args, **kwargs)
        if func._schema.name.split("::")[1] not in FREE:
            inputs = _types((args, {k: v for k, v in kwargs.items() if k != "out"}))
            count = moved(func, args, kwargs, out)
            self.calls.append(Call("extern", str(func), inputs, _types(out), count))
        return out


class Launcher:
    """Stands for a kernel in the generated code: a launch is noted, and done if there is a GPU."""

    def __init__(self, graph: Graph, kernel: Kernel, real: Any) -> None:
        self.graph, self.kernel, self.real = graph, kernel, real

    def run(self, *args: Any, **options: Any) -> None:
        """In place of a launch."""
        tensors = [value for value in args if isinstance(value, Tensor)]
        count = sum(n * size(tensor) for n, tensor in zip(self.accesses, tensors, strict=False))
        count = count if self.counted is None else self.counted
        self.graph.calls.append(Call("triton", self.kernel.name, _types(args), (), count))
        if self.real is not None:
            self.real.run(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    @functools.cached_property
    def counted(self) -> int | None:
        """Inductor's own count of bytes; it has none for foreach kernels and users' own."""
        told = re.search(r"'kernel_num_gb': ([0-9.e+-]+)", self.kernel.source)
        return round(float(told[1]) * 1e9) if told else None

    @functools.cached_property
    def accesses(self) -> list[int]:
        """How often each pointer's tensor is moved: read, written, or both."""
        if self.counted is not None:
            return []
        if "triton_heuristics.foreach" in self.kernel.source:
            head = re.search(r"^def \w+\(([^)]*)\)", self.kernel.source, re.MULTILINE)
            names = re.findall(r"\w*_ptr\d+", head[1] if head else "")
            return [2 if name.startswith("in_out") else 1 for name in names]
        return [sum(u) for u in uses_of_pointers(self.kernel.function, self.kernel.source)]


def _types(tree: object) -> tuple[TensorType, ...]:
    leaves = pytree.tree_leaves(tree)
    return tuple(TensorType.of(leaf) for leaf in leaves if isinstance(leaf, Tensor))


@contextlib.contextmanager
def inductor_recorded(*, launch: bool = False) -> Generator[Recording]:
    """Inside, the GPU code that Inductor makes is recorded.

    Args:
        launch: do what is noted, on a real GPU; else tensors are fake and nothing is launched.
    """
    recording = Recording()
    with contextlib.ExitStack() as stack:
        stack.enter_context(inductor_config.patch(CONFIG))
        stack.enter_context(_compiling_recorded(recording, launch))
        if not launch:
            stack.enter_context(_constants_on_cpu())
            stack.enter_context(_run_time_faked())
        yield recording


@contextlib.contextmanager
def _compiling_recorded(recording: Recording, launch: bool) -> Generator[None]:
    compile_to_module: Any = GraphLowering.compile_to_module
    compile_kernel: Any = AsyncCompile.triton
    define_kernel: Any = TritonScheduling.define_kernel
    ops: dict[str, tuple[str, ...]] = {}

    def save(code: str) -> None:
        recording.graphs.append(Graph(code, bool(V.graph.is_backward)))

    def defined(self: Any, source: str, schedule: Any, kernel: Any) -> Any:
        name = define_kernel(self, source, schedule, kernel)
        ops[name] = tuple(dict.fromkeys([*ops.get(name, ()), *_ops_of(schedule)]))
        return name

    def launcher(self: Any, function: str, source: str, device_str: str = "cuda") -> Launcher:
        own = re.search(r"'kernel_name': '(\w+)'", source)
        name = own[1] if own else function
        kernel = Kernel(name, function, source, ops.get(name, ()))
        recording.graphs[-1].kernels[name] = kernel
        real = compile_kernel(self, function, source, device_str) if launch else None
        return Launcher(recording.graphs[-1], kernel, real)

    def module_of(self: Any) -> Any:
        before = len(recording.graphs)
        ops.clear()
        module = compile_to_module(self)
        if len(recording.graphs) > before:
            module.call = _noting(recording.graphs[-1], module.call, launch)
        return module

    new = {"save_output_code": staticmethod(save), "compile_to_module": module_of}
    with (
        replaced(AsyncCompile, {"triton": launcher}),
        replaced(GraphLowering, new),
        replaced(TritonScheduling, {"define_kernel": defined}),
    ):
        yield


def _ops_of(schedule: Sequence[Any]) -> list[str]:
    """The names of the ATen ops behind the scheduler's nodes."""
    nodes = [
        node for group in schedule if hasattr(group, "get_nodes") for node in group.get_nodes()
    ]
    origins = [o for node in nodes if node.node is not None for o in node.node.get_origins()]
    found = {str(o.meta["original_aten"]) for o in origins if o.meta.get("original_aten")}
    return sorted({".".join(name.split(".")[:2]) for name in found})


def _noting(graph: Graph, call: Callable[[Any], Any], launch: bool) -> Callable[[Any], Any]:
    def run(args: Any) -> Any:
        with OpLog(graph.calls, launch):
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
