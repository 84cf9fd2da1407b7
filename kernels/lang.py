"""Triton, and the words all kernels here use.

torch's builds for macOS and Windows come without Triton: there the kernels are defined as plain
functions that nothing calls, for the ops run their twins.
"""

# Triton's types say little about what a kernel may do, and triton_op has none.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportUnnecessaryComparison=false, reportUntypedFunctionDecorator=false

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import triton.language as tl

    def jit(function: Any) -> Any:
        """A Triton kernel, or a function that kernels call."""

else:
    try:
        import triton.language as tl
        from triton import jit
    except ImportError:
        from types import SimpleNamespace

        tl = SimpleNamespace(constexpr=Any)

        def jit(function):
            return function


__all__ = ["fold", "jit", "offsets", "pointer", "tl", "triton_dtype", "vector"]


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of a dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


@jit
def vector(A: tl.constexpr, B: "tl.constexpr") -> "Any":
    """How many elements of the wider dtype are 16 bytes, the most a thread moves at a time.

    As many of the narrower one are moved then: with more of those, values would have to change
    threads between load and store.
    """
    return 128 // (
        A.primitive_bitwidth
        if A.primitive_bitwidth > B.primitive_bitwidth
        else B.primitive_bitwidth
    )


@jit
def pointer(address: "Any", DTYPE: tl.constexpr, ELEMENTS: "tl.constexpr") -> "Any":
    """An int64 address as a pointer, known to be a multiple of so many elements' bytes."""
    # The hint is kept with the cast itself: that of a call's result would be lost.
    p = address.to(tl.pointer_type(DTYPE))
    return tl.multiple_of(p, ELEMENTS * DTYPE.primitive_bitwidth // 8)


@jit
def offsets(ALIGNED: tl.constexpr, BLOCK: "tl.constexpr") -> "Any":
    """0, 1, ... int32 [BLOCK]; of shape [1, BLOCK] for a path of unaligned accesses.

    The compiler gives all accesses of one shape in a kernel the widest layout any of them can
    use; unaligned ones of the same shape as aligned ones would be sent through shared memory.
    """
    if ALIGNED:
        return tl.arange(0, BLOCK)
    else:
        return tl.arange(0, BLOCK)[None, :]


@jit
def fold(b_x: "Any", ALIGNED: tl.constexpr, BLOCK: "tl.constexpr") -> "Any":
    """[BLOCK] as [BLOCK // 4, 4], in each row four elements of one thread.

    A thread holds neighbours where accesses are aligned, and elements far apart where not.
    """
    if ALIGNED:
        return tl.reshape(b_x, [BLOCK // 4, 4])
    else:
        return tl.trans(tl.reshape(b_x, [4, BLOCK // 4]))
