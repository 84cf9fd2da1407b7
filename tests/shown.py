"""Programs as text before and after the rewrite, for tests that say what is to be seen.

    h: bf16[4, 8] = linear(x_bf16, w_bf16)

`shown` gives the text only of a rewrite that was seen to do what autocast does: bit-equal to
eager autocast on CPU; for the CUDA lists, the dtypes and casts of the dispatcher on fake tensors.
"""

from collections.abc import Callable
from textwrap import dedent
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

import oracle
from ampgraph.graph import captured, op_name
from ampgraph.policy import Policy
from oracle import Call

BF16, FP32 = torch.bfloat16, torch.float32
SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def short(dtype: torch.dtype) -> str:
    """f32, bf16, i64, bool."""
    name = str(dtype).removeprefix("torch.")
    letters = name.rstrip("0123456789")
    return SHORT.get(letters, letters) + name[len(letters) :]


def value(of: Any) -> str:
    """bf16[4, 8], or the members' in brackets."""
    if isinstance(of, Tensor):
        return f"{short(of.dtype)}{list(of.shape)}"
    if isinstance(of, (tuple, list)):
        return f"({', '.join(value(member) for member in of)})"
    return type(of).__name__


def argument(of: Any) -> str:
    if isinstance(of, (tuple, list)):
        return f"[{', '.join(argument(member) for member in of)}]"
    return short(of) if isinstance(of, torch.dtype) else str(of)


def name(node: fx.Node) -> str:
    """A method with a dot before it, an overload with its name, a function without its module."""
    if node.op == "call_method":
        return f".{node.target}"
    overload = str(getattr(node.target, "_overloadname", "default"))
    plain = op_name(node.target).rpartition(".")[2]
    return plain if overload == "default" else f"{plain}.{overload}"


def values(*shape: int, dtype: torch.dtype = FP32, grad: bool = True) -> Tensor:
    """Random values, and by default ones that want a gradient."""
    wanted = grad and (dtype.is_floating_point or dtype.is_complex)
    return torch.randn(shape).to(dtype).requires_grad_(wanted)


def text(gm: fx.GraphModule) -> str:
    """A line a node."""
    lines: list[str] = []
    for node in gm.graph.nodes:
        given = [argument(a) for a in node.args]
        given += [f"{k}={argument(v)}" for k, v in node.kwargs.items()]
        if node.op == "output":
            lines.append(f"return {', '.join(given)}")
        elif node.op != "placeholder":
            kind = value(captured(node))
            lines.append(f"{node.name}: {kind} = {name(node)}({', '.join(given)})")
    return "\n".join(lines)


def shown(
    function: Callable[..., Any],
    *inputs: Tensor,
    lists: str = "cpu",
    dtype: torch.dtype = BF16,
    grad: bool = True,
) -> str:
    """The rewritten program as text, once it does what autocast does."""
    policy = Policy.autocast(lists)
    inputs = inputs if grad else tuple(t.detach() for t in inputs)
    gm = oracle.traced(function, *inputs)
    done = oracle.rewritten(gm, dtype, policy=policy, grad=grad)
    after = oracle.without_autocast(done.after)
    if lists == "cpu":
        eager = oracle.run(oracle.in_autocast(Call(function, inputs), dtype), inputs)
        assert oracle.difference(eager, oracle.run(after, inputs)) is None
    else:
        oracle.run(after, inputs)
        assert_like_cuda(function, inputs, dtype)
    return text(done.after)


def see(after: str, expected: str) -> None:
    """The text is the expected one, indented as it may be."""
    assert after == dedent(expected).strip()


def assert_like_cuda(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], dtype: torch.dtype
) -> None:
    """The program on fake cuda tensors: the dispatcher's dtypes, and no cast more than it makes."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        leaves = [oracle.on_cuda(leaf) for leaf in inputs]
        with oracle.cuda_autocast(dtype):
            dtypes, casts = oracle.dtypes_and_casts(Call(function, tuple(leaves)), leaves)
        done = oracle.rewritten(oracle.traced(function, *leaves), dtype, device_type="cuda")
        got, made = oracle.dtypes_and_casts(oracle.without_autocast(done.after), leaves)
    assert got == dtypes
    assert made <= casts
