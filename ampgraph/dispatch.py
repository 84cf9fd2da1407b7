"""Autocast's dispatcher, in Python: what one op call does to its arguments under a policy.

`judge` is the law, a pure function of the op, its arguments and the state. Two readers apply it to
programs: `ampgraph.listener` runs a callable on fake tensors and notes every op the dispatcher
would show to autocast; `passes.open_composite` traces a callable under the same law.

Source of the rules: ATen/autocast_mode.h (`WrapFunction_` of each CastPolicy, `is_eligible`,
`prioritize`), restated here so that they hold for any list, on any device, for any op.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampgraph.errors import BannedOpError
from ampgraph.internals.ops import OpOverload, schema_of
from ampgraph.mend import mixed, too_big
from ampgraph.oplists import append_target
from ampgraph.oplists.inside import CALLED_INSIDE
from ampgraph.policy import Category, Policy
from ampgraph.verdict import FP32, KERNEL, LIBRARY, Law, Verdict, eligible, named, tensors, widest

BANNED_CURE = (
    "binary_cross_entropy: use binary_cross_entropy_with_logits, which is safe; or ask for float32 "
    "with Policy.deny(op), or call it inside torch.autocast(device, enabled=False)"
)

ALIAS = "in a float32 module, but returns or writes its input: left as it is"


def judge(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], law: Law) -> Verdict:
    """What autocast (or the module's rule) does to this call, else repair, else nothing.

    Raises BannedOpError for ops that autocast refuses.
    """
    inputs = tensors((args, kwargs))
    in_fp32 = law.module is not None and law.module.dtype == FP32
    if in_fp32 and not _aliases(op):
        return _module_verdict(op, inputs, law)
    verdict = _autocast_verdict(op, inputs, args, kwargs, law)
    if verdict.acts or verdict.category != Category.FOLLOW:
        return verdict
    found = too_big(op, args, kwargs, law) or mixed(op, args, kwargs) or _kernel(op, inputs, law)
    return found or (Verdict(op, "module", ALIAS) if in_fp32 else verdict)


def _kernel(op: OpOverload, inputs: Sequence[Tensor], law: Law) -> Verdict | None:
    inside = CALLED_INSIDE.get(op.name())
    if inside is None or not any(t.device.type in law.state.enabled() for t in inputs):
        return None
    return Verdict(op, KERNEL, f"calls {inside} inside, which eager autocast casts: kept whole")


def _module_verdict(op: OpOverload, inputs: Sequence[Tensor], law: Law) -> Verdict:
    casts: dict[int, torch.dtype] = {}
    for device_type in law.state.enabled():
        casts |= _cast_to(inputs, device_type, FP32)
    match = law.module.match if law.module else ""
    return Verdict(op, "module", f"module rule {match!r}: float32", casts)


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
        return _append_dtype(policy, op, because, (args, kwargs), device_type)
    if category is Category.BANNED and any(eligible(t, device_type) for t in inputs):
        raise BannedOpError(f"{op.name()} ({because})", cure=BANNED_CURE)
    return Verdict(op, LIBRARY if rule.kernel else category, because, closed=rule.closes)


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
    policy: Policy,
    op: OpOverload,
    because: str,
    arguments: tuple[Sequence[Any], Mapping[str, Any]],
    device_type: str,
) -> Verdict:
    """Call the overload with a `dtype`, which has no defaults: those of `op` are written out."""
    first = tensors(arguments)[0]
    if not eligible(first, device_type) or first.dtype == FP32:
        return Verdict(op, Category.APPEND_DTYPE, because)
    name = append_target(policy.device_type, op.name())
    packet, _, overload = name.removeprefix("aten::").partition(".")
    target = getattr(getattr(torch.ops.aten, packet), overload or "default")
    given = named(op, *arguments)
    missing = {a.name: a.default_value for a in schema_of(op).arguments if a.name not in given}
    takes = {a.name for a in schema_of(target).arguments}
    kwargs = {k: v for k, v in missing.items() if k in takes} | {"dtype": FP32}
    return Verdict(target, Category.APPEND_DTYPE, because, kwargs=kwargs)
