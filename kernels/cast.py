"""Copy many tensors into another dtype at once.

On a GPU one launch makes all copies of a dtype. Where launches are recorded, the ops are their
twins in plain torch: a compiler fuses those into what is around them.
"""

# Triton's types say little about what a kernel may do, and triton_op has none.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportUnnecessaryComparison=false, reportUntypedFunctionDecorator=false

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op

from ampgraph.kernels.lang import jit, offsets, pointer, tl, triton_dtype, vector
from ampgraph.kernels.tables import CODES, current_device, dense, on_gpu, rows, traced_or_captured

__all__ = ["cast", "cast_", "cast_reference", "cast_reference_"]


def cast_reference(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """New tensors of the same shapes and values in `dtype`, rounded to nearest even."""
    return [t.to(dtype, copy=True) for t in tensors]


def cast_reference_(to: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Write each of `tensors` over its partner in `to`, which has its shape and keeps its dtype."""
    for target, source in zip(to, tensors, strict=True):
        target.copy_(source)


@jit
def cast_rows_kernel(table: "Any", TARGET: tl.constexpr) -> None:
    """All tensors of a table (tables.py), int64 [programs, 4], copied into targets of one dtype."""
    p_row = table + tl.program_id(0).to(tl.int64) * 4
    source, target = tl.load(p_row), tl.load(p_row + 1)
    count, code = tl.load(p_row + 2).to(tl.int32), tl.load(p_row + 3)
    if code < 2:
        cast_row(source, target, count, code, tl.float32, TARGET)
    elif code < 4:
        cast_row(source, target, count, code, tl.bfloat16, TARGET)
    else:
        cast_row(source, target, count, code, tl.float16, TARGET)


@jit
def cast_row(
    source: "Any",
    target: "Any",
    count: "Any",
    code: "Any",
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
) -> None:
    """`cast_chunk` of addresses, compiled once more for aligned ones."""
    VECTOR: tl.constexpr = vector(SOURCE, TARGET)
    if code % 2 == 1:
        p_source, p_target = pointer(source, SOURCE, VECTOR), pointer(target, TARGET, VECTOR)
        cast_chunk(p_source, p_target, count, True, VECTOR * 256)
    else:
        p_source, p_target = pointer(source, SOURCE, 1), pointer(target, TARGET, 1)
        cast_chunk(p_source, p_target, count, False, VECTOR * 128)


@jit
def cast_chunk(
    source: "Any", target: "Any", count: "Any", ALIGNED: tl.constexpr, BLOCK: "tl.constexpr"
) -> None:
    """`count` elements, rounded to the target's dtype."""
    o_block = offsets(ALIGNED, BLOCK)
    whole = count // BLOCK * BLOCK
    # Without a mask, so that a thread may move 16 bytes at a time.
    for start in range(0, whole, BLOCK):
        b_value = tl.load(source + start + o_block).to(target.dtype.element_ty)
        tl.store(target + start + o_block, b_value)
    if whole < count:
        m_rest = whole + o_block < count
        b_value = tl.load(source + whole + o_block, mask=m_rest).to(target.dtype.element_ty)
        tl.store(target + whole + o_block, b_value, mask=m_rest)


def _alike(target: Tensor, source: Tensor) -> bool:
    """Whether the elements of both lie densely in memory, in the same order."""
    same = target.shape == source.shape and target.stride() == source.stride()
    return same and dense(source) is source


def launch_rows(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """One launch that copies dense tensors into targets of their layouts, all of one dtype."""
    table = rows(sources, targets)
    if table.shape[0]:
        cast_rows_kernel[(table.shape[0],)](table, TARGET=triton_dtype(targets[0].dtype))


@triton_op("ampgraph::cast", mutates_args=())
def cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The op of `cast_reference`."""
    if dtype not in CODES or not on_gpu(tensors) or traced_or_captured(tensors[0]):
        return cast_reference(tensors, dtype)
    sources = [dense(t) for t in tensors]
    results = [torch.empty_like(source, dtype=dtype) for source in sources]
    with current_device(sources[0]):
        launch_rows(results, sources)
    return results


@triton_op("ampgraph::cast_", mutates_args={"to"})
def cast_(to: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """The op of `cast_reference_`."""
    if not on_gpu(to, tensors) or traced_or_captured(to[0]):
        return cast_reference_(to, tensors)
    pairs = list(zip(to, tensors, strict=True))
    with current_device(to[0]):
        for dtype in CODES:
            alike = [(a, b) for a, b in pairs if a.dtype == dtype and _alike(a, b)]
            if alike:
                launch_rows([a for a, _ in alike], [b for _, b in alike])
    for target, source in pairs:
        if not _alike(target, source):
            target.copy_(source)
    return None
