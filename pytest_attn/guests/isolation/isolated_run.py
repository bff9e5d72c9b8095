"""The functions of a run, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import pytest

from pytest_attn.backends.named import NamedFunction, is_imported_from_a_test, is_name
from pytest_attn.backends.subject import Subject, name_of

if TYPE_CHECKING:
    from pytest_attn.cases.executor import Executor
    from pytest_attn.session.options import Settings


class IsolatedFunctions:
    """Makes them by their names; torch is imported for the first one."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config, self._timeout = config, settings.timeout

    def __call__(self, name: str) -> NamedFunction:
        return self._made(name)

    @cached_property
    def _made(self) -> Callable[[str], NamedFunction]:
        from pytest_attn.guests.isolation.isolated_executor import isolate

        return isolate(self._config, self._timeout)

    def require_contained(self, subject: Subject | str, executor: Executor) -> None:
        """Fail for anything whose author's code runs in this process."""
        if isinstance(subject, Subject) and executor.contains(subject):
            return
        fn = subject.user_function if isinstance(subject, Subject) else None
        module, function = (str(getattr(fn, name, None)) for name in ("__module__", "__qualname__"))
        if not fn or not is_name(f"{module}:{function}"):
            module, function = "MODULE", "FUNCTION"
        elif is_imported_from_a_test(module):
            module = "MODULE"
        pytest.fail(
            f"--attn-isolated: {name_of(subject)} computes in the process that judges it; name a function in its place, of a"
            f' module that no test or conftest imports, as in attn.check("{module}:{function}"), or leave out --attn-isolated',
            pytrace=False,
        )
