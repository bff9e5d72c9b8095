"""--attn-mutants, as a user sees it."""

import re
from itertools import count

import pytest
import torch
from left_out import IS_ALL

from pytest_attn import Workload
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.guests.mutants import survivors
from pytest_attn.guests.mutants.kernel import Kernel
from pytest_attn.guests.mutants.mutant import Mutant
from pytest_attn.reports.records import read_records
from pytest_attn.workloads.catalog import builtin_catalog

TEST = """
import pytest, torch
from pytest_attn import Workload
from torch.nn.functional import scaled_dot_product_attention as sdpa

def mine(q, k, v):
    return sdpa(q, k, v, is_causal=True)

@pytest.mark.attention(Workload(70, heads=2, head_dim=16, mask="causal", name="w"), device="cpu")
def test_checked(attn):
    attn.check(mine)
"""
WRONG = """
@pytest.mark.attention(Workload(70, heads=2, head_dim=16, mask="causal", name="w"), device="cpu")
def test_wrong(attn):
    attn.check(mine)
    assert False, "whatever the kernel"
"""


def run(pytester, text, *args):
    pytester.makepyfile(test_it=text)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-mutants", *args)


def test_a_test_that_checks_kills_what_it_reaches(pytester):
    few = () if IS_ALL else ("-k", "honest or edge or mask or scale")
    result = run(pytester, TEST, *few)
    assert result.ret == 0
    result.stdout.re_match_lines(
        [
            r".* attention mutants .*",
            r"test +found +tried",
            r"test_it\.py::test_checked +\d\d +\d\d +\d+%",
            r"class +found +tried",
            r"masks +\d+ +\d+ +\d+%",
            r"mutation score \d+%: \d\d of \d\d faulty kernels found",
        ],
        consecutive=False,
    )
    score = int(re.search(r"mutation score (\d+)%", result.stdout.str())[1])
    assert 50 < score <= 100
    assert "largest passing z" not in result.stdout.str()


@pytest.mark.slow("makes many calls")
def test_a_test_that_fails_on_the_honest_kernel_is_a_failed_test(pytester):
    result = run(pytester, TEST.replace("def test_checked", "def checked") + WRONG)
    assert result.ret == 1
    assert "test_wrong[w-honest]" in result.stdout.str()
    assert result.parseoutcomes()["failed"] == 1


def test_names_can_be_chosen_with_k_and_ids_tell_them(pytester):
    result = run(pytester, TEST, "-k", "right-edge-one-key-late or honest", "-v")
    result.stdout.fnmatch_lines(["*::test_checked[[]w-right-edge-one-key-late] PASSED*", "mutation score 100%: 1 of 1 *"])


def test_times_are_not_taken(pytester):
    result = run(pytester, TEST.replace("attn.check", "attn.measure"), "-k", "right-edge-one-key-late or honest")
    result.stdout.fnmatch_lines(["mutation score 100%: 1 of 1 *"])
    result.assert_outcomes(passed=1, skipped=1)


@pytest.mark.slow("starts processes")
def test_workers_bring_what_they_found(pytester):
    pytester.makepyfile(test_it=weak(f'{SHORT}, Workload(70, name="b")') + LATER)
    options = ("--attn-mutants", "-n", "2", "--dist=loadgroup", "--attn-output=run.jsonl")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *options, "-k", NAMES)
    survived = 'survived  no-maximum-subtracted: * Found with inputs="outlier" in the marker.'
    result.stdout.fnmatch_lines([survived, "mutation score 50%: 1 of 2 *"])
    fates = [(record["workload"], record["mutant"]["found_with"]) for record in read_records(pytester.path / "run.jsonl")]
    assert [where for where, found_with in fates if found_with] == ["later"], "once, when no test was left that may find it"


# -- what would have found a survivor ------------------------------------------------------------------------------------

WEAK = """
import pytest
from pytest_attn import Window, Workload

@pytest.mark.attention({workload}, device="cpu"{marker})
def test_weak(attn):
    {body}
"""
SHORT = 'Workload(64, heads=2, head_dim=32, name="short")'
WIDE = 'Workload(40, heads=2, head_dim=32, softcap=5000.0, mask=Window(200, 0), name="wide")'
#: a mutant, the workload that it survives, what the summary says, and the same test with that change
SURVIVING = [
    ("softcap-ignored", WIDE, "softcap=500.0 instead of 5000.0 in wide", WIDE.replace("5000.0", "500.0"), {}),
    ("no-maximum-subtracted", SHORT, 'inputs="outlier" in the marker', SHORT, {"marker": ', inputs="outlier"'}),
    (
        *("values-summed-in-the-tensors-dtype", SHORT, "kv_len=121 instead of 64 in short"),
        *('Workload(64, 121, heads=2, head_dim=32, name="long")', {}),
    ),
    ("storage-offset-ignored", SHORT, "attn.check_invariants (poison)", SHORT, {"body": "attn.check_invariants(len)"}),
]


def weak(workload, marker="", body="attn.check(len)"):
    return WEAK.format(workload=workload, marker=marker, body=body)


#: two mutants, and a test that finds the second
NAMES = "no-maximum-subtracted or values-summed-in-the-tensors-dtype"
LATER = weak('Workload(300, heads=2, name="later")').replace("test_weak", "test_later")


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "workload", "said", "changed", "changes"), SURVIVING, ids=[one[0] for one in SURVIVING])
def test_a_survivor_is_found_with_the_change_that_is_named(pytester, name, workload, said, changed, changes):
    chosen = ("-k", f"{name} or honest")
    result = run(pytester, weak(workload), *chosen)
    result.stdout.fnmatch_lines([f"survived  {name}: *. Found [wb][iy]* {said}.", "mutation score 0%: 0 of 1 *"])
    result = run(pytester, weak(changed, **changes), *chosen)
    result.stdout.fnmatch_lines(["mutation score 100%: 1 of 1 *"])


def test_what_finds_survivors_is_in_every_output(pytester):
    outputs = [f"--attn-output=run.{suffix}" for suffix in ("jsonl", "md", "html")]
    result = run(pytester, weak(SHORT), "-k", "no-maximum-subtracted or scale-dropped or honest", *outputs)
    result.assert_outcomes(passed=3)
    fates = {record["subject"]: record["mutant"] for record in read_records(pytester.path / "run.jsonl")}
    assert fates["honest"] == {}
    assert (fates["scale-dropped"]["killed"], fates["scale-dropped"]["found_with"]) == (True, "")
    assert fates["no-maximum-subtracted"]["found_with"] == 'Found with inputs="outlier" in the marker'
    verdicts = {record["subject"]: record["verdict"] for record in read_records(pytester.path / "run.jsonl")}
    assert verdicts == {"honest": "passed", "scale-dropped": "expected", "no-maximum-subtracted": "passed"}
    for name in ("run.md", "run.html"):
        page = (pytester.path / name).read_text()
        assert "mutation score 50%: 1 of 2 faulty kernels found" in page
        assert "no-maximum-subtracted: Exponentials are taken" in page.replace("\\", "")
        assert "in the marker" in page


def test_it_is_said_that_a_mutant_did_not_run_and_that_time_was_over(pytester):
    chosen = ("-k", "no-maximum-subtracted")
    result = run(pytester, weak(SHORT, body="assert attn.q.isfinite().all()"), *chosen)
    result.stdout.fnmatch_lines(["survived *: *. It did not run: call attn.check, check_invariants or measure."])
    result = run(pytester, weak(SHORT), *chosen, "--attn-diagnosis-timeout=0.000001")
    result.stdout.fnmatch_lines(
        ["survived *: *. Not found with 1 change in *.? s, its part of --attn-diagnosis-timeout=1e-06."]
    )


def test_a_kernel_without_a_fault_and_a_change_that_no_kernel_passes_are_not_found(monkeypatch):
    honest = Mutant("harmless", "masks", "It is right.", (), Kernel, lambda w: w.q_len <= 64)
    search = survivors.Search(0, builtin_catalog(), 1 << 28)
    spec = CheckSpec(Workload(16, head_dim=16, name="tiny"), torch.device("cpu"))
    few = list(survivors.changes(honest, spec, builtin_catalog()))[:6]
    monkeypatch.setattr(survivors, "changes", lambda *given: iter(few))
    assert search.found_with(honest, spec) == "None of 6 changes finds it"
    monkeypatch.setattr(survivors.Search, "_finder", lambda self, kernel, change: "check")
    assert search.found_with(honest, spec) == "None of 6 changes finds it", "the fault-free kernel fails as well"


def test_a_survivor_that_nothing_finds_leaves_time_for_the_next(monkeypatch):
    clock = count(step=5)
    monkeypatch.setattr(survivors.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(survivors.Search, "_finder", lambda self, kernel, change: "")
    mutant = Mutant("harmless", "masks", "It is right.", (), Kernel, lambda w: w.q_len <= 64)
    spec = CheckSpec(Workload(16, head_dim=16, name="tiny"), torch.device("cpu"))
    search = survivors.Search(40, builtin_catalog(), 1 << 28)
    assert [search.found_with(mutant, spec) for _ in range(4)] == [
        "Not found with 4 changes in 20.0 s, its part of --attn-diagnosis-timeout=40",
        "Not found with 2 changes in 10.0 s, its part of --attn-diagnosis-timeout=40",
        "Not found with 1 change in 5.0 s, its part of --attn-diagnosis-timeout=40",
        "Not found with 1 change in 5.0 s, its part of --attn-diagnosis-timeout=40",
    ]
    assert search.found_with(mutant, spec) == "Not looked for, for want of --attn-diagnosis-timeout=40"
