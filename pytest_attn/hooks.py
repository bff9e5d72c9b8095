"""Hooks that a conftest may implement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_attn.backends.registry import Registry
    from pytest_attn.workloads.catalog import Catalog


@pytest.hookspec(historic=True)
def pytest_attn_backends(registry: Registry) -> None:
    """Register backends of your own.

    In a conftest.py::

        def pytest_attn_backends(registry):
            registry.add_function("mine", my_attention)          # fn(q, k, v, workload=workload) -> out
            registry.add_function("ours", "kernels:attention")   # imported when it is first called
            registry.add(MyBackend())                            # a pytest_attn.Backend
    """


@pytest.hookspec(historic=True)
def pytest_attn_workloads(catalog: Catalog) -> None:
    """Add workloads to the catalog.

    In a conftest.py::

        def pytest_attn_workloads(catalog):
            catalog.add(Workload(1536, heads=12, mask="causal", name="ours-1536"), group="ours", source="our model")
    """
