"""attn.measure as a user sees it. Times come from a clock of the tests, in this process and in the fresh ones."""

import json
import os
import re
from types import SimpleNamespace

import pytest

from pytest_attn.session import latency

KERNEL = """
import os, pytest, torch
from pytest_attn import Workload
from torch.nn.functional import scaled_dot_product_attention as sdpa

def mine(q, k, v):
    return sdpa(q, k, v)

@pytest.mark.attention(Workload(32, heads=2, head_dim=32, name="tiny"), device="cpu")
def test_mine(attn):
    attn.measure(mine)
"""
#: TIMES: p50 in microseconds, here and (after a comma) in fresh processes; each a little off, as times are. MODES: likewise.
#: HOT: what disturbs each measurement. HOT_IN: the numbers of the fresh processes that are disturbed
CLOCK = """
import dataclasses, os, pathlib
import pytest_attn.latency.gate as gate, pytest_attn.session.recording as recording
from pytest_attn.latency.protocol import Latency, Stopwatch
from pytest_attn.latency.statistics import median_interval
from pytest_attn.session.fresh import is_fresh_process

recording.FEWEST_RUNS = 3
gate.POLICIES["cpu"] = dataclasses.replace(gate.POLICIES["cpu"], runs=2)

def measure(self, work, workload, subject, mode=None, seconds=None):
    here, _, fresh = os.environ.get("TIMES", "100").partition(",")
    p50 = float(fresh or here if is_fresh_process() else here) * 1e-6 * (1.001 + os.getpid() % 7 / 1000)
    anchor = float(os.environ.get("ANCHOR", "1")) * 1e-3
    number = pathlib.Path(os.environ["PYTEST_ATTN_RUNS"]).parent.name if is_fresh_process() else "none"
    mode = mode or os.environ.get("MODES", "host,host").split(",")[is_fresh_process()]
    return Latency(workload, subject, work.direction, p50, median_interval([p50] * 6), (p50,) * 6, 6, mode, 1, "warm",
                   p50, {"compute": anchor, "memory": 2 * anchor}, int(os.environ.get("MEMORY", "1000")), 1,
                   tuple(filter(None, [os.environ.get("HOT"), number in os.environ.get("HOT_IN", "") and "hot"])))

Stopwatch.measure = measure
Stopwatch.__init__ = lambda self, device, cold=True, own=frozenset(): setattr(self, "guard", Silent())

class Silent:
    def conditions(self):
        return {}
"""


RECORDED: dict[str, str] = {}


@pytest.fixture
def project(pytester, monkeypatch):
    """A folder with a kernel's test and a clock; returns a function that runs pytest there with another time."""
    from pytest_attn.latency import gate, protocol
    from pytest_attn.session import recording

    policies = dict(gate.POLICIES)
    for owner, name in ((protocol.Stopwatch, "measure"), (protocol.Stopwatch, "__init__"), (recording, "FEWEST_RUNS")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back after in-process runs, which conftest changes
    protocol.stopwatch_of.cache_clear()
    pytester.makeconftest(CLOCK)
    pytester.makepyfile(test_mine=KERNEL)
    for name in ("TIMES", "ANCHOR", "MEMORY", "HOT", "MODES"):
        monkeypatch.delenv(name, raising=False)

    def run(*args, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *args)
        for name in environment:
            monkeypatch.delenv(name)
        return result

    yield run
    gate.POLICIES.update(policies)
    protocol.stopwatch_of.cache_clear()


@pytest.fixture
def recorded(project, pytester):
    """The same, after baselines were recorded at 100 us."""
    if not RECORDED:  # once: it takes four processes
        project("--attn-update-baselines=first recording").assert_outcomes(passed=1)
        (path,) = (pytester.path / "baselines").iterdir()
        RECORDED[path.name] = path.read_text()
    (pytester.path / "baselines").mkdir(exist_ok=True)
    for name, text in RECORDED.items():
        (pytester.path / "baselines" / name).write_text(text)
    return project


def baseline_file(pytester):
    (path,) = (pytester.path / "baselines").iterdir()
    return path


def test_without_a_baseline_the_time_is_shown_and_what_to_type(project, pytester):
    result = project()
    result.assert_outcomes(passed=1)
    result.stdout.re_match_lines(
        [
            r".* attention latency .*",
            r" +p50 +\+- +change +finds +verdict +backend +workload +direction +mode",
            r" ?(100|0\.10)\S+ .s +\d.* +- +- +no baseline +mine +tiny +forward +host, warm",
            r"no baseline +mine on tiny: none recorded in .*baselines",
            r'latency: 1 without a baseline; record with --attn-update-baselines "first recording"',
        ],
        consecutive=False,
    )
    assert not (pytester.path / "baselines").exists()


def test_a_case_keeps_its_name_when_its_kernel_moves_to_another_line(project, pytester):
    text = KERNEL.replace("attn.measure(mine)", "attn.measure(lambda q, k, v, block=64: mine(q, k, v))")
    keys = []
    for moved in (text, "# a comment\n\n" + text):
        pytester.makepyfile(test_mine=moved)
        project("--attn-json=run.jsonl").assert_outcomes(passed=1)
        records = map(json.loads, (pytester.path / "run.jsonl").read_text().splitlines())
        keys += [record["latency"]["key"] for record in records if record["question"] == "latency"]
    assert keys[0] == keys[1]
    assert "lambda of test_mine.py::test_mine" in keys[0]


def test_recording_says_what_it_wrote(project, pytester):
    result = project("--attn-update-baselines", "first recording")
    result.assert_outcomes(passed=1)
    result.stdout.re_match_lines(
        [
            r"baselines: 1 case, fresh process 1 of 3",
            r"baselines: 1 of 1 cases recorded in .*baselines.*\.json",
            r"latency: 1 recorded",
        ],
        consecutive=False,
    )
    (case,) = json.loads(baseline_file(pytester).read_text())["cases"].values()
    assert len(case["p50_ns"]) == 3
    assert case["reason"] == "first recording"
    assert case["shape"] == "h2-s32-d32"
    assert case["memory"] == 1000
    assert len(case["z"]) == 3


def test_an_equal_time_passes(recorded):
    result = recorded()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["latency: 1 as fast as recorded"])


def test_a_slower_time_is_a_failed_test_with_its_evidence(recorded):
    result = recorded(TIMES="150")
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines(
        [
            r">       attn\.measure\(mine\)",
            r"E +AssertionError: regressed: mine on tiny, forward: p50 0\.15\d* ms, recorded 0\.10\d* ms \(\+\d\d\.\d%, 95 %"
            r" interval \+\d.*",
            r"E +runs +0\.15\d* ms in this process; decided on 0\.15\d* ms, 0\.15\d* ms",
            r"E +recorded +0\.1\d* ms to 0\.1\d* ms in 3 processes, \d{4}-\d\d-\d\d: first recording",
            r"E +anchors +compute [+-]0\.\d%, memory [+-]0\.\d% \(timed as host, 1 call a sample, L2 warm\)",
            r"E +certainty +four of five suites would find a slowdown of \d.*%; of suites of 1 cases, at most 1 % .*",
            r"E +reproduce +pytest 'test_mine\.py::test_mine\[tiny\]'.*",
            r'E +accept +pytest .* --attn-update-baselines "why it is slower"',
            r"latency: 1 regressed",
        ],
        consecutive=False,
    )
    assert "session/case.py" not in result.stdout.str().replace("\\", "/")


def test_a_time_that_fresh_processes_do_not_confirm_passes(recorded):
    result = recorded(TIMES="150,100")
    result.assert_outcomes(passed=1)


def test_a_regression_in_fresh_processes_only_is_not_looked_for(recorded):
    recorded(TIMES="100,150").assert_outcomes(passed=1)


def test_a_slow_machine_is_inconclusive_and_no_pass(recorded):
    result = recorded("-rs", TIMES="300", ANCHOR="3")
    result.assert_outcomes(skipped=1)
    result.stdout.re_match_lines(
        [r"SKIPPED \[1\] test_mine\.py:\d+: inconclusive latency: the compute anchor moved by \+200.*"], consecutive=False
    )


def test_a_disturbed_measurement_is_inconclusive(recorded):
    result = recorded("-rs", HOT="hardware thermal slowdown", TIMES="300")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*inconclusive latency: hardware thermal slowdown"])


@pytest.mark.parametrize(
    ("device", "here", "recorded", "is_same"),
    [
        ("cuda", "48f07d55", "48f07d55", True),
        ("cuda", "48f07d55", "c5c53ec0", False),
        ("cuda", "", "", False),
        ("cpu", "", "", True),
    ],
)
def test_a_gpu_is_that_of_the_recording_only_where_both_are_known(monkeypatch, device, here, recorded, is_same):
    monkeypatch.setattr(latency, "gpu_of", lambda device: here)
    measurement = SimpleNamespace(question=SimpleNamespace(device=SimpleNamespace(type=device)))
    assert latency.Measurement._is_device_of(measurement, SimpleNamespace(gpu=recorded)) is is_same


def test_a_disturbed_fresh_process_is_replaced_by_a_further_one(recorded):
    recorded(TIMES="300", HOT_IN="1,2").assert_outcomes(failed=1)


@pytest.mark.slow
def test_where_all_fresh_processes_are_disturbed_nothing_is_decided(recorded):
    result = recorded("-rs", TIMES="300", HOT_IN="0,1")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*inconclusive latency: not confirmed: hot"])


def test_a_disturbed_first_time_is_decided_by_fresh_processes(recorded):
    recorded(HOT_IN="none", TIMES="100,300").assert_outcomes(failed=1)


@pytest.mark.slow
def test_where_fresh_processes_were_disturbed_as_well_they_are_not_asked_again(recorded, pytester):
    """Two cases; each fresh process leaves a line."""
    path = pytester.path / "test_mine.py"
    path.write_text(path.read_text() + "\n\n" + KERNEL[KERNEL.index("@pytest") :].replace("test_mine", "test_again"))
    asked = pytester.path / "asked"
    with (pytester.path / "conftest.py").open("a") as conftest:
        conftest.write(f"\nif is_fresh_process():\n    open({str(asked)!r}, 'a').write('one\\n')\n")
    recorded("--attn-update-baselines=both").assert_outcomes(passed=2)
    asked.unlink()
    recorded("-rs", HOT="busy").assert_outcomes(skipped=2)
    assert asked.read_text().splitlines() == ["one"] * 2


@pytest.mark.slow
def test_a_recording_replaces_disturbed_processes(project, pytester):
    project("--attn-update-baselines=first", HOT_IN="0,3,4").assert_outcomes(passed=1)
    (case,) = json.loads(baseline_file(pytester).read_text())["cases"].values()
    assert len(case["p50_ns"]) == 3


@pytest.mark.slow
def test_a_recording_gives_up_after_five_more(project, pytester):
    result = project("--attn-update-baselines=first", HOT_IN="0,3,4,5,6,7")
    result.stdout.fnmatch_lines(["*2 fresh processes timed it undisturbed, 3 are needed; mostly: hot"])
    assert not [*(pytester.path / "baselines").iterdir()]


def test_more_memory_is_a_regression(recorded):
    result = recorded(MEMORY=str(5 << 20))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*because    peak memory 5.0 MiB, recorded 0.0 MiB"])


def test_less_accuracy_is_a_regression(recorded, pytester):
    path = pytester.path / "test_mine.py"
    path.write_text(path.read_text().replace("return sdpa(q, k, v)", "return sdpa(q, k, v) * (1 + 2e-7)"))
    data = baseline_file(pytester).read_text()
    baseline_file(pytester).write_text(re.sub(r'"z": \[[^\]]*\]', '"z": [0.1, 0.05, 0.01]', data))
    result = recorded()
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines([r"E +because +less accurate: z \d.* over an element, recorded 0\.1; .*"], consecutive=False)


def test_a_wrong_kernel_is_never_timed(recorded, pytester):
    path = pytester.path / "test_mine.py"
    path.write_text(path.read_text().replace("return sdpa(q, k, v)", "return sdpa(q, k, v) * 0"))
    result = recorded()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E * mismatch: out of mine: *"])
    assert "attention latency" not in result.stdout.str()


def test_a_wrong_kernel_is_never_recorded(project, pytester):
    path = pytester.path / "test_mine.py"
    path.write_text(path.read_text().replace("return sdpa(q, k, v)", "return sdpa(q, k, v) * 0"))
    project("--attn-update-baselines=first").assert_outcomes(failed=1)
    assert not (pytester.path / "baselines").exists()


@pytest.mark.slow
def test_recording_again_keeps_the_history_and_the_rest(recorded, pytester):
    path = pytester.path / "test_mine.py"
    path.write_text(path.read_text() + "\n" + KERNEL[KERNEL.index("@pytest.mark") :].replace("test_mine", "test_other"))
    recorded("--attn-update-baselines=slower on purpose", "-k", "test_other", TIMES="150").assert_outcomes(
        passed=1, deselected=1
    )
    cases = json.loads(baseline_file(pytester).read_text())["cases"]
    assert sorted(case["reason"] for case in cases.values()) == ["first recording", "slower on purpose"]
    recorded("--attn-update-baselines=accepted", "-k", "not test_other", TIMES="150").assert_outcomes(passed=1, deselected=1)
    cases = json.loads(baseline_file(pytester).read_text())["cases"]
    assert [entry[2] for key, case in cases.items() for entry in case["history"] if "test_mine[" in key] == [
        "first recording",
        "accepted",
    ]
    result = recorded("-k", "not test_other", TIMES="150")
    result.stdout.re_match_lines([r".*\+(49|5\d)\.\d% since the first recording on .*"], consecutive=False)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["batched", "replay"])
def test_recorded_anew_batches_and_replays_become_a_graph_in_every_process(recorded, pytester, mode):
    path = baseline_file(pytester)
    path.write_text(path.read_text().replace('"mode": "host"', f'"mode": "{mode}"'))
    recorded(MODES="graph,events", PYTEST_ADDOPTS="--attn-update-baselines=captured").assert_outcomes(passed=1)
    (case,) = json.loads(path.read_text())["cases"].values()
    assert case["mode"] == "graph"
    assert [entry[2] for entry in case["history"]] == ["captured"], "times of another mode are no history"


@pytest.mark.slow
def test_recorded_anew_another_mode_stays(recorded, pytester):
    recorded("--attn-update-baselines=again", MODES="events,graph").assert_outcomes(passed=1)
    (case,) = json.loads(baseline_file(pytester).read_text())["cases"].values()
    assert case["mode"] == "host"
    assert [entry[2] for entry in case["history"]] == ["first recording", "again"]


def test_require_fails_where_there_is_nothing_to_compare_with(project):
    result = project("--attn-latency=require")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E * no baseline: mine on tiny, forward: none recorded in *", "E *record*--attn-update-baselines*"]
    )


@pytest.mark.slow
def test_require_fails_where_nothing_can_be_said(recorded):
    recorded("--attn-latency=require", ANCHOR="3", TIMES="300").assert_outcomes(failed=1)


def test_off_checks_and_does_not_time(project, pytester):
    result = project("--attn-latency=off", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*mine is right, but was not timed: --attn-latency=off"])


@pytest.mark.slow
def test_max_slowdown_is_the_limit(recorded):
    recorded("--attn-max-slowdown=60", TIMES="150").assert_outcomes(passed=1)
    recorded("--attn-max-slowdown=40", TIMES="150").assert_outcomes(failed=1)


def test_another_shape_under_the_name_has_no_baseline(recorded, pytester):
    path = pytester.path / "test_mine.py"
    path.write_text(path.read_text().replace("Workload(32", "Workload(48"))
    result = recorded()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["no baseline * recorded for h2-s32-d32, this is h2-s48-d32"])


def test_what_pytest_benchmark_fails_hides_no_verdict(recorded):
    quiet = ("-W", "default", "--disable-warnings")
    recorded("--benchmark-save=base", "--benchmark-save-data", *quiet).assert_outcomes(passed=1)
    result = recorded("--benchmark-compare", "--benchmark-compare-fail=median:5%", *quiet, TIMES="107")
    assert result.ret == 1
    result.stderr.fnmatch_lines(["*Performance has regressed*"])
    result.stdout.fnmatch_lines(["* attention latency *", "latency: 1 as fast as recorded"])


def test_what_was_recorded_with_other_threads_is_said(recorded):
    result = recorded("-q", "--attn-threads=3")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["no baseline*: recorded warm, * thread*, this is warm, 3 threads"])


def test_clocks_that_cannot_be_locked_are_refused_where_there_is_no_gpu(project, monkeypatch):
    result = project("--attn-lock-clocks=max", CUDA_VISIBLE_DEVICES="")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*--attn-lock-clocks: the clocks of cpu cannot be locked: cpu is no NVIDIA GPU; leave out*"])


def test_a_damaged_file_is_said_and_left_alone(recorded, pytester):
    baseline_file(pytester).write_text("{")
    result = recorded("-q")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["no baseline*is damaged*restore it from version control*", "latency: 1 without a baseline"])
    result = recorded("--attn-latency=require")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*is damaged*"])
    result.stdout.no_fnmatch_line("*first recording*")  # which would be refused
    result = recorded("--attn-update-baselines=again")
    result.stdout.fnmatch_lines(["baselines: nothing recorded: *is damaged*"])
    assert baseline_file(pytester).read_text() == "{"


def test_a_file_in_place_of_the_folder_is_said_and_left_alone(project, pytester):
    held = project("--attn-baselines=test_mine.py")
    held.stdout.fnmatch_lines(["no baseline*test_mine.py: is a file; --attn-baselines must be a folder*"])
    recorded = project("--attn-baselines=test_mine.py", "--attn-update-baselines=first")
    recorded.stdout.fnmatch_lines(["baselines: nothing recorded: *test_mine.py*cannot be written*"])
    assert (pytester.path / "test_mine.py").read_text().strip() == KERNEL.strip()


def test_workers_that_share_a_device_do_not_time(recorded):
    result = recorded("-n", "2", "-rs", TIMES="150")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(
        ["latency: 1 not timed", "*mine is right, but was not timed: 2 workers share the cpu; latencies need -n 0"]
    )


@pytest.mark.slow
def test_one_worker_times_and_its_verdict_arrives(recorded):
    result = recorded("-n", "1", TIMES="150")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["latency: 1 regressed"])


def test_recording_takes_one_process(project):
    result = project("-n", "2", "--attn-update-baselines=first")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--attn-update-baselines: records in processes of its own*leave out -n"])


@pytest.mark.slow
def test_junit_and_last_failed_see_a_regression(recorded, pytester):
    recorded("--junitxml=report.xml", TIMES="150").assert_outcomes(failed=1)
    text = (pytester.path / "report.xml").read_text()
    assert 'failures="1"' in text
    assert "attn_p50_mine_forward" in text
    result = pytester.runpytest_subprocess("--co", "-q")
    assert result.ret == 0


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--attn-latency=sometimes", "*--attn-latency: must be off, auto or require, got 'sometimes'*"),
        ("--attn-max-slowdown=fast", "*--attn-max-slowdown: must be a number of percent above 0*"),
        ("--attn-max-slowdown=0", "*--attn-max-slowdown: must be a number of percent above 0*"),
        ("--attn-threads=-1", "*--attn-threads: must be a whole number of threads*"),
        ("--attn-l2=tepid", "*--attn-l2: must be cold or warm, got 'tepid'*"),
        ("--attn-lock-clocks=fast", "*--attn-lock-clocks: must be max or a number of MHz*"),
        ("--attn-update-baselines=", "*--attn-update-baselines: must be a reason*"),
        ("--attn-update-baselines=test_a.py::test_b", "*--attn-update-baselines: must be a reason*got the test*"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(pytester, option, words):
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([words])


@pytest.mark.slow
def test_threads_are_part_of_the_case(project, pytester):
    project("--attn-threads=1", "--attn-update-baselines=first").assert_outcomes(passed=1)
    (key,) = json.loads(baseline_file(pytester).read_text())["cases"]
    assert key.endswith("| 1 thread")


@pytest.mark.slow
def test_a_backend_is_the_same_case_in_every_test(project, pytester):
    body = KERNEL[KERNEL.index("@pytest") :].replace("attn.measure(mine)", 'attn.measure("math")')
    pytester.makepyfile(test_mine=KERNEL[: KERNEL.index("@pytest")] + body + body.replace("test_mine", "test_again"))
    project("--attn-update-baselines=first", "-k", "not test_again").assert_outcomes(passed=1, deselected=1)
    project("-k", "test_again").stdout.fnmatch_lines(["latency: 1 as fast as recorded"])


def test_a_stale_result_fails_the_test(pytester):
    """With the real clock: a kernel that keeps what it computed first."""
    pytester.makepyfile(
        KERNEL.replace("    return sdpa(q, k, v)", "    return KEPT.setdefault(q.data_ptr(), sdpa(q, k, v))").replace(
            "def mine", "KEPT = {}\ndef mine"
        )
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    assert re.search(r"cannot be timed|mismatch", result.stdout.str())


def test_every_direction_returns_its_latency(pytester):
    """With the real clock."""
    pytester.makepyfile(
        KERNEL.replace('device="cpu")', 'device="cpu", backward=True)').replace(
            "    attn.measure(mine)",
            "    times = [attn.measure(mine, backward=b) for b in (False, True, 'both')]\n"
            "    assert [t.direction for t in times] == ['forward', 'backward', 'forward+backward']\n"
            "    assert all(t.p50 > 0 and t.verdict == 'no baseline' for t in times)\n"
            "    with pytest.raises(ValueError, match='backward must be'):\n"
            "        attn.measure(mine, backward='neither')",
        )
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


@pytest.mark.slow
def test_a_fresh_process_repeats_the_options_that_matter(recorded, pytester):
    """-k and -p stay, outputs and other processes go."""
    result = recorded("-k", "mine", "--junitxml=report.xml", "-x", "-v", "--attn-seed=0", "-p", "no:randomly", TIMES="150")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*decided on 0.15* ms, 0.15* ms"])


def test_a_fresh_process_that_cannot_run_hides_no_slowdown(recorded, pytester):
    path = pytester.path / "conftest.py"
    path.write_text(path.read_text() + "\nif is_fresh_process():\n    raise RuntimeError('no more')\n")
    result = recorded(TIMES="150")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E * looks slower: mine on tiny, forward: p50 *", "E *but * a fresh process could not run it: *"]
    )


@pytest.mark.slow
def test_the_folder_of_baselines_can_be_another(project, pytester):
    pytester.makeini("[pytest]\nattn_baselines = kept/here\n")
    project("--attn-update-baselines=first").assert_outcomes(passed=1)
    assert list((pytester.path / "kept" / "here").iterdir())


def test_ctrl_c_while_recording_writes_nothing(pytester, project):
    path = pytester.path / "conftest.py"
    interrupted = "def interrupted(*arguments):\n    raise KeyboardInterrupt\nrecording.fresh_runs = interrupted\n"
    path.write_text(f"{path.read_text()}\n{interrupted}")
    result = project("--attn-update-baselines=first")
    result.stdout.fnmatch_lines(["baselines: nothing recorded: interrupted"])
    assert not list((pytester.path / "baselines").iterdir())
    assert os.environ.get("PYTEST_ATTN_RUNS") is None


@pytest.mark.slow
def test_a_slow_cpu_is_no_regression_of_launching(recorded):
    """The host's clock times the kernel itself there: it is no launch."""
    result = recorded("-rs", TIMES="300", ANCHOR="3", HOST="1")
    result.assert_outcomes(skipped=1)


@pytest.mark.slow
def test_ids_with_an_at_sign_are_different_cases(project, pytester):
    body = KERNEL[KERNEL.index("@pytest.mark") :].replace("def test_mine(attn)", "def test_mine(attn, n)")
    mark = '@pytest.mark.parametrize("n", [1, 2], ids=["k@1", "k@2"])\n'
    pytester.makepyfile(test_mine=KERNEL[: KERNEL.index("@pytest.mark")] + mark + body)
    project("--attn-update-baselines=first").assert_outcomes(passed=2)
    assert len(json.loads(baseline_file(pytester).read_text())["cases"]) == 2


@pytest.mark.slow
def test_one_backend_in_two_tests_is_one_value_per_process(project, pytester):
    body = KERNEL[KERNEL.index("@pytest.mark") :].replace("attn.measure(mine)", 'attn.measure("math")')
    both = body + "\n" + body.replace("test_mine", "test_again").replace('device="cpu"', 'device="cpu", inputs="large"')
    pytester.makepyfile(test_mine=KERNEL[: KERNEL.index("@pytest.mark")] + both)
    project("--attn-update-baselines=first").assert_outcomes(passed=2)
    (case,) = json.loads(baseline_file(pytester).read_text())["cases"].values()
    assert len(case["p50_ns"]) == 3
    project().assert_outcomes(passed=2)


@pytest.mark.slow
def test_require_fails_where_workers_share_the_device(recorded):
    recorded("-n", "2", "--attn-latency=require").assert_outcomes(failed=1)


def test_what_cannot_be_written_is_said_before_anything_is_timed(project, pytester):
    (pytester.path / "baselines").write_text("")
    result = project("--attn-update-baselines=first")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["baselines: nothing recorded: *cannot be written*", "latency: 1 not recorded"])


def test_a_test_that_fails_after_its_time_is_not_recorded(project, pytester):
    path = pytester.path / "test_mine.py"
    path.write_text(path.read_text() + "\n    assert False\n")
    project("--attn-update-baselines=first").assert_outcomes(failed=1)
    assert not (pytester.path / "baselines").exists()


def test_a_kernel_that_raises_later_is_named_and_shows_no_frame_of_the_plugin(project, pytester):
    (pytester.path / "conftest.py").unlink()
    pytester.makepyfile(
        test_mine=KERNEL.replace(
            "    return sdpa(q, k, v)", "    CALLS.append(1)\n    assert len(CALLS) < 4\n    return sdpa(q, k, v)"
        ).replace("def mine", "CALLS = []\ndef mine")
    )
    result = project()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["latency: 1 cannot be timed"])
    assert "pytest_attn/" not in result.stdout.str()
