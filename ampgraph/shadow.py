"""The op that reads a parameter's low-precision copy in place of a cast.

    shadow_cast(param, low)  is  param.to(low.dtype)  where `low` holds those values already

Its Python body is taken apart by whoever traces it (CompositeImplicitAutograd), so no op of ours
is left in an AOT graph and AOTAutograd's cache can keep it; a Python function as a node's target
would bypass that cache.
"""

from typing import Any

import torch
from torch import Tensor

from ampgraph.internals.ops import OpOverload


class ShadowCast(torch.autograd.Function):
    """A cast whose result is there already: the gradient is cast back, as that of any cast."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, low: Tensor) -> Tensor:
        """`low`, a tensor of the shape of `param`. Only a dtype is kept for the way back."""
        ctx.dtype = param.dtype
        return low

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's takes anything
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None]:
        """The gradient in the parameter's dtype, rounded where a cast's would be."""
        return grad.to(ctx.dtype), None


_LIBRARY = torch.library.Library("ampgraph", "FRAGMENT")
_LIBRARY.define("shadow_cast(Tensor param, Tensor(a) low) -> Tensor(a)")


def _shadow_cast(param: Tensor, low: Tensor) -> Tensor:
    found: Tensor = ShadowCast.apply(param, low)  # type: ignore[no-untyped-call]
    return found


_LIBRARY.impl("shadow_cast", _shadow_cast, "CompositeImplicitAutograd")

shadow_cast: OpOverload = torch.ops.ampgraph.shadow_cast.default
