"""`ampgraph.compile`: torch.compile inside torch.autocast, so that capture sees autocast's dtypes.

A program captured with autocast off has already run once without it: `x.dtype` is frozen at
float32 and `custom_fwd` saw no autocast. So the region is entered around the compiled call, and
the backend takes the precision from it.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampgraph.backend import Backend, default_dtype, device_type_of, entry_state
from ampgraph.internals import OptimizedModule, ambient_autocast
from ampgraph.options import Options

F = TypeVar("F", bound=Callable[..., Any])


class Region:
    """The autocast region around every call of one compiled callable."""

    def __init__(self, options: Options, module: nn.Module | None) -> None:
        self.options, self.module = options, module

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> contextlib.AbstractContextManager[Any]:
        """The region for a call with these arguments."""
        if self.options.dtype == "ambient":
            return contextlib.nullcontext()
        device_type = self._device_type(args, kwargs)
        state = entry_state(self.options, ambient_autocast(), device_type)
        return torch.autocast(device_type, dtype=state.enabled()[device_type])

    def _device_type(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if not torch.accelerator.is_available():
            return "cpu"
        held = [] if self.module is None else list(self.module.parameters())
        return device_type_of([*held, *pytree.tree_leaves((args, kwargs))])


class AutocastModule(OptimizedModule):
    """What torch.compile returns for a module, called inside the region."""

    _opt_mod_attributes = OptimizedModule._opt_mod_attributes | {"_ampgraph_region"}
    _ampgraph_region: Region

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._ampgraph_region(args, kwargs):
            return super().__call__(*args, **kwargs)


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
    parsed = Options.parse({**asked, **(options or {})})
    if model is None:
        return lambda function: _compile(function, parsed, torch_compile_kwargs)
    return _compile(model, parsed, torch_compile_kwargs)


def _compile(model: Any, options: Options, torch_compile_kwargs: Mapping[str, Any]) -> Any:
    backend = Backend(ambient(options))
    compiled = torch.compile(model, backend=backend, **torch_compile_kwargs)
    region = Region(options, model if isinstance(model, nn.Module) else None)
    if isinstance(compiled, OptimizedModule):
        compiled.__class__ = AutocastModule
        compiled._ampgraph_region = region
        return compiled

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        with region(args, kwargs):
            return compiled(*args, **kwargs)

    return call


def ambient(options: Options) -> Options:
    """The same options for a backend that finds its precision in the region around the call."""
    import dataclasses

    return dataclasses.replace(options, dtype="ambient")


__all__ = ["compile", "default_dtype", "overload"]
