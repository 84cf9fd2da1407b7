"""Ops that refuse floating arguments of different dtypes, found by running them in eager torch.

Fake tensors do not check all of these, so the lists are data, derived from the samples of torch's
own OpInfo database by tests/test_one_dtype.py (torch 2.13, CPU): each op runs with float32 alone
and with bfloat16 alone, and raises for every mixture of the two.
"""


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


ONE_DTYPE = _aten(
    # matrix products, for policies that took them off the lists
    "addbmm addbmm_ addmm addmm_ addmv addmv_ baddbmm baddbmm_ bilinear bmm dot linear matmul mm "
    "mv vdot linalg_multi_dot tensordot "
    # convolutions: a bias alone may differ in some of their kernels
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution "
    "_convolution _convolution_mode "
    # writes by index
    "index_add index_add_ index_copy index_copy_ index_put index_put_ _index_put_impl_ "
    "index_reduce index_reduce_ masked_scatter masked_scatter_ put put_ scatter scatter_ "
    "scatter_add scatter_add_ scatter_reduce scatter_reduce_ _unsafe_index_put "
    "_unsafe_masked_index_put_accumulate "
    # element by element, but without type promotion
    "cross heaviside heaviside_ isclose allclose lerp lerp_ linalg_cross prelu _prelu_kernel "
    # the rest
    "_chunk_cat _histogramdd_from_bin_tensors binary_cross_entropy cartesian_prod embedding_bag "
    "_embedding_bag _embedding_bag_forward_only fractional_max_pool2d fractional_max_pool3d "
    "grid_sampler grid_sampler_2d grid_sampler_3d histogram meshgrid nll_loss nll_loss_forward "
    "nll_loss_nd nll_loss2d nll_loss2d_forward _sparse_mm_reduce_impl "
    "scaled_dot_product_attention"
)

# Norms take float32 parameters beside a low-precision input, and no other mixture.
NORMS = _aten(
    "_batch_norm_impl_index _batch_norm_with_update _native_batch_norm_legit batch_norm "
    "group_norm instance_norm layer_norm native_batch_norm native_group_norm native_layer_norm"
)

# No kernel in a low dtype on any device, which fake tensors do not tell: linear algebra that ends
# in LAPACK. On CPU autocast's list covers the callers of most, on CUDA eager autocast raises.
FLOAT_ONLY = _aten(
    "_linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd "
    "cholesky cholesky_inverse cholesky_solve geqrf linalg_cholesky_ex linalg_eig linalg_eigvals "
    "linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq "
    "linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_qr linalg_solve_triangular lu_solve "
    "orgqr ormqr triangular_solve"
)
