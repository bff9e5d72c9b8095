"""The last words of a process that has ended: what it printed, how it ended, where it stood."""

import re
import signal
from collections.abc import Callable

#: a line of pytest, or of a traceback's end, that says what went wrong
_ERROR = re.compile(r"E  |\w*Error|ERROR|INTERNALERROR> \w*Error")
_LONGEST = 300
#: frames that are shown at either end of a long stack
_INNERMOST, _OUTERMOST = 4, 8


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


def stack_of(text: str, ends_stack: Callable[[str], bool], is_hidden: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the main thread's frames from faulthandler's text, the innermost first; a long stack without its middle.

    ends_stack: whether a file is of the machinery, where the user's own frames end. is_hidden: whether it says nothing.
    """
    _, _, main = text.rpartition("Current thread ")
    frames: list[str] = []
    for line in main.splitlines()[1:]:
        match = re.match(r'  File "(.*)", line (\d+) in (.*)', line)
        if not match or ends_stack(match[1]):
            break
        if not is_hidden(match[1]):
            frames.append(f"{match[1]}:{match[2]} in {match[3]}")
    if len(frames) > _INNERMOST + _OUTERMOST:
        frames[_INNERMOST:-_OUTERMOST] = ["..."]
    return tuple(frames)
