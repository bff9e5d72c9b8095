"""A group of the catalog."""

from __future__ import annotations

from typing import NamedTuple

from pytest_attn.workloads.workload import Workload


class Group(NamedTuple):
    """Workloads of one name, with the place their shapes come from. on_request: run only where they are named."""

    name: str
    source: str
    workloads: list[Workload]
    on_request: bool = False
