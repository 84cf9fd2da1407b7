"""Constants that do not fit a low dtype: finite in float32, never silently infinite here.

Each program is finite in float32. Under eager autocast it raises, or makes an infinity.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ampgraph
import oracle
from ampgraph.backend import records_of
from ampgraph.internals.ops import op_names, schema_of
from ampgraph.oplists.scalars import CARRIERS, VALUE_SCALARS
from support import ambient

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BIG = 1e9  # beyond float16
LOWEST = torch.finfo(FP32).min  # beyond bfloat16 too, which rounds it to infinity

# One call of each listed op on a matrix `h` that autocast made low, with a mask `m` and indices.
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "masked_fill": lambda h, m, i: h.masked_fill(m, -BIG),
    "masked_fill_": lambda h, m, i: h.masked_fill_(m, -BIG),
    "fill": lambda h, m, i: torch.fill(h, BIG),
    "fill_": lambda h, m, i: h.fill_(BIG),
    "index_fill": lambda h, m, i: h.index_fill(0, i, BIG),
    "index_fill_": lambda h, m, i: h.index_fill_(0, i, BIG),
    "scatter": lambda h, m, i: h.scatter(0, i[None], BIG),
    "scatter_": lambda h, m, i: h.scatter_(0, i[None], BIG),
    "constant_pad_nd": lambda h, m, i: torch.constant_pad_nd(h, (1, 1), BIG),
    "pad": lambda h, m, i: F.pad(h, (1, 1), value=BIG),
    "threshold": lambda h, m, i: F.threshold(h, 0.0, BIG),
    "threshold_": lambda h, m, i: torch.threshold_(h, 0.0, BIG),
    "full_like": lambda h, m, i: torch.full_like(h, BIG),
    "new_full": lambda h, m, i: h.new_full((2, 2), BIG),
    "fill_diagonal_": lambda h, m, i: h.fill_diagonal_(-BIG),
    "where": lambda h, m, i: torch.where(m, h, -BIG),
    "add": lambda h, m, i: h + BIG,
    "add_": lambda h, m, i: h.add_(BIG),
    "sub": lambda h, m, i: h - BIG,
    "sub_": lambda h, m, i: h.sub_(BIG),
    "rsub": lambda h, m, i: BIG - h,
    "mul": lambda h, m, i: h * -BIG,
    "clamp": lambda h, m, i: h.clamp(-BIG, BIG),
    "clamp_": lambda h, m, i: h.clamp_(-BIG, BIG),
    "clamp_min": lambda h, m, i: h.clamp_min(-BIG),
    "clamp_min_": lambda h, m, i: h.clamp_min_(-BIG),
    "clamp_max": lambda h, m, i: h.clamp_max(BIG),
    "clamp_max_": lambda h, m, i: h.clamp_max_(BIG),
    "hardtanh": lambda h, m, i: F.hardtanh(h, -BIG, BIG),
    "hardtanh_": lambda h, m, i: F.hardtanh_(h, -BIG, BIG),
    "nan_to_num": lambda h, m, i: (h / 0.0).nan_to_num(BIG, BIG, -BIG),
    "nan_to_num_": lambda h, m, i: (h / 0.0).nan_to_num_(BIG, BIG, -BIG),
}
X = torch.tensor([[0.25, -0.5], [0.75, 0.125]])
MASK = torch.tensor([[True, False], [False, True]])
INDEX = torch.tensor([0, 1])


def after_linear(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A program that makes a low tensor and hands it to one listed op."""
    return lambda x, m, i: CALLS[name](torch.matmul(x, x), m, i)


def eagerly(program: Callable[[Tensor, Tensor, Tensor], Tensor]) -> str:
    """What eager autocast makes of a program in float16."""
    with torch.autocast("cpu", dtype=FP16):
        try:
            out = program(X, MASK, INDEX)
        except RuntimeError as error:
            return "raises" if "without overflow" in str(error) else str(error)
    return "finite" if out.isfinite().all() else "infinite"


def test_every_listed_op_has_a_call() -> None:
    assert {f"aten::{name}" for name in CALLS} == VALUE_SCALARS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_a_large_scalar_stays_finite(name: str) -> None:
    program = after_linear(name)
    assert eagerly(program) in ("raises", "infinite"), "eager is finite: the op needs no row"
    done = oracle.rewritten(oracle.traced(program, X, MASK, INDEX), FP16)
    got: Tensor = oracle.without_autocast(done.after)([X, MASK, INDEX])
    assert got.isfinite().all(), got
    written = name.endswith("_")
    assert got.dtype == (FP16 if written else FP32), "written in place, or computed in float32"
    assert any("does not fit torch.float16" in note for note in done.notes)
    wide = program(X, MASK, INDEX)
    torch.testing.assert_close(
        got.float(), wide.clamp(-65504, 65504) if written else wide, rtol=1e-2, atol=1e-2
    )


def test_names_in_the_list_are_scalars_of_the_schemas() -> None:
    for name, arguments in VALUE_SCALARS.items():
        packet: Any = getattr(torch.ops.aten, name.removeprefix("aten::"))
        found = {
            argument.name
            for overload in packet.overloads()
            for argument in schema_of(getattr(packet, overload)).arguments
            if str(argument.type) in ("number", "Optional[number]", "Optional[float]")
        }
        assert arguments <= found, f"{name}: {arguments - found} are no scalars of any overload"


def test_carriers_are_ops() -> None:
    packets = {name.partition(".")[0] for name in op_names()}
    assert sorted(CARRIERS - packets) == []


# Whole programs, as Dynamo captures them: where a mask is made, and where it is used.


def h_of(x: Tensor) -> Tensor:
    return torch.matmul(x, x)


def filled_items(x: Tensor, m: Tensor) -> Tensor:
    h = h_of(x)
    h[m] = -BIG
    return h


def filled_row(x: Tensor, m: Tensor) -> Tensor:
    h = h_of(x)
    h[0] = -BIG
    return h


def filled_slice(x: Tensor, m: Tensor) -> Tensor:
    h = h_of(x)
    h[:, 1] = -BIG
    return h


def added_in_place(x: Tensor, m: Tensor) -> Tensor:
    h = h_of(x)
    h += -BIG
    return h


def like_it(x: Tensor, m: Tensor) -> Tensor:
    h = h_of(x)
    return torch.where(m, h, h.new_tensor(-BIG))


def tensor_of_its_dtype(x: Tensor, m: Tensor) -> Tensor:
    h = h_of(x)
    return torch.where(m, h, torch.tensor(-BIG, dtype=h.dtype))


def full_of_its_dtype(x: Tensor, m: Tensor) -> Tensor:
    h = h_of(x)
    return torch.where(m, h, torch.full((2, 2), -BIG, dtype=h.dtype))


def zero_dimensional(x: Tensor, m: Tensor) -> Tensor:
    return torch.where(m, h_of(x), torch.tensor(-BIG))


def mask_times(x: Tensor, m: Tensor) -> Tensor:
    h = h_of(x)
    return h + (1.0 - m.to(h.dtype)) * -BIG


def mask_cast_by_hand(x: Tensor, m: Tensor) -> Tensor:
    h = h_of(x)
    return h + torch.zeros(2, 2).masked_fill(m, -BIG).to(h.dtype)


def mask_copied_in(x: Tensor, m: Tensor) -> Tensor:
    return h_of(x).copy_(torch.zeros(2, 2).masked_fill(m, -BIG))


def mask_multiplied(x: Tensor, m: Tensor) -> Tensor:
    return torch.baddbmm(torch.full((1, 2, 2), -BIG).triu(1), h_of(x)[None], x[None])


def lowest_of_float32(x: Tensor, m: Tensor) -> Tensor:
    return h_of(x).masked_fill(m, LOWEST)


def lowest_where(x: Tensor, m: Tensor) -> Tensor:
    return torch.where(m, h_of(x), LOWEST)


def attention(x: Tensor, m: Tensor) -> Tensor:
    """The second row is masked whole: with infinities its softmax is NaN."""
    mask = torch.full((2, 2), LOWEST).masked_fill(m, 0.0)
    mask = mask.masked_fill(torch.tensor([[False], [True]]), LOWEST)
    q = h_of(x)[None, None]
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


PROGRAMS = (
    [(f, FP16) for f in (filled_items, filled_row, filled_slice, added_in_place, like_it)]
    + [(f, FP16) for f in (tensor_of_its_dtype, full_of_its_dtype, zero_dimensional, mask_times)]
    + [(f, FP16) for f in (mask_cast_by_hand, mask_copied_in, mask_multiplied)]
    + [(f, d) for f in (lowest_of_float32, lowest_where, attention) for d in (BF16, FP16)]
)


@pytest.mark.parametrize(("program", "dtype"), PROGRAMS)
def test_programs_stay_finite(program: Callable[..., Tensor], dtype: torch.dtype) -> None:
    seen: list[list[str]] = []

    def inner(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            seen.append(ambient())
            return gm(*args)

        return run

    compiled = ampgraph.compile(program, dtype=dtype, inner=inner)
    got = compiled(X, MASK)
    wide = program(X, MASK)
    assert got.isfinite().all(), got
    assert seen == [[]], "the rewritten graph ran once, with autocast off"
    limit = torch.finfo(got.dtype).max
    torch.testing.assert_close(got.float(), wide.clamp(-limit, limit), rtol=5e-2, atol=5e-2)
    notes = [note for record in records_of(compiled) for note in record.rewritten.notes]
    assert any("does not fit" in note or "kept finite" in note for note in notes)


def test_what_fits_is_left_alone() -> None:
    def program(x: Tensor, m: Tensor) -> Tensor:
        h = h_of(x)
        lowest = torch.finfo(h.dtype).min
        return F.softmax(h.masked_fill(m, lowest) + torch.full((2, 2), -1e4), dim=-1)

    compiled = ampgraph.compile(program, dtype=FP16, inner="eager")
    with torch.autocast("cpu", dtype=FP16):
        torch.testing.assert_close(compiled(X, MASK), program(X, MASK), rtol=0, atol=0)
    assert [note for record in records_of(compiled) for note in record.rewritten.notes] == []


def test_infinity_stays_infinity() -> None:
    def program(x: Tensor, m: Tensor) -> Tensor:
        return h_of(x).masked_fill(m, float("-inf"))

    got = ampgraph.compile(program, dtype=FP16, inner="eager")(X, MASK)
    assert got.dtype == FP16
    assert got[MASK].isneginf().all()


def test_sizes_are_not_constants() -> None:
    def program(x: Tensor, m: Tensor) -> Tensor:
        return h_of(x).new_full((70_000,), 70_000.0)[:1] + torch.full((70_000,), 1.0)[:1]

    got = ampgraph.compile(program, dtype=FP16, inner="eager")(X, MASK)
    torch.testing.assert_close(got, torch.tensor([70_001.0]))


def test_float16_inputs_of_the_program_behave_as_in_torch() -> None:
    def program(x: Tensor, m: Tensor) -> Tensor:
        return x * BIG

    half = X.half()
    got = ampgraph.compile(program, dtype=FP16, inner="eager")(half, MASK)
    torch.testing.assert_close(got, half * BIG, rtol=0, atol=0, equal_nan=True)
