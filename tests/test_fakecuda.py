"""CUDA code without a GPU: what is recorded, counted and assembled.

The fake GPU replaces hooks of torch's that cannot be given back, so it lives in child processes.
"""

import os
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.exc import InvalidCxxCompiler

import fakecuda_runs
from ampgraph.errors import FakeCudaError, OptionError
from ampgraph.fakecuda import child, runtime
from ampgraph.fakecuda.child import ChildTraceback, in_child
from ampgraph.fakecuda.gpus import GPUS, gpu_named
from ampgraph.fakecuda.replace import replaced
from ampgraph.fakecuda.traffic import moved, size
from fakecuda_runs import BF16, Found


@pytest.fixture(scope="module")
def found() -> Found:
    result: Found = in_child(fakecuda_runs.found, "h200")
    return result


def test_matmuls_are_in_the_low_dtype(found: Found) -> None:
    for graph in found.block.graphs:
        products = [c for c in graph.of("extern") if c.name.startswith(("aten.mm", "aten.addmm"))]
        assert len(products) >= 4
        assert {dtype for call in products for dtype in call.dtypes} == {BF16}


def test_attention_is_flash(found: Found) -> None:
    (forward,), (backward,) = found.block.forward, found.block.backward
    ops = Counter(call.name for graph in (forward, backward) for call in graph.of("extern"))
    assert ops["aten._scaled_dot_product_flash_attention.default"] == 1
    assert ops["aten._scaled_dot_product_flash_attention_backward.default"] == 1


def test_launches_and_bytes_are_counted(found: Found) -> None:
    (forward,), (backward,) = found.block.forward, found.block.backward
    assert 5 <= len(forward.of("triton")) <= 12
    assert 5 <= len(backward.of("triton")) <= 21
    weights = 4 * 12 * 256**2  # bytes, all read at least once
    assert weights < forward.bytes < 28e6
    assert forward.bytes < backward.bytes < 56e6
    assert {call.name for call in forward.of("triton")} == set(forward.kernels)


def test_kernels_are_assembled_for_the_gpu(found: Found) -> None:
    for name, binaries in found.binaries.items():
        assert binaries, name
        for binary in binaries:
            assert ".target sm_90a" in binary.assembly
            assert 1 <= binary.registers <= 255
        # Inductor itself takes configurations that spill up to 16 words, there and back.
        assert min(binary.spilled for binary in binaries) <= 128, name


def test_attention_is_chosen_as_on_a_gpu(found: Found) -> None:
    def named(kind: str) -> list[str]:
        return [f"aten._scaled_dot_product_{kind}_attention.default"]

    assert found.attention == {
        (BF16, False): named("flash"),
        (torch.float32, False): named("efficient"),
        (BF16, True): named("efficient"),
    }


def test_ties_stay(found: Found) -> None:
    assert found.tied


def test_an_unknown_gpu_is_named_with_its_neighbours() -> None:
    with pytest.raises(OptionError, match=r"'h20'; known are a100, b200, h100, h200\n.*h200"):
        gpu_named("h20")
    assert gpu_named("H200") is GPUS["h200"]


# --- the child process


def test_errors_of_the_child_are_raised_here() -> None:
    with pytest.raises(OptionError, match="'h20'; known are") as caught:
        in_child(gpu_named, "h20")
    assert isinstance(caught.value.__cause__, ChildTraceback)
    assert "gpus.py" in str(caught.value.__cause__)


def test_errors_that_cannot_be_sent_are_told() -> None:
    class LocalError(Exception):
        pass

    try:
        raise LocalError("no pickle")
    except LocalError as error:
        failure = child._failure(error)
    assert str(failure.error) == "LocalError: no pickle"
    assert "LocalError: no pickle" in failure.told


def test_a_dead_child_is_told() -> None:
    with pytest.raises(FakeCudaError, match="ended with 3"):
        in_child(os._exit, 3)


# --- what a machine may lack


def test_a_real_gpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(FakeCudaError, match="real GPU"):
        runtime.install()


def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(runtime, "get_cpp_compiler", none)
    with pytest.raises(FakeCudaError, match=r"no C\+\+ compiler\n  cure: .* CXX"):
        runtime.install()


def test_a_compiler_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "get_cpp_compiler", lambda: "false")
    with pytest.raises(FakeCudaError, match="false could not build"):
        runtime.install()


def test_what_is_replaced_is_given_back() -> None:
    class Owner:
        @staticmethod
        def known() -> int:
            return 1

    with replaced(Owner, {"known": staticmethod(lambda: 2), "made": 3}, made=True):
        assert (Owner.known(), vars(Owner)["made"]) == (2, 3)
    assert Owner.known() == 1
    assert not hasattr(Owner, "made")
    with pytest.raises(FakeCudaError, match="has no gone"), replaced(Owner, {"gone": 1}):
        pass


# --- bytes


def test_bytes_are_those_read_and_written() -> None:
    a, b, out = torch.randn(8, 16), torch.randn(16, 4), torch.randn(8, 4)
    bias, aten = torch.randn(4), torch.ops.aten
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any], object, int]] = [
        (aten.mm.default, (a, b), {}, a.mm(b), 4 * (128 + 64 + 32)),
        (aten.mm.out, (a, b), {"out": out}, out, 4 * (128 + 64 + 32)),
        (aten.addmm.default, (bias.expand(8, 4), a, b), {}, out, 4 * (4 + 128 + 64 + 32)),
        (aten.mul_.Tensor, (a, a), {}, a, 4 * 256),
        (aten.copy_.default, (a, a.half()), {}, a, (4 + 2) * 128),
        (aten.zero_.default, (a,), {}, a, 4 * 128),
        (aten._foreach_norm.Scalar, ([a, b],), {}, [a.norm(), b.norm()], 4 * (128 + 64 + 2)),
        (aten._foreach_mul_.Tensor, ([a, b], bias[0]), {}, None, 4 * (2 * (128 + 64) + 1)),
    ]
    for op, args, kwargs, result, expected in cases:
        assert moved(op, args, kwargs, result) == expected, op


def test_a_fused_step_writes_gradients_where_it_unscales_them() -> None:
    op = torch.ops.aten._fused_adamw_.default
    (p, g, m, v), (step, flag, scale) = torch.randn(4, 10), torch.ones(3)
    args: tuple[Any, ...] = ([p], [g], [m], [v], [], [step])
    kwargs = {"lr": 0.1, "amsgrad": False, "maximize": False, "found_inf": flag}
    assert moved(op, args, kwargs, None) == 4 * (7 * 10 + 2)
    assert moved(op, args, {**kwargs, "grad_scale": scale}, None) == 4 * (8 * 10 + 3)


def test_expanded_elements_count_once() -> None:
    def told(tensor: Tensor) -> int:
        return size(tensor) // tensor.element_size()

    x = torch.randn(3, 1)
    assert [told(t) for t in (x, x.expand(3, 5), x.expand(0, 3, 5), torch.ones(()))] == [3, 3, 0, 1]
