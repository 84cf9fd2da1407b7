"""Composites that hide a listed op are opened; all others stay as the user wrote them."""

import torch
import torch.nn.functional as F
from torch import Tensor

import oracle
from ampgraph.policy import Policy
from shown import BF16, FP32, see, shown, text, values

TARGET = torch.tensor([1, 0, 3, 2])


def test_cross_entropy_for_cuda() -> None:
    """The kernel asks for log_softmax in its input's dtype, which autocast respects."""
    see(
        shown(F.cross_entropy, values(4, 8, dtype=BF16), TARGET, lists="cuda")
        .replace("cross_entropy_", "")
        .replace("input_1", "input"),
        """
        log_softmax: bf16[4, 8] = log_softmax.int(input, 1, bf16)
        _to_copy: f32[4, 8] = _to_copy(log_softmax, dtype=f32)
        nll_loss: f32[] = nll_loss(_to_copy, target)
        return nll_loss
        """,
    )


def test_cross_entropy_for_cpu_is_listed_itself() -> None:
    after = shown(F.cross_entropy, values(4, 8, dtype=BF16), TARGET)
    assert after.count("_to_copy") == 1
    assert "cross_entropy: f32[] = cross_entropy(" in after


def test_einsum_hides_bmm() -> None:
    see(
        shown(lambda x, w: torch.einsum("bi,oi->bo", x, w), values(4, 8), values(6, 8)),
        """
        einsum_unsqueeze: f32[4, 8, 1] = unsqueeze(x, 2)
        einsum_permute: f32[4, 1, 8] = permute(einsum_unsqueeze, [0, 2, 1])
        einsum_unsqueeze_1: f32[6, 8, 1] = unsqueeze(w, 2)
        einsum_permute_1: f32[1, 6, 8] = permute(einsum_unsqueeze_1, [2, 0, 1])
        einsum_permute_2: f32[4, 8, 1] = permute(einsum_permute, [0, 2, 1])
        einsum_reshape: f32[1, 4, 8] = reshape(einsum_permute_2, [1, 4, 8])
        einsum_permute_3: f32[8, 6, 1] = permute(einsum_permute_1, [2, 1, 0])
        einsum_reshape_1: f32[1, 8, 6] = reshape(einsum_permute_3, [1, 8, 6])
        einsum__to_copy: bf16[1, 8, 6] = _to_copy(einsum_reshape_1, dtype=bf16)
        einsum__to_copy_1: bf16[1, 4, 8] = _to_copy(einsum_reshape, dtype=bf16)
        einsum_bmm: bf16[1, 4, 6] = bmm(einsum__to_copy_1, einsum__to_copy)
        einsum_view: bf16[4, 1, 6] = view(einsum_bmm, [4, 1, 6])
        einsum_permute_4: bf16[4, 6, 1] = permute(einsum_view, [0, 2, 1])
        einsum_view_1: bf16[4, 6] = view(einsum_permute_4, [4, 6])
        return einsum_view_1
        """,
    )


def cell(x: Tensor, h: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return torch.gru_cell(x, h, w, u)


CELL = (4, 8), (4, 8), (24, 8), (24, 8)


def test_gru_cell_is_listed_on_cuda_and_opened_on_cpu() -> None:
    """The state stays float32 on CPU, where only the linear ops inside are listed."""
    inputs = [values(*shape) for shape in CELL]
    graph = oracle.traced(cell, *inputs)
    see(
        text(oracle.rewritten(graph, policy=Policy.autocast("cuda")).after),
        """
        u_bf16: bf16[24, 8] = _to_copy(u, dtype=bf16)
        w_bf16: bf16[24, 8] = _to_copy(w, dtype=bf16)
        h_bf16: bf16[4, 8] = _to_copy(h, dtype=bf16)
        x_bf16: bf16[4, 8] = _to_copy(x, dtype=bf16)
        gru_cell: bf16[4, 8] = gru_cell(x_bf16, h_bf16, w_bf16, u_bf16)
        return gru_cell
        """,
    )
    lines = shown(cell, *inputs).splitlines()
    made = [line.split(": ")[1] for line in lines if "_to_copy(" in line or "linear(" in line]
    assert [line.split(" = ")[0] for line in made] == [
        "bf16[24, 8]",
        "bf16[4, 8]",
        "bf16[4, 24]",
        "bf16[24, 8]",
        "bf16[4, 8]",
        "bf16[4, 24]",
    ]
    assert lines[-4:-1] == [
        "gru_cell_sub: f32[4, 8] = sub.Tensor(h, gru_cell_tanh_)",
        "gru_cell_mul__1: f32[4, 8] = mul_.Tensor(gru_cell_sub, gru_cell_sigmoid__1)",
        "gru_cell_add__2: f32[4, 8] = add_.Tensor(gru_cell_mul__1, gru_cell_tanh_)",
    ]


def attention(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """As one node, which is how a symbolic trace keeps it; Dynamo looks inside."""
    return F.multi_head_attention_forward(  # type: ignore[return-value]
        x, x, x, 8, 2, w, b, None, None, False, 0.0, v, c
    )


def test_attention_as_one_node_is_opened() -> None:
    """Three linear ops, three products and one projection: each is cast as autocast casts it."""
    inputs = values(5, 2, 8), values(24, 8), values(24), values(8, 8), values(8)
    call = oracle.Call(attention, inputs)
    done = oracle.rewritten(oracle.graph_of(call))
    eager = oracle.run(oracle.in_autocast(call, BF16), inputs)
    after = oracle.without_autocast(done.after)
    assert oracle.difference(eager, oracle.run(after, inputs)) is None
    casts = [oracle.casts_made(run, inputs) for run in (oracle.in_autocast(call, BF16), after)]
    assert casts[0] == casts[1] == done.casts.left > 0
    ops = [line.partition(" = ")[2].partition("(")[0] for line in text(done.after).splitlines()]
    assert ops.count("linear") == 2, "the packed projection, and the one at the end"


def test_a_composite_that_hides_nothing_stays_whole() -> None:
    see(
        shown(
            lambda x, y: F.cosine_similarity(F.dropout(x, 0.5), y),
            values(4, 8),
            values(4, 8),
        ),
        """
        dropout: f32[4, 8] = dropout(x, p=0.5, training=True, inplace=False)
        cosine_similarity: f32[4] = cosine_similarity(dropout, y)
        return cosine_similarity
        """,
    )


def test_a_composite_inside_an_opened_one_stays_whole_where_nothing_is_done_to_it() -> None:
    """`dropout` between two linear ops is one node, not the bernoulli and the product in it."""

    def rnn(x: Tensor, h: Tensor, *weights: Tensor) -> Tensor:
        return torch.rnn_tanh(x, h, list(weights), False, 2, 0.5, True, False, False)[0]

    shapes = (4, 8), (4, 4), (4, 4), (4, 4)
    inputs = values(3, 2, 8), values(2, 2, 4), *(values(*shape) for shape in shapes)
    call = oracle.Call(rnn, inputs)
    done = oracle.rewritten(oracle.graph_of(call))
    lines = text(done.after)
    assert "dropout(" in lines
    assert "bernoulli" not in lines
    eager = oracle.run(oracle.in_autocast(call, BF16), inputs)
    got = oracle.run(oracle.without_autocast(done.after), inputs)
    assert oracle.difference(eager, got) is None


def test_rows_tell_of_every_op_inside() -> None:
    graph = oracle.traced(F.cross_entropy, values(4, 8, dtype=BF16), TARGET)
    done = oracle.rewritten(graph, policy=Policy.autocast("cuda"))
    rows = [(r.op, r.category, r.casts, r.dtypes_in[0], r.dtypes_out) for r in done.decisions]
    assert rows == [
        ("aten.log_softmax", "fp32_set_opt_dtype", 0, BF16, (BF16,)),
        ("aten.nll_loss", "deny", 1, FP32, (FP32,)),
    ]


def test_an_op_whose_dtype_is_set_has_one_row_that_says_so() -> None:
    graph = oracle.traced(lambda h: F.normalize(h), values(4, 8, dtype=BF16))
    done = oracle.rewritten(graph, policy=Policy.autocast("cuda"))
    rows = [(row.op, row.dtype, row.dtypes_in[0], row.dtypes_out) for row in done.decisions]
    assert rows == [
        ("aten.linalg_vector_norm", FP32, BF16, (FP32,)),
        ("aten.clamp_min", FP32, FP32, (FP32,)),
        ("aten.expand_as", FP32, FP32, (FP32,)),
        ("aten.div", FP32, BF16, (FP32,)),
    ]
