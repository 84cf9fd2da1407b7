"""Attributes of other modules, replaced for a while."""

import contextlib
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import torch

from ampgraph.errors import FakeCudaError

_MISSING = object()


@contextlib.contextmanager
def replaced(owner: Any, new: Mapping[str, Any], *, made: bool = False) -> Generator[None]:
    """Inside, `owner` (a module, a class, an object) has these attributes; afterwards its own.

    Args:
        made: some of the attributes may not be there yet.

    Raises:
        FakeCudaError: one is not there: this torch has it elsewhere, or not any more.
    """
    before = {name: vars(owner).get(name, _MISSING) for name in new}
    gone = [name for name in new if not hasattr(owner, name)]
    if gone and not made:
        raise FakeCudaError(
            f"torch {torch.__version__} has no {', '.join(gone)} in {owner!r}",
            cure="use a version of torch that ampgraph supports",
        )
    try:
        for name, value in new.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def there(owner: Any, names: Iterable[str]) -> list[str]:
    """Those of the names that this version of torch has."""
    return [name for name in names if hasattr(owner, name)]
