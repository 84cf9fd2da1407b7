"""The machine and the versions that figures depend on."""

import platform
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("ampgraph", "torch", "triton", "transformers")


def machine() -> dict[str, Any]:
    """The device, and every version that a figure depends on."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "date": date.today().isoformat(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "gpu": gpu and gpu.name,
        "gpu_memory": gpu and gpu.total_memory,
        "cuda": torch.version.cuda,
        **versions(PACKAGES),
    }


def versions(packages: tuple[str, ...]) -> dict[str, str | None]:
    """Of Python and of these packages, None for one that is not there."""
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
