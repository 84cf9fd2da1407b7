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


def binaries_of(function: str, source: str) -> list[Binary]:
    """A recorded kernel, compiled in each configuration that Inductor would try on the GPU.

    A GPU must be there, or be pretended.

    Args:
        function: the name of the kernel in the source.
    """
    results = _compiled(function, source)
    return [nvidia(r.kernel.asm["ptx"], str(r.config)) for r in results]


def uses_of_pointers(function: str, source: str) -> list[tuple[bool, bool]]:
    """Whether a kernel loads from each of its pointers, and whether it stores to it.

    Known from Triton's first intermediate form, with helpers inlined. A GPU must be there, or
    be pretended.
    """
    text: str = _compiled(function, source)[0].kernel.asm["ttir"]
    head = found(r"tt\.func public @\w+\((.*?)\) attributes", text)
    pointers = re.findall(r"(%[\w.]+): !tt\.ptr", head)
    base = {pointer: pointer for pointer in pointers}
    # Each name in an assignment, a loop's too, points where the first pointer on the right does.
    for name, value in re.findall(r"(%[\w.]+)(?::\d+)? = (?:tt\.\w+ )?(%[\w.]+)", text):
        if value in base:
            base.setdefault(name, base[value])
    loads = {base.get(name) for name in re.findall(r"tt\.load (%[\w.]+)", text)}
    stores = {base.get(name) for name in re.findall(r"tt\.store (%[\w.]+)", text)}
    both = {base.get(name) for name in re.findall(r"tt\.atomic_.*?(%[\w.]+),", text)}
    return [(p in loads | both, p in stores | both) for p in pointers]


def _compiled(function: str, source: str) -> list[Any]:
    """Triton's results, one for each configuration."""
    # With the static launcher the assembly is not kept; 2.11 calls it another name.
    launchers = ["use_static_cuda_launcher", "use_static_triton_launcher"]
    with inductor_config.patch(dict.fromkeys(there(inductor_config, launchers), False)):
        kernel: Any = getattr(PyCodeCache.load(source), function)
        kernel.precompile(warm_cache_only=True)
    results: list[Any] = kernel.compile_results
    return results


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
