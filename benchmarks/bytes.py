"""Bytes that a GPU moves, counted from the CUDA code that Inductor generates; no GPU is needed.

`python -m benchmarks bytes` prints the tables and keeps them in benchmarks/results/bytes.json.
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import ampgraph
from ampgraph.fakecuda.child import in_child
from ampgraph.fakecuda.gpus import GPUS, gpu_named
from ampgraph.fakecuda.machine import fake_cuda, to_fake_cuda
from ampgraph.fakecuda.record import Call, OpLog, Recording
from ampgraph.files import write_whole
from benchmarks.compile_time import Block
from benchmarks.machine import versions
from benchmarks.training import clip

RESULTS = Path(__file__).parent / "results" / "bytes.json"
WIDTH = 100
TENSORS, ELEMENTS = 3, 2**20  # of the optimizer that is stepped


@dataclass(frozen=True)
class StepRow:
    """One way to clip, step and update the scale.

    Attributes:
        way: in words.
        clip, step, update: bytes for each parameter.
    """

    way: str
    clip: float
    step: float
    update: float

    @property
    def total(self) -> float:
        """Of the whole."""
        return self.clip + self.step + self.update


class TorchScaler(torch.amp.GradScaler):
    """torch's, which goes on as if it had read from the device that no gradient overflowed."""

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return optimizer.step(*args, **kwargs)


@dataclass(frozen=True)
class Way:
    """A scaler and the kind of AdamW."""

    scaler: Callable[..., Any]
    adamw: Mapping[str, Any]


OURS: Callable[..., Any] = ampgraph.GradScaler
WAYS = {
    "ampgraph.GradScaler, AdamW (captured)": Way(OURS, {}),
    "ampgraph.GradScaler, fused AdamW": Way(OURS, {"fused": True}),
    "torch GradScaler, clip_grad_norm_, fused AdamW": Way(TorchScaler, {"fused": True}),
    "torch GradScaler, clip_grad_norm_, foreach AdamW": Way(TorchScaler, {"foreach": True}),
}


def step_rows(gpu: str) -> list[StepRow]:
    """Clip + step + update for each way; float32 gradients, AdamW. For a child process."""
    return [step_row(gpu, name) for name in WAYS]


def step_row(gpu: str, name: str) -> StepRow:
    """The second step of an optimizer: its state is there, as in nearly every step."""
    way = WAYS[name]
    with fake_cuda(gpu_named(gpu)) as recording:
        params = [nn.Parameter(torch.zeros(ELEMENTS, device="cuda")) for _ in range(TENSORS)]
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer = torch.optim.AdamW(params, **way.adamw)
        optimizer.step()
        scaler = way.scaler("cuda")
        scaler.scale(torch.zeros((), device="cuda"))
        clipped = eager(lambda: clip(scaler, optimizer))
        captured = way.scaler is OURS and not way.adamw
        if captured:
            stepped = compiled(lambda: scaler.step(optimizer), recording)
        else:
            stepped = eager(lambda: scaler.step(optimizer))
        updated = eager(scaler.update)
    each = TENSORS * ELEMENTS
    return StepRow(name, clipped / each, stepped / each, updated / each)


def eager(run: Callable[[], Any]) -> int:
    """The bytes of the ops that are called."""
    calls: list[Call] = []
    with OpLog(calls):
        run()
    return sum(call.bytes for call in calls)


def compiled(run: Callable[[], Any], recording: Recording) -> int:
    """The bytes of what is compiled: Dynamo keeps away where ops are watched."""
    run()
    return sum(graph.bytes for graph in recording.graphs)


def step_table(rows: list[StepRow]) -> Table:
    """For people."""
    table = Table(title="clip + step + update: bytes for each float32 parameter, AdamW")
    for column in ("", "clip", "step", "update", "total"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        numbers = (row.clip, row.step, row.update, row.total)
        table.add_row(row.way, *(f"{number:.1f}" for number in numbers))
    return table


class GPT(nn.Module):
    """GPT-2's shape with four layers; the vocabulary's matrix is tied."""

    def __init__(self, layers: int = 4, width: int = 768, heads: int = 12, words: int = 50304):
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, length, words], or with targets the loss []."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.blocks(self.words(ids) + self.positions(places))
        logits = F.linear(self.norm(x), self.words.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Load:
    """One size of the model's work: `batch` sequences of `length` tokens."""

    batch: int
    length: int
    training: bool = False

    def __str__(self) -> str:
        kind = "training, forward and backward" if self.training else "inference"
        return f"{kind}, {self.batch}x{self.length}"


LOADS = (Load(1, 1), Load(1, 128), Load(8, 512, training=True))


@dataclass(frozen=True)
class Peer:
    """A way to run the model in mixed precision.

    Attributes:
        compiled: what is called, made of the model.
        region: entered around the call.
        parameters: their dtype.
    """

    compiled: Callable[[nn.Module], Callable[..., Tensor]]
    region: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    parameters: torch.dtype = torch.float32


def with_ampgraph(**options: Any) -> Callable[[nn.Module], Callable[..., Tensor]]:
    """ampgraph.compile with options."""
    return lambda model: ampgraph.compile(model, dtype=BF16, **options)


BF16 = torch.bfloat16
PEERS = {
    "torch.compile + autocast": Peer(torch.compile, lambda: torch.autocast("cuda", BF16)),
    "ampgraph": Peer(with_ampgraph()),
    "ampgraph, weight copies": Peer(with_ampgraph(weight_copies=True)),
    "a model of bf16 alone": Peer(torch.compile, parameters=BF16),
}


@dataclass(frozen=True)
class ModelRow:
    """Megabytes that one load moves, and those of them in kernels that only cast."""

    load: str
    way: str
    megabytes: float
    casts: float


def model_row(gpu: str, load: Load, name: str) -> ModelRow:
    """The model under one load in one way. For a child process."""
    peer = PEERS[name]
    with torch.device("meta"):
        model = GPT().to(peer.parameters)
    with fake_cuda(gpu_named(gpu)) as recording:
        ids = torch.zeros(load.batch, load.length, dtype=torch.long, device="cuda")
        run = peer.compiled(to_fake_cuda(model))
        with torch.set_grad_enabled(load.training), peer.region():
            out = run(ids, ids) if load.training else run(ids)
        if load.training:
            torch.autograd.backward(out)
    moved = sum(graph.bytes for graph in recording.graphs)
    casts = sum(graph.cast_bytes for graph in recording.graphs)
    return ModelRow(str(load), name, moved / 1e6, casts / 1e6)


def model_rows(gpu: str, loads: Sequence[Load] = LOADS) -> list[ModelRow]:
    """Each load in each way. For a child process."""
    return [model_row(gpu, load, name) for load in loads for name in PEERS]


def model_table(rows: list[ModelRow]) -> Table:
    """For people."""
    table = Table(title="GPT, 4 layers of 768, 50,304 words, bf16: megabytes moved")
    for column in ("", "way", "MB", "of it casts"):
        table.add_column(column, justify="left" if column in ("", "way") else "right")
    for row in rows:
        table.add_row(row.load, row.way, f"{row.megabytes:,.0f}", f"{row.casts:,.0f}")
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h200", help="default: h200")
    parser.add_argument("--no-write", action="store_true", help=f"leave {RESULTS.name} as it is")


def main(arguments: argparse.Namespace) -> None:
    """Count, print, write."""
    steps, models = in_child(step_rows, arguments.gpu), in_child(model_rows, arguments.gpu)
    Console(width=WIDTH).print(step_table(steps), model_table(models))
    told = {
        "gpu": arguments.gpu,
        "versions": versions(("torch", "triton")),
        "step": [told_of(row) for row in steps],
        "model": [told_of(row) for row in models],
    }
    if not arguments.no_write:
        write_whole(RESULTS, json.dumps(told, indent=2) + "\n")


def told_of(row: StepRow | ModelRow) -> dict[str, Any]:
    """For JSON."""
    told = asdict(row) | ({"total": row.total} if isinstance(row, StepRow) else {})
    return {k: round(value, 3) if isinstance(value, float) else value for k, value in told.items()}
