"""Op names: what users may write, and that a torch function's name leads to the op it calls."""

import functools
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from types import EllipsisType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db

from ampgraph import opnames
from ampgraph.errors import PolicyError
from ampgraph.internals.ops import PreDispatchMode, pre_dispatch
from ampgraph.oplists.functions import CALLS, COMPOSITES

aten = torch.ops.aten

ACCEPTED: list[tuple[object, tuple[str, ...]]] = [
    ("aten::gelu", ("aten::gelu",)),
    ("aten.gelu", ("aten::gelu",)),
    ("torch.ops.aten.gelu", ("aten::gelu",)),
    ("aten::softmax.int", ("aten::softmax.int",)),
    ("aten.softmax.int", ("aten::softmax.int",)),
    ("aten::linear.default", ("aten::linear.default",)),
    (aten.linear, ("aten::linear",)),
    (aten.linear.default, ("aten::linear.default",)),
    (aten.softmax.int, ("aten::softmax.int",)),
    ("aten::view_as_complex", ("aten::view_as_complex",)),  # a view that autocast lists
    (F.gelu, ("aten::gelu",)),
    (F.linear, ("aten::linear",)),
    (F.softmax, ("aten::softmax",)),
    (F.layer_norm, ("aten::layer_norm",)),
    (F.cross_entropy, ("aten::cross_entropy_loss",)),
    (F.scaled_dot_product_attention, ("aten::scaled_dot_product_attention",)),
    (F.max_pool2d, ("aten::max_pool2d", "aten::max_pool2d_with_indices")),
    (torch.softmax, ("aten::softmax",)),
    (torch.matmul, ("aten::matmul",)),
    (torch.einsum, ("aten::einsum",)),
    (torch.Tensor.sum, ("aten::sum",)),
    (torch.Tensor.__matmul__, ("aten::matmul",)),
    (torch.linalg.solve, ("aten::linalg_solve",)),
    (torch.fft.rfft, ("aten::fft_rfft",)),
    (torch.special.expm1, ("aten::special_expm1",)),
    (operator.matmul, ("aten::matmul",)),
    (operator.truediv, ("aten::div",)),
]

REFUSED: list[tuple[object, str]] = [
    ("aten::gleu", r"there is no op 'aten::gleu'\n.*did you mean .*aten::gelu"),
    ("gelu", "did you mean aten::gelu"),
    ("aten::", "there is no op"),
    ("nolib::op", "import the library that defines the op first"),
    ("aten::softmax.foo", r"no overload 'foo'\n.*aten::softmax for all of them.*int"),
    ("aten::view", "a view of its input"),
    ("aten::add_", "writes into its argument"),
    ("aten::add.out", "writes into its argument"),
    (aten.mul_.Tensor, "writes into its argument"),
    (torch.Tensor.add_, "writes into its argument"),
    (torch.Tensor.view, "a view of its input"),
    (torch.Tensor.float, "a cast itself"),
    ("aten::_to_copy", "a cast itself"),
    ("aten::zeros", "no tensor argument"),
    (torch.is_floating_point, "returns no tensor"),
    (F.multi_head_attention_forward, r"made of several ops\n.*aten::linear.*aten::softmax"),
    (F.softmin, "name those you mean: aten::neg, aten::softmax"),
    (torch.unravel_index, "is no single op"),
    (torch.nn.LayerNorm, r"is a module, not an op\n.*Policy.module"),
    (torch.nn.Identity(), "is a module, not an op"),
    (print, "neither an op nor a torch function"),
    (lambda x: x, "neither an op nor a torch function"),
    (torch.ops.higher_order.cond, "neither an op nor a torch function"),
    (3, "neither an op nor a torch function"),
    ([], "neither an op nor a torch function"),
]


@pytest.mark.parametrize(("written", "names"), ACCEPTED)
def test_what_users_may_write(written: object, names: tuple[str, ...]) -> None:
    assert opnames.rule_names(written) == names


@pytest.mark.parametrize(("written", "message"), REFUSED)
def test_what_has_no_rule_says_why(written: object, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        opnames.rule_names(written)


def test_custom_ops_by_definition_and_by_name() -> None:
    @torch.library.custom_op("ampgraph_names::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    wanted = ("ampgraph_names::twice",)
    assert opnames.rule_names(twice) == wanted
    assert opnames.rule_names("ampgraph_names::twice") == wanted
    assert opnames.rule_names(torch.ops.ampgraph_names.twice) == wanted
    with pytest.raises(PolicyError, match="did you mean ampgraph_names::twice"):
        opnames.rule_names("ampgraph_names::twise")


def test_a_custom_op_that_writes_into_its_argument_has_no_rule() -> None:
    @torch.library.custom_op("ampgraph_names::zero_in_place", mutates_args=("x",))
    def zero_in_place(x: torch.Tensor) -> None:
        x.zero_()

    with pytest.raises(PolicyError, match="writes into its argument"):
        opnames.rule_names(zero_in_place)


def test_full_and_packet_names() -> None:
    assert opnames.full_name(aten.linear.default) == "aten::linear.default"
    assert opnames.full_name(aten.softmax.int) == "aten::softmax.int"
    assert opnames.packet_name(aten.softmax.int) == "aten::softmax"


# Each torch function that resolves is run: of the ops it calls, exactly one bears the rule.

# Helpers that public functions call beside their one op; none computes with what the op gets.
BESIDE = {
    "aten::arange",
    "aten::broadcast_tensors",
    "aten::detach",
    "aten::detach_",
    "aten::expand",
    "aten::lift_fresh",
    "aten::pad",
    "aten::rand",
    "aten::reshape",
    "aten::squeeze",
    "aten::unsqueeze",
    "aten::view",
}
# reduction="batchmean" divides the sum, which is already in the type kl_div chose.
ALSO_CALLS = {"torch.nn.functional.kl_div": {"aten::div"}}

ONES = torch.ones(2, 2)


def on_ones(function: Callable[..., Any], name: str) -> Callable[[], Any]:
    """An operator, or a tensor's method for one, called with as many tensors as it takes."""
    return partial(function, *[ONES] * (1 if name.strip("_") in {"abs", "neg"} else 2))


# Calls for the functions that torch's own samples leave out.
BF16 = torch.ones(2, 16, 16, dtype=torch.bfloat16)
CALLS_BY_HAND: dict[str, Callable[[], Any]] = {
    "torch.nn.functional.affine_grid": partial(F.affine_grid, torch.ones(1, 2, 3), [1, 1, 2, 2]),
    "torch.nn.functional.dropout1d": partial(F.dropout1d, torch.ones(1, 2, 2)),
    "torch.nn.functional.fold": partial(F.fold, torch.ones(1, 4, 1), (2, 2), (2, 2)),
    "torch.nn.functional.grouped_mm": partial(F.grouped_mm, BF16, BF16),
    "torch.nn.functional.gumbel_softmax": partial(F.gumbel_softmax, ONES, hard=True),
    "torch.nn.functional.lp_pool1d": partial(F.lp_pool1d, torch.ones(1, 2, 4), 2.0, 2),
    "torch.nn.functional.lp_pool2d": partial(F.lp_pool2d, torch.ones(1, 2, 4, 4), 2.0, 2),
    "torch.nn.functional.lp_pool3d": partial(F.lp_pool3d, torch.ones(1, 2, 4, 4, 4), 2.0, 2),
}


class Recorder(PreDispatchMode):
    """Records the ops as autocast would meet them, composites whole."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.ops.append(opnames.packet_name(func))
        return func(*args, **(kwargs or {}))


@functools.cache
def samples() -> dict[str, list[Any]]:
    """torch's own OpInfo entries by the name of the function they are for."""
    found: dict[str, list[Any]] = defaultdict(list)
    for info in op_db:
        for name in (info.name, *(alias.name for alias in info.aliases)):
            found[name].append(info)
    return found


def calls_of(path: str, function: Callable[..., Any]) -> Iterator[Callable[[], Any]]:
    """Ways to call a function, from torch's samples or by hand."""
    if path in CALLS_BY_HAND:
        yield CALLS_BY_HAND[path]
    name = path.rpartition(".")[2]
    if path in CALLS and (name.startswith("__") or path.startswith("operator.")):
        yield on_ones(function, name)
    for info in samples().get(path.removeprefix("torch.").removeprefix("Tensor."), []):
        types = [t for t in (torch.float32, torch.int64, torch.bool) if t in info.dtypes]
        for sample in itertools.islice(info.sample_inputs("cpu", types[0]), 3) if types else ():
            yield partial(function, sample.input, *sample.args, **sample.kwargs)


def ops_called(call: Callable[[], Any]) -> list[str] | EllipsisType:
    """The ops of one call, or ... where the sample is not for this spelling of the function."""
    recorder = Recorder()
    try:
        with pre_dispatch(recorder):
            call()
    except (TypeError, AttributeError, RuntimeError, ValueError):
        return ...
    return recorder.ops


@pytest.mark.filterwarnings("ignore")  # old functions warn, and so they may
def test_functions_lead_to_the_one_op_they_call() -> None:
    wrong: list[str] = []
    seen: Counter[str] = Counter()
    for function, path in opnames.torch_functions().items():
        assert callable(function), path
        for call in calls_of(path, function):
            ops = ops_called(call)
            if ops is not ...:
                seen[path] += 1
                wrong += complaints(path, function, ops)
    assert wrong == []
    present = set(opnames.torch_functions().values())
    unseen = sorted((CALLS.keys() | COMPOSITES.keys()) & present - seen.keys())
    assert unseen == [], "rows that were never called"
    assert len(seen) > 800, "torch's samples reach fewer functions than they did"


def complaints(path: str, function: object, ops: list[str]) -> list[str]:
    """What is wrong with a function's name, given the ops that one call made."""
    if path in COMPOSITES:
        named = {f"aten::{op}" for op in COMPOSITES[path]}
        known = len(set(ops) - BESIDE) == 0 or named & set(ops) or "torch_nn::" in str(ops)
        return [] if known else [f"{path} calls {ops}, none of the ops its error names"]
    try:
        names = opnames.rule_names(function)
    except PolicyError:
        return []
    extra = set(ops) - set(names) - BESIDE - ALSO_CALLS.get(path, set())
    if len([op for op in ops if op in names]) != 1 or extra:
        return [f"{path} is taken for {names}, but calls {ops}"]
    return []


@pytest.mark.parametrize("written", ["torch.nn.functional.gelu", "torch.ops.aten.gelu"])
def test_a_torch_function_by_its_path(written: str) -> None:
    assert opnames.rule_names(written) == ("aten::gelu",)


def test_a_misspelt_path_is_an_error() -> None:
    with pytest.raises(PolicyError, match="gelu"):
        opnames.rule_names("torch.nn.functional.gleu")
