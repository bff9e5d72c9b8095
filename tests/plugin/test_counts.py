"""No report is better than the run: each names the marked tests that failed, for whatever reason, as many as pytest counts."""

import json
import re
from collections import Counter

import pytest
import vl_convert  # noqa: F401  # its extension cannot be loaded a second time by a run in this process

from pytest_attn.__main__ import main
from pytest_attn.reports.html.page import by_machine, sentence
from pytest_attn.reports.records import failures, read_records, verdict_of

BEGINNING = """
import os
import pytest
from torch.nn.functional import scaled_dot_product_attention as right

def wrong(q, k, v): return right(q / 2, k, v)
def raising(q, k, v): raise RuntimeError("no kernel")
def odd(q, k, v): return right(q, k, v).mT

@pytest.fixture
def broken(): raise OSError("no disk")

@pytest.fixture
def breaks_after():
    yield
    raise OSError("disk full")

pytestmark = pytest.mark.attention("smoke-full")
"""
#: how a test may end, by name: its arguments and body, and behind a bar its marks
ENDINGS = {
    "right": "attn | | attn.check(right)",
    "holds": "attn | | attn.check_invariants(right, only='rerun')",
    "wrong": "attn | | attn.check(wrong)",
    "breaks": "attn | | attn.check_invariants(wrong, only='algebra', skip=None); attn.check_invariants(odd, only='leak')",
    "raises": "attn | | attn.check(raising)",
    "odd": "attn | | attn.check(odd)",
    "caught": "attn | | \n    with pytest.raises(AssertionError): attn.check(wrong)",
    "caught_raised": "attn | | \n    with pytest.raises(RuntimeError): attn.check(raising)",
    "caught_odd": "attn | | \n    with pytest.raises(AssertionError): attn.check(odd)",
    "caught_then_asserts": "attn | | \n    with pytest.raises(AssertionError): attn.check(wrong)\n    assert 1 == 2",
    "judges_nothing": "attn | | pass",
    "takes_nothing": " | attention('smoke-half') | pass",
    "own_assert": "attn | | attn.check(right); assert 1 == 2",
    "own_assert_alone": "attn | | assert 1 == 2",
    "own_error_after_invariants": "attn | | attn.check_invariants(right, only='rerun'); {}['key']",
    "set_up": "attn, broken | | attn.check(right)",
    "set_up_first": "broken, attn | | attn.check(right)",
    "torn_down": "attn, breaks_after | | attn.check(right)",
    "wrong_and_torn_down": "attn, breaks_after | | attn.check(wrong)",
    "skips": "attn | skip(reason='not today') | attn.check(right)",
    "skips_later": "attn | | attn.check(right); pytest.skip('not today')",
    "xfails": "attn | xfail | attn.check(wrong)",
    "xfails_raised": "attn | xfail | attn.check(raising)",
    "xfails_odd": "attn | xfail(strict=True) | attn.check(odd)",
    "xpasses": "attn | xfail(strict=False) | attn.check(right)",
    "xpasses_strict": "attn | xfail(strict=True) | attn.check(right)",
    "fails_itself": "attn | | attn.check(right); pytest.fail('by itself', pytrace=False)",
    "declines": "attn | | \n    def no(q, k, v): raise NotImplementedError('no')\n    attn.check(no)",
    "no_such_workload_name": "attn_backend, attn | | attn.check(attn_backend)",
    "not_ours": " | | pass",
}
#: a plugin that runs what failed once more, as pytest-rerunfailures does
RERUNS = """
import pytest
from _pytest.runner import runtestprotocol

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    if "flaky" not in item.name: return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for left in (1, 0):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        is_again = left and any(report.failed for report in reports)
        for report in reports:
            if is_again and report.failed: report.outcome = "rerun"
            item.ihook.pytest_runtest_logreport(report=report)
        if not is_again: break
        item._initrequest()
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
"""
FLAKY = """
calls = []
def test_flaky_kernel(attn):
    calls.append(1)
    attn.check(wrong if len(calls) == 1 else right)
def test_flaky_test(attn, others=[]):
    attn.check(right)
    others.append(1)
    assert len(others) == 2
def test_flaky_and_wrong(attn): attn.check(wrong)
"""
OUTPUTS = ("run.jsonl", "run.md", "run.html")


def written(endings):
    text = BEGINNING
    for name in endings:
        arguments, mark, body = (part.strip(" ") for part in ENDINGS[name].split("|"))
        text += f"{f'@pytest.mark.{mark}' if mark else ''}\ndef test_{name}({arguments}): {body}\n"
    return text


def run(pytester, *options, **how):
    named = [f"--attn-output={name}" for name in OUTPUTS]
    return pytester.runpytest_inprocess(*named, "--attn-backends=math", "-p", "no:cacheprovider", *options, **how)


def require_told(pytester, result, monkeypatch, capsys, unmarked=0):
    """Hold what each report says against what pytest counted, and named as failed in its short summary."""
    counted = result.parseoutcomes()
    failed = counted.get("failed", 0) + counted.get("errors", 0) - unmarked
    named = Counter(re.findall(r"^(?:FAILED|ERROR) \S*::(\S+)", result.stdout.str(), re.MULTILINE))
    records = read_records(pytester.path / "run.jsonl")
    told = {r["test"].partition("::")[2] for r in records if r["phase"] != "rerun" and verdict_of(r).is_wrong}
    assert (told, failures(records)) == (set(named), failed)
    words = f"{failed} test{'s' * (failed != 1)} failed"
    page, pages = (pytester.path / "run.html").read_text(), (pytester.path / "run.md").read_text()
    if failed:
        assert words in page
        assert "No attention test went wrong" not in page
        assert words in pages
        assert sum(len(machine.records) for machine in by_machine(records)) == len(records)
    for name in named:
        assert name.partition("[")[0] in pages
        assert name in page
    assert pages.count("| failed |") == sum(r["verdict"] == "failed" for r in records)
    capsys.readouterr()
    monkeypatch.chdir(pytester.path)
    main(["merge", "--force", "merged.md", "run.jsonl"])
    assert (words if failed else "") in capsys.readouterr().out
    assert words in (pytester.path / "merged.md").read_text() or not failed
    return records


def test_all_endings_at_once(pytester, monkeypatch, capsys):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "step.md"))
    (pytester.path / "step.md").write_text("# Another step\n")
    pytester.makepyfile(written(ENDINGS))
    result = run(pytester, "-rfE")
    records = require_told(pytester, result, monkeypatch, capsys)
    summary = (pytester.path / "step.md").read_text()
    assert summary.startswith("# Another step\n## Attention\n")
    assert f"{failures(records)} tests failed" in summary
    result.stdout.fnmatch_lines(["::error file=test_all_endings_at_once.py,line=*,title=mismatch%3A * on smoke-full::*"])
    reasons = {r["test"].partition("::test_")[2].partition("[")[0]: r["reason"] for r in records if r["question"] == "test"}
    assert reasons["own_assert"] == "AssertionError: assert 1 == 2"
    assert reasons["judges_nothing"].startswith("judges nothing: it passed without a call of attn.check")
    assert reasons["takes_nothing"].startswith("judges nothing: it names workloads")
    assert reasons["torn_down"] == "OSError: disk full"
    assert reasons["xpasses_strict"] == "[XPASS(strict)]"


def test_stopped_at_the_first(pytester, monkeypatch, capsys):
    pytester.makepyfile(written(["right", "own_assert", "wrong"]))
    require_told(pytester, run(pytester, "-rfE", "-x"), monkeypatch, capsys)


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest 9 has subtests")
def test_what_subtests_assert_is_not_laid_to_the_kernel(pytester):
    pytester.makepyfile(f"""{BEGINNING}
def test_parts(attn, subtests):
    attn.check(right)
    for part in range(2):
        with subtests.test(part=part): assert part == 2
""")
    result = run(pytester)
    assert result.ret == 1
    assert [r["verdict"] for r in read_records(pytester.path / "run.jsonl")] == ["passed", "failed", "failed"]


def test_what_was_run_again(pytester, monkeypatch, capsys):
    pytester.makeconftest(RERUNS)
    pytester.makepyfile(BEGINNING + FLAKY)
    result = run(pytester, "-rfE")
    records = require_told(pytester, result, monkeypatch, capsys)
    assert [r["verdict"] for r in records if "flaky_kernel" in r["test"]] == ["mismatch", "passed"]
    assert [r["verdict"] for r in records if "flaky_test" in r["test"]] == ["passed", "passed"]


def test_a_killed_worker(pytester):
    dying = "\ndef test_dies(attn):\n    attn.check(right)\n    os._exit(3)\n"
    pytester.makepyfile(written(["right", "judges_nothing"]) + dying)
    pytester.makepyfile(test_a_first="def test_other(): assert 0")
    named = (f"--attn-output={name}" for name in OUTPUTS[:2])
    result = pytester.runpytest_subprocess("-n", "1", "--max-worker-restart=0", "-p", "no:cacheprovider", *named)
    records = read_records(pytester.path / "run.jsonl")
    assert failures(records) == 2
    (dead,) = [r for r in records if "test_dies" in r["test"]]
    assert (dead["verdict"], dead["question"], dead["workload"]) == ("no result", "test", "smoke-full")
    assert "crashed" in dead["reason"]
    assert "2 tests failed" in (pytester.path / "run.md").read_text()
    closing = json.loads((pytester.path / "run.jsonl").read_text().splitlines()[-1])["run"]
    assert closing["records"] == len(records)
    assert result.ret == 1


def test_a_file_that_cannot_be_collected_and_an_interrupted_run(pytester):
    pytester.makepyfile(test_a=written(["right"]), test_b="import no_such_module")
    run(pytester, "--continue-on-collection-errors")
    assert "test_b.py" in (pytester.path / "run.md").read_text()
    assert "No attention test went wrong" not in (pytester.path / "run.html").read_text()
    pytester.makepyfile(test_b=f"{written(['right'])}\ndef test_stops(attn): raise KeyboardInterrupt\n")
    assert run(pytester, no_reraise_ctrlc=True).ret == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in (pytester.path / "run.md").read_text()
    assert "No attention test went wrong" not in (pytester.path / "run.html").read_text()
    assert sentence(read_records(pytester.path / "run.jsonl")).startswith("The run was stopped")
