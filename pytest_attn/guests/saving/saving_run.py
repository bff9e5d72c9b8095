"""A failure of a run, written to a folder that can be judged again: what a judgment saw, and a script."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import hashlib
import json
import keyword
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pytest_attn.backends.machine import versions_of
from pytest_attn.backends.registry import Registry
from pytest_attn.cases.case_records import RECORDS
from pytest_attn.cases.context import CaseContext
from pytest_attn.cases.judgment import FailureEvidence, Judgment
from pytest_attn.guests.saving.saved_failure import (
    ENVIRONMENT,
    FORMAT,
    SCRIPT,
    TENSORS,
    FailureData,
    checksum,
    encode_precision,
    tensors_of,
    write_tensors,
)
from pytest_attn.reports.files import ProcessFolder
from pytest_attn.reports.lines import labeled
from pytest_attn.reports.records import changed, named_numbers
from pytest_attn.reports.verdict import Verdict
from pytest_attn.session.kinds import id_from_root
from pytest_attn.workloads.source import encode_workload


def save_failure(context: CaseContext, message: str, found: Judgment[Any]) -> list[str]:
    """Save a failure; return a line that says where, or why not."""
    if not isinstance(found.evidence, FailureEvidence):
        return [labeled("not saved", found.evidence, found.width)] if found.evidence else []
    saver = FailureSaver(context, found.evidence, message, context.command(found.rows))
    with context.session.progress.during("saving tensors", context.workload.id):
        return [saver.save(found.width)]


class FailureSaver:
    """Saves the failure of one judgment, which `message` tells, in a folder."""

    def __init__(self, context: CaseContext, failure: FailureEvidence, message: str, command: str) -> None:
        self._session, self._item, self._message, self._command = context.session, context.item, message, command
        self._spec, self._subject, self._failure = failure.spec, failure.subject, failure
        self._case, self._unnamed_because = id_from_root(context.item), context.executor.unnamed_because
        #: the kernel's name in the diagnosis; "out" where only its output was given
        self._name = failure.subject.name if failure.subject else "out"

    def save(self, width: int) -> str:
        """Save, and say where, or why not, in the case's record; return a line that says so. width: of the line's label."""
        try:
            target = self._save()
        except Exception as error:  # a failure that cannot be saved is still told
            named = "" if isinstance(error, NoSpaceError) else f"{type(error).__name__}: "
            why = f"{named}{' '.join(str(error).split())[:300]}"
            self._note(unsaved=why)
            return labeled("not saved", why, width)
        shown = _shown(target)
        self._note(saved=shown)
        return labeled("saved", f"{shown}  (python {shlex.quote(f'{shown}/repro.py')})", width)

    def _note(self, **changes: str) -> None:
        """Change fields of the record that was left last: that of this failure."""
        records = self._item.stash[RECORDS]
        records[-1] = changed(records[-1], **changes)

    def _save(self) -> Path:
        data = self._data()
        tensors = tensors_of(data)
        folder = Path(self._session.settings.more["save_failures"])
        target = folder / safe_name(self._case)
        folder.mkdir(parents=True, exist_ok=True)
        require_space(folder, sum(tensor.nbytes for tensor in tensors.values()))
        environment = self._environment(data)
        title = f"{self._message.splitlines()[0]}\n{self._case}, saved by pytest-attn on {environment['date']}"

        def write(folder: Path) -> None:
            write_tensors(folder / TENSORS, tensors, self._spec.workload.id)
            said = {**environment, "sha256": checksum(folder / TENSORS, environment)}
            (folder / ENVIRONMENT).write_text(json.dumps(said, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            text = script(title, self._kernel(str(target)), self._import_roots(str(target)))
            (folder / SCRIPT).write_text(text, encoding="utf-8")

        write_folder(target, write)
        return target

    def _data(self) -> FailureData:
        """Return what the judgment saw, or only the inputs of the first distribution."""
        comparison = self._failure.comparison
        evidence = comparison.mismatch.evidence if comparison and comparison.mismatch else None
        if evidence is None:
            first = self._spec.inputs[0]
            return FailureData(first, self._session.references.inputs_of(self._spec, first), self._spec.backward)
        distribution, reference, results = evidence.failed
        backward = not {"dq", "dk", "dv"}.isdisjoint(results)
        return FailureData(distribution, reference.called_with, backward, results, reference)

    def _environment(self, data: FailureData) -> dict[str, Any]:
        spec, comparison, broken = self._spec, self._failure.comparison, self._failure.broken
        machine = self._session.machines.machine(str(spec.device))
        levels = [named_numbers(asdict(row)) for row in comparison.tensors] if comparison else []
        return {
            "format": FORMAT,
            "case": self._case,
            "date": datetime.datetime.now(tz=datetime.timezone.utc).isoformat(timespec="seconds"),
            "verdict": (Verdict.BROKEN if broken else Verdict.MISMATCH).value,
            "message": self._message,
            "command": self._command,
            "invariants": list(broken),
            "levels": [level for level in levels if level["distribution"] == data.distribution],
            "workload": {"id": spec.workload.id, "fields": encode_workload(spec.workload)},
            "kernel": {"name": self._name, **(self._subject.origin() if self._subject else {})},
            "question": {
                "distribution": data.distribution,
                "seed": spec.seed,
                "backward": data.backward,
                "declared": asdict(spec.declared),
                "precision": encode_precision((spec.for_subject(self._subject) if self._subject else spec).profile),
                "limits": spec.limits,
                "leaves": list(spec.leaves),
                "parameters": list(spec.parameters),
                "thorough": self._session.settings.thorough,
            },
            "machine": {**asdict(machine), "kind": machine.kind, "torch_version": str(machine.torch_version)},
            "versions": versions_of(machine),
        }

    def _kernel(self, folder: str) -> KernelSource:
        """Return how the script in `folder` gets at the kernel."""
        subject, name = self._subject, self._name
        if self._unnamed_because:
            missing = f"a callable of (q, k, v) in one process; {self._case} {self._unnamed_because}"
            return KernelSource("my_kernel", missing=missing)
        if subject is None:
            return KernelSource("my_kernel", missing=f"a callable of (q, k, v) that returns what {self._case} compared")
        if subject.user_function is not None and subject.named:
            return KernelSource(repr(subject.named.name))
        if subject.user_function is not None:
            start = str(self._session.rootpath)
            return kernel_of(subject.user_function, name, self._case, subject.given_name, start)
        if Registry().is_known(name):
            return KernelSource(repr(name))
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
        """Return the folders from which the kernel, and the functions of the workload, are imported, seen from `folder`.

        And those of the ini value pythonpath, which these may import from.
        """
        mask, score_mod = self._spec.workload.mask, self._spec.workload.score_mod
        of_mask = getattr(mask, "fn", None), getattr(mask, "factory", None)
        functions = (self._subject.user_function if self._subject else None, *of_mask, score_mod)
        roots = list(map(import_root, functions))
        with contextlib.suppress(ValueError):  # pytest without its plugin python_path has no such value
            roots += map(str, self._item.config.getini("pythonpath"))
        return [relative_to(folder, root) for root in dict.fromkeys(roots) if root]


def _shown(path: Path) -> str:
    """Return a path that can be typed from the current folder."""
    try:
        return path.relative_to(Path.cwd()).as_posix()
    except ValueError:
        return str(path)


# -- a folder per failed case: its name, and how it is written atomically ----------------------------------------------


_LONGEST = 100  # characters of a name, beside its checksum: with any DIR, paths stay below Windows' 260
_ATTEMPTS = 5


class NoSpaceError(Exception):
    """The disk has less room than a failure takes."""


def safe_name(case: str) -> str:
    """Return a folder's name for a test's node id: safe on every file system, different for different ids.

    The checksum keeps ids apart that differ in nothing but case, length, or characters that file systems refuse.
    """
    readable = re.sub(r"\.py(?=::)", "", case)
    words = re.sub(r"[^A-Za-z0-9._+=]+", "-", readable).strip("-.")
    return f"{words[:_LONGEST].rstrip('-.')}-{hashlib.sha256(case.encode()).hexdigest()[:8]}"


def require_space(folder: Path, needed: int) -> None:
    """Raise NoSpaceError where the folder's disk has less than `needed` bytes, and a little for the small files."""
    free = shutil.disk_usage(folder).free
    if free < needed + (1 << 20):
        raise NoSpaceError(f"{_size(needed)} are needed in {folder}, {_size(free)} are free")


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder beside `target`, then put it in the place of `target`, whole. Raises OSError."""
    with ProcessFolder(base=target.parent) as temporary:
        unfinished = Path(temporary, target.name)
        unfinished.mkdir()
        write(unfinished)
        _put_in_place(unfinished, target)


def _put_in_place(unfinished: Path, target: Path, attempts: int = _ATTEMPTS) -> None:
    """Rename the new folder; where an older one is there, or another process puts one there, that one comes here."""
    try:
        if not _exchanged(unfinished, target):
            with contextlib.suppress(FileNotFoundError):
                target.replace(unfinished.with_name(f"older-{attempts}"))
            unfinished.rename(target)
    except OSError:
        if attempts == 1 or not target.exists():
            raise
        _put_in_place(unfinished, target, attempts - 1)


def _exchanged(one: Path, other: Path) -> bool:
    """Have two folders take each other's place at once, so that neither is missing meanwhile; False where none can."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    return exchange is not None and exchange(_HERE, bytes(one), _HERE, bytes(other), _EXCHANGE) == 0


#: AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
_HERE, _EXCHANGE = -100, 2


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:,.1f} MiB"


# -- repro.py: the kernel by its name, and one line that judges it again -----------------------------------------------


@dataclass(frozen=True)
class KernelSource:
    """A script's way to a kernel: the lines before, and the expression. `missing` says what to write where it cannot.

    called: the name that its test gave it, "" where it gave none.
    """

    expression: str
    lines: tuple[str, ...] = ()
    missing: str = ""
    called: str = ""

    @property
    def arguments(self) -> str:
        """The arguments of `Failure.check`."""
        return f"{self.expression}, name={self.called!r}" if self.called else self.expression


def script(title: str, kernel: KernelSource, paths: list[str]) -> str:
    """Return the text of repro.py. title: comment lines; paths: folders of imports, from the script's own folder."""
    judging = [
        "import pytest_attn",
        "",
        *kernel.lines,
        *(line.format(kernel=kernel) for line in (_PLACEHOLDER if kernel.missing else ())),
        f"judged = pytest_attn.load_failure(HERE).check({kernel.arguments})",
        'print(f"right now: {judged.subject} on {judged.workload}")',
    ]
    return "\n".join(
        [
            *(f"# {line}" for line in title.splitlines()),
            "# Judges the kernel again, on the tensors beside this file: status 1, with the diagnosis, while it is wrong,",
            "# and 2 where it could not be judged.",
            "import sys",
            "import traceback",
            "from pathlib import Path",
            "",
            "HERE = Path(__file__).resolve().parent",
            *[f"sys.path.insert(0, str((HERE / {path!r}).resolve()))" for path in reversed(paths)],
            "try:",
            *(f"    {line}".rstrip() for line in judging),
            "except Exception as error:",
            "    traceback.print_exc()",
            "    sys.exit(1 if isinstance(error, AssertionError) else 2)",
            "",
        ]
    )


#: what a user fills in, and what ends the script with status 2 until then
_PLACEHOLDER = (
    "{kernel.expression} = None  # put your kernel here: {kernel.missing}",
    "if {kernel.expression} is None:",
    '    print(f"{{__file__}}: in place of {kernel.expression} = None, put", {kernel.missing!r}, file=sys.stderr)',
    "    sys.exit(2)",
)


def conftest_backend(name: str, path: str) -> KernelSource:
    """Return a backend that the hook of a conftest registers. path: of the conftest, from the script's own folder."""
    lines = (
        "import runpy",
        "from pytest_attn.backends.registry import Registry",
        "",
        f"conftest = (HERE / {path!r}).resolve()",
        "sys.path.insert(0, str(conftest.parent))",
        "registry = Registry()",
        'runpy.run_path(str(conftest))["pytest_attn_backends"](registry)',
    )
    return KernelSource(f"registry[{name!r}]", lines)


def kernel_of(fn: Callable[..., Any], label: str, test: str, called: str = "", start: str = "") -> KernelSource:
    """Return a user's callable: imported where a module has it by its name, else as what the user is to put in its place.

    label: what messages call it. called: the name that its test gave it. start: the folder that its file is relative to.
    """
    module, name = _address(fn)
    if module:
        return KernelSource(name, (f"from {module} import {name.partition('.')[0]}", ""), called=called)
    code = getattr(fn, "__code__", None)
    where = f", {relative_to(start, code.co_filename)}:{code.co_firstlineno}" if code else ""
    return KernelSource("my_kernel", missing=f"the callable of (q, k, v) that {test} checked ({label}{where})", called=called)


def relative_to(start: str, path: str) -> str:
    """Return a path from a folder, with forward slashes; unchanged on another drive, or where no folder is named."""
    try:
        return Path(os.path.relpath(path, start)).as_posix() if start else path
    except ValueError:
        return path


def import_root(fn: object) -> str | None:
    """Return the folder from which a function's module is imported, None for an installed one or one without a file."""
    module, _ = _address(fn)
    path = getattr(sys.modules.get(module), "__file__", None)
    if not module or not path:
        return None
    parts = Path(path).with_suffix("").parts
    names = module.split(".")
    if parts[-1] == "__init__":
        parts = parts[:-1]
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    if list(parts[-len(names) :]) != names or any(Path(place) in Path(path).parents for place in installed):
        return None
    return str(Path(*parts[: -len(names)]))


def _address(fn: object) -> tuple[str, str]:
    """Return module and name under which any process can import a function; two empty texts where none can."""
    module, name = str(getattr(fn, "__module__", None) or ""), str(getattr(fn, "__qualname__", None) or "")
    words = [*module.split("."), *name.split(".")]
    if module == "__main__" or not all(word.isidentifier() and not keyword.iskeyword(word) for word in words):
        return "", ""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return (module, name) if found is fn else ("", "")
