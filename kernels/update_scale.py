"""Move the loss scale after a step: back off after an overflow, grow after enough good steps."""

import torch
from torch import Tensor
from torch.library import triton_op

__all__ = ["update_scale_", "update_scale_reference_"]


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
    higher = torch.where((higher <= max_scale) & higher.isfinite(), higher, scale)
    good = growth_tracker + 1
    grown = good == growth_interval
    after_bad = torch.where(left <= 0, lower, scale)
    after_good = torch.where(grown, higher, scale)
    scale.copy_(torch.where(bad, after_bad, after_good))
    growth_tracker.copy_(torch.where(bad | grown, 0, good))
    hysteresis_tracker.copy_(left)


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
