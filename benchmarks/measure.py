"""How it is measured: the first call apart, then rounds in which every call has its turn.

Times are medians of interleaved rounds and mean something only beside each other, in one run.
"""

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def seconds_of_first(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call that compiles, its work on the device included."""
    started = time.perf_counter()
    call()
    settle(device)
    return time.perf_counter() - started


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(
    calls: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int, repeats: int
) -> dict[str, float]:
    """The median seconds of one call, for each; a round times `repeats` calls of each in turn.

    The order rotates, so that no call always follows the same neighbour.
    """
    names = list(calls)
    found: dict[str, list[float]] = {name: [] for name in names}
    for call in calls.values():  # caches, allocators and clocks: not this round
        call()
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            found[name].append(_seconds(calls[name], device, repeats))
    return {name: statistics.median(times) for name, times in found.items()}


def _seconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - started) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / repeats


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that a call has allocated at one time, over what was there before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    return _peak_on_host(call)


def _peak_on_host(call: Callable[[], Any]) -> int:
    """From the profiler's trace of every allocation: the CPU's allocator counts nothing itself."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    moved = sorted(
        (event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"
    )
    held: list[int] = list(itertools.accumulate((size for _, size in moved), initial=0))
    return max(held)


def host_reads(call: Callable[[], Any]) -> int:
    """How often a call on a GPU waits for it or copies from it, by CUDA's own record."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        call()
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
    found = [e.name for e in profile.events() or () if e.name in waits or "Memcpy DtoH" in e.name]
    # The profiler itself waits for the device once, when it stops.
    return len(found) - ("cudaDeviceSynchronize" in found)
