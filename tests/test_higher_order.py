"""Higher-order ops: their bodies are rewritten in the dtypes their operands now have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import ampgraph
from ampgraph.graph import CAST
from support import (
    BF16,
    FP16,
    FP32,
    assert_like_eager,
    assert_same,
    autocast,
    bodies,
    gradients,
    leaves_of,
    ops,
)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def assert_casts_inside(compiled: object, count: int | None = None) -> None:
    """The bodies of the higher-order ops hold casts that this compiler inserted."""
    found = [n for body in bodies(compiled) for n in body.graph.nodes if CAST in n.meta]
    assert found, "no cast in any body"
    assert count is None or len(found) == count, f"{len(found)} casts in the bodies"


def compiled_plainly(function: Callable[..., Any], **options: Any) -> Any:
    """Through the other door, captured with autocast off."""
    options = {"inner": "eager", "dtype": BF16, "outputs": "autocast", **options}
    return torch.compile(function, backend="ampgraph", options=options)


# --- checkpoint ---


class Deep(nn.Module):
    """A block used twice with the same weights, checkpointed or not."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.f = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.norm = nn.LayerNorm(6)

    def block(self, x: Tensor) -> Tensor:
        return x + self.f(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = (
                checkpoint(self.block, x, use_reentrant=False)
                if self.checkpointed
                else self.block(x)
            )
        return x


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_checkpoint(inner: str) -> None:
    model, x = Deep(True), torch.randn(4, 6, requires_grad=True)
    compiled = assert_like_eager(model, (x,), inner=inner)
    assert_casts_inside(compiled)
    plain = Deep(False)
    plain.load_state_dict(model.state_dict())
    _, with_checkpoint = gradients(lambda: compiled(x), leaves_of(model, (x,)))
    other = ampgraph.compile(plain, inner=inner)
    _, without = gradients(lambda: other(x), leaves_of(plain, (x,)))
    assert_same(with_checkpoint, without, "gradients without checkpoint")


def test_checkpoint_recomputes_in_an_inner_region() -> None:
    lin = nn.Linear(4, 4)

    def block(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=FP16):
            y = lin(x)
        with torch.autocast("cpu", enabled=False):
            return lin(y.float())

    def program(x: Tensor) -> Tensor:
        return checkpoint(block, x @ x, use_reentrant=False)

    x = torch.randn(4, 4, requires_grad=True)
    assert_like_eager(program, (x,), inner="aot_eager")


def test_checkpoint_with_kwargs_and_a_nontensor() -> None:
    def block(x: Tensor, scale: float, *, bias: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ x) * scale + bias, x

    def program(x: Tensor, bias: Tensor) -> Any:
        return checkpoint(block, x, 0.5, bias=bias, use_reentrant=False)

    args = (torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True))
    assert_like_eager(program, args)


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


# --- nested compile regions ---


class Repeated(nn.Module):
    """One region called in three ways: fp32 input, low input, and inside an island."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        @torch.compiler.nested_compile_region
        def block(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return torch.nn.functional.linear(x, weight).relu(), x + 1.0

        first, same = block(x, self.a.weight)
        second, low = block(first, self.b.weight)
        with torch.autocast("cpu", enabled=False):
            third, high = block(second.float(), self.b.weight)
        return first, same, second, low, third, high


def test_nested_compile_region() -> None:
    """With inner="eager" the op's own backward fails, in torch 2.13 as in plain torch.compile."""
    x = torch.randn(3, 4, requires_grad=True)
    compiled = assert_like_eager(Repeated(), (x,), inner="aot_eager")
    assert_casts_inside(compiled)


def test_nested_compile_region_captured_plainly() -> None:
    x = torch.randn(3, 4)
    model = Repeated().requires_grad_(False)
    compiled = compiled_plainly(model)
    with autocast():
        want = model(x)
    assert_same(compiled(x), want)


# --- flex_attention ---


def test_flex_attention_takes_mixed_dtypes() -> None:
    q, k, v = (torch.randn(1, 2, 16, 16) for _ in range(3))
    compiled = compiled_plainly(flex_attention)
    with torch.no_grad():
        out = compiled(q, k.to(BF16), v)
        want = flex_attention(*(t.to(BF16) for t in (q, k, v)))
    assert_same(out, want)


def test_flex_attention_with_masks_and_scores() -> None:
    bias = torch.randn(2)

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + bias[h]

    mask = create_block_mask(causal, None, None, 16, 16, device="cpu")

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q @ q.mT, k, v, score_mod=score, block_mask=mask)

    q, k, v = (torch.randn(1, 2, 16, 16) for _ in range(3))
    compiled = compiled_plainly(program)
    with torch.no_grad(), autocast():
        out = compiled(q, k, v)
        want = flex_attention(q @ q.mT, k.to(BF16), v.to(BF16), score_mod=score, block_mask=mask)
    assert_same(out, want)
    found = ops(compiled)
    assert found["higher_order.flex_attention", BF16] == 1, f"named in the report: {found}"
