"""The ops that refuse mixed dtypes: the lists derived again from torch itself, and the repair.

Every aten op that torch's OpInfo samples reach is called on float32 alone, on bfloat16 alone and
on mixtures of both. What refuses every mixture has to be listed or to be a composite of what is
listed; what is listed has to refuse every mixture; and each refused call has to run once it is
rewritten.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import oracle
from ampgraph.internals.ops import (
    OpOverload,
    PreDispatchMode,
    composite_kernel,
    is_composite,
    name_of,
    pre_dispatch,
    schema_of,
)
from ampgraph.oplists.one_dtype import FLOAT_ONLY, NORMS, ONE_DTYPE
from ampgraph.pipeline import rewrite_graph
from ampgraph.state import OFF
from ampgraph.verdict import named
from oracle import Call
from test_opinfo import LOW, OPS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

# Listed although they take some mixtures: those in which a bias alone differs.
TAKES_ANY_BIAS = {
    f"aten::{name}"
    for name in "convolution _convolution _convolution_mode conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d".split()
}
# They refuse mixtures, but no user's program calls them.
INTERNAL = {
    "aten::_softmax_backward_data",
    "aten::max_pool2d_with_indices_backward",
    "aten::rrelu_with_noise",  # F.rrelu makes the noise, of its input's dtype
    "aten::rrelu_with_noise_",
}
# Composites that refuse mixtures in what they call, where the repair is made.
OPENED = {"aten::_sparse_mm", "aten::histogramdd", "aten::linalg_vecdot"}
# Refused still, once rewritten.
NOT_MENDED = {
    "aten::addbmm_": "of a tensor too small for the result, which fake tensors refuse to let grow",
    "torch_nn::_linear_cross_entropy_batch_chunked": "not an aten op",
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": "not an aten op",
}
# Listed, and not reached by a sample: their overloads for other shapes are.
UNSEEN = {
    f"aten::{name}"
    for name in "_convolution _embedding_bag _index_put_impl_ _unsafe_index_put nll_loss2d "
    "nll_loss2d_forward".split()
}


class Recorder(PreDispatchMode):
    """Notes every aten op that is called, those inside composites too, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kept = pytree.tree_map(
            lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf,
            (tuple(args), dict(kwargs or {})),
        )
        self.calls.append(Call(func, *kept))
        if not is_composite(func, "cpu"):
            return func(*args, **(kwargs or {}))
        with self:
            return composite_kernel(func)(*args, **(kwargs or {}))


def recorded(op: Any) -> list[Call]:
    """The aten calls behind an op's first two samples, in place too."""
    recorder = Recorder()
    for sample in itertools.islice(op.sample_inputs_func(op, "cpu", torch.float32, False), 2):
        for function in (op.op, op.inplace_variant):
            args = pytree.tree_map(
                lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf,
                (sample.input, *sample.args),
            )
            with torch.no_grad(), pre_dispatch(recorder):
                try:
                    function(*args, **sample.kwargs) if function else None
                except Exception:  # what the sample came to until then is recorded
                    continue
    return recorder.calls


@functools.cache
def aten_calls() -> list[Call]:
    """Two calls of each aten op that takes more than one floating tensor, out= left aside."""
    found: dict[str, list[Call]] = defaultdict(list)
    for op in OPS:
        for call in recorded(op):
            known = found[name_of(call.function)]
            outs = any(a.is_out for a in schema_of(call.function).arguments)
            if len(known) < 2 and len(floating(call)) > 1 and not outs:
                known.append(call)
    return [call for calls in found.values() for call in calls]


def floating(call: Call) -> list[int]:
    return [i for i, leaf in enumerate(call.leaves) if leaf.dtype == torch.float32]


def lowered(call: Call, which: Sequence[int]) -> list[Tensor]:
    """Copies of the leaves, some of them low."""
    return [leaf.to(LOW) if i in which else leaf.clone() for i, leaf in enumerate(call.leaves)]


def mixtures(call: Call) -> Iterator[tuple[int, ...]]:
    """Each floating leaf alone low, and each alone not."""
    places = floating(call)
    seen = [(i,) for i in places] + [tuple(j for j in places if j != i) for i in places]
    yield from dict.fromkeys(seen)


def runs(call: Call, leaves: Sequence[Tensor]) -> bool:
    try:
        call(leaves)
    except (RuntimeError, ValueError, NotImplementedError, IndexError, TypeError):
        return False
    return True


@functools.cache
def behaviour() -> dict[str, list[tuple[Call, tuple[int, ...], bool]]]:
    """For each op that runs in either dtype alone: each mixture, and whether it runs."""
    found: dict[str, list[tuple[Call, tuple[int, ...], bool]]] = defaultdict(list)
    for call in aten_calls():
        alone = runs(call, lowered(call, ())), runs(call, lowered(call, floating(call)))
        for which in mixtures(call) if all(alone) else ():
            row = (call, which, runs(call, lowered(call, which)))
            found[name_of(call.function).partition(".")[0]].append(row)
    return found


def refusing() -> set[str]:
    return {name for name, rows in behaviour().items() if not any(ran for _, _, ran in rows)}


def test_what_is_listed_refuses_every_mixture() -> None:
    seen = behaviour().keys()
    assert sorted(ONE_DTYPE - seen) == sorted(UNSEEN)
    assert sorted(ONE_DTYPE & seen - refusing() - TAKES_ANY_BIAS) == []


def test_what_refuses_every_mixture_is_listed() -> None:
    aten = {name for name in refusing() if name.startswith("aten::")}
    assert sorted(aten - ONE_DTYPE - NORMS - FLOAT_ONLY - INTERNAL) == sorted(OPENED)


def names_of(call: Call, which: Sequence[int]) -> set[str]:
    """The names of the arguments at these places among the leaves."""
    given = {id(t): name for name, t in named(call.function, call.args, call.kwargs).items()}
    return {given[id(call.leaves[i])] for i in which}


def test_norms_take_float32_parameters_beside_a_low_input_and_no_low_parameters() -> None:
    for name in NORMS:
        for call, which, ran in behaviour()[name]:
            statistics = {"running_mean", "running_var"}
            low, every = names_of(call, which), names_of(call, floating(call)) - statistics
            if low == {"input"}:
                assert ran, f"{name} refuses a low input"
            if low & {"weight", "bias"} and low - statistics != every:
                assert not ran, f"{name} takes a mixture: {low} of {every}"


def mended(call: Call, which: Sequence[int]) -> None:
    """Rewrite the call with autocast off, and run it."""
    leaves = lowered(call, which)
    gm = oracle.graph_of(Call(call.function, *call.on(leaves)))
    done = rewrite_graph(gm, policies={}, state=OFF, outputs="autocast", grad=True)
    dtypes = [leaf.dtype for leaf in leaves]
    oracle.without_autocast(done.after)(leaves)
    assert [leaf.dtype for leaf in leaves] == dtypes, "a destination keeps its dtype"


def statistics_differ(call: Call, which: Sequence[int]) -> bool:
    """Whether a norm's running mean and variance have different dtypes: nobody's program."""
    given = named(call.function, *call.on(lowered(call, which)))
    mean, var = given.get("running_mean"), given.get("running_var")
    return mean is not None and var is not None and mean.dtype != var.dtype


def test_refused_calls_run_once_rewritten() -> None:
    count, wrong = 0, []
    for name, rows in behaviour().items():
        for call, which, ran in rows:
            if ran or name in INTERNAL | NOT_MENDED.keys() or statistics_differ(call, which):
                continue
            try:
                mended(call, which)
                count += 1
            except Exception as error:
                wrong.append(f"{name} {which}: {error}"[:300])
    assert wrong == []
    assert count > 500, "mixtures were lost"


def test_low_alone_is_refused_by_what_is_listed_so() -> None:
    refused = {
        name_of(call.function).partition(".")[0]
        for call in aten_calls()
        if runs(call, lowered(call, ())) and not runs(call, lowered(call, floating(call)))
    }
    seen = {name_of(call.function).partition(".")[0] for call in aten_calls()}
    assert sorted(FLOAT_ONLY & seen - refused) == []
