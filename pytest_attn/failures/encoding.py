"""A workload as JSON, and back. Functions are written by name, and their masks as tensors beside it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.precision import Precision
from pytest_attn.workloads.functions import decode_function, encode_function
from pytest_attn.workloads.masks.registry import mask_from_dict, mask_to_dict
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


def encode_workload(workload: Workload) -> dict[str, Any]:
    """Return the workload's fields as builtin types."""
    fields = {field.name: getattr(workload, field.name) for field in dataclasses.fields(workload)}
    fields["mask"] = mask_to_dict(workload.plain_mask)
    fields["score_mod"] = encode_function(workload.score_mod) if workload.score_mod else None
    fields["kv_pages"] = dataclasses.asdict(workload.kv_pages) if workload.kv_pages else None
    return fields


def decode_workload(fields: dict[str, Any], mask: torch.Tensor | None = None) -> Workload:
    """Return the workload of `encode_workload`; `mask` stands in for a mask's function that cannot be imported.

    Raises UnknownFunctionError where a score_mod, or a mask without its tensor, cannot be imported.
    """
    score_mod, pages = fields["score_mod"] and decode_function(fields["score_mod"]), fields.get("kv_pages")
    if isinstance(pages, dict):
        fields = {**fields, "kv_pages": Pages(**pages)}
    return Workload(**{**fields, "mask": mask_from_dict(fields["mask"], mask), "score_mod": score_mod})


def encode_precision(precision: str | Precision) -> str | dict[str, Any]:
    """Return a profile's name, and of one's own its fields."""
    return precision if isinstance(precision, str) else dataclasses.asdict(precision)


def decode_precision(encoded: str | dict[str, Any]) -> str | Precision:
    """Return the precision of `encode_precision`."""
    return encoded if isinstance(encoded, str) else Precision(**encoded)


def encode_declaration(declared: Declaration) -> dict[str, Any]:
    """Return what a callable says of itself as builtin types."""
    fields = {field.name: getattr(declared, field.name) for field in dataclasses.fields(declared)}
    return {**fields, "precision": encode_precision(declared.precision)}


def decode_declaration(encoded: dict[str, Any]) -> Declaration:
    """Return the declaration of `encode_declaration`."""
    return Declaration(**{**encoded, "precision": decode_precision(encoded["precision"])})
