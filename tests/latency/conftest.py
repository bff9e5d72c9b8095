"""The stand-in of NVML, its GPU and its clock; the devices that are timed here."""

import pytest
from fakes.driver import ME, Clock
from fakes.gpus import two_gpus
from judging import DEVICES

from pytest_attn.latency import disturbance


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(disturbance, "time", clock)
    return clock


@pytest.fixture
def nvml(monkeypatch, tmp_path, clock):
    with two_gpus(monkeypatch, tmp_path) as nvml:
        nvml.GPUS[1].pids = [ME]
        yield nvml


@pytest.fixture
def gpu(nvml):
    return nvml.GPUS[1]


@pytest.fixture(params=DEVICES, ids=str)
def device(request):
    return request.param
