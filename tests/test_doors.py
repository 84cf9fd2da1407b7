"""What ampgraph.compile returns: every way to call it, and the region around each call."""

import copy

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from support import assert_same, autocast, gradients


class Disabled(nn.Module):
    """One weight used several times where Dynamo does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def part(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x * 2)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [lambda: nn.GRU(8, 8), Disabled], ids=["gru", "disabled"])
def test_eager_parts_sum_gradients_in_float32(make: type[nn.Module]) -> None:
    model, x = make(), torch.randn(3, 2, 8)
    other = copy.deepcopy(model)

    def eager() -> object:
        with autocast():
            return other(x)

    compiled = ampgraph.compile(model, inner="eager")
    want, grads = gradients(eager, list(other.parameters()))
    got, ours = gradients(lambda: compiled(x), list(model.parameters()))
    assert_same(got, want)
    assert_same(ours, grads, "gradients")
