"""What autocast does to one op of each category, and what it leaves alone, as programs after it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import oracle
from ampgraph.errors import BannedOpError
from ampgraph.policy import Policy
from oracle import Call
from shown import BF16, see, shown, text, values

ATEN = torch.ops.aten


def test_allow_casts_to_the_regions_dtype() -> None:
    see(
        shown(lambda x, w, b: F.linear(x, w, b), values(4, 8), values(8, 8), values(8)),
        """
        b_bf16: bf16[8] = _to_copy(b, dtype=bf16)
        w_bf16: bf16[8, 8] = _to_copy(w, dtype=bf16)
        x_bf16: bf16[4, 8] = _to_copy(x, dtype=bf16)
        linear: bf16[4, 8] = linear(x_bf16, w_bf16, b_bf16)
        return linear
        """,
    )


def test_allow_in_float16() -> None:
    see(
        shown(lambda x: x @ x, values(4, 4), dtype=torch.float16),
        """
        x_f16: f16[4, 4] = _to_copy(x, dtype=f16)
        x_f16_1: f16[4, 4] = _to_copy(x, dtype=f16)
        matmul: f16[4, 4] = matmul(x_f16_1, x_f16)
        return matmul
        """,
    )


def test_deny_casts_to_float32() -> None:
    see(
        shown(lambda h: h.exp(), values(4, 8, dtype=BF16), lists="cuda"),
        """
        h_f32: f32[4, 8] = _to_copy(h, dtype=f32)
        exp: f32[4, 8] = .exp(h_f32)
        return exp
        """,
    )


def test_the_same_op_follows_where_its_list_says_nothing() -> None:
    see(
        shown(lambda h: h.exp(), values(4, 8, dtype=BF16)),
        """
        exp: bf16[4, 8] = .exp(h)
        return exp
        """,
    )


def test_deny_casts_only_what_is_low() -> None:
    see(
        shown(
            lambda h, w, b: F.layer_norm(h, (8,), w, b),
            values(4, 8, dtype=BF16),
            values(8),
            values(8),
            lists="cuda",
        ),
        """
        h_f32: f32[4, 8] = _to_copy(h, dtype=f32)
        layer_norm: f32[4, 8] = layer_norm(h_f32, [8], weight=w, bias=b, eps=1e-05)
        return layer_norm
        """,
    )


def test_promote_casts_to_the_widest() -> None:
    see(
        shown(lambda h, y: torch.cat([h, y]), values(4, 8, dtype=BF16), values(4, 8)),
        """
        h_f32: f32[4, 8] = _to_copy(h, dtype=f32)
        cat: f32[8, 8] = cat([h_f32, y])
        return cat
        """,
    )


def test_promote_of_the_cuda_lists() -> None:
    """torch.cat promotes by itself there; addcmul does not."""
    see(
        shown(
            lambda h, y: torch.addcmul(torch.cat([h, y]), torch.cat([h, h]), y.mean()),
            values(4, 8, dtype=BF16),
            values(4, 8),
            lists="cuda",
        ),
        """
        cat: f32[8, 8] = cat([h, y])
        cat_1: bf16[8, 8] = cat([h, h])
        mean: f32[] = .mean(y)
        cat_1_f32: f32[8, 8] = _to_copy(cat_1, dtype=f32)
        addcmul: f32[8, 8] = addcmul(cat, cat_1_f32, mean)
        return addcmul
        """,
    )


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_promote_leaves_equal_dtypes(dtype: torch.dtype) -> None:
    after = shown(lambda h, y: torch.stack([h, y]), *[values(4, dtype=dtype) for _ in "hy"])
    assert "_to_copy" not in after


def test_set_dtype_accumulates_in_float32_and_casts_nothing() -> None:
    see(
        shown(lambda h: h.softmax(-1).sum(), values(4, 8, dtype=BF16), lists="cuda"),
        """
        softmax: f32[4, 8] = .softmax(h, -1, dtype=f32)
        sum_1: f32[] = .sum(softmax)
        return sum_1
        """,
    )


def test_set_dtype_respects_a_given_dtype() -> None:
    see(
        shown(
            lambda h: F.softmax(h, dim=-1, dtype=torch.float64),
            values(4, 8, dtype=BF16),
            lists="cuda",
        ),
        """
        softmax: f64[4, 8] = softmax(h, dim=-1, _stacklevel=3, dtype=f64)
        return softmax
        """,
    )


def test_append_dtype_calls_the_overload_that_takes_one() -> None:
    see(
        shown(lambda h: ATEN.norm.ScalarOpt_dim(h, 2, [1]), values(4, 8, dtype=BF16), lists="cuda"),
        """
        norm_scalar_opt_dim_norm: f32[4] = norm.ScalarOpt_dim_dtype(h, 2, [1], False, dtype=f32)
        return norm_scalar_opt_dim_norm
        """,
    )


def test_banned_ops_say_what_to_do() -> None:
    graph = oracle.traced(F.binary_cross_entropy, values(4, grad=False), values(4, grad=False))
    with pytest.raises(BannedOpError, match="binary_cross_entropy_with_logits"):
        oracle.rewritten(graph, policy=Policy.autocast("cuda"))


def test_others_follow_their_inputs() -> None:
    see(
        shown(lambda h, y: torch.relu(h) + y, values(4, 8, dtype=BF16), values(4, 8)),
        """
        relu: bf16[4, 8] = relu(h)
        add: f32[4, 8] = add(relu, y)
        return add
        """,
    )


def in_place(h: Tensor, y: Tensor) -> Tensor:
    return h.clone().add_(y).mul_(2).sigmoid_()


def addmm_in_place(h: Tensor, y: Tensor) -> Tensor:
    return y.clone().addmm_(y, y)


def with_out(h: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(y.detach(), y.detach(), out=torch.empty_like(y))


@pytest.mark.parametrize("program", [in_place, addmm_in_place, with_out])
@pytest.mark.parametrize("lists", ["cpu", "cuda"])
def test_in_place_and_out_variants_are_not_touched(
    program: Callable[[Tensor, Tensor], Tensor], lists: str
) -> None:
    after = shown(program, values(8, 8, dtype=BF16), values(8, 8), lists=lists)
    assert "_to_copy" not in after


@pytest.mark.parametrize(
    ("dtype", "short"),
    [
        (torch.float64, "f64"),
        (torch.complex64, "c64"),
        (torch.complex128, "c128"),
        (torch.int64, "i64"),
    ],
)
def test_ineligible_tensors_are_not_touched(dtype: torch.dtype, short: str) -> None:
    see(
        shown(lambda c: c @ c.t(), values(4, 8, dtype=dtype)),
        f"""
        t: {short}[8, 4] = .t(c)
        matmul: {short}[4, 4] = matmul(c, t)
        return matmul
        """,
    )


def test_float64_beside_float32_is_left_to_torch() -> None:
    """The float32 operand alone is eligible: in eager autocast too, the op then raises or not."""
    see(
        shown(lambda x, d: torch.cat([x, d]), values(4), values(4, dtype=torch.float64)),
        """
        cat: f64[8] = cat([x, d])
        return cat
        """,
    )


@pytest.mark.parametrize(("inside", "casts"), [("cpu", 0), ("cuda", 2)])
def test_tensors_of_another_device_are_not_touched(inside: str, casts: int) -> None:
    with FakeTensorMode():
        x, w = (torch.empty(8, 8, device="cuda:0") for _ in "xw")
        call = Call(torch.matmul, (x, w))
        done = oracle.rewritten(oracle.graph_of(call), device_type=inside)
    assert text(done.after).count("_to_copy") == casts


def test_meta_tensors_are_not_touched() -> None:
    x = torch.empty(8, 8, device="meta")
    done = oracle.rewritten(oracle.traced(lambda x: x @ x, x))
    assert "_to_copy" not in text(done.after)


def test_members_of_a_tuple_are_cast_one_by_one() -> None:
    """`split + (h,)` is one node with a tuple; only its low member is cast."""

    def program(x: Tensor, h: Tensor) -> Tensor:
        return torch.cat(torch.split(x, 2) + (h,))  # noqa: RUF005

    see(
        shown(program, values(4, 8), values(4, 8, dtype=BF16)),
        """
        split: (f32[2, 8], f32[2, 8]) = split(x, 2, dim=0)
        add: (f32[2, 8], f32[2, 8], bf16[4, 8]) = add(split, [h])
        getitem: f32[2, 8] = getitem(add, 0)
        getitem_1: f32[2, 8] = getitem(add, 1)
        getitem_2: bf16[4, 8] = getitem(add, 2)
        getitem_2_f32: f32[4, 8] = _to_copy(getitem_2, dtype=f32)
        cat: f32[8, 8] = cat([getitem, getitem_1, getitem_2_f32])
        return cat
        """,
    )


def test_values_travel_low_until_an_op_asks_for_more() -> None:
    see(
        shown(lambda x, w: torch.stack([F.relu(F.linear(x, w)), x]), values(4, 8), values(8, 8)),
        """
        w_bf16: bf16[8, 8] = _to_copy(w, dtype=bf16)
        x_bf16: bf16[4, 8] = _to_copy(x, dtype=bf16)
        linear: bf16[4, 8] = linear(x_bf16, w_bf16)
        relu: bf16[4, 8] = relu(linear, inplace=False)
        relu_f32: f32[4, 8] = _to_copy(relu, dtype=f32)
        stack: f32[2, 4, 8] = stack([relu_f32, x])
        return stack
        """,
    )


def test_mixed_dtypes_are_mended_and_said() -> None:
    """Eager autocast raises here: index_put wants the source in the destination's dtype."""

    def program(d: Tensor, i: Tensor, x: Tensor) -> Tensor:
        return d.clone().index_put_((i,), x @ x)

    inputs = (values(8, 4), torch.tensor([0, 1, 2, 3]), values(4, 4))
    with pytest.raises(RuntimeError, match="source and destination dtypes match"):
        oracle.run(oracle.in_autocast(Call(program, inputs), BF16), inputs)
    done = oracle.rewritten(oracle.traced(program, *inputs))
    see(
        text(done.after),
        """
        clone: f32[8, 4] = .clone(d)
        x_bf16: bf16[4, 4] = _to_copy(x, dtype=bf16)
        x_bf16_1: bf16[4, 4] = _to_copy(x, dtype=bf16)
        matmul: bf16[4, 4] = matmul(x_bf16_1, x_bf16)
        matmul_f32: f32[4, 4] = _to_copy(matmul, dtype=f32)
        index_put_: f32[8, 4] = .index_put_(clone, [i], matmul_f32)
        return index_put_
        """,
    )
    assert [note for note in done.notes if "its destination's dtype" in note]
    oracle.run(oracle.without_autocast(done.after), inputs)
