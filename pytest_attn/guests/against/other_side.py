"""The other side of --attn-against: which version it is, and how a process of it is started.

As a plugin, `-p`, it has a process of the other side say what it has imported from this tree or from an installed copy: else
one version would be timed against itself. PYTEST_DONT_REWRITE: a conftest may have imported it before.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_attn.processes.fork_server import Command
from pytest_attn.processes.last_words import last_words
from pytest_attn.processes.worker import Worker
from pytest_attn.reports.files import ProcessFolder
from pytest_attn.session.repository import imported_of
from pytest_attn.version import __version__

#: the word for this version itself
SELF = "self"
#: seconds that an interpreter may take to say what it has
_ASKING_SECONDS = 120
#: digits of a commit that are shown
_SHOWN = 10
_ASK = "import pytest_attn.processes.worker, pytest_attn.version as v; print(v.__version__)"


class OtherSideError(Exception):
    """The other side cannot be asked; the text says why."""


@dataclass(frozen=True)
class OtherSide:
    """A version that this one is compared with.

    text: as it was typed. name: in messages. python: its interpreter. top: of the repository whose `commit` it is; None where
    it is the tree as it is.
    """

    text: str
    name: str
    python: str = sys.executable
    top: Path | None = None
    commit: str = ""

    @property
    def is_foreign(self) -> bool:
        """True where another interpreter runs it, with another torch perhaps."""
        return self.top is None and self.text != SELF

    @contextmanager
    def placed(self) -> Iterator[Callable[[Command], Command]]:
        """Have its files there while the block runs; yield what makes a command one of its own.

        They are written without a mark in the repository, so that a run that is killed leaves a temporary folder behind, which
        the next one removes. Raises OtherSideError.
        """
        if self.text == SELF:
            yield lambda command: command
            return
        with ProcessFolder("against-") as folder:
            own = {"TORCH_EXTENSIONS_DIR": f"{folder}/extensions"}  # what torch builds is found there by its name alone
            if self.top is None:
                yield lambda one: one._replace(python=self.python, environment={**one.environment, **own})
                return
            tree, index = Path(os.path.realpath(folder)) / self.top.name, {"GIT_INDEX_FILE": f"{folder}/index"}
            _git(self.top, "read-tree", self.commit, **index)
            _git(self.top, "checkout-index", "--all", f"--prefix={tree}/", **index)
            yield Moved(self.top, tree, own)


@dataclass(frozen=True)
class Moved:
    """Has commands run in a tree, `there`, what they would do at `here`. more: variables of their environment."""

    here: Path
    there: Path
    more: Mapping[str, str]

    def __call__(self, command: Command) -> Command:
        folder = Path(self.path(str(command.folder)))
        folder.mkdir(parents=True, exist_ok=True)
        configured = f"-c{self.there}"  # by a file that this tree may lack: it has another one, or none
        moved = [self.path(one) for one in command.arguments]
        told = {**command.told, "tests": [self.path(str(one)) for one in command.told["tests"]]}  # type: ignore[attr-defined]
        return command._replace(
            arguments=[one for one in moved if not one.startswith(configured) or os.path.exists(one[2:])],
            environment={
                **command.environment,
                **self.more,
                "PYTHONPATH": os.pathsep.join(self._imports(command.environment)),
            },
            folder=folder,
            told=told,
        )

    def path(self, text: str) -> str:
        """Return a text with the path of the one tree replaced by that of the other."""
        return re.sub(rf"{re.escape(str(self.here))}(?=$|[/:])", lambda match: str(self.there), text)

    def _imports(self, environment: Mapping[str, str]) -> Iterator[str]:
        """Yield where its modules are looked for: this process may have found the tree by an editable installation."""
        own = (os.path.realpath(one) for one in sys.path if one and is_within(one, self.here))
        given = environment.get("PYTHONPATH", "").split(os.pathsep)
        yield from dict.fromkeys(self.path(one) for one in (*own, *given) if one)


def is_within(path: str, tree: Path) -> bool:
    """Return whether a path lies in a tree, links followed, and not in an environment that may lie there.

    A relative one is not of a file: torch has modules with such names.
    """
    real = Path(os.path.realpath(path))
    return os.path.isabs(path) and real.is_relative_to(tree) and not real.is_relative_to(os.path.realpath(sys.prefix))


def installed_instead(tree: Path, other: Path) -> list[str]:
    """Return the files of another text that this process has imported in place of those of a tree which `other` has, too."""
    found = {place: Path(file) for place, file in imported_of(tree).items() if not is_within(file, tree)}
    shared = {place: file for place, file in found.items() if (other / place).is_file()}
    return [str(file) for place, file in shared.items() if file.read_bytes() != (tree / place).read_bytes()]


def other_side(text: str) -> OtherSide:
    """Return what a user has typed. Raises ValueError where there is no such version."""
    if text == SELF:
        return OtherSide(text, "this version itself")
    if os.sep in text and os.path.isfile(text) and os.access(text, os.X_OK):  # else a file would hide a branch, and be run
        return _interpreter(text)
    return _revision(text)


def _interpreter(text: str) -> OtherSide:
    python = os.path.abspath(text)
    try:
        asked = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=_ASKING_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{text} does not start: {error}") from None
    if asked.returncode or not (found := asked.stdout.strip()):
        raise ValueError(f"{text} has no pytest-attn that can be imported: {last_words(asked.stderr)}; install it there")
    if found != __version__:
        raise ValueError(f"{text} has pytest-attn {found}, this is {__version__}; install the same in both")
    return OtherSide(text, text, python)


def _revision(text: str) -> OtherSide:
    folder = Path.cwd()
    try:
        top = Path(os.path.normpath(folder / _git(folder, "rev-parse", "--show-cdup")))
    except OtherSideError as error:
        raise ValueError(
            f"{text!r} is not the path of an interpreter, and {folder} is in no git repository ({error}); run pytest in the"
            " repository"
        ) from None
    try:
        commit = _git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{text}^{{commit}}")
    except OtherSideError:
        raise ValueError(
            f"{text!r} is neither a revision of {top} nor the path of an interpreter; git log lists revisions, git fetch gets"
            " more"
        ) from None
    if is_within(own := str(Path(__file__).resolve().parents[2]), top):
        raise ValueError(f"pytest-attn itself lies in {top} ({own}): install it outside, or both sides have another judge")
    return OtherSide(text, f"{text} ({commit[:_SHOWN]})", top=top, commit=commit)


def _git(folder: Path, *words: str, **environment: str) -> str:
    """Return what git prints. Raises OtherSideError with its words."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, **environment},
            check=False,
        )
    except OSError as error:
        raise OtherSideError(f"git: {error.strerror}") from None
    if done.returncode:
        raise OtherSideError(f"git {words[0]}: {last_words(done.stderr, 'it failed')}")
    return done.stdout.strip()


def pytest_sessionfinish() -> None:
    """Say which modules and libraries are not of the other side's tree."""
    worker = Worker.of_this_process()
    if worker is None:
        return
    here, there = Path(worker.told["here"]), worker.told["there"] and Path(worker.told["there"])
    files = {str(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    with suppress(OSError):  # on other systems; libraries that no module stands for, as those of torch.ops
        files.update(re.findall(r"/.*\.so$", Path("/proc/self/maps").read_text(), re.MULTILINE))
    strays = [one for one in files if is_within(one, here) and not (there and is_within(one, there))]
    has_built = there is not None and any(is_within(one, there.parent) for one in files if one.endswith(".so"))
    worker.channel.send(strays=sorted(strays) + (installed_instead(there, there) if there else []), has_built=has_built)
