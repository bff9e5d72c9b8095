"""A missing optional library costs one line and one skipped item, however many cases it would have had."""

from pytest_attn.reports.records import read_records

TWO_TESTS = """
@pytest.mark.attention("smoke-full", "smoke-half", device="cpu")
def test_again(attn, attn_backend):
    attn.check(attn_backend)
"""


def two_tests(kernel_test):
    kernel_test(
        "attn.check(attn_backend)",
        marker='Workload(32), Workload(33), device="cpu"',
        fixtures="attn, attn_backend",
        before=TWO_TESTS,
    )


def test_a_missing_library_is_one_skip_and_one_line(run, kernel_test, pytester):
    two_tests(kernel_test)
    result = run("--attn-backends=math,natten,sdpa_cudnn", "-rs", "--attn-output=run.jsonl", "--attn-output=a.support.md")
    result.assert_outcomes(passed=4, skipped=2, deselected=6 if run.is_serial else 0)
    shown = result.stdout.str()
    assert shown.count("natten is not installed") == 2  # one line of ours, one of -rs
    assert "natten: natten is not installed; pip install natten" in shown
    records = read_records(pytester.path / "run.jsonl")
    assert [r["reason"] for r in records if r["subject"] == "natten"] == ["natten is not installed; pip install natten"]
    (row,) = [line for line in (pytester.path / "a.support.md").read_text().splitlines() if line.startswith("| `natten`")]
    assert set(row.strip("| ").split(" | ")[1:]) == {"not here"}


def test_a_missing_backend_that_is_named_alone_is_skipped_and_not_left_out(run, kernel_test):
    two_tests(kernel_test)
    run("--attn-backends=natten").assert_outcomes(skipped=1, deselected=3 if run.is_serial else 0)


def test_a_case_of_a_missing_backend_is_found_by_its_id(pytester, kernel_test):
    two_tests(kernel_test)
    (path,) = pytester.path.glob("test_*.py")
    item = f"{path.name}::test_kernel[s33-d64-natten]"
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", item, "--attn-backends=all")
    result.assert_outcomes(skipped=1)


def test_collect_only_shows_every_case(pytester, kernel_test):
    two_tests(kernel_test)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--collect-only", "-q", "--attn-backends=math,natten")
    assert str(result.stdout).count("-natten]") == 4
