"""Reports of programs that raise under mixed precision elsewhere: here they are mended.

As in test_reports_from_users.py, the docstrings name the public source.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import ampgraph
from support import (
    BF16,
    FP16,
    FP32,
    assert_same,
    dtypes,
    gradients,
    ops,
    records_of,
)

AMBIENT = {"inner": "eager", "dtype": "ambient"}


def compiled(program: Any, **options: Any) -> Any:
    return ampgraph.compile(program, inner="eager", **options)


def test_attention_with_rotary_tables_in_fp32() -> None:
    """pytorch#124901: q and k turned fp32 by the tables met a low v: "invalid dtype for bias"."""
    lin, table = nn.Linear(8, 24), torch.randn(5, 8)

    def program(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = lin(x).chunk(3, dim=-1)
        q, k = q * table.cos(), k * table.sin()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask), q

    x, keep = torch.randn(2, 5, 8), torch.ones(5, 5).tril().bool()
    bias = torch.zeros(5, 5).masked_fill(~keep, -1e4)
    for mask in (keep, bias, bias.to(BF16)):
        out, q = compiled(program)(x, mask)
        assert (out.dtype, q.dtype) == (BF16, FP32), "attention in one low dtype"
        torch.testing.assert_close(
            out.float(),
            program(x, mask.float() if mask is not keep else keep)[0],
            rtol=0.05,
            atol=0.05,
        )


def test_messages_summed_into_an_fp32_table() -> None:
    """pytorch#51730: scatter_add and index_put of a low source into an fp32 table raised."""
    message = nn.Linear(4, 3)

    def program(x: Tensor, to: Tensor) -> tuple[Tensor, ...]:
        low, table = message(x), torch.zeros(2, 3)
        summed = table.scatter_add(0, to[:, None].expand(-1, 3), low)
        return (
            low,
            summed,
            table.index_put((to,), low, accumulate=True),
            table.index_add(0, to, low),
        )

    x, to = torch.randn(5, 4), torch.tensor([1, 0, 1, 1, 0])
    call = compiled(program)
    with pytest.warns(ampgraph.errors.AmpgraphWarning, match="mends"):
        low, *sums = call(x, to)
    want = torch.zeros(2, 3).index_add(0, to, low.float())
    assert dtypes([low, *sums]) == [BF16, FP32, FP32, FP32], "low messages, fp32 sums"
    assert_same(sums, [want] * 3)
    gradients(lambda: call(x, to), list(message.parameters()))


def test_lstm_cell_fed_with_low_inputs_and_fp32_state() -> None:
    """pytorch#45048: nn.LSTMCell with a bias: "expected scalar type Half but found Float"."""
    cell = nn.LSTMCell(3, 4)

    def program(steps: Tensor, state: Any) -> Any:
        for x in steps:
            state = cell(x, state)
        return state

    steps, zeros = torch.randn(3, 2, 3), torch.zeros(2, 4)
    want = program(steps, None)
    for state in (None, (zeros, zeros), (zeros.to(BF16), zeros)):
        got = compiled(program)(steps.to(BF16), state)
        torch.testing.assert_close([t.float() for t in got], list(want), rtol=0.05, atol=0.05)


def test_fourier_transform_between_linears() -> None:
    """erksch/fnet-pytorch#10: fft refuses low inputs, so each one had its own fp32 region."""
    first, last, scale = nn.Linear(8, 8), nn.Linear(8, 8), torch.randn(4, 8, dtype=torch.complex64)
    scale.requires_grad_()

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        mixed = torch.fft.ifft2(torch.fft.fft2(first(x)) * scale).real
        return mixed, last(mixed)

    x = torch.randn(2, 4, 8)
    for policy in ("cpu", "cuda"):
        out = compiled(program, policy=ampgraph.Policy.autocast(policy))(x)
        assert dtypes(out) == [FP32, BF16], "fp32 around the transforms, low again after"
        scale.grad = None
        out[1].sum().backward()
        assert scale.grad.dtype == torch.complex64, "complex numbers stay complex"  # type: ignore[attr-defined]
        torch.testing.assert_close(out[1].float(), program(x)[1], rtol=0.05, atol=0.05)


def test_mask_of_minus_a_billion_in_fp16() -> None:
    """NVIDIA/apex#1052: "value cannot be converted to type at::Half without overflow"."""
    q, k = nn.Linear(8, 8), nn.Linear(8, 8)

    def program(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        scores = q(x) @ k(x).mT
        return scores.masked_fill(~keep, -1e9).softmax(-1), scores

    keep = torch.ones(4, 4).tril().bool()
    keep[3] = False
    weights, scores = compiled(program, dtype=FP16)(torch.randn(2, 4, 8), keep)
    assert scores.dtype == FP16, "low scores"
    assert weights[:, 0, 1:].count_nonzero() == 0, "masked weights are exactly zero"
    torch.testing.assert_close(weights.float().sum(-1), torch.ones(2, 4), rtol=0, atol=2e-3)


def test_features_sampled_on_an_fp32_grid() -> None:
    """pytorch#42218: grid_sample: "expected input and grid to have same dtype"."""
    conv, theta = nn.Conv2d(2, 3, 3, padding=1), nn.Parameter(torch.eye(2, 3)[None])

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        features = conv(x)
        grid = F.affine_grid(theta, list(features.shape), align_corners=False)
        return features, F.grid_sample(features, grid, align_corners=False)

    x = torch.randn(1, 2, 6, 6)
    call = compiled(program)
    made: Any
    made, grads = gradients(lambda: call(x), [*conv.parameters(), theta])
    features, out = made
    assert (features.dtype, out.dtype) == (BF16, FP32), "sampled in the grid's dtype"
    assert dtypes(grads) == [FP32] * 3, "gradients reach both"
    torch.testing.assert_close(out, program(x)[1], rtol=0.05, atol=0.05)


def test_flex_attention_of_two_dtypes() -> None:
    """pytorch#165468: flex_attention is on no list: mixed q, k and v raised, fp32 ones stayed."""
    q, k, v = torch.randn(3, 1, 2, 16, 16).unbind()
    with torch.no_grad():
        want = F.scaled_dot_product_attention(q, k, v)
        for mixed in ((q, k, v.to(BF16)), (q, k, v)):
            call = compiled(lambda q, k, v: flex_attention(q, k, v))
            out = call(*mixed)
            assert out.dtype == BF16, "as scaled_dot_product_attention would be"
            torch.testing.assert_close(out.float(), want, rtol=0.05, atol=0.05)
            assert ops(call)["higher_order.flex_attention", BF16] == 1, "and it is reported"


LAPACK = (
    torch.linalg.inv,
    torch.linalg.det,
    torch.linalg.svdvals,
    torch.linalg.eigvals,
    lambda a: torch.linalg.solve(a, a),
    lambda a: torch.linalg.cholesky(a @ a.mT),
    lambda a: torch.linalg.qr(a)[1],
)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_linear_algebra_by_cudas_lists(dtype: torch.dtype) -> None:
    """The same as for Fourier transforms: on no list for CUDA, and without a low kernel."""
    w = torch.eye(4) + 0.1 * torch.randn(4, 4)
    for function in LAPACK:
        call = compiled(
            lambda x, w, f=function: f(x @ w), dtype=dtype, policy=ampgraph.Policy.autocast("cuda")
        )
        out, want = call(torch.eye(4), w), function(w)
        assert out.dtype == want.dtype, "fp32 or complex64"
        torch.testing.assert_close(out, want, rtol=0.05, atol=0.05)
        (record,) = records_of(call)
        assert any("computed in float32" in note for note in record.rewritten.notes), "with a word"
