"""Results on paper: a table for the terminal, JSON beside it with the machine and the versions."""

import dataclasses
import json
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ampgraph.files import write_whole
from benchmarks.compare import Comparison, Row
from benchmarks.machine import machine

FOLDER = Path(__file__).parent / "results"


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
