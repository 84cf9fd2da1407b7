"""Programs whose answer could go wrong without a word, each kind compared with eager autocast."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ampgraph
from ampgraph.errors import OptionError
from ampgraph.pipeline import rewrite_graph
from ampgraph.policy import Policy
from ampgraph.state import AutocastState


def eager(run: Any, *args: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return run(*args)


def same(ours: Any, theirs: Any) -> None:
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)


MHA = functools.partial(nn.MultiheadAttention, 8, 2, batch_first=True)


def test_attention_to_another_sequence_is_not_self_attention() -> None:
    """torch asks `query is key`: tensors of one shape are still different tensors."""
    attend, project = MHA(), [nn.Linear(8, 8) for _ in range(3)]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attend(project[0](q), project[1](k), project[2](v))[0]
        return out

    args = [torch.randn(1, 4, 8) for _ in range(3)]
    same(ampgraph.compile(run, inner="eager")(*args), eager(run, *args))


def test_one_tensor_made_three_times_is_three_tensors() -> None:
    attend, x = MHA(), torch.randn(4, 8, requires_grad=True)

    def gradient(run: Any) -> Tensor:
        return torch.autograd.grad(run(x).float().square().sum(), x)[0]

    def run(x: Tensor) -> Tensor:
        out: Tensor = attend(x[None], x[None], x[None])[0]
        return out

    ours = ampgraph.compile(run, inner="eager")
    same(gradient(ours), gradient(lambda x: eager(run, x)))


@pytest.mark.parametrize("layer", [nn.TransformerDecoderLayer, nn.Transformer])
def test_decoders_attend_to_the_memory(layer: Any) -> None:
    sizes = (1, 1) if layer is nn.Transformer else ()
    model = layer(8, 2, *sizes, dim_feedforward=16, dropout=0.0, batch_first=True)
    args = (torch.randn(1, 4, 8), torch.randn(1, 4, 8))
    same(ampgraph.compile(model, inner="eager")(*args), eager(model, *args))


def test_gradients_enabled_inside_no_grad_are_summed_in_float32() -> None:
    """Casts are shared where no gradient flows, and the program may turn gradients on itself."""
    weight = torch.randn(8, 8, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = sum((F.linear(x * i, weight) for i in range(1, 17)), torch.zeros(()))
        return y

    def gradient(call: Any) -> Tensor:
        with torch.no_grad():
            out = call(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
        return torch.autograd.grad(out.float().sum(), weight)[0]

    same(gradient(ampgraph.compile(run, inner="eager")), gradient(lambda x: eager(run, x)))


@pytest.mark.parametrize("inplace", [nn.LeakyReLU(0.1, True), nn.Hardtanh(inplace=True)])
def test_a_write_by_position_is_seen(inplace: nn.Module) -> None:
    """`F.leaky_relu(x, 0.1, True)` writes into what a widening cast was folded away to."""
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)

    def run(x: Tensor) -> Tensor:
        y = linear(x)
        skip = y.float()
        inplace(y)
        out: Tensor = linear(skip)
        return out

    same(ampgraph.compile(run, inner="eager")(x), eager(run, x))


@pytest.mark.parametrize(
    ("op", "run"),
    [
        ("aten::linear", lambda x: F.linear(x, x)),
        ("aten::matmul", lambda x: x @ x.T),
    ],
)
def test_a_user_follow_rule_closes_a_composite(op: str, run: Any) -> None:
    """The ops inside have rules of their own, which must not overrule the user's."""
    policy, x = Policy.autocast("cpu").follow(op), torch.randn(3, 3)
    same(ampgraph.compile(run, policy=policy, inner="eager")(x), run(x))


class Trainer:
    """An object that holds a model."""

    def __init__(self, model: nn.Module) -> None:
        self.parts = {"model": [model]}

    def step(self, x: Tensor) -> Tensor:
        out: Tensor = self.parts["model"][0](x)
        return out


def called_with_default(x: Tensor, model: Any = None) -> Tensor:
    out: Tensor = model(x)
    return out


@pytest.mark.parametrize("held", ["method", "partial", "argument"])
def test_explain_finds_the_model_wherever_it_is_held(held: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(3, 4)
    run, args = {
        "method": (Trainer(model).step, (x,)),
        "partial": (functools.partial(called_with_default, model=model), (x,)),
        "argument": (called_with_default, (x, model)),
    }[held]
    ampgraph.explain(run, args, backward=True)
    assert model[1].num_batches_tracked == 0
    assert all(p.grad is None for p in model.parameters())


def test_explain_leaves_the_callers_autograd_graph_alone() -> None:
    leaf = torch.randn(3, 4, requires_grad=True)
    x = leaf.exp()
    ampgraph.explain(nn.Linear(4, 4), (x,), backward=True)
    assert leaf.grad is None
    x.sum().backward()
    assert leaf.grad is not None


def test_an_option_given_twice_is_refused() -> None:
    with pytest.raises(OptionError, match="given twice"):
        ampgraph.compile(nn.Linear(2, 2), dtype="fp16", options={"dtype": "bf16"})


def test_a_constant_is_as_it_was_before_the_capture_changed_its_shape() -> None:
    """Fake modes remember tensors: here with the shape that the captured program gave it."""
    gm, x = fx.Graph(), torch.randn(4)
    given = gm.placeholder("x")
    table = gm.get_attr("table")
    product = gm.call_function(F.linear, (given, table))
    gm.output((product, gm.call_method("unsqueeze_", (table, 0))))
    module = fx.GraphModule({"table": torch.randn(4, 4)}, gm)
    mode = FakeTensorMode()
    shape = mode.from_tensor(module.table)
    for node, value in ((given, mode.from_tensor(x)), (table, shape)):
        node.meta["example_value"] = value
    shape.unsqueeze_(0)
    state = AutocastState.of({"cpu": torch.bfloat16})
    done = rewrite_graph(module, policies={}, state=state, outputs="autocast", grad=False)
    out, again = done.after(x)
    assert (out.dtype, tuple(again.shape)) == (torch.bfloat16, (1, 4, 4))
