"""A failure that a run saved, read back and judged again: `pytest_attn.load_failure`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_attn.api import judged_in_words
from pytest_attn.backends.backend import Backend
from pytest_attn.backends.machine import resolve_device
from pytest_attn.backends.precision import Precision, precision_named
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.subject import Dequantizer, Subject
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.reference import Reference, compute_reference
from pytest_attn.correctness.reference_cache import ReferenceCache
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.diagnosis.diagnose import diagnose
from pytest_attn.failures.data import inputs_from, reference_from
from pytest_attn.failures.encoding import decode_declaration, decode_precision, decode_workload
from pytest_attn.invariants.check import judge_invariants
from pytest_attn.invariants.report import InvariantReport
from pytest_attn.messages import invariants, mismatch
from pytest_attn.messages.lines import LABEL_WIDTH, labeled
from pytest_attn.workloads.functions import UnknownFunctionError
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.parameters import PARAMETERS
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: of the folder: a later version that writes another one says so here
FORMAT = 2
TENSORS, ENVIRONMENT, SCRIPT = "tensors.safetensors", "environment.json", "repro.py"
_INSTALL = 'pip install "pytest-attn[failures]"'


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
        """What the kernel was given, on the CPU. Raises ValueError where the workload cannot be rebuilt."""
        import torch

        return inputs_from(self.tensors, self._workload(), torch.device("cpu"))

    def check(
        self,
        fn: Callable[..., Any] | Backend | str,
        device: str | None = None,
        name: str | None = None,
        dequantized: Dequantizer | None = None,
    ) -> Comparison | InvariantReport:
        """Judge `fn` on the saved inputs, held against the saved reference: nothing that was saved is computed again.

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
            reproduce = self._reproduce(invariants.LABEL_WIDTH)
            report = judged_in_words(
                subject,
                spec,
                lambda: judge_invariants(subject, spec, references, broken, None, self._is_thorough),
                reproduce,
            )
            if not report.passed:
                raise AssertionError(f"{invariants.describe(report)}\n{reproduce}")
            return report
        comparison = judged_in_words(subject, spec, lambda: judge(subject, spec, references), self._reproduce())
        if not comparison.passed:
            raise AssertionError(f"{mismatch.describe(diagnose(comparison, spec.diagnosis_timeout))}\n{self._reproduce()}")
        return comparison

    @property
    def _is_thorough(self) -> bool:
        return bool(self.environment["question"]["thorough"])

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
            declared=decode_declaration(asked["declared"]),
            seed=asked["seed"],
            limits=asked["limits"],
            parameters={name: self.tensors[PARAMETERS[name].tensor] for name in asked.get("parameters", ())},
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
        """Return the saved inputs, which are of the only distribution there is."""
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
    try:
        workload, lost = decode_workload(environment["workload"]["fields"], tensors.get("mask")), ""
    except UnknownFunctionError as error:
        workload, lost = None, str(error)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{place / ENVIRONMENT} describes no workload: {type(error).__name__}: {error}") from None
    environment["workload"]["lost"] = lost
    for name in environment.get("question", {}).get("parameters", ()):
        tensors[PARAMETERS[name].tensor].requires_grad_()
    return Failure(place, workload, tensors, environment)


def _environment_in(folder: Path) -> dict[str, Any]:
    path = folder / ENVIRONMENT
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{folder} is not a saved failure: {error.strerror}: {ENVIRONMENT}; expected a folder in the DIR of"
            " --attn-save-failures DIR"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    version = found.get("format") if isinstance(found, dict) else None
    if version != FORMAT:
        raise ValueError(f"{path} has format {version!r}; this version of pytest-attn reads {FORMAT}")
    return dict(found)


def _tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise ImportError(f"a saved failure is read with safetensors, which is not installed; {_INSTALL}") from None
    path = folder / TENSORS
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], title: str) -> None:
    """Write tensors by name, each from its own copy on the CPU: safetensors takes neither strides nor shared memory."""
    import torch
    from safetensors.torch import save_file

    own = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    save_file(own, path, metadata={"format": "pt", "workload": title})
