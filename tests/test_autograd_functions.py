"""autograd.Function, with custom_fwd and custom_bwd and without."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function

import ampgraph
from support import (
    BF16,
    FP32,
    assert_like_eager,
    autocast,
    dtypes,
    gradients,
)

# Dynamo makes one to stand for the context (torch 2.13).
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class Plain(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g.float() @ w.T, x.T @ g.float()


class Mixed(Function):
    """Its backward multiplies the low gradient by fp32 tensors, which eager refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


class Custom(Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


class CustomCast(Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


class CustomCastLow(Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float16)
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


class Inner(Function):
    """Has a region of its own, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        with torch.autocast("cpu", enabled=False):
            return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        with torch.autocast("cpu", dtype=BF16):
            return g @ w.T, x.T @ g


class Several(Function):
    """Setup apart, a constant, an intermediate saved in low precision, one output without grad."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        h = x @ w
        return h.sigmoid() * scale, h, h > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, ctx.scale = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(x, w, output[0], output[2])

    @staticmethod
    def backward(ctx: Any, g: Tensor, gh: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w, y, positive = ctx.saved_tensors
        g = torch.where(positive, g, g * 0.5).float() * y.float() * ctx.scale + gh.float()
        return g @ w.T, x.T @ g, None


def several(x: Tensor, w: Tensor) -> Tensor:
    y, h, positive = Several.apply((x @ w).float(), w, 2.0)  # type: ignore[no-untyped-call]
    return torch.where(positive, y, h).tanh()


class Straight(Function):
    """Rounds, and lets the gradient of the first input through; the second has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * 2, None


def straight(x: Tensor, w: Tensor) -> Tensor:
    return Straight.apply((x @ w).float(), w) @ w  # type: ignore[no-untyped-call]


class Outer(Function):
    """Calls another function of autograd's inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return Plain.apply(x, w).relu()  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g.float() @ w.T, x.T @ g.float()


def outer(x: Tensor, w: Tensor) -> Tensor:
    return Outer.apply((x @ w).float(), w)  # type: ignore[no-untyped-call]


def around(function: type[Function]) -> Callable[[Tensor, Tensor], Tensor]:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(function.apply(x, w) * 2)

    return program


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [Plain, Custom, CustomCast, CustomCastLow, Inner])
def test_functions(function: type[Function], inner: str, pair: tuple[Tensor, Tensor]) -> None:
    assert_like_eager(around(function), pair, inner=inner)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", [several, straight, outer], ids=lambda f: f.__name__)
def test_what_functions_may_do(
    program: Callable[[Tensor, Tensor], Tensor], inner: str, pair: tuple[Tensor, Tensor]
) -> None:
    assert_like_eager(program, pair, inner=inner)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", [several, straight, outer], ids=lambda f: f.__name__)
def test_captured_without_autocast(
    program: Callable[[Tensor, Tensor], Tensor], inner: str, pair: tuple[Tensor, Tensor]
) -> None:
    options = {"inner": inner, "dtype": BF16, "outputs": "autocast"}
    compiled = torch.compile(program, backend="ampgraph", options=options)
    got = gradients(lambda: compiled(*pair), list(pair))
    assert dtypes(got) == [BF16, FP32, FP32], "low outside, gradients as their tensors"
    want = gradients(lambda: program(*pair), list(pair))
    torch.testing.assert_close(got[1], want[1], rtol=0.1, atol=0.3)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_mixed_dtypes_in_backward_are_repaired(inner: str, pair: tuple[Tensor, Tensor]) -> None:
    program, leaves = around(Mixed), list(pair)
    with autocast():
        low = program(*pair)
    with pytest.raises(RuntimeError, match="same dtype"):
        low.sum().backward()
    compiled = ampgraph.compile(program, inner=inner)
    out, grads = gradients(lambda: compiled(*pair), leaves)
    _, want_grads = gradients(lambda: around(Plain)(*pair), leaves)
    assert dtypes([out, grads]) == [BF16, FP32, FP32], "low forward, fp32 gradients"
    torch.testing.assert_close(grads, want_grads, rtol=0.1, atol=0.1)
