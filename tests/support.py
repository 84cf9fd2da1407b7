"""What the tests of programs share: eager autocast as the oracle, and bit-equality.

The oracle runs with `cache_enabled=False`: with its cache on, autocast shares one cast of a
weight and sums the gradients of its uses in low precision, which a graph with one cast a use
does not.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

import ampgraph
from ampgraph.backend import records_of
from ampgraph.graph import CAST
from ampgraph.verify import graphs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def autocast(dtype: torch.dtype = BF16) -> torch.autocast:
    """The oracle's region."""
    return torch.autocast("cpu", dtype=dtype, cache_enabled=False)


def ambient() -> list[str]:
    """Device types whose autocast is on now."""
    return [d for d in ("cpu", "cuda", "xpu", "mps", "ipu") if torch.is_autocast_enabled(d)]


def dtypes(tree: object) -> list[torch.dtype]:
    """The dtypes of the tensors in a result."""
    return [leaf.dtype for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def assert_same(ours: object, eager: object, what: str = "outputs") -> None:
    """Two results are equal bit for bit, dtypes included."""
    left, right = pytree.tree_leaves(ours), pytree.tree_leaves(eager)
    assert len(left) == len(right), f"{what}: {len(left)} leaves against {len(right)}"
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        if not isinstance(b, Tensor):
            assert a == b, f"{what}[{i}]: {a!r} against {b!r}"
            continue
        assert a.dtype == b.dtype, f"{what}[{i}]: {a.dtype} against eager's {b.dtype}"
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=_told(what, i))


def _told(what: str, index: int) -> Callable[[str], str]:
    return lambda message: f"{what}[{index}] differs from eager autocast: {message}"


def gradients(run: Callable[[], object], leaves: list[Tensor]) -> tuple[object, list[Tensor]]:
    """The result of `run` and the gradients of a fixed weighting of it."""
    for leaf in leaves:
        leaf.grad = None
    out = run()
    weigh(out).backward()  # type: ignore[no-untyped-call]
    return out, [torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in leaves]


def weigh(out: object) -> Tensor:
    """A scalar of all outputs that gives each element a weight of its own."""
    total = torch.zeros(())
    for leaf in pytree.tree_leaves(out):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            weights = torch.linspace(0.5, 1.5, leaf.numel()).reshape(leaf.shape)
            total = total + (leaf.float() * weights).sum()
    return total


def leaves_of(model: object, args: object) -> list[Tensor]:
    """Everything of a program that can have a gradient."""
    held = list(model.parameters()) if isinstance(model, nn.Module) else []
    given = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor) and t.requires_grad]
    return [*held, *given]


def assert_like_eager(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    dtype: torch.dtype = BF16,
    inner: Any = "eager",
    backward: bool = True,
    **options: Any,
) -> Any:
    """Outputs and gradients are bit-equal to eager autocast's; returns the compiled callable."""
    leaves = leaves_of(model, args) if backward else []

    def eager() -> object:
        with autocast(dtype):
            return model(*args)

    compiled = ampgraph.compile(model, dtype=dtype, inner=inner, **options)
    if leaves:
        (want, want_grads), (got, got_grads) = (
            gradients(eager, leaves),
            gradients(lambda: compiled(*args), leaves),
        )
        assert_same(got, want)
        assert_same(got_grads, want_grads, "gradients")
    else:
        with torch.no_grad():
            want, got = eager(), compiled(*args)
        assert_same(got, want)
    assert not ambient(), f"autocast left on for {ambient()}"
    return compiled


def op_rows(compiled: object) -> list[ampgraph.Decision]:
    """The decisions of all graphs compiled so far."""
    return [row for record in records_of(compiled) for row in record.rewritten.decisions]


def ops(compiled: object) -> Counter[tuple[str, torch.dtype | None]]:
    """How many ops of each name compute in each dtype, in all graphs compiled so far."""
    return Counter((row.op, row.dtype) for row in op_rows(compiled))


def casts(compiled: object) -> int:
    """Casts left in all graphs compiled so far, bodies included."""
    return sum(record.rewritten.casts.left for record in records_of(compiled))


def bodies(compiled: object) -> list[Any]:
    """The rewritten bodies of higher-order ops in all graphs compiled so far."""
    found = [list(graphs(record.rewritten.after))[1:] for record in records_of(compiled)]
    return [body for group in found for body in group]


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Dynamo's counts of graphs and of graph breaks inside the block."""
    counters.clear()
    found: Counter[str] = Counter()
    yield found
    found["graphs"] = counters["stats"]["unique_graphs"]
    found["breaks"] = sum(counters["graph_break"].values())


def assert_casts_inside(compiled: object, count: int | None = None) -> None:
    """The bodies of the higher-order ops hold casts that this compiler inserted."""
    found = [n for body in bodies(compiled) for n in body.graph.nodes if CAST in n.meta]
    assert found, "no cast in any body"
    assert count is None or len(found) == count, f"{len(found)} casts in the bodies"


def compiled_plainly(function: Callable[..., Any], **options: Any) -> Any:
    """Through the other door, captured with autocast off."""
    options = {"inner": "eager", "dtype": BF16, "outputs": "autocast", **options}
    return torch.compile(function, backend="ampgraph", options=options)


class Net(nn.Module):
    """Two linears around a norm that counts: parameters, buffers, train and eval."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.a(x)).relu()
        out: Tensor = self.b(hidden)
        return out


def by_hand(model: Callable[..., Any], x: Tensor) -> Tensor:
    """What eager autocast returns."""
    with autocast():
        out: Tensor = model(x)
    return out
