"""A program that runs the Triton kernels in Triton's interpreter, against their twins.

Triton decides when it is imported whether its kernels are interpreted, so this is a process of its
own. The tables hold addresses of CPU memory here, which the interpreter reads as a GPU would.
"""

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from ampgraph.kernels import cast, tables, unscale, update_scale

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# None at all, fewer than any block, and more than the largest.
SIZES = (0, 63, 2600)
ODD = [
    float("inf"),
    float("-inf"),
    float("nan"),
    1e-40,
    -1e-45,
    3e38,
    65504.0,
    65519.0,
    65520.0,
    0.0,
    -0.0,
]

inexact: Callable[..., Any] = InterpreterBuilder.cast_impl


def exact(self: Any, handle: Any, dtype: Any) -> Any:
    """Casts of bfloat16 as GPUs do them: the interpreter does not round, and loses denormals."""
    cast = handle.dtype.scalar, dtype.scalar
    if cast == (tl.float32, tl.bfloat16):
        low = torch.from_numpy(np.ascontiguousarray(handle.data)).to(torch.bfloat16)
        return TensorHandle(low.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
    if cast == (tl.bfloat16, tl.float32):
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return TensorHandle(wide, tl.float32)
    return inexact(self, handle, dtype)


InterpreterBuilder.create_fp_trunc = InterpreterBuilder.create_fp_ext = exact


def tensors(odd: Sequence[float] = ()) -> list[Tensor]:
    """Of every dtype, size and alignment, some channels last; one holds `odd` at its end."""
    found = []
    for dtype, size, skip in itertools.product(DTYPES, SIZES, (0, 1)):
        found.append((torch.randn(size + skip) * 100).to(dtype)[skip:])
    found.append(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    if odd:
        place = found[len(found) // 2]
        place[-len(odd) :] = torch.tensor(odd).to(place.dtype)
    return found


def assert_same(left: object, right: object, what: object) -> None:
    torch.testing.assert_close(
        left, right, rtol=0, atol=0, equal_nan=True, msg=lambda told: f"{what}: {told}"
    )


def assert_totals(tri: Sequence[Tensor], ref: Sequence[Tensor], what: object) -> None:
    assert_same(tri[0], ref[0], what)
    torch.testing.assert_close(tri[1], ref[1], rtol=1e-5, atol=0, equal_nan=True)


def scales() -> list[Tensor]:
    return [torch.tensor(1 / 65536), torch.tensor([0.37]), torch.tensor(float("inf"))]


def new_tensors() -> None:
    """`unscale`, of every flag and dtype."""
    flags = itertools.product((False, True), (False, True), (None, *DTYPES, None))
    for i, (divide, check_output, dtype) in enumerate([*list(flags)[::2], (True, True, None)]):
        grads, scale = tensors(ODD[i % 4 : i % 4 + 1] if i % 2 else ()), scales()[i % 3]
        tri = [torch.full_like(g, float("nan"), dtype=dtype) for g in grads]
        totals = unscale.launch_rows(grads, tri, scale, divide, check_output)
        ref, *ref_totals = unscale.unscale_reference(grads, scale, divide, check_output, dtype)
        assert_same(tri, ref, (divide, check_output, dtype))
        assert_totals(totals, ref_totals, (divide, check_output, dtype))


def in_place_and_read_only() -> None:
    """`unscale_` and `check`: inf, nan, what overflows when squared, and all at once."""
    for odd in ((), [ODD[0]], [ODD[2]], ODD[5:6], ODD):
        grads, scale = tensors(odd), torch.tensor(2.0**-11)
        ref, *ref_totals = unscale.unscale_reference(grads, scale)
        assert_totals(unscale.launch_rows(grads, None, scale, False, False), ref_totals, odd)
        assert_totals(unscale.launch_rows(grads, grads, scale, False, False), ref_totals, odd)
        assert_same(grads, ref, odd)


def a_launch_each() -> None:
    """What a tracer or a CUDA graph records."""
    for divide, dtype in ((False, None), (True, torch.float32), (True, torch.bfloat16)):
        grads, scale = tensors(ODD), torch.tensor(1.7)
        tri = [torch.full_like(g, float("nan"), dtype=dtype) for g in grads]
        totals = unscale.launch_each(grads, tri, scale, divide, True)
        ref, *ref_totals = unscale.unscale_reference(grads, scale, divide, True, dtype)
        assert_same(tri, ref, (divide, dtype))
        assert_totals(totals, ref_totals, (divide, dtype))
        inside = [grad.clone() for grad in grads]
        assert_totals(unscale.launch_each(grads, None, scale, divide, True), ref_totals, divide)
        unscale.launch_each(inside, inside, scale, divide, True)
        assert_same(inside, unscale.unscale_reference(grads, scale, divide)[0], divide)


def nothing() -> None:
    """No elements, in several tensors."""
    grads = [torch.empty(0), torch.empty(3, 0)]
    for launch in (unscale.launch_rows, unscale.launch_each):
        totals = launch(grads, grads, torch.tensor(2.0), False, False)
        assert_totals(totals, (torch.tensor(0.0), torch.tensor(0.0)), launch)


def many_chunks() -> None:
    """Chunks of several blocks, and more programs than the totals' block has lanes."""
    tables.PROGRAMS = 3
    grads = [torch.randn(5 * tables.BLOCK + 17), torch.randn(9 * tables.BLOCK - 1).bfloat16()[1:]]
    scale = torch.tensor(3.0)
    ref, *ref_totals = unscale.unscale_reference(grads, scale, True)
    assert_totals(unscale.launch_rows(grads, grads, scale, True, False), ref_totals, "chunks")
    assert_same(grads, ref, "chunks")
    partials = torch.rand(2, 2500)
    totals = [torch.full((), float("nan")) for _ in range(2)]
    unscale.totals_kernel[(1,)](partials, *totals, 2500, BLOCK=1024)
    assert_totals(totals, (partials[0].max(), partials[1].sum()), "totals")


def casts() -> None:
    for dtype in DTYPES:
        sources = tensors(ODD)
        tri = [torch.full_like(t, float("nan"), dtype=dtype) for t in sources]
        cast.launch_rows(tri, sources)
        assert_same(tri, cast.cast_reference(sources, dtype), dtype)


def scale_updates() -> None:
    """The kernel against its twin, on streams of good and bad steps."""
    for factors in ((2.0, 0.5, 3, 1, 0.0, float("inf")), (1.1, 0.3, 2, 2, 1e-3, 9.0)):
        tri = [torch.tensor(7.0), *torch.tensor([0, factors[3]], dtype=torch.int32).unbind()]
        ref = [t.clone() for t in tri]
        for _ in range(80):
            found = (torch.rand(()) < 0.3).float()
            update_scale.launch(*tri, found, *factors)
            update_scale.update_scale_reference_(*ref, found, *factors)
            assert_same(tri, ref, factors)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        globals()[name]()
