"""The Triton kernels of the ops in unscale.py, whose twins say what they compute."""

# Triton's types say little about what a kernel may do.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportUnnecessaryComparison=false

from typing import Any

from ampgraph.kernels.lang import fold, jit, offsets, pointer, tl, vector

__all__ = ["totals_kernel", "unscale_kernel", "unscale_rows_kernel"]


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
    b_scale = tl.load(scale).to(tl.float32)
    flag, square = unscale_chunk(
        p_source, p_target, count, b_scale, DIVIDE, CHECK_OUTPUT, WRITE, True, BLOCK
    )
    tl.store(partials + i_program, flag)
    tl.store(partials + tl.num_programs(0) + i_program, square)


@jit
def unscale_rows_kernel(
    table: "Any",
    scale: "Any",
    partials: "Any",
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
    b_scale = tl.load(scale).to(tl.float32)
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
    tl.store(partials + tl.num_programs(0) + i_program, square)


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
