"""The repository that a run is of: its commit, and the files of it that the run has imported."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

#: folders of a repository in which its packages lie
_HOMES = ("", "src", "python")
#: endings of files that kernels are built of: they are read, and not imported
BUILT = (".cu", ".cuh", ".hip", ".metal", ".c", ".cc", ".cpp", ".h", ".hpp", ".ptx")
#: seconds that git may take
_SECONDS = 20


def top_of(folder: Path) -> Path | None:
    """Return the top of the repository in which a folder lies, links followed; None where it lies in none."""
    real = folder.resolve()
    return next((one for one in (real, *real.parents) if (one / ".git").exists()), None)


def commit_of(folder: Path) -> str:
    """Return the commit of a repository, and where files differ from it, a mark that says how; "" where git has none."""
    commit = git(folder, "rev-parse", "HEAD").decode().strip()
    changes = git(folder, "diff", "HEAD") if commit else b""
    return f"{commit}+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else commit


def git(folder: Path, *words: str, text: bytes | None = None) -> bytes:
    """Return what git prints, nothing where it fails or takes too long. text: its standard input."""
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, input=text, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return b"" if done.returncode else done.stdout


# -- what was imported -----------------------------------------------------------------------------------------------------


def imported_of(top: Path) -> dict[str, str]:
    """Return the Python files that this process has imported of a repository, by their places in it.

    A module that is installed has the places that its name may have there: else an installation of another commit would be
    taken for this one.
    """
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py"):
            real = Path(os.path.realpath(file))
            found.update(dict.fromkeys(_places(name, real, top), str(real)))
    return found


def _places(name: str, file: Path, top: Path) -> Iterator[str]:
    if file.is_relative_to(top) and "site-packages" not in file.parts:
        yield file.relative_to(top).as_posix()
    elif name.partition(".")[0] not in sys.stdlib_module_names:
        within = Path(*name.split("."))
        within = within / file.name if file.name == "__init__.py" else within.with_name(file.name)
        yield from ((Path(home) / within).as_posix() for home in _HOMES if (top / home / within).is_file())


def sources_of(top: Path, imported: Mapping[str, str]) -> dict[str, str]:
    """Return git's ids of what files hold, by their places: of those that were imported, and those to build that it lacks.

    Not of files that git ignores, as those that a build writes; an import is none that only this machine has git ignore.
    """
    new = _listed(top, "--others", "--exclude-standard")
    known = _listed(top, "--cached") | _listed(top, "--others", "--exclude-per-directory=.gitignore")
    files = {place: str(top / place) for place in new if place.endswith(BUILT)}
    files |= {place: imported[place] for place in known & imported.keys()}
    places = [place for place in sorted(files) if os.path.isfile(files[place])]
    ids = git(top, "hash-object", "--stdin-paths", text=os.fsencode("".join(f"{files[one]}\n" for one in places)))
    return dict(zip(places, ids.decode().split(), strict=False))


def _listed(top: Path, *words: str) -> set[str]:
    return {*os.fsdecode(git(top, "ls-files", "-z", *words)).split("\0")} - {""}


def sources_at(top: Path, commit: str) -> dict[str, str]:
    """Return git's ids of the files of a commit, by their places."""
    lines = os.fsdecode(git(top, "ls-tree", "-r", "-z", commit)).split("\0")
    return {place: told.split()[2] for told, _, place in (line.partition("\t") for line in lines) if place}


def own_digest() -> str:
    """Return the SHA-256 of this package: of its code and the data that it reads."""
    package, whole = Path(__file__).parents[1], hashlib.sha256()
    files = {path.relative_to(package).as_posix(): path for end in ("py", "jsonl") for path in package.rglob(f"*.{end}")}
    for name in sorted(files):
        whole.update(f"{name} {hashlib.sha256(files[name].read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()
