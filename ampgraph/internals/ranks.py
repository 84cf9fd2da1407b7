"""Distributed tensors and reductions over process groups."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ampgraph.internals.dynamo import untraced


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor, in the same memory; other tensors themselves."""
    if not _is_distributed(tensor):
        return tensor
    part: Any = tensor.to_local()  # type: ignore[attr-defined]
    return part.wait() if hasattr(part, "wait") else part  # type: ignore[no-any-return]


def laid_out_as(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A distributed gradient with the placements of its parameter, itself if it has them.

    Tensor parallelism leaves sums pending (Partial): the largest element and the norm of those
    are known only when they are done, which the optimizer's step would do again at each use.
    """
    if not (_is_distributed(grad) and _is_distributed(param)):
        return grad
    placed: Any = param.placements  # type: ignore[attr-defined]
    if grad.placements == placed:  # type: ignore[attr-defined]
        return grad
    return grad.redistribute(placements=placed)  # type: ignore[attr-defined, no-any-return]


def mesh_groups(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The process groups whose ranks hold parts or copies of a distributed tensor."""
    return tuple(group for group, _ in _placed(tensor))


def shard_groups(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The process groups whose ranks hold different parts of a distributed tensor."""
    return tuple(group for group, placement in _placed(tensor) if not placement.is_replicate())


def _placed(tensor: torch.Tensor) -> list[tuple[Any, Any]]:
    """The process group and the placement for each dimension of a mesh that has several ranks."""
    if not _is_distributed(tensor):
        return []
    distributed: Any = tensor
    mesh = distributed.device_mesh
    placed = enumerate(distributed.placements)
    return [(mesh.get_group(i), placement) for i, placement in placed if mesh.size(i) > 1]


def is_flattened(param: torch.Tensor) -> bool:
    """Whether FullyShardedDataParallel has made this parameter a part of a sharded flat one."""
    return getattr(param, "_fsdp_flattened", False)


_sharded_over: Any = WeakIdKeyDictionary()


@untraced
def flat_shard_groups(param: torch.Tensor, default: Any) -> tuple[Any, ...]:
    """The groups on whose ranks FullyShardedDataParallel has other parts of a flattened parameter.

    None for NO_SHARD, the shards' and not the replicas' for HYBRID_SHARD. A parameter does not know
    its handle (torch 2.13), so all handles there are are looked for, once for new parameters.
    `default` is for one whose handle is not found.
    """
    if param not in _sharded_over:
        _sharded_over[param] = (default,)
        kind = getattr(
            sys.modules.get("torch.distributed.fsdp._flat_param"), "FlatParamHandle", None
        )
        for handle in [found for found in gc.get_objects() if type(found) is kind]:
            flat = handle.flat_param
            groups = (handle.process_group,) if handle.uses_sharded_strategy else ()
            for one in (flat, *(getattr(flat, "_params", None) or ())):
                _sharded_over[one] = groups
    found: tuple[Any, ...] = _sharded_over[param]
    return found


def _is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, whose module takes a second to import and may not be there."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def max_over_ranks(flag: torch.Tensor, groups: Iterable[Any]) -> torch.Tensor:
    """The largest of all ranks' values, on the device, in place; a group None is all ranks."""
    return _reduced(flag, groups, "MAX")


def min_over_ranks(value: torch.Tensor, groups: Iterable[Any]) -> torch.Tensor:
    """The smallest of all ranks' values, on the device, in place."""
    return _reduced(value, groups, "MIN")


def sum_over_ranks(value: torch.Tensor, groups: Iterable[Any]) -> torch.Tensor:
    """The sum of all ranks' values, on the device, in place."""
    return _reduced(value, groups, "SUM")


def _reduced(value: torch.Tensor, groups: Iterable[Any], op: str) -> torch.Tensor:
    for group in groups:
        torch.distributed.all_reduce(value, getattr(torch.distributed.ReduceOp, op), group=group)
    return value
