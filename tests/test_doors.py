"""What ampgraph.compile returns: every way to call it, and the region around each call."""

import copy

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from ampgraph.compiler import Refused
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


@pytest.mark.parametrize("copied", [False, True])
def test_forward_of_a_compiled_module_is_in_the_region(copied: bool) -> None:
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    with autocast():
        want = model(x)
    compiled = ampgraph.compile(model, inner="eager")
    compiled = copy.deepcopy(compiled) if copied else compiled
    assert_same(compiled.forward(x), want)
    assert_same(compiled(x), want)
    assert len(ampgraph.reports(compiled)) == 1, "one graph for both"


def test_hooks_of_a_compiled_module_run_once_and_in_the_region() -> None:
    model, x, seen = nn.Linear(8, 8), torch.randn(2, 8), list[torch.dtype]()
    compiled = ampgraph.compile(model, inner="eager")

    def hook(module: nn.Module, given: object, out: object) -> None:
        seen.append((x @ x.T).dtype)

    compiled.register_forward_hook(hook)
    compiled(x)
    assert seen == [torch.bfloat16]


LAYER = nn.Linear(8, 8)


def mixes(x: Tensor, mix: bool, rows: int = 8) -> Tensor:
    """Where `mix` is true eager autocast raises; elsewhere the code asks for a dtype."""
    y = LAYER(x)
    if mix:
        index = torch.zeros(len(x), 8, dtype=torch.long)
        return torch.zeros(rows, 8).scatter_add(0, index, y)
    return y.float() if y.dtype == torch.bfloat16 else y * 100


@pytest.mark.filterwarnings("ignore:torch.autocast raises here")
def test_a_mended_call_leaves_the_others_alone() -> None:
    x = torch.randn(8, 8)
    with autocast():
        want = mixes(x, False)
    compiled = ampgraph.compile(mixes, inner="eager")
    for _ in range(2):
        assert compiled(x, True).dtype == torch.float32
        assert_same(compiled(x, False), want)


@pytest.mark.filterwarnings("ignore:torch.autocast raises here")
def test_calls_of_many_sizes_are_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = ampgraph.compile(mixes, inner="eager")
    refused: list[object] = []
    add = Refused.add

    def count(known: Refused, *call: object) -> None:
        refused.append(call)
        add(known, *call)

    monkeypatch.setattr(Refused, "add", count)
    for size in range(2, 12):
        compiled(torch.randn(size, 8), True, rows=size)
    assert len(refused) == Refused.ENOUGH
