"""Workloads of flashinfer-trace: a line of its WORKLOADS.jsonl with the definition that it names, both of attention.

Read at flashinfer-bench 40e6ca78 (`flashinfer_bench/data/`, docs/op-types) and from what flashinfer writes itself
(tests/trace/fi_trace_out). A field, an axis, an input or a shape that is not known there is refused by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pytest_attn.reports.strict_json import (
    COUNT,
    TEXT,
    TRUTH,
    array_of,
    by_name,
    first_fault,
    object_of,
    or_null,
    parse_json,
    sealed,
)
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.workload import Workload

_AXIS = sealed(object_of({"type": {"enum": ["const", "var"]}}, value=COUNT, description=or_null(TEXT)))
_SHAPE = {"type": ["array", "null"], "items": TEXT}
_TENSOR = sealed(object_of({"shape": _SHAPE, "dtype": TEXT}, description=or_null(TEXT), optional=TRUTH))
_Q, _KV = "* num_qo_heads head_dim", "num_pages page_size num_kv_heads head_dim"
_OFFSETS = {"qo_indptr": "len_indptr", "kv_indptr": "len_indptr", "sm_scale": None}
_PAGED = {**_OFFSETS, "kv_indices": "num_kv_indices", "kv_last_page_len": "*"}
#: by op_type the inputs and their shapes; "*" is an axis of any name, None the shape of a scalar
_INPUTS: dict[str, dict[str, str | None]] = {
    "gqa_paged": {"q": _Q, "k_cache": _KV, "v_cache": _KV, **_PAGED},
    "gqa_ragged": {"q": _Q, **dict.fromkeys("kv", "total_kv num_kv_heads head_dim"), **_OFFSETS},
    "mla_paged": {
        "q_nope": "* num_qo_heads head_dim_ckv",
        "q_pe": "* num_qo_heads head_dim_kpe",
        **{f"{name}_cache": f"num_pages page_size head_dim_{name}" for name in ("ckv", "kpe")},
        **_PAGED,
    },
}
_DEFINITION = sealed(
    object_of(
        {"name": TEXT, "op_type": {"enum": [*_INPUTS]}, "axes": by_name(_AXIS), "inputs": by_name(_TENSOR)},
        outputs=by_name(_TENSOR),
        description=or_null(TEXT),
        **dict.fromkeys(("reference", "check", "init"), TEXT),
        **dict.fromkeys(("tags", "constraints"), array_of(TEXT)),
    )
)
_SOURCE = sealed(object_of({"type": {"enum": ["random", "scalar", "safetensors"]}}, value={}, path=TEXT, tensor_key=TEXT))
_WORKLOAD = sealed(object_of({"uuid": TEXT, "axes": by_name(COUNT), "inputs": by_name(_SOURCE)}))
_LINE = sealed(object_of({"definition": TEXT, "workload": _WORKLOAD}, solution={}, evaluation={}))
_TENSORS = {name for known in _INPUTS.values() for name in known} - _PAGED.keys()
_CAUSAL = re.compile(r"(?<!no[nt].)(?<!non)causal", re.IGNORECASE)


def read_trace(path: Path) -> list[Workload]:
    """Return the workloads of ROOT/workloads/OP_TYPE/NAME.jsonl. Raises ValueError, with file, line and field."""
    path = path.parent.resolve() / path.name  # a file may be a link, as into the cache of huggingface_hub
    if path.parts[-3:-2] != ("workloads",):
        raise ValueError(f"{path}: expected ROOT/workloads/TYPE/NAME.jsonl, of flashinfer-trace")
    root = path.parents[2]
    home = root / "definitions" / path.parent.name / f"{path.stem}.json"
    found, where = [], home.name
    try:
        definition = parse_json(home.read_text(encoding="utf-8"))
        _require(definition, _DEFINITION)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            where = f"{path.name}, line {number}"
            one = parse_json(line)
            _require(one, _LINE)
            found.append(workload_of_trace(definition, one["workload"], root))
    except KeyError as error:
        raise ValueError(f"{where}: found no {error}, expected one") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{where}: {error}") from None
    return found


def workload_of_trace(definition: Mapping[str, Any], line: Mapping[str, Any], root: Path) -> Workload:
    """Return a workload: the sizes of a definition, with lengths of the files below root that a line of it names.

    Raises ValueError where something contradicts, or is not said.
    """
    _require_inputs(definition, line["inputs"])
    sizes = {axis: one["value"] for axis, one in definition["axes"].items() if one["type"] == "const"}
    lengths = {
        name: _integers(name, source, root)
        for name, source in line["inputs"].items()
        if name in ("qo_indptr", "kv_indptr", "kv_last_page_len")
    }
    fields = _lengths(definition, lengths, sizes.get("page_size"))
    if "head_dim_ckv" in sizes:
        dims = sizes["head_dim_ckv"] + sizes["head_dim_kpe"], sizes["head_dim_ckv"]
        fields |= {"kv_heads": 1, "head_dim": dims[0], "v_head_dim": dims[1], "v_in_k": True}
    else:
        fields |= {"kv_heads": sizes["num_kv_heads"], "head_dim": sizes["head_dim"]}
    scale = line["inputs"].get("sm_scale", {}).get("value")
    if not isinstance(scale, float):
        raise ValueError(f"sm_scale: found {scale}, expected the number of a scalar")
    is_default = math.isclose(scale, fields["head_dim"] ** -0.5, rel_tol=1e-6)
    (dtype,) = {one["dtype"] for name, one in definition["inputs"].items() if name in _TENSORS}
    name = f"{definition['name']}-{line['uuid'][:8]}"
    made = Workload(heads=sizes["num_qo_heads"], dtype=dtype, scale=None if is_default else scale, name=name, **fields)
    counted = {"len_indptr": made.batch + 1, "batch_size": made.batch, "total_q": sum(made.q_lens or ()) or made.batch}
    for axis, number in line["axes"].items():
        if number != counted.get(axis, number):
            raise ValueError(f"axes.{axis}: found {number}, expected {counted[axis]} of the offsets")
    return made


def _lengths(definition: Mapping[str, Any], lengths: Mapping[str, list[int]], page: int | None) -> dict[str, Any]:
    """Return the fields of a workload that say how long its sequences are, and which keys they see."""
    for name in ("qo_indptr", "kv_indptr"):
        if name in definition["inputs"] and name not in lengths:
            raise ValueError(f"{name}: found no safetensors file, expected one: lengths cannot be drawn")
    counts = [end - start for start, end in pairwise(lengths["kv_indptr"])]
    fields: dict[str, Any] = {"kv_lens": tuple(counts)}
    if page is not None:
        last = lengths.get("kv_last_page_len", [page] * len(counts))[: len(counts)]  # some have one more
        kv_lens = ((pages - 1) * page + rest if pages else 0 for pages, rest in zip(counts, last, strict=True))
        fields = {"kv_lens": tuple(kv_lens), "kv_pages": Pages(page)}
    if "qo_indptr" not in lengths:
        return {**fields, "q_len": 1}
    if not _CAUSAL.search(f"{definition['name']} {definition.get('description')}"):
        raise ValueError("neither the definition's name nor its description says whether it is causal")
    q_lens = tuple(end - start for start, end in pairwise(lengths["qo_indptr"]))
    return {**fields, "q_lens": q_lens, "mask": "causal-bottom-right"}


def _require(value: Any, description: Mapping[str, Any]) -> None:
    if fault := first_fault(value, description):
        raise ValueError(fault)


def _require_inputs(definition: Mapping[str, Any], handed: Mapping[str, Any]) -> None:
    """Raise ValueError for an input, or the shape of one, that attention of this kind does not have, and for mixed dtypes.

    handed: by a workload. What is optional may be unknown as long as it is not handed.
    """
    inputs, known = definition["inputs"], _INPUTS[definition["op_type"]]
    for name in (*inputs, *handed):
        if name not in known and (name in handed or not inputs[name].get("optional")):
            raise ValueError(f"inputs.{name}: found an input that is unknown, expected {', '.join(known)}")
    for name in inputs.keys() & known.keys():
        shape, expected = " ".join(inputs[name]["shape"] or ()), known[name] or ""
        if shape != expected and not (expected[:1] == "*" and shape.partition(" ")[2] == expected[2:]):
            raise ValueError(f"inputs.{name}.shape: found {shape}, expected {expected}")
    dtypes = {inputs[name]["dtype"] for name in inputs.keys() & _TENSORS}
    if len(dtypes) != 1:
        raise ValueError(f"inputs: found dtypes {', '.join(sorted(dtypes))}, expected one of all tensors")


def _integers(name: str, source: Mapping[str, Any], root: Path) -> list[int]:
    """Return a tensor of integers that a safetensors file holds. Raises ValueError where it does not."""
    if source["type"] != "safetensors":
        raise ValueError(f"{name}: found {source['type']}, expected a safetensors file: lengths cannot be drawn")
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ValueError(f'{name}: needs safetensors, which is not installed: pip install "pytest-attn[failures]"') from None
    try:
        with safe_open(root / source["path"], "pt") as file:
            if source["tensor_key"] not in file.keys():  # noqa: SIM118
                raise KeyError(source["tensor_key"])
            found = file.get_tensor(source["tensor_key"])
    except SafetensorError as error:
        raise ValueError(f"{name}: {source['path']} cannot be read: {error}") from None
    if found.ndim != 1 or found.dtype.is_floating_point:
        dtype = str(found.dtype).removeprefix("torch.")
        raise ValueError(f"{name}: found {dtype} {[*found.shape]}, expected integers in a row")
    return [*found.tolist()]
