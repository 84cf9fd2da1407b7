"""torch's own autocast test lists: the CPU lists against eager autocast, the CUDA lists twice.

CUDA rules do not depend on where tensors live. On CPU tensors their effect on values is compared
with the control that torch's own tests use (the call on arguments cast by hand); on fake cuda
tensors the dtypes are compared with the real dispatcher's. Every test says how many cases it ran;
a row that does not run is named, with torch's reason.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists
from torch.utils import _pytree as pytree

import oracle
from ampgraph.errors import BannedOpError
from ampgraph.policy import Policy
from oracle import Call

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated"),
    pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim"),
]

LOW, WIDE, WIDEST, AS_IS = "low", "float32", "widest", "as it is"
FEEDS = (LOW, WIDE, AS_IS)  # what the floating arguments are turned into before the call
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BUILTIN: Any = torch._C

# Each list: where its functions live, and what autocast makes of their floating arguments.
CPU_LISTS: dict[str, tuple[Any, str]] = {
    "torch_16": (torch, LOW),
    "torch_fp32": (torch, WIDE),
    "nn_16": (BUILTIN._nn, LOW),
    "nn_fp32": (BUILTIN._nn, WIDE),
    "torch_need_autocast_promote": (torch, WIDEST),
    "torch_expect_builtin_promote": (torch, AS_IS),
    "methods_expect_builtin_promote": (Tensor, AS_IS),
}
CUDA_LISTS: dict[str, tuple[Any, str]] = {
    "torch_fp16": (torch, LOW),
    "torch_fp32": (torch, WIDE),
    "torch_need_autocast_promote": (torch, WIDEST),
    "torch_expect_builtin_promote": (torch, AS_IS),
    "nn_fp16": (BUILTIN._nn, LOW),
    "nn_fp32": (BUILTIN._nn, WIDE),
    "linalg_fp16": (BUILTIN._linalg, LOW),
    "methods_fp16": (Tensor, LOW),
    "methods_fp32": (Tensor, WIDE),
    "methods_expect_builtin_promote": (Tensor, AS_IS),
}
NO_FUNCTION = {"__div__"}  # a method of Python 2, still in torch's lists
NO_GRADIENT = {"_addmm_activation", "_native_multi_head_attention"}  # for inference alone
SETS_DTYPE = {"softmax", "log_softmax", "cumprod", "cumsum", "prod", "sum", "norm"}

# Rows that torch itself does not run, with its reason.
EINSUM = {"einsum": "einsum(): the number of subscripts"}  # wrong in the list, skipped by torch
UNPROMOTED = "Unexpected floating ScalarType in at::autocast::prioritize"
NOT_ON_CPU = EINSUM | {
    "cudnn_convolution": "Could not run 'aten::cudnn_convolution'",
    "cudnn_convolution_transpose": "Could not run 'aten::cudnn_convolution_transpose'",
}
NOT_FAKE = EINSUM | {
    "cudnn_convolution": "Torch not compiled with CUDA",
    "cudnn_convolution_transpose": "Torch not compiled with CUDA",
    "gru_cell": "Torch not compiled with CUDA",
    "equal": "DataDependentOutputException",
}
# Rows made for float16: beside bfloat16 it is not promoted by autocast (here it is, to float32).
MIXED_LOW = ("bilinear", "dot", "vdot", "grid_sampler", "index_put", "scatter_add")
NOT_FAKE_IN = {
    BF16: NOT_FAKE | dict.fromkeys(MIXED_LOW, UNPROMOTED),
    FP16: NOT_FAKE | {"grid_sampler": "PyTorch is not linked with support for cuda devices"},
}


@dataclass(frozen=True)
class Case:
    """One call of a list; `runs_as` is what autocast turns its floating arguments into."""

    op: str
    name: str
    call: Call
    runs_as: str


@dataclass
class Tally:
    """How many cases agreed, which differed, and which rows torch itself does not run."""

    agreed: int = 0
    differed: list[str] = field(default_factory=list[str])
    raised: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, name: str, difference: str | None) -> None:
        self.agreed += difference is None
        if difference is not None:
            self.differed.append(f"{name}: {difference}")

    def check(self, agreed: int, not_run: Mapping[str, str]) -> None:
        assert self.differed == []
        assert self.agreed == agreed, "cases were lost or found: say how many there are"
        assert self.raised.keys() == not_run.keys(), self.raised
        for op, reason in not_run.items():
            assert reason in self.raised[op], f"{op} raises otherwise: {self.raised[op]}"


def turned(tree: Any, to: torch.dtype) -> Any:
    """The floating tensors of a tree in another dtype."""
    return pytree.tree_map(
        lambda t: t.to(to) if isinstance(t, Tensor) and t.is_floating_point() else t, tree
    )


def cases(lists: Any, kinds: Mapping[str, tuple[Any, str]], low: torch.dtype) -> Iterator[Case]:
    """Every row of torch's lists with every feed; a row's place in its list tells it apart."""
    for kind, (module, runs_as) in kinds.items():
        for i, (op, args, *more) in enumerate(getattr(lists, kind)):
            if op in NO_FUNCTION:
                continue
            if op == "einsum":
                args, more = (args, list(more[0])), []
            kwargs = more[0] if more and isinstance(more[0], dict) else {}
            for feed in FEEDS:
                fed = args if feed == AS_IS else turned(args, low if feed == LOW else FP32)
                call = Call(getattr(module, op), fed, kwargs)
                yield Case(op, f"{kind}[{i}] {op} {feed}", call, runs_as)


def wanting_gradients(case: Case) -> Call:
    """The call with copies that want gradients in place of its floating tensors."""
    wanted = case.op not in NO_GRADIENT
    leaves = [
        t.detach().clone().requires_grad_(wanted and t.is_floating_point())
        for t in case.call.leaves
    ]
    return Call(case.call.function, *case.call.on(leaves))


def reference(function: Callable[..., Any], leaves: Any) -> oracle.Result | str:
    """What torch makes of the call, or why it does not run."""
    try:
        return oracle.run(function, leaves)
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]


def on_cpu(dtype: torch.dtype) -> Tally:
    """The CPU lists: ours beside eager autocast, casts counted."""
    tally = Tally()
    for case in cases(AutocastCPUTestLists(torch.device("cpu")), CPU_LISTS, dtype):
        call = wanting_gradients(case)
        eager = oracle.in_autocast(call, dtype)
        ref = reference(eager, call.leaves)
        if isinstance(ref, str):
            tally.raised[case.op] = ref
            continue
        after = oracle.without_autocast(oracle.rewritten(oracle.graph_of(call), dtype).after)
        found = oracle.difference(ref, oracle.run(after, call.leaves))
        made = [oracle.casts_made(run, call.leaves) for run in (eager, after)]
        tally.add(case.name, found if made[0] == made[1] else f"{found}; casts {made}")
    return tally


def test_cpu_lists_in_bfloat16() -> None:
    on_cpu(BF16).check(162, {})


def test_cpu_lists_in_float16() -> None:
    """The rows made for bfloat16 meet float16 beside it, which eager autocast does not promote."""
    on_cpu(FP16).check(160, {"cat": UNPROMOTED, "stack": UNPROMOTED})


def control(case: Case, call: Call, dtype: torch.dtype) -> Callable[..., Any]:
    """The call on arguments cast by hand, or told by hand to accumulate in float32."""

    def run(leaves: Any) -> Any:
        args, kwargs = call.on(leaves)
        found = [t.dtype for t in oracle.leaves_of((args, kwargs)) if t.is_floating_point()]
        if case.op in SETS_DTYPE and found[0] != FP32:
            args = (*args[:1], "fro") if case.op == "norm" and not kwargs else args
            return getattr(torch, case.op)(*args, **kwargs, dtype=FP32)
        wide = FP32 if FP32 in found or case.runs_as == WIDE else found[0]
        to = dtype if case.runs_as == LOW else wide
        return call.function(*(args if case.runs_as == AS_IS else turned(args, to)), **kwargs)

    return run


def cuda_rules_on_cpu(dtype: torch.dtype) -> Tally:
    """The CUDA lists as a policy for CPU tensors: ours beside torch's own control."""
    tally = Tally()
    policy = Policy.autocast("cuda")
    for case in cases(AutocastTestLists(torch.device("cpu")), CUDA_LISTS, dtype):
        call = wanting_gradients(case)
        ref = reference(control(case, call, dtype), call.leaves)
        if isinstance(ref, str):
            tally.raised[case.op] = ref
            continue
        after = oracle.rewritten(oracle.graph_of(call), dtype, policy=policy).after
        got = oracle.run(oracle.without_autocast(after), call.leaves)
        tally.add(case.name, oracle.difference(ref, got))
    return tally


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_cuda_lists_on_cpu_tensors(dtype: torch.dtype) -> None:
    cuda_rules_on_cpu(dtype).check(348, NOT_ON_CPU)


def apart(call: Call) -> Call:
    """The call with a tensor of its own in every place: without gradients, one shared is cast once.

    Gradients are not to be had: autograd asks for the device.
    """
    args, kwargs = pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (call.args, call.kwargs)
    )
    return Call(call.function, args, kwargs)


def on_fake_cuda(dtype: torch.dtype) -> Tally:
    """The CUDA lists on fake cuda tensors: ours beside the dispatcher's own autocast kernels."""
    tally = Tally()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for case in cases(AutocastTestLists(torch.device("cuda:0")), CUDA_LISTS, dtype):
            call = apart(case.call)
            try:
                with oracle.cuda_autocast(dtype):
                    ref = oracle.dtypes_and_casts(call, call.leaves)
            except (RuntimeError, NotImplementedError, AssertionError) as error:
                tally.raised[case.op] = repr(error)
                continue
            after = oracle.rewritten(oracle.graph_of(call), dtype, device_type="cuda").after
            got = oracle.dtypes_and_casts(oracle.without_autocast(after), call.leaves)
            tally.add(case.name, None if ref == got else f"{ref} and {got}")
    return tally


@pytest.mark.parametrize(("dtype", "agreed"), [(BF16, 334), (FP16, 339)])
def test_cuda_lists_on_fake_cuda_tensors(dtype: torch.dtype, agreed: int) -> None:
    on_fake_cuda(dtype).check(agreed, NOT_FAKE_IN[dtype])


def test_banned_ops_are_banned_on_cuda_tensors_only() -> None:
    for op, args, module in AutocastTestLists(torch.device("cpu")).banned:
        call = Call(getattr(module, op), args)
        with pytest.raises(BannedOpError, match=op):
            oracle.rewritten(oracle.graph_of(call), policy=Policy.autocast("cuda"))
        oracle.rewritten(oracle.graph_of(call), policy=Policy.autocast("cpu"))
