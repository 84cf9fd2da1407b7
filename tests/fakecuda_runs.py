"""What the tests run in a child process, where there is a fake GPU."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampgraph.fakecuda.binaries import Binary, binaries_of
from ampgraph.fakecuda.gpus import GPU, gpu_named
from ampgraph.fakecuda.machine import fake_cuda, to_fake_cuda
from ampgraph.fakecuda.pretend import gpu_pretended
from ampgraph.fakecuda.record import Recording
from ampgraph.fakecuda.runtime import install
from ampgraph.kernels.unscale import check
from benchmarks.bytes import StepRow, step_rows
from benchmarks.compile_time import Block

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Found:
    """What one process found out, for many tests.

    Attributes:
        block: a block under autocast, forward and backward.
        binaries: of its forward's kernels.
        attention: the ops that scaled_dot_product_attention was, by dtype and mask.
        tied: whether a tied parameter is one fake parameter.
    """

    block: Recording
    binaries: dict[str, list[Binary]]
    attention: dict[tuple[torch.dtype, bool], list[str]]
    tied: bool


def found(name: str) -> Found:
    """All of it, between two backwards on the CPU."""
    install()
    gpu = gpu_named(name)
    before = vars(torch.cuda).copy()
    _cpu_backward()
    recording = block(gpu)
    kernels = recording.forward[0].kernels
    with gpu_pretended(gpu):
        binaries = {n: binaries_of(k.function, k.source) for n, k in kernels.items()}
    cases = [(BF16, False), (torch.float32, False), (BF16, True)]
    ops = {case: attention(gpu, *case) for case in cases}
    result = Found(recording, binaries, ops, tied(gpu))
    assert {n: v for n, v in vars(torch.cuda).items() if n in before} == before
    _cpu_backward()
    return result


def block(gpu: GPU) -> Recording:
    """A block under autocast, forward and backward."""
    with fake_cuda(gpu) as recording:
        model = to_fake_cuda(Block(width=256, heads=4))
        x = torch.randn(8, 128, 256, device="cuda", requires_grad=True)
        with torch.autocast("cuda", BF16):
            y = torch.compile(model, fullgraph=True)(x)
        y.sum().backward()
        assert model.up.weight.grad is not None
        assert x.grad is not None
        assert (model.up.weight.grad.shape, str(x.grad.device)) == ((1024, 256), "cuda:0")
    return recording


def _cpu_backward() -> None:
    """A compiled function on real tensors, before and after the fake ones."""
    x = torch.randn(5, requires_grad=True)
    torch.compile(lambda x: (x.sin() * x).sum(), fullgraph=True)(x).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, x.detach().cos() * x.detach() + x.detach().sin())


def attention(gpu: GPU, dtype: torch.dtype, masked: bool) -> list[str]:
    """The attention ops of a compiled scaled_dot_product_attention."""
    with fake_cuda(gpu) as recording:
        q = torch.randn(2, 4, 64, 32, device="cuda", dtype=dtype)
        mask = torch.ones(64, 64, dtype=torch.bool, device="cuda") if masked else None
        torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, mask))(q)
    return [call.name for call in recording.graphs[0].of("extern")]


def tied(gpu: GPU) -> bool:
    """Whether a tied parameter is one fake parameter."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with fake_cuda(gpu):
        fake = to_fake_cuda(model)
        return fake[0].weight is fake[1].weight


def moved() -> tuple[list[StepRow], float]:
    """The table of steps, and the bytes of a compiled clip."""
    return step_rows("h200"), clip_bytes()


def clip_bytes() -> float:
    """Bytes for each parameter of check, norm and clip coefficient, as generated."""
    with fake_cuda(gpu_named("h200")) as recording:
        grads = [torch.zeros(2**20, device="cuda") for _ in range(3)]

        def clip(grads: list[Tensor], inverse: Tensor) -> tuple[Tensor, Tensor]:
            found, squares = check(grads, inverse)
            return found, inverse * (1.0 / (squares.sqrt() + 1e-6)).clamp(max=1.0)

        torch.compile(clip, fullgraph=True)(grads, torch.ones((), device="cuda"))
    return sum(graph.bytes for graph in recording.graphs) / (3 * 2**20)
