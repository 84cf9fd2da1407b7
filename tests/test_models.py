"""Whole models, forward and backward, against eager autocast: bits, dtypes, graphs and breaks."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import ampgraph
import models
from models import Program, tensors_of
from support import BF16, FP16, FP32, assert_same, autocast, counted, op_rows, weigh

# How many ops compute in bf16 and in fp32, and how often the op named last stands in bf16.
COUNTS = {
    "gpt2": (63, 23, "aten.addmm", 8),
    "llama": (65, 92, "aten.linear", 15),
    "bert": (43, 17, "aten.linear", 14),
    "t5": (112, 130, "aten.linear", 33),
    "vit": (43, 15, "aten.linear", 13),
    "whisper": (147, 31, "aten.linear", 33),
    "mamba": (117, 131, "aten.linear", 7),
    "resnet": (21, 1, "aten.conv2d", 5),
    "gru": (126, 45, "aten.linear", 15),
    "unet": (12, 2, "aten.conv2d", 3),
    "moe": (13, 9, "aten.linear", 5),
}

pytestmark = [
    # Dynamo's, about the models' own code.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def traced_rnn() -> Iterator[None]:
    """nn.GRU is traced only on request."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


def step(model: nn.Module, call: Callable[..., object], kwargs: dict[str, Tensor]) -> object:
    """One forward and backward: outputs, gradients and buffers."""
    outputs = tensors_of(call(**kwargs))
    weigh(outputs).backward()  # type: ignore[no-untyped-call]
    gradients = [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]
    return {"outputs": outputs, "gradients": gradients, "buffers": list(model.buffers())}


def plain(model: nn.Module, kwargs: dict[str, Tensor], times: int) -> Counter[str]:
    """The graphs and breaks of plain torch.compile."""
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    with counted() as found, autocast():
        for _ in range(times):
            compiled(**kwargs)
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("build", models.MODELS, ids=lambda f: f.__name__)
def test_step_is_eager_autocasts(build: Callable[[], Program]) -> None:
    model, kwargs = build()
    ours, theirs, once = (copy.deepcopy(model) for _ in range(3))

    def eager(**kwargs: Tensor) -> object:
        with autocast():
            return theirs(**kwargs)

    compiled = ampgraph.compile(ours, inner="eager")
    with counted() as found:
        assert_same(step(ours, compiled, kwargs), step(theirs, eager, kwargs))
    assert found == plain(once, kwargs, 1), "graphs and breaks are plain torch.compile's"
    rows = op_rows(compiled)
    dtypes = Counter(row.dtype for row in rows)
    bf16, fp32, op, times = COUNTS[build.__name__]
    assert (dtypes[BF16], dtypes[FP32]) == (bf16, fp32), f"ops in bf16 and in fp32: {dtypes}"
    low = sum(row.op == op and row.dtype is BF16 for row in rows)
    assert low == times, f"{op} in bf16 {low} times"


@pytest.mark.parametrize("build", [models.vit, models.resnet, models.moe], ids=lambda f: f.__name__)
def test_one_compile_for_each_state(build: Callable[[], Program]) -> None:
    """As often as plain torch.compile: some models change themselves in their first call."""
    model, kwargs = build()
    want = plain(model, kwargs, 3)
    compiled = torch.compile(
        model, backend="ampgraph", options={"inner": "eager", "dtype": "ambient"}
    )
    with torch.no_grad():
        for dtype in (BF16, FP16):
            with counted() as found, torch.autocast("cpu", dtype=dtype):
                for _ in range(3):
                    compiled(**kwargs)
            assert found["graphs"] <= want["graphs"], f"{dtype}: {found} against plain {want}"
        with counted() as again, torch.autocast("cpu", dtype=BF16):
            compiled(**kwargs)
    assert again["graphs"] == 0, "the first state is known"
