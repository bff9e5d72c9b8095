"""A workload as Python that makes it again, with what that must import, and as JSON."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pytest_attn.workloads.functions import decode_function, encode_function, function_label
from pytest_attn.workloads.masks import Mask, mask_from_dict, mask_to_dict
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch


def write_workload(workload: Workload, home: str = "") -> tuple[str, set[tuple[str, str]]]:
    """Return text that evaluates to the workload, without what follows from the rest, and what it must import.

    That is pairs of a module and a name in it, as `import_lines` takes them. home: the module that it is written for, whose
    functions need no import.
    """
    given = needed_fields(workload)
    imports = {("pytest_attn", "Workload")}
    texts = []
    for name, value in given.items():
        text = _write_value(value, home, imports)
        is_positional = name == "q_len" or (name == "kv_len" and "q_len" in given)
        texts.append(text if is_positional else f"{name}={text}")
    return f"Workload({', '.join(texts)})", imports


def import_lines(imports: Iterable[tuple[str, str]]) -> list[str]:
    """Return the lines that import names, each a pair of a module and a name there, sorted."""
    by_module: dict[str, list[str]] = {}
    for module, name in sorted(imports):
        by_module.setdefault(module, []).append(name)
    unwritten = [f"# write {name} here, which cannot be imported" for name in by_module.pop("", [])]
    return [f"from {module} import {', '.join(names)}" for module, names in by_module.items()] + unwritten


def needed_fields(workload: Workload) -> dict[str, Any]:
    """Return the fields of a workload from which the others follow, with their values."""
    needed = {field.name: getattr(workload, field.name) for field in dataclasses.fields(workload)}
    for name in reversed(list(needed)):
        rest = {other: value for other, value in needed.items() if other != name}
        try:
            needed = rest if Workload(**rest) == workload else needed
        except ValueError:
            continue
    return needed


def _write_value(value: object, home: str, imports: set[tuple[str, str]]) -> str:
    """Write a field's value, and note what must be imported for it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # as Python writes it, with double quotes
    if callable(value):
        return _write_function(value, home, imports)
    kind = type(value)
    text = value.source(lambda function: _write_function(function, home, imports)) if isinstance(value, Mask) else repr(value)
    if text.startswith(kind.__name__):
        module = "pytest_attn" if kind.__module__.startswith("pytest_attn.") else kind.__module__
        if module not in (home, "builtins"):
            imports.add((module, kind.__name__))
    return text


def _write_function(function: Callable[..., object], home: str, imports: set[tuple[str, str]]) -> str:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not name.isidentifier() or getattr(sys.modules.get(module), name, None) is not function:
        module, name = "", re.sub(r"\W", "_", function_label(function))
    if module != home:
        imports.add((module, name))
    return name


# -- as JSON, and back ---------------------------------------------------------------------------------------------------


def encode_workload(workload: Workload) -> dict[str, Any]:
    """Return the workload's fields as builtin types."""
    encoded = {field.name: getattr(workload, field.name) for field in dataclasses.fields(workload)}
    for name, encode in (("mask", mask_to_dict), ("score_mod", encode_function), ("kv_pages", dataclasses.asdict)):
        encoded[name] = encode(encoded[name]) if encoded[name] else None
    return encoded


def decode_workload(fields: dict[str, Any], mask: torch.Tensor | None = None) -> Workload:
    """Return the workload of `encode_workload`; `mask` stands in for a mask's function that cannot be imported.

    Raises UnknownFunctionError where a score_mod, or a mask without its tensor, cannot be imported.
    """
    decoded = {**fields, "mask": mask_from_dict(fields.get("mask"), mask)}
    if fields.get("score_mod"):
        decoded["score_mod"] = decode_function(fields["score_mod"])
    if isinstance(pages := fields.get("kv_pages"), dict):
        decoded["kv_pages"] = Pages(**pages)
    return Workload(**decoded)
