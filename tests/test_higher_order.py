"""Higher-order ops: their bodies are rewritten in the dtypes their operands now have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.foreach_map import foreach_map
from torch._higher_order_ops.hints_wrap import hints_wrapper
from torch._higher_order_ops.strict_mode import strict_mode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import ampgraph
from support import (
    BF16,
    FP16,
    assert_casts_inside,
    assert_like_eager,
    assert_same,
    autocast,
    compiled_plainly,
    gradients,
    leaves_of,
    ops,
)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


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


# --- others ---


def hook(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    h.register_hook(lambda g: (g @ g.T) @ g * 2)
    return h.relu()


def foreach(x: Tensor, w: Tensor) -> list[Tensor]:
    return foreach_map(torch.matmul, [x, w], [w, x])


def hints(x: Tensor, w: Tensor) -> Tensor:
    return hints_wrapper(lambda x: (x @ w).relu(), (x,), {}, hints={"name": 1})


def strict(x: Tensor, w: Tensor) -> Tensor:
    return strict_mode(lambda x: (x @ w).relu(), (x,))


def shown(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    torch._higher_order_ops.print("{}", h)
    return h


@pytest.mark.parametrize(
    ("program", "inner"),
    [(hook, "eager"), (hook, "aot_eager"), (foreach, "eager"), (shown, "eager")],
)
def test_small_ones(program: Callable[..., Any], inner: str) -> None:
    """A hook runs in backward, and with autocast off."""
    args = (torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True))
    assert_like_eager(program, args, inner=inner, backward=program is hook)


@pytest.mark.parametrize("program", [hints, strict])
def test_wrappers(program: Callable[..., Any]) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    compiled = compiled_plainly(program)
    with autocast():
        want = (x @ w).relu()
    assert_same(compiled(x, w), want)
    assert_casts_inside(compiled)
