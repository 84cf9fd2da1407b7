"""Tensors made of other tensors: their ops are decided without running them again."""

import torch
from torch import Tensor, nn

import ampgraph
from support import BF16, FP32, assert_same, autocast, gradients, ops


def ragged() -> Tensor:
    rows = [torch.randn(2, 4), torch.randn(3, 4)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def test_nested_tensors() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 2)), ragged()
    leaves = list(model.parameters())

    def eager() -> Tensor:
        with autocast():
            return model(x).values()

    compiled = ampgraph.compile(model, inner="eager")
    want, want_grads = gradients(eager, leaves)
    got, got_grads = gradients(lambda: compiled(x).values(), leaves)
    assert_same(got, want)
    assert_same(got_grads, want_grads, "gradients")
    assert ops(compiled)["aten.linear", BF16] == 2, "low inside"


def test_sparse_tensors() -> None:
    """Autocast lists no sparse product, and casts its dense operands by the list of `mm`."""
    table, lin = torch.eye(4).to_sparse(), nn.Linear(4, 4)

    def program(x: Tensor) -> Tensor:
        return torch.sparse.mm(table, lin(x).float())

    x = torch.randn(4, 4)
    with autocast():
        want = program(x)
    assert_same(ampgraph.compile(program, inner="eager")(x), want)
    assert want.dtype in (BF16, FP32), "whatever eager says"
