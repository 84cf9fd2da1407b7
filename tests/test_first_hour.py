"""What a new user does in the first hour works, or fails with node, source line and cure."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampgraph
import models
from ampgraph.errors import BannedOpError, OptionError
from support import (
    BF16,
    FP32,
    Net,
    assert_same,
    autocast,
    by_hand,
    counted,
    dtypes,
    gradients,
    ops,
)

# Dynamo's, about what it passes on after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def doors(model: nn.Module) -> list[Callable[[Tensor], Tensor]]:
    return [
        ampgraph.compile(model, inner="eager"),
        torch.compile(model, backend="ampgraph", options={"inner": "eager"}),
    ]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 4)


# --- a training step as it is usually written ---


def test_loss_outside_the_compiled_function(x: Tensor) -> None:
    model, target = Net(), torch.tensor([0, 1, 2, 0, 1])
    other = copy.deepcopy(model)
    compiled = ampgraph.compile(model, inner="eager")
    for _ in range(3):
        for net, call in ((model, compiled), (other, lambda x: by_hand(other, x))):
            net.zero_grad()
            F.cross_entropy(call(x).float(), target).backward()
            with torch.no_grad():
                for p in net.parameters():
                    assert p.grad is not None, "every parameter has a gradient"
                    p.sub_(0.1 * p.grad)
    assert_same(list(model.parameters()), list(other.parameters()), "parameters")
    assert_same(list(model.buffers()), list(other.buffers()), "buffers")


def test_plain_backend_returns_what_numpy_takes(x: Tensor) -> None:
    """The outputs keep the dtype that the code around a plain torch.compile expects."""
    compiled = torch.compile(Net().eval(), backend="ampgraph", options={"inner": "eager"})
    assert compiled(x).detach().numpy().dtype == "float32", "numpy has no bfloat16"
    assert ops(compiled)["aten.linear", BF16] == 2, "low inside"


def test_outputs_of_compile_are_autocasts_and_original_on_request(x: Tensor) -> None:
    assert ampgraph.compile(Net(), inner="eager")(x).dtype == BF16, "as under torch.autocast"
    plain = {"inner": "eager", "outputs": "original"}
    assert torch.compile(Net(), backend="ampgraph", options=plain)(x).dtype == FP32, "fp32 asked"


def test_graph_break_into_an_eager_linear(x: Tensor) -> None:
    head = nn.Linear(3, 2)
    eager_head = torch.compiler.disable(head)

    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            return eager_head(super().forward(x)).relu()  # type: ignore[no-any-return]

    model = Broken().eval()
    with autocast():
        want = head(Net.forward(model, x)).relu()
    assert_same(ampgraph.compile(model, inner="eager")(x), want, "the region covers the break")
    compiled = torch.compile(model, backend="ampgraph", options={"inner": "eager"})
    assert compiled(x).dtype == FP32, "eager code after a break meets the dtypes it expects"


def test_gradients_are_off_and_then_on(x: Tensor) -> None:
    model = Net()
    compiled = ampgraph.compile(model, inner="eager")
    with torch.autocast("cpu", dtype=BF16):
        with torch.no_grad():
            assert not compiled(x).requires_grad, "no gradient asked"
        compiled(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters()), "no cast without history is kept"


def test_inference_mode_then_training(x: Tensor) -> None:
    model = Net().eval()
    for call in doors(model):
        with torch.inference_mode():
            first = call(x)
        model.zero_grad()
        second = call(x.clone())
        second.sum().backward()
        assert_same(first.clone(), second.detach())
        assert model.a.weight.grad is not None, "trained after inference"


def test_eval_after_train(x: Tensor) -> None:
    model = Net()
    other = copy.deepcopy(model)
    compiled = ampgraph.compile(model, inner="eager")
    for mode in (True, False, True):
        model.train(mode)
        other.train(mode)
        assert_same(compiled(x), by_hand(other, x))
    assert_same(list(model.buffers()), list(other.buffers()), "buffers")


# --- forms of asking ---


def test_decorator(x: Tensor) -> None:
    @ampgraph.compile(dtype="bf16", inner="eager")
    def product(x: Tensor) -> Tensor:
        """A docstring."""
        return x @ x.T

    @ampgraph.compile
    def bare(x: Tensor) -> Tensor:
        return x

    assert product(x).dtype == BF16, "decorated"
    assert (product.__name__, product.__doc__) == ("product", "A docstring."), "it keeps its name"
    assert callable(bare), "the decorator without parentheses"

    @torch.compile(backend="ampgraph", options={"inner": "eager", "outputs": "autocast"})
    def other(x: Tensor) -> Tensor:
        return x @ x.T

    assert other(x).dtype == BF16, "torch.compile's decorator"


def test_module_compile_in_place(x: Tensor) -> None:
    model = Net().eval()
    want = by_hand(model, x)
    keys = list(model.state_dict())
    model.compile(backend="ampgraph", options={"inner": "eager"})  # type: ignore[no-untyped-call]
    assert_same(model(x), want.float())
    assert list(model.state_dict()) == keys, "a module compiled in place keeps its keys"
    assert ops(model)["aten.linear", BF16] == 2, "and is rewritten"


def test_method_of_a_module(x: Tensor) -> None:
    model = Net().eval()
    want = by_hand(model, x)
    model.forward = ampgraph.compile(model.forward, inner="eager")  # type: ignore[method-assign]
    assert_same(model(x), want)


@pytest.mark.parametrize("door", [0, 1])
def test_fullgraph_and_dynamic(door: int, x: Tensor) -> None:
    model = Net().eval()
    compiled = (
        ampgraph.compile(model, inner="eager", fullgraph=True, dynamic=True)
        if door == 0
        else torch.compile(
            model, backend="ampgraph", options={"inner": "eager"}, fullgraph=True, dynamic=True
        )
    )
    with counted() as found:
        for rows in (5, 7, 9, 2):
            got = compiled(x.repeat(2, 1)[:rows])
            assert_same(got.float(), by_hand(model, x.repeat(2, 1)[:rows]).float())
    assert found["graphs"] == 1, "one graph for all sizes"


def test_as_many_graphs_for_many_sizes_as_plain_torch_compile(x: Tensor) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(x @ w, -1)[:, : x.shape[0]].sum(0)

    sizes, counts = (3, 4, 5, 8, 2), []
    for compiled in (
        torch.compile(program, backend="eager"),
        ampgraph.compile(program, inner="eager"),
    ):
        with counted() as found:
            for n in sizes:
                compiled(torch.randn(n, 4), torch.randn(4, 9))
        counts.append(found["graphs"])
        torch._dynamo.reset()
    assert counts == [2, 2], "one static graph, one dynamic"


@pytest.mark.parametrize("how", ["forward", "module", "model"])
def test_generate(how: str) -> None:
    model, kwargs = models.gpt2()
    model.eval()
    model.config.use_cache = True  # type: ignore[union-attr]
    ids = kwargs["input_ids"][:, :4]
    ask = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with autocast():
        want = model.generate(ids, **ask)  # type: ignore[operator]
    subject: Any = model
    if how == "forward":
        subject.forward = ampgraph.compile(model.forward, inner="eager")
    elif how == "module":
        subject = ampgraph.compile(model, inner="eager")
    else:
        model.compile(backend="ampgraph", options={"inner": "eager"})  # type: ignore[no-untyped-call]
    assert subject.generate(ids, **ask).tolist() == want.tolist(), "the same greedy tokens"
    compiled = {"forward": model.forward, "module": subject, "model": model}[how]
    low = ops(compiled)["aten.addmm", BF16]
    assert (low > 0) == (how != "module"), "a method of a compiled module calls the module itself"


# --- errors ---


def test_banned_op_names_node_line_and_cure(x: Tensor) -> None:
    def program(x: Tensor, t: Tensor) -> Tensor:
        return F.binary_cross_entropy(torch.sigmoid(x @ x.T), t)

    t = torch.rand(5, 5)
    with autocast():
        want = program(x, t)
    assert_same(ampgraph.compile(program, inner="eager")(x, t), want, "fp32 on the CPU's list")
    banned = ampgraph.compile(program, policy=ampgraph.Policy.autocast("cuda"), inner="eager")
    with pytest.raises(Exception, match="binary_cross_entropy") as caught:
        banned(x, t)
    told = str(caught.value)
    for part in ("node", "test_first_hour.py", "F.binary_cross_entropy(", "cure:", "with_logits"):
        assert part in told, f"{part!r} should be in: {told}"
    kinds = [type(e) for e in (caught.value, caught.value.__cause__)]
    assert any("BannedOpError" in told or issubclass(k, BannedOpError) for k in kinds), kinds
    policy = ampgraph.Policy.autocast("cuda").deny("aten::binary_cross_entropy")
    assert ampgraph.compile(program, policy=policy, inner="eager")(x, t).dtype == FP32, "the cure"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dtpye": "bf16"}, "did you mean dtype"),
        ({"dtype": "fp8"}, "torch.bfloat16, torch.float16"),
        ({"dtype": FP32}, "float32 needs no mixed precision"),
        ({"inner": "inductr"}, "inductor"),
        ({"inner": "ampgraph"}, "twice"),
        ({"outputs": "fp32"}, "'autocast', 'original'"),
        ({"policy": 3}, "ampgraph.Policy"),
        ({"mode": "fast"}, "reduce-overhead"),
        ({"mode": "max-autotune", "inner": "eager"}, "is Inductor's"),
    ],
)
def test_bad_options_list_the_valid_ones(options: dict[str, Any], told: str, x: Tensor) -> None:
    unknown = {k: options.pop(k) for k in list(options) if k == "dtpye"}
    with pytest.raises(OptionError, match=told):
        ampgraph.compile(Net(), options=unknown, **options)
    compiled = torch.compile(Net(), backend="ampgraph", options={**unknown, **options})
    with pytest.raises(Exception, match=told):
        compiled(x)


def test_mixed_dtypes_that_autocast_refuses_are_mended(x: Tensor) -> None:
    lin = nn.Linear(4, 3)

    def program(x: Tensor, index: Tensor) -> Tensor:
        return torch.zeros(2, 3).scatter_add(0, index[:, None].expand(-1, 3), lin(x))

    index = torch.tensor([0, 1, 1, 0, 1])
    with pytest.raises(RuntimeError, match="dtype"):
        by_hand(lambda x: program(x, index), x)  # type: ignore[arg-type]
    compiled = ampgraph.compile(program, inner="eager")
    with pytest.warns(
        ampgraph.errors.AmpgraphWarning,
        match="mends it: scatter_add at .*py:[0-9]+: return torch.zeros",
    ):
        out = compiled(x, index)
    want, _ = gradients(lambda: program(x, index), list(lin.parameters()))
    got, grads = gradients(lambda: compiled(x, index), list(lin.parameters()))
    assert dtypes([out, got, grads]) == [FP32] * 4, "promoted, and differentiable"
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
