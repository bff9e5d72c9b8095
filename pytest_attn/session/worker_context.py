"""What a new process knows: a worker that times what the one that waits for it has checked, or runs what may end it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from pytest_attn.processes.worker import Worker

#: seconds after the gate was opened within which a process finds the device as warm as the one before has left it
_WARM_SECONDS = 2.0


class WorkerContext:
    """What the process that waits for this one has sent to it.

    number: of this process among those that time the same. selected_invariants: those that it runs instead of timing.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, told = worker, worker.told
        self.number: int = told.get("number", 0)
        self.selected_invariants: tuple[str, ...] = tuple(told.get("invariants", ()))
        self._modes: Mapping[str, str] = told.get("modes", {})
        self._was_warm_at = -math.inf

    @classmethod
    def of_this_process(cls) -> WorkerContext | None:
        """Return what this process knows, None where nobody waits for it."""
        worker = Worker.of_this_process()
        return cls(worker) if worker else None

    def wait_at_gate(self) -> None:
        """Wait until others have been timed, where this process was prepared beside them."""
        self._was_warm_at = time.monotonic() if self._worker.wait_at_gate() else -math.inf

    @property
    def finds_device_warm(self) -> bool:
        """Whether another process timed on the device until the gate was opened for this one, a moment ago."""
        return time.monotonic() - self._was_warm_at < _WARM_SECONDS

    def mode_of(self, key: str) -> str | None:
        """Return the mode in which a case is timed for its new baseline; None where it is for none."""
        return self._modes.get(key)

    def return_result(self, result: Mapping[str, Any]) -> None:
        """Hand a time or a finding, in builtin types, to the process that waits for it."""
        self._worker.channel.send(**result)
