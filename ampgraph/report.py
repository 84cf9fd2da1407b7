"""What a user is shown of a compilation: rows, counts, breaks, and how they are laid out."""

import io
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import fx

from ampgraph.decision import CastCounts, Decision
from ampgraph.files import write_whole
from ampgraph.launches import Kernels
from ampgraph.passes.read_copies import Read
from ampgraph.pipeline import Rewritten

WIDTH = 140


@dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo cut the graph: `source` is the user's line, `reason` Dynamo's own."""

    reason: str
    source: str


@dataclass(frozen=True)
class SkippedFrame:
    """A function Dynamo did not capture: it runs in eager mode, outside of this compiler."""

    name: str
    source: str
    reason: str


@dataclass(frozen=True)
class Report:
    """Everything known about one callable's graphs.

    Attributes:
        graphs: one entry for each captured graph, in order.
        graph_breaks: where capture stopped and went on.
        skipped_frames: functions that stayed in eager mode.
        backward: how many ATen ops of the backward graphs compute in each dtype, when asked for.
        kernels: what a GPU runs, when asked for.
    """

    graphs: tuple[Rewritten, ...]
    graph_breaks: tuple[GraphBreak, ...] = ()
    skipped_frames: tuple[SkippedFrame, ...] = ()
    backward: Mapping[torch.dtype, int] | None = None
    kernels: Kernels | None = None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """One row for each op autocast would see, graph after graph."""
        return tuple(row for graph in self.graphs for row in graph.decisions)

    @property
    def casts(self) -> CastCounts:
        """Casts inserted, removed again as lossless, and left."""
        return sum((graph.casts for graph in self.graphs), CastCounts())

    @property
    def notes(self) -> tuple[str, ...]:
        """Repairs, constants kept finite and fused kernels, one sentence each."""
        return tuple(note for graph in self.graphs for note in graph.notes)

    @property
    def copies(self) -> tuple[Read, ...]:
        """The weight copies that the graphs read, each once."""
        found = (read for graph in self.graphs for read in graph.copies)
        return tuple({(read.name, read.dtype): read for read in found}.values())

    @property
    def before(self) -> fx.GraphModule:
        """The first graph as captured; with graph breaks see `graphs`."""
        return self._first().before

    @property
    def after(self) -> fx.GraphModule:
        """The first graph rewritten; with graph breaks see `graphs`."""
        return self._first().after

    def _first(self) -> Rewritten:
        if not self.graphs:
            raise LookupError("nothing was captured: see skipped_frames and graph_breaks")
        return self.graphs[0]

    def counts(self) -> dict[str, dict[torch.dtype | None, int]]:
        """How many ops of each kind compute in each dtype."""
        found: dict[str, dict[torch.dtype | None, int]] = {}
        for row in self.decisions:
            of = found.setdefault(row.op, {})
            of[row.dtype] = of.get(row.dtype, 0) + 1
        return found

    def dtypes(self) -> Counter[torch.dtype | None]:
        """How many ops compute in each dtype."""
        return Counter(row.dtype for row in self.decisions)

    def __str__(self) -> str:
        out = Console(file=io.StringIO(), width=WIDTH, color_system=None)
        out.print(self._rendered())
        assert isinstance(out.file, io.StringIO), "the console writes to memory"
        return out.file.getvalue()

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one HTML page, whole or not at all."""
        console = Console(file=io.StringIO(), width=WIDTH, record=True)
        console.print(self._rendered())
        write_whole(path, console.export_html(inline_styles=True))

    def _rendered(self) -> RenderableType:
        parts: list[RenderableType] = [_table(self.decisions), Text(self.summary())]
        parts += [Text(f"note: {note}") for note in self.notes]
        parts += [Text(f"graph break: {b.source}: {b.reason}") for b in self.graph_breaks]
        parts += [
            Text(f"skipped, runs in eager mode: {s.name} ({s.source}): {s.reason}")
            for s in self.skipped_frames
        ]
        if self.kernels is not None:
            parts += [self.kernels.table(), Text(self.kernels.summary())]
        return Group(*parts)

    def summary(self) -> str:
        """One line: graphs, ops for each dtype, casts."""
        ops = ", ".join(f"{n} in {short(d)}" for d, n in self.dtypes().most_common())
        casts = self.casts
        told = f"{len(self.graphs)} graph(s); ops: {ops or 'none'}; casts: "
        told += f"{casts.inserted} inserted, {casts.removed} removed, {casts.left} left"
        if self.copies:
            size = sum(read.bytes for read in self.copies) / 1e6
            told += f", {casts.copied} read from weight copies ({len(self.copies)} tensors, "
            told += f"{size:.1f} MB)"
        if self.backward is not None:
            back = ", ".join(f"{n} in {short(d)}" for d, n in self.backward.items())
            told += f"; backward ops: {back or 'none'}"
        return told


def short(dtype: torch.dtype | None) -> str:
    """`bfloat16`; `-` for ops without a floating tensor."""
    return "-" if dtype is None else str(dtype).removeprefix("torch.")


def _short_source(source: str) -> str:
    """ "path:line: code" without the folders; a "/" in the code is left alone."""
    path, colon, rest = source.partition(": ")
    return os.path.basename(path) + colon + rest


def _table(rows: tuple[Decision, ...]) -> Table:
    table = Table(title="What each op computes in, and why", title_justify="left")
    for name in ("op", "dtype", "casts", "because", "module", "source"):
        table.add_column(name, overflow="fold", justify="right" if name == "casts" else "left")
    for row in rows:
        source = _short_source(row.source)
        cells = (row.op, short(row.dtype), str(row.casts or ""), row.because, row.module, source)
        table.add_row(*map(Text, cells))
    return table
