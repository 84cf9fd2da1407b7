"""The words of the law: what decides about an op call, what was decided, and who is eligible."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ampgraph.internals.ops import OpOverload, schema_of
from ampgraph.policy import ModuleRule, Policy
from ampgraph.state import AutocastState

FP32 = torch.float32
REPAIR = "repair"  # the category of what eager would refuse to run
CONSTANT = "constant"  # the category of a constant that its tensor's dtype cannot hold
LIBRARY = "library"  # the category of an op whose library wrote its autocast kernel
KERNEL = "kernel"  # the category of a kernel that eager autocast reaches into, and we do not

FUSED = "fused"  # the category of a kernel that stands for several ops


@dataclass(frozen=True)
class Law:
    """Everything that decides: the lists of each device type, the state, a module's own rule.

    `lowered` says that an input of the node was made low by this compiler, so that a constant
    that does not fit it is our doing.
    """

    policies: Mapping[str, Policy]
    state: AutocastState
    module: ModuleRule | None = None
    lowered: bool = False

    def policy(self, device_type: str) -> Policy:
        return self.policies.get(device_type) or Policy.autocast(device_type)


@dataclass(frozen=True)
class Verdict:
    """What to do with one op call: `casts` by the identity of the tensor, then call `op`."""

    op: OpOverload
    category: str
    because: str
    casts: Mapping[int, torch.dtype] = field(default_factory=dict[int, torch.dtype])
    kwargs: Mapping[str, object] = field(default_factory=dict[str, object])
    clamp: Mapping[str, float] = field(default_factory=dict[str, float])
    closed: bool = False  # a user's rule: what is inside stays as it is

    @property
    def acts(self) -> bool:
        return bool(self.casts or self.kwargs or self.clamp)


def tensors(args: object) -> list[Tensor]:
    """The tensors among (nested) arguments, in order."""
    return [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]


def eligible(tensor: Tensor, device_type: str) -> bool:
    """Autocast's `is_eligible`: floating, on the region's device type, not float64."""
    return (
        tensor.is_floating_point()
        and tensor.device.type == device_type
        and tensor.dtype != torch.float64
    )


def widest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The narrowest dtype that holds all of `dtypes`: fp16 with bf16 is fp32.

    As `torch.promote_types`, which is an op, and would stand in the graph that is being traced.
    """
    found = set(dtypes)
    if len(found) == 1:
        return found.pop()
    if found <= _FLOATING:
        return torch.float64 if torch.float64 in found else FP32
    return functools.reduce(torch.promote_types, dtypes)


_FLOATING = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def widens(source: torch.dtype, to: torch.dtype) -> bool:
    """Whether `to` holds every value of `source`, another dtype, exactly."""
    return source != to and widest([source, to]) == to


def named(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the op's schema."""
    names = [a.name for a in schema_of(op).arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def written(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that the call writes to."""
    given = named(op, args, kwargs)
    for argument in schema_of(op).arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors(given.get(argument.name))
