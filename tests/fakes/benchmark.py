"""A small conftest that stands for plugin.py and its `attn`, and a test that measures."""

from importlib.metadata import version

#: pytest-benchmark 4, which is all that there is for pytest 7
IS_4 = version("pytest-benchmark").startswith("4.")

CONFTEST = """
import pytest
from pytest_attn.cases import pytest_benchmark


class Case:
    def __init__(self, request):
        self.request = request

    def measure(self, *samples, **facts):
        return pytest_benchmark.record_samples(self.request, samples, facts)


@pytest.fixture
def attn(request):
    return Case(request)


@pytest.fixture
def attn_benchmark(request):
    return pytest_benchmark.attn_benchmark_recorder(request)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    pytest_benchmark.mark_measured(config, items)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config, machine_info):
    pytest_benchmark.machine_info(config, machine_info)
"""

MEASURING = """
def test_measures(attn):
    assert attn.measure(1e-3, 3e-3, 2e-3) is {taken}

def test_does_not(attn):
    pass
"""
