"""Ops that refuse floating arguments of different dtypes, found by running them in eager torch.

Fake tensors do not check all of these, so the list is data. Each row raised for a float32 tensor
beside a bfloat16 one and accepted either dtype alone (torch 2.13, CPU).
"""

ONE_DTYPE = frozenset(
    f"aten::{name}"
    for name in (
        "index_put index_put_ _index_put_impl_ index_add index_add_ index_copy index_copy_ "
        "scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ "
        "masked_scatter masked_scatter_ index_reduce index_reduce_ "
        "grid_sampler grid_sampler_2d grid_sampler_3d lerp lerp_ "
        "mm bmm addmm addmm_ baddbmm baddbmm_ addbmm addbmm_ addmv addmv_ addr mv dot vdot "
        "linear matmul bilinear"
    ).split()
)
