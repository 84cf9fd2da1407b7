"""Unscaling beside finite checks and norms: what becomes one op, and near misses that do not.

Each program runs as it does unfused, bit for bit but for norms, which may be rounded differently.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import ampgraph
import oracle
from ampgraph.backend import records_of
from ampgraph.graph import PASS, WRITES
from ampgraph.offline import rewritten
from scaling_programs import (
    MISSES,
    NORMS,
    PAIRS,
    SINGLE,
    amp_op,
    amp_op_and_norm,
    both,
    by_operators,
    checked_after,
    divided,
    foreach,
    foreach_divided,
    foreach_in_place,
    foreach_norm,
    in_place,
    norm_of_what_is_not_kept,
    python_sum,
    squares,
    vector_norm,
)
from shown import BF16, FP32, see, text
from support import compiled_plainly

FP16 = torch.float16
# What symbolic_trace refuses, or turns into another program.
NO_SYMBOLS = ("loop_in_place", "get_total_norm", "written_by_an_index")
Program = Callable[..., Any]
OPS = ("unscale", "unscale_", "check")
BAD = (float("nan"), float("inf"), float("-inf"))


def tensors(count: int, dtype: torch.dtype = FP32, bad: float | None = None) -> list[Tensor]:
    """Tensors, the last with an element that is not finite, and a scale."""
    made = [torch.randn(3, 2 + i).to(dtype) for i in range(count)]
    if bad is not None:
        made[-1].view(-1)[1] = bad
    return [*made, torch.tensor(0.3)]


def made_ops(gm: fx.GraphModule) -> list[str]:
    """The names of our ops that the graph calls."""
    named = [n.target for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return [t.name().partition("::")[2] for t in named if t.namespace == "ampgraph"]


# A captured program, unfused and fused, and its rewritten graph.
Captured = tuple[Program, Program, fx.GraphModule]


def by_symbols(program: Program, inputs: Sequence[Tensor]) -> Captured:
    gm = oracle.traced(program, *[t.clone() for t in inputs])
    after = oracle.rewritten(gm, grad=False).after
    return gm, after, after


def by_aten(program: Program, inputs: Sequence[Tensor]) -> Captured:
    gm = make_fx(program, pre_dispatch=True, tracing_mode="fake")(*[t.clone() for t in inputs])
    after = rewritten(gm, [t.clone() for t in inputs], dtype=BF16).after
    return gm, after, after


def by_dynamo(program: Program, inputs: Sequence[Tensor]) -> Captured:
    torch._dynamo.reset()
    compiled = compiled_plainly(program)
    compiled(*[t.clone() for t in inputs])
    (record,) = records_of(compiled)
    return program, compiled, record.rewritten.after


WAYS = {"symbolic": by_symbols, "aten": by_aten, "dynamo": by_dynamo}


def cases(*programs: Program) -> list[Any]:
    """Each program with each way of capturing it that knows it."""
    return [
        pytest.param(program, way, id=f"{program.__name__}-{way}")
        for program in programs
        for way in WAYS
        if way != "symbolic" or program.__name__ not in NO_SYMBOLS
    ]


def assert_same(got: object, want: object, norm: bool = False) -> None:
    """Equal to the bit; of a norm, which is the last, to float32's rounding."""
    ours, theirs = pytree.tree_leaves(got), pytree.tree_leaves(want)
    assert len(ours) == len(theirs)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        last = norm and i == len(ours) - 1
        torch.testing.assert_close(a, b, rtol=1e-6 if last else 0, atol=0, equal_nan=True)


def ran(program: Program, inputs: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """The result, and what is left in the inputs."""
    own = [t.clone() for t in inputs]
    with torch.no_grad():
        return program(*own), own


def fused(program: Program, inputs: Sequence[Tensor], way: str, norm: bool = False) -> list[str]:
    """The ops of ours in the rewritten program, once it was seen to do what it did."""
    with torch.no_grad():
        before, after, graph = WAYS[way](program, inputs)
    graph.graph.lint()
    for bad in (None, *BAD):
        own = [t.clone() for t in inputs]
        if bad is not None:
            own[-2].view(-1)[0] = bad
        want, left = ran(before, own)
        got, ours = ran(after, own)
        assert_same(got, want, norm)
        assert_same(ours, left)
    return made_ops(graph)


# --- one op ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, pytest.param(FP16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("program", "way"), cases(*SINGLE))
def test_one_tensor(program: Program, way: str, dtype: torch.dtype) -> None:
    (op,) = fused(program, tensors(1, dtype), way)
    assert op in OPS


@pytest.mark.parametrize("dtype", [FP32, pytest.param(FP16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("program", "way"), cases(*PAIRS))
def test_one_op_for_two_tensors(program: Program, way: str, dtype: torch.dtype) -> None:
    (op,) = fused(program, tensors(2, dtype), way)
    assert op in OPS


@pytest.mark.parametrize(("program", "way"), cases(*NORMS))
def test_the_norm_comes_along(program: Program, way: str) -> None:
    (op,) = fused(program, tensors(2), way, norm=True)
    assert op in OPS
    with torch.no_grad():
        after = WAYS[way](program, tensors(2))[2]
    names = [str(n.target) for n in after.graph.nodes]
    assert not [name for name in names if "norm" in name or "sum" in name or "pow" in name]


@pytest.mark.parametrize(("program", "way"), cases(*MISSES))
def test_near_misses_stay_as_they_are(program: Program, way: str) -> None:
    assert not fused(program, tensors(2), way)


def either_finite(x: Tensor, z: Tensor, s: Tensor) -> Any:
    return x * s, z * s, torch.isfinite(x).all() | torch.isfinite(z).all()


def two_groups(x: Tensor, z: Tensor, s: Tensor) -> Any:
    first, second = torch.isfinite(x).all(), ~torch.isfinite(z).all()
    x.mul_(s)
    return first, z / s, second


def flag_with_another_name(x: Tensor, z: Tensor, s: Tensor) -> Any:
    bad = ~torch.isfinite(x).all()
    seen = bad.view(())
    bad.logical_not_()
    return x * s, seen, bad, z


def written_mask(x: Tensor, z: Tensor, s: Tensor) -> Any:
    mask = torch.isfinite(x)
    mask.view(-1).fill_(True)
    return x * s, mask.all(), z


def written_squares(x: Tensor, z: Tensor, s: Tensor) -> Any:
    y = x * s
    square = y * y
    square.add_(1)
    return y, torch.isfinite(x).all(), z, square.sum().sqrt()


def written_result(x: Tensor, z: Tensor, s: Tensor) -> Any:
    y = x * s
    y.add_(1)
    return y, torch.isfinite(x).all(), z, torch.isfinite(y).all(), y.norm()


def chained(x: Tensor, z: Tensor, s: Tensor) -> Any:
    y = x * s
    v = y * (s + 1)
    return torch.isfinite(x).all(), torch.isfinite(y).all(), v, torch.isfinite(z).all(), z * s


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("program", "count"),
    [
        (either_finite, 2),
        (two_groups, 2),
        (flag_with_another_name, 1),
        (written_mask, 0),
        (written_squares, 1),
        (written_result, 1),
        (chained, 3),
    ],
)
def test_as_many_ops_as_flags(program: Program, count: int, way: str) -> None:
    assert len(fused(program, tensors(2), way)) == count


def vector_norms_and_total(x: Tensor, z: Tensor, s: Tensor) -> Any:
    y, v = x * s, z * s
    ok = torch.isfinite(x).all() & torch.isfinite(z).all()
    norms = torch.stack([y.norm(), v.norm()])
    return ok, norms, norms.norm()


def rows_norm(x: Tensor, z: Tensor, s: Tensor) -> Any:
    y = x * s
    return z, torch.isfinite(x).all(), torch.linalg.vector_norm(y, 2, 0)


def largest(x: Tensor, z: Tensor, s: Tensor) -> Any:
    y = x * s
    return z, torch.isfinite(x).all(), torch.linalg.vector_norm(y, float("inf"))


def matrix_norm(x: Tensor, z: Tensor, s: Tensor) -> Any:
    y = (x * s).nan_to_num(0, 1, 1)
    return z, torch.isfinite(x).all(), y, torch.linalg.norm(y, 2)


@pytest.mark.parametrize("program", [vector_norms_and_total, rows_norm, largest, matrix_norm])
@pytest.mark.parametrize("way", WAYS)
def test_other_norms_stay(program: Program, way: str) -> None:
    """The flag is fused; the norm reads the results."""
    (op,) = fused(program, tensors(2), way)
    assert op == "unscale"


@pytest.mark.parametrize("way", WAYS)
def test_the_norm_of_low_results_stays(way: str) -> None:
    """It is one of rounded values, and of inf where one does not fit."""
    (op,) = fused(squares, tensors(2, BF16), way)
    assert op == "unscale"


# --- gradients, devices, aliases ------------------------------------------------------------------


def ops_of(program: Program, *inputs: Tensor, grad: bool = True) -> list[str]:
    """The ops of ours in the program that symbolic_trace sees."""
    return made_ops(oracle.rewritten(oracle.traced(program, *inputs), grad=grad).after)


def test_not_where_autograd_records() -> None:
    x, s = torch.randn(3, requires_grad=True), torch.tensor(0.5)
    assert not ops_of(by_operators, x, s)
    assert ops_of(by_operators, x, s, grad=False) == ["unscale"]
    assert ops_of(by_operators, x.detach(), s) == ["unscale"]
    assert not ops_of(by_operators, x.detach(), s.clone().requires_grad_())
    assert ops_of(lambda x, s: by_operators(x.detach(), s), x, s) == ["unscale"]
    assert not ops_of(lambda x, s: by_operators(x.sin(), s), x, s)


def test_not_where_a_gradient_was_written_into_the_tensor() -> None:
    def program(x: Tensor, w: Tensor, s: Tensor) -> Any:
        x.add_(w)
        return by_operators(x, s)

    x, s = torch.randn(3), torch.tensor(0.5)
    assert not ops_of(program, x, torch.randn(3, requires_grad=True), s)
    assert ops_of(program, x, torch.randn(3), s) == ["unscale"]


def test_not_what_was_written_without_a_record() -> None:
    def program(x: Tensor, s: Tensor) -> Any:
        with torch.no_grad():
            y = x.mul_(2)
        return by_operators(y, s)

    x, s = torch.randn(3, requires_grad=True), torch.tensor(0.5)
    compiled = compiled_plainly(program)
    y, ok = compiled(x, s)
    assert y.requires_grad
    assert bool(ok)
    assert not made_ops(records_of(compiled)[0].rewritten.after)


def test_gradients_are_those_of_the_program() -> None:
    def program(x: Tensor, s: Tensor) -> Tensor:
        with torch.no_grad():
            ok = torch.isfinite(x * s).all()
        y, fine = by_operators(x, s)
        return torch.where(ok & fine, y, 0).sum()

    x, s = torch.randn(3, requires_grad=True), torch.tensor(0.5)
    compiled_plainly(program)(x, s).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full((3,), 0.5), rtol=0, atol=0)


def test_inside_no_grad() -> None:
    def program(x: Tensor, s: Tensor) -> Any:
        with torch.no_grad():
            return by_operators(x, s)

    x, s = torch.randn(3, requires_grad=True), torch.tensor(0.5)
    compiled = compiled_plainly(program)
    assert_same(compiled(x, s), program(x, s))
    assert made_ops(records_of(compiled)[0].rewritten.after) == ["unscale"]


def test_not_for_inputs_that_share_memory() -> None:
    base, s = torch.randn(4), torch.tensor(0.5)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake, scale = mode.from_tensor(base), mode.from_tensor(s)
        views = fake[:3], fake[1:]
        assert not ops_of(foreach_in_place, *views, scale, grad=False)
        assert ops_of(both, *views, scale, grad=False) == ["unscale"]


def on(device: str, *dtypes: torch.dtype) -> list[Tensor]:
    return [torch.empty(3, 2, dtype=dtype, device=device) for dtype in dtypes]


# Without a GPU, fake tensors cannot be made on one, nor inverted by `~`.
NO_CUDA = (*NO_SYMBOLS, "loop", "foreach_in_place")


@pytest.mark.parametrize("program", [p for p in (*PAIRS, *NORMS) if p.__name__ not in NO_CUDA])
def test_on_cuda(program: Program) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        (op,) = ops_of(program, *on("cuda:0", FP32, FP32), torch.empty((), device="cuda:0"))
    assert op in OPS


def test_on_two_devices() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        s = torch.empty((), device="cuda:0")
        (x, z), there = on("cuda:0", FP32, FP32), torch.empty((), device="cpu")
        assert not ops_of(by_operators, x, there)
        assert ops_of(by_operators, x, s) == ["unscale"]
        assert not ops_of(lambda x, z, s: (z.cpu() * s, torch.isfinite(z).all()), x, z, there)


def test_a_low_tensor_on_cuda_meets_a_rounded_scale() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        s = torch.empty((), device="cuda:0")
        see(
            text(oracle.rewritten(oracle.traced(by_operators, *on("cuda:0", FP16), s)).after),
            """
            s_f16: f16[] = _to_copy(s, dtype=f16)
            s_f16_f32: f32[] = _to_copy(s_f16, dtype=f32)
            unscale: ((f16[3, 2]), f32[], f32[]) = unscale([x], s_f16_f32)
            found_inf: f32[] = getitem(unscale, 1)
            unscaled: (f16[3, 2]) = getitem(unscale, 0)
            unscaled_1: f16[3, 2] = getitem(unscaled, 0)
            finite: bool[] = eq.Scalar(found_inf, 0)
            return [unscaled_1, finite]
            """,
        )
        mixed = on("cuda:0", FP32, FP16)
        assert not ops_of(both, *mixed, s)  # one would need the scale, the other a rounded one
        assert ops_of(amp_op, *mixed, s) == ["unscale_"]  # computes in float32


@pytest.mark.parametrize("program", [by_operators, checked_after, divided, in_place])
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 6)[:, ::2],
        torch.randn(4, 6).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4)[:, :2].transpose(0, 2),
        torch.randn(0, 3),
        torch.randn(1, 1),
    ],
)
def test_results_lie_as_they_did(program: Program, x: Tensor) -> None:
    s = torch.tensor(0.3)
    before, after, graph = by_symbols(program, [x, s])
    assert made_ops(graph)
    mine, theirs = (torch.empty_strided(x.size(), x.stride()).copy_(x) for _ in range(2))
    assert_same(after(mine, s), before(theirs, s))


# --- as text --------------------------------------------------------------------------------------


def seen(program: Program, count: int) -> str:
    return text(by_symbols(program, tensors(count))[2])


def test_before_and_after() -> None:
    see(
        text(by_symbols(vector_norm, tensors(2))[0]),
        """
        mul: f32[3, 2] = mul(x, s)
        mul_1: f32[3, 3] = mul(z, s)
        isfinite: bool[3, 2] = isfinite(x)
        all_1: bool[] = .all(isfinite)
        isfinite_1: bool[3, 3] = isfinite(z)
        all_2: bool[] = .all(isfinite_1)
        and_: bool[] = and_(all_1, all_2)
        linalg_vector_norm: f32[] = linalg_vector_norm(mul)
        linalg_vector_norm_1: f32[] = linalg_vector_norm(mul_1)
        stack: f32[2] = stack([linalg_vector_norm, linalg_vector_norm_1])
        linalg_vector_norm_2: f32[] = linalg_vector_norm(stack)
        return [mul, mul_1, and_, linalg_vector_norm_2]
        """,
    )
    see(
        seen(vector_norm, 2),
        """
        unscale: ((f32[3, 2], f32[3, 3]), f32[], f32[]) = unscale([x, z], s)
        found_inf: f32[] = getitem(unscale, 1)
        unscaled: (f32[3, 2], f32[3, 3]) = getitem(unscale, 0)
        unscaled_1: f32[3, 2] = getitem(unscaled, 0)
        unscaled_2: f32[3, 3] = getitem(unscaled, 1)
        finite: bool[] = eq.Scalar(found_inf, 0)
        sum_of_squares: f32[] = getitem(unscale, 2)
        norm: f32[] = sqrt(sum_of_squares)
        return [unscaled_1, unscaled_2, finite, norm]
        """,
    )


def test_in_place() -> None:
    see(
        seen(foreach_in_place, 2),
        """
        unscale_: (f32[], f32[]) = unscale_([x, z], s)
        found_inf: f32[] = getitem(unscale_, 0)
        not_finite: bool[] = ne.Scalar(found_inf, 0)
        return not_finite
        """,
    )


def test_of_results_and_by_division() -> None:
    see(
        seen(foreach_divided, 2),
        """
        unscale: ((f32[3, 2], f32[3, 3]), f32[], f32[]) = \
unscale([x, z], s, divide=True, check_output=True)
        found_inf: f32[] = getitem(unscale, 1)
        unscaled: (f32[3, 2], f32[3, 3]) = getitem(unscale, 0)
        unscaled_1: f32[3, 2] = getitem(unscaled, 0)
        unscaled_2: f32[3, 3] = getitem(unscaled, 1)
        finite: bool[] = eq.Scalar(found_inf, 0)
        return [unscaled_1, unscaled_2, finite]
        """,
    )


def test_torchs_own_op() -> None:
    see(
        seen(amp_op, 2),
        """
        getattr_1: device = getattr(s, device)
        zeros: f32[1] = zeros(1, device=getattr_1)
        unscale_: (f32[], f32[]) = unscale_([x, z], s)
        found_inf: f32[] = getitem(unscale_, 0)
        not_finite: bool[] = ne.Scalar(found_inf, 0)
        found_inf_1: f32[1] = masked_fill_.Scalar(zeros, not_finite, 1.0)
        return zeros
        """,
    )


def test_what_is_not_kept_is_not_written() -> None:
    see(
        seen(norm_of_what_is_not_kept, 2),
        """
        check: (f32[], f32[]) = check([x, z], s)
        found_inf: f32[] = getitem(check, 0)
        finite: bool[] = eq.Scalar(found_inf, 0)
        sum_of_squares: f32[] = getitem(check, 1)
        norm_2: f32[] = sqrt(sum_of_squares)
        return [finite, norm_2]
        """,
    )


# --- reports and compilation ----------------------------------------------------------------------


def test_nodes_say_who_made_them() -> None:
    graph = by_dynamo(foreach_norm, tensors(2))[2].graph
    made = [n for n in graph.nodes if n.meta.get(PASS) == "fuse_scaling"]
    assert [n.name for n in made][:2] == ["unscale_", "found_inf"]
    assert WRITES in made[0].meta
    assert all("scaling_programs.py" in n.meta["stack_trace"] for n in made)


def test_the_report_tells() -> None:
    with torch.no_grad():
        report = ampgraph.explain(vector_norm, tuple(tensors(2)))
    because = "fused: unscale + finite check + norm of 2 tensors"
    (row,) = [row for row in report.decisions if row.category == "fused"]
    assert (row.op, row.because, row.dtype) == ("ampgraph.unscale", because, FP32)
    assert "scaling_programs.py" in row.source
    assert report.notes == (f"unscale: ampgraph.unscale {because}",)
    assert because in str(report)


def test_strict_leaves_it() -> None:
    compiled = compiled_plainly(vector_norm, strict=True)
    inputs = tensors(2)
    want, got = vector_norm(*inputs), compiled(*inputs)
    assert_same(got, want)
    assert not made_ops(records_of(compiled)[0].rewritten.after)


def same_when_compiled(program: Program, **options: Any) -> None:
    """Compiled, the program returns and leaves the same; ours were in its graph."""
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="ampgraph", options=options)
    for bad in (None, *BAD):
        inputs = tensors(2, bad=bad)
        (want, left), (got, ours) = ran(program, inputs), ran(compiled, inputs)
        assert_same(got, want, norm=True)
        assert_same(ours, left)
    (record,) = records_of(compiled)
    assert made_ops(record.rewritten.after)


@pytest.mark.parametrize("program", [vector_norm, foreach_norm, amp_op_and_norm, python_sum])
def test_through_aot_autograd(program: Program) -> None:
    same_when_compiled(program, inner="aot_eager")


@pytest.mark.parametrize("program", [vector_norm, amp_op_and_norm])
def test_inductor_sees_plain_arithmetic(program: Program) -> None:
    with fresh_cache():
        _, (code,) = run_and_get_code(lambda: same_when_compiled(program))
    assert "ampgraph" not in code
    assert "_amp_foreach" not in code


def test_the_rewritten_graph_holds_when_decided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPGRAPH_VERIFY", "full")
    for program in (vector_norm, foreach_norm, norm_of_what_is_not_kept, amp_op):
        by_symbols(program, tensors(2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [*on("cuda:0", FP16, FP16), torch.empty((), device="cuda:0")]
        assert ops_of(foreach, *inputs) == ["unscale"]


# --- mixtures -------------------------------------------------------------------------------------

PRODUCTS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda t, s: t * s,
    lambda t, s: s * t,
    lambda t, s: t / s,
    lambda t, s: t.mul_(s),
    lambda t, s: t.div_(s),
    lambda t, s: torch._foreach_mul([t], s)[0],
)
CHECKS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: torch.isfinite(t).all(),
    lambda t: ~(t.isnan() | t.isinf()).any(),
    lambda t: torch.logical_not(torch.isnan(t).any()) & ~t.isinf().any(),
    lambda t: t.sum().isfinite(),
    lambda t: torch.isnan(t).any(),
)
TOTALS: tuple[Callable[[list[Tensor]], Tensor], ...] = (
    lambda ts: torch.stack([torch.linalg.vector_norm(t) for t in ts]).norm(),
    lambda ts: sum((t * t).sum() for t in ts).sqrt(),  # type: ignore[union-attr]
    lambda ts: torch.stack([t.abs().max() for t in ts]).max(),
    lambda ts: ts[0].norm(),
)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[Program, torch.dtype]:
    """A program over three tensors, in random spellings and a random order."""
    products = draw(st.lists(st.sampled_from(PRODUCTS), min_size=1, max_size=1)) * 3
    if draw(st.booleans()):
        products = draw(st.lists(st.sampled_from(PRODUCTS), min_size=3, max_size=3))
    checks = draw(st.lists(st.sampled_from(CHECKS[:3]), min_size=3, max_size=3))
    if draw(st.booleans()):
        checks[1] = draw(st.sampled_from(CHECKS))
    steps = draw(st.permutations([(kind, i) for kind in ("check", "scale") for i in range(3)]))
    if draw(st.booleans()):
        steps = [*steps, ("check", 1)] if draw(st.booleans()) else [("scale", 1), *steps]
    total = draw(st.sampled_from(TOTALS))
    after = draw(st.booleans())

    def program(x: Tensor, y: Tensor, z: Tensor, s: Tensor) -> Any:
        tensors, made, ok = [x, y, z], [x, y, z], None
        for kind, i in steps:
            if kind == "scale":
                made[i] = products[i](tensors[i], s)
            else:
                flag = checks[i](made[i] if after else tensors[i])
                ok = flag if ok is None else ok & flag
        return made, ok, total(made)

    return program, draw(st.sampled_from([FP32, FP32, BF16, FP16]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(mixtures(), st.sampled_from([None, *BAD]))
def test_any_mixture_keeps_its_values(
    mixture: tuple[Program, torch.dtype], bad: float | None
) -> None:
    program, dtype = mixture
    torch.manual_seed(0)
    inputs = tensors(3, dtype, bad)
    before, after, _ = by_symbols(program, inputs)
    (want, left), (got, ours) = ran(before, inputs), ran(after, inputs)
    assert_same(got, want, norm=True)
    assert_same(ours, left)
