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
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from ampgraph.backend import compile_inner
from ampgraph.errors import RewriteError
from ampgraph.gradients import parts_of
from ampgraph.hoststate import HostState
from ampgraph.internals.dynamo import (
    attributes_set_on,
    dynamo_errors,
    reason_of,
    source_name,
    strict_dynamo,
)
from ampgraph.internals.optim import (
    HostFlag,
    bare_step,
    before_state_dict,
    has_step_pre_hooks,
    step_with_hooks,
    step_without_hooks,
)
from ampgraph.kernels.unscale import unscale_
from ampgraph.options import Options
from ampgraph.passes.predicate_writes import predicate_writes

log = logging.getLogger(__name__)
_STEPPER = "_ampgraph_stepper"  # on the optimizer, so that the two go together
_numbers = itertools.count()


@dataclass
class Skip:
    """What a step needs to know: float32 0-dim tensors on the scaler's device.

    Attributes:
        factor: what each gradient has still to be multiplied by: the inverse scale times the clip
            coefficient; None for nothing, and once it is applied.
        found_inf: above zero where nothing may be written.
    """

    factor: Tensor | None
    found_inf: Tensor

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Both scalars on the device of some gradients."""
        factor = torch.ones_like(self.found_inf) if self.factor is None else self.factor
        return factor.to(device, non_blocking=True), self.found_inf.to(device, non_blocking=True)

    def apply(self, optimizer: Optimizer) -> None:
        """Multiply the gradients by the factor, in place, and once only."""
        if self.factor is not None:
            for part in parts_of(optimizer, allow_fp16=True):
                unscale_(part.grads, self.factor.to(part.device, non_blocking=True))
        self.factor = None


def stepper_of(optimizer: Optimizer, inner: str | Callable[..., Any]) -> "Stepper":
    """The way to step this optimizer, found at its first step and kept with it."""
    known = vars(optimizer).get(_STEPPER)
    if known is not None and known.inner == inner:
        return known  # type: ignore[no-any-return]
    settle(optimizer)
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


def settle(optimizer: Optimizer) -> None:
    """Take back what the optimizer's last step made, if that step turns out to be skipped."""
    known = vars(optimizer).get(_STEPPER)
    if known is not None:
        known.settle()


class Stepper:
    """Steps one optimizer, and takes care of state that a step makes."""

    def __init__(self, optimizer: Optimizer, inner: str | Callable[..., Any]) -> None:
        self._optimizer, self.inner = weakref.ref(optimizer), inner
        self.unsettled: Unsettled | None = None
        before_state_dict(optimizer, settle)

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing of it goes into a copy of its optimizer, which makes its own."""
        return type(None), ()

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
        skip.apply(self.optimizer)
        return self.optimizer.step(*args, **kwargs)

    def settle(self) -> None:
        """Look whether the last step counted, if it made state; waits for that step's flag."""
        if self.unsettled is not None:
            self.unsettled.settle(self.optimizer)
            self.unsettled = None

    def keys(self) -> "Keys":
        held = self._states()
        return {param: tuple(state) if isinstance(state, dict) else () for param, state in held}

    def note_made(self, before: "Keys", skip: Skip) -> bool:
        """Remember what is in the state and was not before; whether there is something."""
        made: list[Made] = []
        for param, state in self._states():
            if isinstance(state, dict):
                new = [key for key in state if key not in before.get(param, ())]
                made += [Made(param, state, key, state[key]) for key in new]
            elif param not in before:
                made.append(Made(param, self.optimizer.state, param, state))
        if made:
            self.unsettled = Unsettled(made, HostFlag(skip.found_inf))
        return bool(made)

    def _states(self) -> list[tuple[Any, Any]]:
        """What an optimizer keeps for each parameter; users keep other things beside that."""
        return list(getattr(self.optimizer, "state", {}).items())


class FusedStep(Stepper):
    """The step of an optimizer whose kernels take the scale and the flag themselves."""

    def step(self, skip: Skip, args: Any, kwargs: Any) -> Any:
        """`optimizer.step(*args, **kwargs)`, which leaves `.grad` unscaled."""
        self.settle()
        optimizer: Any = self.optimizer
        before = self.keys()
        if skip.factor is None:
            optimizer.grad_scale = getattr(optimizer, "grad_scale", None)
        else:  # times what the user has set, as torch
            optimizer.grad_scale = skip.factor.reciprocal() * getattr(optimizer, "grad_scale", 1)
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
        self.ran: Graph | None = None  # by the last step
        self.bare = bare_step(optimizer)
        self.run = self._compiled(optimizer)

    def _compiled(self, optimizer: Optimizer) -> Callable[[], Any]:
        step = self.bare

        def run() -> Any:
            if not torch.compiler.is_compiling():  # no flag would hold back what follows
                raise NotCapturedError("Dynamo is off, or skips it")
            return step(optimizer)  # type: ignore[misc]

        # Dynamo keeps what it compiled with the code object: one for each optimizer.
        code = run.__code__.replace(co_name=f"step_{next(_numbers)}")
        own = types.FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
        return torch.compile(own, backend=self._backend, fullgraph=True)

    def _backend(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if names := attributes_set_on(self.optimizer):
            raise RewriteError(
                f"its step() sets {', '.join(names)} on the optimizer",
                cure="keep tensors in its state and write to them in place",
            )
        nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
        found = predicate_writes(gm, [n.name for n in nodes if source_name(n).endswith(".grad")])
        given = [*inputs, *self._scalars(found.devices)]
        compiled = compile_inner(found.graph, given, Options(inner=self.inner))
        graph = Graph()

        def run(*args: Any) -> Any:
            self.ran = graph
            if graph.makes_state:  # after Dynamo has called the optimizer's _init_group
                self.before = self.keys()
            return compiled(*args, *self._scalars(found.devices))

        return run

    def _scalars(self, devices: Sequence[torch.device]) -> Iterator[Tensor]:
        assert self.skip is not None, "compiled and run in a step only"
        for device in devices:
            yield from self.skip.on(device)

    def step(self, skip: Skip, args: Any, kwargs: Any) -> Any:
        """`optimizer.step()` with its hooks, on `.grad` times the factor; `.grad` is left alone.

        Where Dynamo or a pass refuses, nothing has been run: this step and the later ones are
        torch's, and the log says why. So is one with arguments.
        """
        if not self.refused and (self.bare is None or bare_step(self.optimizer) is not self.bare):
            self._refuse("its step() is differentiable, or wrapped in something unknown")
        if self.refused or args or kwargs:
            self.settle()
            return super().step(skip, args, kwargs)
        self.settle()
        if has_step_pre_hooks(self.optimizer):
            skip.apply(self.optimizer)
        return step_with_hooks(self.optimizer, partial(self._hooked, skip))

    def _hooked(self, skip: Skip, *args: Any, **kwargs: Any) -> Any:
        """The step between its hooks, which may have given it arguments, and run once only."""
        if len(args) == 1 and not kwargs:
            try:
                return self._step(skip)
            except NotCapturedError as error:
                self._refuse(str(error))
        if HostFlag(skip.found_inf).read():
            return None
        skip.apply(self.optimizer)
        return step_without_hooks(self.optimizer)(*args, **kwargs)

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        name = type(self.optimizer).__name__
        log.warning(
            "%s is not captured, so each of its steps waits for the device: %s", name, reason
        )

    def _step(self, skip: Skip) -> Any:
        host = None if self.ours else HostState.of(self.optimizer, _STEPPER)
        self.skip, self.ran = skip, None
        if host is not None:
            self.before = self.keys()
        try:
            with torch.no_grad(), strict_dynamo():
                out = self.run()
        except dynamo_errors as error:
            raise NotCapturedError(reason_of(error)) from error
        finally:
            self.skip = None
        if host is None:
            self._look_at_state(skip)
        else:
            self.note_made(self.before, skip)
            self._look_at_host(host, skip)
        return out

    def _look_at_state(self, skip: Skip) -> None:
        """Note what the step made, which a graph does each time it runs, or never.

        For torch's own: what such a step makes is guarded on its not being there.
        """
        if self.ran is not None and self.ran.makes_state:
            self.ran.makes_state = self.note_made(self.before, skip)

    def _look_at_host(self, host: HostState, skip: Skip) -> None:
        changed = host.changed()
        if changed:
            self._refuse(f"it keeps {', '.join(changed)} on the host")
            self.settle()
            if HostFlag(skip.found_inf).read():
                host.restore()


class NotCapturedError(Exception):
    """Why an optimizer cannot be captured; nothing has been run or changed."""


Keys = Mapping[Any, Sequence[Any]]  # of the state, by parameter


@dataclass
class Graph:
    """What is known of one compiled step: whether state comes to be when it runs."""

    makes_state: bool = True  # until it has run


@dataclass
class Made:
    """A piece of state: `held[key]` was set to the value, for the parameter."""

    param: Any
    held: dict[Any, Any]
    key: Any
    value: Any


@dataclass
class Unsettled:
    """State that a step made, and the flag that says whether the step counts."""

    made: list[Made]
    skipped: HostFlag

    def settle(self, optimizer: Optimizer) -> None:
        """Take back what a skipped step made: the state did not exist before it.

        Only that: a checkpoint may have been loaded since.
        """
        if not self.skipped.read():
            return
        for made in self.made:
            if made.held.get(made.key) is made.value:
                del made.held[made.key]
            if not made.held and optimizer.state.get(made.param) is made.held:
                del optimizer.state[made.param]
