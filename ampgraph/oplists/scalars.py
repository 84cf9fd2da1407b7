"""Ops whose scalar arguments are values of the result's dtype, so that a large one can overflow.

Read from the schemas in native_functions.yaml: only arguments that are stored in elements, bound
them or are combined with them; never sizes, dims, probabilities, exponents, divisors or what is
compared. For each, eager torch raises or gives infinity where the value does not fit
(tests/test_constants.py); aliases such as `subtract` are opened into one of these.

A factor is widened but never clamped: h.mul_(1e6) of a small h is finite as it is.
"""


def _rows(names: str, *arguments: str) -> dict[str, frozenset[str]]:
    return {f"aten::{name}": frozenset(arguments) for name in names.split()}


VALUE_SCALARS: dict[str, frozenset[str]] = {
    **_rows("masked_fill masked_fill_ fill fill_ index_fill index_fill_ scatter scatter_", "value"),
    **_rows("constant_pad_nd pad threshold threshold_", "value"),
    **_rows("full_like new_full fill_diagonal_", "fill_value"),
    **_rows("where", "self", "other"),
    **_rows("add add_ sub sub_ rsub mul", "other"),
    **_rows("clamp clamp_", "min", "max"),
    **_rows("clamp_min clamp_min_", "min"),
    **_rows("clamp_max clamp_max_", "max"),
    **_rows("hardtanh hardtanh_", "min_val", "max_val"),
    **_rows("nan_to_num nan_to_num_", "nan", "posinf", "neginf"),
}

# Functions and methods that fill a tensor: the position and the name of what they fill it with.
FILLS: dict[str, tuple[int, str]] = {
    "full": (1, "fill_value"),
    "full_like": (1, "fill_value"),
    "new_full": (2, "fill_value"),
    "tensor": (0, "data"),
    "new_tensor": (1, "data"),
    "scalar_tensor": (0, "s"),
    "setitem": (2, ""),
}

# Ops that pass large elements on unchanged or nearly so: how a mask gets to where it is used.
CARRIERS = frozenset(
    f"aten::{name}"
    for name in (
        "add add_ sub sub_ rsub mul mul_ neg where masked_fill masked_fill_ cat stack to _to_copy "
        "type_as expand expand_as view view_as reshape _unsafe_view unsqueeze squeeze transpose t "
        "permute flatten unflatten select slice index index_select gather clone contiguous tril "
        "triu minimum maximum repeat repeat_interleave tile roll flip narrow chunk split unbind "
        "alias detach lift_fresh copy_ fill_ broadcast_to movedim swapaxes"
    ).split()
)
