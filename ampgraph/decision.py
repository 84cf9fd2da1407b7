"""What was decided about one dispatcher op, as a row that can be printed, counted and tested."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Decision:
    """One op of the rewritten graph and why it computes in the precision it does.

    `dtype` is the floating dtype the op computes in (None where no floating tensor is involved);
    `dtypes_in` and `dtypes_out` are those of its tensors, as the op meets them after the rewrite.
    """

    op: str
    node: str
    dtype: torch.dtype | None
    category: str
    because: str
    module: str = ""
    source: str = ""
    dtypes_in: tuple[torch.dtype, ...] = ()
    dtypes_out: tuple[torch.dtype, ...] = ()
    casts: int = 0


@dataclass(frozen=True)
class CastCounts:
    """Casts inserted by the rewrite; of these removed again as lossless, left in the graph, and
    replaced by a copy of the weight."""

    inserted: int = 0
    removed: int = 0
    left: int = 0
    copied: int = 0

    def __add__(self, other: "CastCounts") -> "CastCounts":
        return CastCounts(
            self.inserted + other.inserted,
            self.removed + other.removed,
            self.left + other.left,
            self.copied + other.copied,
        )
