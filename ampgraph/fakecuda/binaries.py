"""Kernels as binaries: Triton's compiler and Nvidia's assembler are in its wheel; no driver needed.

Nothing is loaded or launched.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch._inductor.config as inductor_config
import triton
from torch._inductor.codecache import PyCodeCache

from ampgraph.fakecuda.gpus import GPU
from ampgraph.fakecuda.pretend import gpu_pretended
from ampgraph.fakecuda.replace import there


@dataclass(frozen=True)
class Binary:
    """One compiled kernel.

    Attributes:
        assembly: PTX, or AMD's own.
        registers: a thread.
        spilled: bytes stored to memory and loaded again for want of registers.
        config: which of the configurations that are tried at run time; "" where there is one.
    """

    assembly: str
    registers: int
    spilled: int
    config: str = ""


def binaries_of(name: str, source: str, gpu: GPU) -> list[Binary]:
    """A recorded kernel, compiled in each configuration that Inductor would try on the GPU.

    Args:
        name: of the function in the source, as in `Graph.kernels`.

    Raises:
        FakeCudaError: as `gpu_pretended`.
    """
    # With the static launcher the assembly is not kept; 2.11 calls it another name.
    launchers = ["use_static_cuda_launcher", "use_static_triton_launcher"]
    static = dict.fromkeys(there(inductor_config, launchers), False)
    with gpu_pretended(gpu), inductor_config.patch(static):
        kernel: Any = getattr(PyCodeCache.load(source), name)
        kernel.precompile(warm_cache_only=True)
    return [nvidia(r.kernel.asm["ptx"], str(r.config)) for r in kernel.compile_results]


def nvidia(ptx: str, config: str = "") -> Binary:
    """What ptxas says of PTX with one kernel."""
    arch = found(r"^\.target\s+(\w+)", ptx)
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    blackwell = folder / "ptxas-blackwell"
    new = int(re.sub(r"\D", "", arch)) >= 100 and blackwell.exists()
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "kernel.ptx"
        path.write_text(ptx)
        command = [blackwell if new else folder / "ptxas", "-v", f"--gpu-name={arch}", path, "-o"]
        done = subprocess.run(
            [str(word) for word in [*command, path.with_suffix(".cubin")]],
            capture_output=True,
            text=True,
            check=True,
        )
    stores = int(found(r"(\d+) bytes spill stores", done.stderr))
    loads = int(found(r"(\d+) bytes spill loads", done.stderr))
    registers = int(found(r"Used (\d+) registers", done.stderr))
    return Binary(ptx, registers, stores + loads, config)


def found(pattern: str, text: str) -> str:
    """The first group of a pattern that must be in the text."""
    match = re.search(pattern, text, re.MULTILINE)
    assert match, f"no {pattern!r} in: {text[:2000]}"
    return match[1]
