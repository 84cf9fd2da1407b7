"""What weight copies save: batch-1 inference of a 50M-parameter MLP on the CPU.

`python -m benchmarks.weight_copies` prints the median milliseconds of a call, of torch.compile in
float32, torch.compile inside torch.autocast, and `weight_copies=True`, all in bfloat16 but the
first; and what checking the copies costs in a call.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import ampgraph
from ampgraph.copies import Reader
from ampgraph.errors import AmpgraphWarning

WIDTH, LAYERS = 2048, 12  # 50.4 million parameters


def mlp() -> nn.Module:
    """Linears and ReLUs."""
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))
    return nn.Sequential(*layers).eval()


def peers(model: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
    """The ways to call the model, each compiled at its first call."""
    plain = torch.compile(model)

    def autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: Tensor = lowered(x)
        return out

    lowered: Any = torch.compile(model)
    copied: Any = ampgraph.compile(model, dtype=torch.bfloat16, weight_copies=True)
    return {"float32": plain, "autocast": autocast, "weight_copies": copied}


@torch.no_grad()
def medians(rounds: int = 50) -> dict[str, float]:
    """Milliseconds of a call of each peer, called in turn.

    Raises:
        ValueError: the copies do not give autocast's values.
    """
    x, ways = torch.randn(1, WIDTH), peers(mlp())
    if not torch.equal(ways["autocast"](x), ways["weight_copies"](x)):
        raise ValueError("weight_copies=True and torch.autocast differ")
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            started = time.perf_counter()
            call(x)
            seen[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(times) for name, times in seen.items()}


def check_time(count: int = 200, rounds: int = 2000) -> float:
    """Microseconds for each parameter to see in a call that its copy is current."""
    params = [nn.Parameter(torch.zeros(1)) for _ in range(count)]
    reader = Reader(range(count), [torch.bfloat16] * count, grad=False)
    reader.read(params, kept=True)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        reader.read(params, kept=True)
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times) / count


def report(found: Mapping[str, float]) -> str:
    """One line each, with the ratio to autocast."""
    lines = [
        f"{name:14} {value:8.2f} ms {found['autocast'] / value:6.2f}x"
        for name, value in found.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore", AmpgraphWarning)
    print(report(medians()))
    print(f"checking a copy: {check_time():.2f} us")
