"""torch.cuda, Dynamo, fake tensors and Triton made to believe that there is a GPU."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import contextlib
import functools
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch._dynamo.device_interface as device_interface
import torch._subclasses.fake_tensor as fake_tensor
import torch.fx.experimental.proxy_tensor as proxy_tensor
import triton.testing
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

from ampgraph.fakecuda.gpus import GPU
from ampgraph.fakecuda.replace import replaced, there
from ampgraph.fakecuda.runtime import install

BUS_WIDTH = 5120  # bits; with the clock of `_triton_properties` it makes the GPU's bandwidth
CLOCK = 1980  # MHz
# What Dynamo's interface to CUDA holds copies of, and under which name of torch.cuda's.
INTERFACE = {
    "current_device": "current_device",
    "device_count": "device_count",
    "exchange_device": "_exchange_device",
    "get_device_properties": "get_device_properties",
    "is_bf16_supported": "is_bf16_supported",
    "maybe_exchange_device": "_maybe_exchange_device",
    "memory_allocated": "memory_allocated",
    "set_device": "set_device",
    "synchronize": "synchronize",
}
# Modules whose functools caches may hold the answer that there is no GPU.
CACHING = (
    "torch.utils._triton",
    "torch._inductor.analysis.device_info",
    "torch._inductor.async_compile",
    "torch._inductor.codecache",
    "torch._inductor.fx_passes.misc_patterns",
    "torch._inductor.utils",
)


@contextlib.contextmanager
def gpu_pretended(gpu: GPU) -> Generator[None]:
    """Inside, Python asks for a GPU and hears of this one; no tensor can be on it but a fake one.

    Raises:
        FakeCudaError: on a machine with a GPU, or on one that cannot build the hooks.
    """
    install()
    cuda = _torch_cuda(gpu)
    interface = {name: staticmethod(cuda[full]) for name, full in INTERFACE.items()}
    interface["get_raw_stream"] = staticmethod(_says(0))
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(replaced(torch.cuda, cuda))
        enter(replaced(device_interface.CudaInterface, interface))
        # The generated code imports it; a build for CPUs does not have it.
        enter(replaced(torch._C, {"_cuda_getCurrentRawStream": _says(0)}, made=True))
        enter(replaced(torch.version, {"cuda": torch.version.cuda or "13.0"}))
        enter(_fake_tensors_kept_fake())
        enter(replaced(driver, {"_active": _FakeDriver(gpu)}))
        # Estimates of runtimes ask nvidia-smi for clocks.
        enter(replaced(triton.testing, {"nvsmi": _clocks}))
        stack.callback(_clear_caches)
        _clear_caches()
        yield


def _clocks(names: Sequence[str]) -> list[int]:
    return [CLOCK] * len(names)


def _says(value: object) -> Callable[..., Any]:
    """A function with this answer; a new one each time, for Dynamo tells them apart by identity."""
    return lambda *args, **kwargs: value


def _torch_cuda(gpu: GPU) -> dict[str, Callable[..., Any]]:
    """What torch.cuda's functions say."""
    return {
        "_exchange_device": _says(0),
        "_lazy_init": _says(None),
        "_maybe_exchange_device": _says(0),
        "current_device": _says(0),
        "device_count": _says(1),
        "get_device_capability": _says(gpu.capability),
        "get_device_name": _says(gpu.name),
        "get_device_properties": _says(gpu),
        "get_rng_state": _says(torch.zeros(16, dtype=torch.uint8)),
        "is_available": _says(True),
        "is_bf16_supported": _says(True),
        "is_current_stream_capturing": _says(False),
        "is_initialized": _says(False),
        "is_tf32_supported": _says(True),
        "mem_get_info": _says((gpu.total_memory, gpu.total_memory)),
        "memory_allocated": _says(0),
        "set_device": _says(None),
        "set_rng_state": _says(None),
        "synchronize": _says(None),
    }


class _OnCpu(TorchDispatchMode):
    """Does on the CPU what asks for a CUDA device: small constants, computed while compiling."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.tree_map_only(torch.device, _cpu_for_cuda, (args, kwargs or {}))
        return func(*given[0], **given[1])


def on_cpu() -> TorchDispatchMode:
    """The mode in which all is done on the CPU."""
    mode: TorchDispatchMode = _OnCpu()  # type: ignore[no-untyped-call]
    return mode


def _cpu_for_cuda(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "cuda" else device


@contextlib.contextmanager
def _fake_tensors_kept_fake() -> Generator[None]:
    """Fake tensors on a GPU that is available would be made by way of a real one."""
    unset: Any = vars(proxy_tensor)["unset_fake_temporarily"]

    @contextlib.contextmanager
    def unset_on_cpu() -> Generator[Any]:  # torch.tensor(1.0, device="cuda") in traced code
        with unset() as before, on_cpu():
            yield before

    # 2.11 alone has init_gpu_context.
    contexts = dict.fromkeys(there(fake_tensor, ["init_gpu_context"]), _says(None))
    avoid = {"avoid_device_init": property(lambda self: True)}
    with (
        replaced(fake_tensor.FakeTensorMode, avoid),
        replaced(proxy_tensor, {"unset_fake_temporarily": unset_on_cpu}),
        replaced(fake_tensor, contexts),
    ):
        yield


class _Utils:
    """The part of Triton's driver that Inductor asks for properties."""

    def __init__(self, gpu: GPU) -> None:
        self.gpu = gpu

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self.gpu.shared_memory_per_block_optin,
            "multiprocessor_count": self.gpu.multi_processor_count,
            "max_num_regs": self.gpu.regs_per_multiprocessor,
            "warpSize": self.gpu.warp_size,
            "sm_clock_rate": CLOCK * 1000,
            "mem_clock_rate": round(self.gpu.bandwidth * 8 / 2 / BUS_WIDTH / 1000),  # kHz
            "mem_bus_width": BUS_WIDTH,
        }


class _FakeDriver(CudaDriver):  # type: ignore[misc]  # Inductor asks isinstance
    """Compiles for the GPU; launches nothing."""

    def __init__(self, gpu: GPU) -> None:
        self.gpu = gpu
        self.utils = _Utils(gpu)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.gpu.major * 10 + self.gpu.minor, self.gpu.warp_size)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return self.gpu.capability

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def _clear_caches() -> None:
    """Forget every cached answer to the question whether there is a GPU, and which."""
    for name in CACHING:
        for value in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
    from torch._inductor.codecache import CacheBase
    from torch._inductor.runtime.hints import DeviceProperties

    forget: list[Any] = [CacheBase.get_system, DeviceProperties.create]
    for function in forget:
        function.cache_clear()
    device_interface.caching_worker_device_properties.pop("cuda", None)
    device_interface.caching_worker_current_devices.pop("cuda", None)
