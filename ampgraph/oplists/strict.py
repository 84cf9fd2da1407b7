"""Ops whose Inductor CPU code, with emulate_precision_casts, is bit-equal to eager (torch 2.13).

EXACT: in every dtype: matrix products (the same library call), data movement, comparisons, and
arithmetic that IEEE rounds in one way only. EXACT_LOW: where the result is rounded to bfloat16 or
float16, on all 65,536 values of either; in float32 their vectorised code differs from eager's.
"""

EXACT = frozenset(
    (
        # matrix products
        "linear mm bmm addmm matmul conv1d conv2d conv3d "
        # data movement
        "view reshape transpose permute expand unsqueeze squeeze flatten unflatten t contiguous "
        "clone cat stack chunk split split_with_sizes unbind select slice index index_select "
        "gather embedding pad constant_pad_nd tril triu masked_fill where to _to_copy detach alias "
        "narrow "
        # one rounding, or none
        "abs neg relu reciprocal square floor ceil round trunc frac sign sgn clamp hardtanh relu6 "
        "leaky_relu maximum minimum fmax fmin fmod copysign positive nan_to_num "
        # comparisons
        "eq ne lt le gt ge isnan isinf isfinite logical_not"
    ).split()
)
EXACT_LOW = frozenset(
    (
        "tanh exp exp2 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh erf "
        "erfc sigmoid silu mish softplus log_sigmoid hardswish hardsigmoid"
    ).split()
)
# Exact between tensors; a Python number is first rounded to the tensor's dtype in eager, but not in
# Inductor's code, so it has to be one that the dtype holds.
EXACT_WITH_FITTING_SCALAR = frozenset("add sub mul div".split())
