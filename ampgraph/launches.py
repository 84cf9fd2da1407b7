"""What a GPU is asked to do for one call of a model: kernels, calls, their dtypes and bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from rich.table import Table
from rich.text import Text

MEGABYTE = 1e6


@dataclass(frozen=True)
class KernelCode:
    """One Triton kernel, compiled in each configuration that is tried at run time.

    Attributes:
        source: as Inductor wrote it.
        ops: the ATen ops it is made of; none are known of a kernel of the user's.
        assembly, registers, spilled: of each configuration: PTX, registers a thread, bytes stored
            and loaded again for want of registers.
    """

    source: str
    ops: tuple[str, ...]
    assembly: tuple[str, ...]
    registers: tuple[int, ...]
    spilled: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """A Triton kernel launched, or a library's kernels called through an op ("extern").

    Attributes:
        kind, name: which kernel, or which op ("aten.mm.out").
        backward: whether it is part of the backward.
        dtypes: of the tensors it reads, and for a kernel writes, in order.
        bytes: read and written, each tensor once.
        code: of the kernel; None for "extern".
        is_cast: whether it does nothing but change a dtype.
    """

    kind: Literal["triton", "extern"]
    name: str
    backward: bool
    dtypes: tuple[torch.dtype, ...]
    bytes: int
    code: KernelCode | None = None
    is_cast: bool = False


@dataclass(frozen=True)
class Run:
    """All launches of one call, in order."""

    launches: tuple[Launch, ...]

    def only(
        self,
        *,
        kind: Literal["triton", "extern"] | None = None,
        backward: bool | None = None,
        casts: bool | None = None,
    ) -> "Run":
        """The launches of one kind, of one direction, or that only cast."""
        return Run(
            tuple(
                launch
                for launch in self.launches
                if kind in (None, launch.kind)
                and backward in (None, launch.backward)
                and casts in (None, launch.is_cast)
            )
        )

    @property
    def bytes(self) -> int:
        """Read and written by all of them."""
        return sum(launch.bytes for launch in self.launches)

    @property
    def spilled(self) -> int:
        """Bytes a thread spills in the worst kernel, in that kernel's best configuration."""
        return max((min(x.code.spilled) for x in self.launches if x.code is not None), default=0)

    def __len__(self) -> int:
        return len(self.launches)


@dataclass(frozen=True)
class Kernels:
    """What a model runs on a GPU, and what the same model runs under torch.autocast.

    Attributes:
        gpu: its name.
        bandwidth: of its memory, bytes a second.
        ours: the model compiled by ampgraph.
        autocast: torch.compile under torch.autocast with the same dtype.
        real: whether it was launched on a GPU that is here; else the code was only generated.
    """

    gpu: str
    bandwidth: float
    ours: Run
    autocast: Run
    real: bool = False

    def table(self) -> Table:
        """One row for each kernel or op, neighbours with the same name and dtypes together."""
        table = Table(title=f"What runs on {self.gpu}", title_justify="left")
        table.add_column("kernel or op", overflow="fold")
        table.add_column("dtypes", overflow="fold")
        for name in ("launches", "MB", "registers", "spilled"):
            table.add_column(name, justify="right")
        for backward in (False, True):
            part = self.ours.only(backward=backward)
            if part.launches:
                told = "backward" if backward else "forward"
                table.add_row(Text(told, style="bold"), "", str(len(part)), _megabytes(part.bytes))
            for rows in _alike(part.launches):
                table.add_row(*map(Text, _cells(rows)))
        return table

    def summary(self) -> str:
        """Totals, and torch.autocast's."""
        return "\n".join(
            self._totals(name, run)
            for name, run in (("ampgraph", self.ours), ("autocast", self.autocast))
        )

    def _totals(self, name: str, run: Run) -> str:
        casts = run.only(casts=True)
        return (
            f"{name}: {_megabytes(run.bytes)} MB, {1e6 * run.bytes / self.bandwidth:,.1f} us at "
            f"full bandwidth, in {len(run.only(kind='triton'))} Triton launches and "
            f"{len(run.only(kind='extern'))} extern calls; of it {_megabytes(casts.bytes)} MB in "
            f"{len(casts)} launches that only cast; at most {run.spilled} bytes spilled"
        )


def _alike(launches: Sequence[Launch]) -> list[list[Launch]]:
    grouped = groupby(launches, lambda launch: (launch.name, launch.dtypes))
    return [list(group) for _, group in grouped]


def _cells(rows: Sequence[Launch]) -> tuple[str, ...]:
    first = rows[0]
    dtypes = " ".join(_shortest(d) for d in dict.fromkeys(first.dtypes))
    code = first.code
    told = ("", "") if code is None else (_span(code.registers), _span(code.spilled))
    total = sum(row.bytes for row in rows)
    return (_name(first), dtypes, str(len(rows)), _megabytes(total), *told)


def _name(launch: Launch) -> str:
    """With its ops where Inductor's own name does not tell them (a foreach kernel's)."""
    if launch.code is None or not launch.name.startswith("triton_for_"):
        return launch.name
    return f"{launch.name} ({' '.join(op.removeprefix('aten.') for op in launch.code.ops)})"


def _span(numbers: Sequence[int]) -> str:
    """ "32", or "32-64" where the configurations differ."""
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def _shortest(dtype: torch.dtype) -> str:
    """bfloat16 as bf16, int64 as i64."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def _megabytes(count: int) -> str:
    return f"{count / MEGABYTE:,.2f}"
