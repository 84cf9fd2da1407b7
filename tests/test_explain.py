"""explain and reports: what they say is true, and the model is left as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampgraph
from ampgraph.policy import Policy


class Net(nn.Module):
    """Two linears around a batch norm, a dropout and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = F.dropout(self.norm(self.first(x)), 0.5)
        return F.mse_loss(torch.softmax(self.last(h), -1), target)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4), torch.randn(3, 4)


def test_a_row_for_each_op_with_its_reason() -> None:
    report = ampgraph.explain(Net(), inputs())
    assert report.counts()["aten.linear"] == {torch.bfloat16: 2}
    assert report.counts()["aten.mse_loss"] == {torch.float32: 1}
    assert report.counts()["aten.softmax"] == {torch.bfloat16: 1}
    linear = report.decisions[0]
    assert linear.op == "aten.linear"
    assert linear.category == "allow"
    assert linear.because == "cpu autocast list: lower_precision_fp"
    assert linear.module == "first"
    assert "test_explain.py" in linear.source
    assert "self.first(x)" in linear.source
    assert linear.dtypes_in == (torch.bfloat16,) * 3
    assert linear.dtypes_out == (torch.bfloat16,)
    assert linear.casts == 3


def test_counts_of_casts_are_those_of_the_graph() -> None:
    report = ampgraph.explain(Net(), inputs())
    casts = [n for n in report.after.graph.nodes if n.target is torch.ops.aten._to_copy.default]
    assert report.casts.left == len(casts) == sum(row.casts for row in report.decisions)
    assert report.casts.inserted == report.casts.left + report.casts.removed


def test_before_is_the_captured_graph_and_after_the_rewritten() -> None:
    report = ampgraph.explain(Net(), inputs())
    targets = [n.target for n in report.before.graph.nodes]
    assert torch.ops.aten._to_copy.default not in targets
    assert F.linear in [n.target for n in report.after.graph.nodes]


@pytest.mark.parametrize("backward", [False, True])
def test_the_model_is_left_as_it_was(backward: bool) -> None:
    net, args = Net(), inputs()
    net(*args).backward()
    grads = [p.grad for p in net.parameters()]
    kept = [None if g is None else g.clone() for g in grads]
    state = {k: v.clone() for k, v in net.state_dict().items()}
    random = torch.random.get_rng_state()
    ampgraph.explain(net, args, backward=backward)
    assert torch.equal(random, torch.random.get_rng_state())
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in state.items())
    for p, grad, was in zip(net.parameters(), grads, kept, strict=True):
        assert p.grad is grad
        assert grad is not None
        assert was is not None
        assert torch.equal(grad, was)


def test_arguments_written_in_place_are_given_back() -> None:
    x = torch.ones(3)
    ampgraph.explain(lambda t: t.mul_(2) + 1, (x,))
    assert torch.equal(x, torch.ones(3))


def test_buffers_of_a_module_in_a_closure_are_given_back() -> None:
    net, args = Net(), inputs()
    ampgraph.explain(lambda x, t: net(x, t), args)
    assert net.norm.num_batches_tracked == 0


def test_backward_ops_are_counted_by_dtype() -> None:
    report = ampgraph.explain(Net(), inputs(), backward=True)
    assert report.backward is not None
    assert report.backward[torch.bfloat16] > 0
    assert report.backward[torch.float32] > 0
    assert ampgraph.explain(Net(), inputs()).backward is None


def test_graph_breaks_name_the_line() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x @ x
        torch._dynamo.graph_break()
        return y @ x

    report = ampgraph.explain(broken, (torch.randn(2, 2),))
    assert len(report.graphs) == 2
    assert [b for b in report.graph_breaks if "graph_break()" in b.source]
    assert report.counts()["aten.matmul"] == {torch.bfloat16: 2}


def test_lstm_is_reported_as_skipped() -> None:
    """Dynamo gives up the frame that holds an LSTM; and the report says so."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.lstm = nn.LSTM(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.lstm(self.first(x))[0])

    report = ampgraph.explain(Recurrent(), (torch.randn(3, 2, 4),))
    skipped = report.skipped_frames
    assert [frame.name for frame in skipped] == ["forward"]
    assert "LSTM" in skipped[0].reason
    assert "test_explain.py" in skipped[0].source
    assert "skipped" in str(report)


def test_the_two_doors_differ_where_the_code_asks_for_a_dtype() -> None:
    def asks(x: Tensor) -> Tensor:
        y = x @ x
        return y.to(torch.float64) if y.dtype == torch.float32 else y

    x = torch.randn(2, 2)
    inside = ampgraph.explain(asks, (x,))
    outside = ampgraph.explain(asks, (x,), door="backend")
    assert len(inside.decisions) == 1
    assert len(outside.decisions) == 2


def test_policy_and_dtype_are_heard() -> None:
    policy = Policy.autocast("cpu").deny("aten::linear").module("last", dtype=torch.float32)
    report = ampgraph.explain(Net(), inputs(), policy=policy, dtype="fp16")
    linears = [row for row in report.decisions if row.op == "aten.linear"]
    assert [row.because for row in linears] == [
        "op rule: deny aten::linear",
        "module rule 'last': float32",
    ]


@pytest.mark.parametrize(
    "given", [(torch.ones(2, 4),), ((), torch.ones(2, 4))], ids=["args", "kwargs"]
)
def test_lone_tensors_are_no_arguments(given: tuple[Any, ...]) -> None:
    with pytest.raises(
        ampgraph.errors.OptionError, match="in a tuple and the named ones in a dict"
    ):
        ampgraph.explain(nn.Linear(4, 4), *given)


@pytest.mark.parametrize(
    ("program", "shapes", "op"),
    [
        (nn.Bilinear(4, 4, 3), [(2, 4), (2, 4)], "bilinear"),
        (lambda t: F.affine_grid(t, [1, 1, 2, 2], align_corners=False), [(1, 2, 3)], "affine_grid"),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), [(2, 4, 8)], "encoder"),
    ],
    ids=["bilinear", "affine_grid", "encoder"],
)
def test_a_kernel_that_eager_reaches_into_is_told(program: Any, shapes: Any, op: str) -> None:
    with torch.no_grad():
        report = ampgraph.explain(program, [torch.randn(shape) for shape in shapes])
    (row,) = report.decisions
    assert op in row.op
    assert row.category == "kernel"
    assert row.dtype == torch.float32
    assert any(op in note and "which eager autocast casts" in note for note in report.notes)


def test_printing_and_html(tmp_path: Path) -> None:
    report = ampgraph.explain(Net(), inputs())
    for text in (str(report), _html(report, tmp_path / "report.html")):
        for word in ("aten.linear", "bfloat16", "lower_precision_fp", "first", "casts"):
            assert word in text
    assert list(tmp_path.iterdir()) == [tmp_path / "report.html"]


def _html(report: ampgraph.Report, path: Path) -> str:
    report.to_html(path)
    return path.read_text()


def test_an_html_report_is_whole_or_not_there(tmp_path: Path) -> None:
    report = ampgraph.explain(Net(), inputs())
    with pytest.raises(FileNotFoundError, match=r"no such folder: '.*missing'$"):
        report.to_html(tmp_path / "missing" / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_nothing_captured_is_said() -> None:
    report = ampgraph.explain(lambda: 1)
    with pytest.raises(LookupError, match="nothing was captured"):
        _ = report.after


def test_reports_of_every_way_to_compile() -> None:
    x, t = inputs()
    options: Any = {"inner": "eager"}
    by_name = torch.compile(Net(), backend="ampgraph", options=options)
    own = ampgraph.compile(Net(), inner="eager")
    function = ampgraph.compile(Net().forward, inner="eager")
    in_place = Net()
    in_place.compile(backend="ampgraph", options={**options, "dtype": "bf16"})
    for compiled in (by_name, own, function, in_place):
        assert ampgraph.reports(compiled) == []
        compiled(x, t)
        (report,) = ampgraph.reports(compiled)
        assert report.counts()["aten.linear"] == {torch.bfloat16: 2}


def test_explain_of_a_compiled_model_explains_the_model() -> None:
    compiled = ampgraph.compile(Net(), inner="eager")
    assert ampgraph.explain(compiled, inputs()).counts()["aten.linear"] == {torch.bfloat16: 2}


def test_explain_leaves_no_trace_in_dynamos_cache() -> None:
    """Explained more often than Dynamo compiles one function, and then compiled."""
    net, args = Net(), inputs()
    for op in ("exp", "sin", "cos", "tan", "add", "mul", "sub", "div", "sum"):
        ampgraph.explain(net, args, policy=Policy.autocast("cpu").deny(f"aten::{op}"))
    compiled = torch.compile(net, backend="ampgraph", options={"inner": "eager"})
    compiled(*args)
    assert len(ampgraph.reports(compiled)) == 1


@pytest.mark.parametrize("door", ["compile", "backend"])
def test_explain_of_a_compiled_model_takes_its_options(door: str) -> None:
    options: Any = {"policy": Policy.autocast("cpu").deny("aten::linear"), "dtype": "fp16"}
    compiled = (
        ampgraph.compile(Net(), **options)
        if door == "compile"
        else torch.compile(Net(), backend="ampgraph", options=options)
    )
    report = ampgraph.explain(compiled, inputs())
    assert report.counts()["aten.linear"] == {torch.float32: 2}
    asked = ampgraph.explain(compiled, inputs(), policy=Policy.autocast("cpu"))
    assert asked.counts()["aten.linear"] == {torch.float16: 2}


@pytest.mark.filterwarnings("ignore:torch.autocast raises here")
def test_what_was_mended_is_not_reported_as_skipped() -> None:
    linear = nn.Linear(4, 3)

    def program(x: Tensor) -> Tensor:
        index = torch.zeros(3, 3, dtype=torch.long)
        return torch.zeros(2, 3).scatter_add(0, index, linear(x)) / 2

    report = ampgraph.explain(program, (torch.randn(3, 4),))
    assert report.skipped_frames == ()
    assert "linear(x)) / 2" in " ".join(str(report).split()), "a slash in the code is no folder"


def test_an_unknown_door_is_an_error() -> None:
    with pytest.raises(ampgraph.errors.OptionError, match="'compile' or 'backend'"):
        ampgraph.explain(Net(), inputs(), door="x")  # type: ignore[arg-type]
