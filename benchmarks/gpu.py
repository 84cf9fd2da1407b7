"""The prepared script for one GPU, at most eight minutes.

First what the GPU can do at all (copy bandwidth, matmul rate), so that every figure has a ceiling
beside it; then the unscale kernel; then comparisons in the order of what they tell, until the time
is up. What was left out is listed.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ampgraph.errors import AmpgraphWarning
from ampgraph.kernels.unscale import check
from benchmarks.cases import Task
from benchmarks.compare import Comparison, compare
from benchmarks.measure import median_seconds
from benchmarks.peers import Setting
from benchmarks.results import FOLDER, as_data, save, show, without_caches

BUDGET = 8 * 60.0  # seconds
MEGABYTE = 1 << 20
# Case, task, dtype; the first ones answer the questions a user asks first.
ORDER: tuple[tuple[str, Task, torch.dtype], ...] = (
    ("gpt2", "infer", torch.bfloat16),
    ("gpt2", "train", torch.float16),
    ("llama-1b", "infer", torch.bfloat16),
    ("resnet50", "train", torch.float16),
    ("bert", "train", torch.bfloat16),
    ("vit", "train", torch.bfloat16),
    ("llama-1b", "train", torch.bfloat16),
    ("unet", "train", torch.bfloat16),
    ("mlp-50m", "infer", torch.float16),
    ("bert", "infer", torch.float16),
    ("vit", "infer", torch.float16),
    ("resnet50", "infer", torch.float16),
    ("unet", "infer", torch.float16),
    ("gpt2", "train", torch.bfloat16),
)


@dataclass(frozen=True)
class Unscale:
    """The finite check with its norm over `megabytes` of gradients, beside a copy of as many."""

    megabytes: int
    dtype: str
    bytes_per_second: float
    of_copy: float


def copy_rate(device: torch.device, megabytes: int = 1024) -> float:
    """Bytes a second, read plus written, of a copy within the GPU's memory."""
    source = torch.empty(megabytes * MEGABYTE, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float:
    """Floating-point operations a second of a large square matmul."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b, device)


def unscale_rates(device: torch.device) -> list[Unscale]:
    """The kernel that reads all gradients once, from 64 MB on, as one tensor and as hundreds.

    It only reads: its rate is of bytes read, and a copy's of bytes read and written.
    """
    found = []
    inverse = torch.ones((), device=device)
    for megabytes in (64, 256, 1024):
        copied = copy_rate(device, megabytes)
        for dtype in (torch.float32, torch.float16):
            gradients = _gradients(megabytes, dtype, device)
            seconds = _seconds(lambda g=gradients: check(g, inverse), device)  # type: ignore[misc]
            rate = megabytes * MEGABYTE / seconds
            name = str(dtype).removeprefix("torch.")
            found.append(Unscale(megabytes, name, rate, rate / copied))
    return found


def _gradients(megabytes: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    each = MEGABYTE // dtype.itemsize
    return [torch.randn(each, device=device, dtype=dtype) for _ in range(megabytes)]


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    return median_seconds({"call": call}, device, rounds=9, repeats=10)["call"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    parser.add_argument("--seconds", type=float, default=BUDGET, help=f"default: {BUDGET:.0f}")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder of <gpu>.json")


def main(arguments: argparse.Namespace) -> bool:
    """Measure until the time is up, print, write; whether an answer was wrong.

    Raises SystemExit where torch has no GPU.
    """
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU here: see `python -m benchmarks cpu` and `bytes`")
    warnings.simplefilter("ignore", AmpgraphWarning)
    started, device, console = time.monotonic(), torch.device("cuda"), Console()
    ceilings = {
        "copy_bytes_per_second": copy_rate(device),
        "bf16_flops_per_second": matmul_rate(device, torch.bfloat16),
        "fp32_flops_per_second": matmul_rate(device, torch.float32),
    }
    console.print(ceilings)
    rates = unscale_rates(device)
    console.print(rates)
    done, left_out = comparisons(device, started + arguments.seconds, console)
    console.print(f"left out for time: {', '.join(left_out) or 'nothing'}")
    content = {
        "ceilings": ceilings,
        "unscale": [asdict(rate) for rate in rates],
        "comparisons": as_data(done),
        "left_out": left_out,
    }
    name = torch.cuda.get_device_name().lower().replace(" ", "-")
    console.print(f"saved {save(name, content, arguments.out)}")
    return any(comparison.wrong for comparison in done)


def comparisons(
    device: torch.device, until: float, console: Console
) -> tuple[list[Comparison], list[str]]:
    """Those of `ORDER` that there is time for, and the names of the others."""
    done: list[Comparison] = []
    left_out: list[str] = []
    longest = 60.0
    for case, task, dtype in ORDER:
        began = time.monotonic()
        if began + longest > until:
            left_out.append(f"{case} {task} {dtype}")
            continue
        with without_caches():
            done.append(compare(case, "full", Setting(device, dtype, task), rounds=9, repeats=5))
        show(done[-1], console)
        longest = max(longest, time.monotonic() - began)
    return done, left_out
