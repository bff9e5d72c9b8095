"""What NVML says of a GPU while it is timed, on GPUs of the tests; the clocks are locked in test_clocks.py."""

import pytest
from fakes.driver import CUDA, REASONS

from pytest_attn.latency.disturbance import DisturbanceMonitor


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x8, "hardware slowdown"),
        (0x20, "software thermal slowdown"),
        (0x40, "hardware thermal slowdown"),
        (0x80, "hardware power brake"),
        (0x48, "hardware thermal slowdown, hardware slowdown"),
        (0x1, None),
        (0x2, None),
        (0x4, None),
        (0x10, None),
        (0x100, None),
    ],
)
@pytest.mark.parametrize("names", ["both", "new library", "old library", "old driver"])
def test_some_reasons_disturb(nvml, gpu, monkeypatch, bits, words, names):
    if names == "new library":
        monkeypatch.delattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons")
    if names == "old library":
        monkeypatch.delattr(nvml, REASONS)
        monkeypatch.delattr(nvml, "nvmlDeviceGetFieldValues")
    if names == "old driver":
        gpu.faults[REASONS] = gpu.faults["nvmlDeviceGetFieldValues"] = nvml.NVML_ERROR_FUNCTION_NOT_FOUND
    monitor = DisturbanceMonitor.of(CUDA)
    monitor.begin()
    assert monitor.disturbance() is None
    gpu.reasons = bits
    assert monitor.disturbance() == words


def test_a_reason_that_ended_before_the_block_ended_is_gone(nvml, gpu):
    gpu.reasons = nvml.nvmlClocksEventReasonHwSlowdown
    monitor = DisturbanceMonitor.of(CUDA)
    monitor.begin()
    gpu.reasons = nvml.nvmlClocksEventReasonGpuIdle
    assert monitor.disturbance() is None


@pytest.mark.parametrize(
    ("counters", "key", "words"),
    [
        ("violations", 1, "thermal violation"),
        ("fields", 269, "software thermal slowdown"),
        ("fields", 270, "hardware thermal slowdown"),
        ("fields", 271, "hardware power brake"),
    ],
)
def test_a_counter_shows_what_no_reason_shows_any_more(nvml, gpu, counters, key, words):
    getattr(gpu, counters)[key] = 5_000
    monitor = DisturbanceMonitor.of(CUDA)
    assert monitor.disturbance() is None
    getattr(gpu, counters)[key] += 1
    monitor.begin()
    assert monitor.disturbance() is None, "it grew before the block"
    getattr(gpu, counters)[key] += 1
    assert monitor.disturbance() == words
    assert monitor.disturbance() is None, "the next block began with it"


@pytest.mark.parametrize(
    ("function", "counters", "key", "others", "other", "words"),
    [
        ("nvmlDeviceGetViolationStatus", "violations", 1, "fields", 270, "hardware thermal slowdown"),
        ("nvmlDeviceGetFieldValues", "fields", 269, "violations", 1, "thermal violation"),
    ],
)
def test_counters_that_cannot_be_read_are_silent(nvml, gpu, function, counters, key, others, other, words):
    gpu.faults[function] = nvml.NVML_ERROR_NOT_SUPPORTED
    monitor = DisturbanceMonitor.of(CUDA)
    getattr(gpu, counters)[key] = 10**9
    assert monitor.disturbance() is None
    getattr(gpu, others)[other] = 1
    assert monitor.disturbance() == words, "the others are read on"
    gpu.faults.clear()
    assert monitor.disturbance() is None, "the first reading of a counter is no increase"
    getattr(gpu, counters)[key] += 1
    assert monitor.disturbance() is not None


def test_a_field_that_an_old_driver_does_not_know_hides_no_other(gpu):
    del gpu.fields[269]
    monitor = DisturbanceMonitor.of(CUDA)
    gpu.fields[270] += 1
    assert monitor.disturbance() == "hardware thermal slowdown"


def test_a_field_without_a_value_is_no_counter(gpu):
    gpu.fields[269] = 5
    monitor = DisturbanceMonitor.of(CUDA)
    del gpu.fields[269]
    assert monitor.disturbance() is None


def test_the_power_cap_is_noted_once_and_disturbs_nothing(nvml, gpu):
    monitor = DisturbanceMonitor.of(CUDA)
    assert monitor.disturbance() is None
    assert monitor.notes == []
    for _ in range(2):
        gpu.reasons = nvml.nvmlClocksEventReasonSwPowerCap
        assert monitor.disturbance() is None
    assert monitor.notes == ["software power cap"]


def test_the_power_cap_is_told_while_it_lasts(nvml, gpu, monkeypatch):
    monitor = DisturbanceMonitor.of(CUDA)
    assert not monitor.is_capped()
    gpu.reasons = nvml.nvmlClocksEventReasonSwPowerCap | nvml.nvmlClocksEventReasonGpuIdle
    assert monitor.is_capped()
    gpu.reasons = nvml.nvmlClocksEventReasonGpuIdle
    assert not monitor.is_capped()
    monkeypatch.setattr(monitor._gpu, "reasons", lambda: None)
    assert not monitor.is_capped()
    assert not DisturbanceMonitor(None).is_capped()
