"""A GPU is kept at work until it runs as fast as it will: one that idled, or whose power was capped just now, is slower."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from pytest_attn.latency.anchors import MEMORY, Anchor, anchor_item
from pytest_attn.latency.cuda_timer import BacklogError
from pytest_attn.latency.disturbance import DisturbanceMonitor
from pytest_attn.latency.timer import Timer

#: seconds of work that bring an idle GPU to its clock, once per process
_RAMP_SECONDS = 1.0
#: seconds of it where another process worked until some two seconds ago
_WARM_RAMP_SECONDS = 0.3
#: seconds of work right before the blocks: a GPU that was idle takes up to 0.8 % more, or less, than one that worked
_WARMING_SECONDS = 0.1
#: seconds for which a GPU whose power is capped is given time to have its clock back; if it stays capped, it is timed so,
#: and not given time again
_RECOVERY_SECONDS = 0.5
#: seconds of light work meanwhile before NVML is asked again
_LIGHT_SECONDS = 2e-3


class Warmer:
    """Keeps a device busy with its anchors."""

    def __init__(self, timer: Timer, anchors: Mapping[str, Anchor], monitor: DisturbanceMonitor) -> None:
        self._timer, self._anchors, self._monitor = timer, anchors, monitor
        self._recovery_seconds = _RECOVERY_SECONDS

    def ramp_up(self, is_warm: bool = False) -> None:
        """Bring an idle device to its clock; is_warm: one that another process has just left."""
        self._work(_WARM_RAMP_SECONDS if is_warm else _RAMP_SECONDS)

    def warm_up(self) -> float:
        """Work right before the blocks, until the power is no longer capped; return the seconds of waiting for that."""
        self._work(_WARMING_SECONDS)
        begun = time.perf_counter()
        late = begun + self._recovery_seconds
        while (is_capped := self._monitor.is_capped()) and time.perf_counter() < late:
            self._work(_LIGHT_SECONDS, MEMORY)  # which draws less power
        self._recovery_seconds = 0.0 if is_capped else _RECOVERY_SECONDS
        return time.perf_counter() - begun

    def _work(self, seconds: float, *names: str) -> None:
        """Keep the device busy with the anchors of these names, or all."""
        items = [anchor_item(name, self._anchors[name]) for name in names or self._anchors] * 4
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            with suppress(BacklogError):
                self._timer.block(items)
