"""Move the loss scale after a step: back off after an overflow, grow after enough good steps."""

# Triton's types say little about what a kernel may do, and triton_op has none.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportUnnecessaryComparison=false, reportUntypedFunctionDecorator=false

from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from ampgraph.kernels.lang import jit, tl
from ampgraph.kernels.tables import current_device

__all__ = ["update_scale_", "update_scale_reference_"]

# A scale is never grown past this, to inf.
LARGEST = torch.finfo(torch.float32).max


def update_scale_reference_(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    min_scale: float,
    max_scale: float,
) -> None:
    """The rule of `torch._amp_update_scale_`, with bounds, and patience with overflows.

    A bad step (found_inf > 0) uses up one of `hysteresis_tracker`; when none is left, as on every
    later bad step until a good one, scale = max(scale * backoff_factor, min_scale). A good step
    refills it, and every `growth_interval`-th in a row grows the scale, if the result is finite
    and at most `max_scale`. With hysteresis 1 and infinite bounds this is torch's rule bit for
    bit (ATen/native/cuda/AmpKernels.cu, whose factors are doubles); hysteresis is as in Apex's
    update_scale_hysteresis.

    Args:
        scale: float32, one element, written.
        growth_tracker: int32, one element, written: the good steps in a row.
        hysteresis_tracker: int32, one element, written: the bad steps still to be borne.
        found_inf: float32, one element.
    """
    bad = (found_inf <= 0).logical_not()  # a nan is a bad step too
    left = torch.where(bad, hysteresis_tracker - 1, hysteresis)
    # Apple's GPUs have no float64.
    wide = scale if scale.device.type == "mps" else scale.double()
    lower = (wide * backoff_factor).to(scale.dtype)
    lower = torch.where(lower < min_scale, min_scale, lower)
    higher = (wide * growth_factor).to(scale.dtype)
    higher = torch.where(higher <= min(max_scale, LARGEST), higher, scale)
    good = growth_tracker + 1
    grown = good == growth_interval
    after_bad = torch.where(left <= 0, lower, scale)
    after_good = torch.where(grown, higher, scale)
    scale.copy_(torch.where(bad, after_bad, after_good))
    growth_tracker.copy_(torch.where(bad | grown, 0, good))
    hysteresis_tracker.copy_(left)


@jit
def update_scale_kernel(
    scale: "Any",
    growth_tracker: "Any",
    hysteresis_tracker: "Any",
    found_inf: "Any",
    growth_interval: "Any",
    hysteresis: "Any",
    min_scale: "Any",
    max_scale: "Any",
    GROWTH: tl.constexpr,
    BACKOFF: tl.constexpr,
) -> None:
    """`update_scale_reference_`; the factors are constants, for arguments would be float32."""
    b_scale = tl.load(scale)
    bad = ~(tl.load(found_inf) <= 0.0)
    left = tl.where(bad, tl.load(hysteresis_tracker) - 1, hysteresis)
    lower = (b_scale.to(tl.float64) * BACKOFF).to(tl.float32)
    lower = tl.where(lower < min_scale, min_scale, lower)
    higher = (b_scale.to(tl.float64) * GROWTH).to(tl.float32)
    higher = tl.where(higher <= max_scale, higher, b_scale)
    good = tl.load(growth_tracker) + 1
    grown = good == growth_interval
    after_bad = tl.where(left <= 0, lower, b_scale)
    after_good = tl.where(grown, higher, b_scale)
    tl.store(scale, tl.where(bad, after_bad, after_good))
    tl.store(growth_tracker, tl.where(bad | grown, 0, good))
    tl.store(hysteresis_tracker, left)


def launch(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    min_scale: float,
    max_scale: float,
) -> None:
    """One launch of one program."""
    with current_device(scale):
        wrap_triton(update_scale_kernel)[(1,)](
            scale,
            growth_tracker,
            hysteresis_tracker,
            found_inf,
            growth_interval,
            hysteresis,
            max(min_scale, -LARGEST),
            min(max_scale, LARGEST),
            GROWTH=growth_factor,
            BACKOFF=backoff_factor,
        )


# Registered last: triton_op looks up the kernels that a body reaches, for the keys of caches.
@triton_op(
    "ampgraph::update_scale_", mutates_args={"scale", "growth_tracker", "hysteresis_tracker"}
)
def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    min_scale: float,
    max_scale: float,
) -> None:
    """The op of `update_scale_reference_`."""
    if scale.device.type == "cuda":
        launch(
            scale,
            growth_tracker,
            hysteresis_tracker,
            found_inf,
            growth_factor,
            backoff_factor,
            growth_interval,
            hysteresis,
            min_scale,
            max_scale,
        )
    else:
        update_scale_reference_(
            scale,
            growth_tracker,
            hysteresis_tracker,
            found_inf,
            growth_factor,
            backoff_factor,
            growth_interval,
            hysteresis,
            min_scale,
            max_scale,
        )
