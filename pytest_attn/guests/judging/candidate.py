"""Candidates: what is to be judged, by a name, a file or a text, in a process of its own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pytest_attn.backends.named import is_name
from pytest_attn.guests.isolation.isolated_executor import InOwnProcess, launcher_of_process
from pytest_attn.guests.isolation.isolated_function import IsolatedFunction
from pytest_attn.reports.files import ProcessFolder
from pytest_attn.workloads.functions import describe

#: the function of a text, and of a file that is named without one
FUNCTION = "attention"
#: seconds that one call may take, if the budget of all does not end before
_CALL_SECONDS = 3600.0
_PATH = re.compile(r"(?P<file>.+\.py)(?::(?P<function>[A-Za-z_][\w.]*))?", re.DOTALL)


@contextmanager
def isolated(target: object, end: float) -> Iterator[IsolatedFunction]:
    """Give a function in a process of its own, which ends with the block.

    target: "FILE.py:FUNCTION", "module:FUNCTION", or the text of a file. end: of all calls, by time.monotonic. Raises
    ValueError for anything else.
    """
    if not isinstance(target, str):
        raise ValueError(
            f"judge: {describe(target)} is an object of this process, in which it would run; expected"
            ' "FILE.py:FUNCTION", "module:FUNCTION" or the text of a file; or say isolated=False, which trusts it'
        )
    launcher = launcher_of_process()
    with ProcessFolder() as folder:
        name, file = _named(target, Path(folder))
        made = IsolatedFunction(name, _CALL_SECONDS, launcher, InOwnProcess, file, end)
        try:
            yield made
        finally:
            made.close()
            if launcher.server is None:  # as where a kernel has ended it: the next gets a new one
                launcher_of_process.cache_clear()


def _named(target: str, folder: Path) -> tuple[str, str]:
    """Return the name of a target, and the file of its module, "" where that is searched for. folder: for a text."""
    if found := _PATH.fullmatch(target) if "\n" not in target else None:
        path = Path(found["file"])
        if not path.is_file():
            raise ValueError(f"judge: there is no file {found['file']!r}; expected FILE.py:FUNCTION")
        return f"{_module_of(path)}:{found['function'] or FUNCTION}", str(path.resolve())
    if is_name(target):
        return target, ""
    if "\n" not in target:
        raise ValueError(f'judge: expected "FILE.py:FUNCTION", "module:FUNCTION" or the text of a file, got {target[:60]!r}')
    text = folder / "candidate.py"
    text.write_text(target, encoding="utf-8")
    return f"candidate:{FUNCTION}", str(text)


def _module_of(path: Path) -> str:
    """Return a name for the module of a file that no module has here, nor in its own process."""
    name = re.sub(r"\W", "_", path.stem)
    name = name if name.isidentifier() else f"_{name}"
    while name in sys.modules or name in sys.stdlib_module_names:
        name += "_"
    return name
