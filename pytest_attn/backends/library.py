"""Optional libraries: found without importing them, tried out in a process of their own, imported when a case needs them."""

import contextlib
import fcntl
import functools
import hashlib
import importlib
import importlib.machinery
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from pytest_attn.backends.compilers import keeping_flash4
from pytest_attn.backends.contexts import environment, quiet
from pytest_attn.backends.machine import installed_version

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Library:
    """An optional library: its distribution, and the module that its adapter needs.

    A module alone proves nothing (flash-attn-4 installs a folder of flash-attn), and neither does a distribution alone
    (transformer-engine is a shell around its extension), so both must be there. `install` is what a user types.
    `environment` makes variables that the import needs, set for its time only.
    """

    distributions: tuple[str, ...]
    module: str
    install: str
    environment: Callable[[], dict[str, str]] = dict

    @property
    def name(self) -> str:
        """The distribution that is installed, or the first that would do."""
        return self._installed() or self.distributions[0]

    def version(self) -> str:
        """Return the installed version, "?" where there is none."""
        return next(filter(None, map(_version_of, self.distributions)), "?")

    def missing_because(self) -> str | None:
        """Say that the library is not installed, or which part of it is missing; None where it is. Imports nothing."""
        name = self._installed()
        if name is None:
            return f"{self.distributions[0]} is not installed; {self.install}"
        top, _, rest = self.module.partition(".")
        try:
            there = _has_file(top, rest)
        except (ImportError, ValueError) as error:
            return f"{name} is installed, but {self.module} cannot be looked up: {error}"
        return None if there else f"{name} is installed, but has no module {self.module}; {self.install}"

    def broken_because(self) -> str | None:
        """Import the library's module, first in a child process; say in its own words why it cannot be, or None."""
        with environment(self.environment()):
            return import_failure(self.module)

    def load(self) -> ModuleType:
        """Return the module. Raises RuntimeError, in the library's own words, where it cannot be imported."""
        reason = self.broken_because()
        if reason is not None:
            raise RuntimeError(reason)
        return importlib.import_module(self.module)

    def _installed(self) -> str | None:
        return next(filter(_version_of, self.distributions), None)


#: those whose kernels torch can call in place of its own: the two generations of flash-attn 3, and flash-attn 4
_INSTALL = "build it from the folder hopper of Dao-AILab/flash-attention"
FLASH3 = (
    Library(("flash-attn-3",), "flash_attn_3.flash_attn_interface", _INSTALL),
    Library(("flash-attn-3",), "flash_attn_interface", _INSTALL),
)
FLASH4 = Library(("flash-attn-4",), "flash_attn.cute", "pip install --pre flash-attn-4", keeping_flash4)


@functools.cache
def _version_of(distribution: str) -> str | None:
    return installed_version(distribution)


@functools.cache
def _has_file(top: str, rest: str) -> bool:
    """Return whether the module is on the path, without importing its parents as find_spec on a dotted name would."""
    spec = find_spec(top)
    if spec is None or not rest:
        return spec is not None
    part = os.path.join(*rest.split("."))
    suffixes = ("", ".py", *importlib.machinery.EXTENSION_SUFFIXES)
    folders = spec.submodule_search_locations or ()
    return any(os.path.exists(os.path.join(folder, part + suffix)) for folder in folders for suffix in suffixes)


def refusal_of_build(error: Exception) -> str | None:
    """Return what a library's build says it was made without (a head dimension, a dtype); None for any other fault."""
    text = " ".join(str(error).split())
    is_fault = re.search(r"CUDA (driver )?error|out of memory", text)
    return None if is_fault or not re.search(r"head|build|support|dtype|fp16", text) else text


def refusals_of_trial(trial: Callable[[], object]) -> tuple[str, ...]:
    """Call a library with little, and return what its build says it was made without; any other fault is raised."""
    try:
        trial()
    except RuntimeError as error:
        if (reason := refusal_of_build(error)) is None:
            raise
        return (reason,)
    return ()


def try_imports(libraries: Sequence[Library]) -> None:
    """Try several libraries at the same time, each in its child process, so that `broken_because` then answers at once."""
    untried = [one for one in libraries if one.missing_because() is None and one.module not in sys.modules]
    needed = {name: value for one in untried for name, value in one.environment().items()}
    with environment(needed), ThreadPoolExecutor() as threads:
        list(threads.map(try_import, {one.module for one in untried}))


# -- tried out in a process of its own ---------------------------------------------------------------------------------------

_IMPORT_SECONDS = 120
_DAY = 86_400


@functools.cache
def import_failure(module: str) -> str | None:
    """Import a module, first in a child process; say in its own words why it cannot be, or None."""
    if module in sys.modules:
        return None
    reason = try_import(module)
    if reason is None:
        tried = _mark_of(module)
        try:
            with quiet(), _begun(tried):
                importlib.import_module(module)
        except (Exception, SystemExit) as error:  # whatever a library raises, it is a library that cannot be used
            reason = describe_error(error)
            _unmark(tried)
        else:
            _mark(_mark_of(module))
    return None if reason is None else f"{module} is installed but cannot be imported: {reason}"


def try_import(module: str) -> str | None:
    """Say why a module cannot be imported, or None: what is known of it, or what it says in a child process."""
    if _has_folder() and _is_marked(_mark_of(module)):
        return None

    def tried() -> str | None:
        if (reason := try_in_child(module)) is None:
            _mark(_mark_of(module))
        return reason

    return once_in_a_run(module, tried)


def describe_error(error: BaseException) -> str:
    """Return an exception's type and text in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# -- what is known of a library -------------------------------------------------------------------------------------------


def _mark_of(module: str) -> Path:
    """Return the empty file that stands for "imported without harm", by this interpreter from this place with these packages.

    To be asked for anew after an import: a first one may put __pycache__ into the package, which is another state of it. Not
    of sys.path, which has the folder of each test: an import that it spoils once takes the mark away again.
    """
    spec = find_spec(module.partition(".")[0])
    folders = [*(spec.submodule_search_locations or [])] if spec else []
    states = [(folder, os.stat(folder).st_mtime_ns) for folder in folders if os.path.isdir(folder)]
    known = repr((module, sys.executable, os.environ.get("LD_LIBRARY_PATH"), states, installed_packages()))
    return _folder() / hashlib.sha256(known.encode()).hexdigest()[:32]


def _folder() -> Path:
    return Path(tempfile.gettempdir(), f"pytest-attn-imports-{os.getuid()}")  # which nobody need clear after an uninstallation


def _has_folder() -> bool:
    """Make the folder, and say whether this user owns it: another's may hold links to files of this one."""
    with contextlib.suppress(OSError):
        _folder().mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(_folder())
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


@functools.cache
def installed_packages() -> list[str]:
    """List the names and versions of all installed distributions."""
    found = []
    for distribution in metadata.distributions():
        with contextlib.suppress(Exception):  # a folder that an uninstallation left has no name
            said = distribution.metadata  # which is read from its file each time
            found.append(f"{said['Name']} {said['Version']}")
    return sorted(found)


def _mark(path: Path) -> None:
    with contextlib.suppress(OSError):  # a home that cannot be written to: it is tried in a child every time
        if _has_folder():
            path.touch()


def _unmark(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _begun(mark: Path) -> Iterator[None]:
    """Hold a file beside the mark meanwhile, which a process leaves, held by no one, where an import ends it after all."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            if _has_folder():
                begun = mark.with_name(f"{mark.name}-{os.getpid()}")
                fcntl.flock(stack.enter_context(open(begun, "w")), fcntl.LOCK_EX)
                stack.callback(_unmark, begun)
        yield


def _is_marked(mark: Path) -> bool:
    """Return whether the mark is there; take it away first where an import has ended its process since."""
    for begun in mark.parent.glob(f"{mark.name}-*"):
        with contextlib.suppress(OSError), open(begun) as file:  # held by one that imports now, or gone meanwhile
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _unmark(mark)
            _unmark(begun)
    return mark.exists()


def once_in_a_run(question: str, find_out: Callable[[], Answer]) -> Answer:
    """Return what find_out returns, which JSON must hold: in workers of xdist on one host, what it returned in the first."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None or not _has_folder():
        return find_out()
    path = _folder() / f"{hashlib.sha256(f'{question}, {sys.executable}'.encode()).hexdigest()[:32]}-{run}"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # where no file can be written, each worker finds it out
            lock = stack.enter_context(open(path.with_name(f"{path.name}.lock"), "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # of one that was not written to its end
            known: Answer = json.loads(path.read_text())[0]
            return known
        found = find_out()
        with contextlib.suppress(OSError):
            for old in path.parent.glob("*-*"):
                if old.stat().st_mtime < time.time() - _DAY:
                    old.unlink(missing_ok=True)
            path.write_text(json.dumps([found]))
    return found


# -- the child process ------------------------------------------------------------------------------------------------------

_CHILD = """
import importlib, json, os, sys
result, module = int(sys.argv[1]), sys.argv[2]
sys.path[:] = json.loads(sys.argv[3])
try:
    importlib.import_module(module)
    reason = ""
except BaseException as error:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
os.write(result, json.dumps(reason).encode())
os._exit(0)
"""


def try_in_child(module: str) -> str | None:
    """Import `module` in a new interpreter; return why it failed, also where it took the interpreter down."""
    with tempfile.TemporaryFile() as result, tempfile.TemporaryFile() as errors:  # pipes would wait for grandchildren
        command = [sys.executable, "-c", _CHILD, str(result.fileno()), module, json.dumps(sys.path)]
        code = _exit_code(command, result.fileno(), errors.fileno())
        if code is None:
            return f"its import took longer than {_IMPORT_SECONDS} s"
        result.seek(0)
        errors.seek(0)
        said, last = result.read(), errors.read().decode(errors="replace").strip().splitlines()[-1:]
    if said:
        return json.loads(said) or None
    end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"its import ends the process with {end}: {last[0].strip()[:300] if last else 'it said nothing'}"


def _exit_code(command: list[str], result: int, errors: int) -> int | None:
    """Run a command in a process group of its own, which is killed, with None returned, where it does not end in time."""
    child = subprocess.Popen(
        command, pass_fds=(result,), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
    )
    try:
        return child.wait(_IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
