"""The last words of a process that has ended: what it printed, how it ended."""

import os
import re
import signal
import stat
from pathlib import Path

#: a line of pytest, or of a traceback's end, that says what went wrong
_ERROR = re.compile(r"E  |\w*Error|ERROR|Fatal Python error|fatal: |INTERNALERROR> \w*Error")
_LONGEST = 300


def end_of_output(path: Path, most: int = 1 << 24) -> str:
    """Return at most so many last bytes of a file of what a process printed; "" of what it has put in the file's place."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return ""
        file.seek(max(0, status.st_size - most))
        return file.read(most).decode(errors="replace")


def last_words(output: str, silence: str = "it said nothing") -> str:
    """Return the last error that a process has printed, else its last line; `silence` where there is none."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or [silence])[-1][:_LONGEST]


def ending(returncode: int | None) -> str:
    """Say how a process has ended, by its return code; None where nobody knows."""
    if returncode is None:
        return "has ended"
    if returncode < 0:
        try:
            return f"was killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"was killed by signal {-returncode}"
    return f"has left the interpreter with exit code {returncode}"
