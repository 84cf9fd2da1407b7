"""Results on paper: a table for the terminal, JSON beside it with the machine and the versions."""

import dataclasses
import json
import platform
from collections.abc import Iterable
from contextlib import AbstractContextManager
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ampgraph.files import write_whole
from benchmarks.compare import Comparison, Row

FOLDER = Path(__file__).parent / "results"
PACKAGES = ("ampgraph", "torch", "triton", "transformers")


def machine() -> dict[str, Any]:
    """The device, and every version that a figure depends on."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "date": date.today().isoformat(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "gpu": gpu and gpu.name,
        "gpu_memory": gpu and gpu.total_memory,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def save(name: str, content: dict[str, Any], folder: Path = FOLDER) -> Path:
    """Write `<name>.json` with the machine, whole or not at all; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_whole(path, json.dumps({"machine": machine(), **content}, indent=1) + "\n")
    return path


def without_caches() -> AbstractContextManager[None]:
    """What another peer has compiled would be had for nothing: each pays for its own."""
    config: Any = torch.compiler.config
    off: AbstractContextManager[None] = config.patch(force_disable_caches=True)
    return off


def as_data(comparisons: Iterable[Comparison]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(comparison) for comparison in comparisons]


def show(comparison: Comparison, console: Console) -> None:
    """A row a peer; times beside the baseline's, for alone they mean nothing."""
    title = (
        f"{comparison.case}, {comparison.task}, {comparison.dtype}, {comparison.size} "
        f"({comparison.parameters / 1e6:.1f} M parameters, {comparison.device})"
    )
    table = Table("peer", title=title, title_justify="left")
    for heading in ("ms", "speed", "peak MB", "first call s", "error", "reads"):
        table.add_column(heading, justify="right")
    for row in comparison.rows:
        table.add_row(row.peer, *_cells(row))
    console.print(table)
    for row in comparison.wrong:
        console.print(f"[red]{row.peer}: {escape(str(row.wrong))}[/red]")


def _cells(row: Row) -> list[str]:
    if row.wrong:
        return ["wrong"] + ["-"] * 5
    error = max(row.errors.values())
    return [
        "-" if row.seconds is None else f"{1000 * row.seconds:.2f}",
        "-" if row.ratio is None else f"{row.ratio:.2f}x",
        "-" if row.peak is None else f"{row.peak / 1e6:.1f}",
        "-" if row.first is None else f"{row.first:.1f}",
        f"{error:.2g}",
        "-" if row.reads is None else str(row.reads),
    ]
