"""What every scaler's user does between backward and step."""

import torch
from torch import Tensor, nn

import ampgraph

NORM = 1.0


def clip(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> Tensor:
    """Clip the norm of the true gradients, each scaler in its own way; returns the norm."""
    if isinstance(scaler, ampgraph.GradScaler):
        return scaler.clip_grad_norm_(optimizer, NORM)
    scaler.unscale_(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return nn.utils.clip_grad_norm_(params, NORM)
