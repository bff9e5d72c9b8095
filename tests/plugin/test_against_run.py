"""--attn-against as a user sees it. Times come from a clock of the tests, and of the processes from the table below."""

import json
import sys

import pytest
from fakes.timed import CLOCK, KERNEL, TURNS, committed

from pytest_attn.reports.records import read_records


@pytest.fixture
def both(project, pytester):
    """The project, whose new processes of both sides take the times of a table."""
    pytester.makeconftest(CLOCK + TURNS)
    return project


def test_this_version_against_itself_counts_alarms(both, pytester):
    result = both("--attn-against=self")
    result.assert_outcomes(passed=1)
    result.stdout.re_match_lines(
        [
            r"against self: 0 of 1 alarms in 16 runs on this machine",
            r"0.1000 ms .* -0.0% +\d+\.\d% +no difference +mine .*",
            r"latency: 1 without a difference",
        ]
    )
    assert not (pytester.path / "baselines").exists()
    said = "against self: 0 of 1 alarms in 16 runs on this machine; 1 could not be decided"
    both("--attn-against=self", HOT="hot").stdout.fnmatch_lines([said])
    both("--attn-against=self", SLOWER="0.5").stdout.re_match_lines(
        [r"against self: 1 of 1 alarms in 32 runs on this machine"]
    )


def test_what_is_slower_fails_its_test_and_says_so_in_the_record(both, pytester):
    result = both("--attn-against=self", "--attn-output=run.jsonl", SLOWER="0.5")
    result.assert_outcomes(passed=1, errors=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.re_match_lines(
        [
            r"slower: mine on tiny, forward: p50 0.15\d+ ms, this version itself 0.1001 ms \(\+49.9%, 95 % interval .*\)",
            r"  runs       0.15 ms, .*",
            r"  reproduce  pytest 'test_mine.py::test_mine\[tiny\]' --attn-against=self",
            r"latency: 1 slower",
        ]
    )
    record = read_records(pytester.path / "run.jsonl")[-1]
    assert (record["verdict"], record["latency"]["verdict"]) == ("slower", "slower")
    assert record["reason"].startswith("p50 0.1501 ms, this version itself 0.1001 ms (+49.9%, ")
    assert record["command"].endswith(" --attn-against=self")
    assert record["latency"]["decision"]["change"] == pytest.approx(0.5, abs=2e-3)
    both("--attn-against=self", SLOWER="-0.5").stdout.re_match_lines([r"latency: 1 faster"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--attn-against=gone"], "--attn-against: 'gone' is n*"),
        (["--attn-against=self", "-n", "2"], "--attn-against: times in processes of its own, one at a time; leave out -n"),
        (["--attn-against=self", "--attn-latency=off"], "--attn-against: needs times; leave out --attn-latency=off"),
        (
            ["--attn-against=self", "--attn-update-baselines=why"],
            "--attn-against: does not go with --attn-update-baselines; leave one of them out",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(both, arguments, said):
    result = both(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {said}"])


def test_a_device_that_others_keep_is_said_in_a_line(both):
    result = both("--attn-against=self", LOCKED="1")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    words = "against this version itself: nothing was compared: another process has been timing"
    result.stdout.fnmatch_lines([words, "latency: 1 inconclusive"])


def test_a_run_that_times_nothing_says_so_and_what_is_wrong(both, pytester):
    pytester.makepyfile(test_mine=KERNEL.replace("attn.measure", "attn.check"))
    both("--attn-against=self").stdout.fnmatch_lines(["--attn-against: nothing was timed; a test times a kernel with*"])
    committed(pytester.path)
    pytester.makepyfile(test_mine=KERNEL.replace("return ", "return 2 * "))
    both("--attn-against=HEAD").stdout.fnmatch_lines(["wrong here only: test_mine.py::test_mine[[]tiny[]]"])


def test_what_an_interpreter_imports_of_this_tree_is_named(both, pytester):
    pytester.makepyfile(fast="from torch.nn.functional import scaled_dot_product_attention as sdpa")
    pytester.makepyfile(test_mine=KERNEL.replace("torch.nn.functional import scaled_dot_product_attention as", "fast import"))
    said = ["the same on both sides: fast.py of this tree; only what it calls can differ", "latency: 1 without a difference"]
    both(f"--attn-against={sys.executable}").stdout.fnmatch_lines(said)


OTHERS = """
@pytest.mark.attention(Workload(32, heads=2, head_dim=32, name="{}"), device="cpu")
def test_{}(attn):
    attn.measure(lambda q, k, v: sdpa(q, k, v) * {})
"""


def revision(folder, text):
    """Commit a file of tests."""
    (folder / "test_mine.py").write_text(text)
    committed(folder)


@pytest.mark.slow("starts a pytest of the other side")
def test_a_revision_is_judged_and_what_it_lacks_or_fails_is_said(both, pytester):
    revision(pytester.path, KERNEL + OTHERS.format("there", "wrong_there", 1.1) + OTHERS.format("both", "wrong_both", 1.1))
    mine = KERNEL + OTHERS.format("there", "wrong_there", 1) + OTHERS.format("both", "wrong_both", 1.1)
    mine += OTHERS.format("new", "new", 1) + OTHERS.format("here", "wrong_here", 1.1)
    pytester.makepyfile(test_mine=mine)
    result = both("--attn-against=HEAD", "--attn-output=run.jsonl")
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.re_match_lines(
        [
            r"against HEAD \(\w{10}\): A is this tree at \w{10}, with changes that are not committed, B is HEAD \(\w{10}\)",
            r"wrong on both sides: test_mine.py::test_wrong_both\[both\]",
            r"wrong here only: test_mine.py::test_wrong_here\[here\]",
            r"wrong in HEAD \(\w{10}\) only: test_mine.py::test_wrong_there\[there\]",
            r"inconclusive  .* on there: it fails in HEAD \(\w{10}\): .*",
            r"inconclusive  .* on new: HEAD \(\w{10}\) has no such test, or not with this workload",
            r"latency: 1 without a difference, 2 inconclusive",
        ]
    )
    run = json.loads((pytester.path / "run.jsonl").read_text().splitlines()[-1])
    assert run["run"]["records"] == len(read_records(pytester.path / "run.jsonl"))


@pytest.mark.parametrize(
    ("folder", "names"),
    [
        (".", []),
        (".", ["tests"]),
        (".", ["--pyargs", "tests/test_mine.py::test_mine"]),
        ("tests", ["test_mine.py"]),
    ],
)
def test_a_test_in_a_new_folder_is_inconclusive_however_it_is_named(both, pytester, monkeypatch, folder, names):
    (pytester.path / "test_mine.py").unlink()
    pytester.makeini("[pytest]")
    committed(pytester.path)
    pytester.mkdir("tests").joinpath("test_mine.py").write_text(KERNEL)
    monkeypatch.chdir(folder)
    result = both("--attn-against=HEAD", *names)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.re_match_lines(
        [
            r"against HEAD .*: A is this tree at \w+, with changes that are not committed, B is HEAD",
            "inconclusive .* on tiny: HEAD .* has no such test, or not with this workload",
        ]
    )


def test_of_tests_that_are_named_those_that_both_sides_have_are_compared(both, pytester):
    longer = OTHERS.format("grown", "grown", 1)
    revision(pytester.path, KERNEL + longer.replace("(32", "(16"))
    pytester.makepyfile(test_mine=KERNEL + longer + OTHERS.format("new", "new", 1), test_other=KERNEL)
    names = [f"test_mine.py::test_{name}" for name in ("mine", "new", "grown")]
    result = both("--attn-against=HEAD", *names, "test_other.py")
    assert result.ret == pytest.ExitCode.OK
    lacking = "inconclusive +2 cases: HEAD .* has no such test, or not with this workload"
    grown = "inconclusive .* the workload is another one: h2-s16-d32 in HEAD .*, h2-s32-d32 here"
    result.stdout.re_match_lines([lacking, "latency: 1 without a difference, 3 inconclusive"])
    result.stdout.re_match_lines([grown])


def test_a_file_that_cannot_be_imported_there_is_not_one_that_lacks_the_test(both, pytester):
    revision(pytester.path, "import gone")
    pytester.makepyfile(test_mine=KERNEL)
    for names in ((), ("test_mine.py::test_mine",)):
        broken = both("--attn-against=HEAD", *names, "--tb=no", "--no-summary")
        assert broken.ret == pytest.ExitCode.TESTS_FAILED
        broken.stdout.re_match_lines([r"against HEAD .*: nothing was compared: it cannot run these tests: .*gone.*"])


def test_what_is_built_of_other_sources_elsewhere_is_named(both, pytester):
    (pytester.path / "csrc").mkdir()
    (pytester.path / "csrc" / "fast.cu").write_text("old")
    revision(pytester.path, KERNEL)
    (pytester.path / "csrc" / "fast.cu").write_text("new")
    said = "the same on both sides, unless a test builds it: what is built of csrc/fast.cu; name the interpreter *"
    both("--attn-against=HEAD").stdout.fnmatch_lines([said])


def test_a_file_that_cannot_be_imported_there_keeps_no_other_from_being_compared(both, pytester):
    pytester.makepyfile(test_other="import gone", test_third=KERNEL.replace("attention(", "attention('unheard-of', "))
    revision(pytester.path, KERNEL)
    pytester.makepyfile(test_other=KERNEL, test_third=KERNEL)
    result = both("--attn-against=HEAD")
    assert result.ret == pytest.ExitCode.OK
    said = r"cannot run test_other.py: ModuleNotFoundError: No module named 'gone'"
    result.stdout.re_match_lines(
        [rf"HEAD \S+ {said}", r"HEAD \S+ cannot run test_third.py: .* unknown workload 'unheard-of'; "]
    )
    result.stdout.re_match_lines([rf"inconclusive .* {said}", r"latency: 1 without .*, 2 inconclusive"])
