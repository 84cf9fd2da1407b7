"""outputs="original": what shared memory when it was captured shares it still."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from ampgraph.errors import RewriteError
from support import BF16, FP32, autocast, compiled_plainly, counted

LAYER = nn.Linear(8, 8)


@torch._dynamo.disable
def clear(h: Tensor) -> None:
    """Any code after a graph break that writes."""
    with torch.no_grad():
        h.detach().zero_()


def original(run: Callable[..., Any], **options: Any) -> Any:
    return compiled_plainly(run, outputs="original", **options)


def row(h: Tensor) -> Tensor:
    return h[0]


def turned(h: Tensor) -> Tensor:
    return h.view(2, 2, 4).transpose(0, 1)[1:]


def half(h: Tensor) -> Tensor:
    return h.chunk(2, dim=-1)[1]


def same_tensor(h: Tensor) -> Tensor:
    return h.float()


def written(h: Tensor) -> Tensor:
    return h.relu_().T


VIEWS = [row, turned, half, same_tensor, written]


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("view", VIEWS, ids=lambda f: f.__name__)
def test_a_write_after_a_break_is_seen_through_a_view(view: Any, inner: str) -> None:
    def run(x: Tensor) -> Tensor:
        h = LAYER(x)
        seen = view(h)
        clear(h)
        out: Tensor = seen
        return out

    with torch.no_grad():
        out = original(run, inner=inner)(torch.randn(2, 8))
    assert out.dtype == FP32
    assert not out.any(), "h was cleared"


@pytest.mark.parametrize("view", VIEWS, ids=lambda f: f.__name__)
def test_values_are_autocasts_in_the_captured_dtype(view: Any) -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        h = LAYER(x)
        return h, view(h)

    x = torch.randn(2, 8)
    with torch.no_grad():
        with autocast():
            wanted = run(x)
        found = original(run)(x)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == FP32
        assert torch.equal(ours, theirs.float())
    memory = {t.untyped_storage().data_ptr() for t in found}
    assert len(memory) == 1


def test_gradients_flow_through_the_views_and_a_detached_one_has_none() -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = LAYER(x)
        return h, h[0], h.detach()

    x = torch.randn(2, 8, requires_grad=True)
    h, first, detached = original(run)(x)
    assert [t.requires_grad for t in (h, first, detached)] == [True, True, False]
    (ours,) = torch.autograd.grad(h.sum() + first.sum(), x)
    low = torch.tensor([[2.0], [1.0]]).expand(2, 8).to(BF16)
    assert torch.equal(ours, (low @ LAYER.weight.to(BF16)).float())


def test_sizes_that_vary() -> None:
    def run(x: Tensor) -> Tensor:
        h = LAYER(x)
        seen: Tensor = h.view(x.shape[0] // 2, 16)[1:]
        clear(h)
        return seen

    options: dict[str, Any] = {"inner": "eager", "dtype": BF16}
    compiled = torch.compile(run, backend="ampgraph", options=options, dynamic=True)
    with torch.no_grad(), counted() as found:
        for rows in (4, 6, 8):
            out = compiled(torch.randn(rows, 8))
            assert out.shape == (rows // 2 - 1, 16)
            assert not out.any()
    assert found["graphs"] <= 2, "one for the function and one for the rest after the break"


def test_outputs_that_never_shared_are_left_alone() -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        h = LAYER(x)
        return h, h.clone()

    with torch.no_grad():
        one, other = original(run)(torch.randn(2, 8))
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def test_what_cannot_be_kept_is_refused() -> None:
    """`h.float()` is `h` in float32 and a copy in bf16: the write reaches one of them only."""

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        h = LAYER(x)
        wide = h.float()
        h.relu_()
        return h, wide

    x = torch.randn(2, 8)
    with torch.no_grad():
        with pytest.raises(BackendCompilerFailed, match="is written to") as caught:
            original(run)(x)
        assert isinstance(caught.value.inner_exception, RewriteError)
        assert "outputs='autocast'" in str(caught.value), "the cure"
        assert [t.dtype for t in compiled_plainly(run)(x)] == [BF16, FP32]
