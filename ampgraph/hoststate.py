"""What an optimizer keeps in Python, where no flag on the device can hold it back."""

import types
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

# Held by an optimizer, and not its own to count with.
_FOREIGN = (Tensor, nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)


@dataclass
class Held:
    """A container of an optimizer and what was in it.

    Attributes:
        name: of the attribute that it is in, "" for the optimizer's own, its groups and its state.
        before: by key or index; the elements of a set by themselves.
        may_grow: whether a new entry is no change.
    """

    name: str
    container: Any
    before: dict[Any, Any]
    may_grow: bool = False

    def changed(self) -> set[str]:
        now = _contents(self.container)
        keys = self.before.keys() if self.may_grow else self.before.keys() | now.keys()
        both = self.before.keys() & now.keys()
        found = {k for k in keys if k not in both or _differs(self.before[k], now[k])}
        return {self.name or str(key) for key in found}

    def restore(self) -> None:
        if isinstance(self.container, dict):
            now = self.container.items() if self.may_grow else ()
            kept = {key: value for key, value in now if key not in self.before}
            self.container.clear()
            self.container.update(self.before | kept)
            return
        self.container.clear()
        add = self.container.update if isinstance(self.container, set) else self.container.extend
        add(self.before.values())


class HostState:
    """What an optimizer holds before a step, to compare with and to go back to.

    That is what is in its state, its groups and its attributes, and in the dicts, lists, deques,
    sets and objects in those. Tensors are the same ones or others: what is written to them is the
    device's.
    """

    def __init__(self, held: Iterable[Held]) -> None:
        self._held = list(held)

    @classmethod
    def of(cls, optimizer: Optimizer, *foreign: str) -> "HostState":
        """What the optimizer holds now.

        A new entry of its state is no change here: `steps.Unsettled` looks after those.

        Args:
            foreign: attributes of the optimizer that are somebody else's.
        """
        own = vars(optimizer)
        found = {id(own): Held("", own, dict(own))}
        for name, value in own.items():
            if name not in foreign:
                _collect("" if name in ("state", "param_groups") else name, value, found)
        for state in (optimizer.state, *optimizer.state.values()):
            if id(state) in found:
                found[id(state)].may_grow = True
        return cls(found.values())

    def changed(self) -> list[str]:
        """The names of what is another tensor, another number, new or gone."""
        return sorted(set().union(*(held.changed() for held in self._held)))

    def restore(self) -> None:
        """Everything as it was, in the same containers."""
        for held in self._held:
            if held.changed():
                held.restore()


def _contents(container: Any) -> dict[Any, Any]:
    if isinstance(container, dict):
        return dict(container)
    return {v: v for v in container} if isinstance(container, set) else dict(enumerate(container))


def _collect(name: str, value: Any, found: dict[int, Held]) -> None:
    """Add every container that can be reached from a value, by its id."""
    if id(value) in found or isinstance(value, _FOREIGN):
        return
    inside: list[Any] = []
    if isinstance(value, (dict, list, deque, set)):
        found[id(value)] = Held(name, value, _contents(value))
        inside = list(found[id(value)].before.values())
    elif isinstance(value, (tuple, frozenset)):
        inside = list(value)
    elif hasattr(value, "__dict__"):
        inside = [vars(value)]
    for inner in inside:
        _collect(name, inner, found)


def _differs(before: Any, now: Any) -> bool:
    """Numbers and strings are compared by value, everything else by identity."""
    if now is before:
        return False
    plain = (bool, int, float, complex, str)
    return not (isinstance(before, plain) and isinstance(now, plain) and before == now)
