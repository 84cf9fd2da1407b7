"""The tables of `python -m benchmarks bytes`."""

import json
from typing import Any

import pytest

import fakecuda_runs
from ampgraph.fakecuda.child import in_child
from benchmarks import bytes as bytes_moved
from benchmarks.bytes import StepRow


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
