"""Custom operators: autocast's registered rules and ours are kept, others follow their inputs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from support import (
    BF16,
    FP16,
    FP32,
    assert_like_eager,
    assert_same,
    autocast,
    gradients,
    ops,
    weigh,
)

SEEN: list[tuple[torch.dtype, torch.dtype]] = []


def define(name: str) -> Any:
    """A custom op of two tensors with a gradient, which notes the dtypes it meets."""

    @torch.library.custom_op(f"ampgraph_tests::{name}", mutates_args=())
    def gated(x: Tensor, w: Tensor) -> Tensor:
        SEEN.append((x.dtype, w.dtype))
        return x * torch.sigmoid(w)

    @gated.register_fake
    def _(x: Tensor, w: Tensor) -> Tensor:
        return torch.empty_like(x, dtype=torch.promote_types(x.dtype, w.dtype))

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        s = torch.sigmoid(w)
        return g * s, g * x * s * (1 - s)

    gated.register_autograd(backward, setup_context=setup)
    return gated


RULED, HALF, FREE = define("ruled"), define("half"), define("free")
DENIED, PROMOTED, LOWERED = define("denied"), define("promoted"), define("lowered")
RULED.register_autocast("cpu", BF16)
HALF.register_autocast("cpu", FP16)
ampgraph.register_op("ampgraph_tests::denied", "deny")
ampgraph.register_op("ampgraph_tests::promoted", "promote")
ampgraph.register_op("ampgraph_tests::lowered", "allow", device_type="cpu")


class Gate(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op, self.lin = op, nn.Linear(6, 6)
        self.w = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.lin(x), self.w.expand(x.shape)).relu()


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("op", "dtype", "met"),
    [(RULED, BF16, (BF16, BF16)), (RULED, FP16, (BF16, BF16)), (HALF, BF16, (FP16, FP16))],
)
def test_register_autocast(
    op: Any, dtype: torch.dtype, met: tuple[torch.dtype, ...], inner: str
) -> None:
    compiled = assert_like_eager(Gate(op), (torch.randn(4, 6),), dtype=dtype, inner=inner)
    assert set(SEEN) == {met}, f"eager and compiled meet the registered dtype: {SEEN}"
    assert any(name.startswith("ampgraph_tests") for name, _ in ops(compiled)), "in the report"


def test_without_a_rule_it_follows_its_inputs() -> None:
    assert_like_eager(Gate(FREE), (torch.randn(4, 6),))
    assert set(SEEN) == {(BF16, FP32)}, f"as they come: {SEEN}"


class Casting(nn.Module):
    """What a registered rule means, written out for eager autocast."""

    def __init__(self, gate: Gate, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate, self.dtype = gate, dtype

    def forward(self, x: Tensor) -> Tensor:
        low, w = self.gate.lin(x), self.gate.w.expand(x.shape)
        return self.gate.op(low.to(self.dtype), w.to(self.dtype)).relu()


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize(("op", "dtype"), [(DENIED, FP32), (PROMOTED, FP32), (LOWERED, BF16)])
def test_register_op(op: Any, dtype: torch.dtype, inner: str) -> None:
    gate, x = Gate(op), torch.randn(4, 6)
    leaves = list(gate.parameters())
    with autocast():
        written_out = Casting(gate, dtype)(x)
    weigh(written_out).backward()
    want = [leaf.grad for leaf in leaves]
    compiled = ampgraph.compile(gate, inner=inner)
    got, grads = gradients(lambda: compiled(x), leaves)
    assert_same(got, written_out)
    assert_same(grads, want, "gradients")
    assert set(SEEN) == {(dtype, dtype)}, f"the op meets what was registered: {SEEN}"


def test_a_policy_overrides_what_was_registered() -> None:
    policy = ampgraph.Policy.autocast("cpu").follow("ampgraph_tests::denied")
    policy = policy.deny("ampgraph_tests::ruled")
    for op, met in ((DENIED, (BF16, FP32)), (RULED, (FP32, FP32))):
        SEEN.clear()
        ampgraph.compile(Gate(op), policy=policy, inner="eager")(torch.randn(4, 6))
        assert SEEN == [met], f"the user's rule comes first: {SEEN}"
