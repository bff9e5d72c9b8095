"""Samples in pytest-benchmark, through runs of the real one; a small conftest stands for plugin.py and its `attn`."""

import json
import math
import statistics
import sys
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest

from pytest_attn.session import bridge

CONFTEST = """
import pytest
from pytest_attn.session import bridge


class Case:
    def __init__(self, request):
        self.request = request

    def measure(self, *samples, **facts):
        return bridge.record_samples(self.request, samples, facts)


@pytest.fixture
def attn(request):
    return Case(request)


@pytest.fixture
def attn_benchmark(request):
    return bridge.attn_benchmark_recorder(request)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    bridge.mark_measured(config, items)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config, machine_info):
    bridge.machine_info(config, machine_info)
"""
MEASURING = """
def test_measures(attn):
    assert attn.measure(1e-3, 3e-3, 2e-3) is {taken}

def test_does_not(attn):
    pass
"""
#: no decimal fraction is exact; subnormal, zero and large; the same twice; a whole number
SAMPLES = [0.1 + 0.2, 1e-6 / 3, math.nextafter(2e-5, 1), 5e-324, 0.0, 12345.678, 12345.678, 3]


@pytest.fixture
def bench(pytester, monkeypatch):
    """Write a test file, and run it without pytest-attn itself; a warning is an error, and so is one in the summary."""
    pytester.makeini("[pytest]\nfilterwarnings = error\naddopts = --strict-markers\n")
    pytester.makeconftest(CONFTEST)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # machine_info's own tests give it one

    def run(*args, source=None, in_process=True, rc=0, **outcomes):
        if source is not None:
            pytester.makepyfile(source)
        start = pytester.runpytest_inprocess if in_process else pytester.runpytest_subprocess
        result = start("-p", "no:attn", "-p", "no:cacheprovider", *args)
        assert result.ret == rc
        result.assert_outcomes(**{"warnings": 0, "deselected": 0, **outcomes})
        return result

    return run


@pytest.fixture
def report(bench, pytester):
    """Run a test file with --benchmark-json, and return what it says, by the test's name."""

    def run(source, *args, **outcomes):
        bench("--benchmark-json=out.json", *args, source=source, **outcomes)
        return {b["name"]: b for b in json.loads((pytester.path / "out.json").read_text())["benchmarks"]}

    return run


# -- what arrives ------------------------------------------------------------------------------------------------------


def test_the_data_are_the_samples_bit_for_bit(report):
    found = report(
        f"""
        def test_measures(attn):
            assert attn.measure(*{SAMPLES!r}, p50=1.5e-3, mode="graph", ci=[1, 2]) is True
        """,
        "--benchmark-timer=time.time",
        "--benchmark-warmup=on",
        "--benchmark-precision=0.5",
        "--benchmark-min-rounds=99",
        passed=1,
    )
    row = found["test_measures"]
    assert [x.hex() for x in row["stats"]["data"]] == [float(x).hex() for x in SAMPLES]
    assert row["stats"]["median"] == statistics.median(SAMPLES)
    assert (row["stats"]["rounds"], row["stats"]["iterations"]) == (len(SAMPLES), 1)
    assert row["extra_info"] == {"attn": {"p50": 1.5e-3, "mode": "graph", "ci": [1, 2]}}
    assert row["options"]["timer"] == "pytest_attn"
    assert row["group"] is None


def test_samples_of_numpy_and_zeros_are_samples_like_others(report):
    np = pytest.importorskip("numpy")
    found = report(
        """
        import numpy as np

        def test_array(attn_benchmark):
            attn_benchmark(np.array([1e-3, 2e-3], dtype="float32"))

        def test_measures(attn):
            assert attn.measure(*np.array([1e-3, 2e-3], dtype="float32"))

        def test_zeros(attn_benchmark):
            attn_benchmark([0, 0.0])
        """,
        passed=3,
    )
    for name in ("test_array", "test_measures"):
        assert found[name]["stats"]["data"] == [float(x) for x in np.array([1e-3, 2e-3], dtype="float32")]
    assert found["test_zeros"]["stats"]["data"] == [0.0, 0.0]


def test_facts_are_a_copy(report):
    found = report(
        """
        from pytest_attn.session import bridge

        def test_measures(request):
            facts = {"p50": 1}
            assert bridge.record_samples(request, [1e-3], facts)
            facts["p50"] = 2
        """,
        passed=1,
    )
    assert found["test_measures"]["extra_info"]["attn"] == {"p50": 1}


def test_a_users_marker_keeps_its_group_and_loses_its_timer(report):
    found = report(
        """
        import time
        import pytest

        pytestmark = pytest.mark.benchmark(group="of the module")

        def test_module(attn):
            assert attn.measure(1e-3)

        @pytest.mark.benchmark(group="own", timer=time.time, disable_gc=True)
        def test_own(attn):
            assert attn.measure(2e-3)

        @pytest.mark.benchmark(group="of the class")
        class TestIt:
            @pytest.mark.parametrize("size", [1, 2])
            def test_class(self, attn, size):
                assert attn.measure(size)
        """,
        passed=4,
    )
    rows = {name: (row["group"], row["stats"]["data"]) for name, row in found.items()}
    assert rows == {
        "test_module": ("of the module", [1e-3]),
        "test_own": ("own", [2e-3]),
        "test_class[1]": ("of the class", [1.0]),
        "test_class[2]": ("of the class", [2.0]),
    }
    assert found["test_own"]["options"]["disable_gc"] is True
    assert {row["options"]["timer"] for row in found.values()} == {"pytest_attn"}


def test_the_second_of_two_measurements_is_not_taken(report):
    found = report(
        """
        def test_twice(attn, request):
            assert attn.measure() is False  # which is none
            assert attn.measure(1e-3, which=1) is True
            assert attn.measure(2e-3, which=2) is False
            assert len(list(request.node.iter_markers("benchmark"))) == 1
        """,
        passed=1,
    )
    assert found["test_twice"]["stats"]["data"] == [1e-3]
    assert found["test_twice"]["extra_info"] == {"attn": {"which": 1}}


def test_an_item_that_runs_again_records_again(report, pytester):
    again = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    runtestprotocol(item, log=False, nextitem=nextitem)  # as pytest-rerunfailures does
    item._initrequest()
"""
    pytester.makeconftest(CONFTEST + again)
    found = report(
        """
        runs = []

        def test_it(attn, attn_benchmark):
            runs.append(1)
            attn_benchmark([float(len(runs))])
        """,
        passed=1,
    )
    assert found["test_it"]["stats"]["data"] == [2.0]  # the later one of the two of that name


# -- a test that uses pytest-benchmark itself ----------------------------------------------------------------------------


def test_a_tests_own_benchmark_is_left_to_it(report):
    found = report(
        """
        def test_before(attn, benchmark):
            benchmark.pedantic(sum, [[1]], rounds=7)
            assert attn.measure(123.0) is False

        def test_after(attn, benchmark):
            assert attn.measure(123.0) is False
            benchmark.pedantic(sum, [[1]], rounds=7)
        """,
        passed=2,
    )
    assert set(found) == {"test_before", "test_after"}
    for row in found.values():
        assert row["stats"]["rounds"] == 7
        assert row["stats"]["max"] < 123
        assert row["extra_info"] == {}


def test_a_benchmark_made_at_run_time_with_another_clock_is_no_place_for_samples(report):
    found = report(
        """
        import pytest

        def test_used(attn, request):
            request.getfixturevalue("benchmark").pedantic(sum, [[1]], rounds=7)
            assert attn.measure(123.0) is False

        def test_unused(attn, request):
            request.getfixturevalue("benchmark")
            assert attn.measure(123.0) is False

        def test_measures(attn):
            assert attn.measure(1e-3) is True
        """,
        passed=3,
    )
    assert set(found) == {"test_used", "test_measures"}
    assert found["test_used"]["stats"]["rounds"] == 7


def test_a_benchmark_of_another_kind_is_left_alone(bench, pytester):
    pytester.makeconftest(CONFTEST + "@pytest.fixture\ndef benchmark():\n    return print\n")
    bench(source=MEASURING.format(taken=False), passed=2)


# -- pytest-benchmark's options ----------------------------------------------------------------------------------------


def test_a_saved_run_is_compared_and_fails_when_slower(bench, pytester):
    def source(*samples):
        return f"def test_it(attn):\n    assert attn.measure(*{samples!r}, p50=1)"

    quiet = ("-W", "default", "--disable-warnings")  # of machine_info: the frequency of a CPU is never the same twice
    bench("--benchmark-save=base", "--benchmark-save-data", source=source(1.0, 2.0, 9.0), passed=1)
    [saved] = (pytester.path / ".benchmarks").rglob("*_base.json")
    row = json.loads(saved.read_text())["benchmarks"][0]
    assert (row["stats"]["data"], row["extra_info"]) == ([1.0, 2.0, 9.0], {"attn": {"p50": 1}})

    def compare(rc, samples):
        pytester.makepyfile(source(*samples))
        args = ("--benchmark-compare", "--benchmark-compare-fail=median:5%", *quiet)
        # in a process of its own: pytest-benchmark raises through pytest's main
        result = pytester.runpytest_subprocess("-p", "no:attn", "-p", "no:cacheprovider", *args)
        assert result.ret == rc
        return result

    result = compare(0, (2.1, 2.1, 0.1))  # 5 % is not above 5 %; mean and min are no matter
    result.stdout.fnmatch_lines_random(["test_it (0001_base)*", "test_it (NOW)*"])
    result = compare(1, (2.11, 2.11, 0.1))
    result.stderr.fnmatch_lines(["*Performance has regressed*", "*test_it*'median' has failed*5.500000000 > 5.000000000*"])


def test_autosave_writes_a_file(bench, pytester):
    bench("--benchmark-autosave", source=MEASURING.format(taken=True), passed=2)
    assert len(list((pytester.path / ".benchmarks").rglob("0001_*.json"))) == 1


def test_histogram_is_drawn(bench, pytester):
    if find_spec("pygal") is None:  # not importorskip: pygal changes how this process imports
        pytest.skip("pygal, which draws --benchmark-histogram, is not installed")
    source = """
        import pytest

        @pytest.mark.benchmark(group="flux")
        def test_it(attn):
            assert attn.measure(1.0, 2.0, 4.0)
        """
    bench("--benchmark-histogram=plot", source=source, in_process=False, passed=1)
    drawn = (pytester.path / "plot-flux.svg").read_text()
    assert "test_it - 3 rounds" in drawn
    assert "Median: 2.0000" in drawn


def test_cprofile_calls_once_more_and_changes_no_sample(report):
    source = MEASURING.format(taken=True)
    found = report(source, "--benchmark-cprofile=tottime", "--benchmark-cprofile-loops=3", passed=2)
    assert found["test_measures"]["stats"]["data"] == [1e-3, 3e-3, 2e-3]
    assert found["test_measures"]["cprofile"]


#: tests that measure, each in its own way, then those that do not
FORMS = """
import contextlib, functools, pytest
from elsewhere import measures_elsewhere

def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

def helper(attn):
    attn.measure(1.0)

def nested_helper(attn):
    return [attn.measure(x) for x in (1.0,)]

wrapped_helper = decorated(helper)

def helper_of_helper(attn):
    helper(attn)

class measure_nothing:
    __wrapped__ = helper

@pytest.fixture
def prepared(attn):
    return attn

def test_yes_plain(attn): attn.measure(1.0)
@decorated
@decorated
def test_yes_wrapped(attn): attn.measure(1.0)
def test_yes_nested(attn): (lambda: [attn.measure(x) for x in (1.0,)])()
def test_yes_helper(attn): helper(attn)
@decorated
def test_yes_nested_helper(attn): nested_helper(attn)
def test_yes_wrapped_helper(attn): wrapped_helper(attn)
@pytest.mark.parametrize("size", [1, 2])
def test_yes_parametrized(attn, size): attn.measure(size)
class TestYes:
    def test_yes_method(self, attn): attn.measure(1.0)
def test_yes_prepared(prepared): prepared.measure(1.0)
def test_yes_recorder(attn_benchmark): attn_benchmark([1.0])
@pytest.mark.usefixtures("attn_benchmark")
def test_yes_declared(attn): helper_of_helper(attn)
def test_yes_own(benchmark): benchmark.pedantic(sum, [[1]])

def test_no_plain(attn): pass
def test_no_word(attn): "measure"; measure = attn; attn.request.node
def test_no_attn(): helper(type("A", (), {"measure": print}))
def test_no_second_level(attn): helper_of_helper(attn)
def test_no_other_module(attn): measures_elsewhere(attn)
@pytest.mark.parametrize("size", [1, 2])
def test_no_parametrized(attn, size): measure_nothing, size
"""
YES, NO = 13, 7


@pytest.fixture
def forms(bench, pytester):
    pytester.makepyfile(elsewhere="def measures_elsewhere(attn):\n    attn.measure(1.0)")
    pytester.makepyfile(test_forms=FORMS)
    return bench


def test_only_runs_the_tests_that_measure(forms, pytester):
    result = forms("--benchmark-only", "--benchmark-json=out.json", "-rps", passed=YES, skipped=NO)
    assert_all_that_passed_are("test_yes", result)
    rows = json.loads((pytester.path / "out.json").read_text())["benchmarks"]
    assert len(rows) == YES
    assert {row["options"]["timer"] for row in rows if row["name"] != "test_yes_own"} == {"pytest_attn"}


def test_skip_runs_the_others(forms):
    result = forms("--benchmark-skip", "-rps", passed=NO, skipped=YES)
    assert_all_that_passed_are("test_no", result)


def assert_all_that_passed_are(prefix, result):
    passed = [line for line in result.outlines if line.startswith("PASSED ")]
    assert passed
    assert all(f"::{prefix}" in line for line in passed)


@pytest.mark.parametrize(("option", "count"), [("--benchmark-only", YES), ("--benchmark-skip", YES), ("-q", 1)])
def test_pytest_benchmark_sees_the_fixture_where_it_looks_for_it(forms, pytester, option, count):
    pytester.makepyfile(
        late="""
        import pytest

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(items):
            print("seen:", sum("benchmark" in item.fixturenames for item in items))
        """
    )
    pytester.syspathinsert()
    result = pytester.runpytest_inprocess("-p", "no:attn", "-p", "late", "-s", "--collect-only", option)
    result.stdout.fnmatch_lines([f"*seen: {count}"])  # of -q, only test_yes_own, which has it


def test_no_benchmark_is_set_up_before_it_is_needed(forms, pytester):
    result = pytester.runpytest_inprocess("-p", "no:attn", "--benchmark-only", "--setup-plan")
    assert result.stdout.str().count("SETUP    F benchmark") == 1  # of test_yes_own


def test_only_of_a_file_without_own_benchmarks_warns_of_none(bench):
    source = """
        import pytest

        def test_skips(attn):
            pytest.skip("here")
            attn.measure(1.0)

        def test_fails(attn):
            assert attn is None
            attn.measure(1.0)

        def test_returns(attn):
            if attn is None:
                attn.measure(1.0)
        """
    result = bench("--benchmark-only", source=source, rc=1, passed=1, failed=1, skipped=1)
    assert "was not used" not in result.stdout.str() + result.stderr.str()


def test_a_measurement_that_skip_did_not_see_goes_unrecorded(bench):
    source = """
        def test_it(attn):
            assert getattr(attn, "mea" + "sure")(1.0) is False
        """
    bench("--benchmark-skip", source=source, passed=1)


@pytest.mark.parametrize(
    "args",
    [
        ("--benchmark-disable", "--benchmark-json=out.json"),
        ("-p", "no:benchmark"),
        ("-n", "2", "--benchmark-json=out.json"),
        ("-n", "2", "--benchmark-skip"),
    ],
    ids=" ".join,
)
def test_where_pytest_benchmark_does_not_record_nothing_happens(bench, pytester, args):
    source = "def test_recorder(attn_benchmark):\n    attn_benchmark([1.0])\n" + MEASURING.format(taken=False)
    expected = {"passed": 1, "skipped": 2} if "--benchmark-skip" in args else {"passed": 3}
    result = bench(*args, source=source, in_process="-n" not in args, **expected)
    assert "automatically disabled" not in result.stdout.str() + result.stderr.str()
    assert not (pytester.path / "out.json").exists()


def test_wants_says_whether_it_records(bench, pytester):
    pytester.makeconftest(CONFTEST + "def pytest_unconfigure(config):\n    print('wants', bridge.wants(config))\n")
    for args, answer in (
        ((), True),
        (("--benchmark-disable",), False),
        (("--benchmark-disable", "--benchmark-enable"), True),
        (("--benchmark-skip",), False),
        (("-p", "no:benchmark"), False),
    ):
        result = bench("-s", *args, source="def test_it():\n    pass", passed=1)
        assert f"wants {answer}" in result.stdout.str()


# -- attn_benchmark ----------------------------------------------------------------------------------------------------


def test_the_recorder_takes_samples_and_facts(report):
    found = report("def test_it(attn_benchmark):\n    assert attn_benchmark([1e-3, 2], samples=7, p50=1) is None", passed=1)
    assert found["test_it"]["stats"]["data"] == [1e-3, 2.0]
    assert found["test_it"]["extra_info"] == {"attn": {"samples": 7, "p50": 1}}


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "at least one sample, got none"),
        (1.5, "a sequence of seconds, got 1.5"),
        (None, "a sequence of seconds, got None"),
        ("12", "numbers, sample 0 is '1' (str)"),
        ([1.0, None], "numbers, sample 1 is None (NoneType)"),
        ([True], "numbers, sample 0 is True (bool)"),
        ([1j], "numbers, sample 0 is 1j (complex)"),
        ([1.0, 2.0, math.nan], "finite seconds >= 0, sample 2 is nan"),
        ([math.inf], "finite seconds >= 0, sample 0 is inf"),
        ([10**400], "finite seconds >= 0, sample 0 is 1000"),
        ([-1e-9], "finite seconds >= 0, sample 0 is -1e-09"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_the_recorder_refuses_what_is_no_duration(request, samples, message):
    record = bridge.attn_benchmark_recorder(request)
    with pytest.raises(ValueError, match="attn_benchmark needs ") as caught:
        record(samples)
    assert message in str(caught.value)


@pytest.mark.parametrize("args", [(), ("--benchmark-disable",), ("-p", "no:benchmark")], ids=" ".join)
def test_the_recorder_refuses_a_second_time_wherever_it_runs(bench, args):
    source = """
        import pytest

        def test_twice(attn_benchmark):
            attn_benchmark([1.0])
            with pytest.raises(RuntimeError, match="one row per test"):
                attn_benchmark([1.0])

        def test_after_a_measurement(attn, attn_benchmark):
            attn.measure(1.0)
            with pytest.raises(RuntimeError, match="one row per test"):
                attn_benchmark([1.0])

        def test_after_a_refusal(attn_benchmark):
            with pytest.raises(ValueError, match="got none"):
                attn_benchmark([])
            attn_benchmark([1.0])
        """
    bench(*args, source=source, passed=3)


def test_the_recorder_refuses_beside_the_tests_own_benchmark(bench):
    source = """
        import pytest

        def test_it(attn_benchmark, benchmark):
            with pytest.raises(RuntimeError, match="or the fixture benchmark"):
                attn_benchmark([1.0])
            benchmark.pedantic(sum, [[1]])
        """
    bench(source=source, passed=1)


# -- machine_info ------------------------------------------------------------------------------------------------------


class Nvml(ModuleType):
    """NVML of a machine with these GPUs; an old version of the package gives bytes, and the driver may not answer."""

    def __init__(self, *names, is_old=False, broken=""):
        super().__init__("pynvml")
        self.log = []
        text = (lambda value: value.encode()) if is_old else (lambda value: value)
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: len(names),
            "nvmlDeviceGetHandleByIndex": lambda index: SimpleNamespace(index=index),
            "nvmlDeviceGetName": lambda handle: text(names[handle.index]),
            "nvmlSystemGetDriverVersion": lambda: text("580.95.05"),
            "nvmlSystemGetCudaDriverVersion": lambda: 12090,
        }
        for name, answer in answers.items():
            setattr(self, name, self.fails if name == broken else self.logged(name, answer))

    def logged(self, name, answer):
        return lambda *args: [self.log.append(name), answer(*args)][1]

    def fails(self, *args):
        raise OSError("no answer")


@pytest.mark.parametrize("is_old", [False, True])
def test_machine_info_names_gpu_driver_cuda_and_torch(monkeypatch, is_old):
    nvml = Nvml("NVIDIA H200", "NVIDIA H200", "NVIDIA L4", is_old=is_old)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    info = {"node": "here"}
    bridge.machine_info(None, info)
    gpu = {"gpu": "NVIDIA H200, NVIDIA L4", "driver": "580.95.05", "cuda": "12.9", "torch": metadata.version("torch")}
    assert info == {"node": "here", "attn": gpu}
    assert nvml.log[-1] == "nvmlShutdown"
    json.dumps(info)  # pytest-benchmark compares it without its encoder for other types


@pytest.mark.parametrize("nvml", [None, Nvml(), Nvml("x", broken="nvmlInit"), Nvml("x", broken="nvmlDeviceGetName")])
def test_machine_info_adds_nothing_without_a_gpu_that_answers(monkeypatch, nvml):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    info = {"node": "here"}
    bridge.machine_info(None, info)
    assert info == {"node": "here"}
    if nvml is not None and "nvmlInit" in nvml.log:
        assert nvml.log[-1] == "nvmlShutdown"


def test_machine_info_without_torch_says_none(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml("NVIDIA H200"))
    bridge.machine_info(None, info := {})
    assert info["attn"]["torch"] is None


def test_machine_info_reaches_the_json_without_torch_and_despite_a_deprecated_package(bench, pytester):
    deprecated = f"""
import warnings
warnings.warn("use nvidia-ml-py", FutureWarning)
{
        "".join(
            f"{name} = lambda *_: {value!r}" + chr(10)
            for name, value in [
                ("nvmlInit", None),
                ("nvmlShutdown", None),
                ("nvmlDeviceGetCount", 1),
                ("nvmlDeviceGetHandleByIndex", 0),
                ("nvmlDeviceGetName", "NVIDIA H200"),
                ("nvmlSystemGetDriverVersion", "580"),
                ("nvmlSystemGetCudaDriverVersion", 13000),
            ]
        )
    }"""
    pytester.makepyfile(pynvml=deprecated)
    loaded = "def pytest_unconfigure():\n    import sys\n    print('torch loaded:', 'torch' in sys.modules)\n"
    pytester.makeconftest(CONFTEST + loaded)
    pytester.syspathinsert()
    args = ("-s", "--benchmark-json=out.json")
    result = bench(*args, source=MEASURING.format(taken=True), in_process=False, passed=2)
    result.stdout.fnmatch_lines(["torch loaded: False"])
    found = json.loads((pytester.path / "out.json").read_text())["machine_info"]["attn"]
    assert found == {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0", "torch": metadata.version("torch")}
