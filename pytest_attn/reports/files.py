"""Files, written atomically and by one process at a time; knows nothing of this project."""

import errno
import os
import secrets
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
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
        _copy_permissions(target, unfinished)
        os.replace(unfinished, target)
    except BaseException:  # an interrupt as well
        with suppress(OSError):
            unfinished.unlink()
        raise


@contextmanager
def written_alone(folder: Path) -> Iterator[None]:
    """Let no other process that asks for this write into a folder meanwhile. Raises OSError where one does so for a minute.

    The folder itself is locked, so that no file is left in it; on a system that cannot, a file of its temporary folder.
    """
    until = time.monotonic() + _PATIENCE
    with _locking(folder) as is_locked:
        while not is_locked():
            if time.monotonic() > until:
                raise TimeoutError(f"another process has been writing into {folder} for {_PATIENCE:.0f} s")
            time.sleep(0.01)
        yield


@contextmanager
def _locking(folder: Path) -> Iterator[Callable[[], bool]]:
    """Give the block what tries to lock a folder until the block ends, and returns whether it has."""
    try:
        import fcntl
    except ImportError:  # Windows
        name = f"pytest-attn-{zlib.crc32(os.path.realpath(folder).encode()):08x}.lock"
        from filelock import FileLock

        lock = FileLock(os.path.join(tempfile.gettempdir(), name), timeout=_PATIENCE)
        with lock:
            yield lambda: True
        return

    def is_locked() -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield is_locked
    finally:
        os.close(descriptor)


def _copy_permissions(source: Path, target: Path) -> None:
    """Give `target` the permissions of `source`, where there is one; a new file has those that the umask leaves."""
    if source.exists() and (mode := stat.S_IMODE(source.stat().st_mode)) != stat.S_IMODE(target.stat().st_mode):
        os.chmod(target, mode)
