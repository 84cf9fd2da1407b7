"""Optimizer steps that wait for no answer: skipped by a flag that stays on the device.

`CapturedStep` compiles an optimizer's own step, once, with every write made to depend on the flag
(`passes.predicate_writes`); `FusedStep` hands the flag to the kernels of `fused=True`; the plain
`Stepper`, which waits, is for the rest. What a first step makes (SGD's momentum) is looked after by
`Unsettled`: if the step turns out to have been skipped, it was never made.
"""

import inspect
import itertools
import logging
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from ampgraph.backend import compile_inner
from ampgraph.gradients import parts_of
from ampgraph.internals.dynamo import dynamo_errors, source_name, strict_dynamo
from ampgraph.internals.optim import HostFlag, bare_step, has_step_pre_hooks, step_with_hooks
from ampgraph.kernels.unscale import unscale_
from ampgraph.options import Options
from ampgraph.passes.predicate_writes import predicate_writes

log = logging.getLogger(__name__)
_STEPPER = "_ampgraph_stepper"  # on the optimizer, so that the two go together
_numbers = itertools.count()


@dataclass(frozen=True)
class Skip:
    """What a step needs to know: float32 0-dim tensors on the scaler's device.

    Attributes:
        factor: what each gradient has still to be multiplied by: the inverse scale times the clip
            coefficient; None for nothing.
        found_inf: above zero where nothing may be written.
    """

    factor: Tensor | None
    found_inf: Tensor

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Both scalars on the device of some gradients."""
        factor = torch.ones_like(self.found_inf) if self.factor is None else self.factor
        return factor.to(device, non_blocking=True), self.found_inf.to(device, non_blocking=True)

    def applied(self, optimizer: Optimizer) -> "Skip":
        """What is left to know once the gradients are multiplied by the factor, in place."""
        if self.factor is not None:
            for part in parts_of(optimizer, allow_fp16=True):
                unscale_(part.grads, self.factor.to(part.device, non_blocking=True))
        return Skip(None, self.found_inf)


def stepper_of(optimizer: Optimizer, inner: str | Callable[..., Any]) -> "Stepper":
    """The way to step this optimizer, found at its first step and kept with it."""
    known = vars(optimizer).get(_STEPPER)
    if known is not None and known.inner == inner:
        return known  # type: ignore[no-any-return]
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        made: Stepper = FusedStep(optimizer, inner)
    else:
        made = CapturedStep(optimizer, inner)
    setattr(optimizer, _STEPPER, made)
    return made


def takes_scaler(optimizer: Optimizer) -> bool:
    """Whether its step() wants the scaler itself, as fused optimizers did before torch 2.0."""
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    return fused and "grad_scaler" in inspect.signature(optimizer.step).parameters


class Stepper:
    """Steps one optimizer, and takes care of state that a step makes."""

    def __init__(self, optimizer: Optimizer, inner: str | Callable[..., Any]) -> None:
        self._optimizer, self.inner = weakref.ref(optimizer), inner
        self.unsettled: Unsettled | None = None
        optimizer.register_state_dict_pre_hook(lambda _: self.settle())

    @property
    def optimizer(self) -> Optimizer:
        found = self._optimizer()
        assert found is not None, "a stepper lives no longer than its optimizer"
        return found

    def step(self, skip: Skip, args: Any, kwargs: Any) -> Any:
        """`optimizer.step(*args, **kwargs)`, or nothing where `skip` says so.

        The way of torch.amp.GradScaler: the host waits for the flag, then steps or does not.
        """
        if HostFlag(skip.found_inf).read():
            return None
        skip.applied(self.optimizer)
        return self.optimizer.step(*args, **kwargs)

    def settle(self) -> None:
        """Look whether the last step counted, if it made state; waits for that step's flag."""
        if self.unsettled is not None:
            self.unsettled.settle(self.optimizer)
            self.unsettled = None

    def keys(self) -> "Keys":
        return {param: tuple(state) for param, state in self.optimizer.state.items()}

    def note_made(self, before: "Keys", skip: Skip) -> None:
        """Remember what is in the state and was not before."""
        made = [
            (param, key)
            for param, state in self.optimizer.state.items()
            for key in state
            if key not in before.get(param, ())
        ]
        if made:
            self.unsettled = Unsettled(made, HostFlag(skip.found_inf))


class FusedStep(Stepper):
    """The step of an optimizer whose kernels take the scale and the flag themselves."""

    def step(self, skip: Skip, args: Any, kwargs: Any) -> Any:
        """`optimizer.step(*args, **kwargs)`, which leaves `.grad` unscaled."""
        self.settle()
        optimizer: Any = self.optimizer
        before = self.keys()
        optimizer.grad_scale = None if skip.factor is None else skip.factor.reciprocal()
        optimizer.found_inf = skip.found_inf
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf
            self.note_made(before, skip)


class CapturedStep(Stepper):
    """The step as a graph, compiled the first time and when the optimizer's structure changes."""

    def __init__(self, optimizer: Optimizer, inner: str | Callable[..., Any]) -> None:
        super().__init__(optimizer, inner)
        self.ours = type(optimizer).__module__.startswith("torch.optim.")
        self.refused = ""  # why it is not captured any more
        self.skip: Skip | None = None
        self.before: Keys = {}
        self.run = self._compiled(optimizer)

    def _compiled(self, optimizer: Optimizer) -> Callable[[], Any]:
        step = bare_step(optimizer)
        if step is None:
            self.refused = "its step() is differentiable, or wrapped in something unknown"

        def run() -> Any:
            if not torch.compiler.is_compiling():  # no flag would hold back what follows
                raise NotCapturedError("Dynamo is off, or skips it")
            return step(optimizer)  # type: ignore[misc]

        # Dynamo keeps what it compiled with the code object: one for each optimizer.
        code = run.__code__.replace(co_name=f"step_{next(_numbers)}")
        own = types.FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
        return torch.compile(own, backend=self._backend, fullgraph=True)

    def _backend(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.before = self.keys()  # Dynamo has called the optimizer's _init_group
        nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
        found = predicate_writes(gm, [n.name for n in nodes if source_name(n).endswith(".grad")])
        given = [*inputs, *self._scalars(found.devices)]
        compiled = compile_inner(found.graph, given, Options(inner=self.inner))
        return lambda *args: compiled(*args, *self._scalars(found.devices))

    def _scalars(self, devices: Sequence[torch.device]) -> Iterator[Tensor]:
        assert self.skip is not None, "compiled and run in a step only"
        for device in devices:
            yield from self.skip.on(device)

    def step(self, skip: Skip, args: Any, kwargs: Any) -> Any:
        """`optimizer.step()` with its hooks, on `.grad` times the factor; `.grad` is left alone.

        Where Dynamo or a pass refuses, nothing has been run: this step and the later ones are
        torch's, and the log says why. So is one with arguments.
        """
        if self.refused or args or kwargs:
            return super().step(skip, args, kwargs)
        self.settle()
        if has_step_pre_hooks(self.optimizer):
            skip = skip.applied(self.optimizer)
        try:
            return step_with_hooks(self.optimizer, lambda: self._step(skip))
        except NotCapturedError as error:
            self._refuse(str(error))
            return super().step(skip, args, kwargs)

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        name = type(self.optimizer).__name__
        log.warning(
            "%s is not captured, so each of its steps waits for the device: %s", name, reason
        )

    def _step(self, skip: Skip) -> Any:
        host = None if self.ours else HostState.of(self.optimizer)
        self.skip, self.before = skip, self.keys()
        try:
            with torch.no_grad(), strict_dynamo():
                out = self.run()
        except dynamo_errors as error:
            raise NotCapturedError(str(error).strip().splitlines()[0]) from error
        finally:
            self.skip = None
        self.note_made(self.before, skip)
        changed = host.changed() if host is not None else []
        if host is not None and changed:
            self._refuse(f"it keeps {', '.join(changed)} on the host")
            self.settle()
            if HostFlag(skip.found_inf).read():
                host.restore()
        return out


class NotCapturedError(Exception):
    """Why an optimizer cannot be captured; nothing has been run or changed."""


Keys = Mapping[Any, Sequence[str]]  # of the state, by parameter


@dataclass
class Unsettled:
    """State that a step made, and the flag that says whether the step counts."""

    made: list[tuple[Any, str]]
    skipped: HostFlag

    def settle(self, optimizer: Optimizer) -> None:
        """Take back what a skipped step made: the state did not exist before it."""
        if not self.skipped.read():
            return
        for param, key in self.made:
            optimizer.state[param].pop(key, None)
            if not optimizer.state[param]:
                del optimizer.state[param]


@dataclass
class HostState:
    """What an optimizer counts on the host or replaces: no flag on the device holds that back."""

    values: list[tuple[dict[Any, Any], Any, Any]]  # container, key, value

    @classmethod
    def of(cls, optimizer: Optimizer) -> "HostState":
        """Numbers and tensors of the state, the groups and the optimizer itself."""
        kinds = (Tensor, bool, int, float, str, type(None))
        containers = (*optimizer.state.values(), *optimizer.param_groups, vars(optimizer))
        values = [(held, key, value) for held in containers for key, value in held.items()]
        return cls([row for row in values if isinstance(row[2], kinds)])

    def changed(self) -> list[str]:
        """The names of what is another tensor, or another number, now."""
        return sorted({str(key) for held, key, value in self.values if _differs(held, key, value)})

    def restore(self) -> None:
        """Everything as it was."""
        for held, key, value in self.values:
            held[key] = value


def _differs(held: Mapping[Any, Any], key: Any, value: Any) -> bool:
    now = held.get(key)
    return now is not value and (isinstance(value, Tensor) or now != value)
