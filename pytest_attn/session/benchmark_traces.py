"""Without pytest-benchmark in use, a run shows no line of its and leaves no folder."""

import contextlib
import os
from collections.abc import Generator, Sequence
from typing import Any

import pytest


def is_asked_for(config: pytest.Config) -> bool:
    """Return whether an option of pytest-benchmark was given: without, its table would only repeat ours."""
    given = [
        *map(str, config.invocation_params.args),
        *os.environ.get("PYTEST_ADDOPTS", "").split(),
        *config.getini("addopts"),
    ]
    return any(word.startswith("--benchmark") for word in given)


class BenchmarkTraces:
    """Holds pytest-benchmark's line of the header until a test takes `benchmark`, and removes its folder where empty."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_report_header(self) -> Generator[None, list[Any], list[Any]]:
        """Hold the line back."""
        lines = yield
        self._held = [line for line in lines if isinstance(line, str) and line.startswith("benchmark: ")]
        return [line for line in lines if line not in self._held]

    def pytest_report_collectionfinish(self, items: Sequence[pytest.Item]) -> list[Any]:
        """Show it where a test measures by pytest-benchmark itself."""
        return self._held if any("benchmark" in getattr(item, "fixturenames", ()) for item in items) else []

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Remove the folder that pytest-benchmark makes at each start, if nothing was saved."""
        storage = getattr(getattr(config, "_benchmarksession", None), "storage", None)
        if path := getattr(storage, "path", None):
            with contextlib.suppress(OSError):
                os.rmdir(path)
