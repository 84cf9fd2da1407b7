"""Where a captured frame stands among the modules: a graph break makes a part its graph's root.

After a break inside a block, Dynamo captures the block's forward alone, and its nodes say `lin`
where the model says `layers.0.lin`. The modules whose calls are on Python's stack tell the rest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from ampgraph.graph import module_roots, module_stack
from ampgraph.internals.dynamo import frame_modules, modules_being_called
from ampgraph.policy import ModuleRule, Policy

Stack = list[tuple[str, Any]]


@dataclass(frozen=True)
class Place:
    """The modules around a frame, (path, class) from the outermost in; paths of its locals."""

    around: tuple[tuple[str, Any], ...] = ()
    paths: Mapping[str, str] = field(default_factory=dict[str, str])

    def stack(self, node: fx.Node) -> Stack:
        """The modules the node was called in, as the model knows them."""
        pairs = zip(module_roots(node), module_stack(node), strict=True)
        own = [(_joined(self.paths.get(root, ""), path), kind) for root, (path, kind) in pairs]
        return [*self.around, *own]


NOWHERE = Place()


def place_of_frame() -> Place:
    """The place of the frame that Dynamo is compiling."""
    called = modules_being_called()
    if not called:
        return NOWHERE
    paths = {id(part): path for path, part in reversed(list(called[0].named_modules()))}
    around = [(paths[id(part)], type(part)) for part in called if id(part) in paths]
    found = {name: paths[id(m)] for name, m in frame_modules().items() if id(m) in paths}
    return Place(tuple(around), found)


def uneven_rules(policy: Policy) -> str:
    """The class of the frame's module, where rules differ between the modules of that class.

    Dynamo compiles a broken forward once for all of them.
    """
    called = modules_being_called()
    if len(called) < 2:
        return ""
    model, kind = called[0], type(called[-1])
    held = [path for path, part in model.named_modules() if type(part) is kind]
    rules = {tuple(_rules(policy, model, path)) for path in held}
    return kind.__name__ if len(rules) > 1 else ""


def _rules(policy: Policy, model: nn.Module, path: str) -> Iterator[ModuleRule | None]:
    for below, _ in model.get_submodule(path).named_modules():
        yield policy.module_rule_for(_ancestors(model, _joined(path, below)))


def _ancestors(model: nn.Module, path: str) -> Stack:
    parts: Sequence[str] = path.split(".") if path else ()
    above = [".".join(parts[:i]) for i in range(len(parts) + 1)]
    return [(one, type(model.get_submodule(one))) for one in above]


def _joined(path: str, below: str) -> str:
    return ".".join(part for part in (path, below) if part)
