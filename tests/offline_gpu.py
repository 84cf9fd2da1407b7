"""Compile Triton kernels for GPUs that are not there, and read what came out.

Triton's compiler and Nvidia's assembler are in its wheel; neither needs a driver.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Binary:
    """One compiled kernel: its assembly, registers a thread, and bytes spilled to memory."""

    assembly: str
    registers: int
    spilled: int


def compiled(
    kernel: Any,
    target: str,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: tuple[str, ...] = (),
    warps: int = 4,
) -> Binary:
    """A kernel for a target; `types` as in "*fp32", `aligned` parameters are multiples of 16."""
    names: list[str] = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else types[n] for n in names},
        constexprs=dict(constants),
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    found = triton.compile(source, target=TARGETS[target], options={"num_warps": warps})
    if target.startswith("sm"):
        return _nvidia(found.asm["ptx"])
    return _amd(found.asm["amdgcn"])


def _nvidia(ptx: str) -> Binary:
    """What ptxas says of a PTX file with one kernel."""
    arch = _found(r"^\.target\s+(\w+)", ptx)
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
    stores = int(_found(r"(\d+) bytes spill stores", done.stderr))
    loads = int(_found(r"(\d+) bytes spill loads", done.stderr))
    return Binary(ptx, int(_found(r"Used (\d+) registers", done.stderr)), stores + loads)


def _amd(assembly: str) -> Binary:
    """What the kernel's metadata says, at the end of its assembly."""
    spills = [_found(rf"\.{kind}_spill_count:\s+(\d+)", assembly) for kind in ("vgpr", "sgpr")]
    scratch = _found(r"\.private_segment_fixed_size:\s+(\d+)", assembly)
    registers = int(_found(r"\.vgpr_count:\s+(\d+)", assembly))
    return Binary(assembly, registers, sum(map(int, [*spills, scratch])))


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    assert match, f"no {pattern!r} in: {text[:2000]}"
    return match[1]
