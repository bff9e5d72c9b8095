import os
import re
import shlex

import pytest
import torch

from pytest_attn.correctness import reference
from pytest_attn.session.option_types import GROUPS
from pytest_attn.session.options import all_groups, all_options

BACKENDS = {"fixtures": "attn, attn_backend", "body": "attn.check(attn_backend)"}


def test_list_shows_backends_workloads_and_what_would_run(run, kernel_test):
    kernel_test(**BACKENDS)
    result = run("--attn-list", "--attn-backends=math,sdpa_cudnn")
    assert result.ret == 0
    result.stdout.re_match_lines_random(
        [
            r"backend +version +variants +status",
            r"math +\d+\.\d+.* \+compile \+max_autotune \+graph +available",
            r"sdpa_cudnn +- +\+compile \+max_autotune \+graph +needs a CUDA device",
            r"flex_decode +- +- +is a Triton kernel: needs a GPU",
            r"flash2 +- +.* flash-attn is not installed; pip install flash-attn --no-build-isolation",
            r"backend +needs +precision +dtypes +head_dim +masks +takes",
            r"flash2 +CUDA, sm80 to sm121 +flash2 +bf16 fp16 +<=256 %8 +causal-bottom-right, window, documents +softcap, .*",
            r"workload +group +shape +source",
            r"flux-L512 +flux +h24-s4608-d128 +HF kernels-benchmarks.*",
            r"not run +1 case of sdpa_cudnn: needs a CUDA device",
            r"1 of 2 cases would run on .* \(cpu, torch \d.*\); leave out --attn-list to run them",
        ]
    )
    assert "passed" not in result.stdout.str()


def test_list_needs_no_tests(run):
    assert run("--attn-list").ret == 0


def test_workloads_narrow_what_a_marker_names(run, kernel_test):
    kernel_test('attn.check("math")', marker='"smoke-full", "smoke-softcap", "smoke-half", device="cpu"')
    result = run("--attn-workloads=smoke-full,smoke-half", "-v")
    result.assert_outcomes(passed=2)
    result = run("--attn-workloads=smoke,-smoke-softcap,-smoke-full")
    result.assert_outcomes(passed=1)


def test_a_test_of_which_nothing_is_selected_is_deselected(pytester, kernel_test):
    kernel_test('attn.check("math")', marker='"smoke-full", device="cpu"')
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-workloads=vit")
    result.assert_outcomes(deselected=1)


def test_workloads_choose_where_a_marker_names_none(run, kernel_test):
    kernel_test('attn.check("math")', marker='device="cpu"')
    run("--attn-workloads=smoke-f*,smoke-half").assert_outcomes(passed=2)


def test_dtypes_replace_a_workloads_own_and_narrow_a_markers(run, kernel_test):
    kernel_test("attn.check(sdpa); assert attn.workload.dtype in ('float16', 'float32')")
    run("--attn-dtypes=fp16,float32", "-v").assert_outcomes(passed=2)
    kernel_test(
        "attn.check(sdpa); assert attn.workload.dtype == 'float16'",
        marker='Workload(32), dtypes=["bf16", "fp16"], device="cpu"',
    )
    run("--attn-dtypes=fp16").assert_outcomes(passed=1)


def test_the_seed_draws_other_inputs(run, kernel_test):
    kernel_test("print('sum', float(attn.q.double().sum()))")
    sums = [re.search(r"sum (\S+)", run("-rA", f"--attn-seed={seed}").stdout.str())[1] for seed in (0, 0, 1)]
    assert sums[0] == sums[1] != sums[2]


def test_a_random_seed_is_said_in_the_header_and_repeats_what_it_drew(run, kernel_test):
    kernel_test("print('sum', float(attn.q.double().sum())); attn.check(lambda q, k, v: v * 0.5)")
    first, other = (run("--attn-seed=random").stdout.str() for _ in range(2))
    seed, number = (re.search(pattern, first)[1] for pattern in (r"attn: --attn-seed=(\d+)", r"sum (\S+)"))
    command = re.search(r"reproduce +pytest (.*)", first)[1]
    assert f"--attn-seed={seed} " in f"{command} "
    assert f"sum {number}" in run(*shlex.split(command)).stdout.str()
    assert f"sum {number}" not in other


def test_strict_limits_reach_the_judgment(run, kernel_test):
    kernel_test("attn.check(lambda q, k, v: q)")
    result = run("--attn-limits=strict")
    result.stdout.fnmatch_lines(["*in one element, limit 6*", "*reproduce*--attn-limits=strict*"])


def test_memory_bounds_the_shared_references(run, kernel_test):
    kernel_test("attn.check('math'); attn.check('sdpa_flash'); assert attn._session.references.limit == 1024")
    run("-oattn_memory=1KiB").assert_outcomes(passed=1)


def test_ini_values_hold_unless_the_command_line_says_otherwise(run, kernel_test, pytester):
    pytester.makeini("[pytest]\nattn_backends = math, eager\nattn_seed = 3\n")
    kernel_test(**BACKENDS)
    result = run()
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["attn: --attn-backends='math, eager' --attn-seed=3"])
    run("--attn-backends=math").assert_outcomes(passed=1)


def test_the_header_says_where_compiled_kernels_are_kept(run, kernel_test):
    kernel_test("pass", fixtures="attn_backend")
    for options, lines in {("--attn-backends=flex",): 1, ("--attn-backends=math",): 0, (): 0, ("--attn-seed=1",): 0}.items():
        said = run(*options, "--collect-only").outlines
        assert sum(line.startswith("attn: compiled kernels are kept in ") for line in said) == lines


def test_a_bad_option_is_a_usage_error_and_nothing_runs(run, kernel_test):
    kernel_test("raise SystemExit('ran')")
    for option, message in (
        ("--attn-backends=spda", "--attn-backends: unknown backend 'spda'; did you mean sdpa? known: math, eager, sdpa,"),
        ("--attn-backends=sdpa+fast", "--attn-backends: unknown variant 'fast' of backend 'sdpa'; known: compile, "),
        ("--attn-workloads=flix", "--attn-workloads: unknown workload 'flix'; did you mean flux? groups: smoke, edges, "),
    ):
        result = run(option)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert f"ERROR: {message}" in result.stderr.str()
        assert "INTERNALERROR" not in result.stdout.str()


def test_help_and_markers_and_fixtures_read_as_a_manual(pytester):
    text = pytester.runpytest_inprocess("--help").stdout.str()
    for option in ("backends", "workloads", "dtypes", "device", "seed", "timeout", "list", "output"):
        assert f"--attn-{option}" in text
    for group in re.findall(r"^attention kernels: .*:\n((?:  .*\n)+)", text, re.M):
        assert len(group.splitlines()) <= 10
    assert len(re.findall(r"^attention kernels: ", text, re.M)) == len(GROUPS)
    markers = pytester.runpytest_inprocess("--markers").stdout.str()
    assert "@pytest.mark.attention(*workloads, backends=None, dtypes=None, layout='bhsd'" in markers
    assert "@pytest.mark.attention_requires(backend=None, arch=None, memory=None, gpus=None, timed=False)" in markers
    fixtures = pytester.runpytest_inprocess("--fixtures").stdout.str()
    for name in ("attn", "attn_backend", "attn_workload", "attn_device", "qkv", "attn_reference", "assert_attention_close"):
        assert re.search(rf"^{name} -- ", fixtures, re.MULTILINE)


def test_every_option_is_in_one_group():
    assert sorted(name for group in all_groups() for name in group.names) == sorted(one.name for one in all_options())


@pytest.mark.slow("starts processes")
def test_a_case_in_a_group_can_be_reproduced(pytester, kernel_test):
    kernel_test("attn.check(lambda q, k, v: v)")
    result = pytester.runpytest_subprocess("-n", "1", "--dist", "loadgroup")
    result.stdout.fnmatch_lines(["*reproduce  pytest '*::test_kernel[[]h2-s32-d32]' --attn-device=cpu"])


@pytest.mark.parametrize(
    ("workers", "cores", "threads", "given"),
    [("2", 8, 8, [4]), ("3", 8, 8, [2]), ("16", 8, 8, [1]), ("2", 64, 8, [8]), ("1", 8, 8, []), (None, 8, 8, [])],
)
def test_xdist_workers_share_the_cores_of_a_cpu(pytester, kernel_test, monkeypatch, workers, cores, threads, given):
    set_to = []
    monkeypatch.setattr(reference, "_OF_ONE_THREAD", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if workers:
        monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", workers)
    kernel_test("attn.check(sdpa)")
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
    assert set_to == given


def test_workers_whose_threads_somebody_chose_keep_them(pytester, kernel_test, monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: pytest.fail("the threads were changed"))
    kernel_test("attn.check(sdpa)")
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_for_backends", [False, True])
def test_options_that_no_test_asks_for_are_said_to_have_no_effect(pytester, kernel_test, is_for_backends):
    if is_for_backends:
        kernel_test("attn.check(attn_backend)\nattn.measure(attn_backend)", fixtures="attn, attn_backend")
    else:
        kernel_test("attn.check(sdpa)")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-backends=math", "--attn-latency=require")
    said = [line for line in result.outlines if line.startswith("--attn-")]
    assert (
        said == []
        if is_for_backends
        else said
        == [
            "--attn-backends: no test here takes attn_backend, so none ran on these backends",
            "--attn-latency=require: nothing was timed; a test times a kernel with attn.measure(fn)",
        ]
    )


def test_an_option_that_a_conftest_declares_is_its_own(pytester):
    pytester.makeconftest("def pytest_addoption(parser):\n    parser.addoption('--attn-ours', action='store_true')\n")
    assert pytester.runpytest_inprocess("--attn-ours").ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(pytester, kernel_test, monkeypatch):
    kernel_test("raise SystemExit('ran')")
    monkeypatch.setattr(os, "access", lambda path, mode: not (mode & os.W_OK))
    result = pytester.runpytest_inprocess("--attn-output=run.md")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --attn-output: cannot write *run.md: permission denied"])
