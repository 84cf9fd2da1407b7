"""Follow autocast regions: the nodes that turn it on and off, and the state after each."""

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ampgraph.internals.autocast import enter_autocast, exit_autocast
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


def step(node: fx.Node, state: AutocastState, entered: dict[fx.Node, Any]) -> AutocastState:
    """The state after a region node; `entered` remembers what each entry replaced.

    An exit restores the entry's own device only, as torch.autocast does: regions of two device
    types may overlap without nesting.
    """
    if node.target is enter_autocast:
        device_type, dtype, enabled = _entry(node)
        entered[node] = (device_type, state.devices.get(device_type))
        return state.entering(device_type, dtype, enabled)
    if node.target is exit_autocast:
        device_type, before = entered[node.all_input_nodes[0]]
        return state.setting(
            device_type, before or DeviceState(False, torch.get_autocast_dtype(device_type))
        )
    if node.target in (torch.set_autocast_enabled, torch.set_autocast_dtype):
        return _set(node, state)
    return state


def _set(node: fx.Node, state: AutocastState) -> AutocastState:
    """After torch.set_autocast_enabled(device, flag) or torch.set_autocast_dtype(device, dtype)."""
    values: list[Any] = list(node.args) if len(node.args) == 2 else ["cuda", *node.args]
    device_type, value = str(values[0]), values[1]
    default = DeviceState(False, torch.get_autocast_dtype(device_type))
    now = state.devices.get(device_type, default)
    enabling = node.target is torch.set_autocast_enabled
    changed = {"enabled": bool(value)} if enabling else {"dtype": value}
    return state.setting(device_type, replace(now, **changed))


def _entry(node: fx.Node) -> tuple[str, torch.dtype | None, bool]:
    values: list[Any] = [*node.args, None, None, None, None][:4]
    device_type, dtype, enabled = values[0], values[1], values[2]
    return str(device_type), dtype, True if enabled is None else bool(enabled)
