"""A workload as JSON, and back. Functions are written by name, and their masks as tensors beside it."""

from __future__ import annotations

import dataclasses
import importlib
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.precision import Precision
from pytest_attn.workloads.functions import function_label
from pytest_attn.workloads.masks import BooleanMask, Causal, Document, MaskModMask, Neighborhood, Window
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

_PLAIN_MASKS = {kind.__name__: kind for kind in (Causal, Window, Document, Neighborhood)}


class UnknownFunctionError(ValueError):
    """A function of a workload cannot be imported here."""


def encode_workload(workload: Workload) -> dict[str, Any]:
    """Return the workload's fields as builtin types."""
    fields = {field.name: getattr(workload, field.name) for field in dataclasses.fields(workload)}
    fields["mask"] = _encode_mask(workload.mask)
    fields["score_mod"] = _encode_function(workload.score_mod) if workload.score_mod else None
    fields["kv_pages"] = dataclasses.asdict(workload.kv_pages) if workload.kv_pages else None
    return fields


def decode_workload(fields: dict[str, Any], mask: torch.Tensor | None = None) -> Workload:
    """Return the workload of `encode_workload`; `mask` stands in for a mask's function that cannot be imported.

    Raises UnknownFunctionError where a score_mod, or a mask without its tensor, cannot be imported.
    """
    score_mod, pages = fields["score_mod"] and _decode_function(fields["score_mod"]), fields.get("kv_pages")
    if isinstance(pages, dict):
        fields = {**fields, "kv_pages": Pages(**pages)}
    return Workload(**{**fields, "mask": _decode_mask(fields["mask"], mask), "score_mod": score_mod})


def encode_precision(precision: str | Precision) -> str | dict[str, Any]:
    """Return a profile's name, and of one's own its fields."""
    return precision if isinstance(precision, str) else dataclasses.asdict(precision)


def decode_precision(encoded: str | dict[str, Any]) -> str | Precision:
    """Return the precision of `encode_precision`."""
    return encoded if isinstance(encoded, str) else Precision(**encoded)


def mask_is_function(workload: Workload) -> bool:
    """Whether a function of the user's says which keys are seen."""
    return isinstance(workload.mask, BooleanMask | MaskModMask)


def _encode_mask(mask: Any) -> dict[str, Any] | None:
    if mask is None:
        return None
    kind = type(mask).__name__
    if isinstance(mask, BooleanMask | MaskModMask):
        return {"kind": kind, "function": _encode_function(mask.factory if isinstance(mask, BooleanMask) else mask.fn)}
    return {"kind": kind, **dataclasses.asdict(mask)}


def _decode_mask(encoded: dict[str, Any] | None, tensor: torch.Tensor | None) -> Any:
    if encoded is None:
        return None
    kind, fields = encoded["kind"], {name: value for name, value in encoded.items() if name != "kind"}
    if kind in _PLAIN_MASKS:
        return _PLAIN_MASKS[kind](**fields)
    try:
        function = _decode_function(fields["function"])
    except UnknownFunctionError:
        if tensor is None:
            raise
        return BooleanMask(_TensorMask(tensor, fields["function"]["label"]))
    return BooleanMask(function) if kind == "BooleanMask" else MaskModMask(function)


class _TensorMask:
    """A mask as the tensor that its function made, under the function's name."""

    def __init__(self, tensor: torch.Tensor, label: str) -> None:
        self.__name__, self._tensor = label, tensor

    def __call__(self, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
        return self._tensor.to(device)


def _encode_function(function: Callable[..., Any]) -> dict[str, str]:
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", None) or ""
    return {"module": module, "name": name, "label": function_label(function)}


def _decode_function(encoded: dict[str, str]) -> Callable[..., Any]:
    """Import a function; anything else of the same name does not count."""
    module, name, label = encoded["module"], encoded["name"], encoded["label"]
    found: Any = None if "<" in name else _module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, types.FunctionType) or function_label(found) != label:
        raise UnknownFunctionError(f"{label} of {module or 'an unknown module'} cannot be imported here")
    return found


def _module(name: str) -> types.ModuleType | None:
    """Import a module, None where that fails: a test module may even end with pytest's own kind of exception."""
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return None
