"""Every touch of something private to torch, with the version it was seen in (2.13 unless said).

Nothing is patched; what is imported here may move, and then this is the one file to mend.
"""

# The one file that may touch private names, some of which torch's stubs do not know.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import contextlib
import inspect
import itertools
import logging
import re
import sys
import types
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.eval_frame import OptimizedModule, _TorchDynamoContext, innermost_backend
from torch._dynamo.exc import TorchRuntimeError
from torch._guards import detect_fake_mode
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "OptimizedModule",
    "PreDispatchMode",
    "TorchDispatchMode",
    "TorchRuntimeError",
    "ambient_autocast",
    "autocast_kernels",
    "autocast_off_at_run_time",
    "compile_context_of",
    "compile_wrapper_in_caller",
    "composite_kernel",
    "custom_op_name",
    "detect_fake_mode",
    "disable_autocast",
    "enter_autocast",
    "exit_autocast",
    "has_autocast_kernel",
    "is_composite",
    "is_traced",
    "make_fx",
    "name_of",
    "needs_elements",
    "op_names",
    "overloads_of",
    "pre_dispatch",
    "register_autocast_dtype",
    "schema_of",
    "unset_fake_temporarily",
]

enter_autocast = _enter_autocast
set_grad_enabled = torch._C._set_grad_enabled
exit_autocast = _exit_autocast


class PreDispatchMode(SchemaCheckMode):
    """A dispatch mode on the PreDispatch key: it sees each op before autocast and autograd would.

    `torch._ops._set_mode_pre_dispatch` admits only three classes of modes; SchemaCheckMode is the
    one that stands alone, so its slot (never its code) is used.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)


@contextlib.contextmanager
def pre_dispatch(mode: PreDispatchMode) -> Generator[None]:
    """Run the ops called inside through `mode`, composites still whole."""
    with enable_python_dispatcher(), mode:
        yield


def is_composite(op: OpOverload, device_type: str) -> bool:
    """Whether the dispatcher would open `op` above autograd on this device, showing its inner ops.

    True for ops with a CompositeImplicitAutograd kernel and none of the device's own.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    backend = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}.get(device_type, "CPU")
    name = op.name()
    return has(name, "CompositeImplicitAutograd") and not has(name, backend)


def composite_kernel(op: OpOverload) -> Callable[..., Any]:
    """The op's CompositeImplicitAutograd kernel, as eager torch runs it.

    `decompose` would prefer a Python kernel where there is one, for symbolic shapes. Thirty ops
    have one, and some make other ops than the C++ does: `matmul.out` calls mm, which autocast
    casts, and not `mm.out`, which it leaves alone (torch/_decomp/decompositions.py).
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        symbolic = any(
            isinstance(leaf, torch.Tensor) and leaf._has_symbolic_sizes_strides
            for leaf in pytree.tree_leaves((args, kwargs))
        )
        if symbolic:
            return op.decompose(*args, **kwargs)
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    return run


def needs_elements(error: Exception) -> bool:
    """Whether a fake tensor was asked for elements, by the dispatcher or by a C++ kernel."""
    asked = isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
    return asked or "its data is not allocated yet" in str(error)


def ambient_autocast() -> dict[str, torch.dtype]:
    """The device types whose autocast is on now, each with its dtype."""
    return {
        device: torch.get_autocast_dtype(device)
        for device in torch._C._autocast_supported_devices()
        if torch.is_autocast_enabled(device)
    }


def disable_autocast() -> contextlib.AbstractContextManager[None]:
    """Autocast off on every device, also for the autocast keys below us."""
    return torch._C._DisableAutocast()


@contextlib.contextmanager
def autocast_off_at_run_time() -> Generator[None]:
    """Compile with no autocast, into code that also turns the caller's autocast off when it runs.

    AOTAutograd wraps forward and backward in `_DisableAutocast` where `_is_any_autocast_enabled()`
    was true while it compiled (`graph_compile.py`, `disable_amp`). So every real device is off and
    one that no build has ("ipu") is on: nothing is cast, and the wrapping is emitted.
    """
    before = ambient_autocast()
    off = before.keys() - {"ipu"}
    try:
        for device in off:
            torch.set_autocast_enabled(device, False)
        torch.set_autocast_enabled("ipu", True)
        yield
    finally:
        torch.set_autocast_enabled("ipu", "ipu" in before)
        for device in off:
            torch.set_autocast_enabled(device, True)


@contextlib.contextmanager
def autocast_as(region: Iterable[tuple[str, torch.dtype, bool]]) -> Generator[None]:
    """Autocast as these say, on any build: torch.autocast("cuda") itself asks for a GPU."""
    devices = tuple(region)
    before = [(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d, _, _ in devices]
    try:
        _set_autocast(devices)
        yield
    finally:
        _set_autocast(before)


def _set_autocast(region: Iterable[tuple[str, torch.dtype, bool]]) -> None:
    for device, dtype, enabled in region:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


_AUTOCAST_CALLS = frozenset(
    function
    for module in (torch, torch._C)
    for name, function in vars(module).items()
    if "autocast" in name and isinstance(function, types.BuiltinFunctionType)
)


@contextlib.contextmanager
def autocast_asked() -> Generator[list[str]]:
    """Collect the names of the calls that ask for the autocast state or change it.

    Python's profiling hook shows each call of a C function, however it was imported. Where a
    profiler written in C has the hook, nothing can be seen, so the answer is that one asked.
    """
    asked: list[str] = []
    before: Any = sys.getprofile()
    if before is not None and not callable(before):
        yield ["unknown"]
        return

    def watch(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and argument in _AUTOCAST_CALLS:
            asked.append(argument.__name__)

    sys.setprofile(watch)
    try:
        yield asked
    finally:
        sys.setprofile(before)


def has_python_backward(tree: object) -> bool:
    """Whether an `autograd.Function` stands in the history of a result."""
    leaves = [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]
    ahead, seen = [t.grad_fn for t in leaves], set[Any]()
    while ahead:
        node = ahead.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [after for after, _ in node.next_functions]
    return False


def compile_wrapper_in_caller() -> object | None:
    """The `torch._TorchCompileWrapper` that is calling the backend, one object per torch.compile.

    Dynamo hands a backend only the graph; the wrapper tells which compiled callable asked.
    """
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(12):
        if frame is None:
            return None
        if isinstance(frame.f_locals.get("self"), torch._TorchCompileWrapper):
            found: object = frame.f_locals["self"]
            return found
        frame = frame.f_back
    return None


def compile_context_of(compiled: object) -> object | None:
    """The `_TorchCompileWrapper` behind what torch.compile returned, or None."""
    context = _dynamo_context(compiled)
    if context is None:
        return None
    callback: Any = context.callback
    return innermost_backend(callback)


def _dynamo_context(compiled: object) -> _TorchDynamoContext | None:
    context = getattr(compiled, "dynamo_ctx", None)
    if context is None and isinstance(compiled, torch.nn.Module):
        return _dynamo_context(compiled._compiled_call_impl)
    cells = getattr(compiled, "__closure__", None) or ()
    found = [c.cell_contents for c in cells if isinstance(c.cell_contents, _TorchDynamoContext)]
    return context or (found[0] if found else None)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """The function, which Dynamo breaks the graph at and never looks into; with its type kept."""
    wrapped: Any = torch.compiler.disable(function)
    return wrapped  # type: ignore[no-any-return]


def compile_up_to(
    limit: int, model: Any, backend: Callable[..., Any], keywords: Mapping[str, Any]
) -> Any:
    """torch.compile with at least so many compilations of one function."""
    config = torch._dynamo.config
    room: dict[str, Any] = {"recompile_limit": max(config.recompile_limit, limit)}
    if supported(**room):
        return torch.compile(model, backend=backend, **{**room, **keywords})
    compiled = torch.compile(model, backend=backend, **keywords)
    context = _dynamo_context(compiled)
    if context is not None:  # before 2.13 there is only the config: set as torch does for dynamic=
        context.enter_exit_hooks.append(config._make_closure_patcher(**room))
    return compiled


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """The op's parsed schema: its arguments, results and what they alias."""
    return op._schema


def name_of(op: OpOverload) -> str:
    """The dispatcher's name: "aten::softmax.int", and "aten::linear" for the default overload."""
    name: str = op.name()
    return name


def overloads_of(packet: OpOverloadPacket) -> dict[str, OpOverload]:
    """The overloads of an op by their names, "default" among them."""
    names: list[str] = packet.overloads()
    return {name: getattr(packet, name) for name in names}


def op_names() -> list[str]:
    """Every operator the dispatcher knows now, with its overload: "aten::add.Tensor"."""
    return torch._C._dispatch_get_all_op_names()


def autocast_kernels(device_type: str) -> frozenset[str]:
    """The ops with an autocast kernel for a device type, on any build: the CPU wheel has all."""
    key = f"Autocast{device_type.upper()}"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return frozenset(name for name in op_names() if has(name, key))


def has_autocast_kernel(op: OpOverload, device_type: str) -> bool:
    """Whether the dispatcher has an autocast kernel for this op, whoever registered it."""
    key = f"Autocast{device_type.upper()}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name_of(op), key)


def register_autocast_dtype(op: OpOverload, device_type: str) -> torch.dtype | None:
    """The dtype that `torch.library.register_autocast` casts this op's inputs to, or None.

    A `custom_op` keeps it on its definition (a dict since 2.13, two attributes before), any other
    op only in the closure of the kernel that was registered.
    """
    definition = OPDEFS.get(name_of(op))
    if definition is not None:
        before_2_13 = getattr(definition, f"_autocast_{device_type}_dtype", None)
        dtypes: Mapping[str, torch.dtype | None] = getattr(definition, "_autocast_dtype", {})
        return dtypes.get(device_type, before_2_13)
    key = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}")
    kernel = op.py_kernels.get(key)
    if not isinstance(kernel, types.FunctionType):
        return None
    # Before 2.13 the kernel stands under two devices' keys, whichever it was registered for.
    closure = inspect.getclosurevars(kernel).nonlocals
    dtype = closure.get("cast_inputs") if closure.get("device_type") == device_type else None
    return dtype if isinstance(dtype, torch.dtype) else None


def custom_op_name(definition: object) -> str | None:
    """The qualified name of what `torch.library.custom_op` returned, or None for anything else."""
    return definition._qualname if isinstance(definition, CustomOpDef) else None


def inductor(mode: str | None, options: Mapping[str, Any], dynamic: bool | None = None) -> Any:
    """The backend that `torch.compile(backend="inductor", mode=..., options=...)` would use."""
    return torch._TorchCompileInductorWrapper(mode, dict(options), dynamic)


def lookup_backend(backend: Any) -> Callable[..., Any]:
    """A Dynamo backend by name, or the callable itself."""
    found: Callable[..., Any] = torch._dynamo.lookup_backend(backend)
    return found


def backend_names() -> list[str]:
    """Every backend name Dynamo knows."""
    return list(torch._dynamo.list_backends(exclude_tags=()))


def cpu_has_bf16_units() -> bool:
    """Whether the CPU multiplies bf16 in hardware (AVX512-BF16, AMX, or Arm's bf16)."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    x86 = any(getattr(torch.cpu, name, lambda: False)() for name in names)
    return x86 or bool(getattr(torch.ops.mkldnn, "_is_mkldnn_acl_supported", lambda: False)())


def queue_backward_callback(function: Callable[[], None]) -> None:
    """Call `function` when the backward pass that is running ends."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory, which its views share; of fake memory, too."""
    return int(tensor.untyped_storage()._cdata)


def dynamo_frame_id() -> str:
    """Dynamo's id of the compilation in progress, such as "0/1"; "" outside of one."""
    found = torch._guards.CompileContext.current_compile_id()
    return str(found) if found else ""


def is_traced(value: torch.Tensor) -> bool:
    """Whether the tensor has no memory to point a kernel at: fake, or functionalized over a fake.

    The body of a `triton_op` is called with these when it is traced, and with real ones to run.
    """
    return isinstance(value, FakeTensor | FunctionalTensor)


def is_wrapper_subclass(value: torch.Tensor) -> bool:
    """Whether the tensor is made of others: nested, distributed, and other traceable subclasses."""
    return is_traceable_wrapper_subclass(value)


dynamo_errors = (
    torch._dynamo.exc.TorchDynamoException,
    torch._dynamo.exc.FailOnRecompileLimitHit,
)

_FUNCTORCH = (
    "torch._functorch.predispatch",
    "torch._functorch.eager_transforms",
    "torch._C._functorch",
)
_AUTOGRAD_SWITCHES = (
    torch._C._autograd._saved_tensors_hooks_disable,
    torch._C._autograd._saved_tensors_hooks_enable,
    torch._C._set_fwd_grad_enabled,
    torch.autograd.forward_ad._maybe_load_decompositions,
)


def is_functorch(target: object) -> bool:
    """Whether a node's target is part of vmap, grad, jvp and the like as Dynamo writes them."""
    return getattr(target, "__module__", None) in _FUNCTORCH or target in _AUTOGRAD_SWITCHES


def functorch_unwrapped(value: torch.Tensor) -> torch.Tensor:
    """The tensor inside the wrapper of a level that has ended, any other tensor as it is."""
    functorch: Any = torch._C._functorch
    return functorch.get_unwrapped(value) if functorch.is_dead_tensor_wrapper(value) else value


def is_functorch_wrapped(value: torch.Tensor) -> bool:
    """Whether the tensor belongs to a functorch level."""
    return torch._C._functorch.is_functorch_wrapped_tensor(value)


def functorch_level() -> int:
    """How many functorch levels are open."""
    stack = torch._C._functorch.get_interpreter_stack()
    return len(stack) if stack else 0


@contextlib.contextmanager
def functorch_unwound() -> Generator[None]:
    """Close the functorch levels that the block opened and, because of an error, left open."""
    depth = functorch_level()
    try:
        yield
    finally:
        while functorch_level() > depth:
            torch._C._functorch.pop_dynamic_layer_stack()


@contextlib.contextmanager
def quiet_fake_errors() -> Generator[None]:
    """Fake tensors log an error for each op that fails; ours are tried on purpose."""
    log = torch._subclasses.fake_tensor.log
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled


def failed_call(error: TorchRuntimeError) -> str:
    """The op that failed in a capture and the user's line, as far as Dynamo's message has them."""
    told = str(error).strip()
    call = re.search(r"fake tensors: \w+ (.+?)\(\*", told)
    line = re.findall(r'File "(.+)", line (\d+), in .*\n *(.*)', told)
    if call is None or not line:
        return told.splitlines()[0]
    named = re.search(r"(?:function|method) ([\w.]+)", call[1])  # <built-in method scatter of ...>
    return f"{named[1] if named else call[1]} at {':'.join(line[-1][:2])}: {line[-1][2]}"


def hide_fake_errors(when: Callable[[], bool]) -> None:
    """Keep what fake tensors log of failing ops quiet while `when()` is true."""

    def told(record: logging.LogRecord) -> bool:
        return not when()

    torch._subclasses.fake_tensor.log.addFilter(told)


def on_recompile_limit(tell: Callable[[str], None]) -> None:
    """Have the limit's name told when Dynamo gives up compiling a function: it only logs that."""
    start = "torch._dynamo hit config."

    def look(record: logging.LogRecord) -> bool:
        if str(record.msg).startswith(start):
            tell(record.getMessage().removeprefix(start).partition(" ")[0])
        return True

    torch._dynamo.convert_frame.log.addFilter(look)


def supported(**keywords: Any) -> dict[str, Any]:
    """Those of the keywords that the installed torch.compile knows."""
    known = compile_keywords()
    return {name: value for name, value in keywords.items() if name in known}


def compile_keywords() -> set[str]:
    """The keywords of torch.compile that are not the model or the backend and its options."""
    return {*inspect.signature(torch.compile).parameters} - {"model", "backend", "mode", "options"}


def inline_as(wrapper: Callable[..., Any], function: Callable[..., Any] | None) -> None:
    """Have Dynamo trace `function` where code that it compiles calls `wrapper`; None: `wrapper`."""
    vars(wrapper).pop("_torchdynamo_inline", None)  # of the compiled callable that it wraps
    if function is not None:
        wrapper._torchdynamo_inline = function  # type: ignore[attr-defined]


def dynamo_code_name() -> str:
    """The name of the function Dynamo is compiling; the rest after a graph break has "resume"."""
    tx = getattr(torch._dynamo.symbolic_convert.tls, "current_tx", None)
    return str(tx.f_code.co_name) if tx is not None else ""


@contextlib.contextmanager
def compilations() -> Generator[list[tuple[str, str, str]]]:
    """Collect the frames Dynamo gave up on inside the block: (name, file:line, reason)."""
    seen = {id(m) for m in torch._dynamo.utils.get_compilation_metrics()}
    failed: list[tuple[str, str, str]] = []
    yield failed
    last: dict[tuple[str, str], str | None] = {}  # a later attempt may have succeeded
    for m in torch._dynamo.utils.get_compilation_metrics():
        if id(m) not in seen:
            reason = m.fail_type and " ".join((m.fail_reason or m.fail_type).split())
            last[m.co_name or "?", f"{m.co_filename}:{m.co_firstlineno}"] = reason
    failed += [(*frame, reason) for frame, reason in last.items() if reason is not None]


def frame_modules() -> dict[str, torch.nn.Module]:
    """The modules among the locals of the frame Dynamo is compiling."""
    tx = getattr(torch._dynamo.symbolic_convert.tls, "current_tx", None)
    values = tx.output.root_tx.f_locals if tx is not None else {}
    return {name: v for name, v in values.items() if isinstance(v, torch.nn.Module)}


def modules_being_called() -> list[torch.nn.Module]:
    """The modules whose methods are on the stack below torch.compile's wrapper, outermost first."""
    found: list[torch.nn.Module] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        if frame.f_code.co_filename.endswith("convert_frame.py"):
            found.clear()  # frames of the compilation itself
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        first = frame.f_locals.get(names[0]) if names else None
        if isinstance(first, torch.nn.Module) and (not found or found[-1] is not first):
            found.append(first)
        frame = frame.f_back
    own = [m for name, m in frame_modules().items() if name == "self"]
    missing = [m for m in own if all(m is not one for one in found)]
    return [*reversed(found), *missing] if frame is not None else []


def graph_break_of(gm: torch.fx.GraphModule) -> tuple[str, str] | None:
    """Why Dynamo ended this graph, and the user's line, if a graph break ended it."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    at = reason.user_stack[-1] if reason.user_stack else None
    source = f"{at.filename}:{at.lineno}: {at.line}" if at else ""
    return " ".join(str(reason.reason).split()), source


@contextlib.contextmanager
def generous_recompile_limit() -> Generator[None]:
    """Let one more compilation of an often compiled function through."""
    config = torch._dynamo.config
    with config.patch(recompile_limit=max(config.recompile_limit, 512)):
        yield


def aot_backend(look: Callable[[torch.fx.GraphModule], None]) -> Callable[..., Any]:
    """An AOTAutograd backend that shows each backward graph to `look` and runs it in eager."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def forward(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(gm.forward)

    def backward(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        look(gm)
        return make_boxed_func(gm.forward)

    found: Callable[..., Any] = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    return found


def original_module(compiled: OptimizedModule) -> torch.nn.Module:
    """The module that torch.compile wrapped."""
    return compiled._orig_mod


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own buffers, in the dict it keeps them in."""
    return module._buffers


def inductor_options() -> list[str]:
    """The names of Inductor's own options."""
    return list(torch._inductor.list_options())


def new_graph_like(graph: torch.fx.Graph) -> torch.fx.Graph:
    """An empty graph with the signature of another (its codegen is shared: it knows no nodes)."""
    new = torch.fx.Graph(tracer_cls=graph._tracer_cls)
    new._codegen = graph._codegen
    return new


def mark_new_input(placeholder: torch.fx.Node) -> None:
    """An input that Dynamo knows nothing of: AOTAutograd asks every placeholder for its source."""
    placeholder._dynamo_source = None


def copy_dynamo_source(old: torch.fx.Node, new: torch.fx.Node) -> None:
    """Where Dynamo found an input: AOTAutograd reads it from the placeholder itself."""
    if hasattr(old, "_dynamo_source"):
        new._dynamo_source = old._dynamo_source


def source_name(placeholder: torch.fx.Node) -> str:
    """Where Dynamo found an input, such as "L['opt'].param_groups[0]['params'][0].grad"."""
    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", "")  # a method up to torch 2.12
    return str(name() if callable(name) else name)


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """The step an optimizer's class defines, without what torch wraps around it.

    Those are `Optimizer.profile_hook_step` (record_function, hooks), `torch.no_grad` and
    `_use_grad_for_differentiable`, which breaks the graph on purpose. None where the wrapping is
    not known: an instance's own `step` (an LR scheduler's counter is known), a differentiable one.
    """
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        return None
    step: Any = type(optimizer).step
    if not getattr(step, "hooked", False) or optimizer.defaults.get("differentiable"):
        return None
    files = ("torch/optim/optimizer.py", "torch/utils/_contextlib.py")
    while hasattr(step, "__wrapped__") and step.__code__.co_filename.endswith(files):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def step_with_hooks(optimizer: torch.optim.Optimizer, run: Callable[[], Any]) -> Any:
    """What `Optimizer.profile_hook_step` and `LRScheduler` put around a step (torch 2.13)."""
    with torch.autograd.profiler.record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
        before = (_global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks)
        for hook in itertools.chain(*(hooks.values() for hooks in before)):
            hook(optimizer, (optimizer,), {})
        if "step" in vars(optimizer):  # patched by an LR scheduler, which asks whether it ran
            optimizer._opt_called = True  # type: ignore[attr-defined]
        out = run()
        optimizer._optimizer_step_code()
        after = (optimizer._optimizer_step_post_hooks, _global_optimizer_post_hooks)
        for hook in itertools.chain(*(hooks.values() for hooks in after)):
            hook(optimizer, (optimizer,), {})
    return out


def has_step_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody looks at the gradients right before a step."""
    return bool(_global_optimizer_pre_hooks or optimizer._optimizer_step_pre_hooks)


@contextlib.contextmanager
def strict_dynamo() -> Generator[None]:
    """Dynamo raises where it would otherwise run a function uncompiled and say nothing.

    It compiles nothing under a dispatch mode (a counter, a tracker), so those are off meanwhile.
    """
    config = torch._dynamo.config
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    modes = contextlib.nullcontext() if fake else _disable_current_modes()
    with (
        modes,
        config.patch(
            fail_on_recompile_limit_hit=True,
            suppress_errors=False,
            recompile_limit=max(config.recompile_limit, 64),
        ),
    ):
        yield


class HostFlag:
    """A flag on its way from the device to the host; only reading it waits, for it alone."""

    def __init__(self, flag: torch.Tensor) -> None:
        self.event: Any = None
        if flag.device.type == "cpu":
            self.value = flag.clone()
            return
        self.value = torch.empty((), dtype=flag.dtype, pin_memory=True)
        self.value.copy_(flag, non_blocking=True)
        self.event = torch.get_device_module(flag.device).Event()
        self.event.record()

    def read(self) -> bool:
        """Whether the flag is set."""
        if self.event is not None:
            self.event.synchronize()
        value: Any = self.value.tolist()  # of a 0-dim tensor a number, and no op
        return bool(value > 0)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor, in the same memory; other tensors themselves."""
    if not _is_distributed(tensor):
        return tensor
    part: Any = tensor.to_local()  # type: ignore[attr-defined]
    return part.wait() if hasattr(part, "wait") else part  # type: ignore[no-any-return]


def laid_out_as(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A distributed gradient with the placements of its parameter, itself if it has them.

    Tensor parallelism leaves sums pending (Partial): the largest element and the norm of those
    are known only when they are done, which the optimizer's step would do again at each use.
    """
    if not (_is_distributed(grad) and _is_distributed(param)):
        return grad
    placed: Any = param.placements  # type: ignore[attr-defined]
    if grad.placements == placed:  # type: ignore[attr-defined]
        return grad
    return grad.redistribute(placements=placed)  # type: ignore[attr-defined, no-any-return]


def mesh_groups(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The process groups whose ranks hold parts or copies of a distributed tensor."""
    return tuple(group for group, _ in _placed(tensor))


def shard_groups(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The process groups whose ranks hold different parts of a distributed tensor."""
    return tuple(group for group, placement in _placed(tensor) if not placement.is_replicate())


def _placed(tensor: torch.Tensor) -> list[tuple[Any, Any]]:
    """The process group and the placement for each dimension of a mesh that has several ranks."""
    if not _is_distributed(tensor):
        return []
    distributed: Any = tensor
    mesh = distributed.device_mesh
    placed = enumerate(distributed.placements)
    return [(mesh.get_group(i), placement) for i, placement in placed if mesh.size(i) > 1]


def is_flattened(param: torch.Tensor) -> bool:
    """Whether FullyShardedDataParallel has made this parameter a part of a sharded flat one."""
    return getattr(param, "_fsdp_flattened", False)


def _is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, whose module takes a second to import and may not be there."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def max_over_ranks(flag: torch.Tensor, groups: Iterable[Any]) -> torch.Tensor:
    """The largest of all ranks' values, on the device, in place; a group None is all ranks."""
    return _reduced(flag, groups, "MAX")


def min_over_ranks(value: torch.Tensor, groups: Iterable[Any]) -> torch.Tensor:
    """The smallest of all ranks' values, on the device, in place."""
    return _reduced(value, groups, "MIN")


def sum_over_ranks(value: torch.Tensor, groups: Iterable[Any]) -> torch.Tensor:
    """The sum of all ranks' values, on the device, in place."""
    return _reduced(value, groups, "SUM")


def _reduced(value: torch.Tensor, groups: Iterable[Any], op: str) -> torch.Tensor:
    for group in groups:
        torch.distributed.all_reduce(value, getattr(torch.distributed.ReduceOp, op), group=group)
    return value
