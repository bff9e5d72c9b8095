"""--attn-save-failures DIR: what a judgement saw when it found a failure, written to a folder that can be judged again."""

from __future__ import annotations

import datetime
import json
import math
import shlex
import uuid
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    import torch

    from pytest_attn.correctness.compare import Comparison
    from pytest_attn.correctness.question import Question
    from pytest_attn.correctness.reference import Reference
    from pytest_attn.failures.evidence import Evidence
    from pytest_attn.failures.script import Kernel
    from pytest_attn.session.store import AttentionSession

_Judged = TypeVar("_Judged")


def failures_folder(text: str | None) -> str | None:
    """Return the folder of --attn-save-failures, made where it is missing; raise pytest.UsageError where it cannot be used."""
    if text is None:
        return None
    flag = "--attn-save-failures"
    if not text.strip() or text.startswith("-") or "::" in text:
        raise pytest.UsageError(f"{flag}: must be a folder, got {text!r}")
    if find_spec("safetensors") is None:
        raise pytest.UsageError(f'{flag} needs safetensors, which is not installed: pip install "pytest-attn[failures]"')
    folder = Path(text).expanduser().resolve()
    probe = folder / f".{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise pytest.UsageError(f"{flag}: cannot write to {text!r}: {error.strerror or error}") from None
    return str(folder)


class FailureSaver:
    """Saves the failure of one judgement; without --attn-save-failures it keeps nothing and says nothing."""

    def __init__(
        self, session: AttentionSession, item: pytest.Item, question: Question, subject: object, command: str
    ) -> None:
        self._session, self._item = session, item
        self._question, self._subject, self._command = question, subject, command
        self._folder = None if session.settings.mutants else session.settings.save_failures
        self._evidence: Evidence | None = None

    def see(self, distribution: str, reference: Reference, results: dict[str, torch.Tensor]) -> None:
        """Take what a judgement found wrong first; a callback of `judge`."""
        from pytest_attn.failures.evidence import Evidence

        if self._folder and self._evidence is None:
            backward = not {"dq", "dk", "dv"}.isdisjoint(results)
            self._evidence = Evidence(distribution, reference.called_with, backward, dict(results), reference)

    def watching(self, judge: Callable[[], _Judged]) -> Callable[[], _Judged]:
        """Return `judge` so that it also saves the inputs of a broken contract, which has no results to compare."""

        def watched() -> _Judged:
            __tracebackhide__ = True
            from pytest_attn.correctness.compare import ContractError

            try:
                return judge()
            except ContractError as error:
                text = self.told(str(error))
            raise ContractError(text)

        return watched

    def told(self, message: str, comparison: Comparison | None = None, broken: tuple[str, ...] = ()) -> str:
        """Save the failure that `message` tells; return the message with a line that says where, or why not.

        comparison: with the levels of each tensor. broken: names of invariants, of which the inputs are saved.
        """
        if not self._folder:
            return message
        from pytest_attn.failures.folder import NoSpaceError

        width = 12 if broken else 10
        try:
            target = self._save(message, comparison, broken)
        except NoSpaceError as error:
            return f"{message}\n  {'not saved':<{width}} {error}"
        except Exception as error:  # a failure that cannot be saved is still told
            return f"{message}\n  {'not saved':<{width}} {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        shown = _shown(target)
        return f"{message}\n  {'saved':<{width}} {shown}  (python {shlex.quote(f'{shown}/repro.py')})"

    def _save(self, message: str, comparison: Comparison | None, broken: tuple[str, ...]) -> Path:
        from pytest_attn.failures.evidence import Evidence, tensors_of
        from pytest_attn.failures.failure import ENVIRONMENT, SCRIPT, TENSORS, write_tensors
        from pytest_attn.failures.folder import require_space, safe_name, write_folder
        from pytest_attn.failures.script import script

        assert self._folder is not None
        question, first = self._question, self._question.inputs[0]
        evidence = self._evidence or Evidence(first, question.draw(first), question.backward)
        tensors = tensors_of(evidence)
        target = Path(self._folder) / safe_name(self._case)
        Path(self._folder).mkdir(parents=True, exist_ok=True)
        require_space(Path(self._folder), sum(tensor.nbytes for tensor in tensors.values()))
        environment = self._environment(evidence, message, comparison, broken)
        title = f"{message.splitlines()[0]}\n{self._case}, saved by pytest-attn on {environment['date']}"

        def write(folder: Path) -> None:
            write_tensors(folder / TENSORS, tensors, question.workload.id)
            (folder / ENVIRONMENT).write_text(json.dumps(environment, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            (folder / SCRIPT).write_text(script(title, self._kernel(), self._import_roots()), encoding="utf-8")

        write_folder(target, write)
        return target

    @property
    def _case(self) -> str:
        """The node id, from rootdir, without the group that xdist may have added."""
        from pytest_attn.session.parametrize import id_under

        return id_under(self._item.nodeid.partition("::")[0], self._item)

    def _environment(
        self, evidence: Evidence, message: str, comparison: Comparison | None, broken: tuple[str, ...]
    ) -> dict[str, Any]:
        from pytest_attn.backends.versions import versions_of
        from pytest_attn.failures.encoding import encode_workload
        from pytest_attn.failures.failure import FORMAT

        question = self._question
        machine = self._session.machine(str(question.device))
        levels = [_plain(asdict(row)) for row in comparison.tensors] if comparison else []
        return {
            "format": FORMAT,
            "case": self._case,
            "date": datetime.datetime.now(tz=datetime.timezone.utc).isoformat(timespec="seconds"),
            "verdict": "broken" if broken else "mismatch",
            "message": message,
            "command": self._command,
            "invariants": list(broken),
            "levels": [level for level in levels if level["distribution"] == evidence.distribution],
            "workload": {"id": question.workload.id, "fields": encode_workload(question.workload)},
            "kernel": {"name": self._name, **self._origin()},
            "question": {
                "distribution": evidence.distribution,
                "seed": question.seed,
                "backward": evidence.backward,
                "layout": question.layout,
                "returns_lse": question.returns_lse,
                "precision": question.precision,
                "declared": question.put_to(self._subject).precision,
                "limits": question.limits,
                "thorough": self._session.settings.thorough,
            },
            "machine": {**asdict(machine), "kind": machine.kind, "torch_version": str(machine.torch_version)},
            "versions": versions_of(machine),
        }

    @property
    def _name(self) -> str:
        """The kernel's name in the diagnosis; "out" where only its output was given."""
        from pytest_attn.correctness.question import subject_name

        return "out" if self._subject is None else subject_name(self._subject)

    def _origin(self) -> dict[str, str]:
        from pytest_attn.backends.backend import Backend

        subject = self._subject
        if isinstance(subject, Backend):
            return {"library": subject.library, "version": subject.version()}
        return {name: str(getattr(subject, f"__{name}__", "")) for name in ("module", "qualname")}

    def _kernel(self) -> Kernel:
        from pytest_attn.backends.backend import Backend
        from pytest_attn.backends.registry import Registry
        from pytest_attn.failures.script import Kernel, conftest_backend, kernel_of, named_backend

        subject, name = self._subject, self._name
        if subject is None:
            return Kernel("my_kernel", missing=f"a callable of (q, k, v) that returns what {self._case} compared")
        if not isinstance(subject, Backend):
            assert callable(subject)
            return kernel_of(subject, name, self._case)
        if Registry().is_known(name):
            return named_backend(name)
        if home := self._registered_by(name):
            return conftest_backend(name, home)
        return Kernel("my_kernel", missing=f"the backend {name!r}, an instance of pytest_attn.Backend")

    def _registered_by(self, name: str) -> str | None:
        """Return the file of the conftest, or plugin, whose hook registers a backend."""
        from pytest_attn.backends.registry import Registry

        for implementation in self._item.config.hook.pytest_attn_backends.get_hookimpls():
            registry = Registry()
            implementation.function(registry=registry)
            path = getattr(implementation.plugin, "__file__", None)
            if path and registry.is_known(name):
                return str(path)
        return None

    def _import_roots(self) -> list[str]:
        """Return the folders from which the kernel, and the functions of the workload, are imported."""
        from pytest_attn.failures.script import import_root

        mask, score_mod = self._question.workload.mask, self._question.workload.score_mod
        functions = (self._subject, getattr(mask, "fn", None), getattr(mask, "factory", None), score_mod)
        return [root for root in dict.fromkeys(map(import_root, functions)) if root]


def _plain(value: Any) -> Any:
    """Return builtin types that JSON can hold: NaN and infinities as text."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _shown(path: Path) -> str:
    """Return a path as it can be typed from the current folder."""
    try:
        return path.relative_to(Path.cwd()).as_posix()
    except ValueError:
        return str(path)
