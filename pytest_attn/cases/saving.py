"""--attn-save-failures DIR: what a judgment saw when it found a failure, written to a folder that can be judged again."""

from __future__ import annotations

import datetime
import json
import math
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pytest_attn.backends.registry import Registry
from pytest_attn.backends.software import versions_of
from pytest_attn.backends.subject import Subject
from pytest_attn.cases.records import change_last_record
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.failures.data import FailureData, tensors_of
from pytest_attn.failures.encoding import encode_declaration, encode_precision, encode_workload
from pytest_attn.failures.failure import ENVIRONMENT, FORMAT, SCRIPT, TENSORS, write_tensors
from pytest_attn.failures.folder import NoSpaceError, require_space, safe_name, write_folder
from pytest_attn.failures.script import (
    KernelSource,
    conftest_backend,
    import_root,
    kernel_of,
    named_backend,
    relative_to,
    script,
)
from pytest_attn.messages.lines import LABEL_WIDTH, labeled
from pytest_attn.session.items import id_from_root
from pytest_attn.session.session import AttentionSession
from pytest_attn.verdict import Verdict


class FailureSaver:
    """Saves the failure of one judgment in a folder.

    subject: None where only its output is known. unnamed_because: why the script cannot name the callable, "" where it can.
    """

    def __init__(
        self,
        folder: str,
        session: AttentionSession,
        item: pytest.Item,
        spec: CheckSpec,
        subject: Subject | None,
        command: str,
        unnamed_because: str = "",
    ) -> None:
        self._unnamed_because = unnamed_because
        self.folder, self._session, self._item = folder, session, item
        self._spec, self._subject, self._command = spec, subject, command

    def save(
        self, message: str, comparison: Comparison | None = None, broken: tuple[str, ...] = (), width: int = LABEL_WIDTH
    ) -> str:
        """Save the failure that `message` tells, and say where, or why not, in the case's record; return a line that says so.

        comparison: with the first mismatch, and the tensors that it kept; without one, as of a broken contract or of broken
        invariants, whose names are `broken`, the inputs are saved. width: of the line's label.
        """
        try:
            target = self._save(message, comparison, broken)
        except Exception as error:  # a failure that cannot be saved is still told
            named = "" if isinstance(error, NoSpaceError) else f"{type(error).__name__}: "
            why = f"{named}{' '.join(str(error).split())[:300]}"
            change_last_record(self._item, unsaved=why)
            return labeled("not saved", why, width)
        shown = _shown(target)
        change_last_record(self._item, saved=shown)
        return labeled("saved", f"{shown}  (python {shlex.quote(f'{shown}/repro.py')})", width)

    def _save(self, message: str, comparison: Comparison | None, broken: tuple[str, ...]) -> Path:
        data = self._data_of(comparison)
        tensors = tensors_of(data)
        folder = Path(self.folder)
        target = folder / safe_name(self._case)
        folder.mkdir(parents=True, exist_ok=True)
        require_space(folder, sum(tensor.nbytes for tensor in tensors.values()))
        environment = self._environment(data, message, comparison, broken)
        title = f"{message.splitlines()[0]}\n{self._case}, saved by pytest-attn on {environment['date']}"

        def write(folder: Path) -> None:
            write_tensors(folder / TENSORS, tensors, self._spec.workload.id)
            (folder / ENVIRONMENT).write_text(json.dumps(environment, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            text = script(title, self._kernel(str(target)), self._import_roots(str(target)))
            (folder / SCRIPT).write_text(text, encoding="utf-8")

        write_folder(target, write)
        return target

    def _data_of(self, comparison: Comparison | None) -> FailureData:
        """Return what the judgment saw, or only the inputs of the first distribution."""
        evidence = comparison.mismatch.evidence if comparison and comparison.mismatch else None
        if evidence is None:
            first = self._spec.inputs[0]
            return FailureData(first, self._session.references.inputs_of(self._spec, first), self._spec.backward)
        distribution, reference, results = evidence.failed
        backward = not {"dq", "dk", "dv"}.isdisjoint(results)
        return FailureData(distribution, reference.called_with, backward, results, reference)

    @property
    def _case(self) -> str:
        """The node id, from rootdir."""
        return id_from_root(self._item)

    def _environment(
        self, data: FailureData, message: str, comparison: Comparison | None, broken: tuple[str, ...]
    ) -> dict[str, Any]:
        spec = self._spec
        machine = self._session.machines.machine(str(spec.device))
        levels = [_plain(asdict(row)) for row in comparison.tensors] if comparison else []
        return {
            "format": FORMAT,
            "case": self._case,
            "date": datetime.datetime.now(tz=datetime.timezone.utc).isoformat(timespec="seconds"),
            "verdict": (Verdict.BROKEN if broken else Verdict.MISMATCH).value,
            "message": message,
            "command": self._command,
            "invariants": list(broken),
            "levels": [level for level in levels if level["distribution"] == data.distribution],
            "workload": {"id": spec.workload.id, "fields": encode_workload(spec.workload)},
            "kernel": {"name": self._name, **(self._subject.origin() if self._subject else {})},
            "question": {
                "distribution": data.distribution,
                "seed": spec.seed,
                "backward": data.backward,
                "declared": encode_declaration(spec.declared),
                "precision": encode_precision((spec.for_subject(self._subject) if self._subject else spec).declared.precision),
                "limits": spec.limits,
                "parameters": list(spec.parameters),
                "thorough": self._session.settings.thorough,
            },
            "machine": {**asdict(machine), "kind": machine.kind, "torch_version": str(machine.torch_version)},
            "versions": versions_of(machine),
        }

    @property
    def _name(self) -> str:
        """The kernel's name in the diagnosis; "out" where only its output was given."""
        return self._subject.name if self._subject else "out"

    def _kernel(self, folder: str) -> KernelSource:
        """Return how the script in `folder` gets at the kernel."""
        subject, name = self._subject, self._name
        if self._unnamed_because:
            missing = f"a callable of (q, k, v) in one process; {self._case} {self._unnamed_because}"
            return KernelSource("my_kernel", missing=missing)
        if subject is None:
            return KernelSource("my_kernel", missing=f"a callable of (q, k, v) that returns what {self._case} compared")
        if subject.user_function is not None:
            start = str(self._session.rootpath)
            return kernel_of(subject.user_function, name, self._case, subject.given_name, start)
        if Registry().is_known(name):
            return named_backend(name)
        if home := self._registered_by(name):
            return conftest_backend(name, relative_to(folder, home))
        return KernelSource("my_kernel", missing=f"the backend {name!r}, an instance of pytest_attn.Backend")

    def _registered_by(self, name: str) -> str | None:
        """Return the file of the conftest, or plugin, whose hook registers a backend."""
        for implementation in self._item.config.hook.pytest_attn_backends.get_hookimpls():
            registry = Registry()
            implementation.function(registry=registry)
            path = getattr(implementation.plugin, "__file__", None)
            if path and registry.is_known(name):
                return str(path)
        return None

    def _import_roots(self, folder: str) -> list[str]:
        """Return the folders from which the kernel, and the functions of the workload, are imported, seen from `folder`."""
        mask, score_mod = self._spec.workload.mask, self._spec.workload.score_mod
        of_mask = getattr(mask, "fn", None), getattr(mask, "factory", None)
        functions = (self._subject.user_function if self._subject else None, *of_mask, score_mod)
        return [relative_to(folder, root) for root in dict.fromkeys(map(import_root, functions)) if root]


def _plain(value: Any) -> Any:
    """Return builtin types that JSON can hold: NaN and infinities as text."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _shown(path: Path) -> str:
    """Return a path that can be typed from the current folder."""
    try:
        return path.relative_to(Path.cwd()).as_posix()
    except ValueError:
        return str(path)
