"""A kernel that changes its surroundings is told by name; a test is judged in one thread; an error keeps its type."""

import os

import pytest
from fakes.timed import CLOCK, FORKED, KERNEL

IN_THREADS = """
import functools, threading
import pytest

def pytest_addoption(parser): parser.addoption("--parallel-threads", dest="parallel_threads", type=int, default=1)

def pytest_configure(config): config.addinivalue_line("markers", "thread_unsafe(reason): in one thread")

def pytest_itemcollected(item):
    number = item.config.option.parallel_threads
    if number == 1 or item.get_closest_marker("thread_unsafe"): return
    test = item.obj

    @functools.wraps(test)
    def in_threads(**arguments):
        threads = [threading.Thread(target=test, kwargs=arguments) for _ in range(number)]
        [one.start() for one in threads]
        [one.join() for one in threads]
    item.obj = in_threads
"""
TEST = """
import os, threading, unittest.mock
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

class Silent(Exception):
    def __str__(self): raise ValueError("no words")

@pytest.mark.attention("smoke-full")
def test_kernel(attn):
    def mine(q, k, v):
        {body}
    {ask}
"""


def run(pytester, body, *options, ask="attn.check(mine)"):
    pytester.makepyfile(TEST.format(body=body, ask=ask))
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)


def test_in_one_thread(pytester):
    pytester.makeconftest(IN_THREADS)
    body = "assert threading.current_thread() is threading.main_thread(); return sdpa(q, k, v)"
    run(pytester, body, "--parallel-threads=2").assert_outcomes(passed=1)


def test_the_working_directory_is_put_back(pytester):
    before = os.getcwd()
    result = run(pytester, "os.chdir('/'); return sdpa(q, k, v)")
    result.stdout.fnmatch_lines(["*the callable left the working directory at /; it was *"])
    assert os.getcwd() == before


def test_a_nested_result(pytester):
    result = run(pytester, "return torch.nested.as_nested_tensor(list(sdpa(q, k, v)))", "-Wignore:The PyTorch API of nested")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *out is a nested tensor; expected a dense one*"])


@pytest.mark.parametrize("ask", ["attn.check(mine)", "attn.check_invariants(mine)"])
def test_an_error_without_words_keeps_its_type(pytester, ask):
    result = run(pytester, "raise Silent", "--attn-output=run.jsonl", ask=ask)
    result.assert_outcomes(failed=1)
    assert '"reason":"Silent"' in (pytester.path / "run.jsonl").read_text()


def test_a_mock_is_a_kernel(pytester):
    result = run(
        pytester, "return sdpa(q, k, v)", "--attn-output=run.jsonl", ask="attn.check(unittest.mock.Mock(side_effect=mine))"
    )
    result.assert_outcomes(passed=1)
    assert '"verdict":"passed"' in (pytester.path / "run.jsonl").read_text()


#: as pytest-repeat does
REPEATS = """
import pytest
def pytest_addoption(parser): parser.addoption("--count", type=int, default=1)
@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    number = metafunc.config.getoption("count")
    if number > 1:
        metafunc.fixturenames.append("__pytest_repeat_step_number")
        ids = lambda step: f"{step + 1}-{number}"
        metafunc.parametrize("__pytest_repeat_step_number", range(number), ids=ids, indirect=True)
@pytest.fixture
def __pytest_repeat_step_number(request): return getattr(request, "param", None)
"""


@pytest.mark.slow("records in three new processes")
def test_repetitions_share_a_baseline(pytester):
    pytester.makeconftest(CLOCK + FORKED + REPEATS)
    pytester.makepyfile(KERNEL)
    assert pytester.runpytest_inprocess("--attn-update-baselines=why", "--count=2").ret == 0
    for count in (1, 2):
        result = pytester.runpytest_inprocess(f"--count={count}")
        assert f"latency: {count} as fast as recorded" in result.stdout.str()


def test_a_repetition_is_typed_without_its_number(pytester):
    pytester.makeconftest(REPEATS)
    result = run(pytester, "return sdpa(q, k, v) * 2", "--count=2")
    result.assert_outcomes(failed=2)
    assert result.stdout.str().count("::test_kernel[smoke-full]' --attn") == 2
