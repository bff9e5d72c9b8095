"""From a call to its verdict: the functions that a reader walks are few, and are those that the page names."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent.parent / "docs" / "explanation" / "verdicts.md").read_text()
#: what every call comes to, by the file and name of its function: where a reader looks it up
LANDMARKS = {
    "AttentionCase.check": {
        "subject": ("backends/registry.py", "Registry.subject"),
        "call": ("correctness/call.py", "call_kernel"),
        "comparison": ("correctness/judge.py", "compare_all"),
        "diagnosis": ("diagnosis/diagnose.py", "diagnose"),
        "record": ("reports/records.py", "new_record"),
        "text": ("correctness/mismatch_text.py", "describe"),
    },
    "AttentionCase.measure": {
        "time": ("latency/protocol.py", "Stopwatch.measure"),
        "verdict": ("latency/regression.py", "judge_latency"),
        "record": ("reports/records.py", "new_record"),
    },
}
CONFTEST = """
import sys
import pytest, pytest_attn
from pathlib import Path

ROOT = Path(pytest_attn.__file__).parent
BEGIN, ENDS = {begin!r}, {ends!r}
WALKED = {{}}

def chain(frame):
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back

def named(code):
    return Path(code.co_filename).relative_to(ROOT).as_posix(), code.co_qualname

def watch(frame, event, argument):
    code = frame.f_code
    if event == "call" and ROOT in Path(code.co_filename).parents and named(code) in ENDS:
        walk = [named(code) for code in chain(frame) if ROOT in Path(code.co_filename).parents]
        begun = [at for at, (_, name) in enumerate(walk) if name == BEGIN]
        for one in reversed(walk[:begun[-1] + 1] if begun else ()):
            if "<" not in one[1].rpartition(".")[2]:  # an expression of the function around it
                WALKED.setdefault(one)

@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    sys.setprofile(watch)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        Path("walked").write_text(repr(list(WALKED)))
"""


@pytest.mark.skipif("sys.version_info < (3, 11)", reason="code objects have their qualified names from 3.11 on")
@pytest.mark.parametrize(
    ("begin", "does", "options"),
    [
        ("AttentionCase.check", "attn.check(lambda q, k, v: sdpa(q, k, v) * 1.1)", ["--attn-diagnosis-timeout=60"]),
        ("AttentionCase.measure", "attn.measure(sdpa)", []),
    ],
)
def test_the_page_names_the_functions_from_a_call_to_its_verdict(pytester, kernel_test, begin, does, options):
    kernel_test(does)
    pytester.makeconftest(CONFTEST.format(begin=begin, ends=sorted(LANDMARKS[begin].values())))
    pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)
    walked = eval((pytester.path / "walked").read_text())
    told = re.split(r"^From |^## ", PAGE[PAGE.index(f"From `{begin}`") :], flags=re.M)[1]
    named = [(file, name) for name, file in re.findall(r"^\| `([\w.]+)` \| `([\w/]+\.py)` \|", told, flags=re.M)]
    assert sorted(named) == sorted(walked)
    assert set(LANDMARKS[begin].values()) <= set(walked)
    assert len(walked) <= 20
    assert len({file for file, _ in walked}) <= 9


def test_a_case_and_its_conclusion_cross_twice(pytester, kernel_test):
    kernel_test("attn.check(lambda q, k, v: sdpa(q, k, v) * 1.1)")
    crossings = """
import sys
import pytest
from pathlib import Path

SEEN = []

def watch(frame, event, argument):
    if event == "call" and frame.f_back is not None:
        files = tuple(Path(one.f_code.co_filename).as_posix()[-16:] for one in (frame.f_back, frame))
        if sorted(one.rpartition("/")[2] for one in files) == ["case.py", "conclude.py"]:
            SEEN.append(f"{frame.f_back.f_code.co_name} -> {frame.f_code.co_name}")

@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    sys.setprofile(watch)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        Path("crossed").write_text("\\n".join(SEEN))
"""
    pytester.makeconftest(crossings)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(failed=1)
    crossed = (pytester.path / "crossed").read_text().splitlines()
    assert set(crossed) - {"_judged -> evidence", "_leave_record -> <lambda>"} == {"check -> conclude", "_judged -> judge"}
