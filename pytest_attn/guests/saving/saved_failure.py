"""A failure that a run saved, read back and judged again: `pytest_attn.load_failure`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.machine import resolve_device
from pytest_attn.backends.precision import PRECISIONS, Precision, Threshold, precision_named
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.subject import Dequantizer, Subject
from pytest_attn.cases.api import checked, checked_invariants
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.correctness.reference import Expected, Reference, compute_reference
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.invariants.report import INVARIANT_WIDTH, InvariantReport
from pytest_attn.reports.lines import LABEL_WIDTH, labeled
from pytest_attn.reports.strict_json import COUNT, TEXT, TRUTH, array_of, first_fault, object_of, or_null, parse_json
from pytest_attn.reports.verdict import Verdict
from pytest_attn.workloads.functions import UnknownFunctionError, printable
from pytest_attn.workloads.inputs import Descales, Inputs
from pytest_attn.workloads.masks import Sequences
from pytest_attn.workloads.parameters import PARAMETERS
from pytest_attn.workloads.source import decode_workload
from pytest_attn.workloads.workload import Workload


def encode_precision(profile: Precision) -> str | dict[str, Any]:
    """Return a profile's name, and of one's own its fields."""
    return profile.name if PRECISIONS.get(profile.name) == profile else dataclasses.asdict(profile)


def decode_precision(encoded: str | dict[str, Any]) -> str | Precision:
    """Return the precision of `encode_precision`."""
    return encoded if isinstance(encoded, str) else Precision(**_with_threshold(encoded))


def _with_threshold(said: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a profile, or of a declaration, whose threshold JSON holds as a dictionary."""
    return {**said, "skips": Threshold(**said["skips"])} if said.get("skips") else said


# -- what a judgment saw, as tensors by name, and back -----------------------------------------------------------------


_INPUTS = tuple(
    one.name for one in dataclasses.fields(Inputs) if one.name not in ("workload", "device", "descales", "applied", "bias_of")
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
    device = inputs.device if inputs.device.type != "mps" else torch.device("cpu")  # MPS has no float64
    expected = {}
    for name in ("out", "lse", "weights", "max", "dq", "dk", "dv", *(f"d{parameter}" for parameter in PARAMETERS)):
        key = f"reference.{name}"
        if key in tensors:
            value = tensors[key].to(device)
            tau, rows = tensors.get(f"{key}.budget"), tensors.get(f"{key}.rows")
            expected[name] = Expected(
                value, value.new_empty(0) if tau is None else tau.to(device), None if rows is None else rows.to(device)
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


# -- a failure that was saved ------------------------------------------------------------------------------------------


#: of the folder: a later version that writes another one says so here
FORMAT = 3
TENSORS, ENVIRONMENT, SCRIPT = "tensors.safetensors", "environment.json", "repro.py"
_INSTALL = 'pip install "pytest-attn[failures]"'
_ADVICE = "save it once more with --attn-save-failures DIR"
_PRECISION = {"type": ["string", "object"]}
#: description of environment.json, in JSON Schema
FAILURE = object_of(
    {
        "format": {"type": "integer", "minimum": FORMAT, "maximum": FORMAT},
        "sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$", "description": "a checksum of 64 digits"},
        **dict.fromkeys(("case", "date", "message", "command"), TEXT),
        "verdict": {"enum": [Verdict.MISMATCH.value, Verdict.BROKEN.value]},
        "invariants": array_of(TEXT),
        "levels": array_of({"type": "object"}),
        "workload": object_of({"id": TEXT, "fields": {"type": "object"}}),
        "kernel": object_of({"name": TEXT}, library=or_null(TEXT), version=or_null(TEXT)),
        "question": object_of(
            {
                **dict.fromkeys(("distribution", "limits"), TEXT),
                "seed": COUNT,
                **dict.fromkeys(("backward", "thorough"), TRUTH),
                "declared": object_of({"precision": or_null(_PRECISION)}),
                "precision": _PRECISION,
                **dict.fromkeys(("leaves", "parameters"), array_of(TEXT)),
            }
        ),
        "machine": object_of({"kind": TEXT}),
        "versions": {"type": "object"},
    }
)


@dataclass(frozen=True)
class Failure:
    """One saved failure.

    Args:
        folder: where it was saved.
        workload: None where it cannot be rebuilt, as its score_mod cannot be imported here; `workload_id` is always there.
        tensors: on the CPU, by name: q, k, v and what else the kernel was given, out and what else it returned. These have
            the workload's native layout. Heads-first: reference.out (float64), reference.out.budget and so on.
        environment: what environment.json says: the case, the kernel, the machine, versions, the verdict and its message.
    """

    folder: Path
    workload: Workload | None
    tensors: dict[str, torch.Tensor] = field(repr=False)
    environment: dict[str, Any] = field(repr=False)

    @property
    def workload_id(self) -> str:
        """The workload's id."""
        return str(self.environment["workload"]["id"])

    @property
    def message(self) -> str:
        """The diagnosis, as the run printed it."""
        return str(self.environment["message"])

    @property
    def inputs(self) -> Inputs:
        """Inputs that the kernel was given, on the CPU. Raises ValueError where the workload cannot be rebuilt."""
        return inputs_from(self.tensors, self._workload(), torch.device("cpu"))

    def check(
        self,
        fn: Callable[..., Any] | Backend | str,
        device: str | None = None,
        name: str | None = None,
        dequantized: Dequantizer | None = None,
    ) -> Comparison | InvariantReport:
        """Judge `fn` on the saved inputs, compared with the saved reference: nothing that was saved is computed again.

        For a backend that declares another precision, or quantizes its inputs in its own way, exact attention is computed on
        the saved inputs. Where invariants were broken, these are asked again. Where a gradient of sinks, the bias or slopes
        was asked for, fn closes over those of `tensors`.

        Args:
            fn: a callable of (q, k, v) in the test's layout, a backend, or a backend's name.
            device: by default the kind on which the failure was seen ("cpu", "cuda", ...).
            name: what reports call a callable, by default its qualified name.
            dequantized: as for `pytest_attn.check`.

        Returns:
            What `pytest_attn.check` or `check_invariants` returns.

        Raises:
            AssertionError: fn is wrong; the text is the diagnosis.
            ValueError: the workload cannot be rebuilt, the device is not there, or the backend refuses the workload.
            NotImplementedError: fn declines the workload.
        """
        __tracebackhide__ = True
        spec, references = self._spec(device or self.environment["machine"]["kind"])
        subject = spec.subject(Registry(), fn, name, dequantized=dequantized)
        if broken := self.environment["invariants"]:
            asked = {"only": broken, "thorough": self.environment["question"]["thorough"]}
            return checked_invariants(subject, spec, self._reproduce(INVARIANT_WIDTH), references=references, **asked)
        return checked(subject, spec, self._reproduce(), references=references)

    def _workload(self) -> Workload:
        if self.workload is None:
            raise ValueError(
                f"{self.workload_id} cannot be rebuilt, only its tensors are there: {self.environment['workload']['lost']};"
                " it must be a function that a module on sys.path has under its name"
            )
        return self.workload

    def _reproduce(self, width: int = LABEL_WIDTH) -> str:
        return labeled("reproduce", str(self.environment["command"]), width)

    def _spec(self, device: str) -> tuple[CheckSpec, SavedReferences]:
        """Return what the run asked, on one distribution, and the saved inputs and references that answer it."""
        asked = self.environment["question"]
        where = resolve_device(device)
        inputs = inputs_from(self.tensors, self._workload(), where)
        spec = CheckSpec(
            workload=inputs.workload,
            device=where,
            backward=asked["backward"],
            inputs=(asked["distribution"],),
            declared=Declaration(
                **{**_with_threshold(asked["declared"]), "precision": decode_precision(asked["declared"]["precision"])}
            ),
            seed=asked["seed"],
            limits=asked["limits"],
            leaves=tuple(asked["leaves"]),
            parameters={name: self.tensors[PARAMETERS[name].tensor] for name in asked["parameters"]},
        )
        declared = precision_named(decode_precision(asked["precision"]))
        reference = reference_from(self.tensors, inputs, declared)
        return spec, SavedReferences(inputs, reference, declared, self.environment["kernel"]["name"])


class SavedReferences(ReferenceCache):
    """Answers with the saved inputs, and with the saved reference of the precision and the kernel that it was computed for."""

    def __init__(self, inputs: Inputs, reference: Reference | None, precision: Precision, kernel: str) -> None:
        super().__init__()
        self._inputs, self._reference, self._precision, self._kernel = inputs, reference, precision, kernel

    def inputs_of(self, spec: CheckSpec, distribution: str) -> Inputs:
        return self._inputs

    def reference_of(self, spec: CheckSpec, distribution: str | None = None, subject: Subject | None = None) -> Reference:
        """Return the saved reference where it serves, else compute one from the saved inputs."""
        is_approximate = subject is not None and subject.is_approximate
        if self._reference is not None and spec.profile == self._precision:
            given = self._reference.given
            is_quantized = given is not None and given.descales is None  # by the kernel, and not before it
            if is_quantized == is_approximate and (not is_approximate or subject.name == self._kernel):  # type: ignore[union-attr]
                return self._reference
        if is_approximate:
            return super().reference_of(spec, distribution, subject)
        wanted = tuple(spec.parameters)
        return compute_reference(self._inputs, spec.profile, spec.backward, parameters=wanted, extra=spec.extra)

    def after_call(self, reference: Reference, rows: torch.Tensor | None = None) -> Reference:
        """Return the saved one as it is: it has the rows that were drawn then."""
        return reference if reference is self._reference else super().after_call(reference, rows)


def load_failure(folder: str | os.PathLike[str]) -> Failure:
    """Read a folder that `pytest --attn-save-failures DIR` wrote; nothing in it is executed.

    Args:
        folder: its path. A function of the workload is imported by its name where it can be.

    Returns:
        The failure, with its tensors on the CPU.

    Raises:
        ValueError: the folder is not a saved failure.
        ImportError: safetensors is missing.
    """
    place = Path(folder)
    environment = _environment_in(place)
    tensors = _tensors_in(place)
    if environment["sha256"] != checksum(place / TENSORS, environment):
        raise ValueError(f"{place} is not as it was saved: the checksum in {ENVIRONMENT} is of other contents; {_ADVICE}")
    try:
        workload, lost = decode_workload(environment["workload"]["fields"], tensors.get("mask")), ""
    except UnknownFunctionError as error:
        workload, lost = None, str(error)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _undescribed(place, "workload", error) from None
    environment["workload"]["lost"] = lost
    failure = Failure(place, workload, tensors, environment)
    try:
        for name in environment["question"]["parameters"]:
            tensors[PARAMETERS[name].tensor].requires_grad_()
        if workload is not None:
            failure._spec("cpu")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _undescribed(place, "question", error) from None
    return failure


def _undescribed(folder: Path, what: str, error: Exception) -> ValueError:
    said = printable(f"{type(error).__name__}: {error}", 0)
    return ValueError(f"{folder / ENVIRONMENT} describes no {what}: {said}; {_ADVICE}")


def _environment_in(folder: Path) -> dict[str, Any]:
    path = folder / ENVIRONMENT
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{folder} is not a saved failure: {error.strerror}: {ENVIRONMENT}; expected a folder in the DIR of"
            " --attn-save-failures DIR"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {printable(str(error), 0)}; {_ADVICE}") from None
    version = found.get("format") if isinstance(found, dict) else None
    if version != FORMAT:
        raise ValueError(f"{path} has format {version!r:.40}; this version of pytest-attn reads {FORMAT}; {_ADVICE}")
    if fault := first_fault(found, FAILURE):
        raise ValueError(f"{path}: is damaged ({printable(fault, 0)}); {_ADVICE}")
    return dict(found)


def checksum(tensors: Path, environment: Mapping[str, Any]) -> str:
    """Return the checksum of a saved failure: of its tensors, and of what its environment says beside the checksum."""
    said = {key: value for key, value in environment.items() if key != "sha256"}
    found = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    with tensors.open("rb") as file:
        while part := file.read(1 << 20):
            found.update(part)
    return found.hexdigest()


def _tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError(f"a saved failure is read with safetensors, which is not installed; {_INSTALL}") from None
    path = folder / TENSORS
    try:
        return dict(safetensors.torch.load_file(path))
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read: {printable(str(error), 0)}; {_ADVICE}") from None


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], title: str) -> None:
    """Write tensors by name, each from its own copy on the CPU: safetensors takes neither strides nor shared memory."""
    from safetensors.torch import save_file

    own = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    save_file(own, path, metadata={"format": "pt", "workload": title})
