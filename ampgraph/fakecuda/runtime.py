"""The compiled part: hooks that let autograd run on a GPU that is not there.

The engine counts devices once, at the process's first backward: install before it. Later it is an
internal assertion of torch ("device_ready_queues_").
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

import ctypes
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.runtime.cache_dir_utils import cache_dir

from ampgraph.errors import FakeCudaError

SOURCE = Path(__file__).with_name("runtime.cpp")
TORCH = Path(torch.__file__).parent


def install() -> None:
    """Load the hooks, built at the first call by the compiler that Inductor would use (seconds).

    Raises:
        FakeCudaError: on a machine with a GPU, on one that is not Linux, without a C++ compiler.
    """
    if torch.cuda.is_available():
        raise FakeCudaError(
            "this process has a real GPU", cure="set CUDA_VISIBLE_DEVICES=-1 before it starts"
        )
    if sys.platform != "linux":
        raise FakeCudaError(f"Triton is not made for {sys.platform}", cure="use Linux")
    ctypes.CDLL(str(_built())).fakecuda_install()


def _built() -> Path:
    """The library, from the cache on disk that Inductor's own are in."""
    compiler = _compiler()
    command = [
        *(compiler, "-O0", "-w", "-std=c++20", "-shared", "-fPIC", f"-I{TORCH / 'include'}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(str(SOURCE), f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu"),
    ]
    known = [SOURCE.read_text(), torch.__version__, *command]
    key = hashlib.sha256("\0".join(known).encode()).hexdigest()[:16]
    library = Path(cache_dir()) / "ampgraph_fakecuda" / f"{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        draft = library.with_suffix(f".{os.getpid()}")
        done = subprocess.run([*command, "-o", str(draft)], capture_output=True, text=True)
        if done.returncode:
            raise FakeCudaError(
                f"{compiler} could not build {SOURCE.name}: {done.stderr.strip()[-2000:]}",
                cure="set CXX to a compiler that knows C++20, GCC 11 or newer",
            )
        draft.replace(library)
    return library


def _compiler() -> str:
    try:
        found: str = get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise FakeCudaError(
            "there is no C++ compiler", cure="install g++, or set CXX to the one to use"
        ) from error
    return found
