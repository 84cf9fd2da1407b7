"""From what a user may write for an op to the names that policies keep.

A canonical name is "aten::softmax" for every overload of an op, or "aten::softmax.int" for one of
them, where "aten::softmax.default" is the overload without a suffix. (The base lists in
`ampgraph.oplists` use the dispatcher's names, where no suffix is that overload alone.)

An op can carry a rule when a cast of its arguments keeps its meaning: it has a tensor to cast and
a tensor result, writes into none of its arguments, and returns no view of one.
"""

import difflib
import functools
import importlib
import operator
import re
from collections.abc import Mapping

import torch

from ampgraph.errors import PolicyError
from ampgraph.internals.ops import (
    OpOverload,
    OpOverloadPacket,
    custom_op_name,
    name_of,
    op_names,
    overloads_of,
    schema_of,
)
from ampgraph.oplists import DEVICE_TYPES, base_rules
from ampgraph.oplists.functions import CALLS, COMPOSITES, NAMESPACES

_NAME = re.compile(r"(?:torch\.ops\.)?(?P<ns>\w+)(?:::|\.)(?P<op>\w+)(?:\.(?P<overload>\w+))?")

# Ops whose very meaning is a dtype: the user's own casts are law.
_CASTS = {"aten::_to_copy", "aten::to", "aten::type_as", "prims::convert_element_type"}


# Ops that update their running statistics, which their schemas do not say.
_HIDDEN_WRITES = {
    "aten::_batch_norm_impl_index",
    "aten::batch_norm",
    "aten::cudnn_batch_norm",
    "aten::instance_norm",
    "aten::miopen_batch_norm",
    "aten::native_batch_norm",
}


def rule_names(op: object) -> tuple[str, ...]:
    """The canonical names of the ops that `op` stands for; mostly one.

    Takes "aten::gelu", "aten.gelu", "aten::softmax.int", an OpOverload or its packet, what
    `torch.library.custom_op` returned, or a torch function, also as "torch.nn.functional.gelu". A
    function whose arguments choose among several ops (F.interpolate) stands for each of them.
    PolicyError for everything else.
    """
    if isinstance(op, str):
        function = _torch_function(op)
        return (canonical_name(op),) if function is None else rule_names(function)
    if isinstance(op, OpOverload):
        return (canonical_name(full_name(op)),)
    if isinstance(op, OpOverloadPacket):
        return (canonical_name(str(op)),)
    custom = custom_op_name(op)
    if custom is not None:
        return (canonical_name(custom),)
    return _names_of_function(op)


def _torch_function(written: str) -> object | None:
    """The function that "torch.nn.functional.gelu" or "torch.exp" names; "torch.ops" has names."""
    if not written.startswith("torch.") or written.startswith("torch.ops."):
        return None
    try:
        found: object = operator.attrgetter(written.removeprefix("torch."))(torch)
    except AttributeError:
        return None
    return found


def full_name(op: OpOverload) -> str:
    """The canonical name of one overload: "aten::linear.default"."""
    name = name_of(op)
    return name if "." in name else f"{name}.default"


def packet_name(op: OpOverload) -> str:
    """The canonical name of all overloads of an op: "aten::linear"."""
    return name_of(op).partition(".")[0]


@functools.cache
def canonical_name(written: str) -> str:
    """The canonical form of a written op name; PolicyError if it has no op that can have a rule."""
    match = _NAME.fullmatch(written)
    if match is None:
        raise _unknown(written)
    name = f"{match['ns']}::{match['op']}"
    overloads = _overloads(match["ns"], match["op"])
    if not overloads:
        raise _unknown(name)
    if match["overload"] is None:
        _check_one_can_carry(name, overloads)
        return name
    one = overloads.get(match["overload"])
    if one is None:
        raise PolicyError(
            f"{name} has no overload {match['overload']!r}",
            cure=f"use {name} for all of them, or one of {', '.join(sorted(overloads))}",
        )
    _check_one_can_carry(f"{name}.{match['overload']}", {match["overload"]: one})
    return f"{name}.{match['overload']}"


def why_not(op: OpOverload) -> str | None:
    """Why no rule can be put on an overload, or None, as for every row of autocast's lists."""
    schema = schema_of(op)
    if any(name_of(op) in base_rules(device) for device in DEVICE_TYPES):
        return None
    if packet_name(op) in _CASTS:
        return "is a cast itself, and the user's own casts are kept as written"
    if not any("Tensor" in str(argument.type) for argument in schema.arguments):
        return "has no tensor argument to cast"
    if schema.is_mutable:
        return "writes into its argument, and a cast would make it write into a copy"
    if any(result.alias_info is not None for result in schema.returns):
        return "may return a view of its input, and a cast would make that a view of a copy"
    if not any("Tensor" in str(result.type) for result in schema.returns):
        return "returns no tensor"
    return None


def check_no_hidden_write(name: str) -> None:
    """PolicyError for an op whose running statistics a low-precision cast would leave behind."""
    if name.partition(".")[0] in _HIDDEN_WRITES:
        raise PolicyError(
            f"{name} updates its running statistics: in low precision it would update a copy",
            cure="leave it, or deny it",
        )


def _overloads(namespace: str, op: str) -> Mapping[str, OpOverload]:
    """The overloads of an op by name; none if there is no such op."""
    packet = getattr(getattr(torch.ops, namespace), op, None)
    if not isinstance(packet, OpOverloadPacket):
        return {}
    return overloads_of(packet)


def _check_one_can_carry(name: str, overloads: Mapping[str, OpOverload]) -> None:
    """Raise PolicyError unless at least one of these overloads can have a rule."""
    reasons = [why_not(overload) for overload in overloads.values()]
    if None not in reasons:
        raise PolicyError(f"{name} cannot have a rule: it {reasons[0]}")


def _unknown(written: str) -> PolicyError:
    """The error for a name that is no op's, with the nearest names there are."""
    last = written.rpartition(".")[2] if written.startswith("torch.") else written
    guess = last if "::" in last else f"aten::{last.removeprefix('aten.')}"
    known = {name.partition(".")[0] for name in op_names()}
    near = difflib.get_close_matches(guess, [name for name in known if name[-1] != "_"])
    return PolicyError(
        f"there is no op {written!r}",
        cure=f"did you mean {' or '.join(near)}?"
        if near
        else 'write "aten::gelu" or "mylib::op"; import the library that defines the op first',
    )


def _names_of_function(function: object) -> tuple[str, ...]:
    """The names for a torch function, by its identity and not by how it is called."""
    if isinstance(function, torch.nn.Module) or (
        isinstance(function, type) and issubclass(function, torch.nn.Module)
    ):
        raise PolicyError(
            f"{function!r} is a module, not an op",
            cure="give modules a rule with Policy.module(<class or path>, dtype=...)",
        )
    path = torch_functions().get(function) if callable(function) else None
    if path is None:
        raise PolicyError(
            f"{function!r} is neither an op nor a torch function",
            cure='name the op it calls, as in "aten::gelu"',
        )
    if path in COMPOSITES:
        ops = ", ".join(f"aten::{op}" for op in COMPOSITES[path])
        raise PolicyError(f"{path} is made of several ops", cure=f"name those you mean: {ops}")
    return _names_of_path(path)


def _names_of_path(path: str) -> tuple[str, ...]:
    """The names for a function by its public path; a row for an op torch lacks is left out."""
    if path in CALLS:
        known = [op for op in CALLS[path] if _overloads("aten", op)]
        return tuple(canonical_name(f"aten::{op}") for op in known)
    holder, _, name = path.rpartition(".")
    prefix = dict(NAMESPACES)[holder]
    if not _overloads("aten", prefix + name):
        raise PolicyError(
            f"{path} is no single op", cure='name the ops it calls, as in "aten::gelu"'
        )
    return (canonical_name(f"aten::{prefix}{name}"),)


@functools.cache
def torch_functions() -> Mapping[object, str]:
    """The public torch functions, each with the path it is known by."""
    found: dict[object, str] = {}
    for holder, _ in NAMESPACES:
        owner = _attribute(holder)
        for name in dir(owner):
            function = getattr(owner, name, None)
            if callable(function) and not isinstance(function, type):
                found.setdefault(function, f"{holder}.{name}")
    operators = [path for path in CALLS if path.startswith("operator.")]
    found.update({getattr(operator, path.partition(".")[2]): path for path in operators})
    return found


def _attribute(path: str) -> object:
    """The object at a dotted path below torch."""
    owner: object = importlib.import_module("torch")
    for name in path.split(".")[1:]:
        owner = getattr(owner, name)
    return owner
