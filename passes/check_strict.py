"""Check that the inner backend can be bit-equal to eager autocast on a graph, or say where not.

Inductor keeps fused intermediates in float32 unless `emulate_precision_casts` is on; with it every
low-precision value is rounded as eager rounds it, but its own vectorised exp or sum still differ
from eager's in the last bit. So strict mode is a list of what was seen to be equal: each op below
was compared with eager on CPU, the unary ones on all 65,536 values of bfloat16 and float16
(torch 2.13; `tests/test_strict.py` repeats it). Everything else is refused by name.

"aot_eager" is refused like any other inner: AOTAutograd takes some ops apart by Python formulas
that eager does not use (a bicubic upsampling into gathers and products).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ampgraph.decision import Decision
from ampgraph.errors import StrictError
from ampgraph.graph import KEPT, PASS, captured, op_name, source_of
from ampgraph.internals.autocast import enter_autocast
from ampgraph.oplists.strict import EXACT, EXACT_LOW, EXACT_WITH_FITTING_SCALAR
from ampgraph.verify import graphs

_ALWAYS_EXACT = "eager"  # runs eager's own kernels, one op at a time
_SINCE = (2, 13)  # where Inductor's C++ code began to honour emulate_precision_casts


def check_strict(gm: fx.GraphModule, rows: tuple[Decision, ...], inner: Any) -> None:
    """Raise StrictError, naming the op and its line, where bit-equality cannot be promised."""
    if inner == _ALWAYS_EXACT:
        return
    if inner != "inductor":
        raise StrictError(
            f"nothing is known of the backend {inner!r}",
            cure="use inner='eager', which runs eager's own kernels, or inner='inductor'",
        )
    _check_place(gm)
    for row in rows:
        _refuse(row.op, _why_not(row), f"node {row.node}, {row.source}")
    for graph in graphs(gm):
        for node in graph.graph.nodes:
            why = _rounded_scalar(node) or _kept_whole(node)
            _refuse(op_name(node.target), why, f"node {node.name}, {source_of(node)}")


def _refuse(op: str, why: str | None, where: str) -> None:
    if why:
        raise StrictError(
            f"{op} {why}",
            where=where,
            cure="leave strict=False for this function, or use inner='eager', which runs eager's "
            "own kernels",
        )


def _check_place(gm: fx.GraphModule) -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    devices = {t.device.type for t in _inputs(gm)}
    if devices - {"cpu"}:
        raise StrictError(
            f"Inductor on {', '.join(sorted(devices - {'cpu'}))} has not been compared with eager",
            cure="use inner='eager'",
        )
    if version < _SINCE:
        raise StrictError(
            f"torch {torch.__version__}'s Inductor rounds differently on CPU",
            cure="use torch 2.13 or newer, or inner='eager'",
        )


def _inputs(gm: fx.GraphModule) -> Iterator[Tensor]:
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, Tensor):
            yield value


def _why_not(row: Decision) -> str | None:
    """Why an op may differ from eager in a last bit, None where it does not."""
    name = row.op.partition(".")[2]
    if name in EXACT | EXACT_WITH_FITTING_SCALAR or row.dtype is None:
        return None
    if name not in EXACT_LOW:
        return "is not among the ops whose Inductor code was compared with eager's"
    if row.dtype in (torch.bfloat16, torch.float16):
        return None
    return "in float32 differs from eager in the last bit"


def _kept_whole(node: fx.Node) -> str | None:
    """Why nothing is known of code that torch.autocast runs: its ops were not looked at."""
    kept = node.prev.target is enter_autocast and node.prev.meta.get(PASS) == KEPT
    inside = kept and node.target is not enter_autocast
    return "runs inside a region of autocast: what it computes is not compared" if inside else None


def _rounded_scalar(node: fx.Node) -> str | None:
    """Why a number in low-precision arithmetic is rounded in eager and not by Inductor."""
    name = op_name(node.target).rpartition(".")[2].strip("_").removeprefix("i")
    value = captured(node)
    low = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    if (name not in EXACT_WITH_FITTING_SCALAR and name != "truediv") or not low:
        return None
    for number in node.args:
        if isinstance(number, float) and torch.tensor(number, dtype=value.dtype).item() != number:
            return f"with {number}, which {value.dtype} does not hold, is rounded differently"
    return None
