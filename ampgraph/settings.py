"""Settings: one frozen dataclass, each field with the environment variable that sets it.

The environment is read when `settings()` is called and not at import, so a test or a debugging
session may change a variable without a new process.
"""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, Literal, get_args

Verify = Literal["cheap", "full"]


@dataclass(frozen=True)
class Settings:
    """What a user may set from outside a program; the defaults are the ones to ship with."""

    # How hard the laws of a rewritten graph are checked between passes: "cheap" checks what one
    # walk over the nodes can tell, "full" also runs the graph again on fake tensors.
    verify: Verify = dataclasses.field(
        default="cheap", metadata={"env": "AMPGRAPH_VERIFY", "allowed": get_args(Verify)}
    )


def settings() -> Settings:
    """The settings in force now: the environment's where a variable is set, else the defaults."""
    return Settings(**{f.name: read(f) for f in dataclasses.fields(Settings)})


def read(field: "dataclasses.Field[Any]") -> Any:
    """One field's value; a bad one is an error that names the allowed ones."""
    name, allowed = field.metadata["env"], field.metadata["allowed"]
    value = os.environ.get(name, field.default)
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not allowed: use one of {', '.join(allowed)}")
    return value
