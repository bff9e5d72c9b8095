"""Hooks that a conftest may implement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_attn.backends.registry import Registry
    from pytest_attn.session.kinds import SelectedCase
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


@pytest.hookspec
def pytest_attn_cases(cases: list[SelectedCase]) -> None:
    """Take the cases of a run before the first of them runs, as to build their kernels; each worker of xdist calls it.

    A case has `test`, the id of its item, `workload`, `backend`, `backward` and `device`; a backend or a device is None where
    none is named. In a conftest.py::

        def pytest_attn_cases(cases):
            build_ahead({(case.workload.head_dim, case.workload.dtype) for case in cases})
    """
