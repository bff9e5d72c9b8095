"""From a call to its verdict: the functions that a reader walks are few, and are those that the page names."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent.parent / "docs" / "architecture.md").read_text()
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
#: follows the calls of a test, and writes what it notes to a file; `note` is a story's own
CONFTEST = """
import sys
import pytest, pytest_attn
from pathlib import Path

ROOT = Path(pytest_attn.__file__).parent
NOTED = {{}}

def chain(frame):
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back

def named(code):
    return Path(code.co_filename).relative_to(ROOT).as_posix(), code.co_qualname

{note}

@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    NOTED.clear()
    sys.setprofile(lambda frame, event, argument: event == "call" and NOTED.update(dict.fromkeys(note(frame))))
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        Path("noted").write_text(repr(list(NOTED)))
"""
WALK = """
def note(frame):
    if ROOT not in Path(frame.f_code.co_filename).parents or named(frame.f_code) not in {ends!r}:
        return ()
    walk = [named(code) for code in chain(frame) if ROOT in Path(code.co_filename).parents]
    if any(name == "tells_apart" for _, name in walk):  # the judge is judged, which is on no way to a verdict
        return ()
    begun = [at for at, (_, name) in enumerate(walk) if name == {begin!r}]
    # what has no name is an expression of the function around it
    return [one for one in reversed(walk[:begun[-1] + 1] if begun else ()) if "<" not in one[1].rpartition(".")[2]]
"""
#: the judge is judged beside
RUN = """
def note(frame):
    is_beside = any(code.co_name == "tells_apart" for code in chain(frame))
    return () if is_beside or ROOT not in Path(frame.f_code.co_filename).parents else [named(frame.f_code)]
"""
CROSSINGS = """
def note(frame):
    files = [Path(code.co_filename) for code in (frame.f_code, frame.f_back.f_code)] if frame.f_back else []
    if sorted(files) == [ROOT / "cases" / "case.py", ROOT / "cases" / "conclude.py"]:
        yield f"{frame.f_back.f_code.co_name} -> {frame.f_code.co_name}"
"""


@pytest.fixture
def noted(pytester, kernel_test):
    """Return a function of a test's body and of what notes calls that runs the test, and returns what was noted."""

    def run(does, note, *options):
        kernel_test(does)
        pytester.makeconftest(CONFTEST.format(note=note))
        pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)
        return eval((pytester.path / "noted").read_text())

    return run


@pytest.mark.skipif("sys.version_info < (3, 11)", reason="code objects have their qualified names from 3.11 on")
@pytest.mark.parametrize(
    ("begin", "does", "options"),
    [
        ("AttentionCase.check", "attn.check(lambda q, k, v: sdpa(q, k, v) * 1.1)", ["--attn-diagnosis-timeout=60"]),
        ("AttentionCase.measure", "attn.measure(sdpa)", []),
    ],
)
def test_the_page_names_the_functions_from_a_call_to_its_verdict(noted, begin, does, options):
    walked = noted(does, WALK.format(begin=begin, ends=sorted(LANDMARKS[begin].values())), *options)
    told = re.split(r"^From |^## ", PAGE[PAGE.index(f"From `{begin}`") :], flags=re.M)[1]
    named = [(file, name) for name, file in re.findall(r"^\| `([\w.]+)` \| `([\w/]+\.py)` \|", told, flags=re.M)]
    assert sorted(named) == sorted(walked)
    assert set(LANDMARKS[begin].values()) <= set(walked)
    assert len(walked) <= 20
    assert len({file for file, _ in walked}) <= 9


def test_a_case_and_its_conclusion_cross_twice(noted):
    crossed = set(noted("attn.check(lambda q, k, v: sdpa(q, k, v) * 1.1)", CROSSINGS))
    assert crossed - {"_judged -> evidence", "_leave_record -> <lambda>"} == {"check -> conclude", "_judged -> judge"}


@pytest.mark.skipif("sys.version_info < (3, 11)", reason="code objects have their qualified names from 3.11 on")
def test_a_right_check_runs_few_functions(noted, kernel_test):
    """The second of a workload in a session; each expression with a frame of its own counts as a function."""
    first = kernel_test("attn.check(sdpa)")
    first.rename(first.with_name("test_0.py"))
    ran = noted("attn.check(sdpa)", RUN)
    assert ("correctness/judge.py", "judge") in ran
    assert ("correctness/reference.py", "compute_reference") not in ran  # which the first has done
    assert len(ran) <= 200  # 193 where nothing else has run: what torch.compile has loaded is looked at
    assert len({file for file, _ in ran}) <= 32
