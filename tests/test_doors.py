"""What ampgraph.compile returns: every way to call it, and the region around each call."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from ampgraph.compiler import Refused
from ampgraph.errors import AmpgraphWarning, OptionError
from support import BF16, FP32, Net, assert_same, autocast, counted, gradients, op_rows


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


# --- what Dynamo shares between callables, and where it gives up ---


def test_equal_blocks_share_a_graph_and_each_reports_it() -> None:
    policy = ampgraph.Policy.autocast("cpu").deny("aten::relu")
    x = torch.randn(5, 4)
    with counted() as found:
        blocks = [ampgraph.compile(Net().eval(), policy=policy, inner="eager") for _ in range(12)]
        for block in blocks:
            block(x)
    assert found["graphs"] == 1
    for block in blocks:
        assert len(ampgraph.reports(block)) == 1
    assert ampgraph.reports(ampgraph.compile(Net(), policy=policy, inner="eager")) == []


def test_ten_policies_on_one_class() -> None:
    plain = ampgraph.Policy.autocast("cpu")
    policies = [plain.deny(op) for op in ("aten::relu", "aten::gelu")]
    policies += [plain.deny("aten::relu", f"aten::{op}") for op in ("exp", "sin", "cos", "tan")]
    policies += [plain.deny("aten::relu", f"aten::{op}") for op in ("add", "mul", "sub", "div")]
    model, x = Net().eval(), torch.randn(5, 4)
    for policy in policies:
        compiled = ampgraph.compile(model, policy=policy, inner="eager")
        compiled(x)
        (dtype,) = [row.dtype for row in op_rows(compiled) if row.op == "aten.relu"]
        assert dtype == (BF16 if policy == policies[1] else FP32), policy.ops


def test_dynamos_limit_is_never_silent() -> None:
    model, x = Net().eval(), torch.randn(5, 4)
    plain = ampgraph.Policy.autocast("cpu")
    for i, op in enumerate(("exp", "sin", "cos", "tan")):
        policy = plain.deny(f"aten::{op}")
        compiled = ampgraph.compile(model, policy=policy, inner="eager", recompile_limit=3)
        if i < 3:
            compiled(x)
            continue
        with pytest.warns(AmpgraphWarning, match="recompile_limit") as told:
            compiled(x)
        assert told[0].filename == __file__
        compiled(x.double().float())


def test_a_library_that_registers_an_op_is_heard() -> None:
    """Equal options share graphs, but not across a change of the rules."""
    x = torch.randn(5, 4)
    first = ampgraph.compile(Net().eval(), inner="eager")
    first(x)
    torch.library.define("ampgraph_doors::one", "(Tensor x) -> Tensor")
    ampgraph.register_op("ampgraph_doors::one", "allow")
    with counted() as found:
        ampgraph.compile(Net().eval(), inner="eager")(x)
    assert found["graphs"] == 1


@pytest.mark.parametrize("kind", ["module", "function"])
def test_inside_a_function_that_is_compiled_too(kind: str) -> None:
    model, x = Net().eval(), torch.randn(5, 4)
    with autocast():
        want = model(x) * 2
    subject = model if kind == "module" else lambda x: model(x)
    compiled = ampgraph.compile(subject, inner="eager")
    for outer in (
        torch.compile(lambda x: compiled(x) * 2, backend="eager"),
        ampgraph.compile(lambda x: compiled(x) * 2, inner="eager"),
    ):
        assert_same(outer(x), want)
        torch._dynamo.reset()


# --- mistakes ---


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"polcy": None}, "did you mean policy"),
        ({"fullgrph": True}, "did you mean fullgraph"),
        ({"backend": "eager"}, "inner="),
        ({"model": 3}, "neither a module nor a function"),
    ],
)
def test_wrong_keywords_are_told(keywords: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        ampgraph.compile(**{"model": Net(), **keywords})


def test_a_pattern_that_matches_nothing_is_told_for_each_model() -> None:
    policy = ampgraph.Policy.autocast("cpu").module("nrm", dtype=FP32)
    for model, x in ((Net().eval(), torch.randn(5, 4)), (nn.Linear(8, 8), torch.randn(2, 8))):
        with pytest.warns(AmpgraphWarning, match="matched no module") as told:
            ampgraph.compile(model, policy=policy, inner="eager")(x)
        (one,) = [w for w in told if "matched no module" in str(w.message)]
        assert ("did you mean norm" in str(one.message)) == isinstance(model, Net)
        assert one.filename == __file__
