"""An optimizer's step before and after its writes depend on a flag."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed

from ampgraph.errors import RewriteError
from ampgraph.internals.dynamo import source_name
from ampgraph.passes.predicate_writes import Predicated, predicate_writes
from shown import see, text


def predicated(step: Callable[[], None]) -> tuple[Predicated, list[Any]]:
    """The step's graph after the pass, and the inputs Dynamo gives it."""
    found: list[tuple[Predicated, list[Any]]] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
        grads = [n.name for n in nodes if source_name(n).endswith(".grad")]

        def run(*args: Any) -> Any:
            found.append((done, list(args)))
            return tuple(None for _ in range(len(gm.graph.find_nodes(op="output")[0].args[0])))

        done = predicate_writes(gm, grads)
        return run

    torch.compile(step, backend=backend, fullgraph=True)()
    return found[0]


def run(done: Predicated, inputs: list[Any], factor: float, found_inf: float) -> None:
    assert len(done.devices) == 1
    with torch.no_grad():
        done.graph(*inputs, torch.tensor(factor), torch.tensor(found_inf))


def leaf(value: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    param = nn.Parameter(torch.full((2,), value, dtype=dtype))
    param.grad = torch.full((2,), 4.0, dtype=dtype)
    return param


def test_momentum_and_foreach() -> None:
    p, q, m = leaf(1.0), leaf(2.0, torch.bfloat16), torch.zeros(2)

    def step() -> None:
        m.mul_(0.5).add_(p.grad)
        p.data.sub_(m)
        torch._foreach_add_([q.data], [q.grad], alpha=-1)  # type: ignore[list-item]

    done, inputs = predicated(step)
    see(
        text(done.graph),
        """
        gt: bool[] = gt(found_inf_0, 0)
        mul: f32[2] = mul(l_p_grad, factor_0)
        float_1: f32[2] = .float(l_q_grad)
        mul_1: f32[2] = mul(float_1, factor_0)
        to: bf16[2] = .to(mul_1, bf16)
        clone: f32[2] = clone(l_m_)
        clone_1: f32[2] = clone(l_p_)
        clone_2: bf16[2] = clone(l_q_)
        mul_: f32[2] = .mul_(l_m_, 0.5)
        add_: f32[2] = .add_(mul_, mul)
        _get_data_attr: f32[2] = _get_data_attr(l_p_)
        sub_: f32[2] = .sub_(_get_data_attr, l_m_)
        _get_data_attr_1: bf16[2] = _get_data_attr(l_q_)
        _foreach_add_: (bf16[2]) = _foreach_add_([_get_data_attr_1], [to], alpha=-1)
        where: f32[2] = where(gt, clone, l_m_)
        copy_: f32[2] = .copy_(l_m_, where)
        where_1: f32[2] = where(gt, clone_1, l_p_)
        copy__1: f32[2] = .copy_(l_p_, where_1)
        where_2: bf16[2] = where(gt, clone_2, l_q_)
        copy__2: bf16[2] = .copy_(l_q_, where_2)
        return []
        """,
    )
    run(done, inputs, 0.25, found_inf=1.0)
    assert (p[0].item(), q[0].item(), m[0].item()) == (1.0, 2.0, 0.0)
    run(done, inputs, 0.25, found_inf=0.0)
    assert (p[0].item(), q[0].item(), m[0].item()) == (0.0, 1.0, 1.0)
    assert p.grad is not None
    assert p.grad[0] == 4.0, "the gradient is left alone"


def test_only_what_is_written_is_kept() -> None:
    p, fixed = leaf(1.0), torch.ones(2)

    def step() -> None:
        scratch = p.grad * fixed  # type: ignore[operator]
        scratch.add_(1.0)
        p.data.sub_(scratch)

    done, inputs = predicated(step)
    assert text(done.graph).count("where(") == 1
    run(done, inputs, 0.0, found_inf=0.0)
    assert p[0].item() == 0.0


@pytest.mark.parametrize("spelling", ["view", "out", "index", "iadd"])
def test_writes_in_any_spelling(spelling: str) -> None:
    p = leaf(1.0)

    def step() -> None:
        grad, target = p.grad, p.data
        assert grad is not None
        if spelling == "view":
            target.view(-1)[1:].sub_(grad[1:])
        elif spelling == "out":
            torch.sub(target, grad, out=target)
        elif spelling == "index":
            target[1] = target[1] - grad[1]
        else:
            target -= grad

    done, inputs = predicated(step)
    run(done, inputs, float("nan"), found_inf=1.0)
    assert p.tolist() == [1.0, 1.0]
    run(done, inputs, 0.25, found_inf=0.0)
    assert p[1].item() == 0.0


def test_a_small_factor_keeps_half_gradients_alive() -> None:
    """2^-30 is zero in fp16; the gradient it belongs to is not."""
    p = leaf(1.0, torch.float16)
    p.grad = torch.full((2,), 2.0**15, dtype=torch.float16)

    def step() -> None:
        p.data.add_(p.grad)

    done, inputs = predicated(step)
    p.data.zero_()
    run(done, inputs, 2.0**-30, found_inf=0.0)
    assert p.tolist() == [2.0**-15] * 2


def test_a_nan_flag_or_factor_never_reaches_a_skipped_tensor() -> None:
    p = leaf(1.0)
    p.grad = torch.full((2,), float("inf"))

    def step() -> None:
        p.data.addcdiv_(p.grad, torch.zeros(2), value=0.0)

    done, inputs = predicated(step)
    run(done, inputs, float("nan"), found_inf=2.0)
    assert p.tolist() == [1.0, 1.0]


def test_state_elsewhere_is_refused() -> None:
    """A counter on another device than the gradients would need the flag there."""
    graph = fx.Graph()
    grad, counter = graph.placeholder("grad"), graph.placeholder("counter")
    for node, device in ((grad, "cpu"), (counter, "meta")):
        node.meta["example_value"] = torch.zeros(2, device=device)
    graph.call_method("add_", (counter, 1))
    graph.output(())
    with pytest.raises(RewriteError, match="counter on meta, where no gradient is"):
        predicate_writes(fx.GraphModule({}, graph), ["grad"])


def test_other_memory_is_refused() -> None:
    """What is copied back would go to memory that nobody holds any more."""
    p = leaf(1.0)

    @torch.no_grad()
    def step() -> None:
        assert p.grad is not None
        p.data = p.data - p.grad

    with pytest.raises(BackendCompilerFailed, match=r"the step gives .* other memory"):
        predicated(step)


def test_a_gradient_that_is_written_is_written_for_good() -> None:
    """Where it may be; its old value is the scaled one."""
    p = leaf(1.0)

    def step() -> None:
        assert p.grad is not None
        p.data.sub_(p.grad)
        p.grad.zero_()

    done, inputs = predicated(step)
    run(done, inputs, 0.25, found_inf=1.0)
    assert p.grad is not None
    assert (p[0].item(), p.grad[0].item()) == (1.0, 4.0)
    run(done, inputs, 0.25, found_inf=0.0)
    assert (p[0].item(), p.grad[0].item()) == (0.0, 0.0)
