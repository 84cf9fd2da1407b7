"""Programs before and after the fold, and near misses that it has to leave alone.

Each program runs as eager autocast does, bit for bit and gradients included, folded or not.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampgraph.backend import records_of
from ampgraph.graph import CAST
from support import BF16, FP16, FP32, assert_like_eager

Program = Callable[..., Any]


def values(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def folded(program: Program, *args: Tensor, grad: bool = True, **options: Any) -> int:
    """How many casts the fold removed, from a program that still equals eager autocast."""
    compiled = assert_like_eager(program, args, backward=grad, **options)
    (record,) = records_of(compiled)
    return record.rewritten.casts.removed


def calls(program: Program, *args: Tensor) -> list[str]:
    """The calls of the rewritten graph, inserted casts marked."""
    compiled = assert_like_eager(program, args)
    graph = records_of(compiled)[0].rewritten.after.graph
    named = [n for n in graph.nodes if n.op.startswith("call")]
    return [("cast " if CAST in n.meta else "") + n.name for n in named]


# --- folded ---------------------------------------------------------------------------------------


def widened(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.float(), w)


def test_the_widening_goes_with_the_cast() -> None:
    assert calls(widened, values(4, 8), values(3, 8, dtype=FP32)) == ["cast l_w__bf16", "linear"]


def viewed(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.float().transpose(0, 1).reshape(8, 4), w)


def test_views_are_replayed_on_the_narrow_tensor() -> None:
    made = calls(viewed, values(4, 8), values(3, 4, dtype=FP32))
    assert made == ["cast l_w__bf16", "transpose_1", "reshape_1", "linear"]


def by_to(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.to(torch.float32), w)


def by_type(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.type(torch.float32), w)


def by_other(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(torch.ops.aten._to_copy.default(x, dtype=torch.float32), w)


def last_position(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.float()[:, -1], w)


def selected(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.float().select(1, 0).unsqueeze(0), w)


def made_low(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.linear(x, w).float(), w)


def beside_another_reader(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.float(), w) + x.sin().sum()


def after_a_write(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.mul(1).add_(1).float(), w)


@pytest.mark.parametrize(
    ("program", "shape"),
    [
        (by_to, (4, 8)),
        (by_type, (4, 8)),
        (by_other, (4, 8)),
        (last_position, (1, 4, 8)),
        (selected, (1, 4, 8)),
        (made_low, (4, 8)),
        (beside_another_reader, (4, 8)),
        (after_a_write, (4, 8)),
    ],
)
def test_folds(program: Program, shape: tuple[int, ...]) -> None:
    assert folded(program, values(*shape), values(8, 8, dtype=FP32)) == 1


def read_twice(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return F.linear(wide, w) + wide.sum()


def test_any_number_of_readers_where_no_gradient_flows() -> None:
    w = values(8, 8, dtype=FP32)
    assert folded(read_twice, values(4, 8, grad=False), w) == 1
    assert folded(read_twice, values(4, 8), w, grad=False) == 1


# --- near misses ----------------------------------------------------------------------------------


def read_twice_through_a_view(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float().view(-1, 8)
    return F.linear(wide, w) + wide.sum()


def three_gradients_meet(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.float(), w) + x.sin().sum() + x.cos().sum()


def users_own_narrowing(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.float().to(torch.bfloat16), w)


def changed_between(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.float().exp(), w)


def another_low_dtype(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.half().float(), w)


def bits_seen_as_another_dtype(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.detach().float().view(torch.float16)[:, :8], w)


def gathered(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.float()[[0, 0, 1]], w)


def expanded(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.float()[:1].expand(64, 8), w)


def strided(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x[:, ::2].float(), w[:, :4])


def strided_and_viewed(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x[:, ::2].float().view(2, 8), w)


def written_after(x: Tensor, w: Tensor) -> Tensor:
    narrow = x * 1
    wide = narrow.float()
    narrow.zero_()
    return F.linear(wide, w)


def written_after_through_a_view(x: Tensor, w: Tensor) -> Tensor:
    narrow = x * 1
    row, wide = narrow[0], narrow.float()
    row.zero_()
    return F.linear(wide, w)


def written_after_the_use(x: Tensor, w: Tensor) -> Tensor:
    narrow = x * 1
    out = F.linear(narrow.float(), w)
    narrow.zero_()
    return out + narrow


def written_by_a_keyword(x: Tensor, w: Tensor) -> Tensor:
    narrow = x * 1
    wide = narrow.float()
    F.relu(narrow, inplace=True)
    return F.linear(wide, w)


def written_by_an_index(x: Tensor, w: Tensor) -> Tensor:
    narrow = x * 1
    wide = narrow.float()
    narrow[0] = 0
    return F.linear(wide, w)


@pytest.mark.parametrize(
    "program",
    [
        read_twice,
        read_twice_through_a_view,
        three_gradients_meet,
        users_own_narrowing,
        changed_between,
        another_low_dtype,
        bits_seen_as_another_dtype,
        gathered,
        expanded,
        strided,
        strided_and_viewed,
        written_after,
        written_after_through_a_view,
        written_after_the_use,
        written_by_a_keyword,
        written_by_an_index,
    ],
)
def test_leaves_alone(program: Program) -> None:
    assert folded(program, values(4, 8), values(8, 8, dtype=FP32)) == 0


def test_leaves_a_widening_that_changes_the_layout() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x.to(torch.float32, memory_format=torch.channels_last), w)

    assert folded(program, values(2, 4, 6, 6), values(4, 4, 3, 3, dtype=FP32)) == 0


def test_leaves_the_other_low_dtype_in_its_own_region() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return F.linear(x.float(), w)

    assert folded(program, values(4, 8), values(8, 8, dtype=FP32)) == 0
    assert folded(program, values(4, 8, dtype=FP16), values(8, 8, dtype=FP32)) == 1
