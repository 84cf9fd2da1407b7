"""A GradScaler that never waits for the device: the drop-in for torch.amp.GradScaler.

The gradients are read once (`kernels.unscale`), an overflow is a flag on the device, the writes of
the optimizer's step depend on that flag (`steps`), and one small kernel moves the scale. What only
tells what happened is read when somebody asks.

The host's part follows torch/amp/grad_scaler.py (torch 2.13): stages, errors, checkpoints.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ampgraph.errors import OptionError
from ampgraph.gradients import Part, norm_of, parameters_of, parts_of, root_of
from ampgraph.internals.dynamo import untraced
from ampgraph.internals.ranks import max_over_ranks
from ampgraph.kernels.unscale import check, unscale_
from ampgraph.kernels.update_scale import update_scale_
from ampgraph.steps import Skip, stepper_of, takes_scaler

CLOSURE = "Closure use is not currently supported if GradScaler is enabled."


def _fresh_state() -> dict[str, Any]:
    """What is known of one optimizer since the last update().

    `factor` is what its `.grad` has still to be multiplied by, None for nothing; `clipped` are the
    gradients that clip_grad_norm_ has read and not written.
    """
    return {
        "stage": OptState.READY,
        "found_inf_per_device": {},
        "factor": None,
        "clipped": None,
    }


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, on the device: same methods, errors and state_dict.

    `step` does not read the device: a captured or fused optimizer's step is skipped there. `.grad`
    after `step` is as it was before (still scaled, unless `unscale_` was called), but unscaled
    where the optimizer is fused or could not be captured, as with torch's scaler.

    Step hooks and an LR scheduler's count run at every `step`, for the host does not know that it
    is skipped; a step pre-hook finds `.grad` unscaled.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as torch's.
        min_scale, max_scale: the scale never leaves these bounds, so it is never 0 and never inf.
        hysteresis: how many overflows in a row lower the scale (Megatron-LM's word for patience).
        allow_fp16_grads: unscale fp16 gradients instead of raising torch's error.
        process_group: all of these ranks skip when one of them overflows. Without being asked
            the ranks do that over the mesh of DTensors (FSDP2, tensor parallel), and over all
            ranks for FullyShardedDataParallel. A copy forgets it when pickled.
        inner: the Dynamo backend that compiles the optimizer's step.

    Raises:
        OptionError: a number that no scale can work with. AssertionError: torch's own.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 2.0**-126,
        max_scale: float = 2.0**126,
        hysteresis: int = 1,
        allow_fp16_grads: bool = False,
        process_group: Any = None,
        inner: str | Callable[..., Any] = "inductor",
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._min_scale, self._max_scale = min_scale, max_scale
        self._hysteresis = hysteresis
        self._allow_fp16_grads = allow_fp16_grads
        self._process_group = process_group
        self._inner = inner
        if self._enabled:
            _check_numbers(
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
                hysteresis=hysteresis,
                min_scale=min_scale,
                max_scale=max_scale,
                init_scale=init_scale,
            )
            if not min_scale <= init_scale <= max_scale:
                raise OptionError(
                    f"init_scale is {init_scale!r}",
                    cure=f"use one from min_scale, {min_scale:g}, to max_scale, {max_scale:g}",
                )
            self._forget()
            self._per_optimizer_states = defaultdict(_fresh_state)

    def _forget(self) -> None:
        """Everything that lives on the device is made at the first scale()."""
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._hysteresis_tracker: Any = None
        self._previous_scale: Any = None
        self._scaled = True  # since the last update(): the gradients have the scale of now
        self._stepped: frozenset[int] = frozenset()  # by id: who has stepped since the last scale()
        self._skipped: Any = None
        self._empty_steps = 0
        self._last_found = WeakIdKeyDictionary()

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise AssertionError("_growth_tracker initialized before _scale")
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._previous_scale = self._scale.clone()
        self._growth_tracker = torch.full(
            (), self._init_growth_tracker, dtype=torch.int32, device=dev
        )
        self._hysteresis_tracker = torch.full((), self._hysteresis, dtype=torch.int32, device=dev)
        self._skipped = torch.zeros((), dtype=torch.int64, device=dev)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None or self._growth_tracker is None:
            raise AssertionError(
                f"Attempted {funcname} but _scale is None.  This may indicate your script did not "
                "use scaler.scale(loss or outputs) earlier in the iteration."
            )
        return self._scale, self._growth_tracker

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or the tensors in nested lists, tuples and iterables, by the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            assert self._scale is not None, "made above"
            self._scaled, self._stepped = True, frozenset()
            return outputs * self._scale.to(outputs.device, non_blocking=True)
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            if isinstance(outputs, (list, tuple)):
                return type(outputs)(scaled)
            return scaled
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    def _inverse_scale(self, optimizer: Optimizer) -> Tensor:
        """One over the scale that the gradients have, which update() may have moved since.

        Those of an optimizer that has stepped since the last scale() are newer: their loss was
        multiplied by get_scale(), without this class.
        """
        scale = self._scale
        if not self._scaled and id(optimizer) not in self._stepped:
            scale = self._previous_scale
        assert scale is not None, "the caller has checked"
        wide = scale if scale.device.type == "mps" else scale.double()
        return wide.reciprocal().float()

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place; without waiting for the device.

        Raises:
            RuntimeError, ValueError, AssertionError: as torch.amp.GradScaler.unscale_.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        self._refuse_twice(state)
        found, _ = self._read(
            optimizer, self._inverse_scale(optimizer), self._allow_fp16_grads, unscale_
        )
        state |= {"found_inf_per_device": found, "stage": OptState.UNSCALED}

    @staticmethod
    def _refuse_twice(state: Mapping[str, Any]) -> None:
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")

    def clip_grad_norm_(
        self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip the norm of all of the optimizer's gradients together, in one read of them.

        Takes the place of `unscale_` and `torch.nn.utils.clip_grad_norm_`. The gradients are not
        written: `step` multiplies them by the inverse scale and the clip coefficient on its way.

        Returns:
            The norm of the unscaled gradients, 0-dim float32, not finite after an overflow.

        Raises:
            RuntimeError: after `step`; for the second time since the last update(), where the
            gradients are others now. ValueError: fp16 gradients. OptionError: norm_type 0, which
            counts elements and can be clipped to nothing.
        """
        if norm_type == 0:
            raise OptionError("norm_type is 0", cure="use 2, inf or another order of a norm")
        if not self._enabled:
            params = parameters_of(optimizer)
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("clip_grad_norm_() is being called after step().")
        ready = state["stage"] is OptState.READY
        clipped = [p.grad for p in parameters_of(optimizer)]
        before = state["clipped"]
        if before is not None and any(a is not b for a, b in zip(before, clipped, strict=False)):
            raise RuntimeError(
                "clip_grad_norm_() has already been called on other gradients of this optimizer "
                "since the last update()."
            )
        factor = self._inverse_scale(optimizer) if ready else state["factor"]
        factor = torch.ones_like(scale) if factor is None else factor
        found, squares = self._read(optimizer, factor, self._allow_fp16_grads, check)
        if ready:
            state |= {"found_inf_per_device": found, "stage": OptState.UNSCALED, "clipped": clipped}
        parts = [part for part, _ in squares]
        norm = root_of(squares, factor) if norm_type == 2 else norm_of(parts, norm_type, factor)
        state["factor"] = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    def _read(
        self,
        optimizer: Optimizer,
        factor: Tensor,
        allow_fp16: bool,
        kernel: Callable[[list[Tensor], Tensor], tuple[Tensor, Tensor]],
    ) -> tuple[dict[torch.device, Tensor], list[tuple[Part, Tensor]]]:
        """Flags by device, and each part's sum of squares of factor * gradient.

        The flag of several ranks is one: also ranks with copies of a gradient must not part ways,
        and one without gradients takes part, or the others would wait for it.
        """
        found: dict[torch.device, Tensor] = {}
        squares: list[tuple[Part, Tensor]] = []
        group = self._process_group
        ranks = {} if group is None else {group: None}
        with torch.no_grad():
            for part in parts_of(optimizer, allow_fp16, group):
                flag, total = kernel(part.grads, factor.to(part.device, non_blocking=True))
                squares.append((part, total))
                ranks |= dict.fromkeys(part.ranks)
                seen = found.get(part.device)
                found[part.device] = flag if seen is None else torch.maximum(seen, flag)
            if ranks:
                found = {factor.device: max_over_ranks(_combined(found, factor), ranks)}
        return found, squares

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self._read(optimizer, inv_scale, allow_fp16, unscale_)[0]

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._per_optimizer_states[id(optimizer)]
        factor = self._inverse_scale(optimizer)
        state["found_inf_per_device"] = self._read(optimizer, factor, True, check)[0]
        return state["found_inf_per_device"]  # type: ignore[no-any-return]

    @untraced
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer on unscaled gradients, unless one of them is inf or nan.

        The host does not learn which: ask `step_skipped`. An optimizer none of whose parameters
        has a gradient is not stepped, and counts as skipped.

        Returns:
            What `optimizer.step(*args, **kwargs)` returns.

        Raises:
            RuntimeError: a closure, or a second step before update(). ValueError: fp16 gradients.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or any(callable(argument) for argument in args):
            raise RuntimeError(CLOSURE)
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if takes_scaler(optimizer):
            out = super().step(optimizer, *args, **kwargs)
            self._note(optimizer, state["found_inf_per_device"], scale)
            return out
        if state["stage"] is OptState.READY:
            fp16 = self._allow_fp16_grads or getattr(optimizer, "_step_supports_amp_scaling", False)
            factor = self._inverse_scale(optimizer)
            found = self._read(optimizer, factor, fp16, check)[0]
            state |= {"found_inf_per_device": found, "factor": factor}
        out, found = None, state["found_inf_per_device"]
        if found:
            skip = Skip(state["factor"], _combined(found, scale))
            try:
                out = stepper_of(optimizer, self._inner).step(skip, args, kwargs)
            finally:
                if skip.factor is None:  # applied: one that raises may be tried again
                    state |= {"factor": None, "stage": OptState.UNSCALED}
        state["stage"] = OptState.STEPPED
        self._note(optimizer, found, scale)
        return out

    def _note(self, optimizer: Optimizer, found: Mapping[Any, Tensor], like: Tensor) -> None:
        """Remember for who asks whether the step was skipped, as one without gradients is."""
        if not found:
            self._empty_steps += 1
            self._last_found[optimizer] = None
            return
        flag = _combined(found, like)
        self._last_found[optimizer] = flag
        self._skipped += flag > 0

    def step_skipped(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's last step was skipped; this reads the device.

        Raises:
            RuntimeError: before the first step.
        """
        if not self._enabled:
            return False
        if optimizer not in self._last_found:
            raise RuntimeError("step_skipped() is being called before step().")
        found = self._last_found[optimizer]
        return found is None or bool(found.item())

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped since this scaler was made; this reads the device."""
        if not self._enabled:
            return 0
        return self._empty_steps + (0 if self._skipped is None else int(self._skipped.item()))

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale: down after an overflow, up after `growth_interval` good steps in a row.

        Gradients that are still to be stepped keep the scale they were made with.

        Args:
            new_scale: set the scale to this instead, within its bounds.

        Raises:
            AssertionError: before any step or unscale_, as torch.
        """
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        stages = {key: state["stage"] for key, state in self._per_optimizer_states.items()}
        states = self._per_optimizer_states.values()
        found = [flag for state in states for flag in state["found_inf_per_device"].values()]
        stepped = frozenset(key for key, stage in stages.items() if stage is OptState.STEPPED)
        if new_scale is None and not found and not stepped:
            raise AssertionError("No inf checks were recorded prior to update.")
        self._keep_previous(scale)
        self._stepped |= stepped
        if new_scale is not None:
            self._set_scale(scale, new_scale)
        elif found:
            update_scale_(
                scale,
                tracker,
                self._hysteresis_tracker,
                _combined(dict(enumerate(found)), scale),
                self._growth_factor,
                self._backoff_factor,
                self._growth_interval,
                self._hysteresis,
                self._min_scale,
                self._max_scale,
            )
        self._per_optimizer_states = defaultdict(_fresh_state)

    def _keep_previous(self, scale: Tensor) -> None:
        if self._scaled:  # a second update() in a row: the gradients are older than the first
            self._previous_scale.copy_(scale)
        self._scaled = False

    def _set_scale(self, scale: Tensor, new_scale: float | Tensor) -> None:
        if isinstance(new_scale, Tensor):
            reason = (
                "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
                "torch.FloatTensor with requires_grad=False."
            )
            fits = new_scale.device.type == self._device and new_scale.numel() == 1
            if not fits or new_scale.requires_grad:
                raise AssertionError(reason)
            scale.copy_(new_scale.reshape(()))
        else:
            _check_numbers(new_scale=new_scale)
            scale.fill_(new_scale)
        scale.clamp_(self._min_scale, self._max_scale)

    def set_growth_factor(self, new_factor: float) -> None:
        """As torch's; 1.0 keeps the scale from growing. Raises OptionError."""
        _check_numbers(growth_factor=new_factor)
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """As torch's; 1.0 keeps the scale from going down. Raises OptionError."""
        _check_numbers(backoff_factor=new_factor)
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """As torch's. Raises OptionError."""
        _check_numbers(growth_interval=new_interval)
        super().set_growth_interval(new_interval)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of this scaler or of torch's; on any error nothing is changed.

        A scale beyond the bounds is taken to the nearer one.

        Raises:
            RuntimeError: an empty state. OptionError: what no scaler can have written.
        """
        if not self._enabled:
            return
        _check_state(state_dict)
        scale = min(max(float(state_dict["scale"]), self._min_scale), self._max_scale)
        super().load_state_dict({**state_dict, "scale": scale})
        self._scaled = True

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled:
            state["_empty_steps"] = self.skipped_steps
            state["_skipped"] = state["_hysteresis_tracker"] = state["_previous_scale"] = None
            state["_scaled"], state["_stepped"] = True, frozenset()
            state["_last_found"] = None
            state["_process_group"] = None  # of this process
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._enabled:
            self._last_found = WeakIdKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> "GradScaler":
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        if self._enabled:
            twin._process_group = self._process_group  # a copy stays in this process
        return twin


def _check_state(state: Mapping[str, Any]) -> None:
    if len(state) == 0:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved "
            "from a disabled instance of GradScaler."
        )
    names = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
    missing = sorted(names - state.keys())
    if missing:
        raise OptionError(
            f"the state has no {', '.join(missing)}",
            cure="load what state_dict() of a GradScaler returned",
        )
    _check_numbers("the state's ", **{name: state[name] for name in names})


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "growth_factor": (lambda v: 1 <= v < math.inf, "a finite number, at least 1"),
    "backoff_factor": (lambda v: 0 < v <= 1, "a number above 0, at most 1"),
    "growth_interval": (lambda v: v >= 1 and v % 1 == 0, "a whole number from 1"),
    "hysteresis": (lambda v: v >= 1 and v % 1 == 0, "a whole number from 1"),
    "_growth_tracker": (lambda v: v >= 0 and v % 1 == 0, "a whole number from 0"),
    "min_scale": (lambda v: 0 < v < math.inf, "a finite number above 0"),
    "max_scale": (lambda v: 0 < v < math.inf, "a finite number above 0"),
    "init_scale": (lambda v: 0 < v < math.inf, "a finite number above 0"),
    "new_scale": (lambda v: v > 0, "a number above 0"),
    "scale": (lambda v: v > 0, "a number above 0"),
}


def _check_numbers(where: str = "", /, **numbers: Any) -> None:
    """Raise OptionError for the first that no scaler can work with."""
    for name, value in numbers.items():
        fits, cure = _RULES[name]
        if isinstance(value, bool) or not isinstance(value, Real) or not fits(value):
            raise OptionError(f"{where}{name} is {value!r}", cure=f"use {cure}")


def _combined(found: Mapping[Any, Tensor], like: Tensor) -> Tensor:
    """One flag, on the device of `like`, from those of several devices."""
    flags = [flag.to(like.device, non_blocking=True) for flag in found.values()]
    if not flags:
        return torch.zeros_like(like)
    return flags[0] if len(flags) == 1 else torch.stack(flags).amax()
