"""repro.py of a saved failure: the kernel by its name, and one line that judges it again."""

from __future__ import annotations

import keyword
import os
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class KernelSource:
    """How a script gets at a kernel: the lines before, and the expression. `missing` says what to write where it cannot.

    called: the name that its test gave it, "" where it gave none.
    """

    expression: str
    lines: tuple[str, ...] = ()
    missing: str = ""
    called: str = ""

    @property
    def arguments(self) -> str:
        """What `Failure.check` is given."""
        return f"{self.expression}, name={self.called!r}" if self.called else self.expression


def script(title: str, kernel: KernelSource, paths: list[str]) -> str:
    """Return the text of repro.py. title: comment lines; paths: folders of imports, from the script's own folder."""
    return "\n".join(
        [
            *(f"# {line}" for line in title.splitlines()),
            "# Judges the kernel again, on the tensors beside this file: status 1, with the diagnosis, while it is wrong.",
            "import sys",
            "from pathlib import Path",
            "",
            "import pytest_attn",
            "",
            "HERE = Path(__file__).resolve().parent",
            *[f"sys.path.insert(0, str((HERE / {path!r}).resolve()))" for path in reversed(paths)],
            *kernel.lines,
            *_placeholder(kernel),
            f"judged = pytest_attn.load_failure(HERE).check({kernel.arguments})",
            'print(f"right now: {judged.subject} on {judged.workload}")',
            "",
        ]
    )


def _placeholder(kernel: KernelSource) -> list[str]:
    """Return the lines that a user fills in, and that end the script with status 2 until then."""
    if not kernel.missing:
        return []
    return [
        f"{kernel.expression} = None  # put your kernel here: {kernel.missing}",
        f"if {kernel.expression} is None:",
        f'    print(f"{{__file__}}: in place of {kernel.expression} = None, put", {kernel.missing!r}, file=sys.stderr)',
        "    sys.exit(2)",
    ]


def named_backend(name: str) -> KernelSource:
    """Return a backend that every process knows."""
    return KernelSource(repr(name))


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
