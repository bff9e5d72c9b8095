"""How the devices of ranks are connected: a time over NVLink says nothing of one over PCIe."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from pytest_attn.latency.nvml import AbsentError, Gpu

if TYPE_CHECKING:
    import torch

CPU, NVLINK, PCIE, UNKNOWN = "CPU", "NVLink", "PCIe", "links unknown"


def topology_of(kind: str, ranks: int) -> str:
    """Return what connects the first `ranks` devices of a kind: NVLink only where it connects every two of them."""
    if kind != "cuda":
        return CPU
    import torch

    return topology_of_gpus([torch.device("cuda", number) for number in range(ranks)])


def topology_of_gpus(devices: list[torch.device]) -> str:
    """Return what connects GPUs, as far as NVML says."""
    try:
        gpus = [Gpu(device) for device in devices]
    except AbsentError:
        return UNKNOWN
    linked = [one.has_nvlink_to(other) for one, other in combinations(gpus, 2)]
    if None in linked:
        return UNKNOWN
    return NVLINK if all(linked) else PCIE
