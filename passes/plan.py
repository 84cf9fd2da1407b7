"""What the deciding passes write and the rewriting passes read: one plan a node."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from ampgraph.decision import Decision
from ampgraph.internals.tensors import FakeTensorMode
from ampgraph.policy import Policy
from ampgraph.state import AutocastState

Position = tuple[int, tuple[Any, ...]]  # occurrence of a node among the arguments, path inside it


@dataclass(frozen=True)
class Cast:
    """Cast the operand at `at`; `clamp` first where a large constant may travel in it."""

    at: Position
    dtype: torch.dtype
    clamp: bool = False


@dataclass(frozen=True)
class Plan:
    """The change to make to one node, and the rows that explain it.

    Exactly one of these happens: `erase` the node; put `inline` (a traced composite whose
    placeholders stand for the operands at `inputs`) in its place; or keep it, with `casts` on its
    operands, `kwargs` set, the `literals` (old, new) and `positional` (index, new) arguments
    replaced, `bodies` in place of the graph modules it names, and a `region` around it.
    """

    rows: tuple[Decision, ...] = ()
    casts: tuple[Cast, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    literals: tuple[tuple[float, float], ...] = ()
    positional: tuple[tuple[int, Any], ...] = ()
    erase: bool = False
    inline: fx.GraphModule | None = None
    inputs: tuple[Position, ...] = ()
    bodies: tuple[tuple[int, fx.GraphModule], ...] = ()
    region: tuple[tuple[str, torch.dtype, bool], ...] = ()
    value: Any = None
    mutates: bool = False
    notes: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        return bool(
            self.erase
            or self.inline is not None
            or self.casts
            or self.kwargs
            or self.literals
            or self.bodies
            or self.region
        )


@dataclass
class Plans:
    """The plans of a whole graph, in order, with the values its nodes will have."""

    of: dict[fx.Node, Plan] = field(default_factory=dict[fx.Node, Plan])
    env: dict[fx.Node, Any] = field(default_factory=dict[fx.Node, Any])
    output: Any = None

    @property
    def rows(self) -> tuple[Decision, ...]:
        return tuple(row for plan in self.of.values() for row in plan.rows)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for plan in self.of.values() for note in plan.notes)


class Walk(Protocol):
    """The walk that decides, as the planners of single kinds of nodes see it."""

    mode: FakeTensorMode
    state: AutocastState
    grad: bool
    env: dict[fx.Node, Any]
    bodies: dict[Any, Any]

    def policy(self, device_type: str) -> Policy:
        """The rules for a device type."""
        ...

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        """Fake tensors, no autocast, no autograd, no new guards."""
        ...

    def nested(
        self, body: fx.GraphModule, inputs: Sequence[Any] | None, state: AutocastState
    ) -> Plans:
        """Plan the body of a higher-order op, under the same policies."""
        ...
