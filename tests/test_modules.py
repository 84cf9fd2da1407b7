"""A compiled module stays a module: copies, pickles, hooks, sharing, writes, threads."""

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from ampgraph.errors import AmpgraphWarning
from ampgraph.policy import Policy
from support import (
    BF16,
    FP32,
    Net,
    ambient,
    assert_same,
    autocast,
    by_hand,
    dtypes,
    op_rows,
)

# Dynamo's, about what it passes on after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 4)


def test_state_dict_keys_are_torch_compiles() -> None:
    model = Net()
    plain: Any = torch.compile(model)
    want = list(plain.state_dict())
    assert list(ampgraph.compile(model).state_dict()) == want, "as from torch.compile"


@pytest.mark.parametrize("called", [False, True], ids=["before", "after"])
def test_deepcopy(called: bool, x: Tensor) -> None:
    model = Net().eval()
    compiled = ampgraph.compile(model, inner="eager")
    want = compiled(x) if called else by_hand(model, x)
    twin = copy.deepcopy(compiled)
    original = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert_same(twin(x), want, "the copy")
    assert_same(by_hand(original, x), want, "a copy of the original")
    assert_same(by_hand(twin._orig_mod, x), want, "the copy's module")
    assert twin.train() is twin, "still a module"
    assert compiled(x).count_nonzero() == 0, "the compiled module follows its parameters"


@pytest.mark.parametrize("called", [False, True], ids=["before", "after"])
def test_pickle_and_save(called: bool, x: Tensor) -> None:
    model = Net().eval()
    compiled = ampgraph.compile(model, inner="eager")
    want = compiled(x) if called else by_hand(model, x)
    assert_same(by_hand(pickle.loads(pickle.dumps(model)), x), want, "the original")
    restored = pickle.loads(pickle.dumps(compiled))
    assert_same(restored(x), want, "the compiled module")
    buffer = io.BytesIO()
    torch.save(compiled.state_dict(), buffer)
    buffer.seek(0)
    assert compiled.load_state_dict(torch.load(buffer)).missing_keys == [], "its state"


def test_hooks_run(x: Tensor) -> None:
    model, seen = Net().eval(), []
    model.a.register_forward_hook(lambda m, args, out: torch.mul(out, 2))
    model.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    want = by_hand(model, x)
    compiled = ampgraph.compile(model, inner="eager")
    assert_same(compiled(x), want)
    compiled.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    compiled(x)
    assert seen == [BF16], "a hook of the compiled module sees what it returns"


def test_one_module_in_two_compiled_callables(x: Tensor) -> None:
    shared = nn.Linear(4, 4)
    first = ampgraph.compile(lambda x: shared(x).relu(), inner="eager")
    second = ampgraph.compile(nn.Sequential(shared, shared), dtype="fp16", inner="eager")
    third = torch.compile(shared, backend="ampgraph", options={"inner": "eager"})
    found = [dtypes(f(x)) for f in (first, second, third) for _ in range(2)]
    assert found == [[BF16], [BF16], [torch.float16], [torch.float16], [FP32], [FP32]], (
        "each its own"
    )


def test_mutated_inputs_and_buffers(x: Tensor) -> None:
    class Counting(nn.Module):
        total: Tensor
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.register_buffer("total", torch.zeros(4))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            h = self.lin(x)
            self.total.add_(h.detach().sum(0))  # type: ignore[operator]
            self.calls.add_(1)
            memory[:, 1:].copy_(h[:, :-1])
            return h + memory

    model = Counting()
    other = copy.deepcopy(model)
    ours, theirs = torch.zeros(5, 4), torch.zeros(5, 4)
    compiled = ampgraph.compile(model, inner="eager")
    with torch.no_grad():
        for _ in range(2):
            with autocast():
                want = other(x, theirs)
            assert_same(compiled(x, ours), want)
    assert_same((ours, *model.buffers()), (theirs, *other.buffers()), "what was written to")


def test_threads(x: Tensor) -> None:
    """Autocast's state belongs to a thread; so does the region around each call."""
    model = Net().eval()
    want = by_hand(model, x)
    compiled, found = ampgraph.compile(model, inner="eager"), []

    def work() -> None:
        for _ in range(3):
            found.append(compiled(x).detach())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12, "no thread failed"
    for out in found:
        assert_same(out, want)


def test_error_inside_the_model_reaches_the_caller(x: Tensor) -> None:
    def program(x: Tensor) -> Tensor:
        if x.shape[0] == 5:
            raise ValueError("five rows")
        return x @ x.T

    compiled = ampgraph.compile(program, inner="eager")
    with pytest.raises(ValueError, match="five rows"):
        compiled(x)
    assert not ambient(), "the region is left"
    assert compiled(x[:4]).dtype == BF16, "and the next call works"


class Broken(nn.Module):
    """A graph break between two layers: its forward is captured alone, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.l = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.k(x) @ x.T
        torch._dynamo.graph_break()
        out: Tensor = self.l(y @ x)
        return out


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.block, self.other = nn.Linear(4, 4), Broken(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.other(self.block(self.a(x)))
        return out


@pytest.mark.parametrize("match", ["block", "b*", Broken])
@pytest.mark.parametrize("door", ["compile", "backend"])
def test_a_rule_holds_where_the_graph_breaks_inside_its_module(match: Any, door: str) -> None:
    model, x = Around(), torch.randn(2, 4)
    policy = Policy.autocast("cpu").module(match, dtype=torch.float32)
    options: Any = {"inner": "eager", "policy": policy, "outputs": "autocast"}
    if door == "compile":
        compiled = ampgraph.compile(model, **options)
    else:
        options["dtype"] = "bf16"
        compiled = torch.compile(model, backend="ampgraph", options=options)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = model.a(x)
        with torch.autocast("cpu", enabled=False):
            y = model.block(y.float())
        want = model.other(y)
    if door == "compile":
        got = compiled(x)
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    compiled(x)
    rows = op_rows(compiled)
    inside = [r for r in rows if r.op in ("aten.linear", "aten.matmul")][1:-1]
    assert len(inside) == 4
    assert {r.dtype for r in inside} == {torch.float32}


def test_a_rule_for_one_of_many_broken_modules_is_told() -> None:
    model = nn.Sequential(Broken(), Broken())
    policy = Policy.autocast("cpu").module("1", dtype=torch.float32)
    with pytest.warns(AmpgraphWarning, match="breaks inside Broken"):
        ampgraph.compile(model, inner="eager", policy=policy)(torch.randn(2, 4))


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x


def test_a_class_rule_holds_for_the_compiled_module_itself() -> None:
    """Its class is in no node's stack; it is matched all the same, without a warning."""
    x = torch.randn(4, 4)
    policy = Policy.autocast("cpu").module(Square, dtype=FP32)
    assert_same(ampgraph.compile(Square(), inner="eager", policy=policy)(x), x @ x)


class Halves(nn.Module):
    """A break between two parts, the second of which is whole in a frame of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.block, self.c = nn.Linear(4, 4), Broken(), Net()

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(self.a(x))
        torch._dynamo.graph_break()
        out: Tensor = self.c(y)
        return out


def test_a_part_does_not_warn_of_rules_for_other_parts() -> None:
    policy = Policy.autocast("cpu").module("a", dtype=FP32)
    ampgraph.compile(Halves(), inner="eager", policy=policy)(torch.randn(4, 4))
