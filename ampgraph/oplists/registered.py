"""What libraries registered for their own ops: default rules, by device type and op."""

from collections.abc import Sequence

from ampgraph import opnames
from ampgraph.errors import PolicyError
from ampgraph.oplists import DEVICE_TYPES, Category, category_named, check_device_type


class _Registry:
    """The rules so far; `version` counts them, so that verdicts made before can be forgotten."""

    def __init__(self) -> None:
        self.version = 0
        self.rules: dict[str, dict[str, Category]] = {device: {} for device in DEVICE_TYPES}

    def add(self, name: str, category: Category, devices: Sequence[str]) -> None:
        """Add a rule; PolicyError if there is another one, so that import order cannot matter."""
        for device in devices:
            before = self.rules[device].get(name, category)
            if before is not category:
                everywhere = len({rules.get(name) for rules in self.rules.values()}) == 1
                there = "" if everywhere and len(devices) > 1 else f" for {device}"
                raise PolicyError(
                    f"{name} is registered as {before}{there}, and now as {category}",
                    cure="register an op once; a user's Policy can still override it",
                )
        for device in devices:
            self.rules[device][name] = category
        self.version += 1


_REGISTRY = _Registry()


def register_op(name: object, category: Category | str, *, device_type: str | None = None) -> None:
    """Give an op of a library its default rule, for one device type or for all of them.

    For the library that ships the op, once, at import: `register_op("mylib::bar", "allow")`.
    """
    chosen = category_named(category)
    devices = DEVICE_TYPES if device_type is None else (check_device_type(device_type),)
    for op in opnames.rule_names(name):
        _REGISTRY.add(op, chosen, devices)


def rules_for(device_type: str) -> dict[str, Category]:
    """The registered rules of a device type, by canonical name (see `ampgraph.opnames`)."""
    return _REGISTRY.rules[device_type]


def version() -> int:
    """A number that changes whenever a rule is added."""
    return _REGISTRY.version
