"""Unlisted ops whose kernels call listed ones, out of sight of a graph.

Eager autocast reaches into such a kernel, casts what it calls to low precision and says nothing.
Here the kernel stays whole, in the dtype of its inputs: the exception is more accurate, and told.
Found by comparing every OpInfo sample and random programs with eager autocast (torch 2.13, CPU);
the kernels are in ATen/native: Linear.cpp, AffineGridGenerator.cpp, transformers/.
"""

CALLED_INSIDE: dict[str, str] = {
    "aten::_trilinear": "bmm",
    "aten::affine_grid_generator": "bmm",
    "aten::_transformer_encoder_layer_fwd": "linear and attention",
    "aten::_native_multi_head_attention": "linear and attention",
}
