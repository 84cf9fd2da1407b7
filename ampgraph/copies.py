"""Low-precision copies kept beside float32 parameters, for `weight_copies=True`.

There is one copy of a parameter in a dtype, whichever compiled callables read it. It lives as long
as the parameter and is renewed when a graph is about to read it and something has changed: the
parameter's version counter, its memory or layout; an optimizer with the parameter in its groups
has stepped, whether or not that moved a counter; or `refresh` was called.

A copy is renewed in place, for CUDA graphs rely on its address, but never under an earlier forward
that may still need it for its backward: then the parameter gets another one, as a cast would have.
"""

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampgraph.internals.dynamo import untraced
from ampgraph.internals.optim import on_every_step
from ampgraph.internals.tensors import (
    WeakStorage,
    is_shared,
    storage_address,
    under_dispatch_mode,
)
from ampgraph.kernels.cast import cast_
from ampgraph.staleness import Checker

State = tuple[Any, ...]


def state_of(param: Tensor) -> State:
    """Everything about a parameter that says whether it may have changed, and how it lies."""
    lies = param.storage_offset(), param.shape, param.stride(), param.dtype, param.device
    return param._version, storage_address(param), lies


class Copy:
    """The copy of one parameter in one dtype.

    Attributes:
        low: the copy, None before it is made and after the parameter's end.
        state: the parameter's when the copy was last renewed.
        memory: the parameter's then; held weakly, so that no other can have its address.
        stale: something happened that the state does not show.
        stepping: an optimizer is at work on the parameter, whose writes may not show.
        fence: the renewal, for streams other than its own.
    """

    __slots__ = ("dtype", "fence", "low", "memory", "stale", "state", "stepping")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.low: Tensor | None = None
        self.state: State = (None, None, None)
        self.memory: Any = None
        self.stale = self.stepping = False
        self.fence: Fence | None = None

    def current(self, param: Tensor) -> bool:
        """Whether the copy holds what a cast of the parameter would."""
        unknown = self.low is None or self.stale or self.stepping
        return not unknown and self.state == state_of(param)

    def place_for(self, param: Tensor) -> Tensor:
        """The memory to renew the copy in."""
        low = self.low
        if low is None or self.state[2] != state_of(param)[2] or is_shared(low):
            self.low = low = torch.empty_like(param, dtype=self.dtype, requires_grad=False)
        return low


class Fence:
    """A point in a device's stream that other streams have to wait for."""

    def __init__(self, device: torch.device) -> None:
        self.module, self.device = torch.get_device_module(device), device
        self.stream = self.module.current_stream(device)
        self.event = self.stream.record_event()

    def wait(self) -> None:
        """Let the current stream wait, if it is another one."""
        now = self.module.current_stream(self.device)
        if now != self.stream:
            now.wait_event(self.event)


class Store:
    """Every copy there is, by parameter.

    Attributes:
        epoch: another object after each event that a parameter's state does not show.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.epoch = object()
        self._copies: dict[int, dict[torch.dtype, Copy]] = {}
        self._params: dict[int, weakref.ref[Tensor]] = {}
        self._watching = False

    def of(self, param: Tensor) -> list[Copy]:
        """The copies of a parameter."""
        return list(self._copies.get(id(param), {}).values())

    def copy(self, param: Tensor, dtype: torch.dtype) -> Copy:
        """The copy of a parameter, new if there was none."""
        key = id(param)
        if key not in self._copies:
            self._watch_optimizers()
            self._params[key] = weakref.ref(param, functools.partial(self._drop, key))
            self._copies[key] = {}
        found = self._copies[key]
        return found.setdefault(dtype, Copy(dtype))

    def _drop(self, key: int, _: object) -> None:
        """The parameter is gone: its copies go with it, also where a graph still knows of them."""
        self._params.pop(key, None)
        for copy in self._copies.pop(key, {}).values():
            copy.low = None
        self.epoch = object()

    def _watch_optimizers(self) -> None:
        if not self._watching:
            self._watching = True
            on_every_step(self._before_step, self._after_step)

    @untraced
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.mark(_parameters(optimizer), stepping=True)

    @untraced
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.mark(_parameters(optimizer), stepping=False)

    def mark(self, params: Iterable[Tensor], stepping: bool) -> None:
        """Something wrote to these, or is about to. The epoch changes last (see `Reader`)."""
        for param in params:
            for copy in self.of(param):
                copy.stale, copy.stepping = True, stepping
        self.epoch = object()

    def renew(self, pairs: Sequence[tuple[Copy, Tensor]]) -> None:
        """Make copies current, with one cast a device. What comes in between will be seen again."""
        by_device: dict[torch.device, list[tuple[Copy, Tensor]]] = {}
        for copy, param in pairs:
            by_device.setdefault(param.device, []).append((copy, param))
        for device, some in by_device.items():
            states = [state_of(param) for _, param in some]
            for copy, _ in some:
                copy.stale = False
            try:
                with torch.inference_mode(False), torch.no_grad():
                    targets = [copy.place_for(param) for copy, param in some]
                    cast_(targets, [param for _, param in some])
            except BaseException:
                for copy, _ in some:
                    copy.stale = True
                raise
            fence = None if device.type == "cpu" else Fence(device)
            for (copy, param), state in zip(some, states, strict=True):
                if copy.state[1:] != state[1:]:  # an old address may come back, a version cannot
                    self.epoch = object()
                    copy.memory = WeakStorage(param.untyped_storage())
                copy.state, copy.fence = state, fence


STORE = Store()


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def refresh(model: nn.Module | Tensor | Iterable[Tensor]) -> None:
    """Have the copies of these parameters renewed when they are next read.

    Needed after a write that nothing shows: `param.data.copy_(...)` outside of an optimizer's
    step, one through a numpy array or another tensor with the same memory.

    Args:
        model: a module, compiled or not; or parameters.
    """
    if isinstance(model, nn.Module):
        STORE.mark(model.parameters(), stepping=False)
    else:
        STORE.mark([model] if isinstance(model, Tensor) else model, stepping=False)


class Table:
    """The copies for a graph's parameters (None for those that are cast), and what the parameters
    were when all were current."""

    def __init__(
        self, epoch: object, params: Sequence[Tensor], copies: Sequence[Copy | None]
    ) -> None:
        self.epoch, self.copies = epoch, copies
        known = [copy for copy in copies if copy is not None]
        self.ids = [id(param) for param in params]
        self.versions = [copy.state[0] for copy in known]
        self.addresses = [copy.state[1] for copy in known]
        self.fences = list({id(c.fence): c.fence for c in known if c.fence is not None}.values())

    def holds(self, params: Sequence[Tensor]) -> bool:
        """Whether nothing has changed; only asked of a table without None."""
        return (
            self.epoch is STORE.epoch
            and self.ids == list(map(id, params))
            and self.versions == [param._version for param in params]
            and self.addresses == list(map(storage_address, params))
        )


class Reader:
    """Finds the copies that one compiled graph reads.

    Args:
        params: for each copy the parameter's position among the graph's inputs, or itself.
        dtypes: the dtype of each.
        grad: whether the graph may keep what it reads for its backward.
        checker: compares copies with their parameters, None for no such thing.
    """

    def __init__(
        self,
        params: Sequence[int | Tensor],
        dtypes: Sequence[torch.dtype],
        grad: bool,
        checker: Checker | None = None,
    ) -> None:
        self.params, self.dtypes, self.grad, self.checker = params, dtypes, grad, checker
        self.table: Table | None = None

    def read(self, args: Sequence[Any], kept: bool) -> list[Tensor]:
        """The copies for a call with these inputs, each of its parameter's shape.

        Args:
            kept: whether copies may be used; if not, casts are made for this call alone.
        """
        params = [args[p] if isinstance(p, int) else p for p in self.params]
        if not kept or under_dispatch_mode() or _recording():
            return self._casts(params)
        table = self.table
        if table is None or not table.holds(params):
            table = self._renewed(params, args)
        for fence in table.fences:
            fence.wait()
        lows = [
            copy.low if copy is not None and copy.low is not None else self._cast(i, params)
            for i, copy in enumerate(table.copies)
        ]
        if self.checker is not None:
            self.checker.look(params, lows)
        # Other tensors of the same memory, by which it is seen that a backward still needs them.
        return [low.detach() for low in lows] if self.grad else lows

    def _renewed(self, params: Sequence[Tensor], args: Sequence[Any]) -> Table:
        """A table of current copies, kept where all parameters have one.

        The epoch is read first and changes last: what happens in between makes the table void.
        """
        with STORE.lock:
            epoch = STORE.epoch
            several = _addresses_of_several([*args, *params])
            copies = [
                STORE.copy(p, d) if _may_have_copy(p, several) else None
                for p, d in zip(params, self.dtypes, strict=True)
            ]
            pairs = [(c, p) for c, p in zip(copies, params, strict=True) if c is not None]
            STORE.renew([(c, p) for c, p in pairs if not c.current(p)])
            table = Table(epoch, params, copies)
            sound = len(pairs) == len(params) and not any(c.stepping for c, _ in pairs)
            self.table = table if sound else None
        return table

    def _casts(self, params: Sequence[Tensor]) -> list[Tensor]:
        return [self._cast(i, params) for i in range(len(params))]

    def _cast(self, i: int, params: Sequence[Tensor]) -> Tensor:
        return params[i].detach().to(self.dtypes[i])


def _recording() -> bool:
    """Whether a CUDA graph is being recorded: it has to cast each time it is replayed."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _may_have_copy(param: Tensor, several: set[int]) -> bool:
    """Whether writes to the parameter can be seen at all.

    Not those to an inference tensor, nor those made through another tensor: a flat one that this
    is a part of, another parameter with the same memory.
    """
    if type(param) is not nn.Parameter or param.layout != torch.strided or param.is_inference():
        return False
    whole = param.untyped_storage().nbytes() == param.numel() * param.element_size()
    return whole and storage_address(param) not in several


def _addresses_of_several(args: Sequence[Any]) -> set[int]:
    """The memory that more than one parameter has."""
    params = {id(a): a for a in args if type(a) is nn.Parameter and a.layout == torch.strided}
    count = Counter(map(storage_address, params.values()))
    return {address for address, n in count.items() if n > 1}
