"""Compile three callables and print what the on-disk caches made of each, as JSON.

Run by test_caches.py in processes of its own. Each door has a width of its own, so that no door
finds what another one left.
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import ampgraph


class Net(nn.Module):
    """Linears, an op list entry inside a composite, and a checkpointed body."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.a, x, use_reentrant=False).relu()
        y = self.b(h)
        return nn.functional.cross_entropy(y, torch.zeros(4, dtype=torch.int64))


def run(name: str, compiled: Any) -> None:
    """One step, and what the caches counted."""
    torch._dynamo.reset()
    counters.clear()
    compiled(torch.randn(4, 8)).backward()
    aot, inductor = counters["aot_autograd"], counters["inductor"]
    outcomes = ("hit", "miss", "bypass")
    found = {
        "aot": [aot[f"autograd_cache_{outcome}"] for outcome in outcomes],
        "inductor": [inductor[f"fxgraph_cache_{outcome}"] for outcome in outcomes],
    }
    print(json.dumps({name: found}))


def in_region(compiled: Any) -> Any:
    """Called inside torch.autocast."""

    def call(x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return compiled(x)

    return call


def main(again: bool) -> None:
    run("plain", in_region(torch.compile(Net(8))))
    run("backend", in_region(torch.compile(Net(16), backend="ampgraph")))
    run("compile", ampgraph.compile(Net(24)))
    run("copies", ampgraph.compile(Net(32), weight_copies=True))
    if again:
        policy = ampgraph.Policy.autocast("cpu").deny("aten::linear")
        run("other policy", ampgraph.compile(Net(24), policy=policy))


if __name__ == "__main__":
    main("again" in sys.argv)
