"""Training with torch's scaler and with ours, on the same gradients."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import ampgraph

SHAPES = ((3, 4), (4,), (2, 2, 2), (1,))
SPECIAL = (float("inf"), float("-inf"), float("nan"), 1e-42, 3e38, 0.0)

Scaler = torch.amp.GradScaler  # ours is one
MakeOptimizer = Callable[[Sequence[nn.Parameter]], Optimizer]


def ours(**options: Any) -> ampgraph.GradScaler:
    """Our scaler; the step's graph runs as it is, for what Inductor makes of it has own tests."""
    return ampgraph.GradScaler("cpu", **{"inner": "eager", **options})


def theirs(**options: Any) -> Scaler:
    return torch.amp.GradScaler("cpu", **options)


def parameters(seed: int = 0) -> list[nn.Parameter]:
    """Always the same ones for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(seed: int, special: float | None = None) -> list[Tensor]:
    """A step's gradients before scaling; one element of one of them may be special."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if special is not None:
        found[seed % len(found)].view(-1)[0] = special
    return found


def backward(scaler: Scaler, params: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> None:
    """Scale a loss whose gradients are `grads`, and accumulate."""
    loss = torch.stack([(p * g).sum() for p, g in zip(params, grads, strict=True)]).sum()
    scaler.scale(loss).backward()


def specials(seed: int, steps: int, share: float) -> Iterator[float | None]:
    """For each step, whether something special happens, and what."""
    rng = Random(seed)
    for _ in range(steps):
        yield rng.choice(SPECIAL) if rng.random() < share else None


@dataclass
class Trajectory:
    """What a training run went through."""

    scales: list[float] = field(default_factory=list[float])
    stepped: list[bool] = field(default_factory=list[bool])
    norms: list[float] = field(default_factory=list[float])
    params: list[list[Tensor]] = field(default_factory=list[list[Tensor]])


def clip(scaler: Scaler, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> Tensor:
    """Clip to norm 1, as each scaler's users do."""
    if isinstance(scaler, ampgraph.GradScaler):
        return scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.unscale_(optimizer)
    return torch.nn.utils.clip_grad_norm_(params, 1.0)


def train(
    scaler: Scaler,
    make: MakeOptimizer,
    stream: Sequence[float | None],
    clipped: bool = False,
    accumulate: int = 1,
) -> Trajectory:
    """One step for each element of the stream."""
    params, found = parameters(), Trajectory()
    optimizer = make(params)
    for i, special in enumerate(stream):
        optimizer.zero_grad()
        for micro in range(accumulate):
            backward(scaler, params, gradients(i * accumulate + micro, special))
        if clipped:
            found.norms.append(float(clip(scaler, optimizer, params)))
        before = [p.detach().clone() for p in params]
        scaler.step(optimizer)
        scaler.update()
        found.scales.append(scaler.get_scale())
        found.stepped.append(
            any(not torch.equal(a, b) for a, b in zip(before, params, strict=True))
        )
        found.params.append([p.detach().clone() for p in params])
    return found


class Reads(TorchDispatchMode):
    """Counts how often the device is read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def state_of(optimizer: Optimizer) -> list[Tensor]:
    """Copies of every tensor in the optimizer's state, and of its parameters."""
    held = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in [*held, *parameters_of(optimizer)]]


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class OfAUser(Optimizer):
    """What optimizers of users have in common."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def with_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters that have a gradient, each with it."""
        return [(p, p.grad) for p in parameters_of(self) if p.grad is not None]
