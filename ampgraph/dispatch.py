"""Autocast's dispatcher, in Python: what one op call does to its arguments under a policy.

`judge` is the law, a pure function of the op, its arguments and the state. Two listeners apply it
to programs: `Listener` here runs a callable on fake tensors and notes every op the dispatcher
would show to autocast; `passes.open_composite` traces a callable under the same law.

Source of the rules: ATen/autocast_mode.h (`WrapFunction_` of each CastPolicy, `is_eligible`,
`prioritize`), restated here so that they hold for any list, on any device, for any op.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ampgraph.errors import BannedOpError
from ampgraph.internals import (
    OpOverload,
    PreDispatchMode,
    composite_kernel,
    is_composite,
    needs_elements,
    schema_of,
)
from ampgraph.oplists import append_target
from ampgraph.oplists.one_dtype import NORMS, ONE_DTYPE
from ampgraph.oplists.scalars import VALUE_SCALARS
from ampgraph.policy import Category, ModuleRule, Policy
from ampgraph.state import AutocastState

FP32 = torch.float32
REPAIR = "repair"  # the category of what eager would refuse to run
BANNED_CURE = (
    "binary_cross_entropy: use binary_cross_entropy_with_logits, which is safe; or ask for float32 "
    "with Policy.deny(op), or call it inside torch.autocast(device, enabled=False)"
)


@dataclass(frozen=True)
class Law:
    """Everything that decides: the lists of each device type, the state, a module's own rule.

    `lowered` says that an input of the node was made low by this compiler, so that a constant
    that does not fit it is our doing.
    """

    policies: Mapping[str, Policy]
    state: AutocastState
    module: ModuleRule | None = None
    lowered: bool = False

    def policy(self, device_type: str) -> Policy:
        return self.policies.get(device_type) or Policy.autocast(device_type)


@dataclass(frozen=True)
class Verdict:
    """What to do with one op call: `casts` by the identity of the tensor, then call `op`."""

    op: OpOverload
    category: str
    because: str
    casts: Mapping[int, torch.dtype] = field(default_factory=dict[int, torch.dtype])
    kwargs: Mapping[str, object] = field(default_factory=dict[str, object])
    clamp: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def acts(self) -> bool:
        return bool(self.casts or self.kwargs or self.clamp)


def tensors(args: object) -> list[Tensor]:
    """The tensors among (nested) arguments, in order."""
    return [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]


def eligible(tensor: Tensor, device_type: str) -> bool:
    """Autocast's `is_eligible`: floating, on the region's device type, not float64."""
    return (
        tensor.is_floating_point()
        and tensor.device.type == device_type
        and tensor.dtype != torch.float64
    )


def widest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The narrowest dtype that holds all of `dtypes`: fp16 with bf16 is fp32.

    As `torch.promote_types`, which is an op, and would stand in the graph that is being traced.
    """
    found = set(dtypes)
    if len(found) == 1:
        return found.pop()
    if found <= _FLOATING:
        return torch.float64 if torch.float64 in found else FP32
    return functools.reduce(torch.promote_types, dtypes)


_FLOATING = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def widens(source: torch.dtype, to: torch.dtype) -> bool:
    """Whether `to` holds every value of `source`, another dtype, exactly."""
    return source != to and widest([source, to]) == to


def judge(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], law: Law) -> Verdict:
    """What autocast (or the module's rule) does to this call, else repair, else nothing.

    Raises BannedOpError for ops that autocast refuses.
    """
    inputs = tensors((args, kwargs))
    verdict = _module_verdict(op, inputs, law)
    if verdict is None:
        verdict = _autocast_verdict(op, inputs, args, kwargs, law)
    if verdict.acts or verdict.category != Category.FOLLOW:
        return verdict
    return _too_big(op, args, kwargs, law) or _mixed(op, args, kwargs) or verdict


def _module_verdict(op: OpOverload, inputs: Sequence[Tensor], law: Law) -> Verdict | None:
    rule = law.module
    if rule is None or rule.dtype != FP32 or _aliases(op):
        return None
    casts: dict[int, torch.dtype] = {}
    for device_type in law.state.enabled():
        casts |= _cast_to(inputs, device_type, FP32)
    return Verdict(op, "module", f"module rule {rule.match!r}: float32", casts)


def _aliases(op: OpOverload) -> bool:
    """Whether the op returns or writes its input, so that a cast would cut the alias."""
    schema = schema_of(op)
    return schema.is_mutable or any(a.alias_info is not None for a in schema.arguments)


def _autocast_verdict(
    op: OpOverload,
    inputs: Sequence[Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    law: Law,
) -> Verdict:
    found: Verdict | None = None
    for device_type, dtype in law.state.enabled().items():
        if not any(t.device.type == device_type for t in inputs):
            continue
        policy = law.policy(device_type)
        verdict = _apply(policy, op, inputs, args, kwargs, device_type, dtype)
        found = verdict if found is None else _both(found, verdict)
    return found or Verdict(op, Category.FOLLOW, "no autocast here: follows its inputs")


def _both(one: Verdict, two: Verdict) -> Verdict:
    """Two device types at work on one call: their eligible tensors are disjoint."""
    lead = two if one.category == Category.FOLLOW else one
    return Verdict(
        two.op if two.op != one.op else one.op,
        lead.category,
        lead.because,
        {**one.casts, **two.casts},
        {**one.kwargs, **two.kwargs},
    )


def _apply(
    policy: Policy,
    op: OpOverload,
    inputs: Sequence[Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device_type: str,
    dtype: torch.dtype,
) -> Verdict:
    rule = policy.rule_for(op)
    category, because = rule.category, rule.because
    if category is Category.ALLOW:
        return Verdict(op, category, because, _cast_to(inputs, device_type, rule.dtype or dtype))
    if category is Category.DENY:
        return Verdict(op, category, because, _cast_to(inputs, device_type, FP32))
    if category is Category.PROMOTE:
        found = [t.dtype for t in inputs if eligible(t, device_type)]
        casts = _cast_to(inputs, device_type, widest(found)) if found else {}
        return Verdict(op, category, because, casts)
    if category is Category.SET_DTYPE:
        return Verdict(op, category, because, kwargs=_set_dtype(op, inputs, args, kwargs))
    if category is Category.APPEND_DTYPE:
        return _append_dtype(policy, op, because, inputs, device_type)
    if category is Category.BANNED and any(eligible(t, device_type) for t in inputs):
        raise BannedOpError(f"{op.name()} ({because})", cure=BANNED_CURE)
    return Verdict(op, Category.FOLLOW, because)


def _cast_to(
    inputs: Sequence[Tensor], device_type: str, dtype: torch.dtype
) -> dict[int, torch.dtype]:
    return {id(t): dtype for t in inputs if eligible(t, device_type) and t.dtype != dtype}


def _set_dtype(
    op: OpOverload, inputs: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, object]:
    """`dtype=float32` where the caller gave none and the first tensor is not fp32 already."""
    position = [a.name for a in schema_of(op).arguments].index("dtype")
    given = args[position] if position < len(args) else kwargs.get("dtype")
    first = inputs[0]
    if given is not None or first.dtype == FP32 or not eligible(first, first.device.type):
        return {}
    return {"dtype": FP32}


def _append_dtype(
    policy: Policy, op: OpOverload, because: str, inputs: Sequence[Tensor], device_type: str
) -> Verdict:
    first = inputs[0]
    if not eligible(first, device_type) or first.dtype == FP32:
        return Verdict(op, Category.APPEND_DTYPE, because)
    name = append_target(policy.device_type, op.name())
    packet, _, overload = name.removeprefix("aten::").partition(".")
    target = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return Verdict(target, Category.APPEND_DTYPE, because, kwargs={"dtype": FP32})


# --- beyond autocast: what eager would raise, or lose without a word -----------------------------


def _low_dtype(inputs: Sequence[Tensor]) -> torch.dtype | None:
    found = {t.dtype for t in inputs if t.is_floating_point()}
    low = found & {torch.float16, torch.bfloat16}
    return next(iter(low)) if found and found == low and len(found) == 1 else None


def _too_big(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], law: Law
) -> Verdict | None:
    """A finite constant beyond the low dtype's range: compute in fp32, or clamp it in place."""
    names = VALUE_SCALARS.get(op.name().partition(".")[0])
    low = _low_dtype(tensors((args, kwargs))) if names and law.lowered else None
    if names is None or low is None:
        return None
    limit = torch.finfo(low).max
    given = {a.name: v for a, v in zip(schema_of(op).arguments, args, strict=False)} | dict(kwargs)
    big = {n: v for n, v in given.items() if n in names and _is_finite_beyond(v, limit)}
    if not big:
        return None
    told = ", ".join(f"{n}={v:g}" for n, v in big.items())
    if schema_of(op).is_mutable:
        clamp = {n: max(-limit, min(limit, float(v))) for n, v in big.items()}
        because = f"{told} does not fit {low}: clamped to its largest finite value"
        return Verdict(op, "constant", because, clamp=clamp)
    casts = {id(t): FP32 for t in tensors((args, kwargs)) if t.dtype == low}
    return Verdict(op, "constant", f"{told} does not fit {low}: computed in float32", casts)


def _is_finite_beyond(value: object, limit: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return limit < abs(value) < float("inf")


def _mixed(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Verdict | None:
    name = op.name().partition(".")[0]
    if name in NORMS:
        return _wide_parameters(op, args, kwargs)
    return repair(op, args, kwargs) if name in ONE_DTYPE else None


def _wide_parameters(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Verdict | None:
    """Float32 parameters for a norm that would see a mixture it refuses; its input stays.

    Running statistics are written to: where they are low, all the rest becomes what they are.
    """
    first, *others = [t for t in tensors((args, kwargs)) if t.is_floating_point()]
    found = {t.dtype for t in others}
    if not others or found == {FP32} or found == {first.dtype} or first.dtype == torch.float64:
        return None
    given = {a.name: v for a, v in zip(schema_of(op).arguments, args, strict=False)} | dict(kwargs)
    kept = tensors([given.get("running_mean"), given.get("running_var")])
    dtype = kept[0].dtype if kept else FP32
    wrong = [t for t in (others if dtype == FP32 else [first, *others]) if t.dtype != dtype]
    casts = {id(t): dtype for t in wrong if id(t) not in {id(k) for k in kept}}
    return Verdict(op, REPAIR, f"refuses mixed dtypes: parameters cast to {dtype}", casts)


def repair(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Verdict | None:
    """One dtype for an op that refuses two: the widest, or that of what it writes into."""
    floating = [t for t in tensors((args, kwargs)) if t.is_floating_point()]
    if len({t.dtype for t in floating}) < 2:
        return None
    written = [t for t in _written(op, args, kwargs) if t.is_floating_point()]
    dtype = written[0].dtype if written else widest([t.dtype for t in floating])
    kept = {id(t) for t in written}
    casts = {id(t): dtype for t in floating if t.dtype != dtype and id(t) not in kept}
    where = "its destination's dtype" if written else "the widest"
    return Verdict(op, REPAIR, f"refuses mixed dtypes: inputs cast to {dtype}, {where}", casts)


def _written(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    given = {a.name: v for a, v in zip(schema_of(op).arguments, args, strict=False)} | dict(kwargs)
    for argument in schema_of(op).arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors(given.get(argument.name))


# --- carrying a verdict out -----------------------------------------------------------------------


def cast_order(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """The positions of the tensors among the arguments, in the order in which autocast casts them.

    The last argument first, the members of a list from its start: autocast's wrapper is C++ whose
    arguments GCC evaluates from the right. The casts' order is the order in which the gradients of
    a tensor that is used three times are added up.
    """
    found: list[list[int]] = []
    start = 0
    for argument in (*args, *kwargs.values()):
        stop = start + len(tensors(argument))
        found.append(list(range(start, stop)))
        start = stop
    return [position for group in reversed(found) for position in group]


def carry_out(
    verdict: Verdict,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    cast: Callable[[Tensor, torch.dtype], Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments with the verdict's casts made, keywords set and constants clamped.

    The last argument is cast first, as `cast_order` says.
    """

    def one(leaf: object) -> object:
        if isinstance(leaf, Tensor) and id(leaf) in verdict.casts:
            return cast(leaf, verdict.casts[id(leaf)])
        return leaf

    cast_kwargs = {name: pytree.tree_map(one, kwargs[name]) for name in reversed(list(kwargs))}
    new_kwargs = {name: cast_kwargs[name] for name in kwargs}
    new_args = tuple(reversed([pytree.tree_map(one, arg) for arg in reversed(args)]))
    names = [a.name for a in schema_of(verdict.op).arguments]
    for name, value in {**verdict.kwargs, **verdict.clamp}.items():
        position = names.index(name)
        if position < len(new_args):
            new_args = (*new_args[:position], value, *new_args[position + 1 :])
        else:
            new_kwargs[name] = value
    return new_args, new_kwargs


class DataDependentError(Exception):
    """An op whose result depends on its elements: fake tensors cannot run it again."""


_DATA_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_MASKS = (torch.bool, torch.uint8)


def _depends_on_elements(op: OpOverload, inputs: Sequence[Tensor]) -> bool:
    """Whether the op's result has a size or a value that only its elements tell."""
    if op is torch.ops.aten.index.Tensor:  # tagged for its masks; integers select a known size
        return any(t.dtype in _MASKS for t in inputs[1:])
    return any(tag in op.tags for tag in _DATA_DEPENDENT)


@dataclass
class Call:
    """One op that autocast would see, with what was done to it and the ops inside it."""

    op: OpOverload
    verdict: Verdict
    inputs: tuple[Tensor, ...]
    order: Sequence[int] = ()  # of the inputs, as they are cast
    inner: list["Call"] = field(default_factory=list["Call"])
    dtypes_in: tuple[torch.dtype, ...] = ()
    dtypes_out: tuple[torch.dtype, ...] = ()

    @property
    def acts(self) -> bool:
        return self.verdict.acts or any(call.acts for call in self.inner)

    def all(self) -> Iterator["Call"]:
        """This call and all those inside it."""
        yield self
        for call in self.inner:
            yield from call.all()

    def leaves(self) -> Iterator["Call"]:
        """The ops that really run: this one, or those inside an opened composite."""
        if not self.inner:
            yield self
        for call in self.inner:
            yield from call.leaves()


class Listener(PreDispatchMode):
    """Runs ops as autocast would and notes them in `calls`, a tree of what called what."""

    def __init__(self, law: Law) -> None:
        super().__init__()
        self.law = law
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        verdict = judge(func, args, kwargs, self.law)
        call = Call(func, verdict, tuple(tensors((args, kwargs))), cast_order(args, kwargs))
        self.calls.append(call)
        if verdict.category in (Category.FOLLOW, REPAIR) and opens(func, call.inputs):
            out = self._inside(call, args, kwargs)
        else:
            out = self._run(call, args, kwargs)
        call.dtypes_out = tuple(t.dtype for t in tensors(out))
        return out

    def _inside(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        new_args, new_kwargs = self._carried_out(call, args, kwargs)
        outer, self.calls = self.calls, call.inner
        try:
            with self:
                out = composite_kernel(call.op)(*new_args, **new_kwargs)
        except RuntimeError as error:
            if needs_elements(error):
                raise DataDependentError(call.op.name()) from error
            raise
        finally:
            self.calls = outer
        if call.verdict.acts and not any(inner.acts for inner in call.inner):
            call.inner.clear()  # its own casts are all there is to do: it can stay whole
        return out

    def _carried_out(
        self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        new_args, new_kwargs = carry_out(call.verdict, args, kwargs, Tensor.to)
        call.dtypes_in = tuple(t.dtype for t in tensors((new_args, new_kwargs)))
        return new_args, new_kwargs

    def _run(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        new_args, new_kwargs = self._carried_out(call, args, kwargs)
        if _depends_on_elements(call.op, call.inputs):
            raise DataDependentError(call.op.name())
        try:
            return call.verdict.op(*new_args, **new_kwargs)
        except (RuntimeError, TypeError) as error:
            if needs_elements(error):
                raise DataDependentError(call.op.name()) from error
            mended = repair(call.op, args, kwargs) if not call.verdict.acts else None
            if mended is None:
                raise
            call.verdict = mended
            return self._run(call, args, kwargs)


def opens(op: OpOverload, inputs: Sequence[Tensor]) -> bool:
    """Whether the dispatcher would show autocast the ops inside `op`."""
    return bool(inputs) and is_composite(op, inputs[0].device.type)
