"""`ampgraph.compile`: torch.compile inside torch.autocast, so that capture sees autocast's dtypes.

A program captured with autocast off has already run once without it: `x.dtype` is frozen at
float32 and `custom_fwd` saw no autocast. So the region is entered around the compiled call, and
the backend takes the precision from it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampgraph.backend import DOOR, Backend, device_type_of, entry_state, warn_once
from ampgraph.errors import OptionError
from ampgraph.internals import (
    OptimizedModule,
    TorchRuntimeError,
    ambient_autocast,
    disable_autocast,
)
from ampgraph.options import Options


class Door:
    """One compiled callable: the region around its calls, and what was compiled behind it."""

    def __init__(self, model: Any, options: Options, torch_kwargs: Mapping[str, Any]) -> None:
        self.model, self.options, self.torch_kwargs = model, options, torch_kwargs
        self.backend = Backend(dataclasses.replace(options, dtype="ambient"))
        self.compiled = torch.compile(model, backend=self.backend, **torch_kwargs)
        self.plain: dict[torch.dtype, Callable[..., Any]] = {}

    def call(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `run`, the compiled callable, inside its autocast region."""
        if self.options.dtype == "ambient":
            return run(*args, **kwargs)
        device_type = self._device_type(args, kwargs)
        state = entry_state(self.options, ambient_autocast(), device_type)
        dtype = state.enabled()[device_type]
        if dtype in self.plain:
            return self._plainly(dtype, args, kwargs)
        compiled = len(self.backend.records)
        try:
            # without the cast cache, which would sum a weight's gradients in low precision where
            # eager code inside uses it several times
            with torch.autocast(device_type, dtype=dtype, cache_enabled=False):
                return run(*args, **kwargs)
        except TorchRuntimeError as error:
            if len(self.backend.records) != compiled:
                raise  # part of the model has run: it cannot be started again
            return self._plainly(dtype, args, kwargs, error)

    def _device_type(self, args: Any, kwargs: Any) -> str:
        if not torch.accelerator.is_available():
            return "cpu"
        held = list(self.model.parameters()) if isinstance(self.model, nn.Module) else []
        return device_type_of([*held, *pytree.tree_leaves((args, kwargs))])

    def _plainly(
        self, dtype: torch.dtype, args: Any, kwargs: Any, error: Exception | None = None
    ) -> Any:
        """Capture without autocast what eager autocast itself refuses to run, and repair it.

        Dynamo runs each op under autocast while it captures, so a program whose dtypes autocast
        would mix up (scatter_add of a bf16 source into fp32) fails before this compiler sees it.
        """
        run = self.plain.get(dtype) or torch.compile(
            self.model,
            backend=Backend(dataclasses.replace(self.options, dtype=dtype), self.backend.records),
            **self.torch_kwargs,
        )
        with disable_autocast():
            out = run(*args, **kwargs)
        if error is not None:
            self.plain[dtype] = run
            reason = str(error).strip().splitlines()[0]
            warn_once(f"torch.autocast raises here, ampgraph mends it ({reason})")
        return out


class AutocastModule(OptimizedModule):
    """What torch.compile returns for a module, called inside the region."""

    _ampgraph_door: Door

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ampgraph_door.call(super().__call__, args, kwargs)

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
        torch_compile_kwargs: `fullgraph`, `dynamic` and others of torch.compile.

    Returns:
        What torch.compile returns: for a module an OptimizedModule with the same state_dict keys.

    Raises:
        OptionError: an unknown key or value, at once.
    """
    asked = {"dtype": dtype, "policy": policy, "inner": inner, "mode": mode}
    asked |= {"outputs": outputs or "autocast", "strict": strict}
    twice = asked.keys() & (options or {}).keys()
    if twice:
        raise OptionError(
            f"given twice, as a keyword and among the options: {', '.join(sorted(twice))}",
            cure="options= is for Inductor's own options here",
        )
    parsed = Options.parse({**asked, **(options or {})})
    if model is None:
        return functools.partial(_compile, options=parsed, torch_kwargs=torch_compile_kwargs)
    return _compile(model, parsed, torch_compile_kwargs)


def _compile(model: Any, options: Options, torch_kwargs: Mapping[str, Any]) -> Any:
    door = Door(model, options, torch_kwargs)
    compiled = door.compiled
    if isinstance(compiled, OptimizedModule):
        compiled.__class__ = AutocastModule
        # past OptimizedModule's own __setattr__, which would write it on the user's module
        object.__setattr__(compiled, "_ampgraph_door", door)
        return compiled

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        return door.call(compiled, args, kwargs)

    setattr(call, DOOR, door.backend)
    return call
