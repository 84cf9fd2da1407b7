"""Branches and loops: what they demand of their bodies' dtypes is kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import ampgraph
from support import (
    BF16,
    FP32,
    assert_casts_inside,
    assert_like_eager,
    assert_same,
    autocast,
    compiled_plainly,
    gradients,
)

# --- cond ---


def low_or_high(x: Tensor, w: Tensor) -> Tensor:
    def low(x: Tensor) -> Tensor:
        return x @ w

    def high(x: Tensor) -> Tensor:
        return x * 2.0

    return torch.cond(x.sum() > 0, low, high, (x,))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_cond_captured_plainly_gets_one_dtype(sign: float) -> None:
    x, w = torch.full((4, 4), sign), torch.randn(4, 4)
    compiled = compiled_plainly(low_or_high)
    out = compiled(x, w)
    with autocast():
        want = x @ w if sign > 0 else x * 2.0
    assert_same(out, want.float(), "the widest of bf16 and fp32")
    assert_casts_inside(compiled)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_cond_captured_under_autocast(sign: float) -> None:
    """Autocast refuses branches of two dtypes; here they are given one, with a word."""
    x, w = torch.full((4, 4), sign), torch.randn(4, 4)
    compiled = ampgraph.compile(low_or_high, inner="eager")
    with pytest.warns(ampgraph.errors.AmpgraphWarning, match="mends"):
        out = compiled(x, w)
    assert out.dtype == FP32, "the widest of bf16 and fp32"


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_cond_with_gradients(sign: float, inner: str) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def program(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: first(x).relu(), lambda x: second(x), (x,))

    x = torch.full((4, 4), sign, requires_grad=True)
    compiled = assert_like_eager(program, (x,), inner=inner)
    assert_casts_inside(compiled)


# --- loops ---


@pytest.mark.parametrize("door", [compiled_plainly, ampgraph.compile])
def test_while_loop_keeps_what_it_carries(door: Callable[..., Any]) -> None:
    w = torch.randn(4, 4)

    def program(x: Tensor) -> tuple[Tensor, ...]:
        def more(i: Tensor, x: Tensor) -> Tensor:
            return i < 3

        def step(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, (x @ w).float().tanh()

        return while_loop(more, step, (torch.zeros((), dtype=torch.int64), x))

    x = torch.randn(4, 4)
    compiled = door(program, inner="eager", dtype=BF16)
    want = x
    with autocast():
        for _ in range(3):
            want = (want @ w).float().tanh()
    assert_same(compiled(x)[1], want)
    assert_casts_inside(compiled)


def test_while_loop_of_a_low_carry() -> None:
    """Captured plainly the carry is fp32: the product is computed low and cast back."""
    w = torch.randn(4, 4)

    def program(x: Tensor) -> tuple[Tensor, ...]:
        return while_loop(
            lambda i, x: i < 3, lambda i, x: (i + 1, x @ w), (torch.zeros((), dtype=torch.int64), x)
        )

    x = torch.randn(4, 4)
    compiled = compiled_plainly(program)
    want = x
    with autocast():
        for _ in range(3):
            want = (want @ w).float()
    assert_same(compiled(x)[1], want)


@pytest.mark.parametrize("door", [compiled_plainly, ampgraph.compile])
def test_scan(door: Callable[..., Any]) -> None:
    w = torch.randn(4, 4)

    def program(start: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x @ w
            return carry + y.float(), y * 2

        return scan(step, start, xs)

    start, xs = torch.randn(4, 4), torch.randn(3, 4, 4)
    compiled = door(program, inner="eager", dtype=BF16)
    carry, rows = start, []
    with autocast():
        for x in xs:
            y = x @ w
            carry = carry + y.float()
            rows.append(y * 2)
    assert_same(compiled(start, xs), (carry, torch.stack(rows)))
    assert_casts_inside(compiled)


def test_scan_with_gradients() -> None:
    w = torch.randn(4, 4, requires_grad=True)

    def program(start: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            y = (x @ w).float()
            return carry + y, y * 2

        return scan(step, start, xs)

    start, xs = torch.randn(4, 4), torch.randn(3, 4, 4, requires_grad=True)
    compiled = ampgraph.compile(program, inner="aot_eager")

    def by_hand() -> tuple[Tensor, Tensor]:
        carry, rows = start, []
        with autocast():
            for x in xs:
                y = (x @ w).float()
                carry = carry + y
                rows.append(y * 2)
        return carry, torch.stack(rows)

    want, want_grads = gradients(by_hand, [xs])
    got, got_grads = gradients(lambda: compiled(start, xs), [xs])
    assert_same(got, want)
    assert_same(got_grads, want_grads, "gradients")


@pytest.mark.parametrize("door", [compiled_plainly, ampgraph.compile])
def test_associative_scan(door: Callable[..., Any]) -> None:
    def program(xs: Tensor) -> Tensor:
        return associative_scan(lambda a, b: (a @ b).float(), xs, 0, combine_mode="generic")

    xs = torch.randn(3, 4, 4)
    compiled = door(program, inner="eager", dtype=BF16)
    with autocast():
        second = (xs[0] @ xs[1]).float()
        want = torch.stack([xs[0], second, (second @ xs[2]).float()])
    assert_same(compiled(xs), want)


@pytest.mark.parametrize("door", [compiled_plainly, ampgraph.compile])
def test_map(door: Callable[..., Any]) -> None:
    w = torch.randn(4, 4)

    def times(x: Tensor) -> Tensor:
        return x @ w

    def program(xs: Tensor) -> Tensor:
        return torch._higher_order_ops.map(times, xs)

    xs = torch.randn(3, 2, 4)
    compiled = door(program, inner="eager", dtype=BF16)
    with autocast():
        want = torch.stack([x @ w for x in xs])
    assert_same(compiled(xs), want)
    assert_casts_inside(compiled)
