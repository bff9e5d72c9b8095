"""From `attn.check` to a failure's text: the functions that a reader walks are few, and are those that the page names."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent.parent / "docs" / "explanation" / "verdicts.md"
CONFTEST = """
import sys
import pytest, pytest_attn
from pathlib import Path

ROOT = Path(pytest_attn.__file__).parent
ENDS = {"make_case": "cases/case.py", "compare_all": "correctness/judge.py", "describe": "correctness/mismatch_text.py"}
WALKED = {}

def chain(frame):
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back

def note(codes):
    for code in codes:
        path = Path(code.co_filename)
        if ROOT in path.parents and not code.co_name.startswith("pytest_"):  # a hook around the test
            WALKED.setdefault((code.co_qualname, path.relative_to(ROOT).as_posix()))

def watch(frame, event, argument):
    if event == "call" and Path(frame.f_code.co_filename) == ROOT / ENDS.get(frame.f_code.co_name, ""):
        note(reversed(list(chain(frame))))

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    sys.setprofile(watch)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        Path("walked").write_text(repr(list(WALKED)))

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    if call.excinfo:
        note(entry.frame.code.raw for entry in call.excinfo.traceback)
    return (yield)
"""


@pytest.mark.skipif("sys.version_info < (3, 11)", reason="code objects have their qualified names from 3.11 on")
def test_the_page_names_the_functions_from_the_fixture_to_the_text_of_a_failure(pytester, kernel_test):
    page = re.findall(r"^\| `([\w.]+)` \| `([\w/]+\.py)` \|$", PAGE.read_text(), flags=re.M)
    kernel_test("attn.check(lambda q, k, v: sdpa(q, k, v) * 1.1)")
    pytester.makeconftest(CONFTEST)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(failed=1)
    assert eval((pytester.path / "walked").read_text()) == page
    assert len(page) <= 9
    assert len({file for _, file in page}) <= 5
