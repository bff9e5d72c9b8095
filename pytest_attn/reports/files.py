"""Files, written atomically and by one process at a time; knows nothing of this project."""

import errno
import os
import secrets
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

#: for surrogates, as of paths in another encoding, which UTF-8 cannot say: in JSON their escape reads as what they were
ESCAPED = "backslashreplace"
#: seconds that a process waits for another one that writes
_PATIENCE = 60.0


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
        # those that it has; a new file has what the umask leaves
        if target.exists() and (mode := stat.S_IMODE(target.stat().st_mode)) != stat.S_IMODE(unfinished.stat().st_mode):
            os.chmod(unfinished, mode)
        os.replace(unfinished, target)
    except BaseException:  # an interrupt as well
        with suppress(OSError):
            unfinished.unlink()
        raise


@contextmanager
def written_alone(folder: Path) -> Iterator[None]:
    """Let no other process that asks for this write into a folder meanwhile. Raises OSError where one does so for a minute.

    A file of the system's temporary folder is locked, so that none is left in this one.
    """
    from filelock import FileLock, Timeout

    name = f"pytest-attn-{zlib.crc32(os.path.realpath(folder).encode()):08x}.lock"
    try:
        with FileLock(os.path.join(tempfile.gettempdir(), name), timeout=_PATIENCE, mode=0o666):
            yield
    except Timeout:
        raise TimeoutError(f"another process has been writing into {folder} for {_PATIENCE:.0f} s") from None
