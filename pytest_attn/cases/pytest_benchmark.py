"""Latencies that were measured elsewhere, in pytest-benchmark as if it had timed them: replayed through its timer."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from types import FunctionType
from typing import Any

import pytest

from pytest_attn.backends.machine import installed_version, opened_nvml, text_of
from pytest_attn.cases.unjudged import functions_named, names_in

_RECORDED = pytest.StashKey[bool]()


class ReplayClock:
    """A timer for pytest-benchmark: each pair of readings is `pending` seconds apart, exactly."""

    __name__ = "pytest_attn"  # of its instances: options.timer in pytest-benchmark's JSON

    def __init__(self) -> None:
        self.pending = 0.0
        self.readings = 0

    def __call__(self) -> float:
        """Read the clock, in seconds: 0, then `pending`, then 0 again."""
        self.readings += 1
        return 0.0 if self.readings % 2 else self.pending


class _OtherClockError(Exception):
    """The fixture `benchmark` was made before the clock was there, so it reads another one."""


def wants(config: pytest.Config) -> bool:
    """Return whether pytest-benchmark is there and records in this process: not disabled, skipped or in an xdist run."""
    session: Any = config.pluginmanager.get_plugin("pytest-benchmark")
    return session is not None and not session.disabled and not session.skip


def record_samples(request: pytest.FixtureRequest, samples: Sequence[float], facts: Mapping[str, Any]) -> bool:
    """Give pytest-benchmark the seconds per call of one test, and `facts` (JSON's types) as its extra_info["attn"].

    Returns whether it took them: its fixture serves a test once, and a test that takes `benchmark` uses that itself.
    """
    item = request.node
    if not (len(samples) and _claim(item) and wants(item.config)) or "benchmark" in item.fixturenames:
        return False
    clock = ReplayClock()
    marker = item.get_closest_marker("benchmark")
    options = {**(marker.kwargs if marker else {}), "timer": clock}
    item.add_marker(pytest.mark.benchmark(**options), append=False)
    benchmark = request.getfixturevalue("benchmark")
    from pytest_benchmark.fixture import BenchmarkFixture

    if not isinstance(benchmark, BenchmarkFixture) or benchmark.stats is not None:  # another's, or used at run time
        return False
    seconds = iter([float(sample) for sample in samples])

    def replay() -> None:
        if not clock.readings:
            raise _OtherClockError
        clock.pending = next(seconds, 0.0)  # --benchmark-cprofile calls once more

    try:
        benchmark.pedantic(replay, rounds=len(samples))  # type: ignore[no-untyped-call]
    except _OtherClockError:
        return False
    benchmark.extra_info["attn"] = dict(facts)
    return True


def attn_benchmark_recorder(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return record(samples, **facts), which gives pytest-benchmark the seconds per call that a test measured itself.

    It raises ValueError unless samples are finite numbers >= 0, and RuntimeError where the test's one row is taken. It does so
    even if pytest-benchmark is absent or disabled, in which case it records nothing.
    """

    def record(samples: Sequence[float], /, **facts: Any) -> None:
        seconds = _seconds(samples)
        if _RECORDED in request.node.stash or "benchmark" in request.node.fixturenames:
            raise RuntimeError(
                "attn_benchmark: pytest-benchmark keeps one row per test, and this test's is taken by an earlier record,"
                " attn.measure or the fixture benchmark; parametrize the test, or write another one"
            )
        record_samples(request, seconds, facts)

    return record


def mark_measured(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Show the tests that measure to --benchmark-only and --benchmark-skip, which look for a fixture `benchmark`.

    For pytest_collection_modifyitems, before pytest-benchmark's own.
    """
    if config.getoption("benchmark_only", False) or config.getoption("benchmark_skip", False):
        functions = [item for item in items if isinstance(item, pytest.Function)]
        shown = [
            item
            for item in functions
            if "attn_benchmark" in item.fixturenames or ("attn" in item.fixturenames and _calls_measure(item.function))
        ]
        config.pluginmanager.register(_OwnNames(shown))
        for item in shown:
            item.fixturenames = [*item.fixturenames, "benchmark"]  # a new list: parametrized items share theirs


class _OwnNames:
    """Takes the name back once it was seen.

    With it pytest would set `benchmark` up before the test: with another clock, and for nothing where the test ends before it
    measures, of which pytest-benchmark warns.
    """

    def __init__(self, items: list[pytest.Function]) -> None:
        self._names = [(item, item.fixturenames) for item in items]

    def pytest_collection_finish(self) -> None:
        """Give the items their own lists again."""
        for item, names in self._names:
            item.fixturenames = names


def machine_info(config: pytest.Config, info: dict[str, Any]) -> None:
    """Add info["attn"]: the machine's GPUs, driver, the CUDA version of the driver, torch's version; nothing without NVML.

    For pytest_benchmark_update_machine_info. It neither initializes CUDA nor imports torch.
    """
    try:
        with opened_nvml() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            gpus = dict.fromkeys(text_of(nvml.nvmlDeviceGetName(handle)) for handle in handles)
            driver, cuda = text_of(nvml.nvmlSystemGetDriverVersion()), int(nvml.nvmlSystemGetCudaDriverVersion())
    except Exception:  # no package, no driver, no permission: a run does not end for the sake of a name
        return
    if gpus:
        info["attn"] = {
            "gpu": ", ".join(gpus),
            "driver": driver,
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "torch": installed_version("torch"),  # also once it is imported: a comparison asks early, saving at the end
        }


# -- details -----------------------------------------------------------------------------------------------------------


def _claim(item: pytest.Item) -> bool:
    """Return whether the item records for the first time; plugins that run an item again tear it down in between."""
    if _RECORDED in item.stash:
        return False
    item.stash[_RECORDED] = True
    item.addfinalizer(lambda: item.stash.__delitem__(_RECORDED))
    return True


def _seconds(samples: Sequence[float]) -> list[float]:
    """Return samples as a list; raises ValueError unless they are durations in seconds."""
    try:
        values = list(samples)
    except TypeError:
        raise ValueError(f"attn_benchmark needs a sequence of seconds, got {samples!r}") from None
    if not values:
        raise ValueError("attn_benchmark needs at least one sample, got none")
    for index, value in enumerate(values):
        if not isinstance(value, Real) or isinstance(value, bool):
            raise ValueError(f"attn_benchmark needs numbers, sample {index} is {value!r} ({type(value).__name__})")
        if not _is_duration(value):
            raise ValueError(f"attn_benchmark needs finite seconds >= 0, sample {index} is {value!r}")
    return values


def _is_duration(value: Real) -> bool:
    try:
        return 0.0 <= float(value) < math.inf
    except OverflowError:
        return False


def _calls_measure(function: object) -> bool:
    """Return whether the code of a test, or of a function that it calls by name, names `measure`."""
    tests = list(_layers(function))
    helpers = (one for test in tests for one in functions_named(test) if one.__module__ == test.__module__)
    return any("measure" in names_in(layer) for one in (*tests, *helpers) for layer in _layers(one))


def _layers(function: object) -> Iterator[FunctionType]:
    """Yield a function and those that it wraps."""
    while isinstance(function, FunctionType):
        yield function
        function = vars(function).get("__wrapped__")
