"""Many tensors in one launch: a table on the device with one row for each program.

A row is (source address, target address, elements, code), int64 [4]. Addresses point at the
program's own chunk, so a program needs no other offset than that inside of its chunk, and tensors
may be as large as memory. The code is twice the source's dtype code, plus one where both
addresses are multiples of 16 bytes, which lets a thread move 16 bytes at a time.
"""

import contextlib
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ampgraph.errors import AmpgraphError
from ampgraph.internals.tensors import is_traced

__all__ = ["BLOCK", "CODES", "current_device", "dense", "on_gpu", "rows", "traced_or_captured"]

# The dtypes the kernels read and write, and their codes.
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Chunks are multiples of this many elements, the most a program holds at once.
BLOCK = 2048
# A few waves of programs on the largest GPUs, and few enough partial results to add up at once.
PROGRAMS = 4096

# One tensor: source address, target address, elements, bytes an element of each, dtype code.
Entry = tuple[int, int, int, int, int, int]


def on_gpu(*lists: Sequence[Tensor]) -> bool:
    """Whether the Triton kernels can take these tensors: on an Nvidia or AMD GPU, of known dtypes.

    On a GPU, tensors of several devices are an error: a kernel would read foreign addresses.
    """
    tensors = [t for tensors in lists for t in tensors]
    if not lists[0] or lists[0][0].device.type != "cuda":
        return False
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        raise AmpgraphError(
            f"tensors on {', '.join(sorted(map(str, devices)))} in one call",
            cure="call once for each device, each time with a scale on that device",
        )
    return all(t.dtype in CODES for t in tensors)


def traced_or_captured(tensor: Tensor) -> bool:
    """Whether a launch must name its tensors, for whoever records it: a tracer or a CUDA graph.

    A table of addresses would be invisible to the tracer, and gone when the graph is replayed.
    """
    return is_traced(tensor) or torch.cuda.is_current_stream_capturing()


def current_device(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Make the tensor's GPU the current one, where Triton launches; nothing to do in a trace or
    in Triton's interpreter."""
    elsewhere = is_traced(tensor) or tensor.device.type != "cuda"
    return contextlib.nullcontext() if elsewhere else torch.cuda.device(tensor.device)


def dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its elements do not fill a stretch of memory in some order."""
    if tensor.is_contiguous():
        return tensor
    expected = 1
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in sizes if size != 1):
        if stride != expected:
            return tensor.clone()
        expected = stride * size
    return tensor


def rows(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """The table of dense tensors and their targets of the same layout, int64 [programs, 4].

    A table holds what its key holds and no more, so it is kept for as long as the addresses stay,
    for each stream: another might read it before it has arrived.
    """
    entries = tuple(
        (
            source.data_ptr(),
            target.data_ptr(),
            source.numel(),
            source.element_size(),
            target.element_size(),
            CODES[source.dtype],
        )
        for source, target in zip(sources, targets, strict=True)
    )
    device = sources[0].device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _on_device(entries, device, stream)


@lru_cache(maxsize=32)
def _on_device(entries: tuple[Entry, ...], device: torch.device, stream: int) -> Tensor:
    """The table of `rows`, sent without waiting; `stream`, the current one, is part of the key."""
    table = _table(entries)
    if device.type == "cuda":
        table = table.pin_memory()
    return table.to(device, non_blocking=True)


def _table(entries: tuple[Entry, ...]) -> Tensor:
    """The table of `rows` on the CPU; the chunks grow with the number of elements."""
    source, target, size, source_bytes, target_bytes, code = torch.tensor(
        entries, dtype=torch.int64, device="cpu"
    ).unbind(1)
    chunk = BLOCK * max(1, int(size.sum()) // (BLOCK * PROGRAMS))
    chunks = (size + chunk - 1) // chunk
    owner = torch.repeat_interleave(chunks)
    before = (chunks.cumsum(0) - chunks)[owner]
    first = (torch.arange(owner.numel(), device="cpu") - before) * chunk
    aligned = (source % 16 == 0) & (target % 16 == 0)
    return torch.stack(
        [
            source[owner] + first * source_bytes[owner],
            target[owner] + first * target_bytes[owner],
            torch.minimum(size[owner] - first, torch.tensor(chunk, device="cpu")),
            (2 * code + aligned)[owner],
        ],
        dim=1,
    )
