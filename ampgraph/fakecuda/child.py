"""Functions run in a process of their own, where replacing CUDA's hooks harms nobody."""

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampgraph.errors import FakeCudaError

SERVE = "import sys; from ampgraph.fakecuda.child import serve; serve(*sys.argv[1:])"


@dataclass(frozen=True)
class Failure:
    """What went wrong in the child.

    Attributes:
        error: the exception, or a RuntimeError of the same words where it cannot be pickled.
        told: its traceback.
    """

    error: Exception
    told: str


class ChildTraceback(Exception):  # shown above the error it is the cause of
    """Where in the child it happened."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in a new process that sees no GPU, with this one's paths.

    Args:
        function: one that can be imported; it, the arguments and the result are pickled.

    Raises:
        FakeCudaError: the process died. Else what the function raised, with the child's traceback
        as its cause.
    """
    with tempfile.TemporaryDirectory() as place:
        asked, answered = Path(place) / "asked", Path(place) / "answered"
        asked.write_bytes(pickle.dumps((function, args)))
        paths = [path or os.getcwd() for path in sys.path]
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": "-1",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        done = subprocess.run(
            [sys.executable, "-P", "-c", SERVE, str(asked), str(answered)],
            env=environment,
            capture_output=True,
            text=True,
        )
        if not answered.exists():
            raise FakeCudaError(
                f"the process ended with {done.returncode} and no answer: "
                f"{done.stderr.strip()[-2000:]}"
            )
        answer = pickle.loads(answered.read_bytes())
    if not isinstance(answer, Failure):
        return answer
    raise answer.error from ChildTraceback(answer.told)


def serve(asked: str, answered: str) -> None:
    """The child's side: read the order, do it, write the answer whole."""
    warnings.simplefilter("ignore")  # nobody reads them
    try:
        function, args = pickle.loads(Path(asked).read_bytes())
        answer = pickle.dumps(function(*args))
    except Exception as error:
        answer = pickle.dumps(_failure(error))
    draft = Path(answered).with_suffix(".part")
    draft.write_bytes(answer)
    draft.replace(answered)


def _failure(error: Exception) -> Failure:
    told = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return Failure(RuntimeError(f"{type(error).__name__}: {error}"), told)
    return Failure(error, told)
