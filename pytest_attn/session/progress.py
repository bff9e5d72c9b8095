"""What a terminal shows while fresh processes confirm a suspect: which of them runs, and nothing once they are done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest

#: save the cursor's place; clear to the end of the line; back to the place
_SAVE, _CLEAR, _RESTORE = "\x1b7", "\x1b[K", "\x1b8"


def confirmation_progress(config: pytest.Config, name: str, processes: int) -> Callable[[int], None]:
    """Return what shows, behind pytest's own line, how many of the processes that time `name` again are done.

    Silent where the output is no terminal, and in an xdist worker.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not reporter.isatty:
        return lambda done: None
    capture = config.pluginmanager.get_plugin("capturemanager")

    def show(done: int) -> None:
        room = reporter._tw.fullwidth - reporter._tw.width_of_current_line - 1
        text = f" timing {name} again, fresh process {done + 1} of {processes}" if done < processes else ""
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            reporter._tw._file.write(f"{_SAVE}{text[: max(room, 0)]}{_CLEAR}{_RESTORE}")
            reporter._tw._file.flush()

    return show
