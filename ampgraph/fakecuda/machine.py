"""A machine with a GPU, made of fake tensors and recordings."""

import contextlib
import copy
from collections.abc import Generator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ampgraph.fakecuda.attention import attention_chosen
from ampgraph.fakecuda.gpus import GPU
from ampgraph.fakecuda.pretend import gpu_pretended
from ampgraph.fakecuda.record import Recording, inductor_recorded
from ampgraph.fakecuda.ship import fake_tensor

Module = TypeVar("Module", bound=nn.Module)


@contextlib.contextmanager
def fake_cuda(gpu: GPU) -> Generator[Recording]:
    """Inside, tensors are fake and may be on "cuda"; what torch.compile makes is recorded.

    Make modules under `torch.device("cuda")`, or bring them with `to_fake_cuda`. Nothing that
    depends on a tensor's values works, `.item()` before all, nor do CUDA graphs and max-autotune.

    Raises:
        FakeCudaError: on a machine with a GPU, or on one that cannot build the hooks.
    """
    torch.compiler.reset()
    with (
        gpu_pretended(gpu),
        attention_chosen(),
        inductor_recorded() as recording,
        FakeTensorMode(),
    ):
        try:
            yield recording
        finally:
            torch.compiler.reset()


def to_fake_cuda(module: Module) -> Module:
    """A deep copy of a module whose parameters and buffers are fake, on the GPU, and still tied.

    In place of `module.to("cuda")`, which cannot swap fake tensors for real ones.
    """
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        memo[id(tensor)] = _fake_like(tensor)
    return copy.deepcopy(module, memo)


def _fake_like(tensor: Tensor) -> Tensor:
    """Of the same shape, strides and dtype; a parameter for a parameter."""
    is_parameter = isinstance(tensor, nn.Parameter)
    grad = is_parameter and tensor.requires_grad
    return fake_tensor(tensor.shape, tensor.stride(), tensor.dtype, grad, is_parameter)
