"""Programs sent to a child process, every tensor as its shape: no weight is copied or read."""

import io
import pickle
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampgraph.errors import FakeCudaError

PLAIN = (Tensor, nn.Parameter, nn.Buffer)
CURE = "define it at the top of a module that can be imported, or install cloudpickle"


def shipped(program: object) -> bytes:
    """A pickle of modules, functions, arguments and whatever they hold.

    `pickle.loads` it where a fake GPU is: all its tensors are on it, what was one tensor is one
    still, and a device that a module has noted is the GPU. Without cloudpickle all classes and
    functions must be importable.

    Raises:
        FakeCudaError: something in it cannot be pickled, or a tensor is more than its shape.
    """
    pickler, knows_main = _pickler()

    class Shapes(pickler):  # type: ignore[misc, valid-type]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, Tensor):
                return fake_tensor, _recipe(value)
            if isinstance(value, torch.device):
                return torch.device, ("cuda",)
            if knows_main:
                return super().reducer_override(value)
            _check_importable(value)
            return NotImplemented

    file = io.BytesIO()
    try:
        Shapes(file).dump(program)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise FakeCudaError(
            f"the model cannot be sent to another process: {error}",
            cure="leave it out of the model" if knows_main else CURE,
        ) from error
    return file.getvalue()


def _pickler() -> tuple[Any, bool]:
    """cloudpickle's, and True, where it is installed: it also sends what the main program holds."""
    try:
        import cloudpickle  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return pickle.Pickler, False
    return cloudpickle.CloudPickler, True


def _check_importable(value: object) -> None:
    is_code = isinstance(value, (type, types.FunctionType))
    if is_code and getattr(value, "__module__", "") == "__main__":
        raise FakeCudaError(f"{value!r} is defined in the main program", cure=CURE)


def _recipe(tensor: Tensor) -> tuple[Any, ...]:
    if type(tensor) not in PLAIN and not hasattr(tensor, "fake_mode"):
        raise FakeCudaError(f"a {type(tensor).__name__} is more than its shape tells")
    if tensor.layout != torch.strided:
        raise FakeCudaError(f"a tensor has the layout {tensor.layout}, not torch.strided")
    is_parameter = isinstance(tensor, nn.Parameter)
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, is_parameter


def fake_tensor(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, grad: bool, is_parameter: bool
) -> Tensor:
    """A tensor on the fake GPU, or a parameter."""
    with torch.no_grad():
        fake = torch.empty_strided(shape, stride, dtype=dtype, device="cuda")
    made = nn.Parameter(fake, requires_grad=False) if is_parameter else fake
    return made.requires_grad_(grad)
