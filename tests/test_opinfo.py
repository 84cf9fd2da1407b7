"""Every op of torch's OpInfo database, called as eager autocast("cpu") calls it and as we do.

For every op: its first samples in float32, the first ones again with some or all of their
tensors in bfloat16, through the function, the method and the in-place variant. Results, what is
left in the inputs, gradients and the number of casts are compared to the bit. A sample counts
when eager autocast runs it; what eager refuses is another test's business (test_one_dtype.py).
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

import oracle
from oracle import Call

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

LOW = torch.bfloat16
SAMPLES, MIXED = 6, 2  # samples of each op in float32, and those of them also in other mixtures
# How many samples agreed in torch 2.13, op by op in turns: 6,015.
AGREED = (506, 555, 558, 568, 526, 466, 457, 477, 476, 461, 503, 462)

# What differs from eager, in how many of its samples, and why.
EXCEPTIONS = {
    "nn.functional.bilinear": (
        4,
        "its kernel calls bmm, which eager autocast casts unseen to low "
        "precision and adds up in float32; here all of it stays in float32",
    ),
    "linalg.pinv.hermitian": (3, "of an empty matrix, the kernel returns an (unseen) low matmul"),
    "cov": (
        7,
        "asks for the elements of a tensor (aten::equal) before its mm: Dynamo breaks the "
        "graph there, and eager autocast runs it",
    ),
    "corrcoef": (5, "calls cov"),
    "linalg.det": (
        1,
        "of an empty bfloat16 matrix: no kernel runs, so none is missing; here float32",
    ),
    "linalg.solve_triangular": (
        2,
        "of float32 and bfloat16, which its kernel takes (not the other way "
        "round): here one cast more, the same values",
    ),
    "addbmm": (
        2,
        "addbmm_ of a bfloat16 tensor too small for the result: the kernel makes it grow, "
        "fake tensors (and so Dynamo) raise",
    ),
}
# Their results are memory that nobody wrote, or start from it: filled, they can be compared.
UNINITIALIZED = ("empty", "new_empty", "linalg.lstsq")


def full_name(op: Any) -> str:
    return ".".join(part for part in (op.name, op.variant_test_name) if part)


OPS = [op for op in op_db if torch.float32 in op.dtypes]


def mixtures(leaves: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The floating leaves all low, the first alone, all others alone."""
    floating = [i for i, leaf in enumerate(leaves) if leaf.is_floating_point()]
    groups = [floating, floating[:1], floating[1:]]
    for group in groups if len(floating) > 1 else groups[: len(floating)]:
        yield [
            leaf.detach().to(LOW).requires_grad_(leaf.requires_grad) if i in group else leaf
            for i, leaf in enumerate(leaves)
        ]


def calls(op: Any) -> Iterator[tuple[str, Call, str | None]]:
    """The calls of an op, each with a name and, for a method, the method's name."""
    grad = op.supports_autograd
    samples = op.sample_inputs_func(op, "cpu", torch.float32, grad)
    for i, sample in enumerate(itertools.islice(samples, SAMPLES)):
        call = Call(op.op, (sample.input, *sample.args), sample.kwargs)
        yield f"{i}", call, None
        if i < MIXED:
            for j, leaves in enumerate(mixtures(call.leaves)):
                mixed = Call(op.op, *call.on(leaves))
                yield f"{i} mixed {j}", mixed, None
                yield from variants(op, f"{i} mixed {j}", mixed)
            yield from variants(op, f"{i}", call)


def variants(op: Any, name: str, call: Call) -> Iterator[tuple[str, Call, str | None]]:
    """The same call through the method, and in place."""
    method = getattr(op.method_variant, "__name__", "<lambda>")
    if name == "0" and hasattr(Tensor, method) and isinstance(call.args[0], Tensor):
        yield f"{name} method", Call(getattr(Tensor, method), call.args, call.kwargs), method
    inplace: Any = op.inplace_variant
    given = dict(call.kwargs)
    if isinstance(inplace, functools.partial):  # hardsigmoid and mish: inplace=True
        inplace, given = inplace.func, given | inplace.keywords
    if inplace is not None:
        yield f"{name} in place", Call(inplace, call.args, given), None


@contextlib.contextmanager
def memory_filled(op: Any) -> Generator[None]:
    """New memory filled with NaN where the op's result depends on what is in it."""
    fill = op.name.startswith(UNINITIALIZED)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or fill)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def differences(op: Any) -> tuple[int, int, list[str]]:
    """How many samples of an op agree, how many eager autocast refuses, and what differs."""
    agreed, refused, found = 0, 0, []
    with memory_filled(op):
        for name, call, method in calls(op):
            try:
                eager = oracle.run(oracle.in_autocast(call, LOW), call.leaves)
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
                refused += 1
                continue
            difference = told(oracle.compare, call, LOW, eager, method)
            agreed += difference is None
            if difference:
                found.append(f"{full_name(op)} {name}: {difference}")
    return agreed, refused, found


def told(compare: Callable[..., str | None], *args: Any) -> str | None:
    """A crash told like any other difference."""
    try:
        return compare(*args)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


@pytest.mark.parametrize("chunk", range(len(AGREED)))
def test_ops_agree_with_eager_autocast(chunk: int) -> None:
    total, refusals = 0, 0
    for op in OPS[chunk :: len(AGREED)]:
        agreed, refused, found = differences(op)
        assert len(found) == EXCEPTIONS.get(full_name(op), (0, ""))[0], found or "it agrees now"
        total, refusals = total + agreed, refusals + refused
    assert total >= AGREED[chunk] - 10, f"{AGREED[chunk]} samples agreed in torch 2.13"
    assert refusals <= 80, "eager autocast refused 497 of 6,512 samples in torch 2.13"


def test_exceptions_are_few() -> None:
    assert len(EXCEPTIONS) <= 10, "find what they have in common instead"
    assert EXCEPTIONS.keys() <= {full_name(op) for op in OPS}, "an exception without an op"
