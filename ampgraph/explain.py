"""Explain: capture a model once, tell every decision, and leave the model as it was."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampgraph.backend import DOOR, Call, Record, calling, options_of, records_of
from ampgraph.capture import WhichDoor, captured_by, run_backward
from ampgraph.errors import OptionError
from ampgraph.fakecuda.gpus import gpu_named
from ampgraph.internals.dynamo import (
    OptimizedModule,
    aot_backend,
    buffers_of,
    compilations,
    generous_recompile_limit,
    original_module,
)
from ampgraph.kernels_of import Setting, kernels_of
from ampgraph.options import Options
from ampgraph.policy import Policy
from ampgraph.report import GraphBreak, Report, SkippedFrame


def explain(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    policy: Any = None,
    dtype: Any = None,
    backward: bool = False,
    door: WhichDoor | None = None,
    kernels: str | None = None,
) -> Report:
    """Capture `model(*args, **kwargs)` and report what each op would compute in and why.

    The model runs once (once more, backwards, with `backward=True`); buffers, `.grad`, the random
    state and the tensors among the arguments are afterwards as they were.

    Args:
        model: a module or function, compiled or not.
        policy, dtype: as for `ampgraph.compile`; of a compiled model its own by default.
        backward: run the backward too and count its ops by dtype (`report.backward`).
        door: "compile" as under `ampgraph.compile`, "backend" as under
            `torch.compile(backend="ampgraph")`, which captures with autocast off. By default the
            door a compiled model was made with, else "compile".
        kernels: a GPU ("a100", "h100", "h200", "b200"), which need not be here: report also the
            kernels that the model runs on it (`report.kernels`), with their dtypes, bytes and
            registers, beside those of torch.compile under torch.autocast. No weight is copied. The
            rules are then CUDA's by default.

    Raises:
        OptionError, PolicyError: bad arguments. RewriteError: a node that cannot be rewritten.
        FakeCudaError: code for a GPU cannot be generated here, or not for this model.
    """
    _check_arguments(args, kwargs)
    if door not in (None, "compile", "backend"):
        raise OptionError(f"door={door!r} is not 'compile' or 'backend'")
    own_door, own = _made_with(model)
    door = door or own_door
    model = _original(model)
    if kernels is not None:
        gpu_named(kernels)  # before anything is run
        policy = policy or own.policy or Policy.autocast("cuda")
    counted: list[torch.dtype] = []
    inner: Any = aot_backend(_count_dtypes(counted)) if backward else "eager"
    given: Any = pytree.tree_map_only(Tensor, _cut, (tuple(args), dict(kwargs or {})))
    args, kwargs = given[0], dict[str, Any](given[1])
    call = Call()
    with (
        _untouched(model, args, kwargs),
        generous_recompile_limit(),
        _noted(call),
        compilations() as frames,
    ):
        options = _asked(own, policy, dtype, inner)
        run = captured_by(door, model, options)
        out = run(*args, **kwargs)
        if backward:
            run_backward(out)
        records = list(call.records)  # before those of another run on a GPU
        launched = None
        if kernels is not None:
            setting = Setting.here(kernels, _asked(own, policy, dtype, "inductor"), door, backward)
            launched = kernels_of(model, args, kwargs, setting)
    return Report(
        graphs=tuple(record.rewritten for record in records),
        graph_breaks=_breaks(records),
        skipped_frames=tuple(SkippedFrame(*frame) for frame in frames),
        backward=_by_count(counted) if backward else None,
        kernels=launched,
    )


def reports(compiled: Any) -> list[Report]:
    """The same for what was really compiled: one report for each graph so far.

    Args:
        compiled: what torch.compile(backend="ampgraph") or ampgraph.compile returned, or a module
            on which `module.compile(backend="ampgraph")` was called. Where one function is
            compiled twice by torch.compile with equal options, Dynamo reuses the first's graphs:
            ask the first.
    """
    return [
        Report(graphs=(record.rewritten,), graph_breaks=_breaks([record]))
        for record in records_of(compiled)
    ]


def _made_with(model: Any) -> tuple[WhichDoor, Options]:
    """The door and the options behind a compiled model."""
    entry = getattr(model, DOOR, None)
    if entry is not None:
        return "compile", entry.options
    named = options_of(model)
    return ("compile", Options()) if named is None else ("backend", named)


def _asked(own: Options, policy: Any, dtype: Any, inner: Any) -> Options:
    """The model's own options, where nothing else was given; those of the inner backend go."""
    given = Options.parse({"policy": policy, "dtype": dtype})
    return Options(
        policy=given.policy or own.policy,
        dtype=given.dtype or own.dtype,
        outputs=own.outputs,
        weight_copies=own.weight_copies,
        inner=inner,
    )


@contextlib.contextmanager
def _noted(call: Call) -> Generator[None]:
    outer = calling.set(call)
    try:
        yield
    finally:
        calling.reset(outer)


def _original(model: Any) -> Any:
    if isinstance(model, OptimizedModule):
        return original_module(model)
    return getattr(model, "_torchdynamo_orig_callable", model)


def _breaks(records: Sequence[Record]) -> tuple[GraphBreak, ...]:
    return tuple(GraphBreak(*record.broke) for record in records if record.broke is not None)


def _count_dtypes(counted: list[torch.dtype]) -> Callable[[torch.fx.GraphModule], None]:
    def look(gm: torch.fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            value = node.meta.get("val")
            if node.op == "call_function" and isinstance(value, Tensor):
                counted.append(value.dtype)

    return look


def _check_arguments(args: object, kwargs: object) -> None:
    """A lone tensor would be taken apart into its rows without a word."""
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, (Mapping, type(None))):
        raise OptionError(
            f"explain(model, args, kwargs) got a {type(args).__name__} and a "
            f"{type(kwargs).__name__}",
            cure="put the positional arguments in a tuple and the named ones in a dict: "
            "explain(model, (x, mask), {'labels': y})",
        )


def _cut(tensor: Tensor) -> Tensor:
    """The tensor apart from the caller's autograd graph, which a backward here would free."""
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)


def _by_count(counted: list[torch.dtype]) -> dict[torch.dtype, int]:
    floating = [d for d in counted if d.is_floating_point]
    return {d: floating.count(d) for d in sorted(set(floating), key=str)}


@contextlib.contextmanager
def _untouched(model: Any, args: Any, kwargs: Any) -> Generator[None]:
    """Give back buffers, gradients, arguments and random state as they were."""
    modules, given = _held(model, list(args), dict(kwargs))
    leaves = [p for m in modules for p in m.parameters()] + [t for t in given if t.is_leaf]
    grads = [(t, t.grad) for t in leaves]
    buffers = [
        (owner, name, t, None if t is None else t.detach().clone())
        for m in modules
        for owner in m.modules()
        for name, t in buffers_of(owner).items()
    ]
    contents = [(t, t.detach().clone()) for t in given]
    for t in leaves:
        t.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        _give_back(grads, buffers, contents)


def _give_back(grads: Any, buffers: Any, contents: Any) -> None:
    for tensor, grad in grads:
        tensor.grad = grad
    with torch.no_grad():
        for owner, name, tensor, was in buffers:
            buffers_of(owner)[name] = tensor
            if tensor is not None and not _same(tensor, was):
                tensor.copy_(was)
        for tensor, was in contents:
            if not _same(tensor, was):
                tensor.copy_(was)


def _same(now: Tensor, was: Tensor) -> bool:
    return now.shape == was.shape and bool(((now == was) | (now != now)).all())


def _held(*roots: Any, depth: int = 5) -> tuple[list[nn.Module], list[Tensor]]:
    """The modules and tensors that callables and arguments hold on to, at any usual depth.

    Looked into: closures and default arguments, the globals a function names, bound methods and
    partials, attributes of plain objects, containers.
    """
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}
    seen: set[int] = set()
    level: list[Any] = list(roots)
    for _ in range(depth):
        inner: list[Any] = []
        for value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module):
                modules[id(value)] = value
            elif isinstance(value, Tensor):
                tensors[id(value)] = value
            else:
                inner += _inside(value)
        level = inner
    return list(modules.values()), list(tensors.values())


def _inside(value: Any) -> list[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if inspect.ismethod(value):
        return [value.__self__, value.__func__]
    if inspect.isfunction(value):
        named = [value.__globals__.get(name) for name in value.__code__.co_names]
        cells = [c.cell_contents for c in value.__closure__ or () if not _is_empty(c)]
        keywords = (value.__kwdefaults__ or {}).values()
        return [*cells, *(value.__defaults__ or ()), *keywords, *filter(_is_state, named)]
    return list(vars(value).values()) if _is_state(value) and hasattr(value, "__dict__") else []


def _is_state(value: Any) -> bool:
    """Not code: classes and Python modules hold no state of a model."""
    return not isinstance(value, type) and not inspect.ismodule(value)


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False
