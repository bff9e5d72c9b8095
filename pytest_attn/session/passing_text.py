"""A text on a terminal that stands behind what pytest has printed, and is gone before pytest prints on; or a line of a log."""

import os
import sys
import time
from contextlib import suppress
from threading import RLock
from typing import Any
from unicodedata import east_asian_width

import pytest

from pytest_attn.reports.lines import terminal_width
from pytest_attn.session.pytest_versions import TerminalReporter, verbosity_of

#: how long a log stays silent, in seconds: some hosts end a job that prints nothing for minutes
LOG_SECONDS = 30.0
#: erases a terminal's line from the cursor on; moves the cursor to the line above
_ERASE, _UP = "\x1b[K", "\x1b[A"


class PassingText:
    """A text behind what pytest has printed, or on the line below where there is no room.

    Nothing is shown where the output goes to a file, in an xdist worker, in a process that another one waits for, and under
    -s, where tests print for themselves; a log may have lines then.
    """

    def __init__(self, config: pytest.Config, is_child: bool = False) -> None:
        """Open the terminal; a config whose output is not captured yet."""
        self._config = config
        self.lock = RLock()  # texts come from a thread as well
        self._taken_back = ""  # what must be written for the text to be gone
        #: the terminal under a descriptor of our own: pytest's leads into a file while a test runs
        self._terminal = None if is_child else _terminal_of(config)
        self._log = None if is_child or self.is_watched else _log_of(config)
        self.printed_at = time.monotonic()
        if self.is_read:
            config.add_cleanup(self.close)

    @property
    def is_watched(self) -> bool:
        """Whether somebody sees what is shown."""
        return self._terminal is not None

    @property
    def is_read(self) -> bool:
        """Whether somebody sees what is shown, or reads it later in a log."""
        return self.is_watched or self._log is not None

    def give_way(self) -> None:
        """Take the text back from now on before pytest prints, whatever has it print."""
        writer = self._config.get_terminal_writer()
        write = writer.write

        def written(*text: Any, **markup: Any) -> None:
            with self.lock:
                self.clear()
                write(*text, **markup)
                if self.is_watched:
                    writer.flush()  # what is shown stands behind it
                self.printed_at = time.monotonic()

        writer.write = written  # type: ignore[method-assign]

    def show(self, text: str) -> None:
        """Show a text in place of the one before."""
        if not self.is_watched:
            return
        column, width = max(0, self._config.get_terminal_writer().width_of_current_line), self._width()
        text = "".join(letter if letter.isprintable() else "?" for letter in text)
        if column and column % width == 0:
            return  # the cursor behind a full line cannot be put back: what comes next would stand elsewhere
        column %= width  # of a line that goes on below
        if column + _columns(text) + 3 <= width:
            shown, taken_back = f"  {text}\x1b[{_columns(text) + 2}D", _ERASE
        else:
            while _columns(text) > width - 3:
                text = text[:-1]
            home = f"\r{_UP}" + (f"\x1b[{column}C" if column else "")
            shown, taken_back = f"\n\r{_ERASE}  {text}{home}", f"\n\r{_ERASE}{home}"
        with self.lock:
            self._write(self._taken_back + shown)
            self._taken_back = taken_back

    def log(self, text: str) -> None:
        """Write a line to the log, where nothing was printed for long."""
        now = time.monotonic()
        if self._log is not None and now - self.printed_at >= LOG_SECONDS:
            self.printed_at = now
            with suppress(OSError):
                os.write(self._log, f"\nattn: {text}\n".encode(errors="replace"))

    def clear(self) -> None:
        """Take the text back: pytest goes on where it stood."""
        with self.lock:
            if self._taken_back:
                self._write(self._taken_back)
            self._taken_back = ""

    def close(self) -> None:
        """Show nothing any more."""
        with self.lock:
            self.clear()
            for one in (self._terminal, self._log):
                if one is not None:
                    os.close(one)
            self._terminal = self._log = None

    def _width(self) -> int:
        """Ask the terminal itself: pytest asks a file while a test runs, and gets 80."""
        return terminal_width(1 if self._terminal is None else self._terminal)

    def _write(self, text: str) -> None:
        """Write past pytest's writer, whose count of columns is about what pytest has printed."""
        if self._terminal is not None:
            os.write(self._terminal, text.encode(errors="replace"))


def _terminal_of(config: pytest.Config) -> int | None:
    """Open the terminal that this process may write to; None where there is none."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    has_logs = config.pluginmanager.hasplugin("logging") and config.getini("log_cli")
    is_shared = config.getoption("capture", "no") != "fd" or has_logs  # tests or their logs write as well
    if not is_terminal or is_shared or not _is_printer(config, least=-1):
        return None
    return _descriptor(sys.stdout)


def _log_of(config: pytest.Config) -> int | None:
    """Open the log that this process may write lines to; None where there is none, or where -q asks for less."""
    return _descriptor(sys.stderr) if _is_printer(config, least=0) else None


def _is_printer(config: pytest.Config, least: int) -> bool:
    """Whether it is pytest's own reporter that prints, in this process, and no bars of others; at least so much."""
    is_plain = type(config.pluginmanager.get_plugin("terminalreporter")) is TerminalReporter
    return is_plain and not hasattr(config, "workerinput") and verbosity_of(config) >= least


def _descriptor(stream: Any) -> int | None:
    try:
        return os.dup(stream.fileno())
    except (AttributeError, OSError, ValueError):  # something in its place that only says it is a terminal
        return None


def _columns(text: str) -> int:
    """Count the columns of a terminal that a text takes."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)
