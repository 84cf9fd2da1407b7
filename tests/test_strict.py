"""strict=True: bit-equal to eager autocast through Inductor, or an error that says why not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import ampgraph
from ampgraph.errors import StrictError
from ampgraph.oplists.strict import EXACT, EXACT_LOW, EXACT_WITH_FITTING_SCALAR

NAMED: dict[str, Callable[[Tensor], Tensor]] = {"log_sigmoid": F.logsigmoid}


def function(name: str) -> Any:
    return NAMED.get(name) or getattr(F, name, None) or getattr(torch, name)


def every_value(dtype: torch.dtype) -> Tensor:
    """All 65,536 bit patterns of a 16-bit dtype, NaNs and infinities among them."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def eager(run: Any, args: tuple[Any, ...], dtype: torch.dtype) -> Any:
    with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
        return run(*args)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(nan=1.5), b.nan_to_num(nan=1.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unary_ops_on_every_value(dtype: torch.dtype) -> None:
    """One kernel for all of them, each followed by a product so that its rounding shows."""
    names = sorted(EXACT_LOW)

    def run(x: Tensor) -> list[Tensor]:
        return [function(name)(x) * x for name in names]

    x = every_value(dtype)
    ours = ampgraph.compile(run, dtype=dtype, strict=True)(x)
    theirs = eager(run, (x,), dtype)
    wrong = [n for n, a, b in zip(names, ours, theirs, strict=True) if not same(a, b)]
    assert wrong == []


def test_the_lists_are_disjoint() -> None:
    assert not EXACT & EXACT_LOW
    assert not EXACT & EXACT_WITH_FITTING_SCALAR
    assert len(EXACT_LOW) >= 25


class Gate(nn.Module):
    """A gated product in halves, added: Inductor drops the product's rounding (pytorch#168186)."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Linear(32, 64, bias=False)
        self.g = nn.Linear(32, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        u, v = (self.p(x) * self.g(x)).chunk(2, dim=-1)
        gated: Tensor = (u + v) / 3 - u * 0.5
        return gated


def test_a_gated_chain_is_bit_equal() -> None:
    gate, x = Gate().requires_grad_(False), torch.randn(16, 32) * 4
    strict = ampgraph.compile(gate, dtype="bf16", strict=True)
    assert same(strict(x), eager(gate, (x,), torch.bfloat16))


@pytest.mark.parametrize(
    ("run", "named"),
    [
        (lambda x: torch.erfinv(x @ x), r"aten\.erfinv is not among"),
        (lambda x: torch.exp(x), r"aten\.exp in float32 differs"),
        (lambda x: (x @ x) + 0.1, r"with 0\.1, which torch\.bfloat16 does not hold"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(run: Any, named: str) -> None:
    compiled = ampgraph.compile(run, strict=True)
    with pytest.raises(BackendCompilerFailed, match=named) as caught:
        compiled(torch.randn(4, 4))
    assert isinstance(caught.value.inner_exception, StrictError)
    assert "cure" in str(caught.value)
    assert "test_strict.py" in str(caught.value) or "node add" in str(caught.value)


def test_eager_kernels_are_always_exact() -> None:
    x = torch.randn(8, 8)
    run = lambda t: torch.softmax(torch.erfinv((t @ t).tanh()), -1) + 0.1  # noqa: E731
    compiled = ampgraph.compile(run, strict=True, inner="eager")
    assert same(compiled(x), eager(run, (x,), torch.bfloat16))


def mine(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    return gm.forward


def bicubic(x: Tensor) -> Tensor:
    return F.interpolate(F.conv2d(x, x), scale_factor=1.7, mode="bicubic")


@pytest.mark.parametrize("inner", [mine, "aot_eager"], ids=["callable", "aot_eager"])
def test_any_other_backend_is_refused(inner: Any) -> None:
    """AOTAutograd's formula for a bicubic upsampling is not eager's kernel."""
    x = torch.randn(3, 3, 8, 8)
    with pytest.raises(BackendCompilerFailed, match="nothing is known") as caught:
        ampgraph.compile(bicubic, strict=True, inner=inner)(x)
    assert "use inner='eager'" in str(caught.value), "the cure is exact"
    compiled = ampgraph.compile(bicubic, strict=True, inner="eager")
    assert same(compiled(x), eager(bicubic, (x,), torch.bfloat16))


@torch.compiler.allow_in_graph
def asks(x: Tensor) -> Tensor:
    return torch.erfinv(x) if torch.is_autocast_enabled("cpu") else x


def test_code_that_was_not_looked_at_is_refused() -> None:
    with pytest.raises(BackendCompilerFailed, match="asks runs inside a region of autocast"):
        ampgraph.compile(lambda x: asks(x @ x), strict=True)(torch.randn(2, 2))
