"""`ampgraph.compile`: torch.compile inside torch.autocast, so that capture sees autocast's dtypes.

A program captured with autocast off has already run once without it: `x.dtype` is frozen at
float32 and `custom_fwd` saw no autocast. So the region is entered around the compiled call, and
the backend takes the precision from it.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampgraph.backend import (
    DOOR,
    Backend,
    Call,
    Record,
    calling,
    casts_kept,
    device_type_of,
    entry_state,
    warn,
    warn_once,
)
from ampgraph.errors import OptionError, did_you_mean
from ampgraph.internals.autocast import ambient_autocast, disable_autocast
from ampgraph.internals.dynamo import (
    OptimizedModule,
    TorchRuntimeError,
    compile_keywords,
    compile_up_to,
    failed_call,
    inline_as,
    untraced,
)
from ampgraph.options import Options

# Each policy for a class is one compilation of its forward, and so is each shape: beyond Dynamo's
# own limit (8) it would fall back to eager autocast.
RECOMPILE_LIMIT = 64


class Door:
    """One compiled callable: the region around its calls, and what was compiled behind it."""

    def __init__(self, model: Any, options: Options, torch_kwargs: Mapping[str, Any]) -> None:
        self.model, self.options, self.torch_kwargs = model, options, torch_kwargs
        self.compiled = self._compiled("ambient")
        self.plain: dict[torch.dtype, Callable[..., Any]] = {}
        self.refused = Refused()
        self.records: dict[Record, None] = {}
        self.at_limit = False

    @untraced
    def call(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `run`, the compiled callable, inside its autocast region."""
        around = calling.get()
        call = Call(casts_kept=casts_kept())
        outer = calling.set(call)
        try:
            out = self._in_region(run, args, kwargs, call)
        finally:
            calling.reset(outer)
            self.records |= call.records
            if around is not None:
                around.records |= call.records
        if call.limit or (self.options.policy is not None and not call.records):
            self._warn_of_loss(call.limit)
        return out

    def _in_region(self, run: Callable[..., Any], args: Any, kwargs: Any, call: Call) -> Any:
        if self.options.dtype == "ambient":
            return run(*args, **kwargs)
        region, dtype = self.region(args, kwargs)
        if self.refused and self.refused.knows(dtype, self.model, (args, kwargs)):
            return self._plainly(dtype, args, kwargs)
        try:
            with region:
                return run(*args, **kwargs)
        except TorchRuntimeError as error:
            if call.records:
                raise  # part of the model has run: it cannot be started again
            out = self._plainly(dtype, args, kwargs)
            self.refused.add(dtype, self.model, (args, kwargs))
            warn_once(f"torch.autocast raises here, ampgraph mends it: {failed_call(error)}")
            return out

    def region(self, args: Any, kwargs: Any) -> tuple[torch.autocast, torch.dtype]:
        """The region of a call, and its dtype; with dtype="ambient" it is the caller's own.

        It has no cast cache, which would sum a weight's gradients in low precision where eager
        code inside uses it several times.
        """
        device_type, dtype = self._entry(self._device_type(args, kwargs))
        return torch.autocast(device_type, dtype=dtype, cache_enabled=False), dtype

    def entry_while_traced(self) -> tuple[str, torch.dtype]:
        """The region's device and dtype, as far as they are known without the arguments."""
        here = torch.accelerator.current_accelerator(check_available=True)
        if here is None or isinstance(self.model, nn.Module):
            return self._entry(self._device_type((), {}))
        return self._entry(here.type)

    def _entry(self, device_type: str) -> tuple[str, torch.dtype]:
        state = entry_state(self.options, ambient_autocast(), device_type)
        return device_type, state.enabled()[device_type]

    def hooks_region(self, args: Any, kwargs: Any) -> contextlib.AbstractContextManager[Any]:
        """The region for the compiled module's own hooks, which run outside of its forward."""
        if self.options.dtype == "ambient":
            return contextlib.nullcontext()
        return self.region(args, kwargs)[0]

    def _device_type(self, args: Any, kwargs: Any) -> str:
        if not torch.accelerator.is_available():
            return "cpu"
        held = list(self.model.parameters()) if isinstance(self.model, nn.Module) else []
        return device_type_of([*held, *pytree.tree_leaves((args, kwargs))])

    def _plainly(self, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
        """Capture without autocast what eager autocast itself refuses to run, and repair it.

        Dynamo runs each op under autocast while it captures, so a program whose dtypes autocast
        would mix up (scatter_add of a bf16 source into fp32) fails before this compiler sees it.
        """
        if dtype not in self.plain:
            self.plain[dtype] = self._compiled(dtype)
        with disable_autocast():
            return self.plain[dtype](*args, **kwargs)

    def _compiled(self, dtype: torch.dtype | Literal["ambient"]) -> Any:
        backend = Backend(dataclasses.replace(self.options, dtype=dtype))
        return compile_up_to(RECOMPILE_LIMIT, self.model, backend, self.torch_kwargs)

    def _warn_of_loss(self, limit: str) -> None:
        """Dynamo only logs its limit, and only for the first callable that hits it."""
        if self.at_limit:
            return
        self.at_limit = True
        hit = f"Dynamo hit {limit}" if limit else "nothing of this call was compiled"
        warn(
            f"{hit}: a function ran in eager torch.autocast, without this policy. Raise "
            f"torch._dynamo.config.{limit or 'recompile_limit'}; where Dynamo skips code for "
            "another reason, ampgraph.explain tells it"
        )


class Refused:
    """The calls that eager autocast refuses to run, by what Dynamo would capture them for.

    Other calls are captured under autocast all the same. Sizes and numbers tell calls apart, too,
    until several that differ in nothing else were refused: each attempt is a capture.
    """

    ENOUGH = 4

    def __init__(self) -> None:
        self.seen: dict[Any, set[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self.seen)

    def add(self, *call: Any) -> None:
        """Remember a call: dtype, model, arguments."""
        kind, values = _signature(*call)
        self.seen.setdefault(kind, set()).add(values)

    def knows(self, *call: Any) -> bool:
        """Whether this call was refused, or enough others like it."""
        kind, values = _signature(*call)
        seen = self.seen.get(kind, ())
        return values in seen or len(seen) >= self.ENOUGH


def _signature(dtype: torch.dtype, model: Any, arguments: Any) -> tuple[Any, Any]:
    """What a call is told by: what is the same for all sizes and numbers, and those."""
    leaves, structure = pytree.tree_flatten(arguments)
    mode = (dtype, torch.is_grad_enabled(), getattr(model, "training", None))
    return (*mode, str(structure), *map(_kind, leaves)), tuple(map(_value, leaves))


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.device, leaf.ndim
    return leaf if isinstance(leaf, (bool, str)) else type(leaf)


def _value(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape
    return leaf if isinstance(leaf, Hashable) else None


class AutocastModule(OptimizedModule):
    """What torch.compile returns for a module; its `forward` goes through the door."""

    _ampgraph_door: Door

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # as torch.compile's own: the model, without hooks
            return self.forward(*args, **kwargs)
        if not (self._forward_hooks or self._forward_pre_hooks):
            return super().__call__(*args, **kwargs)
        with self._ampgraph_door.hooks_region(args, kwargs):
            return super().__call__(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled as what it was made from; the copy compiles its own module."""
        door = self._ampgraph_door
        return _compile, (self._orig_mod, door.options, dict(door.torch_kwargs))


def compile(
    model: Any = None,
    *,
    dtype: Any = None,
    policy: Any = None,
    inner: Any = "inductor",
    mode: str | None = None,
    outputs: Any = None,
    strict: bool = False,
    weight_copies: Literal[False, True, "verify"] = False,
    options: Mapping[str, Any] | None = None,
    **torch_compile_kwargs: Any,
) -> Any:
    """Compile a module or function with the full semantics of torch.autocast.

    Args:
        model: a module, a function, or None to decorate with `@ampgraph.compile(dtype=...)`.
        dtype: torch.bfloat16, torch.float16, their names, "ambient", or None.
        policy: an `ampgraph.Policy`, the path of a policy file, or None for autocast's rules.
        inner: the Dynamo backend for the rewritten graph.
        mode, options: Inductor's mode and options.
        outputs: "autocast" (the default here) or "original".
        strict: bit-equal to eager autocast, or a StrictError.
        weight_copies: True reads float32 parameters from low-precision copies that are kept beside
            them and renewed when they change; writes that nothing shows need `ampgraph.refresh`.
            "verify" looks for such writes and raises StaleCopyError.
        torch_compile_kwargs: `fullgraph`, `dynamic` and others of torch.compile.

    Returns:
        What torch.compile returns: for a module an OptimizedModule with the same state_dict keys.

    Raises:
        OptionError: an unknown key or value, at once.
    """
    asked = {"dtype": dtype, "policy": policy, "inner": inner, "mode": mode}
    asked |= {"outputs": outputs or "autocast", "strict": strict}
    asked["weight_copies"] = weight_copies
    twice = asked.keys() & (options or {}).keys()
    if twice:
        raise OptionError(
            f"given twice, as a keyword and among the options: {', '.join(sorted(twice))}",
            cure="options= is for Inductor's own options here",
        )
    _check_keywords(model, torch_compile_kwargs)
    parsed = Options.parse({**asked, **(options or {})})
    if model is None:
        return functools.partial(_compile, options=parsed, torch_kwargs=torch_compile_kwargs)
    return _compile(model, parsed, torch_compile_kwargs)


def _check_keywords(model: Any, torch_kwargs: Mapping[str, Any]) -> None:
    if "backend" in torch_kwargs:
        raise OptionError(
            "backend= is ampgraph itself here",
            cure="name the backend for the rewritten graph with inner=",
        )
    known = inspect.signature(compile).parameters.keys() - {"model", "torch_compile_kwargs"}
    valid = sorted(known | compile_keywords())
    unknown = [name for name in torch_kwargs if name not in valid]
    if unknown:
        raise OptionError(
            f"unknown: {', '.join(map(repr, unknown))}; valid are {', '.join(valid)}",
            cure=did_you_mean(unknown[0], valid),
        )
    if model is not None and not callable(model):
        raise OptionError(f"a {type(model).__name__} is neither a module nor a function")


def _compile(model: Any, options: Options, torch_kwargs: Mapping[str, Any]) -> Any:
    door = Door(model, options, torch_kwargs)
    compiled = door.compiled
    if not isinstance(compiled, OptimizedModule):
        call = _through(door, compiled)
        setattr(call, DOOR, door)
        return call
    compiled.__class__ = AutocastModule
    # past OptimizedModule's own __setattr__, which would write it on the user's module
    object.__setattr__(compiled, DOOR, door)
    compiled.forward = _through(door, compiled.forward)
    return compiled


def _through(door: Door, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` as a function that is called through the door."""

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        return door.call(run, args, kwargs)

    # Inlined into an outer compilation the model would fall under that one's rules: a policy of its
    # own ends the outer graph instead.
    inline_as(call, _inlined(door) if door.options.policy is None else None)
    return call


def _inlined(door: Door) -> Callable[..., Any]:
    """What an outer function's compilation sees of a call: the region and the model in it."""
    model = door.model
    if door.options.dtype == "ambient":
        return model  # type: ignore[no-any-return]

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def entered() -> tuple[str, torch.dtype]:
        return door.entry_while_traced()

    def inlined(*args: Any, **kwargs: Any) -> Any:
        device_type, dtype = entered()
        with torch.autocast(device_type, dtype=dtype, cache_enabled=False):
            return model(*args, **kwargs)

    return inlined
