"""Where casts stand: one for every use that wants a gradient, shared where none is wanted."""

from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor

import oracle
from ampgraph.graph import CAST, PASS
from shown import shown, text, values


def twice(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w) + F.linear(x, w)


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def casts_of(after: str) -> Counter[str]:
    """How often each value is cast."""
    lines = [line for line in after.splitlines() if "_to_copy(" in line]
    return Counter(line.partition("_to_copy(")[2].partition(",")[0] for line in lines)


def test_one_cast_for_every_use_that_wants_a_gradient() -> None:
    assert casts_of(shown(twice, values(4, 8), values(8, 8))) == {"x": 2, "w": 2}


def test_an_input_that_wants_none_is_cast_once() -> None:
    after = shown(twice, values(4, 8, grad=False), values(8, 8))
    assert casts_of(after) == {"x": 1, "w": 2}


def test_casts_are_shared_without_gradients() -> None:
    assert casts_of(shown(twice, values(4, 8), values(8, 8), grad=False)) == {"x": 1, "w": 1}


def test_two_uses_in_one_op() -> None:
    assert casts_of(shown(lambda x: x @ x, values(4, 4))) == {"x": 2}
    assert casts_of(shown(lambda x: x @ x, values(4, 4), grad=False)) == {"x": 1}


def test_a_value_made_in_the_graph_is_cast_for_every_use() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return twice(x.sin(), w)

    assert casts_of(shown(program, values(4, 8), values(8, 8))) == {"sin": 2, "w": 2}
    assert casts_of(shown(program, values(4, 8, grad=False), values(8, 8))) == {"sin": 1, "w": 2}


def test_a_write_ends_the_sharing() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        before = F.linear(x, w)
        x.mul_(2)
        return before + F.linear(x, w)

    after = shown(program, values(4, 8), values(8, 8), grad=False)
    assert casts_of(after)["x"] == 2, "the old cast holds what was there before"


def test_a_cast_of_one_dtype_does_not_serve_another() -> None:
    def program(x: Tensor, h: Tensor) -> Tensor:
        low = x @ x
        return torch.cat([low, h]) + torch.cat([low, h])

    after = shown(program, values(4, 4), values(4, 4), grad=False)
    assert casts_of(after) == {"x": 1, "matmul": 1}


def test_operands_are_cast_from_the_last_as_autocast_does() -> None:
    after = shown(linear, values(4, 8), values(8, 8), values(8))
    order = [line.partition(":")[0] for line in after.splitlines()]
    assert order == ["b_bf16", "w_bf16", "x_bf16", "linear", "return linear"]


def test_casts_say_who_made_them_and_for_what() -> None:
    done = oracle.rewritten(oracle.traced(linear, values(4, 8), values(8, 8), values(8)))
    made = [node for node in done.after.graph.nodes if CAST in node.meta]
    assert [(n.name, n.meta[CAST], n.meta[PASS]) for n in made] == [
        ("b_bf16", "linear", "insert_casts"),
        ("w_bf16", "linear", "insert_casts"),
        ("x_bf16", "linear", "insert_casts"),
    ]
    assert done.casts.inserted == done.casts.left == 3


def test_the_captured_graph_is_left_alone() -> None:
    gm = oracle.traced(twice, values(4, 8), values(8, 8))
    before = text(gm)
    done = oracle.rewritten(gm)
    assert text(gm) == before
    assert done.before is gm
    assert done.after is not gm


def test_a_rewritten_graph_is_a_fixed_point() -> None:
    once = oracle.rewritten(oracle.traced(twice, values(4, 8), values(8, 8))).after
    assert text(oracle.rewritten(once).after) == text(once)
