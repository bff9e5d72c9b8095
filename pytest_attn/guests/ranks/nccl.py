"""NCCL as this process has it loaded: ranks share a GPU from one of its releases on."""

import ctypes
import os

from pytest_attn.backends.machine import Machine

#: the first NCCL that takes several ranks on one GPU
_SHARES_GPUS = (2, 30)
#: where a process has NCCL: before all others what LD_PRELOAD brings, then torch's own library and what that needs
_HAVE_NCCL = (None, "libtorch_cuda.so", "libnccl.so.2")


def too_few_gpus_because(ranks: int, machine: Machine) -> str | None:
    """Say that there are fewer GPUs than ranks, and which NCCL lets ranks share one; None where enough, or where it does."""
    if machine.kind != "cuda" or machine.device_count >= ranks:
        return None
    import torch

    found, short = loaded_nccl(), f"needs {ranks} GPUs, this machine has {machine.device_count}"
    if found >= _SHARES_GPUS:
        return None
    if torch.version.hip:
        return short
    there = f"NCCL {'.'.join(map(str, found))} is loaded" if found else "no NCCL is loaded"
    package = f"nvidia-nccl-cu{(torch.version.cuda or '13').partition('.')[0]}>=2.30"
    return f"{short}; ranks share one over NCCL 2.30 or newer, and {there}: pip install '{package}'"


def loaded_nccl() -> tuple[int, ...]:
    """Return the release of the NCCL in this process, () where there is none; torch says only with which it was built."""
    for name in _HAVE_NCCL:
        try:
            ask = ctypes.CDLL(name, mode=os.RTLD_NOLOAD).ncclGetVersion
        except (OSError, AttributeError):  # not loaded, or without NCCL in it
            continue
        code = ctypes.c_int()
        if ask(ctypes.byref(code)) == 0:
            step = 10_000 if code.value >= 10_000 else 1_000  # 2.8.4 was 2804, 2.30.7 is 23007
            return code.value // step, code.value % step // 100, code.value % 100
    return ()
