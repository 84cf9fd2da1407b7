"""Spellings of unscaling with a finite check, and near misses, for the tests of `fuse_scaling`."""

from typing import Any

import torch
from torch import Tensor

# --- spellings that become one op; each takes tensors and a scale ---------------------------------


def by_operators(x: Tensor, s: Tensor) -> Any:
    return x * s, torch.isfinite(x).all()


def by_methods(x: Tensor, s: Tensor) -> Any:
    return x.mul(s), x.isfinite().all()


def by_functions(x: Tensor, s: Tensor) -> Any:
    return torch.mul(input=x, other=s), torch.all(torch.isfinite(x))


def scale_first(x: Tensor, s: Tensor) -> Any:
    return s * x, torch.isfinite(x).all()


def scale_first_function(x: Tensor, s: Tensor) -> Any:
    return torch.multiply(s, x), torch.isfinite(x).all()


def divided(x: Tensor, s: Tensor) -> Any:
    return x / s, torch.isfinite(x).all()


def divided_by_method(x: Tensor, s: Tensor) -> Any:
    return x.true_divide(s), torch.isfinite(x).all()


def by_the_reciprocal(x: Tensor, s: Tensor) -> Any:
    return x * s.reciprocal(), torch.isfinite(x).all()


def in_place(x: Tensor, s: Tensor) -> Any:
    ok = torch.isfinite(x).all()
    x.mul_(s)
    return ok


def in_place_divided(x: Tensor, s: Tensor) -> Any:
    ok = torch.isfinite(x).all()
    return x.div_(s), ok


def augmented(x: Tensor, s: Tensor) -> Any:
    ok = torch.isfinite(x).all()
    x *= s
    return ok, x


def checked_after(x: Tensor, s: Tensor) -> Any:
    y = x * s
    return y, torch.isfinite(y).all()


def checked_after_in_place(x: Tensor, s: Tensor) -> Any:
    x.mul_(s)
    return torch.isfinite(x).all()


def nan_or_inf(x: Tensor, s: Tensor) -> Any:
    return x * s, (torch.isnan(x) | torch.isinf(x)).any()


def logical_or(x: Tensor, s: Tensor) -> Any:
    return x * s, torch.logical_or(x.isinf(), x.isnan()).any()


def two_flags(x: Tensor, s: Tensor) -> Any:
    return x * s, torch.isnan(x).any() | torch.isinf(x).any()


def not_all_finite(x: Tensor, s: Tensor) -> Any:
    return x * s, ~torch.isfinite(x).all()


def any_not_finite(x: Tensor, s: Tensor) -> Any:
    return x * s, torch.any(torch.logical_not(torch.isfinite(x)))


def neither(x: Tensor, s: Tensor) -> Any:
    return x * s, ~(torch.isnan(x).any() | torch.isinf(x).any())


def flag_as_a_number(x: Tensor, s: Tensor) -> Any:
    return x * s, (~torch.isfinite(x).all()).float()


def flag_read_twice(x: Tensor, s: Tensor) -> Any:
    ok = torch.isfinite(x).all()
    return x * s, ok, torch.where(ok, s, s * 0.5)


def of_a_view(x: Tensor, s: Tensor) -> Any:
    return x.view(-1) * s, torch.isfinite(x).all()


SINGLE = (
    by_operators,
    by_methods,
    by_functions,
    scale_first,
    scale_first_function,
    divided,
    divided_by_method,
    by_the_reciprocal,
    in_place,
    in_place_divided,
    augmented,
    checked_after,
    checked_after_in_place,
    nan_or_inf,
    logical_or,
    two_flags,
    not_all_finite,
    any_not_finite,
    neither,
    flag_as_a_number,
    flag_read_twice,
    of_a_view,
)

# --- of two tensors -------------------------------------------------------------------------------


def loop(x: Tensor, z: Tensor, s: Tensor) -> Any:
    bad = torch.tensor(False)
    out = []
    for t in (x, z):
        bad = bad | ~torch.isfinite(t).all()
        out.append(t * s)
    return out, bad


def loop_in_place(x: Tensor, z: Tensor, s: Tensor) -> Any:
    bad = torch.zeros((), dtype=torch.bool, device=s.device)
    for t in (x, z):
        bad |= torch.logical_or(torch.isnan(t), torch.isinf(t)).any()
        t *= s
    return bad


def both(x: Tensor, z: Tensor, s: Tensor) -> Any:
    ok = torch.isfinite(x).all() & torch.isfinite(z).all()
    return x * s, z * s, ok


def stacked(x: Tensor, z: Tensor, s: Tensor) -> Any:
    ok = torch.stack([torch.isfinite(t).all() for t in (x, z)]).all()
    return x * s, z * s, ok


def foreach(x: Tensor, z: Tensor, s: Tensor) -> Any:
    y = torch._foreach_mul([x, z], s)
    return y[0], y[1], torch.logical_and(x.isfinite().all(), z.isfinite().all())


def foreach_divided(x: Tensor, z: Tensor, s: Tensor) -> Any:
    y = torch._foreach_div([x, z], s)
    return y[0], y[1], torch.isfinite(y[0]).all() & torch.isfinite(y[1]).all()


def foreach_in_place(x: Tensor, z: Tensor, s: Tensor) -> Any:
    bad = ~torch.isfinite(x).all() | ~torch.isfinite(z).all()
    torch._foreach_mul_([x, z], s)
    return bad


def amp_op(x: Tensor, z: Tensor, s: Tensor) -> Any:
    found_inf = torch.zeros(1, device=s.device)
    torch._amp_foreach_non_finite_check_and_unscale_([x, z], found_inf, s)
    return found_inf


PAIRS = (
    loop,
    loop_in_place,
    both,
    stacked,
    foreach,
    foreach_divided,
    foreach_in_place,
    amp_op,
)

# --- with norms: the last result is one -----------------------------------------------------------


def vector_norm(x: Tensor, z: Tensor, s: Tensor) -> Any:
    y, v = x * s, z * s
    ok = torch.isfinite(x).all() & torch.isfinite(z).all()
    norms = [torch.linalg.vector_norm(t) for t in (y, v)]
    return y, v, ok, torch.linalg.vector_norm(torch.stack(norms))


def foreach_norm(x: Tensor, z: Tensor, s: Tensor) -> Any:
    ok = torch.isfinite(x).all() & torch.isfinite(z).all()
    torch._foreach_mul_([x, z], s)
    norms = torch._foreach_norm([x, z], 2.0)
    return ok, torch.linalg.vector_norm(torch.stack([norms[0], norms[1]]), 2.0)


def get_total_norm(x: Tensor, z: Tensor, s: Tensor) -> Any:
    ok = torch.isfinite(x).all() & torch.isfinite(z).all()
    x.mul_(s)
    z.mul_(s)
    return ok, torch.nn.utils.get_total_norm([x, z])


def squares(x: Tensor, z: Tensor, s: Tensor) -> Any:
    y, v = x * s, z * s
    ok = torch.isfinite(x).all() & torch.isfinite(z).all()
    return y, v, ok, ((y * y).sum() + v.pow(2).sum()).sqrt()


def python_sum(x: Tensor, z: Tensor, s: Tensor) -> Any:
    y = [t / s for t in (x, z)]
    ok = torch.isfinite(y[0]).all() & torch.isfinite(y[1]).all()
    return ok, sum(t.square().sum() for t in y)


def amp_op_and_norm(x: Tensor, z: Tensor, s: Tensor) -> Any:
    found_inf = torch.zeros(1, device=s.device)
    torch._amp_foreach_non_finite_check_and_unscale_([x, z], found_inf, s)
    return found_inf, torch.stack([x.norm(), torch.norm(z)]).norm()


def norm_of_what_is_not_kept(x: Tensor, z: Tensor, s: Tensor) -> Any:
    ok = torch.isfinite(x).all() & torch.isfinite(z).all()
    return ok, ((x * s).norm() ** 2 + (z * s).norm() ** 2) ** 0.5


NORMS = (
    vector_norm,
    foreach_norm,
    get_total_norm,
    squares,
    python_sum,
    amp_op_and_norm,
    norm_of_what_is_not_kept,
)

# --- near misses ----------------------------------------------------------------------------------


def mask_read(x: Tensor, z: Tensor, s: Tensor) -> Any:
    mask = torch.isfinite(x)
    return x * s, mask.all(), mask.sum()


def written_between(x: Tensor, z: Tensor, s: Tensor) -> Any:
    ok = torch.isfinite(x).all()
    x.add_(1)
    return x * s, ok


def written_between_through_a_view(x: Tensor, z: Tensor, s: Tensor) -> Any:
    row = x[0]
    ok = torch.isfinite(x).all()
    row.fill_(float("inf"))
    return x * s, ok


def written_by_an_index(x: Tensor, z: Tensor, s: Tensor) -> Any:
    ok = torch.isfinite(x).all()
    x[0] = 1
    return x * s, ok


def scale_written_between(x: Tensor, z: Tensor, s: Tensor) -> Any:
    ok = torch.isfinite(x).all() & torch.isfinite(z).all()
    y = x * s
    s.add_(1)
    return y, z * s, ok


def different_scales(x: Tensor, z: Tensor, s: Tensor) -> Any:
    ok = torch.isfinite(x).all() & torch.isfinite(z).all()
    return x * s, z * (s + 1), ok


def product_and_quotient(x: Tensor, z: Tensor, s: Tensor) -> Any:
    ok = torch.isfinite(x).all() & torch.isfinite(z).all()
    return x * s, z / s, ok


def vector_scale(x: Tensor, z: Tensor, s: Tensor) -> Any:
    return x * s.expand(1), torch.isfinite(x).all()


def number_scale(x: Tensor, z: Tensor, s: Tensor) -> Any:
    return x * 0.5, torch.isfinite(x).all()


def quotient_of_the_scale(x: Tensor, z: Tensor, s: Tensor) -> Any:
    return s / x, torch.isfinite(x).all()


def rounded_quotient(x: Tensor, z: Tensor, s: Tensor) -> Any:
    return torch.div(x, s, rounding_mode="floor"), torch.isfinite(x).all()


def double_scale(x: Tensor, z: Tensor, s: Tensor) -> Any:
    return x * s.double(), torch.isfinite(x).all()


def double_tensors(x: Tensor, z: Tensor, s: Tensor) -> Any:
    wide = x.double()
    return wide * s.double(), torch.isfinite(wide).all()


def integers(x: Tensor, z: Tensor, s: Tensor) -> Any:
    whole = x.nan_to_num(0, 1, 1).clamp(-9, 9).int()
    return whole * s, torch.isfinite(whole).all()


def complex_numbers(x: Tensor, z: Tensor, s: Tensor) -> Any:
    both = torch.complex(x, x)
    return both * s, torch.isfinite(both).all()


def another_dtype(x: Tensor, z: Tensor, s: Tensor) -> Any:
    low = x.half()
    return low * s.expand(1), torch.isfinite(low).all()


def narrowed_check(x: Tensor, z: Tensor, s: Tensor) -> Any:
    return x * s, torch.isfinite(x.half()).all()


def check_of_another(x: Tensor, z: Tensor, s: Tensor) -> Any:
    return x * s, torch.isfinite(z).all()


def check_of_more(x: Tensor, z: Tensor, s: Tensor) -> Any:
    return x * s, torch.isfinite(x).all() & torch.isfinite(z).all()


def flags_read_one_by_one_of_a_list(x: Tensor, z: Tensor, s: Tensor) -> Any:
    flags = [torch.isfinite(x).all(), torch.isfinite(z).all()]
    y = torch._foreach_mul([x, z], s)
    return y[0], y[1], flags[0], flags[1], torch.stack(flags).all()


def rows(x: Tensor, z: Tensor, s: Tensor) -> Any:
    return x * s, torch.isfinite(x).all(0)


def kept_dimensions(x: Tensor, z: Tensor, s: Tensor) -> Any:
    return x * s, torch.isfinite(x).all(0, True)


def only_nan(x: Tensor, z: Tensor, s: Tensor) -> Any:
    return x * s, torch.isnan(x).any()


def nan_and_inf(x: Tensor, z: Tensor, s: Tensor) -> Any:
    return x * s, (torch.isnan(x) & torch.isinf(x)).any()


def any_finite(x: Tensor, z: Tensor, s: Tensor) -> Any:
    return x * s, torch.isfinite(x).any()


def only_negative_infinity(x: Tensor, z: Tensor, s: Tensor) -> Any:
    return x * s, ~(torch.isneginf(x) | torch.isnan(x)).any()


def scale_from_the_flag(x: Tensor, z: Tensor, s: Tensor) -> Any:
    ok = torch.isfinite(x).all()
    return x * torch.where(ok, s, s * 0), ok


def read_between(x: Tensor, z: Tensor, s: Tensor) -> Any:
    ok = torch.isfinite(x).all() & torch.isfinite(z).all()
    x.mul_(s)
    total = x.sum() + z.sum()
    z.mul_(s)
    return ok, total


def twice_the_same(x: Tensor, z: Tensor, s: Tensor) -> Any:
    ok = torch.isfinite(x).all() & torch.isfinite(x.view(-1)).all()
    torch._foreach_mul_([x, x.view(-1)], s)
    return ok


def overlapping(x: Tensor, z: Tensor, s: Tensor) -> Any:
    a, b = x[:2], x[1:]
    ok = torch.isfinite(a).all() & torch.isfinite(b).all()
    a.mul_(s)
    b.mul_(s)
    return ok


def into_another(x: Tensor, z: Tensor, s: Tensor) -> Any:
    return torch.mul(x, s, out=torch.empty_like(x)), torch.isfinite(x).all()


def of_a_part(x: Tensor, z: Tensor, s: Tensor) -> Any:
    return x * s, torch.isfinite(x[0]).all()


def shared_flag(x: Tensor, z: Tensor, s: Tensor) -> Any:
    """The flag of the tensors is also changed by its reader."""
    bad = ~torch.isfinite(x).all()
    seen = bad
    bad |= ~torch.isfinite(z).all()
    return x * s, z * s, bad, seen & bad.logical_not()


MISSES = (
    mask_read,
    written_between,
    written_between_through_a_view,
    written_by_an_index,
    scale_written_between,
    different_scales,
    product_and_quotient,
    vector_scale,
    number_scale,
    quotient_of_the_scale,
    rounded_quotient,
    double_scale,
    double_tensors,
    integers,
    complex_numbers,
    another_dtype,
    narrowed_check,
    check_of_another,
    check_of_more,
    flags_read_one_by_one_of_a_list,
    rows,
    kept_dimensions,
    only_nan,
    nan_and_inf,
    any_finite,
    only_negative_infinity,
    scale_from_the_flag,
    read_between,
    twice_the_same,
    overlapping,
    into_another,
    of_a_part,
)
