"""torch.autocast's rules for CUDA, registered in `ATen/autocast_mode.{h,cpp}`, torch 2.11 to 2.14.

A name is an op as the dispatcher registers it: "aten::softmax.int" is one overload, and
"aten::linear" is the default overload alone. A row that the installed torch lacks is dropped when
the lists are read.
"""

# Ops whose eligible arguments are cast to the region's dtype: matrix products and the ops
# made of them, which hardware runs several times faster in low precision.
ALLOW = frozenset(
    {
        "aten::_convolution",
        "aten::_convolution.deprecated",  # kept for old TorchScript files
        "aten::_cudnn_rnn",  # CUDA builds alone; eager also lays the weights out anew
        "aten::_scaled_dot_product_flash_attention",
        "aten::_thnn_fused_gru_cell",
        "aten::_thnn_fused_lstm_cell",
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
        "aten::conv_transpose3d.input",
        "aten::convolution",
        "aten::cudnn_convolution",  # registered for CUDA alone, not by the header's lists
        "aten::cudnn_convolution_transpose",  # registered for CUDA alone, not by the header's lists
        "aten::einsum",
        "aten::gru_cell",
        "aten::linalg_multi_dot",
        "aten::linalg_vecdot",
        "aten::linear",
        "aten::lstm_cell",  # cast whole: its gates are computed in low precision too
        "aten::matmul",
        "aten::mm",
        "aten::mv",
        "aten::prelu",  # elementwise, but its weight must have its input's dtype
        "aten::rnn_relu_cell",
        "aten::rnn_tanh_cell",
        "aten::scaled_dot_product_attention",  # its fused kernels accumulate in float32
    }
)

# Ops whose eligible arguments are cast to float32: they lose range or digits in low precision.
DENY = frozenset(
    {
        "aten::_upsample_bicubic2d_aa",
        "aten::_upsample_bilinear2d_aa",
        "aten::_upsample_nearest_exact1d",
        "aten::_upsample_nearest_exact2d",
        "aten::_upsample_nearest_exact3d",
        "aten::acos",
        "aten::asin",
        "aten::binary_cross_entropy_with_logits",
        "aten::cdist",
        "aten::cosh",
        "aten::cosine_embedding_loss",
        "aten::cosine_similarity",
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
        "aten::linalg_matrix_sqrth",  # joined in 2.14, for CUDA and CPU alone
        "aten::log",
        "aten::log10",
        "aten::log1p",
        "aten::log2",
        "aten::logsumexp",
        "aten::margin_ranking_loss",
        "aten::mse_loss",
        "aten::multi_margin_loss",
        "aten::multilabel_margin_loss",
        "aten::native_layer_norm",
        "aten::nll_loss",  # cross_entropy is not listed: its log_softmax and nll_loss are
        "aten::nll_loss2d",
        "aten::nuclear_norm",
        "aten::nuclear_norm.dim",
        "aten::pdist",
        "aten::poisson_nll_loss",
        "aten::pow.Scalar",
        "aten::pow.Tensor_Scalar",  # squares of fp16 values above 255 overflow
        "aten::pow.Tensor_Tensor",
        "aten::reciprocal",  # overflows fp16 for small inputs
        "aten::renorm",
        "aten::rms_norm",  # joined in 2.12
        "aten::rsqrt",
        "aten::sinh",
        "aten::smooth_l1_loss",
        "aten::soft_margin_loss",
        "aten::softplus",
        "aten::tan",
        "aten::triplet_margin_loss",
        "aten::upsample_bicubic2d",
        "aten::upsample_bilinear2d",
        "aten::upsample_linear1d",
        "aten::upsample_nearest1d",  # copies values, but its backward adds them up
        "aten::upsample_nearest2d",
        "aten::upsample_nearest3d",
        "aten::upsample_trilinear3d",
    }
)

# Reductions that keep their inputs and accumulate in float32: `dtype=` becomes float32 where the
# caller gave none. Casting the input instead would give the same numbers from more memory.
SET_DTYPE = frozenset(
    {
        "aten::cumprod",
        "aten::cumprod.dimname",  # named tensors, gone in 2.13
        "aten::cumsum",
        "aten::cumsum.dimname",  # named tensors, gone in 2.13
        "aten::linalg_matrix_norm",
        "aten::linalg_matrix_norm.str_ord",
        "aten::linalg_vector_norm",
        "aten::log_softmax.Dimname",  # named tensors, gone in 2.13
        "aten::log_softmax.int",
        "aten::prod",
        "aten::prod.dim_Dimname",  # named tensors, gone in 2.13
        "aten::prod.dim_int",
        "aten::softmax.Dimname",  # named tensors, gone in 2.13
        "aten::softmax.int",
        "aten::sum",
        "aten::sum.dim_DimnameList",  # named tensors, gone in 2.13
        "aten::sum.dim_IntList",
    }
)

# As SET_DTYPE, for overloads that have no `dtype`: another overload, which has one, is called.
APPEND_DTYPE = frozenset(
    {
        "aten::norm.Scalar",
        "aten::norm.ScalarOpt_dim",
        "aten::norm.names_ScalarOpt_dim",  # named tensors, gone in 2.13
    }
)

# For each row of APPEND_DTYPE the overload that takes the appended dtype.
APPEND_TARGET = {
    "aten::norm.Scalar": "aten::norm.ScalarOpt_dtype",
    "aten::norm.ScalarOpt_dim": "aten::norm.ScalarOpt_dim_dtype",
    "aten::norm.names_ScalarOpt_dim": "aten::norm.names_ScalarOpt_dim_dtype",
}

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
        "aten::index_put",  # the values must have the destination's dtype
        "aten::scatter_add",  # the source must have the destination's dtype
        "aten::tensordot",
        "aten::vdot",
    }
)

# Ops that torch.autocast refuses to run.
BANNED = frozenset(
    {
        "aten::binary_cross_entropy",  # log of a low-precision sigmoid: use the _with_logits form
    }
)
