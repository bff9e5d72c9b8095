"""How a user's function declines a case: `raise NotImplementedError("no softcap")`, a statement of Python with a text."""

from __future__ import annotations

import dis
from types import TracebackType

#: libraries whose own NotImplementedError is a missing kernel or a missing gradient, which is a fault of who calls them
_FAULTS_OF = ("torch", "triton")


def declined_because(error: BaseException) -> str | None:
    """Return the text with which a function declines a case, None where the exception is a fault.

    A fault is what torch or Triton raise ("Could not run 'aten::...'", a missing backward), and an exception without text,
    as a stub raises it.
    """
    text = str(error).strip()
    if not isinstance(error, NotImplementedError) or not text or not _is_raised_by_its_author(error.__traceback__):
        return None
    return text.splitlines()[0]


def _is_raised_by_its_author(traceback: TracebackType | None) -> bool:
    """Whether the innermost frame is a `raise` statement, and none of torch or Triton: operators in C++ raise without one."""
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    home = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    operation = dis.opname[frame.f_code.co_code[traceback.tb_lasti]]
    return operation == "RAISE_VARARGS" and home not in _FAULTS_OF
