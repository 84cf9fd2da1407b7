"""GradScaler against torch.amp.GradScaler: the same scales, skips, parameters and errors."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ampgraph
from ampgraph.errors import OptionError
from scaler_runs import (
    MakeOptimizer,
    Scaler,
    backward,
    gradients,
    ours,
    parameters,
    specials,
    theirs,
    train,
)

optim = torch.optim
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": partial(optim.SGD, lr=0.01, momentum=0.9, dampening=0.5),
    "Adam": partial(optim.Adam, lr=1e-3),
    "AdamW": partial(optim.AdamW, lr=1e-3),
    "RMSprop": partial(optim.RMSprop, lr=1e-3),
    "Adagrad": partial(optim.Adagrad, lr=1e-2),
}


def assert_same_runs(make: MakeOptimizer, stream: list[Any], **how: Any) -> None:
    got = train(ours(growth_interval=7), make, stream, **how)
    want = train(theirs(growth_interval=7), make, stream, **how)
    assert got.scales == want.scales
    assert got.stepped == want.stepped
    torch.testing.assert_close(
        torch.tensor(got.norms), torch.tensor(want.norms), rtol=1e-6, atol=0, equal_nan=True
    )
    torch.testing.assert_close(got.params, want.params, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("clipped", [False, True], ids=["plain", "clipped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_thousand_steps_like_torch(name: str, clipped: bool) -> None:
    assert_same_runs(OPTIMIZERS[name], list(specials(1, 1000, 0.1)), clipped=clipped)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_accumulation(name: str) -> None:
    assert_same_runs(OPTIMIZERS[name], list(specials(2, 60, 0.2)), accumulate=3)


def two_optimizers(scaler: Scaler, steps: int = 200) -> tuple[list[float], list[Tensor]]:
    """Two losses share one of two parameter lists; overflows hit one, the other or both."""
    first, second = parameters(1), parameters(2)
    one, two = optim.AdamW(first, lr=1e-2), optim.SGD(second, lr=1e-2, momentum=0.9)
    scales = []
    hits = zip(specials(3, steps, 0.1), specials(4, steps, 0.1), strict=True)
    for i, (here, there) in enumerate(hits):
        one.zero_grad()
        two.zero_grad()
        backward(scaler, first, gradients(i, here))
        backward(scaler, second, gradients(i + 7, there))
        scaler.unscale_(two)
        torch.nn.utils.clip_grad_value_(second, 0.5)
        scaler.step(one)
        scaler.step(two)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [p.detach() for p in (*first, *second)]


def test_two_optimizers_and_own_clipping() -> None:
    scales, params = two_optimizers(ours(growth_interval=5))
    want_scales, want = two_optimizers(theirs(growth_interval=5))
    assert scales == want_scales
    torch.testing.assert_close(params, want, rtol=2e-6, atol=5e-6)  # 200 steps of 0.01


@settings(max_examples=25, deadline=None)
@given(
    stream=st.lists(st.sampled_from([None, None, float("inf"), float("nan")]), max_size=12),
    growth=st.floats(1.1, 8.0),
    backoff=st.floats(0.1, 0.9),
    interval=st.integers(1, 4),
    init=st.floats(2.0**-20, 2.0**40),
)
def test_any_factors(
    stream: list[Any], growth: float, backoff: float, interval: int, init: float
) -> None:
    numbers = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    got = train(ours(init_scale=init, **numbers), partial(optim.SGD, lr=0.1), stream)
    want = train(theirs(init_scale=init, **numbers), partial(optim.SGD, lr=0.1), stream)
    assert got.scales == want.scales
    assert got.stepped == want.stepped


def test_is_torchs_scaler() -> None:
    scaler = ours()
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled()
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(11)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (3.0, 0.25)
    assert scaler.get_growth_interval() == 11
    assert scaler.get_scale() == 2.0**16, "before the first scale()"


def test_scaling_nested_outputs() -> None:
    scaler, x = ours(init_scale=4.0), torch.ones(2)
    one, (two, three) = scaler.scale((x, [x * 2, x * 3]))
    assert one.tolist() == [4, 4]
    assert (two.tolist(), three.tolist()) == ([8, 8], [12, 12])
    assert [t.tolist() for t in scaler.scale(x * i for i in range(2))] == [[0, 0], [4, 4]]
    with pytest.raises(ValueError, match="must be a Tensor or an iterable of Tensors"):
        scaler.scale([1.0])


# Each is a program that torch's scaler refuses; ours refuses it with the same error.
def _twice_unscaled(scaler: Scaler, opt: Any) -> None:
    scaler.unscale_(opt)
    scaler.unscale_(opt)


def _unscaled_after_step(scaler: Scaler, opt: Any) -> None:
    scaler.step(opt)
    scaler.unscale_(opt)


def _twice_stepped(scaler: Scaler, opt: Any) -> None:
    scaler.step(opt)
    scaler.step(opt)


def _closure(scaler: Scaler, opt: Any) -> None:
    scaler.step(opt, closure=lambda: 1.0)


def _nothing_to_update(scaler: Scaler, opt: Any) -> None:
    scaler.update()


def _half(scaler: Scaler, opt: Any) -> None:
    for param in opt.param_groups[0]["params"]:
        param.data = param.data.half()
        param.grad = torch.ones_like(param)
    scaler.unscale_(opt)


def _new_scale_of_two(scaler: Scaler, opt: Any) -> None:
    scaler.update(torch.ones(2))


def _empty_state(scaler: Scaler, opt: Any) -> None:
    scaler.load_state_dict({})


def _pickled_halfway(scaler: Scaler, opt: Any) -> None:
    scaler.step(opt)
    pickle.dumps(scaler)


@pytest.mark.parametrize(
    "wrong",
    [
        _twice_unscaled,
        _unscaled_after_step,
        _twice_stepped,
        _closure,
        _nothing_to_update,
        _half,
        _new_scale_of_two,
        _empty_state,
        _pickled_halfway,
    ],
    ids=lambda f: f.__name__,
)
def test_torchs_errors(wrong: Callable[[Scaler, Any], None]) -> None:
    errors = []
    for scaler in (ours(), theirs()):
        params = parameters()
        opt = optim.SGD(params, lr=0.1)
        backward(scaler, params, gradients(0))
        with pytest.raises(Exception) as caught:  # noqa: PT011  the other scaler says which
            wrong(scaler, opt)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("call", ["step", "unscale_"])
def test_before_scale(call: str) -> None:
    opt = optim.SGD(parameters(), lr=0.1)
    with pytest.raises(AssertionError, match=f"Attempted {call} but _scale is None"):
        getattr(ours(), call)(opt)


def test_a_positional_closure_is_refused_too() -> None:
    params, scaler = parameters(), ours()
    backward(scaler, params, gradients(0))
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optim.LBFGS(params), lambda: torch.ones(()))


@pytest.mark.parametrize(
    ("numbers", "error"),
    [
        ({"growth_factor": 1.0}, AssertionError),
        ({"backoff_factor": 1.0}, AssertionError),
        ({"backoff_factor": 0.0}, OptionError),
        ({"growth_factor": float("inf")}, OptionError),
        ({"init_scale": 0.0}, OptionError),
        ({"init_scale": float("nan")}, OptionError),
        ({"init_scale": float("inf")}, OptionError),
        ({"growth_interval": 0}, OptionError),
        ({"growth_interval": 1.5}, OptionError),
        ({"hysteresis": 0}, OptionError),
        ({"min_scale": 0.0}, OptionError),
        ({"min_scale": 4.0, "max_scale": 2.0}, OptionError),
        ({"max_scale": float("inf")}, OptionError),
    ],
)
def test_numbers_no_scale_can_work_with(numbers: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        ours(**numbers)


def test_disabled_is_a_pass_through() -> None:
    params, scaler = parameters(), ours(enabled=False)
    opt, twin = optim.SGD(params, lr=0.1), parameters()
    other = optim.SGD(twin, lr=0.1)
    for list_of, step in ((params, partial(scaler.step, opt)), (twin, other.step)):
        for p, g in zip(list_of, gradients(0), strict=True):
            p.grad = g
        step()
    assert scaler.scale(1.0) == 1.0
    norm = scaler.clip_grad_norm_(opt, 1e9)
    assert norm == torch.nn.utils.get_total_norm(gradients(0))
    scaler.update()
    assert (scaler.state_dict(), scaler.get_scale()) == ({}, 1.0)
    assert (scaler.step_skipped(opt), scaler.skipped_steps) == (False, 0)
    assert all(torch.equal(a, b) for a, b in zip(params, twin, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_checkpoints_move_both_ways(dtype: torch.dtype) -> None:
    """Each run is stopped after some steps and goes on with the other scaler."""
    make, stream = partial(optim.Adam, lr=1e-2), list(specials(5, 40, 0.2))
    want = train(theirs(growth_interval=3), make, stream).scales
    for first, second in ((ours, theirs), (theirs, ours)):
        start, rest = first(growth_interval=3), second()
        found = train(start, make, stream[:17]).scales
        file = io.BytesIO()
        torch.save(start.state_dict(), file)
        file.seek(0)
        rest.load_state_dict(torch.load(file))
        found += train(rest, make, stream[17:]).scales
        assert found == want
    assert ours().state_dict().keys() == theirs().state_dict().keys()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_go_on(copied: Callable[[Any], Any]) -> None:
    make, stream = partial(optim.SGD, lr=0.1), list(specials(6, 20, 0.3))
    scaler = ours(growth_interval=2, hysteresis=2)
    train(scaler, make, stream)
    twin = copied(scaler)
    assert twin.skipped_steps == scaler.skipped_steps > 0
    assert train(twin, make, stream).scales == train(scaler, make, stream).scales


GOOD = {
    "scale": 4.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 3,
    "_growth_tracker": 1,
}


@pytest.mark.parametrize(
    "bad",
    [
        {"scale": float("nan")},
        {"scale": -1.0},
        {"scale": 0.0},
        {"scale": "big"},
        {"growth_interval": -1},
        {"_growth_tracker": 0.5},
        {"growth_factor": 0.5},
        {"backoff_factor": 2.0},
        {"growth_factor": "two"},
    ],
    ids=str,
)
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_a_corrupted_state_changes_nothing(bad: dict[str, Any], used: bool) -> None:
    scaler = ours()
    if used:
        scaler.scale(torch.ones(()))
    before = scaler.state_dict()
    for state in ({**GOOD, **bad}, {k: v for k, v in GOOD.items() if k not in bad}):
        with pytest.raises(OptionError):
            scaler.load_state_dict(state)
        assert scaler.state_dict() == before
    scaler.load_state_dict(GOOD)
    assert scaler.state_dict() == GOOD


def overflowing(scaler: ampgraph.GradScaler, steps: int, value: float) -> list[float]:
    """The scales of steps whose gradients are all `value`."""
    param = nn.Parameter(torch.zeros(()))
    opt = optim.SGD([param], lr=0.0)
    scales = []
    for _ in range(steps):
        opt.zero_grad()
        scaler.scale(param * value).backward()
        scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_the_scale_is_never_zero_and_never_infinite() -> None:
    down = overflowing(ours(backoff_factor=2.0**-60), 8, float("nan"))
    assert down[-1] == 2.0**-126
    up = overflowing(ours(init_scale=2.0**100, growth_factor=2.0**20, growth_interval=1), 6, 0.0)
    assert up == [2.0**120] * 6, "growth that would leave the bounds is not applied"
    loaded = ours()
    loaded.load_state_dict({**GOOD, "scale": 1e300, "growth_interval": 1})
    assert loaded.get_scale() == 2.0**126
    assert overflowing(ours(min_scale=8.0, init_scale=16.0), 3, float("inf")) == [8.0] * 3
    assert overflowing(ours(max_scale=32.0, init_scale=16.0, growth_interval=1), 3, 0.0)[-1] == 32.0


def test_hysteresis_forgives_a_few() -> None:
    scaler = ours(init_scale=8.0, hysteresis=3)
    assert overflowing(scaler, 4, float("inf")) == [8.0, 8.0, 4.0, 2.0]
    assert overflowing(scaler, 1, 0.0) == [2.0]
    assert overflowing(scaler, 3, float("inf")) == [2.0, 2.0, 1.0], "a good step refills it"


def test_new_scale_is_kept_in_bounds() -> None:
    scaler, params = ours(max_scale=64.0, init_scale=2.0), parameters()
    backward(scaler, params, gradients(0))
    scaler.update(16.0)
    assert scaler.get_scale() == 16.0
    scaler.update(torch.tensor(128.0))
    assert scaler.get_scale() == 64.0
    with pytest.raises(OptionError):
        scaler.update(-1.0)
    assert scaler.get_scale() == 64.0


def test_update_between_two_optimizers_does_not_misscale() -> None:
    """torch's scaler would unscale the second's gradients by a scale they never had."""
    first, second = parameters(1), parameters(2)
    one, two = optim.SGD(first, lr=1.0), optim.SGD(second, lr=1.0)
    before = [p.detach().clone() for p in second]
    scaler = ours(growth_interval=1)
    backward(scaler, first, gradients(1))
    backward(scaler, second, gradients(2))
    scaler.step(one)
    scaler.update()
    scaler.update(32.0)
    scaler.step(two)
    scaler.update()
    for p, was, g in zip(second, before, gradients(2), strict=True):
        torch.testing.assert_close(p.detach(), was - g)


def test_an_optimizer_without_gradients_is_not_stepped() -> None:
    params, idle = parameters(1), parameters(2)
    one, two = optim.SGD(params, lr=0.5), optim.Adam(idle, lr=0.5)
    scaler = ours(init_scale=8.0, growth_interval=1)
    backward(scaler, params, gradients(1))
    scaler.step(one)
    scaler.step(two)
    assert (scaler.step_skipped(one), scaler.step_skipped(two)) == (False, True)
    scaler.update()
    assert scaler.get_scale() == 16.0
    assert not two.state
    scaler.step(two)
    scaler.update()
    assert (scaler.get_scale(), scaler.skipped_steps) == (16.0, 2), "nothing was learnt"


def test_skips_are_told_when_asked() -> None:
    params, scaler = parameters(), ours()
    opt = optim.SGD(params, lr=0.1)
    with pytest.raises(RuntimeError, match="before step"):
        scaler.step_skipped(opt)
    seen = []
    for i, special in enumerate([float("inf"), None, float("nan"), None]):
        opt.zero_grad()
        backward(scaler, params, gradients(i, special))
        scaler.step(opt)
        seen.append(scaler.step_skipped(opt))
        scaler.update()
    assert seen == [True, False, True, False]
    assert scaler.skipped_steps == 2


def test_sparse_gradients_are_judged_after_coalescing() -> None:
    indices = torch.tensor([[0, 0]])

    def flag(value: float, dtype: torch.dtype) -> float:
        param = nn.Parameter(torch.zeros(3, 1, dtype=dtype))
        values = torch.full((2, 1), value, dtype=dtype)
        param.grad = torch.sparse_coo_tensor(indices, values, (3, 1), check_invariants=True)
        scaler = ours(init_scale=1.0, allow_fp16_grads=True)
        scaler.scale(torch.ones(()))
        opt = optim.SGD([param], lr=1.0)
        scaler.step(opt)
        return float(scaler.step_skipped(opt))

    assert flag(40000.0, torch.float16) == 1.0, "their sum is not finite"
    assert flag(40000.0, torch.float32) == 0.0
    assert flag(float("inf"), torch.float32) == 1.0


def test_sparse_embedding_like_torch() -> None:
    found = []
    for scaler in (ours(init_scale=1024.0), theirs(init_scale=1024.0)):
        table = nn.Embedding(5, 2, sparse=True)
        nn.init.zeros_(table.weight)
        opt = optim.SGD(table.parameters(), lr=1.0)
        scaler.scale(table(torch.tensor([1, 1, 3])).sum()).backward()
        scaler.unscale_(opt)
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        scaler.step(opt)
        found.append((table.weight.detach(), table.weight.grad.to_dense()))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("clipped", [False, True], ids=["plain", "clipped"])
def test_mixed_dtypes_in_one_optimizer(clipped: bool) -> None:
    """fp16, bf16, fp32, fp64 and complex parameters, each updated from its true gradient."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
    params = [nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in dtypes]
    opt = optim.SGD(params, lr=1.0)
    scaler = ours(init_scale=8.0, allow_fp16_grads=True)
    scaler.scale(sum((p.real if p.is_complex() else p).float().sum() for p in params)).backward()
    if clipped:
        norm = scaler.clip_grad_norm_(opt, 1.0)
        assert float(norm) == pytest.approx(20.0**0.5, rel=1e-6)
    scaler.step(opt)
    for param in params:
        step = 1 / 20.0**0.5 if clipped else 1.0
        want = torch.full((4,), 1 - step, dtype=param.dtype)
        torch.testing.assert_close(param.detach(), want)
    opt.zero_grad()
    params[-1].grad = torch.full((4,), complex(0, float("nan")))
    scaler.update()
    scaler.step(opt)
    assert scaler.step_skipped(opt), "an imaginary part counts"


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clipping_by_any_norm_like_torch(norm_type: float) -> None:
    found = []
    for scaler in (ours(), theirs()):
        params = parameters()
        opt = optim.SGD(params, lr=1.0)
        backward(scaler, params, gradients(3))
        if isinstance(scaler, ampgraph.GradScaler):
            norm = scaler.clip_grad_norm_(opt, 0.5, norm_type)
        else:
            scaler.unscale_(opt)
            norm = torch.nn.utils.clip_grad_norm_(params, 0.5, norm_type)
        scaler.step(opt)
        found.append((norm, [p.detach() for p in params]))
    torch.testing.assert_close(found[0], found[1])


def test_clipping_after_unscaling_and_twice() -> None:
    params, scaler = parameters(), ours()
    opt = optim.SGD(params, lr=1.0)
    before = [p.detach().clone() for p in params]
    backward(scaler, params, gradients(3))
    scaler.unscale_(opt)
    torch.testing.assert_close([p.grad for p in params], gradients(3))
    first = scaler.clip_grad_norm_(opt, 1.0)
    second = scaler.clip_grad_norm_(opt, 0.25)
    torch.testing.assert_close(first, torch.nn.utils.get_total_norm(gradients(3)))
    torch.testing.assert_close(second, torch.tensor(1.0))
    scaler.step(opt)
    for p, was, g in zip(params, before, gradients(3), strict=True):
        torch.testing.assert_close(p.detach(), was - g / first / 4)
    with pytest.raises(OptionError, match="norm_type is 0"):
        scaler.clip_grad_norm_(opt, 1.0, 0)
    with pytest.raises(RuntimeError, match="being called after step"):
        scaler.clip_grad_norm_(opt, 1.0)
