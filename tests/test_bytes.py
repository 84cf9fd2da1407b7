"""The tables of `python -m benchmarks bytes`."""

import json
from typing import Any

import pytest

import fakecuda_runs
from ampgraph.fakecuda.child import in_child
from benchmarks import bytes as bytes_moved
from benchmarks.bytes import ModelRow, StepRow


@pytest.fixture(scope="module")
def moved() -> tuple[list[StepRow], float]:
    found: tuple[list[StepRow], float] = in_child(fakecuda_runs.moved)
    return found


@pytest.fixture(scope="module")
def steps(moved: tuple[list[StepRow], float]) -> list[StepRow]:
    return moved[0]


def test_our_steps_move_at_most_36_bytes(steps: list[StepRow]) -> None:
    captured, fused, *_ = steps
    assert round(captured.total, 1) == 32.0
    assert round(fused.total, 1) == 36.0
    assert round(captured.clip, 1) == 4.0, "gradients are read once"
    assert round(captured.step, 1) == 28.0, "p, g, m, v are read; p, m, v written"


def test_the_peers_move_more(steps: list[StepRow]) -> None:
    fused, foreach = steps[2:]
    assert round(fused.total, 1) == 48.0
    assert round(foreach.total, 1) == 100.0


def test_the_generated_clip_reads_once(moved: tuple[list[StepRow], float]) -> None:
    """The op is counted by its schema in the table; this is its code."""
    assert round(moved[1], 1) == 4.0


def test_the_kept_table_is_what_is_counted(steps: list[StepRow]) -> None:
    kept: dict[str, Any] = json.loads(bytes_moved.RESULTS.read_text())
    assert [row["way"] for row in kept["step"]] == [row.way for row in steps]
    for row, now in zip(kept["step"], steps, strict=True):
        assert round(row["total"], 1) == round(now.total, 1)


@pytest.fixture(scope="module")
def models() -> list[ModelRow]:
    found: list[ModelRow] = in_child(bytes_moved.model_rows, "h200", bytes_moved.LOADS[:1])
    return found


def test_one_token_moves_each_weight_once_and_autocast_four_times(models: list[ModelRow]) -> None:
    autocast, ours, copied, low = models
    weights = 66.98  # millions of elements in matrices, the tied one once
    assert low.megabytes == pytest.approx(2 * weights, rel=0.01)
    assert low.casts == 0
    assert autocast.casts == pytest.approx(6 * weights, rel=0.01), "4 bytes read, 2 written"
    assert autocast.megabytes == pytest.approx(8 * weights, rel=0.01)
    assert ours.megabytes <= autocast.megabytes
    assert copied.megabytes <= 1.02 * low.megabytes
    assert copied.casts == 0, "weights are read from their copies"


def test_the_kept_models_are_what_is_counted(models: list[ModelRow]) -> None:
    check_kept(models)


@pytest.mark.slow
def test_the_larger_kept_models_are_what_is_counted() -> None:
    check_kept(in_child(bytes_moved.model_rows, "h200", bytes_moved.LOADS[1:]))


def check_kept(rows: list[ModelRow]) -> None:
    """Versions of torch fuse a little differently."""
    kept = {
        (row["load"], row["way"]): row
        for row in json.loads(bytes_moved.RESULTS.read_text())["model"]
    }
    for row in rows:
        assert kept[row.load, row.way]["megabytes"] == pytest.approx(row.megabytes, rel=0.01)
        assert kept[row.load, row.way]["casts"] == pytest.approx(row.casts, rel=0.01)
