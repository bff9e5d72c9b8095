"""How long a process lives: a worker no longer than the one that waits for it, a run until it has come to its own end."""

import functools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

#: set in a worker, which takes it out: the descriptor of its channel, and the process that started it
CHANNEL_VARIABLE = "PYTEST_ATTN_CHANNEL"
_DIE_WITH_PARENT, _SIGKILL = 1, 9  # PR_SET_PDEATHSIG of prctl(2)


def inherited_channel() -> int | None:
    """Return the descriptor of this process's channel, and let it end with its starter; None for any other process."""
    if CHANNEL_VARIABLE not in os.environ:
        return None
    descriptor, parent = map(int, os.environ.pop(CHANNEL_VARIABLE).split())
    die_with(parent)
    return descriptor


def die_with(parent: int) -> None:
    """Have this process end at once when the thread that started it does, or now if that is over. Linux only.

    parent: the process of that thread, 0 where the thread may end before.
    """
    if sys.platform != "linux" or not parent:
        return
    import ctypes

    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, _SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def replace_exits(
    leave: Callable[[str, int, Callable[[int], NoReturn]], NoReturn],
    may_go_on_as: Callable[[FrameType], bool] = lambda caller: False,
) -> Callable[[], None]:
    """Have `leave` decide where Python code is about to end this process at once; return what puts everything back.

    leave: is given what was called, the status that the process would end with, and what really ends it. may_go_on_as: whether
    its caller may have another program take the place of this one. A forked child ends as it likes.
    """
    process, really = os.getpid(), os._exit
    replaced: list[tuple[Any, str, Any]] = []

    def guarded(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)  # pickled by its name, for a process that multiprocessing starts
        def end(*args: Any, **keywords: Any) -> Any:
            if os.getpid() != process or (name != "_exit" and may_go_on_as(sys._getframe(1))):
                return real(*args, **keywords)
            status = int(args[0] if args else keywords.get("status", 0)) if name == "_exit" else 0
            return leave(f"os.{name}({status if name == '_exit' else '...'})", status, really)

        return end

    for name in ("_exit", "execv", "execve"):
        guard = guarded(name, getattr(os, name))
        for module in filter(None, map(sys.modules.get, ("os", "posix", "nt"))):
            if hasattr(module, name):
                replaced.append((module, name, getattr(module, name)))
                setattr(module, name, guard)

    def put_back() -> None:
        for module, name, real in replaced:
            setattr(module, name, real)

    return put_back


def keep_status(status: Callable[[], int | None]) -> Callable[[], None]:
    """Have this process not end with 0 unless that is the status of its run; return what puts everything back.

    status: of the run, None until it is known. What code has taken hold of before then, say for its end, stays as it is. A
    conftest.py may have pytest start anew in its place, in another environment.
    """
    stderr = -1
    with suppress(OSError):  # where there is none
        stderr = os.dup(2)  # before pytest captures it

    def leave(what: str, asked: int, really: Callable[[int], NoReturn]) -> NoReturn:
        known = status()
        if not asked and known is None:
            with suppress(OSError):
                os.write(stderr, f"\n{what} was called before the run had ended: it ends with status 1\n".encode())
        really(asked or (1 if known is None else known))

    put_back = replace_exits(leave, may_go_on_as=_is_of_conftest)

    def end() -> None:
        put_back()
        with suppress(OSError):
            os.close(stderr)

    return end


def _is_of_conftest(caller: FrameType) -> bool:
    """Return whether a conftest.py has come to a frame by calls alone: not what it has imported."""
    frame: FrameType | None = caller
    while frame is not None:
        if Path(frame.f_code.co_filename).name == "conftest.py":
            return True
        if frame.f_code.co_filename.startswith("<frozen importlib") or "pluggy" in frame.f_globals.get("__name__", ""):
            return False
        frame = frame.f_back
    return False
