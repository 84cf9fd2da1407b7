"""vmap, grad, jvp and their kin inside the compiled function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func

from support import BF16, assert_like_eager, ops

# Loading forward mode's decompositions scripts them (torch 2.13).
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


def product(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).sum(-1)


def loss(w: Tensor, x: Tensor) -> Tensor:
    return torch.nn.functional.mse_loss(x @ w, x)


def vmap(x: Tensor, w: Tensor) -> Tensor:
    return torch.vmap(lambda row: (row @ w).relu().sum(-1, keepdim=True) @ w[:1])(x)


def vmap_twice(x: Tensor, w: Tensor) -> Tensor:
    return torch.vmap(lambda a: torch.vmap(lambda b: (a @ w) * b)(w))(x)


def grad(x: Tensor, w: Tensor) -> Tensor:
    return func.grad(loss)(w, x)


def grad_of_grad(x: Tensor, w: Tensor) -> Tensor:
    return func.grad(lambda w: func.grad(lambda w: loss(w, x))(w).float().square().sum())(w)


def grad_and_value(x: Tensor, w: Tensor) -> Any:
    return func.grad_and_value(loss)(w, x)


def per_sample_gradients(x: Tensor, w: Tensor) -> Tensor:
    return torch.vmap(func.grad(loss), in_dims=(None, 0))(w, x[:, None])


def vjp(x: Tensor, w: Tensor) -> Any:
    pair: Any = func.vjp(lambda w: product(w, x), w)
    out, pull = pair
    return out, pull(torch.ones_like(out))


def jacrev(x: Tensor, w: Tensor) -> Any:
    return func.jacrev(product)(w, x)


def jvp(x: Tensor, w: Tensor) -> Any:
    return func.jvp(lambda w: product(w, x), (w,), (w * 2,))


def jacfwd(x: Tensor, w: Tensor) -> Any:
    return func.jacfwd(product)(w, x)


def hessian(x: Tensor, w: Tensor) -> Any:
    return func.hessian(lambda w: product(w, x).float().square().sum())(w)


PROGRAMS = (
    vmap,
    vmap_twice,
    grad,
    grad_of_grad,
    grad_and_value,
    per_sample_gradients,
    vjp,
    jacrev,
    jvp,
    jacfwd,
    hessian,
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_like_eager_autocast(program: Callable[..., Any]) -> None:
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    compiled = assert_like_eager(program, (x, w), backward=False)
    assert any(dtype == BF16 for _, dtype in ops(compiled)), "something is low inside"


@pytest.mark.parametrize("program", [vmap, grad, per_sample_gradients], ids=lambda f: f.__name__)
def test_captured_without_autocast(program: Callable[..., Any]) -> None:
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    options = {"inner": "eager", "dtype": BF16}
    compiled = torch.compile(program, backend="ampgraph", options=options)
    torch.testing.assert_close(compiled(x, w), program(x, w), rtol=0.05, atol=0.05)
    assert any(dtype == BF16 for _, dtype in ops(compiled)), "something is low inside"


def test_gradients_through_vmap() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    assert_like_eager(vmap, (x, w))
    assert_like_eager(vmap, (x, w), inner="aot_eager")
