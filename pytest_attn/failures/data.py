"""What a judgment saw when it found a failure, as tensors by name, and back from these."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.precision import Precision
from pytest_attn.correctness.reference import Expected, Reference
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import Sequences
from pytest_attn.workloads.parameters import PARAMETERS
from pytest_attn.workloads.quantization import Descales
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

_INPUTS = tuple(
    one.name for one in dataclasses.fields(Inputs) if one.name not in ("workload", "device", "descales", "applied")
)
_LARGEST_MASK = 1 << 30


@dataclass(frozen=True)
class FailureData:
    """One distribution of inputs, and what happened to it: results by name, and the exact ones, where these were compared.

    Tensors are in the workload's native layout, those of the reference heads-first.
    """

    distribution: str
    inputs: Inputs
    backward: bool = False
    results: dict[str, torch.Tensor] = field(default_factory=dict)
    reference: Reference | None = None


def tensors_of(data: FailureData) -> dict[str, torch.Tensor]:
    """Return tensors by the names under which they are saved.

    What the kernel was given: q, k, v and others, with dout for a backward pass. What it returned: out, lse, dq, dk, dv.
    reference.NAME in float64, reference.NAME.budget in float32, reference.NAME.rows where only these were computed.
    For a backend that quantizes its inputs: quantised.q and so on, from which the reference is computed. Of quantized inputs:
    descales.q and so on. If a function says which keys are seen: mask, boolean.
    """
    given = {name: getattr(data.inputs, name) for name in _INPUTS if name != "dout" or data.backward}
    named = {name: tensor for name, tensor in given.items() if tensor is not None}
    if data.inputs.descales is not None:
        of_each = data.inputs.descales._asdict().items()
        named |= {f"descales.{name}": tensor for name, tensor in of_each if tensor is not None}
    if (mask := _mask_of(data.inputs)) is not None:
        named["mask"] = mask
    named |= {name: tensor.detach() for name, tensor in data.results.items()}
    if data.reference is not None:
        named |= _reference_tensors(data.reference, data.backward)
    return named


def _mask_of(inputs: Inputs) -> torch.Tensor | None:
    w = inputs.workload
    if w.plain_mask is None or w.is_packed or w.batch * w.heads * w.q_len * w.kv_len > _LARGEST_MASK:
        return None
    return w.plain_mask.tensor(Sequences(w.batch, w.heads, w.q_len, w.kv_len, inputs.device))


def _reference_tensors(reference: Reference, backward: bool) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    if reference.given is not None:
        named |= {f"quantised.{name}": getattr(reference.inputs, name) for name in "qkv"}
    for name, expected in reference.tensors.items():
        if backward or not name.startswith("d"):
            named[f"reference.{name}"] = expected.value
            if expected.tau.numel():  # lse has no budget
                named[f"reference.{name}.budget"] = expected.tau
            if expected.rows is not None:
                named[f"reference.{name}.rows"] = expected.rows
    return named


def inputs_from(tensors: dict[str, torch.Tensor], workload: Workload, device: torch.device) -> Inputs:
    """Return the saved inputs on a device. Without a backward pass dout was not saved, and is zero."""
    import torch

    given: dict[str, Any] = {name: tensors[name].to(device) for name in _INPUTS if name in tensors}
    if "dout" not in given:
        q = given["q"]
        dtype = getattr(torch, workload.out_dtype)
        given["dout"] = torch.zeros((*q.shape[:-1], workload.v_head_dim), dtype=dtype, device=device)
    if workload.v_in_k:
        given["v"] = given["k"][..., : workload.v_head_dim]
    descales = None
    if workload.is_quantized:
        descales = Descales(tensors.get("descales.q"), tensors["descales.k"], tensors["descales.v"]).to(device)
    return Inputs(workload, device, **given, descales=descales)


def reference_from(tensors: dict[str, torch.Tensor], inputs: Inputs, precision: Precision) -> Reference | None:
    """Return the saved reference of saved inputs, None where none was saved."""
    import torch

    device = inputs.device if inputs.device.type != "mps" else torch.device("cpu")  # MPS has no float64
    expected = {}
    for name in ("out", "lse", "weights", "max", "dq", "dk", "dv", *(f"d{parameter}" for parameter in PARAMETERS)):
        key = f"reference.{name}"
        if key in tensors:
            value = tensors[key].to(device)
            tau, rows = tensors.get(f"{key}.budget"), tensors.get(f"{key}.rows")
            expected[name] = Expected(
                value,
                value.new_empty(0) if tau is None else tau.to(device),
                None if rows is None else rows.to(device),
            )
    if not expected:
        return None
    if "quantised.q" not in tensors:
        parameters = tuple(name for name in PARAMETERS if f"d{name}" in expected)
        return Reference(inputs, precision, expected, parameters=parameters)
    q, k, v = (tensors[f"quantised.{name}"].to(inputs.device) for name in "qkv")
    return Reference(
        dataclasses.replace(inputs, q=q, k=k, v=v, descales=None, applied=inputs.descales), precision, expected, inputs
    )
