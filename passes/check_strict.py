"""Check that Inductor can be bit-equal to eager autocast on a graph, or say where it cannot."""

from typing import Any

from torch import fx


def check_strict(gm: fx.GraphModule, inner: Any) -> None:
    """To be filled."""
