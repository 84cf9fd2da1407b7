"""A callable's own policy is kept: beside others, and inside code that is compiled too."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampgraph
from ampgraph import AmpgraphWarning, Policy
from ampgraph.internals import dynamo
from support import BF16, FP32

# Dynamo's, about what it passes on after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x))


GELU = Policy.autocast("cpu").deny(F.gelu)


def test_reports_are_of_the_graphs_that_ran_for_the_callable() -> None:
    def program(x: Tensor) -> Tensor:
        return x @ x.T

    first, other = (ampgraph.compile(program, inner="eager", dynamic=False) for _ in range(2))
    for size in (2, 3):
        first(torch.randn(size, 4))
    other(torch.randn(3, 4))
    (second,) = ampgraph.reports(other)
    assert [r.after is second.after for r in ampgraph.reports(first)] == [False, True]


@pytest.mark.parametrize("known", [True, False], ids=["keyword", "config"])
def test_many_policies_on_one_class(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than Dynamo's own limit, which torch.compile only takes as a keyword since 2.13."""
    if not known:
        monkeypatch.setattr(dynamo, "supported", lambda **keywords: {})
    x, also = torch.randn(2, 4), ("relu", "tanh", "exp", "log", "sin", "cos", "erf", "neg", "abs")
    policies = [GELU, *(GELU.deny(f"aten::{op}") for op in also)]
    for policy in policies:
        assert ampgraph.compile(Block(), policy=policy, inner="eager")(x).dtype == FP32
    assert torch._dynamo.config.recompile_limit == 8, "the user's setting is left alone"


def test_each_callable_whose_policy_is_lost_says_so_once() -> None:
    """Dynamo logs its limit for the first one alone: it does not look at the code again."""
    x, policies = torch.randn(2, 4), (GELU, GELU.deny("aten::relu"), GELU.deny("aten::tanh"))
    kept, *lost = (
        ampgraph.compile(Block(), policy=policy, inner="eager", recompile_limit=1)
        for policy in policies
    )
    assert kept(x).dtype == FP32
    for call in lost:
        with pytest.warns(AmpgraphWarning, match="without this policy.*recompile_limit"):
            assert call(x).dtype == BF16, "eager autocast"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [call(x).dtype for call in (kept, *lost)] == [FP32, BF16, BF16]


@pytest.mark.parametrize("make", [Block, lambda: Block().forward], ids=["module", "function"])
@pytest.mark.parametrize("outer", ["eager", "ampgraph"])
def test_inside_a_function_that_is_compiled_too(outer: str, make: Any) -> None:
    block, x = ampgraph.compile(make(), policy=GELU, inner="eager"), torch.randn(2, 4)
    options: Any = {"inner": "eager"} if outer == "ampgraph" else {}
    around = torch.compile(lambda x: block(x) @ x.T, backend=outer, options=options)
    for _ in range(2):
        around(x)
    (report,) = ampgraph.reports(block)
    assert report.counts()["aten.gelu"] == {FP32: 1}
