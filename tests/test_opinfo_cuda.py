"""Every op of torch's OpInfo database on fake cuda tensors: dtypes and casts of the CUDA lists.

The oracle is the dispatcher's own autocast for CUDA, which runs on fake tensors on any machine.
Values need a GPU; which ops are cast, and what the results' dtypes are, does not.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import oracle
from ampgraph.internals.tensors import quiet_fake_errors
from oracle import Call
from test_opinfo import LOW, OPS, full_name, mixtures

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

# How many calls agreed in torch 2.13, op by op in turns: 2,065.
AGREED = (533, 516, 511, 505)
# No sample of theirs can be made or run without the device.
NO_FAKE = {"masked.logsumexp": "makes a tensor on cuda inside"}


def calls(op: Any) -> Iterator[Call]:
    """Two float32 samples, and the first one's mixtures with bfloat16."""
    samples = op.sample_inputs_func(op, "cpu", torch.float32, False)
    for i, sample in enumerate(itertools.islice(samples, 2)):
        call = Call(op.op, (sample.input, *sample.args), sample.kwargs)
        yield call
        for leaves in mixtures(call.leaves) if i == 0 else ():
            yield Call(op.op, *call.on(leaves))


def difference(call: Call) -> str | None:
    """How ours differs from the dispatcher's on fake cuda tensors; "" where torch runs neither."""
    call = Call(call.function, *call.on([oracle.on_cuda(leaf) for leaf in call.leaves]))
    try:
        with oracle.cuda_autocast(LOW):
            wanted = oracle.dtypes_and_casts(call, call.leaves)
    except (RuntimeError, NotImplementedError, AssertionError, TypeError, ValueError):
        return ""
    done = oracle.rewritten(oracle.graph_of(call), LOW, device_type="cuda")
    if any(row.category == "repair" for row in done.decisions):
        return ""  # a real kernel would refuse what its fake accepts
    got = oracle.dtypes_and_casts(oracle.without_autocast(done.after), call.leaves)
    return None if got == wanted else f"{wanted} and {got}"


@pytest.mark.parametrize("chunk", range(len(AGREED)))
def test_ops_agree_with_cuda_autocast(chunk: int) -> None:
    agreed, wrong = 0, []
    for op in OPS[chunk :: len(AGREED)]:
        for call in calls(op) if full_name(op) not in NO_FAKE else ():
            with FakeTensorMode(allow_non_fake_inputs=True), quiet_fake_errors():
                found = difference(call)
            agreed += found is None
            if found:
                wrong.append(f"{full_name(op)}: {found}")
    assert wrong == []
    assert agreed >= AGREED[chunk] - 10, f"{AGREED[chunk]} calls agreed in torch 2.13"
