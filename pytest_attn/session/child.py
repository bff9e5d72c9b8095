"""A new process: a pytest that only times what another one, which waits for it, has checked, or asks what may end it."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: set in a new process: the file that its times go to
RUNS_VARIABLE = "PYTEST_ATTN_RUNS"
#: set in a new process: the processes that wait for it, whose GPU contexts do not count as a disturbance
OWN_VARIABLE = "PYTEST_ATTN_OWN"
#: set in a process that is asked some invariants, whose findings it hands over: their names
ASKED_VARIABLE = "PYTEST_ATTN_ASKED"
#: set in a new process that times for a new baseline: the file that says in which mode to time each case, by its key
MODES_VARIABLE = "PYTEST_ATTN_MODES"
#: seconds after its turn within which a process finds the device as warm as the one before has left it
_WARM_SECONDS = 2.0


class Child:
    """What this process got from the one that waits for it.

    asked: names of the invariants that it is asked instead of timing.
    """

    def __init__(self, runs: Path, modes: Mapping[str, str]) -> None:
        self._runs, self._modes = runs, modes
        self._was_warm_at = -math.inf
        self.asked = tuple(filter(None, os.environ.get(ASKED_VARIABLE, "").split(",")))

    @classmethod
    def of_this_process(cls) -> Child | None:
        """Return what this process got, None where nobody waits for it."""
        runs, modes = os.environ.get(RUNS_VARIABLE), os.environ.get(MODES_VARIABLE)
        if runs is None:
            return None
        return cls(Path(runs), json.loads(Path(modes).read_text(encoding="utf-8")) if modes else {})

    def wait_for_turn(self) -> None:
        """Wait until others have been timed, where this process was prepared beside them."""
        from pytest_attn.session.turns import wait_for_turn

        self._was_warm_at = time.monotonic() if wait_for_turn() else -math.inf

    @property
    def finds_device_warm(self) -> bool:
        """Whether another process timed on the device until this one's turn, which was a moment ago."""
        return time.monotonic() - self._was_warm_at < _WARM_SECONDS

    def mode_of(self, key: str) -> str | None:
        """Return the mode in which a case is timed for its new baseline; None where it is for none."""
        return self._modes.get(key)

    def hand_over(self, run: Mapping[str, Any]) -> None:
        """Hand a time or a finding to the process that waits for it: one line, written at once."""
        with self._runs.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(run)) + "\n")


def own_processes() -> frozenset[int]:
    """Return the processes that belong to this measurement: this one, and those that wait for it."""
    return frozenset([os.getpid(), *(int(pid) for pid in os.environ.get(OWN_VARIABLE, "").split(",") if pid)])
