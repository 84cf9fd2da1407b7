"""The benchmarks measure right answers only, and say what was wrong with the others."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import __main__ as front
from benchmarks import compare as comparing
from benchmarks import gpu, peers
from benchmarks.cases import CASES, Size, Task
from benchmarks.measure import peak_bytes
from benchmarks.peers import PEERS, Setting

CPU = torch.device("cpu")


@pytest.mark.parametrize("task", ["train", "infer"])
@pytest.mark.parametrize("name", CASES)
def test_every_case_runs(name: str, task: Task) -> None:
    model, inputs = CASES[name].program("small", task)
    out = model(**inputs)
    assert out.isfinite().all()
    assert out.shape == () if task == "train" else out.shape[0] == 1


def test_published_sizes() -> None:
    """The models people know by these names."""
    sizes: dict[str, int] = {}
    for name in ("gpt2", "llama-1b", "bert", "vit", "resnet50"):
        with torch.device("meta"):
            sizes[name] = sum(p.numel() for p in CASES[name].build("full").parameters())
    assert {name: round(size / 1e6) for name, size in sizes.items()} == {
        "gpt2": 124, "llama-1b": 1236, "bert": 109, "vit": 86, "resnet50": 24,
    }  # fmt: skip


def eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """All peers without a compiler: what is tested here is the measuring."""

    def ours(model: nn.Module, setting: Setting) -> Callable[..., Tensor]:
        return peers.eager_autocast(model, setting)

    for name, peer in PEERS.items():
        prepare = ours if peer.low and not peer.own_weights else peers.eager
        monkeypatch.setitem(PEERS, name, dataclasses.replace(peer, prepare=prepare))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("task", ["train", "infer"])
def test_all_peers_agree(task: Task, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    eagerly(monkeypatch)
    if dtype is torch.float16:
        monkeypatch.setitem(PEERS, "ampgraph", dataclasses.replace(PEERS["ampgraph"], scaler=None))
    found = comparing.compare("unet", "small", Setting(CPU, dtype, task), rounds=1)
    assert [row.peer for row in found.rows] == list(PEERS)
    assert {row.peer: row.wrong for row in found.rows if row.wrong} == {}
    for row in found.rows:
        assert (row.seconds or 0) > 0
        assert (row.peak or 0) > 0
        assert row.errors.keys() == ({"output", "gradients"} if task == "train" else {"output"})


def test_a_wrong_answer_gets_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def slightly_off(model: nn.Module, setting: Setting) -> Callable[..., Tensor]:
        run = peers.eager_autocast(model, setting)
        return lambda **inputs: run(**inputs) * 1.1

    def broken(model: nn.Module, setting: Setting) -> Callable[..., Tensor]:
        raise ValueError("no such thing")

    eagerly(monkeypatch)
    for name, prepare in (("ampgraph", slightly_off), ("ampgraph, weight copies", broken)):
        peer = dataclasses.replace(PEERS[name], prepare=prepare)
        monkeypatch.setitem(PEERS, name, peer)
    setting = Setting(CPU, torch.bfloat16, "infer")
    off, raised = comparing.compare("unet", "small", setting, rounds=1).wrong
    assert str(off.wrong).startswith("wrong output: 0.1 from float64")
    assert raised.wrong == "ValueError: no such thing"
    assert off.seconds is raised.seconds is off.ratio is off.peak is None


def test_peak_is_of_what_lives_at_one_time() -> None:
    def call() -> Tensor:
        first = torch.zeros(1_000_000)
        second = first.mul(first)
        del first
        return second.mul(second)

    assert 8_000_000 <= peak_bytes(call, CPU) < 8_100_000


def test_command_saves_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    eagerly(monkeypatch)
    asked = ["cpu", "--case", "unet", "--task", "infer", "--rounds", "1", "--out", str(tmp_path)]
    assert front.main(asked) == 0
    saved = json.loads((tmp_path / "cpu.json").read_text())
    assert saved["machine"]["torch"] == torch.__version__
    (comparison,) = saved["comparisons"]
    assert comparison["case"] == "unet"
    assert [row["peer"] for row in comparison["rows"]] == list(PEERS)
    assert "eager autocast" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run for minutes")
def test_gpu_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no GPU here: see `python -m benchmarks cpu`"):
        front.main(["gpu", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_gpu_order_names_cases() -> None:
    size: Size = "full"
    for case, task, _ in gpu.ORDER:
        assert (size, task) in CASES[case].shapes
