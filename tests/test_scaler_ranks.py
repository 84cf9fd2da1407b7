"""One loss scale over several ranks: DDP, FSDP 1 and 2, tensor parallel, by two gloo processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ampgraph.gradients import parts_of
from rank_runs import CHECKS, HOLDS, RANKS

PROGRAM = Path(__file__).with_name("rank_runs.py")
SECONDS = 480  # a hang fails; gloo itself gives up after 30


@pytest.fixture
def outcomes(tmp_path: Path) -> list[dict[str, str]]:
    """For each rank what became of each check."""
    root = str(PROGRAM.parent.parent)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(PROGRAM), str(rank), str(tmp_path)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in RANKS
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    files = [tmp_path / f"{rank}.json" for rank in RANKS]
    assert all(file.exists() for file in files), "\n".join(said)
    return [json.loads(file.read_text()) for file in files]


def test_two_ranks(outcomes: list[dict[str, str]], subtests: pytest.Subtests) -> None:
    """One pair of processes for all checks: to start one takes longer than most of them."""
    for check in CHECKS:
        with subtests.test(check.__name__):
            found = [outcome.get(check.__name__, "not reached") for outcome in outcomes]
            assert found == [HOLDS] * 2, "\n".join(found)


def test_gradients_on_several_devices_are_read_apart() -> None:
    """With meta for the other device, complex gradients as pairs of reals."""
    params = [torch.ones(2, device=device) for device in ("cpu", "meta", "cpu")]
    params.append(torch.ones(3, dtype=torch.complex64, device="meta"))
    for param in params:
        param.grad = torch.ones_like(param)
    parts = parts_of(torch.optim.SGD(params), allow_fp16=False)
    found = [(part.device.type, [tuple(g.shape) for g in part.grads]) for part in parts]
    assert found == [("cpu", [(2,), (2,)]), ("meta", [(2,), (3, 2)])]
    assert all(part.ranks == () for part in parts), "nobody is waited for"
