"""The clock that NVML's samples bear, and the names of NVML that tests make fail."""

import os

import torch

CUDA = torch.device("cuda:0")
ME = os.getpid()
SECOND = 1_000_000
REASONS = "nvmlDeviceGetCurrentClocksEventReasons"
UTILIZATION = "nvmlDeviceGetProcessUtilization"
PROCESSES = "nvmlDeviceGetComputeRunningProcesses_v3"


class Clock:
    """The wall clock, in microseconds, which stands still until a test moves it."""

    def __init__(self):
        self.now = 1_700_000_000 * SECOND

    def time_ns(self):
        return self.now * 1000

    def passes(self, seconds):
        self.now += int(seconds * SECOND)


def computes(gpu, clock, *pids, percent=50, ago=0.0):
    """Add what NVML samples of processes, `ago` seconds before now."""
    gpu.samples += [(pid, clock.now - int(ago * SECOND), percent) for pid in pids]


def foreign(*pids):
    return f"another process on this GPU (pid {', '.join(map(str, pids))})"


def block(monitor, clock):
    monitor.begin()
    clock.passes(0.5)
