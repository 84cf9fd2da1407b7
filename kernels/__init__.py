"""GPU kernels, each a Triton kernel beside the plain-torch reference it must equal.

A kernel enters only where a generated one is not already as fast, and only with a reference twin
of the same signature, so that every number it produces can be checked on a machine with no GPU.
Importing this package registers the ops of its modules under `torch.ops.ampgraph`.
"""

from ampgraph.kernels import cast, unscale, update_scale

__all__ = ["cast", "unscale", "update_scale"]
