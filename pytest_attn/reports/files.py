"""Write a file atomically; knows nothing of this project."""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

#: for surrogates, as of paths that are no UTF-8, which UTF-8 cannot say: in JSON their escape reads as what they were
ESCAPED = "backslashreplace"


def write_atomically(path: str | Path, text: str) -> None:
    """Put a text in place of a file; raise OSError where that fails, and leave the file as it was.

    A link stays one, and a file keeps its permissions. What is not a plain file, such as a device, is not replaced.
    """
    with written_atomically(path) as file:
        file.write(text)


@contextmanager
def written_atomically(path: str | Path) -> Iterator[IO[str]]:
    """Put what the block writes in place of a file, in the same way; where the block raises, the file stays as it was."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "is not a plain file", str(path))
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        with open(unfinished, "x", encoding="utf-8", errors=ESCAPED, newline="\n") as file:
            yield file
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
