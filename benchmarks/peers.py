"""Who is measured: the ways a user has to run a model, each a function from a program to a call.

A call does one inference, or one whole training step (forward, backward, unscale and clip, step,
update), and returns the tensor its program returns. Every peer works on a model of its own.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ampgraph
from benchmarks.cases import Program, Task, in_dtype
from benchmarks.training import clip

Call = Callable[[], Tensor]
RATE = 1e-5  # small: the weights of all peers stay near each other while they are timed


@dataclass(frozen=True)
class Setting:
    """What is asked of every peer of one comparison."""

    device: torch.device
    dtype: torch.dtype
    task: Task

    @property
    def scaled(self) -> bool:
        """float16 trains with a scaler."""
        return self.task == "train" and self.dtype is torch.float16

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.dtype)


@dataclass(frozen=True)
class Peer:
    """One way to run a model.

    Args:
        low: whether it computes in the low dtype; its results are then held to eager autocast's.
        prepare: wraps the module it is given (its own copy), for a setting.
        scaler: the GradScaler it trains float16 with; None for one that needs none.
    """

    name: str
    low: bool
    prepare: Callable[[nn.Module, Setting], Callable[..., Tensor]]
    scaler: type[torch.amp.GradScaler] | None = torch.amp.GradScaler
    own_weights: bool = False  # the model and its inputs themselves are cast

    def serve(self, program: Program, setting: Setting) -> Call:
        """One inference a call, under no_grad."""
        model, inputs = self._placed(program, setting)
        run = self.prepare(model, setting)

        def call() -> Tensor:
            with torch.no_grad():
                return run(**inputs)

        return call

    def train(self, program: Program, setting: Setting) -> tuple[Call, nn.Module]:
        """One training step a call, and the module whose gradients it leaves."""
        model, inputs = self._placed(program, setting)
        run = self.prepare(model, setting)
        fused = setting.device.type == "cuda"
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=fused)
        enabled = setting.scaled and self.low and self.scaler is not None
        scaler = (self.scaler or torch.amp.GradScaler)(setting.device.type, enabled=enabled)

        def call() -> Tensor:
            optimizer.zero_grad()
            loss = run(**inputs)
            scaler.scale(loss).backward()
            clip(scaler, optimizer)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        return call, model

    def _placed(self, program: Program, setting: Setting) -> Program:
        model, inputs = program
        model = copy.deepcopy(model).to(setting.device)
        inputs = {name: value.to(setting.device) for name, value in inputs.items()}
        placed = model, inputs
        return in_dtype(placed, setting.dtype) if self.own_weights else placed


def eager(model: nn.Module, setting: Setting) -> Callable[..., Tensor]:
    return model


def eager_autocast(model: nn.Module, setting: Setting) -> Callable[..., Tensor]:
    return _inside(model, setting)


def compiled(model: nn.Module, setting: Setting) -> Callable[..., Tensor]:
    return torch.compile(model)


def compiled_autocast(model: nn.Module, setting: Setting) -> Callable[..., Tensor]:
    return _inside(torch.compile(model), setting)


def ours(model: nn.Module, setting: Setting) -> Callable[..., Tensor]:
    run: Callable[..., Tensor] = ampgraph.compile(model, dtype=setting.dtype)
    return run


def ours_with_copies(model: nn.Module, setting: Setting) -> Callable[..., Tensor]:
    run: Callable[..., Tensor] = ampgraph.compile(model, dtype=setting.dtype, weight_copies=True)
    return run


def _inside(run: Callable[..., Tensor], setting: Setting) -> Callable[..., Tensor]:
    def call(**inputs: Tensor) -> Tensor:
        with setting.autocast():
            return run(**inputs)

    return call


BASELINE = "compile + autocast"

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("eager fp32", low=False, prepare=eager),
        Peer("eager autocast", low=True, prepare=eager_autocast),
        Peer("compile fp32", low=False, prepare=compiled),
        Peer(BASELINE, low=True, prepare=compiled_autocast),
        Peer("low weights, compiled", low=True, prepare=compiled, scaler=None, own_weights=True),
        Peer("ampgraph", low=True, prepare=ours, scaler=ampgraph.GradScaler),
        Peer(
            "ampgraph, weight copies",
            low=True,
            prepare=ours_with_copies,
            scaler=ampgraph.GradScaler,
        ),
    )
}

# What a comparison cannot do without: what results are held to, and what ratios are taken of.
NEEDED = ("eager fp32", "eager autocast", BASELINE)
