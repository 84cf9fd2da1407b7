"""The autocast state of a program point: for each device type, on or off, and in which dtype."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

LOW_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class DeviceState:
    """What `torch.is_autocast_enabled(device)` and `torch.get_autocast_dtype(device)` would say."""

    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class AutocastState:
    """The state of every device type that was mentioned; all others are off.

    Autocast keeps one flag and one dtype a device type: a region sets those of its own device
    and restores them on exit, which is why foreign regions do not disturb each other
    (torch/amp/autocast_mode.py, `autocast.__enter__`).
    """

    devices: Mapping[str, DeviceState] = field(default_factory=dict[str, DeviceState])

    @staticmethod
    def of(enabled: Mapping[str, torch.dtype]) -> "AutocastState":
        """The state with autocast on for exactly these device types."""
        return AutocastState({d: DeviceState(True, dtype) for d, dtype in enabled.items()})

    def entering(
        self, device_type: str, dtype: torch.dtype | None, enabled: bool
    ) -> "AutocastState":
        """The state inside `torch.autocast(device_type, dtype=dtype, enabled=enabled)`."""
        now = self.devices.get(device_type)
        chosen = dtype or (now.dtype if now else torch.get_autocast_dtype(device_type))
        if device_type == "cpu" and chosen not in LOW_DTYPES:
            enabled = False  # torch.autocast("cpu") warns and turns itself off
        return self.setting(device_type, DeviceState(enabled, chosen))

    def setting(self, device_type: str, to: DeviceState) -> "AutocastState":
        return replace(self, devices={**self.devices, device_type: to})

    def enabled(self) -> dict[str, torch.dtype]:
        """Device types with autocast on, each with its dtype."""
        return {d: s.dtype for d, s in self.devices.items() if s.enabled}

    def __hash__(self) -> int:
        return hash(tuple(sorted((d, s.enabled, str(s.dtype)) for d, s in self.devices.items())))


OFF = AutocastState()
