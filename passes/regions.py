"""Follow autocast regions: the nodes that turn it on and off, and the state after each."""

from typing import Any

import torch
from torch import fx

from ampgraph.internals import enter_autocast, exit_autocast
from ampgraph.state import AutocastState, DeviceState

_SETTERS = (
    torch.set_autocast_enabled,
    torch.set_autocast_dtype,
    torch.set_autocast_cache_enabled,
    torch.autocast_increment_nesting,
    torch.autocast_decrement_nesting,
    torch.clear_autocast_cache,
)


def is_region(node: fx.Node) -> bool:
    """Whether the node changes the autocast state and nothing else."""
    return node.target in (enter_autocast, exit_autocast, *_SETTERS)


def step(
    node: fx.Node, state: AutocastState, entered: dict[fx.Node, Any]
) -> AutocastState:
    """The state after a region node; `entered` remembers what each entry replaced.

    An exit restores the entry's own device only, as torch.autocast does: regions of two device
    types may overlap without nesting.
    """
    if node.target is enter_autocast:
        device_type, dtype, enabled = _entry(node)
        entered[node] = (device_type, state.devices.get(device_type))
        return state.entering(device_type, dtype, enabled)
    if node.target is exit_autocast:
        device_type, before = entered[node.args[0]]  # type: ignore[index]
        return state.setting(
            device_type, before or DeviceState(False, torch.get_autocast_dtype(device_type))
        )
    if node.target is torch.set_autocast_enabled:
        device_type, enabled = (("cuda", *node.args) if len(node.args) == 1 else node.args)
        now = state.devices.get(str(device_type))
        dtype = now.dtype if now else torch.get_autocast_dtype(str(device_type))
        return state.setting(str(device_type), DeviceState(bool(enabled), dtype))
    if node.target is torch.set_autocast_dtype:
        device_type, dtype = node.args
        now = state.devices.get(str(device_type))
        return state.setting(
            str(device_type), DeviceState(bool(now and now.enabled), dtype)  # type: ignore[arg-type]
        )
    return state


def _entry(node: fx.Node) -> tuple[str, torch.dtype | None, bool]:
    values: list[Any] = [*node.args, None, None, None, None][:4]
    device_type, dtype, enabled = values[0], values[1], values[2]
    return str(device_type), dtype, True if enabled is None else bool(enabled)
