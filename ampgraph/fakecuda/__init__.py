"""CUDA code without a GPU: what Inductor generates for one, on a machine that has none.

`machine.fake_cuda` makes torch believe in a GPU while it is entered: tensors on it are fake, what
is compiled is real, and every launch is recorded. `binaries` assembles the kernels and reads their
registers and spills; neither that nor Triton needs a driver.

Like `ampgraph.internals`, this package may touch what is private to torch. What it replaces, it
replaces while a context manager is entered and gives back after it, but for the hooks of `runtime`,
which last: use a process of its own (`child`) or one that has not run a backward yet. All was seen
in torch 2.11 to 2.14 unless a docstring says otherwise, with the build for CPUs and with the build
for CUDA without a driver; on Linux, where Triton is.
"""
