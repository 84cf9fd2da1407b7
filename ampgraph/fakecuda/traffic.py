"""The bytes that calls move to and from the GPU's memory.

Each tensor counts once for reading and once for writing, whatever caches do: a lower bound, and
for kernels that stream, what they take.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# In-place ops that do not read what they write over.
OVERWRITE = frozenset(
    "_foreach_copy_ _foreach_zero_ bernoulli_ copy_ exponential_ fill_ normal_ random_ uniform_ "
    "zero_".split()
)
# Their schema says that gradients are written; they are where there is a scale to divide them by.
FUSED_STEPS = re.compile(r"_fused_\w+_$")


@dataclass(frozen=True)
class TensorType:
    """What is known of a tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorType":
        """The type of a tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def size(tensor: Tensor) -> int:
    """Bytes of its distinct elements: an expanded dimension is one element."""
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= min(length, 1) if stride == 0 else length
    return count * tensor.dtype.itemsize


def sizes(tree: object) -> int:
    """Bytes of all distinct tensors in a tree."""
    found = {id(leaf): leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)}
    return sum(map(size, found.values()))


def moved(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object) -> int:
    """Bytes that an ATen op reads and writes, by its schema.

    Args:
        op: the overload. args, kwargs: what it was called with. out: what it returned.
    """
    schema = op._schema
    name = schema.name.split("::")[1]
    read: list[object] = []
    written: list[object] = []
    for position, (argument, value) in enumerate(_bound(schema.arguments, args, kwargs)):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if FUSED_STEPS.search(name) and argument.name == "grads":
            writes = kwargs.get("grad_scale") is not None
        overwrites = argument.is_out or (name in OVERWRITE and position == 0)
        if writes:
            written.append(value)
        if not (writes and overwrites):
            read.append(value)
    fresh = [r.alias_info is None for r in schema.returns]
    results = [out] if len(fresh) == 1 else list(out) if isinstance(out, (tuple, list)) else []
    made = [value for value, new in zip(results, fresh, strict=False) if new]
    return sizes(read) + sizes([written, made])


def _bound(
    arguments: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Each argument of the schema that was given, with its value."""
    for index, argument in enumerate(arguments):
        if index < len(args) and not argument.kwarg_only:
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]
