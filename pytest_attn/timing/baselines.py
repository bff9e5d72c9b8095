"""The baselines of a run: the file of each device, read when a case first asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_attn.latency.baseline import Baseline
from pytest_attn.latency.identity import identify
from pytest_attn.latency.judge import DeviceBaselines
from pytest_attn.session.session import AttentionSession
from pytest_attn.timing.measurement import Measurement

if TYPE_CHECKING:
    import torch


class RunBaselines:
    """What was recorded for the devices of a run, in the folder of --attn-baselines."""

    def __init__(self, session: AttentionSession) -> None:
        self._session = session
        self._read: dict[str, DeviceBaselines] = {}

    def on(self, device: torch.device) -> DeviceBaselines:
        """Return the baselines of a device."""
        if str(device) not in self._read:
            identity = identify(device, self._session.machines.machine(str(device)))
            self._read[str(device)] = DeviceBaselines.read(self._session.baselines_folder, identity, device.type)
        return self._read[str(device)]

    def of(self, measurement: Measurement) -> Baseline | None:
        """Return a case's baseline, of whatever protocol and shape."""
        return self.on(measurement.spec.device).of(measurement.key)
