"""TORCH_LOGS="+ampgraph" shows the decisions and what each pass changed."""

import os
import subprocess
import sys

PROGRAM = """
import torch

model = torch.compile(torch.nn.Linear(4, 4), backend="ampgraph", options={"inner": "eager"})
model(torch.randn(2, 4))
"""


def logs(setting: str | None) -> str:
    rest = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=rest | ({"TORCH_LOGS": setting} if setting else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


def test_decisions_and_pass_diffs_are_logged() -> None:
    told = logs("+ampgraph")
    assert "aten.linear in torch.bfloat16 (cpu autocast list: lower_precision_fp)" in told
    assert "insert_casts: aten._to_copy +3" in told
    assert "restore_outputs: aten._to_copy +1" in told
    assert "fold_casts: no change" in told


def test_one_module_can_be_asked() -> None:
    told = logs("+ampgraph.pipeline")
    assert "insert_casts" in told
    assert "lower_precision_fp" not in told


def test_quiet_by_default() -> None:
    assert "ampgraph" not in logs(None)
