"""What rules mean, said again: explicit casts around each call of torch's Python API.

A reference for policies with op rules and module rules, independent of the compiler: calls are
seen by a TorchFunctionMode, so it knows functions and methods and nothing of the dispatcher.
"""

import contextlib
import fnmatch
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ampgraph.policy import Policy

# Functions that are one op, which no other row of the programs calls inside.
RULED = (
    "relu gelu silu erf sin hypot maximum linear conv2d layer_norm softmax cdist logsumexp cumsum "
    "lerp atan2 mse_loss logaddexp"
).split()
CALLS_RULED_OPS = ("attention", "_cell")

# Functions whose result shares memory with their input: a rule does not cast their input, for
# that would cut the alias. In-place functions end in an underscore.
VIEWS = frozenset(
    "view reshape flatten unflatten unsqueeze squeeze t transpose permute movedim swapaxes expand "
    "narrow select chunk split unbind tensor_split diagonal unfold contiguous detach view_as "
    "real view_as_real view_as_complex get setitem iadd imul".split()
)


def eligible(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def cast(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(dtype) if eligible(leaf) else leaf, tree)


class Reference(TorchFunctionMode):
    """Op rules by function name, module rules by glob, on top of the autocast that is on."""

    def __init__(self, ops: Mapping[str, str], modules: Sequence[tuple[str, torch.dtype]]) -> None:
        super().__init__()
        self.ops, self.modules = ops, modules
        self.stack: list[torch.dtype | None] = [None]

    def policy(self) -> Policy:
        """The same rules for the compiler."""
        found = Policy.autocast("cpu")
        for name, category in self.ops.items():
            found = getattr(found, category)(f"aten::{name}")
        for match, dtype in self.modules:
            found = found.module(match, dtype=dtype)
        return found

    @contextlib.contextmanager
    def within(self, path: str) -> Generator[None]:
        """A call of the module at `path`: the innermost module with a rule decides."""
        found = [dtype for match, dtype in self.modules if fnmatch.fnmatchcase(path, match)]
        dtype = found[-1] if found else self.stack[-1]
        low = dtype if torch.is_autocast_enabled("cpu") and dtype != torch.float32 else None
        self.stack.append(dtype)
        with torch.autocast("cpu", low, cache_enabled=False) if low else contextlib.nullcontext():
            yield
        self.stack.pop()

    def wrapped(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self.within(path):
                return forward(*args)

        return call

    def attach(self, root: nn.Module) -> nn.Module:
        """Make each submodule's call run within its path."""
        for path, part in root.named_modules():
            if path:
                part.forward = self.wrapped(path, part.forward)
        return root

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        dtype = self._dtype(func, args, kwargs) if torch.is_autocast_enabled("cpu") else None
        if dtype is None:
            return func(*args, **kwargs)
        if dtype is not torch.uint8:  # which stands for: as they are
            kwargs = {name: cast(value, dtype) for name, value in kwargs.items()}
            args = list(reversed([cast(argument, dtype) for argument in reversed(args)]))
        with torch.autocast("cpu", enabled=False):
            return func(*args, **kwargs)

    def _dtype(self, func: Any, args: Any, kwargs: Any) -> torch.dtype | None:
        name = func.__name__
        if name.startswith("__"):
            name = name.strip("_")
        if name.endswith("_") or kwargs.get("inplace") or "out" in kwargs:
            return None
        if self.stack[-1] == torch.float32 and not _is_view(func, name, args):
            return torch.float32
        found = [leaf.dtype for leaf in pytree.tree_leaves((args, kwargs)) if eligible(leaf)]
        low = torch.get_autocast_dtype("cpu")
        same = found[0] if len(set(found)) == 1 else torch.float32
        dtypes = {"allow": low, "deny": torch.float32, "promote": same, "follow": torch.uint8}
        return dtypes[self.ops[name]] if name in self.ops and found else None


def _is_view(func: Any, name: str, args: Any) -> bool:
    if name == "getitem":  # by a tensor it is a gather
        return not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(args[1:]))
    return name in VIEWS and func is not F.unfold
