"""GPU kernels, each a Triton kernel beside the plain-torch reference it must equal.

Here will live the arithmetic that a generated kernel does not already do as fast: the unscale and
non-finite check of a loss scaler, the clip and norm over many gradients, and whatever measurement
shows to be worth a hand-written kernel. A kernel enters only with a reference twin of the same
signature, so that every number it produces can be checked on a machine with no GPU.
"""
