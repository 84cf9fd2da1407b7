"""Policies as TOML files: one line a rule, data only.

    device_type = "cuda"
    modules = [
        { match = "encoder.layers.*.norm", dtype = "float32" },
    ]

    [ops]
    "aten::gelu" = "deny"

Reading checks the shape of the file, and here is how dtypes and classes are spelled; whether ops
exist and rules agree is `Policy`'s business.
"""

import os
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import tomli_w
import torch

from ampgraph.errors import PolicyError

_HEADER = "# ampgraph policy: torch.autocast's rules for this device type, with these changes.\n"
_KEYS = ("device_type", "ops", "modules")
_MODULE_KEYS = ("match", "dtype")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class PolicyData:
    """What a file says, as plain words: (op, category) and (match, dtype)."""

    device_type: str
    ops: tuple[tuple[str, str], ...]
    modules: tuple[tuple[str, str], ...]


def render(data: PolicyData) -> str:
    """The text of a policy file."""
    document: dict[str, Any] = {"device_type": data.device_type}
    if data.ops:
        document["ops"] = dict(data.ops)
    if data.modules:
        document["modules"] = [{"match": match, "dtype": dtype} for match, dtype in data.modules]
    return _HEADER + tomli_w.dumps(document)


def parse(text: str, where: str = "") -> PolicyData:
    """Read a policy file's text; PolicyError names the key at fault and the valid ones."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"not a TOML file: {error}", where=where) from error
    _check_keys(document, _KEYS, "key", where)
    device_type = _word(document, "device_type", where)
    ops = document.get("ops", {})
    if not _is_table(ops):
        raise PolicyError("key 'ops' must be a table: [ops]", where=where)
    words = tuple((op, _word(ops, op, where)) for op in ops)
    return PolicyData(device_type, words, tuple(_modules(document, where)))


def read(path: str | os.PathLike[str]) -> str:
    """The text of a policy file; PolicyError if there is none to read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"cannot read the policy file: {error}", where=str(path)) from error


def _modules(document: Mapping[str, Any], where: str) -> Iterable[tuple[str, str]]:
    """The module rules in the file's order, which is their order of precedence."""
    tables = document.get("modules", [])
    if not isinstance(tables, list):
        raise _not_tables(where)
    for table in tables:
        if not _is_table(table):
            raise _not_tables(where)
        _check_keys(table, _MODULE_KEYS, "key of a module rule", where)
        yield _word(table, "match", where), _word(table, "dtype", where)


def _not_tables(where: str) -> PolicyError:
    return PolicyError("key 'modules' must be a list of { match = ..., dtype = ... }", where=where)


def _check_keys(table: Mapping[str, Any], valid: tuple[str, ...], what: str, where: str) -> None:
    unknown = [key for key in table if key not in valid]
    if unknown:
        raise PolicyError(
            f"unknown {what} {unknown[0]!r}", where=where, cure=f"use {', '.join(valid)}"
        )


def _word(table: Mapping[str, Any], key: str, where: str) -> str:
    """A key's value, which has to be there and to be a string."""
    value = table.get(key)
    if not isinstance(value, str):
        problem = "is missing" if value is None else f"is {value!r} and not a string"
        raise PolicyError(f"key {key!r} {problem}", where=where)
    return value


def _is_table(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, dict)


def dtype_named(dtype: torch.dtype | str) -> torch.dtype:
    """A module rule's dtype, given as such or by name."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise PolicyError(
            f"a module cannot compute in {name}", cure=f"use one of {', '.join(DTYPES)}"
        )
    return DTYPES[name]


def match_text(match: object) -> str:
    """A module rule's pattern; classes by the one name that every spelling of them leads to."""
    if isinstance(match, type) and issubclass(match, torch.nn.Module):
        return f"class:{qualified_name(match)}"
    if not isinstance(match, str):
        raise PolicyError(
            f"{match!r} names no module", cure='give a path such as "encoder.*.norm", or a class'
        )
    if not match.startswith("class:"):
        return match
    name = match.removeprefix("class:")
    if "." not in name:
        raise PolicyError(f"{match!r} has no module", cure='write "class:torch.nn.LayerNorm"')
    found = class_named(name)
    return match if found is None else f"class:{qualified_name(found)}"


def qualified_name(kind: type) -> str:
    """A class's name with the module that defines it."""
    return f"{kind.__module__}.{kind.__qualname__}"


def class_named(name: str) -> type | None:
    """The class of that name in a module that is loaded: reading a policy imports nothing."""
    module, _, attribute = name.rpartition(".")
    found = getattr(sys.modules.get(module), attribute, None)
    return found if isinstance(found, type) else None
