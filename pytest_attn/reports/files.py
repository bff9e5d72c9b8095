"""Files, written atomically, by one process at a time, and to their end; temporary folders, which go with their process."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import FileLock

#: for surrogates, as of paths in another encoding, which UTF-8 cannot say: in JSON their escape reads as what they were
ESCAPED = "backslashreplace"
#: seconds that a process waits for another one that writes, and between its tries
_PATIENCE, _A_TRY = 60.0, 0.01


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
    with ProcessFolder(base=target.parent) as folder:
        unfinished = Path(folder, target.name)
        with open(unfinished, "x", encoding="utf-8", errors=ESCAPED, newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # those that it has; a new file has what the umask leaves
        if target.exists() and (mode := stat.S_IMODE(target.stat().st_mode)) != stat.S_IMODE(unfinished.stat().st_mode):
            os.chmod(unfinished, mode)
        os.replace(unfinished, target)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let the block come to its end before an interrupt does what it does."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def written_alone(folder: Path) -> Iterator[None]:
    """Let no other process that asks for this write into a folder meanwhile. Raises OSError where one does so for a minute.

    The folder itself is locked, so that no file is left; where a file system cannot, one of the system's temporary folder.
    """
    end = time.monotonic() + _PATIENCE
    busy = TimeoutError(f"another process has been writing into {folder} for {_PATIENCE:.0f} s")
    with ExitStack() as held:
        descriptor = os.open(folder, os.O_RDONLY)
        held.callback(os.close, descriptor)
        try:
            is_locked = _locks(descriptor)
        except OSError:
            try:
                held.enter_context(_lock_named_after(folder))
            except TimeoutError:
                raise busy from None
            is_locked = True
        while not is_locked:
            if time.monotonic() > end:
                raise busy
            time.sleep(_A_TRY)
            is_locked = _locks(descriptor)
        yield


def _lock_named_after(folder: Path) -> FileLock:
    from filelock import FileLock

    name = f"pytest-attn-{zlib.crc32(os.path.realpath(folder).encode()):08x}.lock"
    return FileLock(os.path.join(tempfile.gettempdir(), name), timeout=_PATIENCE, mode=0o666)


def _locks(descriptor: int) -> bool:
    """Return whether what is open could be locked, until it is closed; False where another process holds it."""
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


# -- folders of processes --------------------------------------------------------------------------------------------------

_PREFIX, _HELD = ".pytest-attn-", ".held"


class ProcessFolder:
    """A temporary folder; where its process is killed, the next one of the same user that makes one there removes it.

    It is held by a lock on a file in it, which the system releases with the process, and those that it has forked.
    """

    def __init__(self, name: str = "", base: str | Path | None = None) -> None:
        remove_left(Path(base or tempfile.gettempdir()))
        held = -1
        while held < 0:  # again where another process took it for one that was left
            self.name = tempfile.mkdtemp(prefix=f"{_PREFIX}{name}", dir=base)
            held = _hold(Path(self.name))
        self.cleanup = weakref.finalize(self, _remove, Path(self.name), held)

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *raised: object) -> None:
        self.cleanup()


def remove_left(base: Path) -> None:
    """Remove the folders in a folder that processes of this user have left behind which were killed."""
    for folder in base.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
                continue
            if not (folder / _HELD).exists():
                folder.rmdir()  # only just made, or removed but for itself
                continue
            descriptor = os.open(folder / _HELD, os.O_RDWR | os.O_NOFOLLOW)
            if _is_free(descriptor):
                _remove(folder, descriptor)
            else:
                os.close(descriptor)


def _remove(folder: Path, held: int) -> None:
    """Remove a folder, and last what holds it, without which nobody could tell that it is ours."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _HELD:
                path.unlink()
    os.close(held)
    shutil.rmtree(folder, ignore_errors=True)


def _hold(folder: Path) -> int:
    """Lock a file in a new folder; return its descriptor, -1 where another process has removed the folder meanwhile."""
    try:
        held = os.open(folder / _HELD, os.O_CREAT | os.O_RDWR, 0o600)
    except FileNotFoundError:
        return -1
    except OSError:
        folder.rmdir()
        raise
    _is_free(held, waits=True)  # or its system has no such locks
    if (folder / _HELD).exists():
        return held
    os.close(held)
    return -1


def _is_free(descriptor: int, waits: bool = False) -> bool:
    """Lock a file, where no other process has, or once none has; return whether that could be done."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except OSError:
        return False
    return True
