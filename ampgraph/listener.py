"""Listen to a callable: run it on fake tensors as autocast would, and note every op it shows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ampgraph.dispatch import judge
from ampgraph.internals.ops import (
    OpOverload,
    PreDispatchMode,
    composite_kernel,
    is_composite,
    schema_of,
)
from ampgraph.internals.tensors import is_wrapper_subclass, needs_elements
from ampgraph.mend import mend
from ampgraph.policy import Category
from ampgraph.verdict import LIBRARY, REPAIR, Law, Verdict, tensors


def cast_order(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """The positions of the tensors among the arguments, in the order in which autocast casts them.

    The last argument first, the members of a list from its start: autocast's wrapper is C++ whose
    arguments GCC evaluates from the right. The casts' order is the order in which the gradients of
    a tensor that is used three times are added up.
    """
    found: list[list[int]] = []
    start = 0
    for argument in (*args, *kwargs.values()):
        stop = start + len(tensors(argument))
        found.append(list(range(start, stop)))
        start = stop
    return [position for group in reversed(found) for position in group]


def carry_out(
    verdict: Verdict,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    cast: Callable[[Tensor, torch.dtype], Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments with the verdict's casts made, keywords set and constants clamped.

    The last argument is cast first, as `cast_order` says.
    """

    def one(leaf: object) -> object:
        if isinstance(leaf, Tensor) and id(leaf) in verdict.casts:
            return cast(leaf, verdict.casts[id(leaf)])
        return leaf

    cast_kwargs = {name: pytree.tree_map(one, kwargs[name]) for name in reversed(list(kwargs))}
    new_kwargs = {name: cast_kwargs[name] for name in kwargs}
    new_args = tuple(reversed([pytree.tree_map(one, arg) for arg in reversed(args)]))
    names = [a.name for a in schema_of(verdict.op).arguments]
    for name, value in {**verdict.kwargs, **verdict.clamp}.items():
        position = names.index(name)
        if position < len(new_args):
            new_args = (*new_args[:position], value, *new_args[position + 1 :])
        else:
            new_kwargs[name] = value
    return new_args, new_kwargs


class DataDependentError(Exception):
    """An op that fake tensors cannot run again: its result depends on elements or a subclass."""


class LibraryKernelError(Exception):
    """An op whose autocast kernel is its library's own code, which only torch.autocast can run."""


_DATA_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_MASKS = (torch.bool, torch.uint8)


def _depends_on_elements(op: OpOverload, inputs: Sequence[Tensor]) -> bool:
    """Whether the op's result has a size or a value that only its elements tell."""
    if op is torch.ops.aten.index.Tensor:  # tagged for its masks; integers select a known size
        return any(t.dtype in _MASKS for t in inputs[1:])
    return any(tag in op.tags for tag in _DATA_DEPENDENT)


@dataclass
class Call:
    """One op that autocast would see, with what was done to it and the ops inside it."""

    op: OpOverload
    verdict: Verdict
    inputs: tuple[Tensor, ...]
    order: Sequence[int] = ()  # of the inputs, as they are cast
    inner: list["Call"] = field(default_factory=list["Call"])
    dtypes_in: tuple[torch.dtype, ...] = ()
    dtypes_out: tuple[torch.dtype, ...] = ()

    @property
    def acts(self) -> bool:
        return self.verdict.acts or any(call.acts for call in self.inner)

    def all(self) -> Iterator["Call"]:
        """This call and all those inside it."""
        yield self
        for call in self.inner:
            yield from call.all()

    def leaves(self) -> Iterator["Call"]:
        """The ops that really run: this one, or those inside an opened composite."""
        if not self.inner:
            yield self
        for call in self.inner:
            yield from call.leaves()


class Listener(PreDispatchMode):
    """Runs ops as autocast would and notes them in `calls`, a tree of what called what."""

    def __init__(self, law: Law) -> None:
        super().__init__()
        self.law = law
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        verdict = judge(func, args, kwargs, self.law)
        call = Call(func, verdict, tuple(tensors((args, kwargs))), cast_order(args, kwargs))
        self.calls.append(call)
        if verdict.category == LIBRARY:
            raise LibraryKernelError(func.name())
        if any(is_wrapper_subclass(t) for t in call.inputs):
            self._carried_out(call, args, kwargs)
            raise DataDependentError(func.name())  # nested and distributed tensors run their way
        follows = verdict.category in (Category.FOLLOW, REPAIR) and not verdict.closed
        if follows and opens(func, call.inputs):
            out = self._inside(call, args, kwargs)
        else:
            out = self._run(call, args, kwargs)
        call.dtypes_out = tuple(t.dtype for t in tensors(out))
        return out

    def _inside(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        new_args, new_kwargs = self._carried_out(call, args, kwargs)
        outer, self.calls = self.calls, call.inner
        try:
            with self:
                out = composite_kernel(call.op)(*new_args, **new_kwargs)
        except RuntimeError as error:
            self._mend(call, args, kwargs, error)
            call.inner.clear()
            return self._inside(call, args, kwargs)
        finally:
            self.calls = outer
        if call.verdict.acts and not any(inner.acts for inner in call.inner):
            call.inner.clear()  # its own casts are all there is to do: it can stay whole
        return out

    def _mend(
        self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
    ) -> None:
        """Another verdict for a call that failed; raises the error where there is none."""
        if needs_elements(error):
            raise DataDependentError(call.op.name()) from error
        mended = mend(call.op, args, kwargs) if not call.verdict.acts else None
        if mended is None:
            raise error
        call.verdict = mended

    def _carried_out(
        self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        new_args, new_kwargs = carry_out(call.verdict, args, kwargs, Tensor.to)
        call.dtypes_in = tuple(t.dtype for t in tensors((new_args, new_kwargs)))
        return new_args, new_kwargs

    def _run(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        new_args, new_kwargs = self._carried_out(call, args, kwargs)
        if _depends_on_elements(call.op, call.inputs):
            raise DataDependentError(call.op.name())
        try:
            return call.verdict.op(*new_args, **new_kwargs)
        except (RuntimeError, TypeError) as error:
            self._mend(call, args, kwargs, error)
            return self._run(call, args, kwargs)


def opens(op: OpOverload, inputs: Sequence[Tensor]) -> bool:
    """Whether the dispatcher would show autocast the ops inside `op`."""
    return bool(inputs) and is_composite(op, inputs[0].device.type)
