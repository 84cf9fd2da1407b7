"""Code that stays whole, for only torch.autocast can run it: functions, and libraries' kernels."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import ampgraph
from support import (
    BF16,
    FP32,
    assert_like_eager,
    assert_same,
    autocast,
    dtypes,
    gradients,
    records_of,
)


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


def asks(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w) * (3 if torch.is_autocast_enabled("cpu") else 1)


def asks_dtype(x: Tensor, w: Tensor) -> Tensor:
    return (x.double() @ w.double()).to(torch.get_autocast_dtype("cpu"))


def island(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    with torch.autocast("cpu", enabled=False):
        return y.float() @ w


def twice(x: Tensor, w: Tensor) -> Tensor:
    """A weight with two uses: a cast cache would sum their gradients in low precision."""
    return asks(asks(x, w), w)


PUT_IN = [torch.compiler.allow_in_graph, torch._dynamo.nonstrict_trace]


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("put_in", PUT_IN, ids=["allowed", "nonstrict"])
@pytest.mark.parametrize("function", [asks, asks_dtype, island, twice], ids=lambda f: f.__name__)
def test_a_function_that_asks_for_the_state_is_told_the_callers(
    function: Any, put_in: Any, inner: str, pair: tuple[Tensor, Tensor]
) -> None:
    whole = put_in(functools.wraps(function)(lambda x, w: function(x, w)))
    compiled = ampgraph.compile(around(whole), inner=inner)
    assert_same(gradients(lambda: compiled(*pair), list(pair)), of_eager(function, pair))
    notes = [note for record in records_of(compiled) for note in record.rewritten.notes]
    assert any("asks for the autocast state" in note for note in notes), notes


def of_eager(function: Any, pair: tuple[Tensor, Tensor]) -> Any:
    def run() -> Tensor:
        with autocast():
            return around(function)(*pair)

    return gradients(run, list(pair))


def test_an_island_tells_its_dtype(pair: tuple[Tensor, Tensor]) -> None:
    whole: Any = torch.compiler.allow_in_graph(lambda x, w: asks_dtype(x, w))

    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16, enabled=False):
            out: Tensor = whole(x, w)
            return out

    compiled = ampgraph.compile(program, inner="eager")
    with torch.no_grad():
        assert compiled(*pair).dtype == torch.float16


def test_a_function_that_does_not_ask_obeys_the_policy(pair: tuple[Tensor, Tensor]) -> None:
    policy = ampgraph.Policy.autocast("cpu").deny("aten::matmul")
    compiled = ampgraph.compile(lambda x, w: without(x, w), inner="eager", policy=policy)
    assert compiled(*pair).dtype == FP32
    assert [note for record in records_of(compiled) for note in record.rewritten.notes] == []


LIBRARY = torch.library.Library("ampgraph_kept", "DEF")
LIBRARY.define("doubled(Tensor a, Tensor b) -> Tensor")
LIBRARY.define("around(Tensor a, Tensor b) -> Tensor")
LIBRARY.impl("doubled", lambda a, b: a @ b, "CompositeImplicitAutograd")
LIBRARY.impl(
    "around",
    lambda a, b: torch.ops.ampgraph_kept.doubled(a @ b, b),
    "CompositeImplicitAutograd",
)


def autocast_kernel(a: Tensor, b: Tensor) -> Tensor:
    """What torchvision's C++ does: float32, whatever the inputs are; and it shows that it ran."""
    with torch.autocast("cpu", enabled=False):
        out: Tensor = torch.ops.ampgraph_kept.doubled(a.float(), b.float()) * 2
    return out


LIBRARY.impl("doubled", autocast_kernel, "AutocastCPU")


def checkpointed(a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = checkpoint(torch.ops.ampgraph_kept.doubled, a, b, use_reentrant=False)
    return out


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "op",
    [torch.ops.ampgraph_kept.doubled, torch.ops.ampgraph_kept.around.default, checkpointed],
    ids=["itself", "inside", "in_a_body"],
)
def test_an_autocast_kernel_is_run_by_autocast(
    op: Any, inner: str, pair: tuple[Tensor, Tensor]
) -> None:
    compiled = assert_like_eager(around(op), pair, inner=inner)
    notes = [note for record in records_of(compiled) for note in record.rewritten.notes]
    assert any("wrote an autocast kernel" in note for note in notes), notes


def test_a_users_rule_beats_a_librarys_kernel(pair: tuple[Tensor, Tensor]) -> None:
    policy = ampgraph.Policy.autocast("cpu").allow("ampgraph_kept::doubled")
    op = torch.ops.ampgraph_kept.doubled
    compiled = ampgraph.compile(lambda x, w: op(x, w), inner="eager", policy=policy)
    x, w = pair
    assert_same(compiled(x, w), x.to(BF16) @ w.to(BF16))
