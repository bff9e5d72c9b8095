"""Kernels are timed where these tests' own run is divided among workers of xdist, too."""

import pytest


@pytest.fixture(autouse=True)
def _no_worker(monkeypatch):
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)
