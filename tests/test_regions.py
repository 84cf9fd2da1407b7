"""Autocast regions inside the program, alone and inside the caller's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ampgraph
from support import (
    BF16,
    FP16,
    FP32,
    ambient,
    assert_like_eager,
    assert_same,
    dtypes,
    ops,
)

AMBIENT = {"inner": "eager", "dtype": "ambient"}
INNERS = ("eager", "aot_eager", "inductor")


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4), torch.randn(4, 4)


def nested(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    a = x @ w
    with torch.autocast("cpu", dtype=FP16):
        b = x @ w
        with torch.autocast("cpu", dtype=BF16):
            c = b @ w
        d = c @ w
    return a, b, c, d, x @ w


def island(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    a = x @ w
    with torch.autocast("cpu", enabled=False):
        b = a.float() @ w
        with torch.autocast("cpu", dtype=FP16):
            c = b @ w
        d = b @ w
    return a, b, c, d, b @ w


def foreign(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    with torch.autocast("mps", enabled=False):
        a = x @ w
    return a, a @ w


def overlapping(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    with torch.autocast("xpu", dtype=FP16, enabled=False), torch.autocast("cpu", dtype=FP16):
        a = x @ w
    return a, x @ w


@torch.autocast("cpu", dtype=FP16)
def decorated(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def decorator(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return decorated(x, w), x @ w


def aliases(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    with torch.cpu.amp.autocast(dtype=FP16):
        a = x @ w
    with torch.cuda.amp.autocast(enabled=False):
        b = x @ w
    with torch.amp.autocast("cpu", enabled=False):
        c = x @ w
    return a, b, c


def default_dtype(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu"):
        return x @ w, w @ x


REGIONS = (nested, island, foreign, overlapping, decorator, default_dtype)


@pytest.mark.parametrize("program", REGIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_regions_are_eager_autocasts(
    program: Callable[..., Any], dtype: torch.dtype, pair: tuple[Tensor, Tensor]
) -> None:
    x, w = (t.requires_grad_() for t in pair)
    assert_like_eager(program, (x, w), dtype=dtype)


@pytest.mark.parametrize("program", REGIONS, ids=lambda f: f.__name__)
def test_regions_without_a_region_around_them(
    program: Callable[..., Any], pair: tuple[Tensor, Tensor]
) -> None:
    compiled = torch.compile(program, backend="ampgraph", options=AMBIENT)
    assert_same(compiled(*pair), program(*pair))
    assert not ambient(), "the program's own regions ended"


@pytest.mark.filterwarnings("ignore:.*torch.(cpu|cuda).amp.autocast.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda':UserWarning")
def test_old_aliases(pair: tuple[Tensor, Tensor]) -> None:
    compiled = assert_like_eager(aliases, pair)
    assert dtypes(compiled(*pair)) == [FP16, BF16, FP32], "alias, foreign region, island"


def test_a_region_that_wraps_a_module_and_raises(pair: tuple[Tensor, Tensor]) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        try:
            with torch.autocast("cpu", dtype=FP16):
                x = x @ w
                raise KeyError
        except KeyError:
            return x @ w

    assert dtypes(ampgraph.compile(program, inner="eager")(*pair)) == [BF16], "the region ended"


def test_set_autocast_enabled(pair: tuple[Tensor, Tensor]) -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        before = torch.is_autocast_enabled("cpu")
        torch.set_autocast_enabled("cpu", False)
        a = x @ w
        torch.set_autocast_enabled("cpu", before)
        return a, x @ w

    compiled = ampgraph.compile(program, inner="eager")
    assert dtypes(compiled(*pair)) == [FP32, BF16], "the flag counts from where it is set"
    assert dtypes(compiled(*pair)) == [FP32, BF16], "and does so again"
    assert not ambient(), "nothing stays on"


def test_a_graph_break_inside_an_inlined_region(pair: tuple[Tensor, Tensor]) -> None:
    def helper(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            y = x @ w
            torch._dynamo.graph_break()
            return (y @ w).tanh()

    def outer(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return x @ w, helper(x, w), x @ w

    compiled = torch.compile(outer, backend="ampgraph", options=AMBIENT)
    for _ in range(2):
        assert_same(compiled(*pair), outer(*pair))
        assert not ambient(), "the broken region does not leak"


def test_innermost_region_is_named_in_the_decisions(pair: tuple[Tensor, Tensor]) -> None:
    compiled = ampgraph.compile(nested, inner="eager")
    compiled(*pair)
    found = ops(compiled)
    assert found["aten.matmul", FP16] == 2, f"b and d are of the fp16 region: {found}"
    assert found["aten.matmul", BF16] == 3, f"a, c and the last of bf16: {found}"
