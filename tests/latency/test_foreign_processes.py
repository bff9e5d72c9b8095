"""Whose processes disturb a GPU: those that compute and are not ours, as far as NVML tells."""

import pytest
import torch
from fakes.driver import CUDA, ME, PROCESSES, UTILIZATION, block, computes, foreign

from pytest_attn.latency.disturbance import DisturbanceMonitor


@pytest.mark.parametrize(
    ("listed", "computing", "own", "expected"),
    [
        ([ME], [ME], [], None),
        ([ME, 70], [ME], [], None),
        ([ME, 70], [ME, 70], [], foreign(70)),
        ([ME, 70], [70], [], foreign(70)),
        ([ME, 70, 71], [ME, 70, 71], [], foreign(70, 71)),
        ([ME, 70, 71], [ME, 70, 71], [70], foreign(71)),
        ([ME, 70], [ME, 70], [70], None),
        ([ME], [ME, 70], [], None),  # it is not listed: it draws, or has ended
        ([ME, 70], [], [], None),
        ([], [70], [], None),
    ],
)
@pytest.mark.parametrize("nobody", [0, 6])
def test_a_process_disturbs_when_it_is_not_ours_and_computes(nvml, gpu, clock, listed, computing, own, expected, nobody):
    gpu.nobody, gpu.pids = nobody, listed
    monitor = DisturbanceMonitor.of(CUDA, own=frozenset(own))
    block(monitor, clock)
    computes(gpu, clock, *computing)
    assert monitor.disturbance() == expected


@pytest.mark.parametrize("nobody", [0, 6])
def test_a_newcomer_that_does_not_compute_disturbs_nothing(gpu, clock, nobody):
    gpu.nobody = nobody
    monitor = DisturbanceMonitor.of(CUDA)
    block(monitor, clock)
    gpu.pids.append(70)
    assert monitor.disturbance() is None


def test_a_block_shorter_than_a_sample_is_judged_by_the_last_one(gpu, clock):
    gpu.pids = [ME, 70]
    monitor = DisturbanceMonitor.of(CUDA)
    monitor.begin()
    clock.passes(0.005)
    computes(gpu, clock, 70, ago=0.4)
    assert monitor.disturbance() == foreign(70)


@pytest.mark.parametrize("percent", [0, 4_294_967_295])
def test_a_sample_of_nothing_or_of_nonsense_is_no_computing(gpu, clock, percent):
    gpu.pids = [ME, 70]
    monitor = DisturbanceMonitor.of(CUDA)
    block(monitor, clock)
    computes(gpu, clock, 70, percent=percent)
    gpu.unfilled = [(70, 0, 50)]
    assert monitor.disturbance() is None
    computes(gpu, clock, 70, percent=100)
    assert monitor.disturbance() == foreign(70)


@pytest.mark.parametrize("code", [3, 13, 15])
def test_where_nvml_does_not_tell_who_computes_a_newcomer_disturbs(gpu, clock, code):
    gpu.faults[UTILIZATION] = code
    gpu.pids = [ME, 70]
    monitor = DisturbanceMonitor.of(CUDA, own=frozenset({72}))
    assert monitor.disturbance() is None
    gpu.pids += [71, 72]
    assert monitor.disturbance() == foreign(71)
    assert monitor.disturbance() == foreign(71), "it is still there"
    gpu.pids = [ME]
    assert monitor.disturbance() is None


def test_where_the_lists_name_pids_of_two_namespaces_a_newcomer_disturbs(gpu, clock):
    monitor = DisturbanceMonitor.of(CUDA)
    computes(gpu, clock, 64_540)
    assert monitor.disturbance() is None
    gpu.pids.append(8)
    assert monitor.disturbance() == foreign(8)


@pytest.mark.parametrize(
    ("there", "later", "computing", "own", "expected"),
    [
        ([5001], [5001], [5001], [], None),  # the sole one, which nobody knows, is ours
        ([5001], [5001, 5002], [5001, 5002], [], foreign(5002)),
        ([5001], [5001, 5002], [5002], [], foreign(5002)),
        ([5001, 5002], [5001, 5002], [5001], [], None),  # either may be ours
        ([5001, 5002], [5001, 5002], [5001, 5002], [], foreign(5001, 5002)),  # but not both
        ([5001, 5002], [5001, 5002], [5001, 5002], [ME + 1], None),
        ([5001], [5001, 5002], [5001, 5002], [ME + 1], None),
        ([5001], [5001, 5002, 5003], [5001, 5002, 5003], [ME + 1], foreign(5002, 5003)),
        ([], [5001], [5001], [], None),
        ([], [], [5001], [], None),
    ],
)
@pytest.mark.parametrize("told", [True, False])
def test_in_a_container_our_processes_may_bear_pids_that_we_do_not_know(
    gpu, clock, there, later, computing, own, expected, told
):
    if not told:
        gpu.faults[UTILIZATION] = 3
        expected = expected if there == [5001] else None  # nobody came after the start
    gpu.pids = there
    monitor = DisturbanceMonitor.of(CUDA, own=frozenset(own))
    block(monitor, clock)
    gpu.pids = later
    computes(gpu, clock, *computing)
    assert monitor.disturbance() == expected


def test_the_context_is_made_before_the_processes_are_listed(nvml, gpu, clock, monkeypatch):
    gpu.pids = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: gpu.pids.append(5001))
    monitor = DisturbanceMonitor.of(CUDA)
    gpu.pids.append(5002)
    computes(gpu, clock, 5002)
    assert monitor.disturbance() == foreign(5002)


def test_a_driver_older_than_the_library_lists_processes_by_the_older_call(nvml, gpu, clock):
    gpu.faults[PROCESSES] = nvml.NVML_ERROR_FUNCTION_NOT_FOUND
    gpu.pids = [ME, 70]
    monitor = DisturbanceMonitor.of(CUDA)
    computes(gpu, clock, 70)
    assert monitor.disturbance() == foreign(70)


def test_a_gpu_that_did_not_list_processes_at_the_start_is_not_asked_for_foreign_ones(nvml, gpu, clock):
    gpu.faults |= dict.fromkeys([PROCESSES, PROCESSES.replace("v3", "v2")], nvml.NVML_ERROR_NOT_SUPPORTED)
    monitor = DisturbanceMonitor.of(CUDA)
    gpu.faults.clear()
    gpu.pids = [5001, 5002]
    computes(gpu, clock, 5001, 5002)
    assert monitor.disturbance() is None


def test_a_gpu_that_is_lost_breaks_no_test(nvml, gpu, clock):
    monitor = DisturbanceMonitor.of(CUDA)
    functions = [name for name in vars(nvml) if name.startswith("nvmlDevice")]
    gpu.faults |= dict.fromkeys(functions, nvml.NVML_ERROR_GPU_IS_LOST)
    gpu.pids = [70]
    gpu.reasons = 0xFF
    block(monitor, clock)
    assert monitor.disturbance() is None
    assert monitor.conditions() == {"driver": "570.86.15"}
