"""torch.autocast's rules for XPU (Intel GPUs): the header's lists, which CUDA registers as well.

Registered in `ATen/autocast_mode.cpp` of torch 2.11 to 2.14. Names, sets and reasons are those of
`ampgraph.oplists.cuda`, less what only cuDNN has.
"""

from ampgraph.oplists import cuda

ALLOW = cuda.ALLOW - {"aten::cudnn_convolution", "aten::cudnn_convolution_transpose"}
DENY = cuda.DENY
SET_DTYPE = cuda.SET_DTYPE
APPEND_DTYPE = cuda.APPEND_DTYPE
APPEND_TARGET = cuda.APPEND_TARGET
PROMOTE = cuda.PROMOTE
BANNED = cuda.BANNED
