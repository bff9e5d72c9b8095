"""Kernels are timed where these tests' own run is divided among workers of xdist, too, and wait for none of them."""

import pytest

from pytest_attn.latency import disturbance


@pytest.fixture(autouse=True)
def _no_worker(monkeypatch):
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(disturbance, "_MOST_LOST_SECONDS", 0.1)
