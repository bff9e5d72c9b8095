"""The page of --attn-output, as a user sees it."""

import json
import re
import sys

import pytest
import vl_convert  # noqa: F401  # its extension cannot be loaded a second time by a run in this process

MARKER = '"smoke-full", device="cpu"'


def data_of(path):
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)[1])


def test_the_page_has_every_judgment_of_the_run(run, kernel_test, pytester):
    kernel_test("attn.check(attn_backend)", marker=MARKER, fixtures="attn, attn_backend")
    pytester.makepyfile(
        test_wrong="""
import pytest
from torch.nn.functional import scaled_dot_product_attention as sdpa

@pytest.mark.attention("smoke-full", device="cpu")
def test_wrong(attn):
    attn.check(lambda q, k, v: sdpa(q, k, v, scale=1.0))
"""
    )
    result = run("--attn-backends=sdpa,math,flash3", "--attn-output=page.html")
    result.assert_outcomes(passed=2, failed=1, skipped=1)
    data = data_of(pytester.path / "page.html")
    assert [machine["sentence"] for machine in data["machines"]] == [
        "1 test failed. 1 of 4 judgments went wrong: 1 wrong. The rest: 2 right, 1 skipped."
    ]
    names = [subject["name"] for subject in data["subjects"]]
    assert [name for name in names if "lambda" not in name] == ["math", "sdpa", "flash3"], "the order of the registry"
    assert any("test_wrong.py::test_wrong[smoke-full]" in text for text in data["texts"]), "the command to repeat it"


def test_without_the_extra_nothing_runs(pytester, kernel_test, monkeypatch):
    kernel_test("attn.check(sdpa)", marker=MARKER)
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    result = pytester.runpytest_inprocess("--attn-output=page.html")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(['ERROR: --attn-output=FILE.html: needs vl_convert; pip install "pytest-attn[[]report[]]"'])
    assert not (pytester.path / "page.html").exists()


def test_a_listing_writes_no_page_and_a_run_without_tests_an_empty_one(run, kernel_test, pytester):
    kernel_test("attn.check(sdpa)", marker=MARKER)
    run("--attn-list", "--attn-output=page.html")
    assert not (pytester.path / "page.html").exists()
    pytester.makepyfile(test_none="def test_nothing():\n    pass\n")
    run("test_none.py", "--attn-output=page.html").assert_outcomes(passed=1)
    assert "No attention test ran." in (pytester.path / "page.html").read_text(encoding="utf-8")
