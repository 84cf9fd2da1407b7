"""The dispatcher: ops, their schemas and kernels, and what they are made of."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import contextlib
import inspect
import types
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "PreDispatchMode",
    "TorchDispatchMode",
    "autocast_kernels",
    "composite_kernel",
    "custom_op_name",
    "has_autocast_kernel",
    "is_composite",
    "make_fx",
    "name_of",
    "op_names",
    "overloads_of",
    "pre_dispatch",
    "register_autocast_dtype",
    "schema_of",
]


class PreDispatchMode(SchemaCheckMode):
    """A dispatch mode on the PreDispatch key: it sees each op before autocast and autograd would.

    `torch._ops._set_mode_pre_dispatch` admits only three classes of modes; SchemaCheckMode is the
    one that stands alone, so its slot (never its code) is used.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)


@contextlib.contextmanager
def pre_dispatch(mode: PreDispatchMode) -> Generator[None]:
    """Run the ops called inside through `mode`, composites still whole."""
    with enable_python_dispatcher(), mode:
        yield


def is_composite(op: OpOverload, device_type: str) -> bool:
    """Whether the dispatcher would open `op` above autograd on this device, showing its inner ops.

    True for ops with a CompositeImplicitAutograd kernel and none of the device's own.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    backend = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}.get(device_type, "CPU")
    name = op.name()
    return has(name, "CompositeImplicitAutograd") and not has(name, backend)


def composite_kernel(op: OpOverload) -> Callable[..., Any]:
    """The op's CompositeImplicitAutograd kernel, as eager torch runs it.

    `decompose` would prefer a Python kernel where there is one, for symbolic shapes. Thirty ops
    have one, and some make other ops than the C++ does: `matmul.out` calls mm, which autocast
    casts, and not `mm.out`, which it leaves alone (torch/_decomp/decompositions.py).
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        symbolic = any(
            isinstance(leaf, torch.Tensor) and leaf._has_symbolic_sizes_strides
            for leaf in pytree.tree_leaves((args, kwargs))
        )
        if symbolic:
            return op.decompose(*args, **kwargs)
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    return run


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """The op's parsed schema: its arguments, results and what they alias."""
    return op._schema


def name_of(op: OpOverload) -> str:
    """The dispatcher's name: "aten::softmax.int", and "aten::linear" for the default overload."""
    name: str = op.name()
    return name


def overloads_of(packet: OpOverloadPacket) -> dict[str, OpOverload]:
    """The overloads of an op by their names, "default" among them."""
    names: list[str] = packet.overloads()
    return {name: getattr(packet, name) for name in names}


def op_names() -> list[str]:
    """Every operator the dispatcher knows now, with its overload: "aten::add.Tensor"."""
    return torch._C._dispatch_get_all_op_names()


def autocast_kernels(device_type: str) -> frozenset[str]:
    """The ops with an autocast kernel for a device type, on any build: the CPU wheel has all."""
    key = f"Autocast{device_type.upper()}"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return frozenset(name for name in op_names() if has(name, key))


def has_autocast_kernel(op: OpOverload, device_type: str) -> bool:
    """Whether the dispatcher has an autocast kernel for this op, whoever registered it."""
    key = f"Autocast{device_type.upper()}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name_of(op), key)


def register_autocast_dtype(op: OpOverload, device_type: str) -> torch.dtype | None:
    """The dtype that `torch.library.register_autocast` casts this op's inputs to, or None.

    A `custom_op` keeps it on its definition (a dict since 2.13, two attributes before), any other
    op only in the closure of the kernel that was registered.
    """
    definition = OPDEFS.get(name_of(op))
    if definition is not None:
        before_2_13 = getattr(definition, f"_autocast_{device_type}_dtype", None)
        dtypes: Mapping[str, torch.dtype | None] = getattr(definition, "_autocast_dtype", {})
        return dtypes.get(device_type, before_2_13)
    key = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}")
    kernel = op.py_kernels.get(key)
    if not isinstance(kernel, types.FunctionType):
        return None
    # Before 2.13 the kernel stands under two devices' keys, whichever it was registered for.
    closure = inspect.getclosurevars(kernel).nonlocals
    dtype = closure.get("cast_inputs") if closure.get("device_type") == device_type else None
    return dtype if isinstance(dtype, torch.dtype) else None


def custom_op_name(definition: object) -> str | None:
    """The qualified name of what `torch.library.custom_op` returned, or None for anything else."""
    return definition._qualname if isinstance(definition, CustomOpDef) else None
