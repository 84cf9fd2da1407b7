"""Functions that Dynamo puts into the graph whole, with a backward of their own inside."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function

import ampgraph
from support import BF16, FP32, assert_like_eager, assert_same, dtypes, gradients, records_of


class Loud(Function):
    """Several listed ops, and gradients that no derivative would give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w).relu() @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return torch.full_like(x, 7.0) * g.float().sum(), torch.full_like(w, 5.0)


class Wide(Function):
    """Asks for float32 while autocast is on."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w).relu() @ w

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


@torch.compiler.allow_in_graph
def loud(x: Tensor, w: Tensor) -> Tensor:
    return Loud.apply(x, w)  # type: ignore[no-untyped-call]


@torch.compiler.allow_in_graph
def wide(x: Tensor, w: Tensor) -> Tensor:
    return Wide.apply(x, w)  # type: ignore[no-untyped-call]


@torch._dynamo.nonstrict_trace
def nonstrict(x: Tensor, w: Tensor) -> Tensor:
    return Loud.apply(x, w)  # type: ignore[no-untyped-call]


@torch.compiler.allow_in_graph
def without(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax((x @ w).relu() @ w, -1)


def around(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return function(x @ w, w).tanh() @ w

    return program


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [loud, wide, without], ids=lambda f: f.__name__)
def test_like_eager(function: Any, inner: str, pair: tuple[Tensor, Tensor]) -> None:
    assert_like_eager(around(function), pair, inner=inner)


@pytest.mark.parametrize("function", [loud, nonstrict], ids=["allowed", "nonstrict"])
def test_backward_is_kept_through_both_doors(
    function: Callable[..., Tensor], pair: tuple[Tensor, Tensor]
) -> None:
    options = {"inner": "aot_eager", "dtype": BF16, "outputs": "autocast"}
    found = []
    for compiled in (
        torch.compile(around(function), backend="ampgraph", options=options),
        ampgraph.compile(around(function), inner="aot_eager"),
    ):
        found.append(gradients(functools.partial(compiled, *pair), list(pair)))
        assert dtypes(found[-1]) == [BF16, FP32, FP32], "low, with fp32 gradients"
        notes = [note for record in records_of(compiled) for note in record.rewritten.notes]
        assert any("has a backward of its own" in note for note in notes), f"with a word: {notes}"
    assert_same(*found)


def test_an_islands_function_stays_fp32(pair: tuple[Tensor, Tensor]) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return loud(x, w)

    assert_like_eager(program, pair)
