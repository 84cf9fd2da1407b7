"""Optimizer steps that are skipped on the device: no reads, exact state, torch's trajectory."""

import copy
import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.optim import Optimizer

from ampgraph.steps import CapturedStep, FusedStep
from scaler_runs import (
    MakeOptimizer,
    OfAUser,
    Reads,
    backward,
    gradients,
    ours,
    parameters,
    parameters_of,
    state_of,
    theirs,
    train,
)

optim = torch.optim
INF = float("inf")


def cases() -> dict[str, MakeOptimizer]:
    """Every optimizer and implementation that is to make no read."""
    rows: list[tuple[type[Optimizer], dict[str, Any], Sequence[str]]] = [
        (optim.Adam, {}, ("foreach", "capturable", "fused")),
        (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}, ("foreach",)),
        (optim.AdamW, {}, ("foreach", "capturable", "fused")),
        (optim.SGD, {"lr": 0.1}, ("foreach", "fused")),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, ("foreach", "fused")),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, ("foreach",)),
        (optim.RMSprop, {"momentum": 0.9, "centered": True}, ("foreach", "capturable")),
        (optim.NAdam, {}, ("foreach", "capturable")),
        (optim.RAdam, {}, ("foreach", "capturable")),
        (optim.Adagrad, {}, ("foreach", "fused")),
        (optim.Adamax, {}, ("foreach", "capturable")),
        (optim.Rprop, {}, ("foreach", "capturable")),
        (optim.ASGD, {}, ("foreach", "capturable")),
        (optim.Adadelta, {}, ("foreach", "capturable")),
        (optim.Adafactor, {}, ("foreach",)),
    ]
    found: dict[str, MakeOptimizer] = {"Muon": _muon}
    for make, options, variants in rows:
        for variant in ("", *variants):
            given = {"foreach": False} if not variant else {variant: True}
            said = [k for k, v in options.items() if v is True or k == "momentum"]
            name = " ".join([make.__name__, *said, variant or "for-loop"])
            found[name] = partial(make, **options, **given)
    return found


def _muon(params: Sequence[nn.Parameter]) -> Optimizer:
    """Muon takes matrices only."""
    return optim.Muon([p for p in params if p.ndim == 2], lr=0.1)


CASES = cases()


def for_torch(make: MakeOptimizer) -> MakeOptimizer:
    """What torch's scaler can step here, with the same trajectory.

    `capturable` needs a GPU in eager mode; fused SGD starts from memory that nobody wrote when its
    first step is skipped.
    """
    if not isinstance(make, partial):
        return make
    kept = {k: v for k, v in make.keywords.items() if k not in ("fused", "capturable")}
    return partial(make.func, **kept)


@pytest.mark.parametrize("name", CASES)
def test_trajectory_state_and_reads(name: str) -> None:
    """Overflows come first, in the middle and twice in a row."""
    stream = [INF, INF, None, None, float("nan"), None, INF, None]
    params = parameters()
    opt, scaler = CASES[name](params), ours(growth_interval=2)
    want = train(theirs(growth_interval=2), for_torch(CASES[name]), stream)
    for i, special in enumerate(stream):
        opt.zero_grad()
        backward(scaler, params, gradients(i, special))
        before = state_of(opt)
        with Reads() as reads:
            scaler.step(opt)
            scaler.update()
        assert reads.count == 0
        if not want.stepped[i]:
            opt.state_dict()  # which looks whether what the step made was made
            after = state_of(opt)
            held = after if before and len(before) == len(after) else after[-len(before) :]
            assert all(torch.equal(a, b) for a, b in zip(before, held, strict=True))
        torch.testing.assert_close(
            [p.detach() for p in params], want.params[i], rtol=2e-6, atol=5e-7
        )
        assert scaler.get_scale() == want.scales[i]
    stepper = opt._ampgraph_stepper  # type: ignore[attr-defined]
    assert isinstance(stepper, FusedStep if "fused" in name else CapturedStep)
    assert not getattr(stepper, "refused", ""), "captured to the end"


@pytest.mark.parametrize("name", ["SGD momentum foreach", "SGD momentum fused"])
def test_a_skipped_first_step_leaves_no_state(name: str) -> None:
    params, scaler = parameters(), ours()
    opt = CASES[name](params)
    backward(scaler, params, gradients(0, INF))
    scaler.step(opt)
    scaler.update()
    assert not opt.state_dict()["state"]
    opt.zero_grad()
    backward(scaler, params, gradients(1))
    scaler.step(opt)
    momentum = opt.state_dict()["state"][0]["momentum_buffer"]
    torch.testing.assert_close(momentum, gradients(1)[0])


def resumed(make: MakeOptimizer) -> tuple[list[nn.Parameter], Optimizer]:
    """An optimizer with a few steps behind it, its step counters on the CPU."""
    params = parameters()
    opt = make(params)
    for i in range(3):
        for p, g in zip(params, gradients(i), strict=True):
            p.grad = g
        opt.step()
    again = [nn.Parameter(p.detach().clone()) for p in params]
    twin = make(again)
    twin.load_state_dict(copy.deepcopy(opt.state_dict()))
    return again, twin


def test_resumed_adam_makes_no_read() -> None:
    params, opt = resumed(partial(optim.Adam, lr=1e-2))
    _, want = resumed(partial(optim.Adam, lr=1e-2))
    scaler = ours()
    backward(scaler, params, gradients(7))
    with Reads() as reads:
        scaler.step(opt)
    for p, g in zip(parameters_of(want), gradients(7), strict=True):
        p.grad = g
    want.step()
    assert reads.count == 0
    assert [float(s["step"]) for s in opt.state.values()] == [4.0] * len(params)
    torch.testing.assert_close(state_of(opt), state_of(want))


def test_a_schedule_does_not_recompile_each_step() -> None:
    counter = CompileCounter()
    params, scaler = parameters(), ours(inner=counter)
    opt = optim.AdamW(params, lr=1e-2)
    schedule = optim.lr_scheduler.CosineAnnealingLR(opt, T_max=20)
    twin = parameters()
    other = optim.AdamW(twin, lr=1e-2)
    torchs = optim.lr_scheduler.CosineAnnealingLR(other, T_max=20)
    for i in range(8):
        backward(scaler, params, gradients(i))
        scaler.step(opt)
        scaler.update()
        schedule.step()
        opt.zero_grad()
        for p, g in zip(twin, gradients(i), strict=True):
            p.grad = g
        other.step()
        torchs.step()
    assert counter.frame_count == 2, "once for the first rate, once for any other"
    assert schedule.get_last_lr() == torchs.get_last_lr()
    torch.testing.assert_close(params, twin, rtol=1e-5, atol=1e-6)


def test_step_hooks_run_and_see_true_gradients() -> None:
    seen: list[Any] = []
    params, scaler = parameters(), ours()
    opt = optim.SGD(params, lr=0.1)
    opt.register_step_pre_hook(lambda o, a, k: seen.append([p.grad for p in params]))
    opt.register_step_post_hook(lambda o, a, k: seen.append("after"))
    backward(scaler, params, gradients(0))
    scaler.step(opt)
    torch.testing.assert_close(seen[0], gradients(0))
    assert seen[1:] == ["after"]


def test_gradients_stay_scaled_where_the_step_is_captured() -> None:
    params, scaler = parameters(), ours(init_scale=8.0)
    backward(scaler, params, gradients(0))
    scaler.step(optim.Adam(params))
    torch.testing.assert_close([p.grad for p in params], [g * 8 for g in gradients(0)])


class HostCounter(OfAUser):
    """Counts its steps in Python, as many optimizers of users do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param, grad in self.with_gradients():
            state = self.state[param]
            state["step"] = state.get("step", 0) + 1
            param.add_(grad, alpha=-self.param_groups[0]["lr"] / state["step"])


class Replacer(OfAUser):
    """Makes new tensors for its state at each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param, grad in self.with_gradients():
            state = self.state[param]
            state["mean"] = state.get("mean", torch.zeros_like(param)) * 0.9 + grad
            param.sub_(state["mean"] * 0.1)


class Reader(OfAUser):
    """Reads the device in its step: Dynamo breaks the graph there."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param, grad in self.with_gradients():
            if grad.norm().item() > 0:
                param.sub_(grad * 0.1)


class Pure(OfAUser):
    """A user's optimizer that keeps everything in tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for param in parameters_of(self):
            self.state[param]["mean"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param, grad in self.with_gradients():
            mean = self.state[param]["mean"]
            mean.mul_(0.9).add_(grad)
            param.sub_(mean, alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("make", [HostCounter, Replacer, Reader, Pure], ids=lambda m: m.__name__)
@pytest.mark.parametrize("first", [INF, None], ids=["overflow first", "good first"])
def test_optimizers_of_users(
    make: Callable[[Any], Optimizer], first: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Captured where tensors are all there is; else as torch's scaler does, and once logged."""
    stream = [first, None, INF, None, INF, None]
    with caplog.at_level(logging.WARNING, logger="ampgraph"):
        got = train(ours(growth_interval=2), make, stream)
    want = train(theirs(growth_interval=2), make, stream)
    assert got.scales == want.scales
    assert got.stepped == want.stepped
    torch.testing.assert_close(got.params, want.params, rtol=2e-6, atol=2e-7)
    said = [r.getMessage() for r in caplog.records if r.name == "ampgraph.steps"]
    assert len(said) == (make is not Pure), said


def test_a_replaced_step_is_called() -> None:
    """A wrapper put on an instance by a library is not left out."""
    params, scaler = parameters(), ours()
    opt = optim.SGD(params, lr=0.1)
    step, calls = opt.step, []
    opt.step = lambda *a, **k: (calls.append(1), step(*a, **k))[1]  # type: ignore[method-assign,func-returns-value]
    backward(scaler, params, gradients(0))
    scaler.step(opt)
    assert calls == [1]


class Taker(optim.SGD):
    """A fused optimizer of old, which is given the scaler and asks it."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]
        found = grad_scaler._check_inf_per_device(self)
        if not sum(flag.item() for flag in found.values()):
            for param in parameters_of(self):
                assert param.grad is not None
                param.data.sub_(param.grad / grad_scaler.get_scale() * 0.1)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
def test_an_optimizer_that_takes_the_scaler_gets_it() -> None:
    stream = [INF, None, INF, None]
    make = partial(Taker, lr=0.1)
    got = train(ours(growth_interval=2), make, stream)
    want = train(theirs(growth_interval=2), make, stream)
    assert (got.scales, got.stepped) == (want.scales, want.stepped)
    params, scaler = parameters(), ours()
    opt = make(params)
    backward(scaler, params, gradients(0, INF))
    scaler.step(opt)
    assert (scaler.step_skipped(opt), scaler.skipped_steps) == (True, 1)


def test_a_step_that_raises_may_be_tried_again() -> None:
    params, scaler = parameters(), ours()
    opt = optim.SGD(params, lr=0.1)
    hook = opt.register_step_pre_hook(lambda o, a, k: exec("raise KeyError('once')"))
    backward(scaler, params, gradients(0))
    scaler.unscale_(opt)
    before = [p.detach().clone() for p in params]
    with pytest.raises(KeyError, match="once"):
        scaler.step(opt)
    hook.remove()
    scaler.step(opt)
    scaler.update()
    assert (scaler.skipped_steps, scaler.get_scale()) == (0, 2.0**16)
    for param, was, grad in zip(params, before, gradients(0), strict=True):
        torch.testing.assert_close(param.detach(), was - 0.1 * grad)


@pytest.mark.parametrize("special", [None, INF])
def test_dynamo_off_is_no_step_without_the_flag(special: float | None) -> None:
    """With compilation switched off, the optimizer must not run unguarded."""
    params, scaler = parameters(), ours()
    before = [p.detach().clone() for p in params]
    opt = optim.SGD(params, lr=0.1)
    backward(scaler, params, gradients(0, special))
    with torch.compiler.set_stance("force_eager"):
        scaler.step(opt)
    wanted = zip(params, before, gradients(0), strict=True)
    for param, was, grad in wanted:
        torch.testing.assert_close(param.detach(), was if special else was - 0.1 * grad)


def test_many_optimizers_of_one_class_are_all_captured() -> None:
    """Dynamo gives up on a function it has compiled eight times; each step is its own."""
    scaler = ours()
    for _ in range(12):
        params = parameters()
        opt = optim.SGD(params, lr=0.1)
        backward(scaler, params, gradients(0, INF))
        with Reads() as reads:
            scaler.step(opt)
        assert reads.count == 0
        assert not opt._ampgraph_stepper.refused  # type: ignore[attr-defined]
        assert scaler.step_skipped(opt)


def test_groups_added_and_parameters_without_gradients() -> None:
    params, scaler = parameters(), ours()
    opt = optim.Adam(params[:2], lr=1e-2)
    twin = parameters()
    other = optim.Adam(twin[:2], lr=1e-2)
    for i in range(4):
        if i == 2:
            opt.add_param_group({"params": params[2:], "lr": 1e-3})
            other.add_param_group({"params": twin[2:], "lr": 1e-3})
        backward(scaler, params, gradients(i))
        for p, g in zip(twin, gradients(i), strict=True):
            p.grad = g
        params[i % 4].grad = twin[i % 4].grad = None
        scaler.step(opt)
        scaler.update()
        other.step()
        for p in params:
            p.grad = None
    torch.testing.assert_close(params, twin, rtol=2e-6, atol=1e-7)


def test_through_inductor() -> None:
    """The predicated step compiled for real."""
    stream = [INF, None, INF, None]
    for make in (partial(optim.AdamW, lr=1e-2), partial(optim.SGD, lr=0.1, momentum=0.9)):
        got = train(ours(inner="inductor"), make, stream, clipped=True)
        want = train(theirs(), make, stream, clipped=True)
        assert (got.scales, got.stepped) == (want.scales, want.stepped)
        torch.testing.assert_close(got.params, want.params, rtol=2e-6, atol=1e-6)


def test_a_deleted_optimizer_is_freed() -> None:
    params, scaler = parameters(), ours()
    opt = optim.SGD(params, lr=0.1)
    backward(scaler, params, gradients(0))
    scaler.step(opt)
    scaler.update()
    gone = weakref.ref(opt)
    del opt
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
