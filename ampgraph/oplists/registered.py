"""What libraries registered for their own ops: default rules, by device type and op."""

from ampgraph import opnames
from ampgraph.errors import PolicyError
from ampgraph.oplists import DEVICE_TYPES, Category, category_named, check_device_type


class _Registry:
    """The rules so far; `version` counts them, so that verdicts made before can be forgotten."""

    def __init__(self) -> None:
        self.version = 0
        self.rules: dict[str, dict[str, Category]] = {device: {} for device in DEVICE_TYPES}

    def add(self, name: str, category: Category, device_type: str) -> None:
        """Add a rule; PolicyError if there is another one, so that import order cannot matter."""
        before = self.rules[device_type].setdefault(name, category)
        if before is not category:
            raise PolicyError(
                f"{name} is registered as {before} for {device_type}, and now as {category}",
                cure="register an op once; a user's Policy can still override it",
            )
        self.version += 1


_REGISTRY = _Registry()


def register_op(name: object, category: Category | str, *, device_type: str | None = None) -> None:
    """Give an op of a library its default rule, for one device type or for all of them.

    For the library that ships the op, once, at import: `register_op("mylib::bar", "allow")`.
    """
    chosen = category_named(category)
    devices = DEVICE_TYPES if device_type is None else (check_device_type(device_type),)
    for op in opnames.rule_names(name):
        for device in devices:
            _REGISTRY.add(op, chosen, device)


def rules_for(device_type: str) -> dict[str, Category]:
    """The registered rules of a device type, by canonical name (see `ampgraph.opnames`)."""
    return _REGISTRY.rules[device_type]


def version() -> int:
    """A number that changes whenever a rule is added."""
    return _REGISTRY.version
