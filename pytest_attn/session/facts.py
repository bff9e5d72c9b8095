"""What a record says beside its judgement: the workload in numbers, whose kernel it was, on which machine."""

from __future__ import annotations

import platform
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pytest_attn.session.store import AttentionSession

if TYPE_CHECKING:
    from pytest_attn.workloads.workload import Workload

_SIZES = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_head_dim", "dtype")


def facts_of(session: AttentionSession, workload: Workload, subject: str, device: str | None) -> dict[str, Any]:
    """Return fields of `CaseRecord`, of builtin types. device: the one that a marker names."""
    return {
        "workload": workload.id,
        "name": workload.name or "",
        "group": session.catalog.group_of(workload.name),
        "aliases": tuple(session.catalog.aliases_of(workload.name)),
        "shape": shape_of(workload),
        "subject": subject,
        **_kernel(session, subject),
        "machine": _machine(session, device),
    }


@lru_cache(maxsize=256)  # every backend leaves a record of the same workload
def shape_of(workload: Workload) -> dict[str, Any]:
    """Return a workload's sizes, with the operations and bytes that its passes need."""
    from typing import get_args

    from pytest_attn.workloads.workload import Direction

    passes = get_args(Direction)
    return {
        "id": workload.shape_id,
        **{name: getattr(workload, name) for name in _SIZES},
        "mask": workload.mask.label if workload.mask else "",
        "flops": {one: workload.flops(one) for one in passes},
        "bytes": {one: workload.bytes(one) for one in passes},
    }


def _kernel(session: AttentionSession, subject: str) -> dict[str, Any]:
    """Say which library a backend is of; a callable is of none."""
    if not session.registry.is_known(subject):
        return {"tags": {"family": "callable", "backend": subject, "compile": "none"}, "version": ""}
    backend, (name, _, variant) = session.registry[subject], subject.partition("+")
    tags = {"family": backend.library, "backend": name, "compile": variant or "none"}
    return {"tags": tags, "version": session.version_of(subject)}


def _machine(session: AttentionSession, device: str | None) -> dict[str, Any]:
    from pytest_attn import __version__

    machine = session.machine(device)
    return {
        "name": machine.name,
        "device": machine.device,
        "kind": machine.kind,
        "architecture": machine.architecture,
        "memory": machine.memory,
        "torch": str(machine.torch_version),  # torch has a class of its own for it
        "python": platform.python_version(),
        "pytest_attn": __version__,
    }
