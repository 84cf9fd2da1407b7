"""The caller's autocast state: what each door makes of it, and that nobody downstream sees it."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import ampgraph
from ampgraph import backend
from ampgraph.errors import AmpgraphWarning
from support import (
    BF16,
    FP16,
    FP32,
    ambient,
    assert_same,
    autocast,
    counted,
    dtypes,
    gradients,
)

AMBIENT = {"inner": "eager", "dtype": "ambient"}
INNERS = ("eager", "aot_eager", "inductor")


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4), torch.randn(4, 4)


def visit(call: Callable[[], Tensor]) -> list[torch.dtype]:
    """The dtypes a callable returns in five states: off, bf16, fp16, off, bf16."""
    found = [call().dtype]
    with torch.autocast("cpu", dtype=BF16):
        found.append(call().dtype)
        with torch.autocast("cpu", dtype=FP16):
            found.append(call().dtype)
        with torch.autocast("cpu", enabled=False):
            found.append(call().dtype)
        found.append(call().dtype)
    return found


@pytest.mark.parametrize("inner", INNERS)
def test_one_compile_for_each_state_and_none_the_second_time(
    inner: str, pair: tuple[Tensor, Tensor]
) -> None:
    compiled = torch.compile(
        lambda x, w: torch.tanh(x @ w), backend="ampgraph", options={**AMBIENT, "inner": inner}
    )
    with counted() as first:
        assert visit(lambda: compiled(*pair)) == [FP32, BF16, FP16, FP32, BF16], "state at the call"
    with counted() as again:
        visit(lambda: compiled(*pair))
    assert (first["graphs"], again["graphs"]) == (3, 0), "one graph for each of three states"


def test_ambient_through_the_other_door(pair: tuple[Tensor, Tensor]) -> None:
    compiled = ampgraph.compile(lambda x, w: torch.tanh(x @ w), dtype="ambient", inner="eager")
    assert visit(lambda: compiled(*pair)) == [FP32, BF16, FP16, FP32, BF16], "state at the call"


def test_without_a_dtype_the_ambient_one_is_followed(pair: tuple[Tensor, Tensor]) -> None:
    compiled = ampgraph.compile(lambda x, w: torch.tanh(x @ w), inner="eager")
    assert visit(lambda: compiled(*pair)) == [BF16, BF16, FP16, BF16, BF16], "bf16 where off"


@pytest.mark.parametrize("door", ["compile", "backend"])
def test_explicit_dtype_wins_and_warns_once(
    door: str, pair: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_warned", set())
    options: Any = {"inner": "eager", "dtype": FP16}
    compiled: Callable[..., Tensor] = (
        ampgraph.compile(torch.matmul, dtype=FP16, inner="eager")
        if door == "compile"
        else torch.compile(torch.matmul, backend="ampgraph", options=options)
    )
    with torch.autocast("cpu", dtype=BF16):
        with pytest.warns(AmpgraphWarning, match=r"float16.*bfloat16.*the explicit dtype wins"):
            assert compiled(*pair).dtype == FP16, "the explicit dtype wins"
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert compiled(*pair).dtype == FP16, "and says so once"


def wide(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x @ w
    return h, h.double()


@pytest.mark.parametrize(
    ("door", "outputs", "around", "want"),
    [
        ("compile", None, False, BF16),
        ("compile", "autocast", False, BF16),
        ("backend", None, False, FP32),
        ("backend", None, True, BF16),
        ("backend", "autocast", False, BF16),
        ("backend", "original", False, FP32),
    ],
)
def test_dtypes_of_outputs(
    door: str, outputs: Any, around: bool, want: torch.dtype, pair: tuple[Tensor, Tensor]
) -> None:
    compiled = (
        ampgraph.compile(wide, outputs=outputs, inner="eager")
        if door == "compile"
        else torch.compile(wide, backend="ampgraph", options={"inner": "eager", "outputs": outputs})
    )
    with torch.autocast("cpu", dtype=BF16, enabled=around):
        out = compiled(*pair)
    assert dtypes(out) == [want, torch.float64], "outputs as asked"
    with autocast():
        assert_same(out[0].float(), torch.matmul(*pair).float())


def test_original_outputs_under_autocast_are_those_of_the_capture(
    pair: tuple[Tensor, Tensor],
) -> None:
    compiled = ampgraph.compile(wide, outputs="original", inner="eager")
    assert dtypes(compiled(*pair)) == [BF16, torch.float64], "captured under autocast: bf16 already"


# --- backward ---


class Head(nn.Module):
    """An fp32 island whose gradient overflows fp16 (pytorch#153044)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(h.float())


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_backward_follows_forward(inner: str, inside: bool, dtype: torch.dtype) -> None:
    model, x = Head(), torch.ones(2, 4)
    leaves = list(model.parameters())

    def eager() -> Tensor:
        with autocast(dtype):
            return model(x) * 16384

    _, want = gradients(eager, leaves)
    options = {**AMBIENT, "inner": inner, "strict": inner == "inductor"}
    compiled = torch.compile(model, backend="ampgraph", options=options)
    for leaf in leaves:
        leaf.grad = None
    with torch.autocast("cpu", dtype=dtype, enabled=True):
        out = compiled(x) * 16384
        if inside:
            (out * torch.linspace(0.5, 1.5, 2).reshape(2, 1)).sum().backward()
    if not inside:
        (out * torch.linspace(0.5, 1.5, 2).reshape(2, 1)).sum().backward()
    assert_same([leaf.grad for leaf in leaves], want, "gradients")
    assert all(g.isfinite().all() for g in want), "finite in eager, so here too"
    assert not ambient(), "nothing stays on"


# --- what is downstream of us sees no autocast ---


@pytest.mark.parametrize("door", ["compile", "backend"])
def test_inner_backend_sees_no_autocast(door: str, pair: tuple[Tensor, Tensor]) -> None:
    seen: dict[str, list[str]] = {}

    def inner(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        seen["compiling"] = [d for d in ambient() if d != "ipu"]

        @functools.wraps(gm.forward)
        def run(*args: Any) -> Any:
            seen["running"] = ambient()
            return gm.forward(*args)

        return run

    compiled = (
        ampgraph.compile(torch.matmul, inner=inner)
        if door == "compile"
        else torch.compile(torch.matmul, backend="ampgraph", options={"inner": inner})
    )
    with torch.autocast("cpu", dtype=BF16):
        assert compiled(*pair).dtype == BF16, "rewritten"
        assert ambient() == ["cpu"], "the caller's region is on again"
    assert seen == {"compiling": [], "running": []}, "the casts are in the graph"


@pytest.mark.parametrize("inner", INNERS)
def test_autocast_is_off_in_backward_too(inner: str) -> None:
    seen: list[list[str]] = []

    @torch.library.custom_op("ampgraph_tests::listen", mutates_args=())
    def listen(x: Tensor) -> Tensor:
        return x.clone()

    @listen.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @torch.library.custom_op("ampgraph_tests::listen_backward", mutates_args=())
    def listen_backward(g: Tensor) -> Tensor:
        seen.append(ambient())
        return g.clone()

    @listen_backward.register_fake
    def _(g: Tensor) -> Tensor:
        return torch.empty_like(g)

    listen.register_autograd(lambda ctx, g: listen_backward(g))
    w = torch.randn(4, 4, requires_grad=True)
    compiled = torch.compile(
        lambda x: listen(x @ w), backend="ampgraph", options={**AMBIENT, "inner": inner}
    )
    with torch.autocast("cpu", dtype=BF16):
        compiled(torch.randn(2, 4)).sum().backward()
        assert ambient() == ["cpu"], "the caller's region is on again"
    assert seen == [[]], "backward follows the forward's casts, not the caller's region"
