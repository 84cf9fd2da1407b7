"""torch.autocast's op lists as data: one module a device type, checked when it is imported.

Each module holds six disjoint sets of op names (ALLOW, DENY, SET_DTYPE, APPEND_DTYPE, PROMOTE,
BANNED) and APPEND_TARGET, for torch 2.11 to 2.14 together. `base_rules` keeps the rows for which
the installed torch really registers an autocast kernel, so the versions differ by themselves.
"""

import enum
import functools
from collections.abc import Mapping
from types import MappingProxyType, ModuleType

from ampgraph.errors import PolicyError
from ampgraph.internals.ops import autocast_kernels
from ampgraph.oplists import cpu, cuda, mps, xpu

__all__ = [
    "DEVICE_TYPES",
    "USER_CATEGORIES",
    "Category",
    "append_target",
    "base_rules",
    "category_named",
    "check_device_type",
]


class Category(enum.StrEnum):
    """What is done to an op's floating arguments; the values are the words of reports and files.

    The set-dtype, append-dtype and promote rules bear the names of autocast's own cast policies.
    """

    ALLOW = "allow"  # cast to the region's dtype
    DENY = "deny"  # cast to float32
    SET_DTYPE = "fp32_set_opt_dtype"  # keep the inputs; dtype= becomes float32 when not given
    APPEND_DTYPE = "fp32_append_dtype"  # the same, through an overload that takes a dtype
    PROMOTE = "promote"  # cast to the widest type among them
    BANNED = "banned"  # refused
    FOLLOW = "follow"  # left as they are


# What a rule of a user or a library may say; the rest are autocast's own and stay with its lists.
USER_CATEGORIES = (Category.ALLOW, Category.DENY, Category.PROMOTE, Category.FOLLOW)

_LISTS: Mapping[str, ModuleType] = {"cuda": cuda, "cpu": cpu, "xpu": xpu, "mps": mps}
DEVICE_TYPES = tuple(_LISTS)
_SETS = tuple(category for category in Category if category is not Category.FOLLOW)


def one_category_each(device_type: str, lists: ModuleType) -> dict[str, Category]:
    """One list module as a mapping; an op in two of its sets is an error."""
    rules: dict[str, Category] = {}
    for category in _SETS:
        for op in getattr(lists, category.name):
            if op in rules:
                raise PolicyError(f"{device_type} lists {op} as {rules[op]} and as {category}")
            rules[op] = category
    if lists.APPEND_TARGET.keys() != lists.APPEND_DTYPE:
        raise PolicyError(f"{device_type}: APPEND_TARGET does not match APPEND_DTYPE")
    return rules


_ALL_ROWS = {device: one_category_each(device, lists) for device, lists in _LISTS.items()}


def check_device_type(device_type: str) -> str:
    """`device_type` itself, or a PolicyError that names the ones there are lists for."""
    if device_type not in DEVICE_TYPES:
        raise PolicyError(
            f"no autocast rules for device type {device_type!r}",
            cure=f"use one of {', '.join(DEVICE_TYPES)}",
        )
    return device_type


def category_named(word: Category | str) -> Category:
    """A category that rules may use, by its word; a PolicyError lists them."""
    if word not in USER_CATEGORIES:
        valid = ", ".join(USER_CATEGORIES)
        raise PolicyError(f"unknown category {str(word)!r}", cure=f"use one of {valid}")
    return Category(word)


@functools.cache
def base_rules(device_type: str) -> Mapping[str, Category]:
    """torch.autocast's rules for a device type in the installed torch, by registered op name.

    The default overload has no suffix ("aten::linear"), as in `OpOverload.name()`. An op that is
    not a key has no rule.
    """
    rows = _ALL_ROWS[check_device_type(device_type)]
    registered = autocast_kernels(device_type)
    return MappingProxyType({op: rows[op] for op in sorted(rows) if op in registered})


def append_target(device_type: str, op: str) -> str:
    """The overload that an APPEND_DTYPE row calls, with float32 as one more argument."""
    target: str = _LISTS[check_device_type(device_type)].APPEND_TARGET[op]
    return target
