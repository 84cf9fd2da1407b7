"""torch.compile over a whole training step, scaler and all."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import optimizer as optim

from ampgraph import GradScaler
from scaler_runs import ours, theirs

# Dynamo's, about what follows a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

STEPS = 6
OVERFLOW = 2  # this step's input is infinite


@pytest.fixture(autouse=True)
def no_hooks_on_all_steps() -> Iterator[None]:
    """Such hooks, which weight copies register for good, end graphs in other places."""
    with (
        patch.dict(optim._global_optimizer_pre_hooks, clear=True),
        patch.dict(optim._global_optimizer_post_hooks, clear=True),
    ):
        yield


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def data(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    x, y = torch.randn(4, 8, generator=generator), torch.randn(4, 1, generator=generator)
    return (x * float("inf") if i == OVERFLOW else x), y


class Training:
    """A model, its optimizer, a scaler, and the step that users write."""

    def __init__(self, scaler: Any, optimizer: str, clipped: bool) -> None:
        self.model, self.scaler, self.clipped = model(), scaler, clipped
        make = getattr(torch.optim, optimizer)
        options = {"momentum": 0.9} if optimizer == "SGD" else {}
        self.optimizer = make(self.model.parameters(), lr=1e-2, **options)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = ((self.model(x) - y) ** 2).mean()
        if self.scaler is None:
            loss.backward()
            if self.clipped:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            return loss
        self.scaler.scale(loss).backward()
        if self.clipped and isinstance(self.scaler, GradScaler):
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        elif self.clipped:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


def graphs_and_breaks(training: Training, backend: Any, **options: Any) -> tuple[list[int], int]:
    """New graphs in each of the steps, and the graph breaks of all."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(training.step, backend=backend, **options)
    made = []
    for i in range(STEPS):
        before = counters["stats"]["unique_graphs"]
        compiled(*data(i))
        made.append(counters["stats"]["unique_graphs"] - before)
    return made, sum(counters["graph_break"].values())


@pytest.mark.parametrize("clipped", [False, True], ids=["plain", "clipped"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_like_eager_torch(optimizer: str, clipped: bool, inner: str) -> None:
    mine = Training(ours(growth_interval=2), optimizer, clipped)
    torchs = Training(theirs(growth_interval=2), optimizer, clipped)
    plain = Training(None, optimizer, clipped)
    options = {"inner": inner, "dtype": "ambient"}
    made, breaks = graphs_and_breaks(mine, "ampgraph", options=options)
    for i in range(STEPS):
        torchs.step(*data(i))
    _, plain_breaks = graphs_and_breaks(plain, "eager")
    assert sum(made[2:]) == 0, f"no recompile after the second step: {made}"
    assert breaks <= plain_breaks, "none beyond those of the step without a scaler"
    assert mine.scaler.get_scale() == torchs.scaler.get_scale() == 2.0**17
    assert mine.scaler.skipped_steps == 1
    torch.testing.assert_close(
        list(mine.model.parameters()), list(torchs.model.parameters()), rtol=1e-5, atol=2e-6
    )
