"""The backends and workloads that a run knows: the built-in ones, and those that conftests register."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_attn.backends.registry import Registry
    from pytest_attn.backends.subject import Subject
    from pytest_attn.session.kinds import SelectedCase
    from pytest_attn.session.options import Settings
    from pytest_attn.workloads.catalog import Catalog


class Registrations:
    """Every start of pytest makes one, so it holds nothing until a test first needs a backend or workload."""

    def __init__(self, config: pytest.Config) -> None:
        self._hook = config.hook
        #: makes what stands for "module:function", and refuses everything else; None where functions run in this process
        self.named: Any = None
        self._versions: dict[str, str] = {}

    @cached_property
    def registry(self) -> Registry:
        """The backends, with those of conftests; later conftests add theirs when pytest loads them."""
        from pytest_attn.backends.registry import Registry

        registry = Registry(self.named) if self.named else Registry()
        _call_conftests(self._hook.pytest_attn_backends, registry=registry)
        return registry

    @cached_property
    def catalog(self) -> Catalog:
        """The workloads, with those of conftest.py."""
        from pytest_attn.workloads.catalog import builtin_catalog

        catalog = builtin_catalog()
        _call_conftests(self._hook.pytest_attn_workloads, catalog=catalog)
        return catalog

    def version_of(self, backend: Subject) -> str:
        """Return the version of a backend's library, asked for once; "?" where the backend cannot say."""
        if backend.name not in self._versions:
            try:
                self._versions[backend.name] = backend.version()
            except Exception:  # of a conftest's backend: a fault there is no fault of the kernel
                self._versions[backend.name] = "?"
        return self._versions[backend.name]

    def require_selected(self, settings: Settings) -> None:
        """Raise pytest.UsageError for a selected backend or workload that is not registered."""
        for flag, tokens in (("--attn-backends", settings.backends), ("--attn-workloads", settings.workloads)):
            for token in tokens:
                name = token.removeprefix("-")
                if name in ("all", "available"):
                    continue
                try:
                    self.registry.require(name) if flag == "--attn-backends" else self.catalog.select(name)
                except ValueError as error:
                    raise pytest.UsageError(f"{flag}: {error}") from None


def tell_conftests(config: pytest.Config, cases: list[SelectedCase]) -> None:
    """Hand conftests the cases of a run; raise pytest.UsageError with the words of one that raised."""
    hook = config.hook.pytest_attn_cases
    try:
        hook(cases=cases)
    except Exception as error:
        if hasattr(config, "workerinput"):  # xdist loses the words of a usage error
            raise
        raise _raised_in(hook, error) from error


def _call_conftests(hook: Any, **arguments: object) -> None:
    """Let conftests register; raise pytest.UsageError with the words of one that raised anything but its own ValueError."""
    try:
        hook.call_historic(kwargs=arguments)
    except (ValueError, pytest.UsageError):
        raise
    except Exception as error:
        raise _raised_in(hook, error) from error


def _raised_in(hook: Any, error: Exception) -> pytest.UsageError:
    return pytest.UsageError(f"{hook.name} of a conftest raised {type(error).__name__}: {error}")
