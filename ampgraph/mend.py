"""Beyond autocast: what eager would refuse to run, or turn into infinity without a word.

Inserted casts bring dtypes together that the user's program never mixed, and constants next to
dtypes that cannot hold them. Both are mended here, and every mend is a row of the report.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampgraph.internals.ops import OpOverload, schema_of
from ampgraph.oplists.one_dtype import FLOAT_ONLY, NORMS, ONE_DTYPE
from ampgraph.oplists.scalars import VALUE_SCALARS
from ampgraph.verdict import CONSTANT, FP32, REPAIR, Law, Verdict, named, tensors, widest, written


def _low_dtype(inputs: Sequence[Tensor]) -> torch.dtype | None:
    found = {t.dtype for t in inputs if t.is_floating_point()}
    low = found & {torch.float16, torch.bfloat16}
    return next(iter(low)) if found and found == low and len(found) == 1 else None


def too_big(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], law: Law
) -> Verdict | None:
    """A finite constant beyond the low dtype's range: compute in fp32, or clamp it in place."""
    names = VALUE_SCALARS.get(op.name().partition(".")[0])
    low = _low_dtype(tensors((args, kwargs))) if names and law.lowered else None
    if names is None or low is None:
        return None
    limit = torch.finfo(low).max
    given = named(op, args, kwargs)
    big = {n: v for n, v in given.items() if n in names and _is_finite_beyond(v, limit)}
    if not big:
        return None
    told = ", ".join(f"{n}={v:g}" for n, v in big.items())
    if schema_of(op).is_mutable:
        clamp = {n: max(-limit, min(limit, float(v))) for n, v in big.items()}
        because = f"{told} does not fit {low}: clamped to its largest finite value"
        return Verdict(op, CONSTANT, because, clamp=clamp)
    casts = {id(t): FP32 for t in tensors((args, kwargs)) if t.dtype == low}
    return Verdict(op, CONSTANT, f"{told} does not fit {low}: computed in float32", casts)


def _is_finite_beyond(value: object, limit: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return limit < abs(value) < float("inf")


def mixed(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Verdict | None:
    name = op.name().partition(".")[0]
    if name in NORMS:
        return _wide_parameters(op, args, kwargs)
    if name in FLOAT_ONLY:
        return mend(op, args, kwargs)
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
    given = named(op, args, kwargs)
    kept = tensors([given.get("running_mean"), given.get("running_var")])
    dtype = kept[0].dtype if kept else FP32
    wrong = [t for t in (others if dtype == FP32 else [first, *others]) if t.dtype != dtype]
    casts = {id(t): dtype for t in wrong if id(t) not in {id(k) for k in kept}}
    return Verdict(op, REPAIR, f"refuses mixed dtypes: parameters cast to {dtype}", casts)


def mend(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Verdict | None:
    """What to do with a call that failed: bring it to one dtype, or to float32 if all is low."""
    return repair(op, args, kwargs) or _widened(op, args, kwargs)


def _widened(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Verdict | None:
    """Float32 for an op that refuses the low dtype, such as a Fourier transform of bfloat16."""
    low = _low_dtype(tensors((args, kwargs)))
    if low is None or any(t.is_floating_point() for t in written(op, args, kwargs)):
        return None
    casts = {id(t): FP32 for t in tensors((args, kwargs)) if t.dtype == low}
    return Verdict(op, REPAIR, f"refuses {low}: computed in float32", casts)


def repair(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Verdict | None:
    """One dtype for an op that refuses two: the widest, or that of what it writes into."""
    floating = [t for t in tensors((args, kwargs)) if t.is_floating_point()]
    if len({t.dtype for t in floating}) < 2:
        return None
    destinations = [t for t in written(op, args, kwargs) if t.is_floating_point()]
    dtype = destinations[0].dtype if destinations else widest([t.dtype for t in floating])
    kept = {id(t) for t in destinations}
    casts = {id(t): dtype for t in floating if t.dtype != dtype and id(t) not in kept}
    where = "its destination's dtype" if destinations else "the widest"
    return Verdict(op, REPAIR, f"refuses mixed dtypes: inputs cast to {dtype}, {where}", casts)
