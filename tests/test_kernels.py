"""The kernels against their twins, the twins against plain torch, and all under the compilers."""

import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch._library.triton import get_triton_kernels_for_op

from ampgraph.errors import AmpgraphError
from ampgraph.fakecuda.binaries import Binary
from ampgraph.internals.ops import make_fx
from ampgraph.internals.tensors import FakeTensorMode
from ampgraph.kernels import tables, unscale
from ampgraph.kernels.cast import cast_rows_kernel
from ampgraph.kernels.unscale_kernels import totals_kernel, unscale_kernel, unscale_rows_kernel
from ampgraph.kernels.update_scale import update_scale_kernel
from offline_gpu import TARGETS, compiled
from support import BF16, FP16, FP32

ops = torch.ops.ampgraph
INF = float("inf")

# Inductor's C++ says so of graphs that hold both low dtypes, as a list of gradients may.
pytestmark = pytest.mark.filterwarnings("ignore:bf16 and fp16 are mixed:UserWarning")


@pytest.mark.parametrize(
    "names",
    [
        ["new_tensors"],
        ["in_place_and_read_only", "nothing", "many_chunks"],
        ["a_launch_each", "casts", "scale_updates"],
    ],
    ids=" ".join,
)
def test_kernels_equal_their_twins(names: list[str]) -> None:
    program = [sys.executable, Path(__file__).with_name("kernel_program.py"), *names]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


# --- what is compiled for GPUs


ROWS = {"table": "*i64", "scale": "*fp32", "partials": "*fp32"}
ONE = {"scale": "*fp32", "partials": "*fp32", "elements": "i32"}
ALIGNED = ("table", "source", "target", "scale", "partials")


def flags(divide: bool, check_output: bool, write: bool) -> dict[str, Any]:
    return {"DIVIDE": divide, "CHECK_OUTPUT": check_output, "WRITE": write}


CHUNKS = {"CHUNK": 16384, "BLOCK": 2048}
BUILDS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "unscale": (unscale_rows_kernel, ROWS, {**flags(False, False, True), "TARGET": None}),
    "divide": (unscale_rows_kernel, ROWS, {**flags(True, True, True), "TARGET": None}),
    "to fp32": (unscale_rows_kernel, ROWS, {**flags(True, False, True), "TARGET": tl.float32}),
    "to bf16": (unscale_rows_kernel, ROWS, {**flags(False, True, True), "TARGET": tl.bfloat16}),
    "check": (unscale_rows_kernel, ROWS, {**flags(False, False, False), "TARGET": None}),
    "one tensor": (
        unscale_kernel,
        {"source": "*bf16", "target": "*bf16", **ONE},
        {**flags(False, False, True), **CHUNKS},
    ),
    "one in place": (
        unscale_kernel,
        {"source": "*fp32", **ONE},
        {**flags(True, True, True), **CHUNKS, "target": None},
    ),
    "cast to bf16": (cast_rows_kernel, ROWS, {"TARGET": tl.bfloat16}),
    "cast to fp32": (cast_rows_kernel, ROWS, {"TARGET": tl.float32}),
}


def build(name: str, target: str) -> Binary:
    kernel, types, constants = BUILDS[name]
    aligned = tuple(n for n in kernel.arg_names if n in ALIGNED and n not in constants)
    return compiled(kernel, target, types, constants, aligned)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", BUILDS)
def test_threads_move_16_bytes_and_nothing_spills(name: str, target: str) -> None:
    done = build(name, target)
    assert done.spilled == 0
    # At least 20 warps on a multiprocessor of 65,536 registers; AMD's have twice as many.
    assert done.registers <= 96
    nvidia = target.startswith("sm")
    wide = r"\.global\.(v4\.b32|v2\.b64|b128)" if nvidia else r"_dwordx4"
    assert re.search(f"(ld|load){wide}", done.assembly)
    assert name == "check" or re.search(f"(st|store){wide}", done.assembly)
    # Only the last sums go through shared memory, one number a warp.
    assert not re.search(r"st\.shared\.v|ds_write_b(64|128)", done.assembly)


@pytest.mark.parametrize("target", TARGETS)
def test_the_tiny_kernels_compile(target: str) -> None:
    totals = {"partials": "*fp32", "found_inf": "*fp32", "squares": "*fp32", "programs": "i32"}
    assert compiled(totals_kernel, target, totals, {"BLOCK": 1024}).spilled == 0
    types = {"scale": "*fp32", "growth_tracker": "*i32", "hysteresis_tracker": "*i32"}
    types |= {"found_inf": "*fp32", "growth_interval": "i32", "hysteresis": "i32"}
    types |= {"min_scale": "fp32", "max_scale": "fp32"}
    done = compiled(update_scale_kernel, target, types, {"GROWTH": 1.1, "BACKOFF": 0.3})
    assert done.spilled == 0
    # The growth factor as a double, not as the float32 nearest to it.
    assert not target.startswith("sm") or "0d3FF199999999999A" in done.assembly


# --- the twins, which the ops run on the CPU


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
VALUES = st.one_of(FINITE, st.sampled_from([0.0, -0.0, 1e-40, 65504.0, 70000.0]))
ODD = st.one_of(VALUES, st.sampled_from([INF, -INF, math.nan]))


@st.composite
def gradients(draw: Callable[[Any], Any], values: st.SearchStrategy[float] = ODD) -> list[Tensor]:
    lists = draw(st.lists(st.lists(values, max_size=5), max_size=4))
    return [torch.tensor(x, dtype=draw(st.sampled_from([FP32, BF16, FP16]))) for x in lists]


@settings(deadline=None, max_examples=100)
@given(grads=gradients(), scale=FINITE, dtype=st.sampled_from([None, FP32, BF16, FP16]))
def test_unscale_is_a_rounded_product(
    grads: list[Tensor], scale: float, dtype: torch.dtype | None
) -> None:
    factor = torch.tensor(scale)
    # Products of two float32 are exact in float64.
    products = [(g.double() * factor.double()).to(FP32) for g in grads]
    results, found_inf, squares = ops.unscale(grads, factor, dtype=dtype)
    for g, y, result in zip(grads, products, results, strict=True):
        assert_bits(result, y.to(dtype or g.dtype))
    assert found_inf == float(not all(g.isfinite().all() for g in grads))
    checked = ops.unscale(grads, factor, check_output=True, dtype=dtype)[1]
    assert checked == float(not all(r.isfinite().all() for r in results))
    exact = sum((y.double().square().sum() for y in products), torch.tensor(0.0).double())
    if exact < 3e38 or not exact.isfinite():
        torch.testing.assert_close(squares.double(), exact, rtol=1e-5, atol=1e-37, equal_nan=True)
    assert_bits(torch.stack(ops.check(grads, factor)), torch.stack([found_inf, squares]))


@settings(deadline=None, max_examples=60)
@given(grads=gradients(VALUES), scale=FINITE.filter(lambda x: abs(x) > 1e-30))
def test_dividing_in_place(grads: list[Tensor], scale: float) -> None:
    factor = torch.tensor(scale)
    ref, *totals = ops.unscale(grads, factor, divide=True)
    for g, result in zip(grads, ref, strict=True):
        assert_bits(result, (g.to(FP32) / factor).to(g.dtype))
    found = ops.unscale_(grads, factor, divide=True)
    assert_bits(torch.stack(found), torch.stack(totals))
    for g, result in zip(grads, ref, strict=True):
        assert_bits(g, result)


@pytest.mark.parametrize("odd", [[], [INF], [math.nan]])
@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_unscale_does_what_torch_does(dtype: torch.dtype, odd: list[float]) -> None:
    ours = [torch.randn(7).to(dtype), torch.tensor([1.0, *odd]).to(dtype)]
    theirs = [g.clone() for g in ours]
    found, scale = torch.zeros(1), torch.tensor([1 / 3])
    torch._amp_foreach_non_finite_check_and_unscale_(theirs, found, scale)
    assert ops.unscale_(ours, scale)[0] == found
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_wide_and_complex_gradients_keep_their_precision() -> None:
    grads = [torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.complex64)]
    results, found_inf, squares = ops.unscale(grads, torch.tensor(0.1))
    assert [r.dtype for r in results] == [g.dtype for g in grads]
    factor = torch.tensor(0.1).double()
    torch.testing.assert_close(results[0], grads[0] * factor, rtol=1e-15, atol=0)
    assert found_inf == 0
    torch.testing.assert_close(squares, sum(r.abs().square().sum() for r in results).float())


def test_casts() -> None:
    sources = [torch.randn(9), torch.randn(3, 4)[:, ::2], torch.tensor([INF, 70000.0])]
    for dtype in (BF16, FP16, FP32):
        results = ops.cast(sources, dtype)
        assert all(r.dtype == dtype for r in results)
        torch.testing.assert_close(results, [s.to(dtype) for s in sources], rtol=0, atol=0)
        assert not {r.data_ptr() for r in results} & {s.data_ptr() for s in sources}
        to = [torch.zeros_like(r) for r in results]
        ops.cast_(to, sources)
        torch.testing.assert_close(to, results, rtol=0, atol=0)


def assert_bits(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


# --- the scale


def start(scale: float, hysteresis: int = 1) -> list[Tensor]:
    return [torch.tensor(scale), *torch.tensor([0, hysteresis], dtype=torch.int32).unbind()]


@settings(deadline=None, max_examples=50)
@given(
    stream=st.lists(st.booleans(), max_size=60),
    scale=st.floats(2.0**-100, 2.0**126, width=32),
    growth=st.sampled_from([2.0, 1.1, 1.0001, 7.3]),
    backoff=st.sampled_from([0.5, 0.3, 0.999]),
    interval=st.integers(1, 4),
)
def test_the_scale_moves_as_torchs(
    stream: list[bool], scale: float, growth: float, backoff: float, interval: int
) -> None:
    ours, (theirs, tracker, _) = start(scale), start(scale)
    for bad in stream:
        found = torch.tensor(float(bad))
        ops.update_scale_(*ours, found, growth, backoff, interval, 1, 0.0, INF)
        torch._amp_update_scale_(theirs, tracker, found, growth, backoff, interval)
        assert_bits(ours[0], theirs)
        assert_bits(ours[1], tracker)


def test_hysteresis_bears_bad_steps_until_it_is_used_up() -> None:
    state, seen = start(64.0, 2), []
    for bad in (1, 1, 1, 0, 1, 0, 1, 1):
        ops.update_scale_(*state, torch.tensor(float(bad)), 2.0, 0.5, 100, 2, 0.0, INF)
        seen.append((state[0].item(), state[1].item()))
    assert seen == [(64, 0), (32, 0), (16, 0), (16, 1), (16, 0), (16, 1), (16, 0), (8, 0)]


def test_bounds_hold_and_a_nan_is_a_bad_step() -> None:
    state = start(4.0)
    for found, want in ((1.0, 2), (math.nan, 1.5), (1.0, 1.5), (0.0, 3), (0.0, 6), (0.0, 6)):
        ops.update_scale_(*state, torch.tensor(found), 2.0, 0.5, 1, 1, 1.5, 7.0)
        assert state[0] == want
    state = start(3e38)
    ops.update_scale_(*state, torch.tensor(0.0), 2.0, 0.5, 1, 1, 0.0, INF)
    assert_bits(state[0], torch.tensor(3e38))


# --- under torch's compilers


def some() -> list[Tensor]:
    low = torch.randn(2, 3, 4, 4).to(BF16).to(memory_format=torch.channels_last)
    return [
        torch.randn(6, 5),
        low,
        torch.randn(9).half()[1:],
        torch.randn(0),
        torch.randn(4, 6).t(),
    ]


def run_unscale(grads: list[Tensor], scale: Tensor) -> object:
    return ops.unscale(grads, scale, True, True, FP32), ops.check(grads[:2], scale)


def run_unscale_in_place(grads: list[Tensor], scale: Tensor) -> object:
    return ops.unscale_(grads, scale), [g + 1 for g in grads]


def run_cast(grads: list[Tensor], scale: Tensor) -> object:
    low = ops.cast(grads, BF16)
    ops.cast_(grads, low)
    return low


def run_update(grads: list[Tensor], scale: Tensor) -> object:
    _, growth, hysteresis = start(1.0)
    ops.update_scale_(scale, growth, hysteresis, grads[0].max(), 2.0, 0.5, 1, 1, 0.0, INF)
    return growth, hysteresis


PROGRAMS = [run_unscale, run_unscale_in_place, run_cast, run_update]


@pytest.mark.parametrize(
    ("program", "dynamic"), [*((p, False) for p in PROGRAMS), (run_unscale_in_place, True)]
)
def test_compiled_for_the_cpu_no_call_is_left(program: Callable[..., Any], dynamic: bool) -> None:
    ours, scale = some(), torch.tensor(0.3)
    theirs, other = [g.clone() for g in ours], scale.clone()
    wanted = program(theirs, other)
    run = torch.compile(program, fullgraph=True, dynamic=dynamic)
    # Else Inductor would not round what it goes on computing with.
    with torch._inductor.config.patch(emulate_precision_casts=True):
        got, code = run_and_get_code(run, ours, scale)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close([ours, scale], [theirs, other], rtol=0, atol=0)
    assert "ampgraph" not in "".join(code)


def test_compiled_an_overflow_of_the_result_is_found() -> None:
    run = torch.compile(lambda g, s: ops.unscale(g, s, False, True, FP16), fullgraph=True)
    for value, found in ((65519.0, 0.0), (65520.0, 1.0), (math.nan, 1.0)):
        results, found_inf, _ = run([torch.tensor([1.0, value])], torch.tensor(1.0))
        assert results[0].isfinite().all() == (found == 0)
        assert found_inf == found


@pytest.mark.parametrize("program", PROGRAMS)
def test_make_fx(program: Callable[..., Any]) -> None:
    ours, scale = some(), torch.tensor(0.3)
    theirs, other = [g.clone() for g in ours], scale.clone()
    gm = make_fx(program, tracing_mode="fake")(ours, scale)
    torch.testing.assert_close(gm(ours, scale), program(theirs, other), rtol=0, atol=0)
    torch.testing.assert_close([ours, scale], [theirs, other], rtol=0, atol=0)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_fake_tensors(device: str) -> None:
    real = some()
    with FakeTensorMode():
        grads = [
            torch.empty_strided(g.shape, g.stride(), dtype=g.dtype, device=device) for g in real
        ]
        scale = torch.empty((), device=device)
        results, *totals = ops.unscale(grads, scale, dtype=FP16)
        totals += [*ops.unscale_(grads, scale), *ops.check(grads, scale)]
        results += ops.cast(grads, FP16)
        if device == "cpu":  # a build for CPUs cannot copy between dtypes on a fake GPU
            ops.cast_(grads, results[: len(grads)])
        ops.update_scale_(scale, *(scale.int(), scale.int()), totals[0], 2.0, 0.5, 1, 1, 0.0, INF)
    for result, grad in zip(results, grads + grads, strict=True):
        assert (result.dtype, result.shape, result.device) == (FP16, grad.shape, grad.device)
        assert result.stride() == grad.stride()
    assert {(t.dtype, t.shape, str(t.device)) for t in totals} == {(FP32, (), device)}


def test_a_tracer_sees_a_launch_for_each_gradient() -> None:
    op: Any = unscale.unscale_
    with FakeTensorMode():
        grads = [torch.empty(5, device="cuda:0"), torch.empty(8, 3, device="cuda:0").t()]
        gm = make_fx(lambda g, s: op._abstract_fn(g, s))(grads, torch.empty((), device="cuda:0"))
    launch = torch.ops.higher_order.triton_kernel_wrapper_mutation
    assert sum(node.target is launch for node in gm.graph.nodes) == 2
    targets = {node.target for node in gm.graph.nodes}
    assert not targets & {torch.ops.aten.copy_.default, torch.ops.aten.clone.default}


@pytest.mark.parametrize("name", ["unscale", "unscale_", "check", "update_scale_"])
def test_caches_know_the_kernels_behind_an_op(name: str) -> None:
    assert get_triton_kernels_for_op(f"ampgraph::{name}")


def test_opcheck() -> None:
    grads, scale = some(), torch.tensor(0.3)
    calls: list[tuple[Any, Sequence[Any]]] = [
        (ops.unscale, (grads, scale, True, True, FP32)),
        (ops.unscale_, (grads, scale)),
        (ops.check, (grads, scale)),
        (ops.cast, (grads, BF16)),
        (ops.cast_, ([g.to(BF16) for g in grads], grads)),
        (ops.update_scale_, (*start(1.0), torch.tensor(0.0), 2.0, 0.5, 1, 1, 0.0, 9.0)),
    ]
    for op, args in calls:
        torch.library.opcheck(op.default, tuple(args))


# --- tables


def test_a_table_covers_every_element_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PROGRAMS", 4)
    sources = [torch.randn(n) for n in (0, 5, 40_000)]
    targets = [torch.empty_like(s, dtype=BF16) for s in sources]
    rows = tables.rows(sources, targets).tolist()
    chunk = 4 * tables.BLOCK  # 40,005 elements for four programs
    counts = [5, *[chunk] * 4, 40_000 - 4 * chunk]
    assert [row[2] for row in rows] == counts
    firsts = [0, *range(0, 40_000, chunk)]
    for row, i, first in zip(rows, [1, 2, 2, 2, 2, 2], firsts, strict=True):
        assert row[0] == sources[i].data_ptr() + 4 * first
        assert row[1] == targets[i].data_ptr() + 2 * first
        assert row[3] == (row[0] % 16 == 0 and row[1] % 16 == 0)
    assert tables.rows(sources, targets) is tables.rows(sources, targets)


def test_dense_tensors_are_not_copied() -> None:
    x = torch.randn(2, 3, 4, 5)
    for view in (x, x.permute(3, 0, 2, 1), x[:, :1], x.to(memory_format=torch.channels_last)):
        assert (tables.dense(view) is view) == (view.numel() == 120)
    assert tables.dense(torch.randn(1).expand(4)).stride() == (1,)


def test_tensors_of_two_devices_are_refused() -> None:
    with FakeTensorMode():
        grads, scale = [torch.empty(3, device="cuda:0")], torch.empty(())
    with pytest.raises(AmpgraphError, match="on cpu, cuda:0 in one call"):
        tables.on_gpu(grads, [scale])
