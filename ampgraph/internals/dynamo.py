"""Dynamo and its backends: compiled callables, frames, graphs, limits."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import contextlib
import inspect
import logging
import operator
import re
import sys
import types
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

import torch
from torch._dynamo.eval_frame import OptimizedModule, _TorchDynamoContext, innermost_backend
from torch._dynamo.exc import TorchRuntimeError
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "OptimizedModule",
    "TorchRuntimeError",
    "aot_backend",
    "attributes_set_on",
    "backend_names",
    "buffers_of",
    "compilations",
    "compile_context_of",
    "compile_keywords",
    "compile_up_to",
    "compile_wrapper_in_caller",
    "copy_dynamo_source",
    "dynamo_code_name",
    "dynamo_errors",
    "dynamo_frame_id",
    "failed_call",
    "frame_modules",
    "generous_recompile_limit",
    "graph_break_of",
    "inductor",
    "inductor_options",
    "inline_as",
    "is_from_fsdp",
    "lookup_backend",
    "mark_new_input",
    "mark_static_input",
    "modules_being_called",
    "new_graph_like",
    "on_recompile_limit",
    "original_module",
    "real_input",
    "reason_of",
    "source_name",
    "strict_dynamo",
    "supported",
    "untraced",
]


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


def dynamo_frame_id() -> str:
    """Dynamo's id of the compilation in progress, such as "0/1"; "" outside of one."""
    found = torch._guards.CompileContext.current_compile_id()
    return str(found) if found else ""


dynamo_errors = (
    torch._dynamo.exc.TorchDynamoException,
    torch._dynamo.exc.FailOnRecompileLimitHit,
)


def failed_call(error: TorchRuntimeError) -> str:
    """The op that failed in a capture and the user's line, as far as Dynamo's message has them."""
    told = str(error).strip()
    call = re.search(r"fake tensors: \w+ (.+?)\(\*", told)
    line = re.findall(r'File "(.+)", line (\d+), in .*\n *(.*)', told)
    if call is None or not line:
        return told.splitlines()[0]
    named = re.search(r"(?:function|method) ([\w.]+)", call[1])  # <built-in method scatter of ...>
    return f"{named[1] if named else call[1]} at {':'.join(line[-1][:2])}: {line[-1][2]}"


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


def attributes_set_on(held: object) -> list[str]:
    """The attributes of an object that the code being compiled sets, as far as Dynamo tells.

    On an optimizer torch 2.13 forgets them: after the graph has run, nothing was set.
    """
    tx = getattr(torch._dynamo.symbolic_convert.tls, "current_tx", None)
    effects = tx.output.side_effects if tx is not None else None
    stored: dict[Any, Any] = getattr(effects, "store_attr_mutations", {})
    found = [names for item, names in stored.items() if getattr(item, "value", None) is held]
    return sorted(name for names in found for name in names)


def reason_of(error: BaseException) -> str:
    """The first line of what an error of `dynamo_errors` tells, or of the one that it wraps."""
    inner = getattr(error, "inner_exception", None) or error
    return str(inner).strip().partition("\n")[0]


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


def mark_static_input(placeholder: torch.fx.Node) -> None:
    """A new input whose address stays the same from call to call, which CUDA graphs may rely on."""
    mark_new_input(placeholder)
    placeholder.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


def real_input(gm: torch.fx.GraphModule, node: torch.fx.Node) -> torch.Tensor | None:
    """The tensor that a placeholder or an attribute of Dynamo's graph stands for, if it is known.

    A fake tensor does not tell whether the real one is an inference tensor.
    """
    if node.op == "get_attr":
        found: Any = operator.attrgetter(str(node.target))(gm)
    else:
        found = getattr(node.meta.get("grapharg"), "example", None)
    return found if isinstance(found, torch.Tensor) else None


def is_from_fsdp(placeholder: torch.fx.Node) -> bool:
    """Whether Dynamo found an input in a module that FullyShardedDataParallel manages."""
    source = getattr(placeholder, "_dynamo_source", None)
    found = getattr(source, "guard_source", None)
    found = found() if callable(found) else found  # a method up to torch 2.12
    return found is not None and bool(found.is_fsdp_module())


def copy_dynamo_source(old: torch.fx.Node, new: torch.fx.Node) -> None:
    """Where Dynamo found an input: AOTAutograd reads it from the placeholder itself."""
    if hasattr(old, "_dynamo_source"):
        new._dynamo_source = old._dynamo_source


def source_name(placeholder: torch.fx.Node) -> str:
    """Where Dynamo found an input, such as "L['opt'].param_groups[0]['params'][0].grad"."""
    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", "")  # a method up to torch 2.12
    return str(name() if callable(name) else name)


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
