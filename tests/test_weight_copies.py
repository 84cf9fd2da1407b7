"""Weight copies: every way a weight can change, against fresh casts; what is cast as usual."""

import copy
import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, vector_to_parameters
from torch.utils.checkpoint import checkpoint

import ampgraph
from ampgraph import copies
from ampgraph.backend import records_of
from ampgraph.errors import OptionError, StaleCopyError
from ampgraph.graph import captured
from ampgraph.internals.tensors import storage_address
from support import BF16, FP16, assert_same, autocast, by_hand, counted, gradients, weigh

INNER = ("eager", "aot_eager", "inductor")


class Mlp(nn.Module):
    """Two linears of equal shape, so that their weights can be swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x).relu())
        return out


class DataSGD(torch.optim.Optimizer):
    """Writes through .data, which moves neither version nor address."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        seen = []
        for _ in range(2):
            seen += [closure()] if closure is not None else []
            for p in self.param_groups[0]["params"]:
                p.data.sub_(0.5 * (1.0 if p.grad is None else p.grad))
        return [*seen, closure()] if closure is not None else None


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 4)


@pytest.fixture
def renewed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many copies each multi-tensor cast made, in order."""
    seen: list[int] = []
    real = copies.cast_

    def counting(to: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        seen.append(len(to))
        real(to, tensors)

    monkeypatch.setattr(copies, "cast_", counting)
    return seen


def like_eager(compiled: Any, run: Any, x: Tensor, leaves: list[Tensor]) -> None:
    """Outputs, and gradients where there are leaves."""
    with torch.set_grad_enabled(bool(leaves)):
        if leaves:
            got: Any = gradients(lambda: compiled(x), leaves)
            want: Any = gradients(lambda: by_hand(run, x), leaves)
        else:
            got, want = compiled(x), by_hand(run, x)
    assert_same(got, want)


def with_copies(model: Any, **options: Any) -> Any:
    return ampgraph.compile(model, **{"inner": "eager", "weight_copies": True, **options})


def notes(compiled: Any) -> str:
    return "\n".join(note for report in ampgraph.reports(compiled) for note in report.notes)


def copied(compiled: Any) -> int:
    """How many casts the copies stand in for, in all graphs."""
    return sum(report.casts.copied for report in ampgraph.reports(compiled))


def addresses(model: nn.Module) -> list[int]:
    """Of the copies of a model's parameters."""
    found = [c.low for p in model.parameters() for c in copies.STORE.of(p)]
    return [storage_address(low) for low in found if low is not None]


def backward(model: nn.Module, x: Tensor) -> Tensor:
    """Gradients of eager autocast."""
    model.zero_grad()
    loss = weigh(by_hand(model, x))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def stepping(kind: Any, **options: Any) -> Callable[[Any, Tensor], None]:
    """One step of an optimizer."""

    def write(model: Any, x: Tensor) -> None:
        backward(model, x)
        kind(model.parameters(), **options).step(lambda: backward(model, x))

    return write


@torch.no_grad()
def in_place(model: Any, x: Tensor) -> None:
    model.a.weight.mul_(2)


@torch.inference_mode()
def in_inference_mode(model: Any, x: Tensor) -> None:
    model.a.weight.mul_(2)


@torch.no_grad()
def through_a_view(model: Any, x: Tensor) -> None:
    model.a.weight.t()[1].add_(3)
    model.b.bias.detach()[:2] = 4


def through_init(model: Any, x: Tensor) -> None:
    nn.init.uniform_(model.a.weight, 1, 2)


def loading(model: Any, x: Tensor) -> None:
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})


def loading_by_assignment(model: Any, x: Tensor) -> None:
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)


def through_the_state_dict(model: Any, x: Tensor) -> None:
    model.state_dict()["a.weight"].add_(1)


def setting_data(model: Any, x: Tensor) -> None:
    model.a.weight.data = model.a.weight.data + 1


def setting_data_to_freed_memory(model: Any, x: Tensor) -> None:
    """The allocator is likely to give the second tensor the memory of the first."""
    model.a.weight.data = torch.zeros(4, 4)
    model.a.weight.data = torch.randn(4, 4)


def swapping_data(model: Any, x: Tensor) -> None:
    a, b = model.a.weight, model.b.weight
    a.data, b.data = b.data, a.data


def transposing_data(model: Any, x: Tensor) -> None:
    model.a.weight.data = model.a.weight.data.t()


def setting_the_storage(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        model.a.weight.set_(torch.randn(4, 4))


def replacing_a_parameter(model: Any, x: Tensor) -> None:
    model.a.weight = nn.Parameter(torch.randn(4, 4))


def replacing_a_module(model: Any, x: Tensor) -> None:
    model.a = nn.Linear(4, 4)


def swapping_parameters(model: Any, x: Tensor) -> None:
    model.a.weight, model.b.weight = model.b.weight, model.a.weight


def to_double_and_back(model: Any, x: Tensor) -> None:
    model.double()
    with torch.no_grad():
        model.a.weight.add_(1)
    model.float()


def tying(model: Any, x: Tensor) -> None:
    model.b.weight = model.a.weight
    with torch.no_grad():
        model.b.weight.add_(1)


def from_a_vector(model: Any, x: Tensor) -> None:
    """Afterwards every parameter is a part of one tensor, through which it may be written."""
    flat = torch.randn(40)
    vector_to_parameters(flat, model.parameters())


def scaled_step(model: Any, x: Tensor) -> None:
    """A step captured as a graph, which predicates every write."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = ampgraph.GradScaler("cpu", init_scale=4.0, inner="aot_eager")
    scaler.scale(weigh(by_hand(model, x))).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()


def compiled_step(model: Any, x: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    backward(model, x)
    torch.compile(lambda: optimizer.step(), backend="aot_eager")()


def compiled_write(model: Any, x: Tensor) -> None:
    @torch.no_grad()
    def double(weight: Tensor) -> None:
        weight.mul_(2)

    torch.compile(double, backend="aot_eager")(model.a.weight)


VISIBLE = (
    in_place,
    in_inference_mode,
    through_a_view,
    through_init,
    loading,
    loading_by_assignment,
    through_the_state_dict,
    setting_data,
    setting_data_to_freed_memory,
    swapping_data,
    transposing_data,
    setting_the_storage,
    replacing_a_parameter,
    replacing_a_module,
    swapping_parameters,
    to_double_and_back,
    tying,
    from_a_vector,
    scaled_step,
    compiled_step,
    compiled_write,
)
OPTIMIZERS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (DataSGD, {}),
    (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "fused": True}),
    (torch.optim.Adam, {"lr": 0.1, "foreach": False}),
    (torch.optim.RMSprop, {"lr": 0.1, "foreach": True}),
    (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 2}),
)
WAYS = {way.__name__: way for way in VISIBLE} | {
    "-".join([kind.__name__, *options]): stepping(kind, **options) for kind, options in OPTIMIZERS
}


@pytest.mark.parametrize("name", WAYS)
def test_visible_writes_are_seen(name: str, x: Tensor) -> None:
    """Twice, in training and in evaluation, each compiled before."""
    model = Mlp()
    compiled = with_copies(model)
    before = compiled(x)
    with torch.no_grad():
        assert_same(compiled(x), before)
    for _ in range(2):
        WAYS[name](model, x)
        with torch.no_grad():
            now = compiled(x)
        assert_same(now, by_hand(model, x).detach())
        assert_same(compiled(x), by_hand(model, x))
        assert name == "transposing_data" or not torch.equal(now, before), "a change that shows"
        before = now


@pytest.mark.parametrize("inner", INNER)
def test_training_and_evaluation_are_bit_equal(inner: str, x: Tensor, renewed: list[int]) -> None:
    """Two micro-batches a step; one renewal a step, for training and evaluation together."""
    ours, theirs = Mlp(), Mlp()
    theirs.load_state_dict(ours.state_dict())
    compiled = with_copies(ours, inner=inner)
    plain = ampgraph.compile(theirs, inner=inner)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, theirs)]
    for _ in range(3):
        for model, optimizer in zip((compiled, plain), optimizers, strict=True):
            optimizer.zero_grad()
            for batch in (x, x + 1):
                weigh(model(batch)).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                model(x)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_same(p.grad, q.grad, "gradients")
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            assert_same(compiled(x), plain(x))
    assert renewed == [4] * 4, "once at first, and once after each step"


def test_gradients_equal_those_of_eager_autocast(x: Tensor) -> None:
    model = Mlp()
    like_eager(with_copies(model), model, x, [*model.parameters(), x.requires_grad_()])
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_double_backward(x: Tensor) -> None:
    model = Mlp()
    compiled = with_copies(model)

    def penalty(run: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(run().float().square().sum(), model.a.weight, create_graph=True)
        return torch.autograd.grad(grads[0].square().sum(), [model.a.weight, model.b.weight])

    assert_same(penalty(lambda: compiled(x)), penalty(lambda: by_hand(model, x)))


@pytest.mark.parametrize("inner", INNER)
def test_an_earlier_forward_keeps_what_it_read(inner: str, x: Tensor) -> None:
    """Backward after the weights have changed and another forward ran: as with casts."""
    model = Mlp()
    compiled = with_copies(model, inner=inner)
    grads = []
    for forward in (compiled, ampgraph.compile(model, inner=inner)):
        first = forward(x)
        with torch.no_grad():
            model.b.weight.mul_(2)
        forward(x)
        model.zero_grad()
        weigh(first).backward()  # type: ignore[no-untyped-call]
        grads.append([p.grad for p in model.parameters()])
        with torch.no_grad():
            model.b.weight.div_(2)
    assert_same(grads[0], grads[1])


def test_addresses_are_stable(x: Tensor) -> None:
    """CUDA graphs rely on it; the inputs say so, too."""
    model = Mlp()
    compiled = with_copies(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(3):
        loss = weigh(compiled(x))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            compiled(x)
        seen.append(addresses(model))
    assert len(seen[0]) == 4
    assert seen[0] == seen[1] == seen[2]
    graph = records_of(compiled)[0].rewritten.after.graph
    new = [n for n in graph.nodes if n.op == "placeholder"][-4:]
    assert all(n.meta["tensor_dict"]["_dynamo_static_input_type"] for n in new)
    assert all(captured(n).dtype == BF16 for n in new)


def test_forward_within_a_step_that_writes_through_data(x: Tensor) -> None:
    model = Mlp()
    compiled = with_copies(model)
    compiled(x)
    pairs = DataSGD(model.parameters()).step(
        lambda: (compiled(x).detach(), by_hand(model, x).detach())
    )
    assert len(pairs) == 3
    for ours, eager in pairs:
        assert_same(ours, eager)
    assert not torch.equal(pairs[0][0], pairs[2][0])


def test_a_step_of_others_renews_nothing(x: Tensor, renewed: list[int]) -> None:
    model, other = Mlp(), Mlp()
    compiled = with_copies(model)
    compiled(x)
    stepping(DataSGD)(other, x)
    compiled(x)
    assert renewed == [4]


def test_shared_by_callables_and_dtypes(x: Tensor, renewed: list[int]) -> None:
    """Two callables and a function share copies; another dtype has its own."""
    model = Mlp()
    first, second = with_copies(model), with_copies(model, policy=ampgraph.Policy.autocast("cuda"))
    head = with_copies(lambda x: model.b(x))
    low = with_copies(model, dtype=FP16)
    for forward in (first, second, head, low):
        forward(x)
    assert renewed == [4, 4]
    in_place(model, x)
    assert_same(second(x), by_hand(model, x))
    with autocast(FP16):
        want = model(x)
    assert_same(low(x), want)
    assert_same(head(x), by_hand(model.b, x))
    assert_same(first(x), by_hand(model, x))
    assert renewed == [4, 4, 1, 1]


def test_one_graph_serves_two_models(x: Tensor) -> None:
    """Dynamo reuses the graph of a class: the copies are those of the parameters handed in."""
    blocks = [Mlp(), Mlp(), Mlp()]

    def run(i: int) -> Any:
        return forward(blocks[i], x)

    forward = with_copies(lambda block, x: block(x))
    with counted() as found:
        for i in (0, 1, 2, 0, 1, 2):
            assert_same(run(i), by_hand(blocks[i], x))
            in_place(blocks[i], x)
    assert found["graphs"] == 1


def test_no_recompile_when_a_weight_changes(x: Tensor) -> None:
    model = Mlp()
    compiled = with_copies(model)
    compiled(x)
    ways = (in_place, loading, setting_data, swapping_parameters, WAYS["DataSGD"], scaled_step)
    for way in ways:
        way(model, x)
        with counted() as found:
            compiled(x)
        assert found["graphs"] == 0, way.__name__


def test_threads(x: Tensor) -> None:
    """Callers in many threads, a writer between the rounds."""
    model = Mlp()
    compiled = with_copies(model)
    compiled(x)
    wrong: list[int] = []
    for turn in range(10):
        in_place(model, x)
        want = by_hand(model, x)

        def call(turn: int = turn, want: Tensor = want) -> None:
            if not torch.equal(compiled(x), want):
                wrong.append(turn)

        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_dropped_with_the_model(x: Tensor) -> None:
    """Also where Dynamo keeps the graph."""
    model = Mlp()
    forward = with_copies(lambda model, x: model(x))
    forward(model, x)
    held = [c for p in model.parameters() for c in copies.STORE.of(p)]
    assert all(c.low is not None for c in held)
    del model
    gc.collect()
    assert all(c.low is None for c in held)


def test_deepcopy_has_copies_of_its_own(x: Tensor) -> None:
    model = Mlp()
    compiled = with_copies(model)
    compiled(x)
    other = copy.deepcopy(compiled)
    in_place(other, x)
    assert_same(other(x), by_hand(other._orig_mod, x))
    assert_same(compiled(x), by_hand(model, x))
    assert not {*addresses(model)} & {*addresses(other)}


def numpy_alias(model: Any, x: Tensor) -> None:
    model.a.weight.detach().numpy()[:] += 1


def data_copy(model: Any, x: Tensor) -> None:
    model.a.weight.data.copy_(torch.ones(4, 4))


INVISIBLE = (numpy_alias, data_copy)


@pytest.mark.parametrize("way", INVISIBLE)
def test_invisible_writes_need_refresh(way: Callable[[Any, Tensor], None], x: Tensor) -> None:
    model = Mlp()
    compiled = with_copies(model)
    compiled(x)
    for target in (compiled, model, model.a.weight, [model.a.weight], model.a.parameters()):
        before = by_hand(model, x)
        way(model, x)
        assert_same(compiled(x), before)  # if this fails, one write more is visible: say so
        ampgraph.refresh(target)
        assert_same(compiled(x), by_hand(model, x))
        in_place(model, x)
        compiled(x)


@pytest.mark.parametrize("way", INVISIBLE)
def test_verify_finds_invisible_writes(way: Callable[[Any, Tensor], None], x: Tensor) -> None:
    model = Mlp()
    compiled = with_copies(model, weight_copies="verify")
    assert_same(compiled(x), by_hand(model, x))
    way(model, x)
    with pytest.raises(
        StaleCopyError, match=r"a\.weight was written.*\n  cure: call ampgraph\.ref"
    ):
        compiled(x)
    ampgraph.refresh(model)
    assert_same(compiled(x), by_hand(model, x))


def test_verify_is_quiet_about_visible_writes(x: Tensor) -> None:
    model = Mlp()
    compiled = with_copies(model, weight_copies="verify")
    for way in (in_place, setting_data, WAYS["AdamW-lr"], loading, transposing_data, from_a_vector):
        assert_same(compiled(x), by_hand(model, x))
        way(model, x)
    with torch.no_grad():
        model.a.weight[0, 0] = float("nan")
    assert compiled(x).isnan().any()


def test_verify_looks_at_every_element() -> None:
    """A part in each call: a write to one element anywhere is found within 64 calls."""
    model = nn.Linear(300, 300, bias=False)
    compiled = with_copies(model, weight_copies="verify")
    x = torch.randn(1, 300)
    for place in (0, 44_999, 89_999):
        compiled(x)
        model.weight.detach().numpy().reshape(-1)[place] += 1
        with pytest.raises(StaleCopyError):
            all(compiled(x) is not None for _ in range(64))
        ampgraph.refresh(model)


def test_caller_without_a_cast_cache(x: Tensor, renewed: list[int]) -> None:
    """`cache_enabled=False` asks for casts in each call; the same graphs serve both."""
    model = Mlp()
    compiled = with_copies(model)
    compiled(x)
    with torch.autocast("cpu", dtype=BF16, cache_enabled=False):
        data_copy(model, x)
        assert_same(compiled(x), by_hand(model, x))
    with torch.autocast("cpu", dtype=BF16):
        ampgraph.refresh(model)
        assert_same(compiled(x), by_hand(model, x))
    assert renewed == [4, 4]


def test_caller_without_a_cast_cache_at_the_other_door(x: Tensor, renewed: list[int]) -> None:
    model = Mlp()
    options = {"inner": "eager", "weight_copies": True}
    compiled = torch.compile(model, backend="ampgraph", options=options)
    with torch.autocast("cpu", dtype=BF16, cache_enabled=False):
        assert_same(compiled(x), by_hand(model, x))
    assert renewed == []
    assert "not used while the caller's torch.autocast has cache_enabled=False" in notes(compiled)
    with torch.autocast("cpu", dtype=BF16):
        assert_same(compiled(x), by_hand(model, x))
    assert renewed == [4]


def test_report_shows_the_memory(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(4, 1000), nn.Linear(1000, 4, bias=False))
    compiled = with_copies(model)
    compiled(x)
    for report in (*ampgraph.reports(compiled), ampgraph.explain(compiled, (x,))):
        assert [read.name for read in report.copies] == ["0.bias", "0.weight", "1.weight"]
        assert sum(read.bytes for read in report.copies) == 2 * 9000
        assert "3 read from weight copies (3 tensors, 0.0 MB)" in report.summary()
        casts = report.casts
        assert (casts.inserted, casts.removed, casts.left, casts.copied) == (4, 0, 1, 3)
        assert "still cast in each call: args[0] (not a parameter)" in "\n".join(report.notes)


def test_options() -> None:
    with pytest.raises(OptionError, match="weight_copies='yes'"):
        ampgraph.compile(Mlp(), weight_copies="yes")  # type: ignore[arg-type]
    assert not ampgraph.reports(ampgraph.compile(Mlp(), inner="eager"))


# What is cast as usual.


def assert_cast_as_usual(model: Any, x: Any, why: str, copies: int = 0) -> Any:
    compiled = with_copies(model)
    for _ in range(2):
        assert_same(compiled(x), by_hand(model, x))
    assert copied(compiled) == copies
    assert why in notes(compiled)
    return compiled


def test_inference_tensors(x: Tensor) -> None:
    with torch.inference_mode():
        model = Mlp()
        compiled = assert_cast_as_usual(model, x, "a.weight, b.bias, b.weight (an inference tensor")
        model.a.weight.mul_(2)
        assert_same(compiled(x), by_hand(model, x))


def test_parameters_that_fsdp_gathers(x: Tensor) -> None:
    """It writes them anew without a version; these two attributes tell Dynamo of it."""
    model: Any = Mlp()
    for module in model.modules():
        module._is_fsdp_managed_module = module._fsdp_use_orig_params = True
    assert_cast_as_usual(model, x, "(FullyShardedDataParallel gathers it for each use)")


def test_flattened_parameters(x: Tensor, renewed: list[int]) -> None:
    model = Mlp()
    flat = torch.randn(40)
    vector_to_parameters(flat, model.parameters())
    compiled = with_copies(model)
    for _ in range(2):
        assert_same(compiled(x), by_hand(model, x))
        flat.mul_(1.5)
    assert renewed == []


def test_parameters_with_the_same_memory(x: Tensor) -> None:
    """An old way of tying: a write to one moves the other's values and not its version."""
    model = Mlp()
    model.b.weight.data = model.a.weight.data
    compiled = with_copies(model)
    for _ in range(2):
        assert_same(compiled(x), by_hand(model, x))
        in_place(model, x)


def test_buffers_and_what_is_computed(x: Tensor) -> None:
    class WithBuffer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Buffer(torch.randn(4, 4))
            self.lin: Any = parametrizations.weight_norm(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.lin(x @ self.weight)
            return out

    model: Any = WithBuffer()
    compiled = assert_cast_as_usual(model, x, "(not a parameter)", copies=1)
    with torch.no_grad():
        model.lin.parametrizations.weight.original0.mul_(2)
        model.weight.mul_(2)
    assert_same(compiled(x), by_hand(model, x))


def test_parametrized_after_the_first_call(x: Tensor) -> None:
    model: Any = Mlp()
    compiled = with_copies(model)
    compiled(x)
    parametrizations.weight_norm(model.a)
    assert_same(compiled(x), by_hand(model, x))
    with torch.no_grad():
        model.a.parametrizations.weight.original0.mul_(2)
    assert_same(compiled(x), by_hand(model, x))


def test_a_graph_that_writes_to_the_parameter(x: Tensor) -> None:
    """The other parameters of the graph are copied; in-place ops on activations do not count."""

    class Writes(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x).relu_()
            with torch.no_grad():
                self.a.weight.data.mul_(1.01)
            out: Tensor = self.b(hidden) + nn.functional.linear(x, self.a.weight)
            return out

    ours, theirs = Writes(), Writes()
    theirs.load_state_dict(ours.state_dict())
    compiled = with_copies(ours)
    for _ in range(3):
        assert_same(compiled(x), by_hand(theirs, x))
    assert copied(compiled) == 3
    assert "a.weight (the graph may write to it)" in notes(compiled)


def test_bodies_of_higher_order_ops(x: Tensor) -> None:
    model = Mlp()

    def run(x: Tensor) -> Any:
        return model.b(checkpoint(model.a, x, use_reentrant=False))

    compiled = assert_cast_as_usual(run, x, "(cast in the body of a higher-order op)", copies=2)
    with torch.no_grad():
        model.a.weight.mul_(2)
    assert_same(compiled(x), by_hand(run, x))


def test_an_op_that_hands_the_copy_on(x: Tensor) -> None:
    """It would give the caller the copy itself, to write to."""
    weight = nn.Parameter(torch.ones(4))
    policy = ampgraph.Policy.autocast("cpu").allow(torch.dropout).allow(torch.mul)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.dropout(weight, 0.5, False), x * weight

    compiled = with_copies(run, policy=policy)
    with torch.no_grad():
        for _ in range(2):
            itself, product = compiled(x)
            assert itself.dtype == BF16
            assert_same(product, x.to(BF16))
            itself.zero_()
    assert "dropout may hand it on or write to it" in notes(compiled)


def test_views_between_parameter_and_cast(x: Tensor) -> None:
    model = Mlp()

    def run(x: Tensor) -> Tensor:
        weight = model.b.weight[1:3]
        return (x @ model.a.weight.t()) @ weight.transpose(0, 1) + x @ model.b.weight[:, :2]

    for leaves in ([model.a.weight, model.b.weight], []):
        compiled = with_copies(run)
        for _ in range(2):
            like_eager(compiled, run, x, leaves)
            in_place(model, x)
        assert copied(compiled) == 2
        assert "looked at in a way that a copy would not" in notes(compiled)


def test_inside_a_transform(x: Tensor) -> None:
    model = Mlp()

    def run(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: model(x).float().sum())(x)

    compiled = with_copies(run)
    assert_same(compiled(x), by_hand(run, x))
    assert copied(compiled) == 0


def test_frozen_parameters_and_no_grad_inside(x: Tensor) -> None:
    model = Mlp()
    model.a.requires_grad_(False)

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            first = model(x)
        return first + model(x)

    compiled = with_copies(run)
    like_eager(compiled, run, x, [model.b.weight, model.b.bias])
    assert copied(compiled) == 6, "of frozen parameters both calls share a cast"
    model.a.requires_grad_(True)
    like_eager(compiled, run, x, list(model.parameters()))
