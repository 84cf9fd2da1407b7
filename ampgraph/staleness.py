"""Find copies that do not hold what their parameters do, a part of each at every call.

For `weight_copies="verify"`: a write that moves neither the version counter nor the memory, such
as `param.data.copy_(...)`, is seen by its effect alone. What is found stays on the device; the host
reads a call's answer in the next one, when it has long arrived.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ampgraph.errors import StaleCopyError
from ampgraph.internals.optim import HostFlag
from ampgraph.kernels.tables import dense

# So many calls look at every element of a large parameter once.
TURNS = 64
# The elements of a smaller part would not be worth their kernels.
PART = 1024


class Checker:
    """Compares the copies that one graph reads with their parameters."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.turn = 0
        self.asked: list[tuple[HostFlag, list[str], Tensor]] = []

    def look(self, params: Sequence[Tensor], lows: Sequence[Tensor]) -> None:
        """Compare this call's part; raises StaleCopyError for what was found before.

        On the CPU, where nothing has to be waited for, also for what is found now.
        """
        self._tell()
        groups: dict[tuple[torch.device, torch.dtype, torch.dtype], list[int]] = {}
        for i, (param, low) in enumerate(zip(params, lows, strict=True)):
            if param.numel():
                groups.setdefault((param.device, param.dtype, low.dtype), []).append(i)
        with torch.no_grad():
            for some in groups.values():
                found = self._compare([params[i] for i in some], [lows[i] for i in some])
                names = [self.names[i] for i in some]
                self.asked.append((HostFlag(found.amax()), names, found))
        self.turn += 1
        if all(device.type == "cpu" for device, *_ in groups):
            self._tell()

    def _compare(self, params: Sequence[Tensor], lows: Sequence[Tensor]) -> Tensor:
        """int32 [parameters], above zero where a copy differs in the part that is looked at."""
        pairs = [self._part(p, low) for p, low in zip(params, lows, strict=True)]
        have = torch.cat([part for _, part in pairs])
        want = torch.cat([part for part, _ in pairs]).to(have.dtype)
        differ = (have != want) & ~(have.isnan() & want.isnan())
        owner = _owners(tuple(part.numel() for part, _ in pairs), have.device)
        found = torch.zeros(len(pairs), dtype=torch.int32, device=have.device)
        return found.index_add_(0, owner, differ.to(torch.int32))

    def _part(self, param: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        """The same elements of both, without a copy where both fill their memory alike."""
        if param.stride() == low.stride() and dense(param) is param:
            flat = [t.as_strided((t.numel(),), (1,), t.storage_offset()) for t in (param, low)]
        else:
            flat = [param.reshape(-1), low.reshape(-1)]
        count = param.numel()
        length = min(count, max(PART, -(-count // TURNS)))
        start = min(self.turn % -(-count // length) * length, count - length)
        return flat[0][start : start + length], flat[1][start : start + length]

    def _tell(self) -> None:
        asked, self.asked = self.asked, []
        for flag, names, found in asked:
            if flag.read():
                stale = [names[i] for i in found.nonzero().flatten().tolist()]
                raise StaleCopyError(
                    f"{', '.join(stale)} was written to in a way that nothing shows",
                    cure="call ampgraph.refresh(model) after writes through .data, numpy or "
                    "another tensor with the same memory",
                )


@functools.lru_cache(maxsize=64)
def _owners(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [elements]: which of the parts an element belongs to."""
    counts = torch.tensor(lengths, device=device)
    return torch.repeat_interleave(torch.arange(len(lengths), device=device), counts)
