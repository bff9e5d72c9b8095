"""The last words of a process that has ended: what it printed, how it ended."""

import re
import signal

#: a line of pytest, or of a traceback's end, that says what went wrong
_ERROR = re.compile(r"E  |\w*Error|ERROR|INTERNALERROR> \w*Error")
_LONGEST = 300


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
