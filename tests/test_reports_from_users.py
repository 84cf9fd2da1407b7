"""Bug reports and questions about mixed precision elsewhere, each as a small program of our own.

The docstrings name the public source. What is asserted is what would have been right there.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampgraph
from ampgraph.graph import CAST
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
    records_of,
)

AMBIENT = {"inner": "eager", "dtype": "ambient"}


def compiled(program: Any, **options: Any) -> Any:
    return ampgraph.compile(program, inner="eager", **options)


def test_gradient_of_an_island_does_not_overflow() -> None:
    """pytorch#153044: inf when compiled, because the backward of the fp32 head ran in fp16."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 1, bias=False)

        def forward(self, x: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
            low = x @ mix
            with torch.autocast("cpu", enabled=False):
                return self.head(low.float()), low

    model = Net()
    out, low = compiled(model, dtype=FP16)(torch.ones(4, 2), 2 * torch.eye(2))
    (out * 2.0**14).sum().backward()
    assert (low.dtype, out.dtype) == (FP16, FP32), "low outside the island, fp32 inside"
    assert model.head.weight.grad is not None, "the head has a gradient"
    assert model.head.weight.grad.tolist() == [[2.0**17, 2.0**17]], "exact, beyond fp16's range"


def test_state_at_the_call_decides() -> None:
    """pytorch#112260: a graph compiled outside autocast was used inside, and vice versa."""
    x, w = torch.randn(3, 5), torch.randn(5, 2)
    call = torch.compile(lambda x, w: (x @ w).sigmoid(), backend="ampgraph", options=AMBIENT)
    with counted() as found:
        for _ in range(2):
            seen = [call(x, w).dtype]
            for dtype in (FP16, BF16):
                with torch.autocast("cpu", dtype=dtype):
                    seen.append(call(x, w).dtype)
                    with torch.autocast("cpu", enabled=False):
                        seen.append(call(x, w).dtype)
            assert seen == [FP32, FP16, FP32, BF16, FP32], "as eager would return"
    assert found["graphs"] == 3, "one compile for each state, the second round none"


def test_region_of_a_helper_that_breaks_the_graph_ends_there() -> None:
    """pytorch#102414: after a break inside a helper's region, the caller's matmul was low too."""

    def helper(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            y = x @ x
            print(end="")
            return y @ x

    def program(x: Tensor) -> tuple[Tensor, ...]:
        before = x @ x
        inside = helper(x)
        return before, inside, x @ x

    call = torch.compile(program, backend="ampgraph", options=AMBIENT)
    for _ in range(2):
        assert dtypes(call(torch.randn(4, 4))) == [FP32, BF16, FP32], "only the helper's is low"
        assert not ambient(), "nothing stays on"


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        left, right = (self.up(x) * self.gate(x)).chunk(2, dim=-1)
        return left + right


def test_rounding_between_fused_ops() -> None:
    """pytorch#168186: a fused kernel skips the rounding to bf16 between a product and a sum.

    By default that may happen, and the error is then no larger; strict has eager's bits.
    """
    model, x = Gated().requires_grad_(False), 4 * torch.randn(16, 32)
    with autocast():
        eager = model(x)
    exact = copy.deepcopy(model).double()(x.double())
    loose = ampgraph.compile(model)(x)
    assert loose.dtype == BF16, "low"
    assert (loose - exact).norm() <= 1.05 * (eager - exact).norm(), "no worse than eager"
    torch._dynamo.reset()
    assert_same(ampgraph.compile(model, strict=True)(x), eager)


def test_norm_of_a_model_that_is_bf16_already() -> None:
    """pytorch#188955: rms_norm, now on CUDA's fp32 list, gave bf16 models fp32 activations."""
    model = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8, bias=False), nn.RMSNorm(8)).to(BF16)
    x = torch.randn(2, 8, dtype=BF16)
    cuda = ampgraph.Policy.autocast("cuda")
    for policy, dtype, count in (
        (ampgraph.Policy.autocast("cpu"), BF16, 0),
        (cuda.promote("aten::rms_norm"), BF16, 0),
        (cuda, FP32, None),
    ):
        call = compiled(model, policy=policy)
        assert call(x).dtype == dtype, "the list of the policy decides"
        left = records_of(call)[0].rewritten.casts.left
        assert count is None or left == count, f"{left} casts"


def test_first_without_gradients_then_with_them() -> None:
    """pytorch#112583: the cached cast of a weight, made under no_grad, cut its gradient off."""
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    call = compiled(lambda x: model(x))
    with torch.autocast("cpu", dtype=BF16):
        with torch.no_grad():
            call(x)
        call(x).sum().backward()
    want = gradients(lambda: compiled(lambda x: model(x))(x), list(model.parameters()))[1]
    assert all(g.abs().sum() > 0 for g in want), "there is a gradient"


def test_checkpointed_block_recomputes_what_it_saved() -> None:
    """pytorch#71169: the recompute ran with another autocast state than the forward."""
    block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))

    def program(x: Tensor, saving: bool) -> Tensor:
        for _ in range(2):
            x = x + (checkpoint(block, x, use_reentrant=False) if saving else block(x))
        return x

    x, leaves = torch.randn(4, 6), list(block.parameters())

    def run(saving: bool) -> Any:
        call = ampgraph.compile(program, inner="aot_eager")
        return gradients(lambda: call(x, saving), leaves)

    one, other = run(True), run(False)
    assert_same(one, other, "with and without checkpoint")


def test_large_value_between_two_fp32_ops_stays_fp32() -> None:
    """microsoft/onnxconverter-common#271: fp32 -> fp16 -> fp32 between two fp32 ops gave inf."""
    tied = nn.Linear(6, 6, bias=False).requires_grad_(False)
    nn.init.eye_(tied.weight)

    def program(x: Tensor) -> Tensor:
        big = torch.prod(tied(tied(x)), dim=1, keepdim=True).reshape(-1, 1).contiguous()
        return torch.cdist(big, torch.zeros_like(big))

    call = compiled(program, dtype=FP16)
    with torch.no_grad():
        assert call(torch.full((3, 6), 10.0)).max().item() == 1e6, "ten to the sixth survives"
    (record,) = records_of(call)
    casts = [n for n in record.rewritten.after.graph.nodes if CAST in n.meta]
    of_weight = [n for n in casts if "weight" in str(n.args[0])]
    assert len(of_weight) == 1, "one cast of the weight where no gradient flows"
    assert not any(n.args[0] in casts for n in casts), "no cast of a cast"


def test_one_op_kept_in_fp32() -> None:
    """pytorch#117832: "I suspect one operator loses accuracy": a list for it, and no model edit."""
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)

    def program(x: Tensor) -> tuple[Tensor, ...]:
        h = first(x)
        scores = torch.bmm(h, h.mT)
        return h, scores, last(scores @ h)

    call = compiled(program, policy=ampgraph.Policy.autocast("cpu").deny("aten.bmm"))
    h, scores, y = call(torch.randn(2, 4, 8))
    assert dtypes([h, scores, y]) == [BF16, FP32, BF16], "bmm alone is fp32"
    assert_same(scores, torch.bmm(h.float(), h.float().mT))
    with pytest.raises(ampgraph.errors.PolicyError, match="bmm"):
        ampgraph.Policy.autocast("cpu").deny("aten::bmmm")


def test_which_ops_ran_in_what_and_why() -> None:
    """pytorch#130847: no way to see which ops autocast runs in low precision."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return F.mse_loss(self.b(self.a(x).softmax(-1)) + x, t)

    report = ampgraph.explain(Net(), (torch.randn(3, 4), torch.randn(3, 4)), dtype=BF16)
    found = {(d.op, d.dtype, d.category) for d in report.decisions}
    assert {("aten.linear", BF16, "allow"), ("aten.mse_loss", FP32, "fp32")} & found, found
    linear = next(d for d in report.decisions if d.op == "aten.linear")
    assert linear.module.startswith(("a", "b")), "the module it stands in"
    assert "test_reports_from_users.py" in linear.source, "and the line"
