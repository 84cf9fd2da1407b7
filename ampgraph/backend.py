"""The Dynamo backend: rewrite the captured graph, hand it to the inner backend.

`torch.compile(model, backend="ampgraph", options={...})` comes in through `ampgraph`;
`ampgraph.compile` through a `Backend` of its own.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import logging
import operator
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ampgraph import passes
from ampgraph.copies import Reader
from ampgraph.errors import AmpgraphWarning
from ampgraph.graph import captured
from ampgraph.internals.autocast import (
    ambient_autocast,
    autocast_off_at_run_time,
    casts_may_be_kept,
    cpu_has_bf16_units,
)
from ampgraph.internals.dynamo import (
    compile_context_of,
    compile_wrapper_in_caller,
    dynamo_code_name,
    dynamo_frame_id,
    graph_break_of,
    inductor,
    lookup_backend,
    on_recompile_limit,
)
from ampgraph.internals.tensors import hide_fake_errors, set_grad_enabled
from ampgraph.oplists import registered
from ampgraph.options import Options
from ampgraph.passes.check_strict import check_strict
from ampgraph.pipeline import Rewritten, rewrite_graph
from ampgraph.place import NOWHERE, Place, place_of_frame, uneven_rules
from ampgraph.policy import Policy
from ampgraph.runtime import without_autocast
from ampgraph.staleness import Checker
from ampgraph.state import AutocastState, DeviceState
from ampgraph.verify import graphs

log = logging.getLogger(__name__)
_RECORDS = "_ampgraph_records"
DOOR = "_ampgraph_door"  # on what ampgraph.compile returns: its Door


# Where no line of a user's is: ourselves, torch, the code that both generate, and their decorators.
_OURS = (
    *(os.path.dirname(str(file)) + os.sep for file in (__file__, passes.__file__, torch.__file__)),
    *(str(module.__file__) for module in (contextlib, functools)),
    "<",
)


@dataclass(frozen=True, eq=False)
class Record:
    """One graph that was compiled: Dynamo's id of it, the rewrite, and what ended the capture.

    `broke` is (reason, source line) where a graph break did, None at a function's own end.
    """

    frame: str
    rewritten: Rewritten
    broke: tuple[str, str] | None = None


@dataclass(eq=False)
class Call:
    """A call of a compiled callable that is going on: the graphs it ran, whether Dynamo gave up
    compiling for it, and whether the caller's autocast lets casts be kept (our own region does
    not).

    Dynamo shares graphs between callables, so each graph notes itself where it runs.
    """

    records: dict[Record, None] = field(default_factory=dict[Record, None])
    limit: str = ""
    casts_kept: bool = True


calling: ContextVar[Call | None] = ContextVar("ampgraph_calling", default=None)


@dataclass(frozen=True)
class Backend:
    """A backend with its options.

    Dynamo reuses a graph where the backends are equal: those with equal options are, as long as no
    library has registered an op in between.
    """

    options: Options
    registered: int = field(default_factory=registered.version)

    __name__ = "ampgraph"  # what Dynamo calls it in its messages

    __hash__ = None  # type: ignore[assignment]  # Inductor's options are a dict

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **more: Any) -> Any:
        compiled, record = compile_captured(gm, inputs, self.options)
        return noting(compiled, record)


def compile_captured(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options
) -> tuple[Callable[..., Any], Record]:
    """Rewrite a captured graph and compile it."""
    result = rewrite_captured(gm, inputs, options)
    record = Record(dynamo_frame_id(), result, graph_break_of(gm))
    note(record)  # also where the inner backend fails
    if not result.copies:
        return compile_inner(result.after, inputs, options), record
    places = [n for n in result.after.graph.nodes if n.op == "placeholder"]
    copies = [captured(node) for node in places[-len(result.copies) :]]
    compiled = compile_inner(result.after, [*inputs, *copies], options)
    return reading(compiled, reader_of(result, options)), record


def reader_of(result: Rewritten, options: Options) -> Reader:
    """What finds the copies that a rewritten graph reads."""
    params = [
        operator.attrgetter(read.attribute)(result.after) if read.place is None else read.place
        for read in result.copies
    ]
    checked = options.weight_copies == "verify"
    checker = Checker([read.name for read in result.copies]) if checked else None
    return Reader(params, [read.dtype for read in result.copies], result.grad, checker)


def reading(function: Callable[..., Any], reader: Reader) -> Callable[..., Any]:
    """A compiled graph that is handed its copies as its last inputs."""

    def run(*args: Any) -> Any:
        return function(*args, *reader.read(args, casts_kept()))

    return run


def casts_kept() -> bool:
    """Whether the caller's autocast lets casts be kept from call to call."""
    call = calling.get()
    return casts_may_be_kept() if call is None else call.casts_kept


def note(record: Record) -> None:
    """Tell the call that is going on of a graph."""
    call = calling.get()
    if call is not None:
        call.records[record] = None


def _note_limit(limit: str) -> None:
    call = calling.get()
    if call is not None:
        call.limit = limit


on_recompile_limit(_note_limit)
# Under our doors an op that fails in the capture may be mended; if not, its error is raised.
hide_fake_errors(lambda: calling.get() is not None)


def noting(function: Callable[..., Any], record: Record) -> Callable[..., Any]:
    """A compiled graph that notes itself when it runs."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        note(record)
        return function(*args)

    return run


def ampgraph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """The backend behind the name "ampgraph".

    Args:
        gm: the graph Dynamo captured; it is not changed.
        example_inputs: its inputs, as Dynamo gives them (fake or real tensors, symbolic sizes).
        options: our keywords (see `Options`) and, when inner is "inductor", Inductor's own.
        mode: Inductor's mode; torch.compile refuses it beside `options`, where it may also stand.

    Raises:
        OptionError: an unknown key or value. RewriteError: a node that cannot be rewritten.
    """
    compiled, record = compile_captured(gm, example_inputs, _parsed(options, mode))
    wrapper = compile_wrapper_in_caller()
    if wrapper is not None:  # one object for each torch.compile: it keeps what was compiled for it
        wrapper.__dict__.setdefault(_RECORDS, []).append(record)
    return compiled


def _parsed(options: Mapping[str, Any] | None, mode: str | None) -> Options:
    return Options.parse({**({"mode": mode} if mode else {}), **(options or {})})


def options_of(compiled: object) -> Options | None:
    """The options of a torch.compile(backend="ampgraph"); None for anything else."""
    context = compile_context_of(compiled)
    if getattr(context, "compiler_fn", None) is not ampgraph:
        return None
    return _parsed(**{"options": None, "mode": None, **getattr(context, "kwargs", {})})


def records_of(compiled: object) -> list[Record]:
    """What was compiled so far behind a callable that torch.compile or ampgraph.compile made."""
    door = getattr(compiled, DOOR, None)
    return list(door.records if door else getattr(compile_context_of(compiled), _RECORDS, ()))


def rewrite_captured(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Rewritten:
    """Rewrite a graph under the state its caller is in now and the options."""
    device_type = device_type_of([*inputs, *gm.parameters(), *gm.buffers()])
    ambient = ambient_autocast()
    state = entry_state(options, ambient, device_type)
    warn_if_slow(state)
    policy = options.policy or Policy.autocast(device_type)
    place = place_of_frame() if policy.modules else NOWHERE
    warn_if_unmatched(gm, policy, place)
    warn_if_uneven(policy)
    result = rewrite_graph(
        gm,
        policies={device_type: policy},
        state=state,
        outputs=options.outputs or ("autocast" if device_type in ambient else "original"),
        grad=torch.is_grad_enabled() or turns_grad_on(gm),
        strict=options.strict,
        place=place,
        weight_copies=bool(options.weight_copies),
    )
    if options.strict:
        check_strict(result.after, result.decisions, options.inner)
    for row in result.decisions:
        log.debug("%s: %s in %s (%s)", row.node, row.op, row.dtype, row.because)
    if result.copies and not casts_kept():
        told = "weight copies: not used while the caller's torch.autocast has cache_enabled=False"
        result = dataclasses.replace(result, notes=(*result.notes, told))
    for note in result.notes:
        log.info("%s", note)
    return result


def compile_inner(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Any:
    """Hand the rewritten graph on, with no autocast on while it is compiled or run."""
    with autocast_off_at_run_time():
        if options.inner == "inductor":
            strict = {"emulate_precision_casts": True} if options.strict else {}
            return inductor(options.mode, {**options.inductor, **strict})(gm, list(inputs))
        compiled: Callable[..., Any] = lookup_backend(options.inner)(gm, list(inputs))
    return compiled if getattr(compiled, "_boxed_call", False) else without_autocast(compiled)


def turns_grad_on(gm: fx.GraphModule) -> bool:
    """Whether the program enables gradients itself: then no cast may be shared in any part."""
    return any(
        node.target is set_grad_enabled and node.args[0] is True
        for g in graphs(gm)
        for node in g.graph.nodes
    )


def device_type_of(values: Sequence[Any]) -> str:
    """The accelerator any of the tensors is on, else "cpu"."""
    found = [v.device.type for v in values if isinstance(v, Tensor)]
    return next((d for d in found if d not in ("cpu", "meta")), "cpu")


def entry_state(
    options: Options, ambient: Mapping[str, torch.dtype], device_type: str
) -> AutocastState:
    """The autocast state at the graph's entry, from the caller's own and the asked-for dtype."""
    state = AutocastState.of(ambient)
    asked = options.dtype
    if asked == "ambient" or (asked is None and device_type in ambient):
        return state
    dtype = asked if isinstance(asked, torch.dtype) else default_dtype(device_type)
    if device_type in ambient and ambient[device_type] != dtype:
        warn_once(
            f"compiled for {dtype}, called inside torch.autocast({device_type!r}, "
            f"{ambient[device_type]}): the explicit dtype wins"
        )
    return state.setting(device_type, DeviceState(True, dtype))


def default_dtype(device_type: str) -> torch.dtype:
    """bfloat16, or float16 on a GPU that has no bfloat16."""
    if device_type == "cuda" and not torch.cuda.is_bf16_supported():
        warn_once(
            "this GPU has no bfloat16: using float16, whose gradients need a GradScaler "
            "(torch.amp.GradScaler)"
        )
        return torch.float16
    return torch.bfloat16


def warn_if_unmatched(gm: fx.GraphModule, policy: Policy, place: Place) -> None:
    """One warning for a module pattern that matches nothing; a cut graph cannot tell."""
    part = len(place.around) > 1 or "resume" in dynamo_code_name()
    if not policy.modules or part or graph_break_of(gm) is not None:
        return
    stacks = [place.stack(node) for g in graphs(gm) for node in g.graph.nodes]
    called = {entry for stack in stacks for entry in stack}
    for rule in policy.modules:
        if not any(rule.matches(path, kind) for path, kind in called):
            names = sorted({path for path, _ in called if path})
            near = difflib.get_close_matches(rule.match, names, n=3, cutoff=0.4)
            warn_once(
                f"the policy's module pattern {rule.match!r} matched no module in the graph: "
                "patterns are globs over the paths of named_modules(), or module classes"
                + (f"; did you mean {', '.join(near)}?" if near else ""),
                key=(rule.match, *names, dynamo_frame_id().partition("/")[0]),
            )


def warn_if_uneven(policy: Policy) -> None:
    """One warning where one compiled frame serves modules that the policy's rules tell apart."""
    kind = uneven_rules(policy) if policy.modules else ""
    if kind:
        warn_once(
            f"the graph breaks inside {kind}, whose forward is compiled once for all of its kind, "
            "but the policy's module patterns mean some of them only: the rules of the first one "
            "called hold for all. Remove the break, or give one rule for the class"
        )


_warned: set[object] = set()


def warn_once(message: str, key: object = None) -> None:
    """Warn about each thing once a process."""
    key = key or message
    if key not in _warned:
        _warned.add(key)
        warn(message)


def warn(message: str) -> None:
    """Warn at the user's line that led here: the first outside of ampgraph and torch."""
    warnings.warn(message, AmpgraphWarning, stacklevel=_frames_of_ours())


def _frames_of_ours() -> int:
    """The stacklevel, in `warn`, of the user's line."""
    here = inspect.currentframe()
    frame, level = here.f_back if here else None, 1
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    return level


def warn_if_slow(state: AutocastState) -> None:
    """One warning where low precision will cost time instead of saving it."""
    if "cpu" in state.enabled() and not cpu_has_bf16_units():
        warn_once(
            "this CPU has no bfloat16 units: low precision will be slower here than float32. "
            "To measure: time the call under torch.compile(model) and under ampgraph.compile(model)"
        )
