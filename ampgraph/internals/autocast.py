"""The state of torch's own autocast, and who asks for it."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import contextlib
import sys
import types
from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

enter_autocast = _enter_autocast


exit_autocast = _exit_autocast


def ambient_autocast() -> dict[str, torch.dtype]:
    """The device types whose autocast is on now, each with its dtype."""
    return {
        device: torch.get_autocast_dtype(device)
        for device in torch._C._autocast_supported_devices()
        if torch.is_autocast_enabled(device)
    }


def casts_may_be_kept() -> bool:
    """Whether the caller's own autocast, if one is on, may keep casts from call to call."""
    return torch.is_autocast_cache_enabled() or not torch._C._is_any_autocast_enabled()


def disable_autocast() -> contextlib.AbstractContextManager[None]:
    """Autocast off on every device, also for the autocast keys below us."""
    return torch._C._DisableAutocast()


@contextlib.contextmanager
def autocast_off_at_run_time() -> Generator[None]:
    """Compile with no autocast, into code that also turns the caller's autocast off when it runs.

    AOTAutograd wraps forward and backward in `_DisableAutocast` where `_is_any_autocast_enabled()`
    was true while it compiled (`graph_compile.py`, `disable_amp`). So every real device is off and
    one that no build has ("ipu") is on: nothing is cast, and the wrapping is emitted.
    """
    before = ambient_autocast()
    off = before.keys() - {"ipu"}
    try:
        for device in off:
            torch.set_autocast_enabled(device, False)
        torch.set_autocast_enabled("ipu", True)
        yield
    finally:
        torch.set_autocast_enabled("ipu", "ipu" in before)
        for device in off:
            torch.set_autocast_enabled(device, True)


@contextlib.contextmanager
def autocast_as(region: Iterable[tuple[str, torch.dtype, bool]]) -> Generator[None]:
    """Autocast as these say, on any build: torch.autocast("cuda") itself asks for a GPU."""
    devices = tuple(region)
    before = [(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d, _, _ in devices]
    try:
        _set_autocast(devices)
        yield
    finally:
        _set_autocast(before)


def _set_autocast(region: Iterable[tuple[str, torch.dtype, bool]]) -> None:
    for device, dtype, enabled in region:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


_AUTOCAST_CALLS = frozenset(
    function
    for module in (torch, torch._C)
    for name, function in vars(module).items()
    if "autocast" in name and isinstance(function, types.BuiltinFunctionType)
)


@contextlib.contextmanager
def autocast_asked() -> Generator[list[str]]:
    """Collect the names of the calls that ask for the autocast state or change it.

    Python's profiling hook shows each call of a C function, however it was imported. Where a
    profiler written in C has the hook, nothing can be seen, so the answer is that one asked.
    """
    asked: list[str] = []
    before: Any = sys.getprofile()
    if before is not None and not callable(before):
        yield ["unknown"]
        return

    def watch(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and argument in _AUTOCAST_CALLS:
            asked.append(argument.__name__)

    sys.setprofile(watch)
    try:
        yield asked
    finally:
        sys.setprofile(before)


def cpu_has_bf16_units() -> bool:
    """Whether the CPU multiplies bf16 in hardware (AVX512-BF16, AMX, or Arm's bf16)."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    x86 = any(getattr(torch.cpu, name, lambda: False)() for name in names)
    return x86 or bool(getattr(torch.ops.mkldnn, "_is_mkldnn_acl_supported", lambda: False)())
