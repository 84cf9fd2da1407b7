"""What users do with a scaler and their optimizers, beside what the documentation shows."""

import copy
import logging
import pickle
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.optim import Optimizer

from ampgraph.errors import OptionError
from ampgraph.hoststate import HostState
from ampgraph.steps import CapturedStep
from scaler_runs import (
    MakeOptimizer,
    OfAUser,
    Scaler,
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
STREAM = (INF, None, INF, None, None, INF, None)


class GivesOtherMemory(OfAUser):
    """`p.data = ...`, which no copy into the old memory could undo."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param, grad in self.with_gradients():
            param.data = param.data - 0.1 * grad


class Counting(OfAUser):
    """Counts on the host: in a dict, a list, an object or an attribute."""

    def __init__(self, params: Any, where: str) -> None:
        super().__init__(params)
        self.where = where
        self.numbers, self.list = {"t": 0}, list[int]()
        self.object = types.SimpleNamespace(t=0)
        self.set: set[int] = set()
        self.tensors = [torch.zeros(())]
        self.tensor = torch.zeros(())

    def count(self) -> Any:
        if self.where == "dict":
            self.numbers["t"] += 1
            return self.numbers["t"]
        if self.where == "list":
            self.list.append(1)
            return len(self.list)
        if self.where == "object":
            self.object.t += 1
            return self.object.t
        if self.where == "set":
            self.set.add(len(self.set))
            return len(self.set)
        if self.where == "list of tensors":
            self.tensors[0] = self.tensors[0] + 1
            return self.tensors[0]
        self.tensor = self.tensor + 1  # what Dynamo forgets, of an optimizer
        return self.tensor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        t = self.count()
        for param, grad in self.with_gradients():
            param.sub_(0.1 * grad / t)


class BesideParameters(OfAUser):
    """Keeps things in its state that are no parameter's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.own = cast(Any, self.state)
        self.own["t"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.own["t"].add_(1)
        self.own["seen"] = True
        for param, grad in self.with_gradients():
            param.sub_(grad / self.own["t"])


class Lion(OfAUser):
    """As published: momentum made in the first step, written in place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param, grad in self.with_gradients():
            state = self.state[param]
            if not state:
                state["exp_avg"] = torch.zeros_like(param)
            update = state["exp_avg"] * 0.9 + grad * 0.1
            param.add_(update.sign_(), alpha=-0.01)
            state["exp_avg"].lerp_(grad, 0.01)


class Several:
    """A wrapper that is no Optimizer, as many have for two kinds of parameters."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.inner = [optim.SGD(params[:2], lr=0.1), optim.Adam(params[2:], lr=0.1)]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for opt in self.inner for group in opt.param_groups]

    def step(self) -> None:
        for opt in self.inner:
            opt.step()

    def zero_grad(self) -> None:
        for opt in self.inner:
            opt.zero_grad()


class Forwarding:
    """Has everything from another one."""

    def __init__(self, params: Any) -> None:
        self.inner = optim.SGD(params, lr=0.1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass
class Unhashable(Several):
    params: Sequence[nn.Parameter]

    def __post_init__(self) -> None:
        super().__init__(self.params)


class Lookahead(Optimizer):
    """Does not call Optimizer.__init__, as the one that is passed around."""

    def __init__(self, params: Any) -> None:
        self.optimizer = optim.Adam(params, lr=0.1)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self.steps = 0
        self.slow = [p.detach().clone() for p in params]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for param, slow in zip(parameters_of(self), self.slow, strict=True):
                slow.lerp_(param, 0.5)
                param.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


PLACES = ("dict", "list", "object", "set", "list of tensors", "tensor")
USERS: dict[str, Callable[[Any], Any]] = {
    **{make.__name__: make for make in (GivesOtherMemory, BesideParameters, Lion)},
    **{f"Counting in a {where}": partial(Counting, where=where) for where in PLACES},
    **{make.__name__: make for make in (Several, Unhashable, Forwarding, Lookahead)},
}


@pytest.mark.parametrize("first", [0, 1], ids=["overflow first", "good first"])
@pytest.mark.parametrize("name", USERS)
def test_like_torch(name: str, first: int, caplog: pytest.LogCaptureFixture) -> None:
    stream = STREAM[first:]
    with caplog.at_level(logging.WARNING, logger="ampgraph"):
        got = train(ours(growth_interval=2), USERS[name], stream)
    want = train(theirs(growth_interval=2), USERS[name], stream)
    assert (got.scales, got.stepped) == (want.scales, want.stepped)
    torch.testing.assert_close(got.params, want.params, rtol=1e-4, atol=1e-5)
    said = [r.getMessage() for r in caplog.records if r.name == "ampgraph.steps"]
    assert len(said) == (name not in ("Lion", "BesideParameters")), said


def test_what_is_on_the_host_is_put_back() -> None:
    opt = Counting(parameters(), "dict")
    opt.numbers, opt.list = {"t": 1}, [1, 2]
    opt.param_groups[0]["t"] = 5
    state = opt.state[parameters_of(opt)[0]]
    state["t"] = 6
    before = HostState.of(opt)
    state["new"] = 0  # of a step that makes state
    assert before.changed() == []
    opt.numbers["t"] = opt.param_groups[0]["t"] = state["t"] = 9
    opt.numbers["u"] = 9
    opt.list.append(3)
    opt.set.add(1)
    opt.object.t, opt.extra = 7, 8  # type: ignore[attr-defined]
    assert before.changed() == ["extra", "list", "numbers", "object", "set", "t"]
    before.restore()
    assert before.changed() == []
    assert (opt.numbers, opt.list, opt.set, opt.object.t) == ({"t": 1}, [1, 2], set(), 0)
    assert (opt.param_groups[0]["t"], state) == (5, {"t": 6, "new": 0})
    assert not hasattr(opt, "extra")


class Clearing(OfAUser):
    """Zeroes the gradients that it has used."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param, grad in self.with_gradients():
            param.sub_(grad * 0.1)
            grad.zero_()


def test_a_step_that_zeroes_its_gradients() -> None:
    params, scaler = parameters(), ours(init_scale=8.0)
    opt, want = Clearing(params), [p.detach().clone() for p in params]
    for seed in range(3):
        backward(scaler, params, gradients(seed))
        scaler.step(opt)
        scaler.update()
        want = [p - 0.1 * g for p, g in zip(want, gradients(seed), strict=True)]
    torch.testing.assert_close([p.detach() for p in params], want)
    backward(scaler, params, gradients(3, INF))
    scaler.step(opt)
    assert all(p.grad is not None and p.grad.count_nonzero() for p in params), "as they were"


def steps(
    scaler: Scaler, opt: Any, params: Sequence[nn.Parameter], seeds: Sequence[int]
) -> list[Tensor]:
    for seed in seeds:
        opt.zero_grad()
        backward(scaler, params, gradients(seed))
        scaler.step(opt)
        scaler.update()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("when", ["later", "before a schedule", "over a schedule"])
def test_a_wrapped_step_is_called(when: str) -> None:
    """Also one that is wrapped when the optimizer has been captured already."""
    found = []
    for scaler in (ours(), theirs()):
        params, calls = parameters(), list[int]()
        opt = optim.SGD(params, lr=0.1)
        if when == "later":
            steps(scaler, opt, params, [0, 1])
        if when == "over a schedule":
            optim.lr_scheduler.StepLR(opt, 1)
        step = opt.step

        @wraps(step)  # which copies the mark that a schedule leaves
        def wrapper(self: Any, *args: Any, step: Any = step, calls: list[int] = calls) -> Any:
            calls.append(1)
            return step(*args)

        opt.step = types.MethodType(wrapper, opt)  # type: ignore[method-assign]
        if when == "before a schedule":
            optim.lr_scheduler.StepLR(opt, 1)
        found.append((len(calls), steps(scaler, opt, params, [2, 3]), len(calls)))
    assert found[0][::2] == found[1][::2] == (0, 2)
    torch.testing.assert_close(found[0][1], found[1][1])


class Scaled(optim.SGD):
    """Takes an argument."""

    @torch.no_grad()
    def step(self, closure: Any = None, by: float = 1.0) -> None:  # type: ignore[override]
        for param in parameters_of(self):
            param.sub_(param.grad, alpha=by)  # type: ignore[arg-type]


def test_arguments_that_a_hook_gives() -> None:
    found = []
    for scaler in (ours(), theirs()):
        params = parameters()
        opt = Scaled(params)
        opt.register_step_pre_hook(lambda o, args, kwargs: (args, {**kwargs, "by": 3.0}))
        found.append(steps(scaler, opt, params, [0, 1]))
    torch.testing.assert_close(*found)
    opt.register_step_pre_hook(lambda o, args, kwargs: 1)  # type: ignore[arg-type, return-value]
    for scaler in (ours(), theirs()):
        with pytest.raises(RuntimeError, match="must return None or a tuple"):
            steps(scaler, opt, params, [2])


class Reader(OfAUser):
    """Reads the device, so that it cannot be captured."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param, grad in self.with_gradients():
            param.sub_(grad, alpha=0.1 if grad.norm().item() > 0 else 0.0)


def test_hooks_run_once_where_the_capture_fails() -> None:
    calls: list[str] = []
    params, scaler = parameters(), ours()
    opt = Reader(params)
    opt.register_step_pre_hook(lambda o, a, k: calls.append("before"))
    opt.register_step_post_hook(lambda o, a, k: calls.append("after"))
    steps(scaler, opt, params, [0, 1])
    assert calls == ["before", "after"] * 2


def test_a_step_that_raised_and_was_left_out() -> None:
    """The next batch has gradients of its own, to be looked at and unscaled."""
    params, scaler = parameters(), ours()
    opt: optim.Optimizer = Scaled(params)
    before = [p.detach().clone() for p in params]
    backward(scaler, params, gradients(0))
    with pytest.raises(TypeError):
        scaler.step(opt, by="much")
    opt = optim.SGD(params, lr=0.1)
    hook = opt.register_step_post_hook(lambda o, a, k: exec("raise KeyError('late')"))
    opt.zero_grad()
    backward(scaler, params, gradients(1, INF))
    with pytest.raises(KeyError, match="late"):
        scaler.step(opt)
    hook.remove()
    opt.zero_grad()
    backward(scaler, params, gradients(2))
    scaler.step(opt)
    for param, was, grad in zip(params, before, gradients(2), strict=True):
        torch.testing.assert_close(param.detach(), was - 0.1 * grad)


@pytest.mark.parametrize("make", [partial(optim.SGD, lr=0.1), Reader], ids=["captured", "waiting"])
def test_a_step_tried_again_unscales_once(make: MakeOptimizer) -> None:
    params, scaler, fail = parameters(), ours(), [KeyError("once")]

    def hook(*_: Any) -> None:
        if fail:
            raise fail.pop()

    opt, want = make(params), [p - 0.1 * g for p, g in zip(parameters(), gradients(0), strict=True)]
    opt.register_step_pre_hook(hook)
    backward(scaler, params, gradients(0))
    with pytest.raises(KeyError, match="once"):
        scaler.step(opt)
    scaler.step(opt)
    torch.testing.assert_close(params, want, check_dtype=False)


def test_a_checkpoint_loaded_after_a_skipped_first_step_is_kept() -> None:
    make = partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
    found = []
    for scaler in (ours(), theirs()):
        donor = make(parameters())
        for param, grad in zip(parameters_of(donor), gradients(9), strict=True):
            param.grad = grad
        donor.step()
        params = parameters()
        opt = make(params)
        backward(scaler, params, gradients(0, INF))
        scaler.step(opt)
        scaler.update()
        opt.load_state_dict(donor.state_dict())
        steps(scaler, opt, params, [1])
        found.append(state_of(opt))
    torch.testing.assert_close(*found)


class WholeDict(optim.SGD):
    """Pickles everything that it has."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_of_an_optimizer_step_on_their_own(copied: Callable[[Any], Any]) -> None:
    params, scaler = parameters(), ours()
    opt = WholeDict(params, lr=0.1, momentum=0.9)
    steps(scaler, opt, params, [0, 1])
    twin = copied(opt)
    mine = steps(scaler, opt, params, [2])
    torch.testing.assert_close(mine, steps(scaler, twin, parameters_of(twin), [2]))
    assert twin.state_dict()["state"][0]["momentum_buffer"].equal(
        opt.state_dict()["state"][0]["momentum_buffer"]
    )


def test_a_loss_scaled_by_hand() -> None:
    """With get_scale(), which is the scale of now: also after update() has moved it."""
    found = []
    for scaler in (ours(growth_interval=1), theirs(growth_interval=1)):
        params = parameters()
        opt = optim.SGD(params, lr=0.1)
        scaler.scale(torch.ones(()))
        for seed in range(5):
            opt.zero_grad()
            grads = gradients(seed, INF if seed == 2 else None)
            loss = torch.stack([(p * g).sum() for p, g in zip(params, grads, strict=True)]).sum()
            (loss * scaler.get_scale()).backward()
            scaler.step(opt)
            scaler.update()
        found.append([p.detach() for p in params])
    torch.testing.assert_close(*found)


def test_a_second_clip_of_other_gradients_is_refused() -> None:
    """torch's users are told by unscale_(); the first clip's factor is not for these."""
    params, scaler = parameters(), ours()
    opt = optim.SGD(params, lr=0.1)
    backward(scaler, params, gradients(0))
    scaler.clip_grad_norm_(opt, 1.0)
    scaler.clip_grad_norm_(opt, 0.5)
    opt.zero_grad()  # the batch was not to be used, and update() was left out
    backward(scaler, params, gradients(1))
    with pytest.raises(RuntimeError, match="already been called on other gradients"):
        scaler.clip_grad_norm_(opt, 1.0)
    scaler.update()
    scaler.clip_grad_norm_(opt, 1.0)


def test_a_scale_of_the_users_own_on_a_fused_optimizer() -> None:
    found = []
    for scaler in (ours(), theirs()):
        params = parameters()
        opt = optim.AdamW(params, lr=0.1, fused=True)
        for seed in range(2):
            opt.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
            opt.eps = 1.0  # type: ignore[attr-defined]
            steps(scaler, opt, params, [seed])
        found.append(state_of(opt))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("growth_factor", 0.5),
        ("growth_factor", INF),
        ("backoff_factor", 2.0),
        ("backoff_factor", 0.0),
        ("growth_interval", 0),
        ("growth_interval", INF),
    ],
)
def test_a_factor_set_later_is_checked(name: str, wrong: Any) -> None:
    scaler = ours()
    before = scaler.state_dict()
    with pytest.raises(OptionError, match=name):
        getattr(scaler, f"set_{name}")(wrong)
    assert scaler.state_dict() == before


def test_a_scale_that_is_to_stay() -> None:
    scaler, params = ours(growth_interval=1), parameters()
    scaler.set_growth_factor(1.0)
    scaler.set_backoff_factor(1.0)
    steps(scaler, optim.SGD(params), params, [0, 1])
    assert scaler.get_scale() == 2.0**16
    twin = ours()
    twin.load_state_dict(scaler.state_dict())
    assert twin.state_dict() == scaler.state_dict()


def test_a_copy_keeps_its_process_group() -> None:
    group = object()
    scaler = ours(process_group=group)
    assert copy.deepcopy(scaler)._process_group is group
    assert pickle.loads(pickle.dumps(scaler))._process_group is None


def test_state_is_looked_at_only_while_it_comes_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """After that a step costs nothing for each parameter; what comes later is noticed."""
    looks: list[int] = []
    keys = CapturedStep.keys

    def counted(self: CapturedStep) -> Any:
        looks.append(1)
        return keys(self)

    monkeypatch.setattr(CapturedStep, "keys", counted)
    params, scaler = parameters(), ours()
    opt = optim.SGD(params[:2], lr=0.1, momentum=0.9, dampening=0.5)
    steps(scaler, opt, params, [0, 1])
    looks.clear()
    steps(scaler, opt, params, [2, 3])
    assert not looks
    opt.add_param_group({"params": params[2:]})
    opt.zero_grad()
    backward(scaler, params, gradients(4, INF))
    scaler.step(opt)
    scaler.update()
    assert len(opt.state_dict()["state"]) == 2, "the new group was not stepped"
    steps(scaler, opt, params, [5, 6])
    opt.state = defaultdict(dict)
    steps(scaler, opt, params, [7])
    assert len(looks) >= 3
    for param, grad in zip(params, gradients(7), strict=True):
        torch.testing.assert_close(opt.state[param]["momentum_buffer"], grad)


def test_steps_in_the_backward() -> None:
    """One optimizer a parameter, stepped as soon as its gradient is there."""
    found = []
    for scaler in (ours(), theirs()):
        params = parameters()
        opts = {p: optim.SGD([p], lr=0.1, momentum=0.9) for p in params}

        def step(param: Tensor, scaler: Scaler = scaler, opts: dict[Any, Any] = opts) -> None:
            scaler.step(opts[param])
            opts[param].zero_grad()

        for param in params:
            param.register_post_accumulate_grad_hook(step)
        for seed in range(5):
            backward(scaler, params, gradients(seed, INF if seed in (0, 2) else None))
            scaler.update()
        found.append([p.detach() for p in params])
    torch.testing.assert_close(*found)


def test_cycled_momentum_does_not_recompile_each_step() -> None:
    counter = CompileCounter()
    found = []
    for scaler in (ours(inner=counter), theirs()):
        params = parameters()
        opt = optim.Adam(params, lr=0.01, eps=1e-3)
        schedule = optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=40)
        for seed in range(10):
            steps(scaler, opt, params, [seed])
            schedule.step()
        found.append([p.detach() for p in params])
    assert counter.frame_count <= 4
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
