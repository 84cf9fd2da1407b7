"""explain(kernels=...): what a GPU that is not here would run.

The child process takes seconds, so most tests look at one report.
"""

import pickle
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ampgraph
from ampgraph.errors import FakeCudaError, OptionError
from ampgraph.fakecuda.record import inductor_recorded
from ampgraph.fakecuda.ship import shipped
from ampgraph.launches import KernelCode, Kernels, Launch, Run
from fakecuda_runs import BF16, Block

pytestmark = pytest.mark.filterwarnings(
    "ignore:dynamo_pgo force disabled:UserWarning"  # no caches while recording
)


class Counting(Block):
    """A block that counts its calls, and notes a gradient it had before."""

    def __init__(self) -> None:
        super().__init__(64, 2)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@dataclass(frozen=True)
class Explained:
    """A report, the model after it, and whether the random state stayed."""

    report: ampgraph.Report
    model: Counting
    random_stayed: bool

    @property
    def kernels(self) -> Kernels:
        assert self.report.kernels is not None
        return self.report.kernels


@pytest.fixture(scope="module")
def explained() -> Explained:
    torch.manual_seed(0)
    model = Counting()
    model.up.weight.grad = torch.full_like(model.up.weight, 7.0)
    x = torch.randn(4, 32, 64)
    random = torch.get_rng_state()
    report = ampgraph.explain(model, (x,), backward=True, kernels="h200")
    return Explained(report, model, torch.equal(random, torch.get_rng_state()))


def test_matmuls_are_in_bf16_forward_and_backward(explained: Explained) -> None:
    for backward in (False, True):
        extern = explained.kernels.ours.only(kind="extern", backward=backward).launches
        products = [x for x in extern if x.name.startswith(("aten.mm", "aten.addmm"))]
        assert len(products) == (8 if backward else 4)
        assert {dtype for x in products for dtype in x.dtypes} == {BF16}


def test_it_is_no_worse_than_autocast(explained: Explained) -> None:
    ours, autocast = explained.kernels.ours, explained.kernels.autocast
    for backward in (False, True):
        left, right = ours.only(backward=backward), autocast.only(backward=backward)
        assert 0 < left.bytes <= right.bytes
        assert 0 < len(left.only(kind="triton")) <= len(right.only(kind="triton"))
        assert len(left.only(kind="extern")) == len(right.only(kind="extern"))
    assert ours.spilled <= autocast.spilled
    assert 0 < ours.only(casts=True).bytes < ours.bytes / 2


def test_kernels_have_their_code(explained: Explained) -> None:
    for launch in explained.kernels.ours.only(kind="triton").launches:
        assert launch.code is not None
        assert all(".target sm_90a" in text for text in launch.code.assembly)
        assert all(1 <= count <= 255 for count in launch.code.registers)
        assert all(op.split(".")[0] in ("aten", "prims") for op in launch.code.ops)


def test_the_rules_are_those_of_cuda(explained: Explained) -> None:
    norms = [row for row in explained.report.decisions if row.op == "aten.layer_norm"]
    assert {row.because for row in norms} == {"cuda autocast list: fp32"}


def test_the_table_is_printed(explained: Explained) -> None:
    told = str(explained.report)
    assert "What runs on NVIDIA H200" in told
    assert "aten.addmm.out" in told
    assert f"ampgraph: {explained.kernels.ours.bytes / 1e6:.2f} MB" in told
    assert f"autocast: {explained.kernels.autocast.bytes / 1e6:.2f} MB" in told


def test_the_model_is_as_it_was(explained: Explained) -> None:
    model = explained.model
    assert model.calls.item() == 0
    assert explained.random_stayed
    assert model.up.weight.grad is not None
    assert bool((model.up.weight.grad == 7.0).all())
    assert model.down.weight.grad is None


# --- errors


class Reading(nn.Module):
    """A model that needs a value."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


def test_a_model_that_reads_values_is_told_so() -> None:
    with pytest.raises(FakeCudaError, match=r"on NVIDIA A100.* the model fails") as caught:
        ampgraph.explain(Reading(), (torch.ones(3),), kernels="a100")
    assert ".item()" in caught.value.cure
    assert caught.value.__cause__ is not None


def test_an_unknown_gpu_is_told_before_anything_runs() -> None:
    def never(x: Tensor) -> Tensor:
        raise AssertionError("the model was run")

    with pytest.raises(OptionError, match="no GPU is called 'h300'; known are a100"):
        ampgraph.explain(never, (torch.ones(3),), kernels="h300")


def test_what_cannot_be_sent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(nn.Module):
        pass

    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(FakeCudaError, match=r"Local.*\n  cure: .* install cloudpickle"):
        shipped(Local())
    Local.__module__, Local.__qualname__ = "__main__", "Local"
    monkeypatch.setattr(sys.modules["__main__"], "Local", Local, raising=False)
    with pytest.raises(FakeCudaError, match="defined in the main program"):
        shipped(Local())


def test_tensors_that_are_more_than_a_shape_are_refused() -> None:
    with pytest.raises(FakeCudaError, match=r"layout torch\.sparse_coo"):
        shipped(torch.eye(3).to_sparse())
    with pytest.raises(FakeCudaError, match="a Special is more"):
        shipped(torch.ones(3).as_subclass(Special))


class Special(Tensor):
    """Another kind of tensor."""


# --- what is sent


def test_a_program_is_sent_without_its_weights() -> None:
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    sent = shipped((model, torch.ones(3, 5).t(), {"where": torch.device("cpu")}))
    assert len(sent) < 10_000
    with FakeTensorMode():
        there: tuple[Any, Tensor, dict[str, Any]] = pickle.loads(sent)
    fake, x, rest = there
    assert fake[1].weight is fake[0].weight
    assert isinstance(fake[0].weight, nn.Parameter)
    assert (fake[0].weight.shape, fake[0].weight.device.type) == ((1000, 1000), "cuda")
    assert [p.requires_grad for p in (fake[0].bias, fake[1].bias)] == [True, False]
    assert (x.shape, x.stride(), rest["where"].type) == ((5, 3), (1, 5), "cuda")


# --- on a real device


def test_what_is_recorded_may_run_too() -> None:
    """The way that a GPU takes where there is one, here with ATen's calls on the CPU."""
    a, b = torch.randn(8, 16), torch.randn(16, 4)
    with inductor_recorded(launch=True) as recording:
        out = torch.compile(lambda a, b: a @ b, fullgraph=True)(a, b)
    torch.testing.assert_close(out, a @ b)
    (graph,) = recording.graphs
    assert [call.name for call in graph.calls] == ["aten.mm.out"]
    assert graph.bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4)


def test_foreach_kernels_are_shown_with_their_ops() -> None:
    code = KernelCode("", ("aten.add", "aten.sqrt"), ("",), (16, 32), (0, 8))
    run = Run((Launch("triton", "triton_for_fused_0", False, (BF16,), 2_000_000, code),))
    table = Kernels("a GPU", 1e12, run, run).table()
    cells = [list(column.cells)[1] for column in table.columns]
    told = ["triton_for_fused_0 (add sqrt)", "bf16", "1", "2.00", "16-32", "0-8"]
    assert list(map(str, cells)) == told
