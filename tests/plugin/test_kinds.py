"""A kind of judgment of its own is one file and one line of registration: all that a run does with judgments works with it."""

from contextlib import nullcontext

import pytest

from pytest_attn.reports.records import read_records
from pytest_attn.session import kinds
from pytest_attn.session.progress import Progress

#: asks whether a callable returns numbers: a marker, a fixture, a case, an evaluator
TOY = """
from pytest_attn.cases.evaluator import Evaluator
from pytest_attn.cases.judgment import FailureEvidence, Judgment
from pytest_attn.cases.conclude import conclude, skip_unless_runnable
from pytest_attn.cases.context import CaseContext
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.seam import Kind
from pytest_attn.reports.verdict import Verdict
from pytest_attn.workloads.inputs import draw_inputs

KIND = Kind(
    marker="attention_toy",
    maker="toy:make_case",
    must_call="attn_toy.check",
    fixture="attn_toy",
    takes=("attn_toy", "attn_backend", "attn_workload"),
    help="attention_toy(*workloads, backends=None, device=None): the test asks whether out holds numbers",
)

def make_case(request, parameter):
    context = CaseContext.of_item(request, parameter)
    skip_unless_runnable(context, context.backend)
    return Case(context)

class Case:
    def __init__(self, context):
        self._context, self.backend = context, context.backend

    @property
    def is_judged(self):
        return self._context.is_judged

    def check(self, fn, saves=True):
        __tracebackhide__ = True
        context = self._context
        spec = CheckSpec(context.workload, context.session.machines.device(context.mark.device))
        return conclude(context, Toy(context.subject(fn, None, spec), spec, saves))

class Toy(Evaluator):
    question = "toy"

    def __init__(self, subject, spec, saves):
        self.subject, self.workload, self._spec, self._saves = subject, spec.workload, spec, saves
        self.doing, self.on = f"toying with {subject.name}", spec.workload.id

    @property
    def evidence(self):
        return FailureEvidence(self._spec, self.subject) if self._saves else "a toy keeps no tensors"

    def judge(self, context):
        inputs = draw_inputs(self.workload)
        out = self.subject.prepare(inputs)(inputs.q, inputs.k, inputs.v)
        wrong = int(out.isnan().sum())
        if not wrong:
            return Judgment(Verdict.PASSED, out.numel(), "all are numbers", fields={"tensor": "out"})
        known = "; ".join(one.issue for one in context.defects_of(self.subject))
        text = f"{wrong} NaN in out of {self.subject.name}"
        return Judgment(Verdict.MISMATCH, reason=text, text=text, known_defects=known, evidence=self.evidence)
"""
CONFTEST = """
import toy
from pytest_attn import Backend, KnownDefect
from pytest_attn.session.kinds import register
register(toy.KIND)

class Known(Backend):
    name = "known"
    known_defects = (KnownDefect("lib#7", "NaN in out", lambda workload, machine: True, ("out",)),)
    def prepare(self, inputs, backward=False):
        return lambda q, k, v: q * float("nan")

def pytest_attn_backends(registry):
    registry.add(Known())
"""
TESTS = """
import pytest
from pytest_attn import Workload
from pytest_attn.backends.subject import RefusedError
from pytest_attn.correctness.contract import ContractError
mark = pytest.mark.attention_toy(Workload(32, heads=2, head_dim=32, name="tiny"), backends=["known", "math", "sdpa_cudnn"])

def bad(q, k, v):
    return q * float("nan")

def raising(error):
    def fn(q, k, v):
        raise error
    return fn

@mark
def test_right(attn_toy):
    assert attn_toy.check(lambda q, k, v: q) == 2 * 32 * 32
@mark
def test_wrong(attn_toy):
    attn_toy.check(bad)
@mark
def test_unsaved(attn_toy):
    attn_toy.check(bad, saves=False)
@mark
def test_backend(attn_toy, attn_backend):
    attn_toy.check(attn_backend)
@mark
def test_contract(attn_toy):
    attn_toy.check(raising(ContractError("out is no tensor")))
@mark
def test_refused(attn_toy):
    attn_toy.check(raising(RefusedError("not today")))
@mark
def test_raises(attn_toy):
    attn_toy.check(raising(ValueError("mine")))
@mark
def test_nothing(attn_toy):
    pass
@mark
def test_without(request):
    pass
"""


@pytest.fixture
def toys(pytester):
    """Return a function that runs pytest in a folder with the kind, which other stories do not know."""

    def run(*args):
        kinds.KINDS.pop("attention_toy", None)  # each run registers it
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "--strict-markers", *args)

    pytester.syspathinsert()
    pytester.makepyfile(toy=TOY, test_toys=TESTS)
    pytester.makeconftest(CONFTEST)
    yield run
    kinds.KINDS.pop("attention_toy", None)


def records(pytester):
    return {record["test"].rpartition("::")[2]: record for record in read_records(pytester.path / "run.jsonl")}


def test_each_end_of_a_judgment_is_one_of_a_kind_of_its_own(toys, pytester, monkeypatch):
    told = []
    monkeypatch.setattr(Progress, "during", lambda self, *words: told.append(words) or nullcontext())
    result = toys("-rsx", "--attn-output=run.jsonl", "--attn-save-failures=out")
    result.assert_outcomes(passed=2, failed=6, skipped=2, xfailed=1)
    found = records(pytester)
    assert {name: record["verdict"] for name, record in found.items()} == {
        "test_right[tiny]": "passed",
        "test_wrong[tiny]": "mismatch",
        "test_unsaved[tiny]": "mismatch",
        "test_backend[tiny-known]": "known defect",
        "test_backend[tiny-math]": "passed",
        "test_backend[tiny-sdpa_cudnn]": "skipped",
        "test_contract[tiny]": "mismatch",
        "test_refused[tiny]": "skipped",
        "test_raises[tiny]": "raised",
        "test_nothing[tiny]": "failed",
        "test_without": "failed",
    }
    assert ("toying with bad", "tiny") in told
    right, wrong = found["test_right[tiny]"], found["test_wrong[tiny]"]
    assert (right["question"], right["reason"], right["tensor"], right["subject"]) == (
        "toy",
        "all are numbers",
        "out",
        "test_right.lambda",
    )
    assert wrong["saved"] == "out/" + next(path.name for path in (pytester.path / "out").iterdir() if "wrong" in path.name)
    assert found["test_unsaved[tiny]"]["saved"] == ""
    result.stdout.fnmatch_lines_random(
        [
            "E*AssertionError: 2048 NaN in out of bad",
            "E*  reproduce  pytest 'test_toys.py::test_wrong*tiny*",
            "E*  saved      out/test_toys-test_wrong-tiny-*",
            "E*  not saved  a toy keeps no tensors",
            "E*AssertionError: out is no tensor",
            "mismatch * bad on tiny: 2048 NaN in out of bad",
            "raised * raising.fn on tiny: ValueError: mine",
            "SKIPPED * raising.fn: not today",
            "XFAIL *test_backend?tiny-known? - *known defect lib#7",
            "judges nothing: it passed without a call of attn_toy.check*",
            "judges nothing: it has the marker attention_toy, but does not take attn_toy*",
        ]
    )
    assert "conclude(" not in result.stdout.str(), "a failure is raised in the test's own frame"


def test_what_its_tests_may_not_take_or_lack_is_an_error_of_collection(toys, pytester):
    pytester.makepyfile(test_toys="import pytest\n@pytest.mark.attention_toy\ndef test_it(attn_toy, qkv): pass\n")
    toys().stdout.fnmatch_lines(["*a test with attention_toy takes attn_toy and attn_backend and attn_workload, not qkv"])
    pytester.makepyfile(test_toys="def test_it(attn_toy): pass\n")
    toys().stdout.fnmatch_lines(["*uses attn_toy but has no marker; add @pytest.mark.attention_toy"])


def test_a_marker_is_registered_once():
    with pytest.raises(ValueError, match="attention or attn is registered already"):
        kinds.register(kinds.ATTENTION)
