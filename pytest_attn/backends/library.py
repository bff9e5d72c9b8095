"""Optional libraries: found without importing them, tried out in a process of their own, imported when a case needs them."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

from pytest_attn.backends.contexts import environment
from pytest_attn.backends.import_trial import import_failure, try_import
from pytest_attn.backends.versions import installed_version


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
        name = self._installed()
        return (installed_version(name) if name else None) or "?"

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
        return next((name for name in self.distributions if _is_installed(name)), None)


@functools.cache
def _is_installed(distribution: str) -> bool:
    return bool(installed_version(distribution))


def _has_file(top: str, rest: str) -> bool:
    """Whether the module is on the path, without importing its parents as find_spec on a dotted name would."""
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


def try_imports(libraries: Sequence[Library]) -> None:
    """Try several libraries at the same time, each in its child process, so that `broken_because` then answers at once."""
    untried = [one for one in libraries if one.missing_because() is None and one.module not in sys.modules]
    needed = {name: value for one in untried for name, value in one.environment().items()}
    with environment(needed), ThreadPoolExecutor() as threads:
        list(threads.map(try_import, {one.module for one in untried}))
