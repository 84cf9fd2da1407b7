"""ampgraph.rewrite: graphs that did not come through torch.compile."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import ampgraph
from ampgraph.errors import RewriteError, UnsupportedGraphError
from ampgraph.policy import Policy

CAST = torch.ops.aten._to_copy.default


class Net(nn.Module):
    """Leaf modules of a symbolic trace: linear, batch norm (with buffers), linear, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU())
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        y = self.head(self.body(x))
        return y, F.mse_loss(y, target)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4), torch.randn(3, 4)


def eager(module: nn.Module, args: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
        return tuple(module(*args))


def casts(gm: torch.fx.GraphModule) -> int:
    return sum(node.target is CAST for node in gm.graph.nodes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_symbolic_trace(dtype: torch.dtype) -> None:
    net, args = Net(), inputs()
    other = copy.deepcopy(net)
    gm = ampgraph.rewrite(torch.fx.symbolic_trace(net), args, dtype=dtype)
    assert casts(gm) == 3 + 2 + 1  # the second linear's input is low already; so is the loss's
    assert not [n for n in gm.graph.nodes if n.op == "call_module"]
    ours, theirs = gm(*args), eager(other, args, dtype)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    ours[1].backward()
    theirs[1].backward()
    named = dict(gm.named_parameters())
    for name, p in other.named_parameters():
        assert torch.equal(named[name].grad, p.grad)  # type: ignore[arg-type]
    for name, b in other.named_buffers():
        assert torch.equal(dict(gm.named_buffers())[name], b)


def test_a_leaf_module_that_returns_several_values() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y, weights = self.attend(x, x, x)
            return y, weights

    net, x = Attention(), torch.randn(3, 2, 4)
    gm = ampgraph.rewrite(torch.fx.symbolic_trace(net), (x,))
    for a, b in zip(gm(x), eager(net, (x,), torch.bfloat16), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_state_dict_keys_stay() -> None:
    net = Net()
    gm = ampgraph.rewrite(torch.fx.symbolic_trace(net), inputs())
    assert set(gm.state_dict()) == set(net.state_dict())


def test_the_given_graph_is_left_alone() -> None:
    gm = torch.fx.symbolic_trace(Net())
    before = gm.print_readable(print_output=False)
    ampgraph.rewrite(gm, inputs())
    assert gm.print_readable(print_output=False) == before
    assert all("example_value" not in n.meta for n in gm.graph.nodes)


def test_a_pre_dispatch_graph() -> None:
    net, args = Net().eval(), inputs()
    traced = make_fx(net, pre_dispatch=True)(*args)
    gm = ampgraph.rewrite(traced, args)
    assert casts(gm) == 6
    for a, b in zip(gm(*args), eager(net, args, torch.bfloat16), strict=True):
        assert torch.equal(a, b)


def test_an_exported_module() -> None:
    net, args = Net().eval(), inputs()
    gm = ampgraph.rewrite(torch.export.export(net, args).module(), args)
    assert casts(gm) == 6
    for a, b in zip(gm(*args), eager(net, args, torch.bfloat16), strict=True):
        assert torch.equal(a, b)


def test_an_exported_module_with_a_region() -> None:
    class Island(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", enabled=False):
                y = x @ x
            return y, x @ x

    x = torch.randn(3, 3)
    ep = torch.export.export(Island(), (x,))
    gm = ampgraph.rewrite(ep.module(), (x,))
    assert [t.dtype for t in gm(x)] == [torch.float32, torch.bfloat16]


def test_regions_of_an_exported_module_are_carried_out() -> None:
    """torch.export keeps regions as higher-order ops; none is left, and none acts at run time."""

    class Regions(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            with torch.autocast("cpu", torch.bfloat16):
                y = x @ x
                with torch.no_grad():
                    z = y @ x
            return y, z, x @ x

    x = torch.randn(3, 3)
    exported: Any = torch.export.export(Regions(), (x,)).module()
    gm = ampgraph.rewrite(exported, (x,), dtype="fp16")
    assert "wrap_with_autocast" not in gm.print_readable(print_output=False)
    assert [t.dtype for t in gm(x)] == [torch.bfloat16, torch.bfloat16, torch.float16]
    for a, b in zip(gm(x), eager(Regions(), (x,), torch.float16), strict=True):
        assert torch.equal(a, b)


def test_dynamo_graph() -> None:
    seen: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> object:
        seen.append(gm)
        return gm.forward

    x = torch.randn(3, 3)
    torch.compile(lambda t: (t @ t).relu(), backend=keep)(x)
    gm = ampgraph.rewrite(seen[0], (x,))
    assert casts(gm) == 1  # no gradient flows into x: its two uses share a cast
    assert gm(x)[0].dtype == torch.bfloat16


def test_module_rules_match_the_paths_of_a_symbolic_trace() -> None:
    policy = Policy.autocast("cpu").module("body.0", dtype=torch.float32)
    gm = ampgraph.rewrite(torch.fx.symbolic_trace(Net()), inputs(), policy=policy)
    cast = [node for node in gm.graph.nodes if node.target is CAST]
    low = [node.name for node in cast if node.kwargs["dtype"] != torch.float32]
    assert low
    assert all("head" in name or "gelu" in name for name in low)


def test_a_policy_for_another_device_type() -> None:
    gm = torch.fx.symbolic_trace(lambda x: torch.softmax(x.bfloat16(), -1))
    cuda = ampgraph.rewrite(gm, (torch.randn(2, 2),), policy=Policy.autocast("cuda"))
    cpu = ampgraph.rewrite(gm, (torch.randn(2, 2),))
    assert cuda(torch.randn(2, 2)).dtype == torch.float32
    assert cpu(torch.randn(2, 2)).dtype == torch.bfloat16


def joint_graph() -> torch.fx.GraphModule:
    from functorch.compile import aot_function, make_boxed_func

    seen: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        seen.append(gm)
        return make_boxed_func(gm.forward)

    x = torch.randn(3, 3, requires_grad=True)
    aot_function(lambda t: torch.softmax(t @ t, -1), fw_compiler=keep, bw_compiler=keep)(
        x
    ).sum().backward()
    return seen[1]


def test_graphs_after_autograd_are_refused() -> None:
    with pytest.raises(UnsupportedGraphError, match=r"post-autograd|joint"):
        ampgraph.rewrite(joint_graph(), [torch.randn(3, 3)] * 3)


def test_bad_input_is_named() -> None:
    gm = torch.fx.symbolic_trace(Net())
    with pytest.raises(UnsupportedGraphError, match="2 placeholders, 1 example inputs"):
        ampgraph.rewrite(gm, (torch.randn(3, 4),))
    with pytest.raises(UnsupportedGraphError, match=r"not a torch\.fx\.GraphModule"):
        ampgraph.rewrite(Net(), inputs())  # type: ignore[arg-type]


def test_a_module_that_cannot_be_traced_is_named() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() > 0 else -x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Branches()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.inner(x)
            return found

    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    outer = Outer()
    gm = torch.fx.GraphModule(outer, Leaves().trace(outer))
    with pytest.raises(RewriteError, match="'inner' cannot be traced"):
        ampgraph.rewrite(gm, (torch.randn(3),))


class Widened(nn.Module):
    """torch.export asserts the dtype of what a user's own cast meets."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.a(x)
        return y.float().softmax(-1), y.to(torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_assertions_follow_the_rewrite(dtype: torch.dtype) -> None:
    model, x = Widened(), torch.randn(3, 4)
    captured = torch.export.export(model, (x,)).module()
    ours = ampgraph.rewrite(captured, (x,), dtype=dtype)
    for a, b in zip(ours(x), eager(model, (x,), dtype), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    asserted = [n for n in ours.graph.nodes if "_assert_tensor_metadata" in str(n.target)]
    found = {n.args[3] if len(n.args) > 3 else n.kwargs["dtype"] for n in asserted}
    assert dtype in found, "they assert what the tensors are now"


def test_a_false_assertion_still_fails() -> None:
    def run(x: Tensor) -> Tensor:
        y = x @ x
        torch.ops.aten._assert_tensor_metadata.default(y, dtype=torch.float32)
        return y

    x = torch.randn(3, 3)
    graph = torch.fx.symbolic_trace(run)
    ampgraph.rewrite(graph, (x,))(x)
    called = next(n for n in graph.graph.nodes if "assert" in n.name)
    called.kwargs = {"dtype": torch.float64}
    with pytest.raises(Exception, match="dtype mismatch"):
        ampgraph.rewrite(graph, (x,))(x)
