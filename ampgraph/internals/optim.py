"""What torch puts around an optimizer's step, and flags on their way to the host."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """The step an optimizer's class defines, without what torch wraps around it.

    Those are `Optimizer.profile_hook_step` (record_function, hooks), `torch.no_grad` and
    `_use_grad_for_differentiable`, which breaks the graph on purpose. None where the wrapping is
    not known: an instance's own `step` (an LR scheduler's counter is known), a differentiable one,
    what is no `torch.optim.Optimizer` or has not called its `__init__`.
    """
    own: Any = vars(optimizer).get("step")
    step: Any = getattr(type(optimizer), "step", None)  # of a wrapper maybe by __getattr__ only
    counted = hasattr(own, "_wrapped_by_lr_sched") and own.__wrapped__ is step
    if own is not None and not counted:
        return None
    if not getattr(step, "hooked", False) or optimizer.defaults.get("differentiable"):
        return None
    files = ("torch/optim/optimizer.py", "torch/utils/_contextlib.py")
    while hasattr(step, "__wrapped__") and step.__code__.co_filename.endswith(files):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def step_with_hooks(optimizer: torch.optim.Optimizer, run: Callable[..., Any]) -> Any:
    """What `Optimizer.profile_hook_step` and `LRScheduler` put around a step (torch 2.13).

    Args:
        run: the step, called with the arguments that the pre-hooks leave: the optimizer, if alone.
    """
    args: Any = (optimizer,)
    kwargs: Any = {}
    with torch.autograd.profiler.record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
        before = (_global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks)
        for hook in itertools.chain(*(hooks.values() for hooks in before)):
            result: Any = hook(optimizer, args, kwargs)
            if result is not None:
                if not isinstance(result, tuple) or len(result) != 2:
                    raise RuntimeError(
                        f"{type(optimizer).step} must return None or a tuple of (new_args, "
                        f"new_kwargs), but got {result}."
                    )
                args, kwargs = result
        if "step" in vars(optimizer):  # patched by an LR scheduler, which asks whether it ran
            optimizer._opt_called = True  # type: ignore[attr-defined]
        out = run(*args, **kwargs)
        optimizer._optimizer_step_code()
        after = (optimizer._optimizer_step_post_hooks, _global_optimizer_post_hooks)
        for hook in itertools.chain(*(hooks.values() for hooks in after)):
            hook(optimizer, args, kwargs)
    return out


_OUR_HOOKS: list[Callable[..., None]] = []  # which look at no gradient


def on_every_step(before: Callable[..., None], after: Callable[..., None]) -> None:
    """Call `before(optimizer, args, kwargs)` and `after` around each step of each optimizer."""
    _OUR_HOOKS.append(before)
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The step that the class defines, under its own `torch.no_grad`, if `bare_step` knows it."""
    return type(optimizer).step.__wrapped__  # type: ignore[attr-defined, no-any-return]


def before_state_dict(
    optimizer: torch.optim.Optimizer, hook: Callable[[torch.optim.Optimizer], None]
) -> None:
    """Have the hook called before each `state_dict()`, once, where an optimizer has such hooks."""
    hooks = getattr(optimizer, "_optimizer_state_dict_pre_hooks", None)
    if hooks is not None and hook not in hooks.values():
        optimizer.register_state_dict_pre_hook(hook)


def has_step_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody looks at the gradients right before a step."""
    everywhere = [h for h in _global_optimizer_pre_hooks.values() if h not in _OUR_HOOKS]
    return bool(everywhere or optimizer._optimizer_step_pre_hooks)


class HostFlag:
    """A flag on its way from the device to the host; only reading it waits, for it alone."""

    def __init__(self, flag: torch.Tensor) -> None:
        self.event: Any = None
        if flag.device.type == "cpu":
            self.value = flag.clone()
            return
        self.value = torch.empty((), dtype=flag.dtype, pin_memory=True)
        self.value.copy_(flag, non_blocking=True)
        self.event = torch.get_device_module(flag.device).Event()
        self.event.record()

    def read(self) -> bool:
        """Whether the flag is set."""
        if self.event is not None:
            self.event.synchronize()
        value: Any = self.value.tolist()  # of a 0-dim tensor a number, and no op
        return bool(value > 0)
