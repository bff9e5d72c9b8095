"""A file that is written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | Path, text: str) -> None:
    """Put a text in place of a file; raise OSError where that fails, and leave the file as it was."""
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(target)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
