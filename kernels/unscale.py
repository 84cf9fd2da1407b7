"""Unscale gradients, find what is not finite in them, and sum their squares, in one read.

The ops are `unscale`, which makes new tensors, `unscale_`, which writes in place, and `check`,
which only reads; `torch.ops.ampgraph` has them under the same names. On a GPU one launch takes
all gradients, and a second, tiny one adds up what its programs found, always in the same order.
Where the launches are recorded each gradient has its own: a compiler then sees the kernel. On
other devices, and for float64 and complex, the ops are their twins in plain torch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from ampgraph.kernels.lang import fold, jit, offsets, pointer, tl, triton_dtype, vector
from ampgraph.kernels.tables import (
    BLOCK,
    CODES,
    current_device,
    dense,
    on_gpu,
    rows,
    traced_or_captured,
)

__all__ = ["check", "check_reference", "unscale", "unscale_", "unscale_reference"]

# Elements of a program where each tensor has its own launch.
CHUNK = 8 * BLOCK


def unscale_reference(
    grads: Sequence[Tensor],
    scale: Tensor,
    divide: bool = False,
    check_output: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """y = grad * scale, or grad / scale, computed in float32 (float64 and complex in their own).

    Args:
        grads: floating or complex tensors of any shapes and dtypes, on one device.
        scale: float32, one element, on that device.
        divide: divide by the scale and do not multiply.
        check_output: look for inf and nan in the results, not in the gradients.
        dtype: of the results; None is each gradient's own.

    Returns:
        the results, shaped as the gradients; found_inf, float32 [], 1.0 if an element is inf or
        nan; and the sum of |y|^2 before y is rounded, float32 [].
    """
    wide = [_scaled(grad, scale, divide) for grad in grads]
    results = [y.to(dtype or grad.dtype, copy=True) for grad, y in zip(grads, wide, strict=True)]
    checked = results if check_output else grads
    return results, _found_inf(checked, scale), _sum_of_squares(wide, scale)


def check_reference(grads: Sequence[Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
    """found_inf of the gradients and the sum of |grad * scale|^2, as `unscale_reference`'s."""
    wide = [_scaled(grad, scale, divide=False) for grad in grads]
    return _found_inf(grads, scale), _sum_of_squares(wide, scale)


def _scaled(grad: Tensor, scale: Tensor, divide: bool) -> Tensor:
    """One gradient unscaled, in the dtype it is computed in."""
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    factor = scale.reshape(())
    return wide / factor if divide else wide * factor


def _found_inf(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """float32 []: 1.0 if an element of the tensors is inf or nan, else 0.0."""
    if not tensors:
        return like.new_zeros((), dtype=torch.float32)
    finite = torch.stack([t.isfinite().all() for t in tensors])
    return finite.all().logical_not().to(torch.float32)


def _sum_of_squares(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """float32 []: the sum of |t|^2 over all elements."""
    if not tensors:
        return like.new_zeros((), dtype=torch.float32)
    squares = [(t.abs() if t.is_complex() else t).square().sum() for t in tensors]
    return torch.stack([s.to(torch.float32) for s in squares]).sum()


@triton_op("ampgraph::unscale", mutates_args=())
def unscale(
    grads: Sequence[Tensor],
    scale: Tensor,
    divide: bool = False,
    check_output: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The op of `unscale_reference`."""
    if not on_gpu(grads, [scale]) or not (dtype is None or dtype in CODES):
        return unscale_reference(grads, scale, divide, check_output, dtype)
    sources = [dense(grad) for grad in grads]
    results = [torch.empty_like(source, dtype=dtype) for source in sources]
    return results, *_launch(sources, results, scale, divide, check_output)


@triton_op("ampgraph::unscale_", mutates_args={"grads"})
def unscale_(
    grads: Sequence[Tensor], scale: Tensor, divide: bool = False, check_output: bool = False
) -> tuple[Tensor, Tensor]:
    """As `unscale`, each result written over its gradient; returns found_inf, sum of squares."""
    if on_gpu(grads, [scale]):
        results = [dense(grad) for grad in grads]
        found_inf, squares = _launch(results, results, scale, divide, check_output)
    else:
        results, found_inf, squares = unscale_reference(grads, scale, divide, check_output)
    for grad, result in zip(grads, results, strict=True):
        if result is not grad:
            grad.copy_(result)
    return found_inf, squares


@triton_op("ampgraph::check", mutates_args=())
def check(grads: Sequence[Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
    """The op of `check_reference`."""
    if not on_gpu(grads, [scale]):
        return check_reference(grads, scale)
    return _launch([dense(grad) for grad in grads], None, scale)


def _launch(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor] | None,
    scale: Tensor,
    divide: bool = False,
    check_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """Unscale dense tensors into targets of their layouts, maybe themselves; None: nowhere."""
    launch = launch_each if traced_or_captured(scale) else launch_rows
    with current_device(scale):
        return launch(sources, targets, scale, divide, check_output)


def launch_rows(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor] | None,
    scale: Tensor,
    divide: bool,
    check_output: bool,
) -> tuple[Tensor, Tensor]:
    """One launch for all of them, a second for the totals."""
    into = sources if targets is None else targets
    table = rows(sources, into)
    programs = table.shape[0]
    partials = scale.new_empty((2, programs))
    same = all(a.dtype == b.dtype for a, b in zip(sources, into, strict=True))
    if programs:
        unscale_rows_kernel[(programs,)](
            table,
            scale,
            partials,
            programs,
            DIVIDE=divide,
            CHECK_OUTPUT=check_output,
            WRITE=targets is not None,
            TARGET=None if same else triton_dtype(into[0].dtype),
        )
    found_inf, squares = scale.new_empty(()), scale.new_empty(())
    totals_kernel[(1,)](partials, found_inf, squares, programs, BLOCK=1024)
    return found_inf, squares


def launch_each(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor] | None,
    scale: Tensor,
    divide: bool,
    check_output: bool,
) -> tuple[Tensor, Tensor]:
    """A launch for each of them, and plain torch for the totals."""
    partials = [scale.new_zeros((2, 1))]
    for i, source in enumerate(sources):
        if source.numel() == 0:
            continue
        programs = (source.numel() + CHUNK - 1) // CHUNK
        partials.append(scale.new_empty((2, programs)))
        target = None if targets is None or targets[i] is source else targets[i]
        wrap_triton(unscale_kernel)[(programs,)](
            source,
            target,
            scale,
            partials[-1],
            source.numel(),
            DIVIDE=divide,
            CHECK_OUTPUT=check_output,
            WRITE=targets is not None,
            CHUNK=CHUNK,
            BLOCK=BLOCK if source.element_size() == 2 else BLOCK // 2,
        )
    flags, squares = torch.cat(partials, dim=1).unbind()
    return flags.amax(), squares.sum()


@jit
def unscale_kernel(
    source: "Any",
    target: "Any",
    scale: "Any",
    partials: "Any",
    elements: "Any",
    DIVIDE: tl.constexpr,
    CHECK_OUTPUT: tl.constexpr,
    WRITE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One tensor: y = source * scale; flags and sums of squares to partials, float32 [2, programs].

    source, target: [elements], alike in layout; target None is source. A program takes a chunk.
    """
    i_program = tl.program_id(0)
    first = i_program.to(tl.int64) * CHUNK
    count = tl.minimum(elements - first, CHUNK).to(tl.int32)
    p_source = source + first
    if target is None:
        p_target = p_source
    else:
        p_target = target + first
    flag, square = unscale_chunk(
        p_source, p_target, count, tl.load(scale), DIVIDE, CHECK_OUTPUT, WRITE, True, BLOCK
    )
    tl.store(partials + i_program, flag)
    tl.store(partials + tl.num_programs(0) + i_program, square)


@jit
def unscale_rows_kernel(
    table: "Any",
    scale: "Any",
    partials: "Any",
    programs: "Any",
    DIVIDE: tl.constexpr,
    CHECK_OUTPUT: tl.constexpr,
    WRITE: tl.constexpr,
    TARGET: tl.constexpr,
) -> None:
    """All tensors of a table (tables.py), int64 [programs, 4]; TARGET None is the source's dtype.

    partials: float32 [2, programs], as of `unscale_kernel`.
    """
    i_program = tl.program_id(0).to(tl.int64)
    p_row = table + i_program * 4
    source, target = tl.load(p_row), tl.load(p_row + 1)
    count, code = tl.load(p_row + 2).to(tl.int32), tl.load(p_row + 3)
    b_scale = tl.load(scale)
    if code < 2:
        flag, square = unscale_row(
            source, target, count, code, b_scale, DIVIDE, CHECK_OUTPUT, WRITE, tl.float32, TARGET
        )
    elif code < 4:
        flag, square = unscale_row(
            source, target, count, code, b_scale, DIVIDE, CHECK_OUTPUT, WRITE, tl.bfloat16, TARGET
        )
    else:
        flag, square = unscale_row(
            source, target, count, code, b_scale, DIVIDE, CHECK_OUTPUT, WRITE, tl.float16, TARGET
        )
    tl.store(partials + i_program, flag)
    tl.store(partials + programs + i_program, square)


@jit
def unscale_row(
    source: "Any",
    target: "Any",
    count: "Any",
    code: "Any",
    scale: "Any",
    DIVIDE: tl.constexpr,
    CHECK_OUTPUT: tl.constexpr,
    WRITE: tl.constexpr,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
) -> "Any":
    """`unscale_chunk` of addresses, compiled once more for aligned ones."""
    OUT: tl.constexpr = SOURCE if TARGET is None else TARGET
    VECTOR: tl.constexpr = vector(SOURCE, OUT)
    if code % 2 == 1:
        p_source, p_target = pointer(source, SOURCE, VECTOR), pointer(target, OUT, VECTOR)
        flag, square = unscale_chunk(
            p_source, p_target, count, scale, DIVIDE, CHECK_OUTPUT, WRITE, True, VECTOR * 256
        )
    else:
        p_source, p_target = pointer(source, SOURCE, 1), pointer(target, OUT, 1)
        flag, square = unscale_chunk(
            p_source, p_target, count, scale, DIVIDE, CHECK_OUTPUT, WRITE, False, VECTOR * 128
        )
    return flag, square


@jit
def unscale_chunk(
    source: "Any",
    target: "Any",
    count: "Any",
    scale: "Any",
    DIVIDE: tl.constexpr,
    CHECK_OUTPUT: tl.constexpr,
    WRITE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> "Any":
    """(1.0 if an element is inf or nan else 0.0, sum of squares) of `count` elements."""
    o_block = offsets(ALIGNED, BLOCK)
    b_flags = tl.zeros([BLOCK // 4], tl.int32)
    b_squares = tl.zeros([BLOCK // 4], tl.float32)
    whole = count // BLOCK * BLOCK
    # Without a mask, so that a thread may move 16 bytes at a time.
    for start in range(0, whole, BLOCK):
        b_grad = tl.load(source + start + o_block)
        b_wide, b_result = unscale_block(b_grad, scale, DIVIDE, target.dtype.element_ty)
        if WRITE:
            tl.store(target + start + o_block, b_result)
        b_bad = not_finite(b_result if CHECK_OUTPUT else b_grad)
        b_flags |= tl.max(fold(b_bad, ALIGNED, BLOCK), 1)
        b_squares += tl.sum(fold(b_wide * b_wide, ALIGNED, BLOCK), 1)
    if whole < count:
        m_rest = whole + o_block < count
        b_grad = tl.load(source + whole + o_block, mask=m_rest, other=0.0)
        b_wide, b_result = unscale_block(b_grad, scale, DIVIDE, target.dtype.element_ty)
        if WRITE:
            tl.store(target + whole + o_block, b_result, mask=m_rest)
        # An element that does not exist is 0, and 0 * inf or 0 / 0 would be nan.
        b_bad = tl.where(m_rest, not_finite(b_result if CHECK_OUTPUT else b_grad), 0)
        b_flags |= tl.max(fold(b_bad, ALIGNED, BLOCK), 1)
        b_wide = tl.where(m_rest, b_wide, 0.0)
        b_squares += tl.sum(fold(b_wide * b_wide, ALIGNED, BLOCK), 1)
    return tl.max(b_flags, 0).to(tl.float32), tl.sum(b_squares, 0)


@jit
def unscale_block(
    b_grad: "Any", scale: "Any", DIVIDE: tl.constexpr, TARGET: "tl.constexpr"
) -> "Any":
    """The unscaled values in float32, and rounded to the target's dtype."""
    b_wide = b_grad.to(tl.float32)
    if DIVIDE:
        b_wide = tl.div_rn(b_wide, scale)  # `/` may be off by two ulps
    else:
        b_wide = b_wide * scale
    return b_wide, b_wide.to(TARGET)


@jit
def not_finite(b_x: "Any") -> "Any":
    """int32: 1 where an element is inf or nan."""
    return (~(tl.abs(b_x.to(tl.float32)) < float("inf"))).to(tl.int32)


@jit
def totals_kernel(
    partials: "Any", found_inf: "Any", squares: "Any", programs: "Any", BLOCK: tl.constexpr
) -> None:
    """partials, float32 [2, programs]: the largest flag and the sum of the squares, float32 []."""
    o_block = tl.arange(0, BLOCK)
    b_flags = tl.zeros([BLOCK], tl.float32)
    b_squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, programs, BLOCK):
        m_block = start + o_block < programs
        p_flags = partials + start + o_block
        b_flags = tl.maximum(b_flags, tl.load(p_flags, mask=m_block, other=0.0))
        b_squares += tl.load(p_flags + programs, mask=m_block, other=0.0)
    tl.store(found_inf, tl.max(b_flags, 0))
    tl.store(squares, tl.sum(b_squares, 0))
