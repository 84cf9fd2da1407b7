"""Files are written whole or not at all."""

import errno
import os
import uuid
from pathlib import Path


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a whole file or none: a reader never meets half of it, nor does a crash leave one.

    A link is followed, so that it still leads to the file.
    """
    target = Path(path).resolve()
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "There is no such folder", str(target.parent))
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with draft.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
