"""Weights that change in random ways and order, each call compared with fresh casts."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import Tensor, nn
from torch.nn.utils import parametrize, vector_to_parameters

import ampgraph
from support import assert_same, by_hand, weigh

LAYERS, MODELS = st.integers(0, 2), st.integers(0, 1)
SEEDS = st.integers(0, 99)


class Stack(nn.Module):
    """Linears of one shape, so that any may take another's place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Doubled(nn.Module):
    """A parametrization: the weight is then computed, and no parameter."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def plainly(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


def doubled(model: Any, x: Tensor) -> Tensor:
    return plainly(model, x) + plainly(model, x)


class DataSGD(torch.optim.Optimizer):
    """Writes through .data."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data.sub_(self.param_groups[0]["lr"] * p.grad)


class Weights(RuleBasedStateMachine):
    """Two models behind two callables, and everything that may happen to their weights."""

    def __init__(self) -> None:
        super().__init__()
        torch._dynamo.reset()
        self.models: list[Any] = [Stack(), Stack()]
        self.doors: list[Callable[[Any, Tensor], Tensor]] = [plainly, doubled]
        self.compiled = [
            ampgraph.compile(door, inner="eager", weight_copies=True) for door in self.doors
        ]
        self.flat = torch.zeros(0)
        self.pending: list[list[tuple[Tensor, list[Tensor]]]] = []

    @initialize(seed=SEEDS)
    def seeded(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.evaluate_all()

    def teardown(self) -> None:
        self.evaluate_all()

    @rule()
    def evaluate_all(self) -> None:
        for which in (0, 1):
            for door in (0, 1):
                self.evaluate(which, door)

    def weight(self, which: int, layer: int) -> Any:
        """A parameter, also where a parametrization has taken its name."""
        found = self.models[which].layers[layer]
        parametrized = parametrize.is_parametrized(found, "weight")
        return found.parametrizations.weight.original if parametrized else found.weight

    @rule(which=MODELS, door=MODELS)
    def evaluate(self, which: int, door: int) -> None:
        model, x = self.models[which], torch.randn(2, 3)
        with torch.no_grad():
            ours = self.compiled[door](model, x)
            assert_same(ours, by_hand(lambda x: self.doors[door](model, x), x))

    @rule(which=MODELS, door=MODELS)
    def train(self, which: int, door: int) -> None:
        """A forward now; its backward now or after other things have happened."""
        model, x = self.models[which], torch.randn(2, 3)
        params = [p for p in model.parameters() if p.requires_grad]
        ours = self.compiled[door](model, x)
        eager = by_hand(lambda x: self.doors[door](model, x), x)
        assert_same(ours.detach(), eager.detach())
        self.pending.append([(ours, params), (eager, params)])

    @rule()
    def go_back(self) -> None:
        """The gradients of an earlier forward, which are also what the optimizers use."""
        if self.pending:
            (ours, params), (eager, _) = self.pending.pop()
            params = [p for p in params if p.requires_grad]
            # A parametrization that is removed gives its tensor other memory and a new history.
            grads, want = (
                torch.autograd.grad(weigh(out), params, allow_unused=True) for out in (ours, eager)
            )
            assert_same(grads, want, "gradients")
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad

    @rule(which=MODELS, layer=LAYERS)
    def write_in_place(self, which: int, layer: int) -> None:
        with torch.no_grad():
            self.weight(which, layer).mul_(-1.25)

    @rule(which=MODELS, layer=LAYERS)
    def write_in_inference_mode(self, which: int, layer: int) -> None:
        with torch.inference_mode():
            self.weight(which, layer).t().add_(0.5)

    @rule(which=MODELS, layer=LAYERS, times=st.integers(1, 3))
    def set_data(self, which: int, layer: int, times: int) -> None:
        """Several times: an address may come back with other values."""
        for _ in range(times):
            self.weight(which, layer).data = torch.randn(3, 3)

    @rule(one=LAYERS, other=LAYERS)
    def swap_data(self, one: int, other: int) -> None:
        a, b = self.weight(0, one), self.weight(1, other)
        a.data, b.data = b.data, a.data

    @rule(which=MODELS, layer=LAYERS)
    def transpose(self, which: int, layer: int) -> None:
        weight = self.weight(which, layer)
        weight.data = weight.data.t()

    @rule(layer=LAYERS)
    def replace_layer(self, layer: int) -> None:
        self.models[1].layers[layer] = nn.Linear(3, 3)

    @rule(layer=LAYERS)
    def replace_parameter(self, layer: int) -> None:
        self.models[1].layers[layer].weight = nn.Parameter(torch.randn(3, 3))

    @rule(layer=LAYERS)
    def swap_parameters(self, layer: int) -> None:
        layers = self.models[1].layers
        layers[0].weight, layers[layer].weight = layers[layer].weight, layers[0].weight

    @rule(layer=LAYERS)
    def tie(self, layer: int) -> None:
        self.models[1].layers[layer].weight = self.weight(0, 1)

    @rule(assign=st.booleans())
    def load(self, assign: bool) -> None:
        state = {k: torch.randn_like(v) for k, v in self.models[0].state_dict().items()}
        self.models[0].load_state_dict(state, assign=assign)

    @rule(which=MODELS, there=st.sampled_from([torch.float64, torch.bfloat16]))
    def convert_and_back(self, which: int, there: torch.dtype) -> None:
        self.models[which].to(there)
        self.write_in_place(which, 0)
        self.models[which].to(torch.float32)

    @rule(which=MODELS, kind=st.sampled_from([torch.optim.SGD, torch.optim.AdamW, DataSGD]))
    def step(self, which: int, kind: Any) -> None:
        for p in self.models[which].parameters():
            p.grad = torch.randn_like(p) if p.grad is None else p.grad
        kind(self.models[which].parameters(), lr=0.1).step()

    @rule(which=MODELS, layer=LAYERS)
    def write_unseen(self, which: int, layer: int) -> None:
        weight = self.weight(which, layer)
        weight.data.copy_(torch.randn(3, 3))
        ampgraph.refresh(weight)

    @rule()
    def flatten(self) -> None:
        self.flat = torch.randn(36)
        vector_to_parameters(self.flat, self.models[1].parameters())

    @rule()
    def write_to_flat(self) -> None:
        self.flat.mul_(-1.25)

    @rule()
    def parametrize(self) -> None:
        layer = self.models[0].layers[0]
        if parametrize.is_parametrized(layer):
            parametrize.remove_parametrizations(layer, "weight")
        else:
            parametrize.register_parametrization(layer, "weight", Doubled())

    @rule()
    def freeze(self) -> None:
        weight = self.weight(0, 2)
        weight.requires_grad_(not weight.requires_grad)

    @rule()
    def copy_model(self) -> None:
        self.models[1] = copy.deepcopy(self.models[1])


def run(examples: int) -> None:
    """So many programs of at most 30 steps."""
    run_state_machine_as_test(
        Weights,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # shrinking would compile for minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_few_random_programs() -> None:
    run(25)


@pytest.mark.slow
def test_random_programs() -> None:
    run(500)
