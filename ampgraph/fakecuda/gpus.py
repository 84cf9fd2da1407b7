"""The GPUs that code can be generated for, as data.

The numbers are the makers' and what `torch.cuda.get_device_properties` says on such a machine.
"""

from dataclasses import dataclass, replace

from ampgraph.errors import OptionError, did_you_mean


@dataclass(frozen=True)
class GPU:
    """One GPU, with the fields of `torch.cuda.get_device_properties` under torch's names.

    Attributes:
        name: as the driver calls it.
        major, minor: the compute capability, 9 and 0 for sm_90.
        multi_processor_count: streaming multiprocessors.
        total_memory: bytes.
        bandwidth: of that memory, in bytes a second.
        L2_cache_size, shared_memory_per_block_optin, shared_memory_per_multiprocessor: bytes.
    """

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    bandwidth: float
    L2_cache_size: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block: int = 49152
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    is_integrated: int = 0
    is_multi_gpu_board: int = 0

    @property
    def capability(self) -> tuple[int, int]:
        """(major, minor)."""
        return self.major, self.minor


A100 = GPU(
    name="NVIDIA A100-SXM4-80GB",
    major=8,
    minor=0,
    multi_processor_count=108,
    total_memory=80 * 2**30,
    bandwidth=2.039e12,
    L2_cache_size=40 * 2**20,
    shared_memory_per_block_optin=163 * 2**10,
    shared_memory_per_multiprocessor=164 * 2**10,
)
H100 = GPU(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    bandwidth=3.35e12,
    L2_cache_size=50 * 2**20,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
)
# The same chip with other memory.
H200 = replace(H100, name="NVIDIA H200", total_memory=141 * 10**9, bandwidth=4.8e12)
# Blackwell; its blocks have as much shared memory.
B200 = replace(
    H100,
    name="NVIDIA B200",
    major=10,
    multi_processor_count=148,
    total_memory=180 * 10**9,
    bandwidth=7.7e12,
    L2_cache_size=126 * 2**20,
)

GPUS = {"a100": A100, "h100": H100, "h200": H200, "b200": B200}


def gpu_named(name: str) -> GPU:
    """The GPU of that name, in capitals or not.

    Raises:
        OptionError: an unknown name, with the nearest ones.
    """
    found = GPUS.get(str(name).lower())
    if found is None:
        known = sorted(GPUS)
        raise OptionError(
            f"no GPU is called {name!r}; known are {', '.join(known)}",
            cure=did_you_mean(str(name).lower(), known),
        )
    return found
