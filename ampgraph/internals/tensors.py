"""Fake, functionalized and functorch tensors, and the autograd engine."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import contextlib
import logging
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "WeakStorage",
    "detect_fake_mode",
    "functorch_level",
    "functorch_unwound",
    "functorch_unwrapped",
    "has_python_backward",
    "hide_fake_errors",
    "is_functorch",
    "is_functorch_wrapped",
    "is_shared",
    "is_traced",
    "is_wrapper_subclass",
    "needs_elements",
    "queue_backward_callback",
    "quiet_fake_errors",
    "set_grad_enabled",
    "storage_address",
    "storage_of",
    "under_dispatch_mode",
    "unset_fake_temporarily",
]


set_grad_enabled = torch._C._set_grad_enabled


def needs_elements(error: Exception) -> bool:
    """Whether a fake tensor was asked for elements, by the dispatcher or by a C++ kernel."""
    asked = isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
    return asked or "its data is not allocated yet" in str(error)


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


def queue_backward_callback(function: Callable[[], None]) -> None:
    """Call `function` when the backward pass that is running ends."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory, which its views share; of fake memory, too."""
    return int(tensor.untyped_storage()._cdata)


# As `storage_of`, and quicker, of tensors that have real memory.
storage_address: Callable[[torch.Tensor], int] = getattr(torch._C, "_storage_address", storage_of)
WeakStorage = StorageWeakRef  # while one is held, no other storage gets the address


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor looks at the same memory: an alias, or one saved for a backward."""
    return _owners(tensor) > _ALONE


def _owners(tensor: torch.Tensor) -> int:
    """How many there are of a tensor's memory, with the handle that this makes."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_ALONE = _owners(torch.empty(1, device="cpu"))


def under_dispatch_mode() -> bool:
    """Whether ops are shown to a mode that may record or replace them: fake tensors, a tracer."""
    return bool(torch._C._len_torch_dispatch_stack())


def is_traced(value: torch.Tensor) -> bool:
    """Whether the tensor has no memory to point a kernel at: fake, or functionalized over a fake.

    The body of a `triton_op` is called with these when it is traced, and with real ones to run.
    """
    return isinstance(value, FakeTensor | FunctionalTensor)


def is_wrapper_subclass(value: torch.Tensor) -> bool:
    """Whether the tensor is made of others: nested, distributed, and other traceable subclasses."""
    return is_traceable_wrapper_subclass(value)


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


def hide_fake_errors(when: Callable[[], bool]) -> None:
    """Keep what fake tensors log of failing ops quiet while `when()` is true."""

    def told(record: logging.LogRecord) -> bool:
        return not when()

    torch._subclasses.fake_tensor.log.addFilter(told)
