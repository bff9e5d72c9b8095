"""A file that is written whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write_whole(path: str | Path, text: str) -> None:
    """Put a text in place of a file; raise OSError where that fails, and leave the file as it was.

    A link stays one, and what is no plain file, such as a device, is not replaced.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "is no plain file", str(path))
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(target)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
