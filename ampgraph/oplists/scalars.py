"""Ops whose scalar arguments are values of the result's dtype, so that a large one can overflow.

Read from the schemas in native_functions.yaml: only arguments that are stored in, compared with or
combined with elements; never sizes, dims, probabilities or exponents.
"""

VALUE_SCALARS: dict[str, frozenset[str]] = {
    "aten::masked_fill": frozenset({"value"}),
    "aten::masked_fill_": frozenset({"value"}),
    "aten::fill": frozenset({"value"}),
    "aten::fill_": frozenset({"value"}),
    "aten::where": frozenset({"self", "other"}),
    "aten::add": frozenset({"other"}),
    "aten::add_": frozenset({"other"}),
    "aten::sub": frozenset({"other"}),
    "aten::sub_": frozenset({"other"}),
    "aten::rsub": frozenset({"other"}),
    "aten::mul": frozenset({"other"}),
    "aten::mul_": frozenset({"other"}),
    "aten::div": frozenset({"other"}),
    "aten::div_": frozenset({"other"}),
    "aten::clamp": frozenset({"min", "max"}),
    "aten::clamp_": frozenset({"min", "max"}),
    "aten::clamp_min": frozenset({"min"}),
    "aten::clamp_max": frozenset({"max"}),
    "aten::full_like": frozenset({"fill_value"}),
    "aten::new_full": frozenset({"fill_value"}),
    "aten::constant_pad_nd": frozenset({"value"}),
    "aten::pad": frozenset({"value"}),
    "aten::index_fill": frozenset({"value"}),
    "aten::index_fill_": frozenset({"value"}),
    "aten::scatter": frozenset({"value"}),
    "aten::scatter_": frozenset({"value"}),
    "aten::threshold": frozenset({"threshold", "value"}),
    "aten::hardtanh": frozenset({"min_val", "max_val"}),
    "aten::nan_to_num": frozenset({"nan", "posinf", "neginf"}),
}

# Factories whose fill value may travel to a low-precision op.
FACTORIES = frozenset({"full", "full_like", "new_full", "tensor", "scalar_tensor", "new_tensor"})

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
