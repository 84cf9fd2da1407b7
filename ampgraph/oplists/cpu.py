"""torch.autocast's rules for CPU, registered in `ATen/autocast_mode.cpp`, torch 2.11 to 2.14.

The CPU lists are their own and share only 39 ops with CUDA's: layer_norm, rms_norm, softmax, sum
and exp are absent and follow their inputs. Names are as in `ampgraph.oplists.cuda`.
"""

# Ops whose eligible arguments are cast to the region's dtype: matrix products and the ops
# made of them, which hardware runs several times faster in low precision.
ALLOW = frozenset(
    {
        "aten::_addmm_activation",
        "aten::_convolution.deprecated",
        "aten::_native_multi_head_attention",
        "aten::addbmm",
        "aten::addmm",
        "aten::baddbmm",
        "aten::bmm",
        "aten::conv1d",
        "aten::conv1d.padding",
        "aten::conv2d",
        "aten::conv2d.padding",
        "aten::conv3d",
        "aten::conv3d.padding",
        "aten::conv_tbc",
        "aten::conv_transpose1d",
        "aten::conv_transpose2d.input",
        "aten::conv_transpose3d.input",
        "aten::linalg_vecdot",
        "aten::linear",
        "aten::matmul",
        "aten::mkldnn_rnn_layer",  # what nn.LSTM runs on CPU
        "aten::mm",
        "aten::prelu",
        "aten::scaled_dot_product_attention",
    }
)

# Ops whose eligible arguments are cast to float32: they lose range or digits in low precision.
DENY = frozenset(
    {
        "aten::_grid_sampler_2d_cpu_fallback",
        "aten::_lu_with_info",
        "aten::adaptive_avg_pool3d",
        "aten::adaptive_max_pool3d",
        "aten::avg_pool3d",
        "aten::binary_cross_entropy",  # allowed in float32, where CUDA bans it
        "aten::binary_cross_entropy_with_logits",
        "aten::cdist",
        "aten::cholesky",  # gone in 2.14
        "aten::cholesky_inverse",
        "aten::cholesky_solve",
        "aten::cosine_embedding_loss",
        "aten::cross_entropy_loss",  # whole, where CUDA lists its inner ops
        "aten::ctc_loss.IntList",
        "aten::ctc_loss.Tensor",
        "aten::fake_quantize_per_tensor_affine",
        "aten::fft_fft",
        "aten::fft_fft2",
        "aten::fft_fftn",
        "aten::fft_hfft",
        "aten::fft_ifft",
        "aten::fft_ifft2",
        "aten::fft_ifftn",
        "aten::fft_ihfft",
        "aten::fft_irfft",
        "aten::fft_irfft2",
        "aten::fft_irfftn",
        "aten::fft_rfft",
        "aten::fft_rfft2",
        "aten::fft_rfftn",
        "aten::fractional_max_pool2d",
        "aten::fractional_max_pool3d",
        "aten::geqrf",
        "aten::grid_sampler",  # in float32, where CUDA promotes
        "aten::grid_sampler_2d",
        "aten::grid_sampler_3d",
        "aten::hinge_embedding_loss",
        "aten::huber_loss",
        "aten::inverse",
        "aten::kl_div",
        "aten::l1_loss",
        "aten::linalg_cholesky",
        "aten::linalg_cholesky_ex",
        "aten::linalg_cond",
        "aten::linalg_cond.p_str",
        "aten::linalg_eig",
        "aten::linalg_eigh",
        "aten::linalg_eigvals",
        "aten::linalg_eigvalsh",
        "aten::linalg_householder_product",
        "aten::linalg_inv",
        "aten::linalg_inv_ex",
        "aten::linalg_lstsq",
        "aten::linalg_matrix_rank",
        "aten::linalg_matrix_rank.atol_rtol_float",
        "aten::linalg_matrix_rank.atol_rtol_tensor",
        "aten::linalg_matrix_rank.tol_tensor",
        "aten::linalg_matrix_sqrth",  # joined in 2.14
        "aten::linalg_qr",
        "aten::linalg_solve",
        "aten::linalg_svd",
        "aten::linalg_svdvals",
        "aten::linalg_tensorinv",
        "aten::linalg_tensorsolve",
        "aten::lu_solve",
        "aten::margin_ranking_loss",
        "aten::max_pool3d",
        "aten::max_unpool2d",
        "aten::max_unpool3d",
        "aten::mse_loss",
        "aten::multi_margin_loss",
        "aten::multilabel_margin_loss",
        "aten::multilabel_margin_loss_forward",
        "aten::nanquantile",
        "aten::nanquantile.scalar",
        "aten::nll_loss",
        "aten::nll_loss2d",
        "aten::orgqr",
        "aten::ormqr",
        "aten::pinverse",
        "aten::poisson_nll_loss",
        "aten::polar",
        "aten::prod",  # inputs are cast, where CUDA sets the dtype
        "aten::prod.dim_Dimname",  # named tensors, gone in 2.13
        "aten::prod.dim_int",
        "aten::qr",  # gone in 2.14
        "aten::quantile",
        "aten::quantile.scalar",
        "aten::reflection_pad1d",
        "aten::reflection_pad2d",
        "aten::replication_pad1d",
        "aten::replication_pad2d",
        "aten::replication_pad3d",
        "aten::smooth_l1_loss",
        "aten::soft_margin_loss",
        "aten::stft",
        "aten::stft.center",
        "aten::svd",
        "aten::trace",
        "aten::triangular_solve",
        "aten::triplet_margin_loss",
        "aten::view_as_complex",  # a view, but of the float32 copy: complex bfloat16 does not exist
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
        "aten::cat",
        "aten::index_copy",
        "aten::index_copy.dimname",  # named tensors, gone in 2.13
        "aten::stack",
    }
)

# Ops that torch.autocast refuses to run.
BANNED: frozenset[str] = frozenset()
