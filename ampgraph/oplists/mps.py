"""torch.autocast's rules for MPS, registered in `ATen/autocast_mode.cpp`, torch 2.11 to 2.14.

The lists are CUDA's of an earlier time, typed in again. Names are as in `ampgraph.oplists.cuda`.
"""

# Ops whose eligible arguments are cast to the region's dtype: matrix products and the ops
# made of them, which hardware runs several times faster in low precision.
ALLOW = frozenset(
    {
        "aten::_convolution",
        "aten::_convolution.deprecated",
        "aten::_mps_convolution",
        "aten::addbmm",
        "aten::addmm",
        "aten::addmv",
        "aten::addr",
        "aten::baddbmm",
        "aten::bmm",
        "aten::chain_matmul",
        "aten::conv1d",
        "aten::conv2d",
        "aten::conv3d",
        "aten::conv_tbc",
        "aten::conv_transpose1d",
        "aten::conv_transpose2d.input",
        "aten::convolution",
        "aten::einsum",
        "aten::linalg_multi_dot",
        "aten::linear",
        "aten::lstm_cell",
        "aten::matmul",
        "aten::mm",
        "aten::mv",
        "aten::prelu",
        "aten::scaled_dot_product_attention",
    }
)

# Ops whose eligible arguments are cast to float32: they lose range or digits in low precision.
DENY = frozenset(
    {
        "aten::acos",
        "aten::asin",
        "aten::batch_norm",  # listed for MPS alone
        "aten::binary_cross_entropy_with_logits",
        "aten::cdist",
        "aten::conv_transpose3d.input",  # in float32, where CUDA allows
        "aten::cosh",
        "aten::cosine_embedding_loss",
        "aten::cosine_similarity",
        "aten::cumprod",  # inputs are cast, where CUDA sets the dtype
        "aten::cumprod.dimname",  # named tensors, gone in 2.13
        "aten::cumsum",  # inputs are cast, where CUDA sets the dtype
        "aten::cumsum.dimname",  # named tensors, gone in 2.13
        "aten::dist",
        "aten::erfinv",
        "aten::exp",
        "aten::expm1",
        "aten::frobenius_norm.dim",
        "aten::group_norm",
        "aten::hinge_embedding_loss",
        "aten::huber_loss",
        "aten::kl_div",
        "aten::l1_loss",
        "aten::layer_norm",
        "aten::linalg_matrix_norm",
        "aten::linalg_matrix_norm.str_ord",
        "aten::linalg_vector_norm",
        "aten::log",
        "aten::log10",
        "aten::log1p",
        "aten::log2",
        "aten::log_softmax.Dimname",  # named tensors, gone in 2.13
        "aten::log_softmax.int",  # inputs are cast, where CUDA sets the dtype
        "aten::logsumexp",
        "aten::margin_ranking_loss",
        "aten::mse_loss",
        "aten::multi_margin_loss",
        "aten::multilabel_margin_loss",
        "aten::native_layer_norm",
        "aten::nll_loss",
        "aten::nll_loss2d",
        "aten::nuclear_norm",
        "aten::nuclear_norm.dim",
        "aten::pdist",
        "aten::poisson_nll_loss",
        "aten::pow.Scalar",
        "aten::pow.Tensor_Scalar",
        "aten::pow.Tensor_Tensor",
        "aten::prod",  # inputs are cast, where CUDA sets the dtype
        "aten::prod.dim_Dimname",  # named tensors, gone in 2.13
        "aten::prod.dim_int",
        "aten::reciprocal",
        "aten::renorm",
        "aten::rsqrt",
        "aten::sinh",
        "aten::smooth_l1_loss",
        "aten::soft_margin_loss",
        "aten::softmax.Dimname",  # named tensors, gone in 2.13
        "aten::softmax.int",  # inputs are cast, where CUDA sets the dtype
        "aten::softplus",
        "aten::sum",  # inputs are cast, where CUDA sets the dtype
        "aten::sum.dim_DimnameList",  # named tensors, gone in 2.13
        "aten::sum.dim_IntList",
        "aten::tan",
        "aten::triplet_margin_loss",
    }
)

# Reductions that keep their inputs and accumulate in float32: `dtype=` becomes float32 where the
# caller gave none. Casting the input instead would give the same numbers from more memory.
SET_DTYPE: frozenset[str] = frozenset()

# As SET_DTYPE, for overloads that have no `dtype`: another overload, which has one, is called.
APPEND_DTYPE: frozenset[str] = frozenset()

# For each row of APPEND_DTYPE the overload that takes the appended dtype.
APPEND_TARGET: dict[str, str] = {}

# Ops with several tensors that must agree: eligible arguments are cast to the widest type among
# them and the region's dtype.
PROMOTE = frozenset(
    {
        "aten::addcdiv",
        "aten::addcmul",
        "aten::atan2",
        "aten::bilinear",
        "aten::cross",
        "aten::dot",
        "aten::grid_sampler",
        "aten::index_put",
        "aten::scatter_add",
        "aten::tensordot",
    }
)

# Ops that torch.autocast refuses to run.
BANNED: frozenset[str] = frozenset()
