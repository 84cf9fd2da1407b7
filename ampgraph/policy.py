"""Policies: torch.autocast's rules for a device type as data, and a user's changes to them.

The verdict for an op is, in this order: the policy's own rule for that overload, its rule for all
overloads, what the op's library registered (`register_op`, `torch.library.register_autocast`),
autocast's list for the device type, and else that it follows its inputs.
"""

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Self

import torch

from ampgraph import opnames, policyfile
from ampgraph.errors import PolicyError
from ampgraph.files import write_whole
from ampgraph.internals.ops import OpOverload, has_autocast_kernel, name_of, register_autocast_dtype
from ampgraph.oplists import Category, base_rules, category_named, check_device_type, registered
from ampgraph.oplists.registered import register_op

__all__ = ["Category", "ModuleRule", "Policy", "Rule", "register_op"]

# The cast policies' names in ATen/autocast_mode.h, for the reasons in reports.
_LIST_NAMES = {Category.ALLOW: "lower_precision_fp", Category.DENY: "fp32"}


@dataclass(frozen=True)
class Rule:
    """The verdict for one op, and why. `dtype` is set where a library registered a cast to it."""

    category: Category
    because: str
    dtype: torch.dtype | None = None
    kernel: bool = False  # its library's autocast kernel is code: nobody but torch can follow it

    @property
    def closes(self) -> bool:
        """Whether the ops inside this op are hidden: a user's rule speaks for all of it."""
        return self.because.startswith("op rule")


@dataclass(frozen=True)
class ModuleRule:
    """A dtype for the ops of some modules.

    `match` is a glob over the paths of `named_modules()`, in which "*" also crosses dots, or
    "class:" and a class's qualified name.
    """

    match: str
    dtype: torch.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "match", policyfile.match_text(self.match))
        object.__setattr__(self, "dtype", policyfile.dtype_named(self.dtype))

    def matches(self, path: str, module_class: type | str) -> bool:
        """Whether a module is meant; a class rule includes subclasses if a real type is given."""
        if not self.match.startswith("class:"):
            return fnmatchcase(path, self.match)
        wanted = self.match.removeprefix("class:")
        if isinstance(module_class, str):
            return module_class == wanted
        if any(policyfile.qualified_name(base) == wanted for base in module_class.__mro__):
            return True
        found = policyfile.class_named(wanted)
        return found is not None and issubclass(module_class, found)


@dataclass(frozen=True)
class Policy:
    """The rules of torch.autocast for a device type, with op rules and module rules on top.

    Immutable: each method returns a new policy. A later call replaces an earlier rule for the same
    name; a rule for one overload beats one for all of them, whatever their order.
    """

    device_type: str
    ops: tuple[tuple[str, Category], ...] = ()
    modules: tuple[ModuleRule, ...] = ()

    def __post_init__(self) -> None:
        check_device_type(self.device_type)
        object.__setattr__(self, "ops", _merged_ops(self.ops))
        object.__setattr__(self, "modules", _merged_modules(self.modules))

    @classmethod
    def autocast(cls, device_type: str) -> Self:
        """torch.autocast's own rules for "cuda", "cpu", "xpu" or "mps"."""
        return cls(device_type)

    def allow(self, *ops: object) -> Self:
        """Cast the ops' floating arguments to the region's dtype."""
        return self._with_ops(ops, Category.ALLOW)

    def deny(self, *ops: object) -> Self:
        """Cast the ops' floating arguments to float32, also for softmax or sum."""
        return self._with_ops(ops, Category.DENY)

    def promote(self, *ops: object) -> Self:
        """Cast the ops' floating arguments to the widest type among them."""
        return self._with_ops(ops, Category.PROMOTE)

    def follow(self, *ops: object) -> Self:
        """Leave the ops' arguments as they are."""
        return self._with_ops(ops, Category.FOLLOW)

    def module(self, match: str | type[torch.nn.Module], *, dtype: torch.dtype | str) -> Self:
        """Give modules a dtype of their own: by path ("encoder.*.norm") or by class.

        float32 casts the floating inputs of their ops to float32; a low dtype makes the modules a
        region of that dtype, in which the op rules still apply. The innermost module with a rule
        decides, and among its rules the last one.
        """
        rule = ModuleRule(policyfile.match_text(match), policyfile.dtype_named(dtype))
        return replace(self, modules=(*self.modules, rule))

    def rule_for(self, op: OpOverload) -> Rule:
        """The verdict for an op; a dict look-up after the first time."""
        decided = self._decided(registered.version())
        rule = decided.get(op)
        if rule is None:
            rule = self._decide(op)
            # Another library may still register an autocast rule for its op, unseen by us.
            if op.namespace == "aten":
                decided[op] = rule
        return rule

    def module_rule_for(self, stack: Sequence[tuple[str, type | str]]) -> ModuleRule | None:
        """The rule for an op inside these modules, (path, class) from the outermost in."""
        if not self.modules:
            return None
        for path, module_class in reversed(stack):
            for rule in reversed(self.modules):
                if rule.matches(path, module_class):
                    return rule
        return None

    def unmatched(self, module: torch.nn.Module) -> list[str]:
        """The module rules that match nothing in `module`: misspelt, or of another model."""
        root: torch.nn.Module = getattr(module, "_orig_mod", module)
        named = [(path, type(part)) for path, part in root.named_modules(remove_duplicate=False)]
        return [
            rule.match
            for rule in self.modules
            if not any(rule.matches(path, kind) for path, kind in named)
        ]

    def to_toml(self) -> str:
        """The text of the policy's file."""
        ops = tuple((name, str(category)) for name, category in self.ops)
        modules = tuple((rule.match, policyfile.DTYPE_NAMES[rule.dtype]) for rule in self.modules)
        return policyfile.render(policyfile.PolicyData(self.device_type, ops, modules))

    @classmethod
    def from_toml(cls, text: str, *, where: str = "") -> Self:
        """The policy that a file's text describes; `where` is the file's name for errors."""
        data = policyfile.parse(text, where)
        try:
            ops = tuple((name, category_named(word)) for name, word in data.ops)
            rules = tuple(
                ModuleRule(match, policyfile.dtype_named(dtype)) for match, dtype in data.modules
            )
            return cls(data.device_type, ops, rules)
        except PolicyError as error:
            raise PolicyError(error.message, where=where, cure=error.cure) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to a TOML file, whole or not at all."""
        write_whole(path, self.to_toml())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a policy from a TOML file; PolicyError says what is wrong with it."""
        return cls.from_toml(policyfile.read(path), where=str(path))

    @property
    def hash(self) -> str:
        """A sha256 of what the verdicts come from: the file, autocast's lists and `register_op`.

        What `torch.library.register_autocast` was told is left out: it belongs to the op's code.
        """
        content = [
            self.to_toml(),
            sorted(base_rules(self.device_type).items()),
            sorted(registered.rules_for(self.device_type).items()),
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle the content alone, without the verdicts found so far."""
        return (type(self), (self.device_type, self.ops, self.modules))

    def _with_ops(self, ops: Iterable[object], category: Category) -> Self:
        names = {name: category for op in ops for name in opnames.rule_names(op)}
        return replace(self, ops=tuple((dict(self.ops) | names).items()))

    def _decided(self, version: int) -> dict[OpOverload, Rule]:
        """The verdicts found so far, forgotten when a library registers an op."""
        seen, decided = self._verdicts
        if seen != version:
            decided = {}
            self.__dict__["_verdicts"] = (version, decided)
        return decided

    @functools.cached_property
    def _verdicts(self) -> tuple[int, dict[OpOverload, Rule]]:
        return -1, {}

    @functools.cached_property
    def _op_rules(self) -> dict[str, Category]:
        return dict(self.ops)

    def _decide(self, op: OpOverload) -> Rule:
        """Look at each source of rules in turn."""
        return (
            self._own_rule(op)
            or _registered_rule(op, self.device_type)
            or _autocast_kernel_rule(op, self.device_type)
            or _base_rule(op, self.device_type)
            or _no_rule(op, self.device_type)
        )

    def _own_rule(self, op: OpOverload) -> Rule | None:
        return _named_rule(op, self._op_rules, "op rule") if self.ops else None


def _named_rule(op: OpOverload, rules: dict[str, Category], source: str) -> Rule | None:
    """A rule by the overload's name, else by the op's, unless the overload cannot have one."""
    for name in (opnames.full_name(op), opnames.packet_name(op)):
        if name in rules and opnames.why_not(op) is None:
            return Rule(rules[name], f"{source}: {rules[name]} {name}")
    return None


def _registered_rule(op: OpOverload, device_type: str) -> Rule | None:
    return _named_rule(op, registered.rules_for(device_type), "registered by its library")


def _autocast_kernel_rule(op: OpOverload, device_type: str) -> Rule | None:
    """The rule of `torch.library.register_autocast`, which names the dtype to cast to."""
    dtype = register_autocast_dtype(op, device_type)
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    return Rule(Category.ALLOW, f"registered by its library: register_autocast to {name}", dtype)


def _base_rule(op: OpOverload, device_type: str) -> Rule | None:
    category = base_rules(device_type).get(name_of(op))
    if category is None:
        return None
    listed = _LIST_NAMES.get(category, category.value)
    return Rule(category, f"{device_type} autocast list: {listed}")


def _no_rule(op: OpOverload, device_type: str) -> Rule:
    """An op without a rule follows its inputs; one with a kernel we cannot read may not."""
    if has_autocast_kernel(op, device_type):
        because = "no rule: its library's autocast kernel is code (register_op can name a category)"
        return Rule(Category.FOLLOW, because, kernel=op.namespace != "aten")
    return Rule(Category.FOLLOW, "no rule: follows its inputs")


def _merged_ops(ops: Iterable[tuple[str, Category]]) -> tuple[tuple[str, Category], ...]:
    """Canonical names in order; one op with two categories is an error."""
    merged: dict[str, Category] = {}
    for written, word in ops:
        name, category = opnames.canonical_name(written), category_named(word)
        if merged.setdefault(name, category) is not category:
            raise PolicyError(f"{name} has two rules: {merged[name]} and {category}")
        if category is Category.ALLOW:
            opnames.check_no_hidden_write(name)
    return tuple(sorted(merged.items()))


def _merged_modules(rules: Iterable[ModuleRule]) -> tuple[ModuleRule, ...]:
    """The rules in order, each where it was given last; a pattern with two dtypes is an error."""
    merged: dict[str, ModuleRule] = {}
    for rule in rules:
        before = merged.pop(rule.match, rule)
        if before.dtype is not rule.dtype:
            raise PolicyError(
                f"module {rule.match!r} has two dtypes: {before.dtype} and {rule.dtype}"
            )
        merged[rule.match] = rule
    return tuple(merged.values())
