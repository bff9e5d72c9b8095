"""How a backend of a stand-in is held against exact attention on the CPU, and the GPUs that it is asked about."""

import torch

from pytest_attn import Machine
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.mismatch_text import describe
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache

CPU = torch.device("cpu")
H200 = Machine("cuda:0", "NVIDIA H200", (9, 0), "sm90", 150 << 30, 1, "2.11.0+cu130")
A100 = Machine("cuda:0", "NVIDIA A100", (8, 0), "sm80", 80 << 30, 1, "2.11.0+cu130")
B200 = Machine("cuda:0", "NVIDIA B200", (10, 0), "sm100", 180 << 30, 1, "2.11.0+cu130")
RTX = Machine("cuda:0", "NVIDIA RTX PRO 6000", (12, 0), "sm120", 96 << 30, 1, "2.11.0+cu130")
#: an H200 for libraries that look at the device of the tensors that they are asked about
HOST = Machine("cpu", "NVIDIA H200", (9, 0), "sm90", 150 << 30, 1, "2.11.0+cu130")


def judged(backend, workload, backward=False, **asked):
    return judge(backend, CheckSpec(workload, CPU, backward=backward, **asked), ReferenceCache())


def assert_passes(backend, workload, backward=False):
    comparison = judged(backend, workload, backward)
    assert comparison.passed, describe(comparison)
