"""--attn-shard: N runs together run each test once, whatever else is asked for."""

import json
import subprocess
from pathlib import Path

import pytest

from pytest_attn.__main__ import main
from pytest_attn.reports.records import read_records
from pytest_attn.session.part import commit_of

TESTS = """
import pytest
from torch.nn.functional import scaled_dot_product_attention as sdpa

@pytest.mark.attention("smoke-full", "smoke-half", "smoke-causal-gqa", device="cpu")
def test_kernel(attn, attn_backend):
    attn.check(attn_backend)

@pytest.mark.parametrize("number", range(7))
def test_plain(number):
    assert number != 3
"""
BACKENDS = "--attn-backends=math,sdpa"
CASES = 3 * 2 + 7
MANY = """
import pytest
from pytest_attn import Workload, Window

WORKLOADS = [Workload(64 + 16 * (n % 250), heads=1 + n // 100, mask=(None, "causal", Window(64))[n % 3], name=f"w{n}")
             for n in range(400)]

@pytest.mark.attention(WORKLOADS, device="cpu")
def test_case(attn, attn_backend):
    pass
"""
TEN = "math,eager,sdpa,flex,flash2,xformers,sdpa+compile,math+compile,flex_decode,varlen"


@pytest.fixture
def parts(pytester):
    """Collect, or run, each of N parts in this process; return the ids of the tests of each."""
    pytester.makepyfile(test_it=TESTS)

    def collect(count, *arguments, each=lambda number: ()):
        found = []
        for number in range(1, count + 1):
            result = pytester.runpytest_inprocess(
                *("--collect-only", "-q", f"--attn-shard={number}/{count}"), *arguments, *each(number)
            )
            found.append([line for line in result.outlines if "::" in line])
        return found

    return collect


def once(found, count):
    """Whether lists have `count` different ids, none of them twice."""
    every = [name for one in found for name in one]
    return len(every) == len(set(every)) == count


@pytest.mark.slow
def test_4000_cases_in_8_parts_are_each_in_one_and_parts_are_alike(pytester):
    pytester.makepyfile(test_many=MANY)
    pytester.makeconftest(
        """
        import json
        import pytest
        from pytest_attn.session import costs

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(config, items):
            from pytest_attn.reports.parts import stable_id

            every = costs.costs_of({stable_id(item.nodeid): item for item in items}, {}, 0)
            with open("costs.json", "w") as file:
                json.dump(every, file)
        """
    )
    found = []
    for number in range(1, 9):
        result = pytester.runpytest_inprocess("--co", "-q", f"--attn-backends={TEN}", f"--attn-shard={number}/8")
        found.append([line for line in result.outlines if "::" in line])
    assert once(found, 4000)
    costs = json.loads((pytester.path / "costs.json").read_text())
    loads = []
    for part in found:
        groups = {}
        for name in part:
            groups.setdefault(costs[name][0], []).append(costs[name])
        loads.append(
            sum(sum(own for _, own, *_ in group) + max(shared for _, _, shared, _ in group) for group in groups.values())
        )
    assert max(loads) <= 1.15 * min(loads), loads
    assert len({part[0] for part in found}) == 8


@pytest.mark.one_in(2)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 20])
def test_every_test_is_in_one_part(parts, count):
    found = parts(count, BACKENDS)
    assert once(found, CASES)
    assert count == 20 or all(found)


def test_k_and_m_choose_before_the_tests_are_divided(parts):
    assert once(found := parts(2, BACKENDS, "-k", "sdpa or plain"), 3 + 7)
    assert abs(len(found[0]) - len(found[1])) <= 3
    assert once(parts(2, BACKENDS, "-m", "attention"), 6)
    assert once(parts(3, BACKENDS, "--deselect=test_it.py::test_plain[0]"), CASES - 1)
    first, second = parts(2, BACKENDS)
    again = parts(2, BACKENDS, *(f"--deselect={name}" for name in second))
    assert once(again, len(first))
    assert all(again), "what is left of one part is divided among both"


def test_the_order_of_tests_divides_them_in_no_other_way(parts, pytester):
    straight = parts(3, BACKENDS)
    pytester.makeconftest("def pytest_collection_modifyitems(items): items.reverse()")
    assert [sorted(one) for one in parts(3, BACKENDS)] == [sorted(one) for one in straight]


def test_lf_runs_what_failed_of_the_part_whatever_the_caches_of_hosts_say(parts, pytester):
    """A host's cache knows its own failures only; what it chooses must not change what the part is."""
    whole = parts(2, BACKENDS, "-p", "no:cacheprovider")
    (failing,) = (number for number, part in enumerate(whole, 1) if "test_it.py::test_plain[3]" in part)
    pytester.runpytest_inprocess(BACKENDS, f"--attn-shard={failing}/2").assert_outcomes(
        passed=len(whole[failing - 1]) - 1, failed=1, deselected=CASES - len(whole[failing - 1])
    )
    assert parts(2, BACKENDS, "--lf")[failing - 1] == ["test_it.py::test_plain[3]"]
    other = parts(2, BACKENDS, "--lf")[2 - failing]
    assert sorted(other) == sorted(whole[2 - failing]), "nothing of this part failed: --lf runs all of it"


def test_ff_and_nf_change_the_order_only(parts, pytester):
    whole = parts(2, BACKENDS, "-p", "no:cacheprovider")
    pytester.runpytest_inprocess(BACKENDS)
    for option in ("--ff", "--nf"):
        assert [sorted(one) for one in parts(2, BACKENDS, option)] == [sorted(one) for one in whole]


def test_tests_of_one_xdist_group_stay_in_one_part(pytester):
    pytester.makepyfile(
        test_it="""
        import pytest

        @pytest.mark.parametrize("number", range(20))
        @pytest.mark.xdist_group("database")
        def test_together(number): pass

        @pytest.mark.parametrize("number", range(20))
        def test_apart(number): pass
        """
    )
    found = []
    for number in (1, 2, 3):
        result = pytester.runpytest_inprocess("--co", "-q", f"--attn-shard={number}/3", "-m", "xdist_group or not xdist_group")
        found.append([line for line in result.outlines if "::" in line])
    assert once(found, 40)
    assert sorted(sum("together" in name for name in part) for part in found) == [0, 0, 20]


def run_parts(pytester, count, *arguments, in_process=True):
    start = pytester.runpytest_inprocess if in_process else pytester.runpytest_subprocess
    return [
        start(BACKENDS, f"--attn-shard={number}/{count}", f"--attn-output=part-{number}.jsonl", *arguments)
        for number in range(1, count + 1)
    ]


def test_parts_that_ran_are_merged(pytester, capsys):
    pytester.makepyfile(test_it=TESTS)
    results = run_parts(pytester, 3)
    assert sum(result.parseoutcomes().get("passed", 0) for result in results) == CASES - 1
    results[0].stdout.fnmatch_lines(
        ["attn: --attn-shard=1/3", "--attn-shard: part 1 of 3 ran * of its * tests; 13 in all, divided as ????????????"]
    )
    files = [f"part-{number}.jsonl" for number in (1, 2, 3)]
    capsys.readouterr()
    assert main(["merge", "all.jsonl", *files]) == 0
    assert capsys.readouterr().out == "3 parts, 13 tests, 6 records: written to all.jsonl\n"
    assert len({record["test"] for record in read_records("all.jsonl")}) == 6
    assert main(["merge", "all.jsonl", *files[1:]]) == 1


@pytest.mark.slow
@pytest.mark.twice
def test_a_part_is_the_same_through_xdist(pytester, capsys, request):
    pytester.makepyfile(test_it=TESTS)
    run_parts(pytester, 2)
    result = pytester.runpytest_subprocess(
        *(BACKENDS, "--attn-shard=2/2", "--attn-output=other-2.jsonl", "-n", "2", "--dist", "loadgroup")
    )
    result.stdout.fnmatch_lines(["--attn-shard: part 2 of 2 ran * of its * tests; 13 in all, divided as ????????????"])
    lines = {
        name: [json.loads(line) for line in Path(name).read_text().splitlines()] for name in ("part-2.jsonl", "other-2.jsonl")
    }
    plain, spread = ([one[0], one[-1]] for one in lines.values())
    assert plain == spread
    assert plain[1]["part"]["ran"] == plain[1]["part"]["tests"] > 0
    capsys.readouterr()
    assert main(["merge", "all.jsonl", "part-1.jsonl", "other-2.jsonl"]) == 0


def test_a_run_that_stops_early_is_not_whole(pytester, capsys):
    pytester.makepyfile(test_it=TESTS)
    run_parts(pytester, 1, "-x")
    capsys.readouterr()
    assert main(["merge", "all.jsonl", "part-1.jsonl"]) == 1
    assert "of its 13 tests; was it stopped, or run with -x or --lf?; run it again" in capsys.readouterr().err


def test_a_run_that_is_killed_is_not_whole_even_if_it_leaves_an_earlier_file(pytester, capsys):
    pytester.makepyfile(test_it=TESTS)
    run_parts(pytester, 1)
    pytester.makepyfile(test_it="import os\ndef test_it(): os._exit(9)\n" + TESTS)
    run_parts(pytester, 1, in_process=False)
    capsys.readouterr()
    assert main(["merge", "all.jsonl", "part-1.jsonl"]) == 1
    assert "part 1 (part-1.jsonl) did not end: it has records of 0 tests" in capsys.readouterr().err


def test_a_file_that_cannot_be_collected_on_one_host_is_seen(pytester, capsys):
    pytester.makepyfile(test_it=TESTS, test_other="def test_one(): pass\ndef test_two(): pass\n")
    pytester.runpytest_inprocess(BACKENDS, "--attn-shard=1/2", "--attn-output=part-1.jsonl")
    pytester.makepyfile(test_other="import no_such_library\ndef test_one(): pass\ndef test_two(): pass\n")
    pytester.runpytest_inprocess(BACKENDS, "--attn-shard=2/2", "--attn-output=part-2.jsonl", "--continue-on-collection-errors")
    capsys.readouterr()
    assert main(["merge", "all.jsonl", "part-1.jsonl", "part-2.jsonl"]) == 1
    said = capsys.readouterr().err
    assert "part 2 (part-2.jsonl) could not collect 1 file, so tests are missing" in said
    assert "the parts are of different tests, so some may be in two parts or in none: 15 tests" in said


def test_hosts_with_other_backends_are_seen(pytester, capsys):
    pytester.makepyfile(test_it=TESTS)
    run_parts(pytester, 2)
    pytester.runpytest_inprocess("--attn-backends=math", "--attn-shard=2/2", "--attn-output=part-2.jsonl")
    capsys.readouterr()
    assert main(["merge", "all.jsonl", "part-1.jsonl", "part-2.jsonl"]) == 1
    assert "the parts are of different tests" in capsys.readouterr().err


def test_a_part_without_tests_is_a_success_and_no_tests_at_all_are_not(pytester):
    pytester.makepyfile(test_it="def test_only(): pass")
    assert [pytester.runpytest_inprocess(f"--attn-shard={number}/2").ret for number in (1, 2)] == [0, 0]
    assert pytester.runpytest_inprocess("--attn-shard=1/2", "-k", "nothing").ret == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--attn-shard=9/8"], "--attn-shard: there is no part 9 of 8; parts are counted from 1, so the last is 8/8"),
        (["--attn-shard=3"], "--attn-shard: must be I/N, such as 3/8 for the third of eight parts, or auto, got '3'"),
        (["--attn-shard=auto"], "--attn-shard: auto finds no variables of Slurm, *; say which part this is, such as *"),
        (["--attn-shard=1/2", "--sw"], "--attn-shard: --stepwise goes on where this machine stopped, *; leave it out"),
        (["--attn-shard=1/2", "--attn-mutants"], "--attn-shard: --attn-mutants counts over all tests together; *"),
        (["--attn-shard=1/2", "--attn-update-baselines=why"], "--attn-shard: --attn-update-baselines records on one machine*"),
        (
            ["--attn-shard=1/2", "--attn-shard-durations=no.json"],
            "--attn-shard-durations: cannot read *no.json: No such file*",
        ),
    ],
)
def test_what_cannot_be_divided_is_a_usage_error(pytester, monkeypatch, arguments, text):
    for name in ("SLURM_PROCID", "CI_NODE_INDEX", "RANK", "JOB_COMPLETION_INDEX", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    pytester.makepyfile(test_it=TESTS)
    result = pytester.runpytest_inprocess(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {text}"])


def test_auto_says_who_said_so(pytester, monkeypatch):
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    monkeypatch.setenv("JOB_COMPLETIONS", "4")
    pytester.makepyfile(test_it=TESTS)
    result = pytester.runpytest_inprocess("--attn-shard=auto", "--co")
    result.stdout.fnmatch_lines(["attn: --attn-shard=2/4 (from JOB_COMPLETION_INDEX and JOB_COMPLETIONS)"])


def test_a_fresh_process_runs_what_it_is_told(pytester, monkeypatch):
    """It is given the tests to time by name, and options of an ini file or of PYTEST_ADDOPTS as well."""
    pytester.makepyfile(test_it=TESTS)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--attn-shard=1/4")
    monkeypatch.setenv("PYTEST_ATTN_RUNS", str(pytester.path / "runs"))
    result = pytester.runpytest_inprocess("--co", "-q", BACKENDS)
    assert sum("::" in line for line in result.outlines) == CASES


@pytest.fixture
def durations(pytester, capsys):
    """Run everything, and write how long each test took; return the file's name."""
    pytester.makepyfile(test_it=TESTS)
    pytester.runpytest_inprocess(BACKENDS, "--attn-output=run.jsonl")
    assert main(["durations", "run.jsonl"]) == 0
    (path,) = pytester.path.glob("durations-*.json")
    return path


def test_durations_of_a_run_before_divide_the_next(parts, durations):
    found = json.loads(durations.read_text())
    assert len(found["seconds"]) == 6
    assert once(parts(3, BACKENDS, f"--attn-shard-durations={durations.name}"), CASES)


def test_a_test_that_took_long_has_a_part_for_itself(parts, durations, capsys):
    records = read_records("run.jsonl")
    from pytest_attn.reports.durations import durations_file

    slow = records[0]["test"]
    end, text = durations_file([{**one, "seconds": 100.0 if one["test"] == slow else 0.01} for one in records])
    Path(f"slow{end}").write_text(text)
    assert [slow] in parts(3, BACKENDS, f"--attn-shard-durations=slow{end}")


def test_a_file_of_durations_that_its_name_does_not_promise_is_refused(pytester, durations):
    text = durations.read_text()
    for name, content in ((durations.name, text.replace("0.", "1.")), ("durations.json", text), ("x-0123456789ab.json", text)):
        Path(name).write_text(content)
        result = pytester.runpytest_inprocess("--attn-shard=1/2", f"--attn-shard-durations={name}")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(
            [f"ERROR: --attn-shard-durations: {name} should end in -????????????.json, as python -m *"]
        )
    Path("run-0123456789ab.json").write_text("[]")
    result = pytester.runpytest_inprocess("--attn-shard=1/2", "--attn-shard-durations=run-0123456789ab.json")
    result.stderr.fnmatch_lines(["ERROR: *run-0123456789ab.json was not written by python -m pytest_attn durations"])


def test_the_commit_has_a_mark_of_what_is_not_committed(tmp_path):
    assert commit_of(tmp_path / "nowhere") == ""

    def git(*words):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "file").write_text("one\n")
    git("add", "file")
    git("commit", "-qm", "first")
    clean = commit_of(tmp_path)
    assert len(clean) == 40
    (tmp_path / "file").write_text("two\n")
    changed = commit_of(tmp_path)
    assert changed.startswith(f"{clean}+")
    (tmp_path / "file").write_text("three\n")
    assert commit_of(tmp_path) != changed
