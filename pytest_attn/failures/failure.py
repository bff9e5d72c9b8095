"""A failure that a run saved, read back and judged again: `pytest_attn.load_failure`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.machine import resolve_device
from pytest_attn.correctness.check import taken_by
from pytest_attn.correctness.compare import Comparison
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.precision import precision_named
from pytest_attn.correctness.question import Question, ReferenceCache
from pytest_attn.correctness.reference import Reference, compute_reference
from pytest_attn.failures.encoding import UnknownFunctionError, decode_workload
from pytest_attn.failures.evidence import inputs_from, reference_from
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

    from pytest_attn.invariants.report import InvariantReport

#: of the folder: a later version that writes another one says so here
FORMAT = 1
TENSORS, ENVIRONMENT, SCRIPT = "tensors.safetensors", "environment.json", "repro.py"
_INSTALL = 'pip install "pytest-attn[failures]"'


@dataclass(frozen=True)
class Failure:
    """One saved failure.

    tensors: on the CPU, by name: q, k, v and what else the kernel was given, out and what else it returned, in the workload's
    native layout; reference.out (float64) with reference.out.budget and so on, heads-first.
    environment: what environment.json says: the case, the kernel, the machine, versions, the verdict and its message.
    workload: None where it cannot be rebuilt, as its score_mod cannot be imported here; `workload_id` is always there.
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

    def check(self, fn: Callable[..., Any] | Backend | str, device: str | None = None) -> Comparison | InvariantReport:
        """Judge `fn` on the saved inputs: a callable of (q, k, v) in the test's layout, or a backend's name.

        Nothing that was saved is computed again: results are held against the saved reference, with the budgets of the
        precision that the test or backend had declared. For a backend that declares another precision, or quantises its inputs
        in its own way, exact attention is computed on the saved inputs. Where invariants were broken, these are asked again,
        on the saved inputs.

        device: by default the kind on which the failure was seen ("cpu", "cuda", ...).
        Returns what `pytest_attn.check` or `check_invariants` returns. Raises AssertionError where fn is wrong, with the
        diagnosis as its text, and ValueError where the workload cannot be rebuilt, the device is not there, or the backend
        refuses the workload.
        """
        __tracebackhide__ = True
        question = self._question(device or self.environment["machine"]["kind"])
        command = str(self.environment["command"])
        judged: Comparison | InvariantReport
        with taken_by(fn, question) as subject:
            if broken := self.environment["invariants"]:
                from pytest_attn.invariants.check import judge_invariants

                judged = judge_invariants(subject, question, broken, None, self._is_thorough, reproduce=command)
            else:
                judged = judge(subject, question, ReferenceCache(), reproduce=command)
        if not judged.passed:
            raise AssertionError(judged.message)
        return judged

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

    def _question(self, device: str) -> SavedQuestion:
        asked = self.environment["question"]
        where = resolve_device(device)
        inputs = inputs_from(self.tensors, self._workload(), where)
        reference = reference_from(self.tensors, inputs, asked["declared"])
        return SavedQuestion(
            workload=inputs.workload,
            device=where,
            backward=asked["backward"],
            inputs=(asked["distribution"],),
            precision=asked["precision"],
            layout=asked["layout"],
            returns_lse=asked["returns_lse"],
            seed=asked["seed"],
            limits=asked["limits"],
            saved=Saved(inputs, reference, asked["declared"], self.environment["kernel"]["name"]),
        )


@dataclass(frozen=True)
class Saved:
    """The saved inputs, and the reference with the precision and the kernel that it was computed for."""

    inputs: Inputs
    reference: Reference | None
    precision: str
    kernel: str

    def serves(self, precision: str, subject: object) -> bool:
        """Whether the reference is what this subject is held against."""
        if self.reference is None or precision != self.precision:
            return False
        if isinstance(subject, Backend) and subject.is_approximate:
            return self.reference.given is not None and subject.name == self.kernel
        return self.reference.given is None


@dataclass(frozen=True)
class SavedQuestion(Question):
    """A question about saved inputs, which answers with the saved reference."""

    saved: Saved | None = None

    def draw(self, distribution: str) -> Inputs:
        """Return the saved inputs, which are of the only distribution there is."""
        assert self.saved is not None
        return self.saved.inputs

    def reference(self, cache: ReferenceCache, distribution: str | None = None, subject: object = None) -> Reference:
        """Return the saved reference where it serves, else one that is computed from the saved inputs."""
        assert self.saved is not None
        if self.saved.serves(self.precision, subject):
            assert self.saved.reference is not None
            return self.saved.reference
        if isinstance(subject, Backend) and subject.is_approximate:
            return super().reference(cache, distribution, subject)
        return compute_reference(self.saved.inputs, precision_named(self.precision), self.backward)


def load_failure(folder: str | os.PathLike[str]) -> Failure:
    """Read a folder that `pytest --attn-save-failures DIR` wrote.

    Nothing in it is executed; a function of the workload is imported by its name where it can be. Raises ValueError where
    the folder is not a saved failure, ImportError where safetensors is missing.
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
