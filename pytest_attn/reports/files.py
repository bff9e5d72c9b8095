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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

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
    try:
        own = ProcessFolder(base=target.parent)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None  # not the name of the folder
    with own as folder:
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


class Lock:
    """A folder, or a file of its own, which one process holds at a time. The file leaves with it."""

    def __init__(self, path: Path, is_folder: bool = False) -> None:
        self.path, self._is_folder, self._descriptor = path, is_folder, -1

    @classmethod
    def named(cls, name: str) -> Lock:
        """Make one of a file in the system's temporary folder."""
        return cls(Path(tempfile.gettempdir(), f"pytest-attn-{name}.lock"))

    @property
    def is_held(self) -> bool:
        """True from `acquire` to the end of the `with` that it is for."""
        return self._descriptor >= 0

    def acquire(self, seconds: float) -> Lock:
        """Hold it. Raises TimeoutError where another process does so for so long, OSError where it cannot be locked."""
        end = time.monotonic() + seconds
        while not self._is_acquired():
            if time.monotonic() > end:
                raise TimeoutError(f"another process has held {self.path} for {seconds:.0f} s")
            time.sleep(_A_TRY)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        held = os.fstat(self._descriptor)
        if stat.S_ISREG(held.st_mode) and not held.st_size:  # else it was not made for this
            with suppress(OSError):  # another user's
                self.path.unlink()
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # of processes that were forked meanwhile, too
        os.close(self._descriptor)
        self._descriptor = -1

    def _is_acquired(self) -> bool:
        with suppress(FileNotFoundError, FileExistsError):  # of which another process has just taken away, or made
            descriptor = self._open()
            try:
                if _locks(descriptor) and os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                    self._descriptor = descriptor
            finally:
                if not self.is_held:
                    os.close(descriptor)
        return self.is_held

    def _open(self) -> int:
        if self._is_folder:
            return os.open(self.path, os.O_RDONLY)
        flags = os.O_RDWR | os.O_NOFOLLOW
        try:
            return os.open(self.path, flags)
        except FileNotFoundError:
            descriptor = os.open(self.path, flags | os.O_CREAT | os.O_EXCL)
            os.fchmod(descriptor, 0o666)  # for all users of the machine
            return descriptor


@contextmanager
def written_alone(folder: Path) -> Iterator[None]:
    """Let no other process that asks for this write into a folder meanwhile. Raises OSError where one does so for a minute.

    The folder itself is locked; where a file system cannot, a file.
    """
    try:
        lock = _lock_of(folder)
    except TimeoutError:
        raise TimeoutError(f"another process has been writing into {folder} for {_PATIENCE:.0f} s") from None
    with lock:
        yield


def _lock_of(folder: Path) -> Lock:
    try:
        return Lock(folder, is_folder=True).acquire(_PATIENCE)
    except TimeoutError:
        raise
    except OSError:
        return Lock.named(f"{zlib.crc32(os.path.realpath(folder).encode()):08x}").acquire(_PATIENCE)


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
