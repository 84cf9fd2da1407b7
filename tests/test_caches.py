"""A second process finds Inductor's and AOTAutograd's caches filled, as plain torch.compile."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("cache_program.py")
DOORS = ("plain", "backend", "compile", "copies")
# hits, misses and bypasses; forward and backward are two entries of Inductor's
HIT = {"aot": [1, 0, 0], "inductor": [2, 0, 0]}
MISS = {"aot": [0, 1, 0], "inductor": [0, 2, 0]}


def run(folder: Path, *arguments: str) -> dict[str, object]:
    """What the caches counted for each door, in a process of its own."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    command = [sys.executable, "-W", "ignore", str(PROGRAM), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    return found


def test_second_process_hits_and_another_policy_misses(tmp_path: Path) -> None:
    assert run(tmp_path) == dict.fromkeys(DOORS, MISS), "an empty folder"
    again = run(tmp_path, "again")
    assert again.pop("other policy") == MISS, "another graph is another key"
    assert again == dict.fromkeys(DOORS, HIT), "everything else is found"
