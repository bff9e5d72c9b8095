"""Write a file atomically; knows nothing of this project."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path


def write_atomically(path: str | Path, text: str) -> None:
    """Put a text in place of a file; raise OSError where that fails, and leave the file as it was.

    A link stays one, and a file keeps its permissions. What is not a plain file, such as a device, is not replaced.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "is not a plain file", str(path))
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        with open(unfinished, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _copy_permissions(target, unfinished)
        os.replace(unfinished, target)
    except BaseException:  # an interrupt as well
        with suppress(OSError):
            unfinished.unlink()
        raise


def _copy_permissions(source: Path, target: Path) -> None:
    """Give `target` the permissions of `source`, where there is one; a new file has those that the umask leaves."""
    if source.exists() and (mode := stat.S_IMODE(source.stat().st_mode)) != stat.S_IMODE(target.stat().st_mode):
        os.chmod(target, mode)
