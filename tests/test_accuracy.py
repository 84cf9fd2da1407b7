"""Through Inductor, models are as near to float64 as eager autocast is, forward and backward."""

import copy
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampgraph
import models
from models import Program, tensors_of
from support import autocast, weigh

SEEDS = range(5)
QUICK = (models.resnet, models.unet, models.moe)
SLOW = [model for model in models.MODELS if model not in QUICK]

pytestmark = [
    # Dynamo's, about the models' own code and about what follows a graph break.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def traced_rnn() -> Iterator[None]:
    """nn.GRU is traced only on request."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


def step(model: nn.Module, call: Callable[..., Any], kwargs: dict[str, Tensor]) -> list[Tensor]:
    """All outputs in one vector, all gradients in another, in float64."""
    model.zero_grad()
    outputs = tensors_of(call(**kwargs))
    weigh(outputs).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [
        torch.cat([t.detach().double().flatten() for t in group]) for group in (outputs, gradients)
    ]


def exact(program: Program) -> list[Tensor]:
    model, kwargs = copy.deepcopy(program)
    wide = {k: t.double() if t.is_floating_point() else t for k, t in kwargs.items()}
    return step(model.double(), model, wide)


def eager(program: Program) -> list[Tensor]:
    model, kwargs = copy.deepcopy(program)

    def call(**kwargs: Tensor) -> Any:
        with autocast():
            return model(**kwargs)

    return step(model, call, kwargs)


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    pairs = zip(found, wanted, strict=True)
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


def check(build: Callable[[], Program]) -> None:
    """The median of five seeds, for outputs and for gradients; compiled once."""
    model, _ = build()
    compiled = ampgraph.compile(model)
    ours, theirs = [], []
    for seed in SEEDS:
        torch.manual_seed(seed)
        program = build()
        model.load_state_dict(program[0].state_dict())
        wanted = exact(program)
        ours.append(errors(step(model, compiled, program[1]), wanted))
        theirs.append(errors(eager(program), wanted))
    for what, mine, eagers in zip(
        ("outputs", "gradients"), zip(*ours, strict=True), zip(*theirs, strict=True), strict=True
    ):
        here, there = statistics.median(mine), statistics.median(eagers)
        assert 0 < here <= 1.1 * there, f"{what}: {here:.3g} against eager autocast's {there:.3g}"


@pytest.mark.parametrize("build", QUICK, ids=lambda f: f.__name__)
def test_small_models(build: Callable[[], Program]) -> None:
    check(build)


@pytest.mark.slow
@pytest.mark.parametrize("build", SLOW, ids=lambda f: f.__name__)
def test_larger_models(build: Callable[[], Program]) -> None:
    check(build)
