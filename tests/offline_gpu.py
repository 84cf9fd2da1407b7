"""Compile plain Triton kernels for GPUs that are not there, and read what came out."""

from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ampgraph.fakecuda.binaries import Binary, found, nvidia

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


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
    made = triton.compile(source, target=TARGETS[target], options={"num_warps": warps})
    if target.startswith("sm"):
        return nvidia(made.asm["ptx"])
    return _amd(made.asm["amdgcn"])


def _amd(assembly: str) -> Binary:
    """What the kernel's metadata says, at the end of its assembly."""
    spills = [found(rf"\.{kind}_spill_count:\s+(\d+)", assembly) for kind in ("vgpr", "sgpr")]
    scratch = found(r"\.private_segment_fixed_size:\s+(\d+)", assembly)
    registers = int(found(r"\.vgpr_count:\s+(\d+)", assembly))
    return Binary(assembly, registers, sum(map(int, [*spills, scratch])))
