"""What users type and what they see when all is well, and when their kernel is wrong."""

import re

import pytest

from pytest_attn.reports.records import read_records


def test_a_right_kernel_passes_and_the_summary_says_so(run, kernel_test):
    kernel_test("attn.check(lambda q, k, v: sdpa(q, k, v))")
    result = run()
    result.assert_outcomes(passed=1)
    result.stdout.re_match_lines(
        [
            r"=+ attention =+",
            r"1 right; 1 kernel on 1 workload, largest passing z \d\.\d \(lambda\[sdpa\], out, h2-s32-d32\); 1 case judged",
        ]
    )


@pytest.mark.twice
def test_a_wrong_kernel_fails_with_a_diagnosis_and_a_command(run, kernel_test, pytester):
    kernel_test("attn.check(lambda q, k, v: sdpa(q, k, v, is_causal=True))")
    result = run("--attn-device=cpu")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            ">*attn.check(lambda q, k, v: sdpa(q, k, v, is_causal=True))",
            "E*AssertionError: mismatch: out of *lambda*: z * in one element, limit 8 (h2-s32-d32, inputs structured)",
            "E*  worst      out[[]0, *] = *, exact *, budget *",
            "E*  largest z  element * (limit 8), row * (4), head * (1.5); * of 2,048 elements above 8",
            "E*  where      rows *; all 2 heads",
            "E*  figures    absmax *, mean abs *, mse *, relative L2 *, cosine *, slope *",
            "E*  suggests   it equals attention with a causal mask that nobody asked for (z * there)",
            "E*  reproduce  pytest '*.py::test_kernel[[]h2-s32-d32[]]' --attn-device=cpu",
            "mismatch      *lambda* on h2-s32-d32: out z * in one element, limit 8 (inputs structured)",
            "1 wrong; 1 kernel on 1 workload; 1 case judged*",
        ]
    )
    assert "judge(" not in result.stdout.str(), "the plugin's own frames show"
    command = re.search(r"reproduce  pytest '([^']+)' (\S+)", result.stdout.str())
    again = pytester.runpytest_inprocess("-p", "no:cacheprovider", command[1], command[2])
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["E*  suggests   it equals attention with a causal mask that nobody asked for (z * there)"])


def test_one_item_per_backend_and_verbose_rows(run, kernel_test):
    kernel_test("attn.check(attn_backend)", fixtures="attn, attn_backend")
    result = run("--attn-backends=math,eager", "-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines_random(
        [
            "*test_kernel[[]h2-s32-d32-math[]]*",
            "*test_kernel[[]h2-s32-d32-eager[]]*",
            "verdict  backend  workload    direction  worst *",
            "passed   math     h2-s32-d32  forward *out/*",
            "2 right; 2 kernels on 1 workload, *",
        ]
    )


def test_all_backends_skip_the_missing_with_their_reason(run, kernel_test):
    kernel_test("attn.check(attn_backend)", fixtures="attn, attn_backend")
    result = run("--attn-backends=all,-flex,-sdpa", "-rs")
    result.assert_outcomes(passed=4, skipped=24)
    result.stdout.fnmatch_lines_random(
        [
            "SKIPPED * sdpa_cudnn: needs a CUDA device",
            "SKIPPED * kv_cache: decodes causally: *",
            "not run       sdpa_efficient, sdpa_cudnn, varlen: needs a CUDA device",
            "not run       flex_decode: is a Triton kernel: needs a GPU",
            "not run       natten: natten is not installed; pip install natten",
            "3 right, 1 right as approximate; 4 kernels on 1 workload, *; -rs lists the reasons of skips",
        ]
    )


def test_available_backends_are_the_default(run, kernel_test):
    kernel_test("assert attn_backend.name", fixtures="attn, attn_backend")
    result = run("--collect-only", "-q")
    names = re.findall(r"d32-(\w+)\]", result.stdout.str())
    if run.is_serial:
        assert names[:4] == ["math", "eager", "sdpa", "sdpa_flash"]
        assert "varlen" not in names


def test_every_fixture_and_attribute_of_the_contract(run, kernel_test):
    kernel_test(
        """
assert attn.workload is attn_workload
assert attn.workload.heads == 4
assert attn.device == attn_device == torch.device("cpu")
assert attn.backend is None
q, k, v = qkv
assert q.shape == (2, 24, 4, 32)
assert torch.equal(k, attn.k)
assert attn.mask.shape == (2, 1, 24, 24)
assert attn.kv_lens.tolist() == [24, 10]
assert attn.bias.shape == (1, 4, 24, 24)
assert attn.sinks.shape == (4,)
assert attn.alibi_slopes is None
assert attn.cu_seqlens is None
assert attn.page_table is None
assert attn_reference.out.shape == q.shape
assert attn_reference.out.dtype == torch.float64
assert attn_reference.lse.shape == (2, 4, 24)
assert attn_reference.dq.shape == q.shape
assert attn_reference.dk.shape == k.shape
assert attn.reference.dv is not None
assert_attention_close(attn_reference.out.to(q.dtype))
with pytest.raises(AssertionError, match="mismatch: out: z"):
    assert_attention_close(q)
with pytest.raises(AssertionError, match="out has dtype torch.float32; expected torch.bfloat16"):
    assert_attention_close(q.float())
""",
        marker="Workload(24, batch=2, heads=4, kv_heads=2, head_dim=32, kv_lens=(24, 10), bias='hqk', sinks=True),"
        " device='cpu', layout='bshd', backward=True, inputs=['randn']",
        fixtures="attn, attn_workload, attn_device, qkv, attn_reference, assert_attention_close",
    )
    run().assert_outcomes(passed=1)


def test_packed_and_paged_cases_have_their_tensors(run, kernel_test):
    kernel_test(
        """
if attn.workload.is_packed:
    assert attn.q.shape == (8, 2, 32)
    assert attn.cu_seqlens.tolist() == [0, 3, 8]
    assert attn.cu_seqlens_kv.tolist() == [0, 4, 9]
    assert attn.reference.out.shape == (8, 2, 32)
    assert attn.reference.lse.shape == (2, 8)
    attn.check(lambda q, k, v: attn.reference.out.bfloat16() if torch.equal(q, attn.q) else q)
else:
    assert attn.k.shape == (4, 8, 2, 32)
    assert attn.page_table.shape == (2, 2)
    assert attn.kv_lens.tolist() == [16, 9]
    attn.check("eager")
""",
        marker="Workload(q_lens=(3, 5), kv_lens=(4, 5), heads=2, head_dim=32),"
        "Workload(1, 16, batch=2, heads=2, head_dim=32, kv_pages=Pages(8), kv_lens=(16, 9)), device='cpu', inputs='flat'",
    )
    run().assert_outcomes(passed=2)


def test_backends_and_workloads_of_ones_own_from_a_conftest(run, pytester, kernel_test):
    pytester.makeconftest("""
        from torch.nn.functional import scaled_dot_product_attention as sdpa
        from pytest_attn import Workload

        def pytest_attn_backends(registry):
            registry.add_function("mine", lambda q, k, v, workload: sdpa(q, k, v, scale=workload.scale))
            registry.add_function("wrong", lambda q, k, v, workload: sdpa(q, k, v, is_causal=True))

        def pytest_attn_workloads(catalog):
            catalog.add(Workload(24, heads=2, name="ours-24"), group="ours", source="our model")
        """)
    kernel_test("attn.check(attn_backend)", marker='"ours", device="cpu"', fixtures="attn, attn_backend")
    result = run("--attn-backends=mine,wrong,math", "--attn-workloads=ours")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*test_kernel[[]ours-24-wrong[]]* --attn-backends=wrong*"])


def test_a_known_defect_is_an_expected_failure_and_its_absence_is_visible(run, pytester, kernel_test):
    pytester.makeconftest("""
        import torch
        from torch.nn.functional import scaled_dot_product_attention as sdpa
        from pytest_attn import Backend, KnownDefect

        class Broken(Backend):
            name = "broken"
            known_defects = (KnownDefect("lib#7", "NaN in out", lambda w, m: w.heads == 2, ("out",), only_nan=True),)

            def prepare(self, inputs, backward=False):
                spoil = {32: float("nan"), 33: 1.0, 34: 0.5}[inputs.workload.q_len]
                return lambda q, k, v: sdpa(q, k, v) * spoil

        def pytest_attn_backends(registry):
            registry.add(Broken())
        """)
    marker = ", ".join(f"Workload({n}, heads=2, head_dim=32)" for n in (32, 33, 34))
    kernel_test("attn.check(attn_backend)", marker=f'{marker}, device="cpu"', fixtures="attn, attn_backend")
    result = run("--attn-backends=broken", "-rx")
    result.assert_outcomes(xfailed=1, passed=1, failed=1)
    result.stdout.fnmatch_lines_random(
        [
            "XFAIL *h2-s32-d32-broken* - *known defect lib#7: NaN in out",
            "known defect  broken on h2-s32-d32: lib#7: NaN in out",
            "unexpected    broken on h2-s33-d32 passed: known defect lib#7 did not show: NaN in out",
            "mismatch      broken on h2-s34-d32: *",
        ]
    )


def test_quiet_runs_say_nothing_when_all_is_right(run, kernel_test):
    kernel_test('attn.check("math")')
    quiet = run("-q").stdout.str()
    assert "= attention =" not in quiet
    kernel_test("attn.check(lambda q, k, v: q)")
    assert "mismatch      test_kernel.lambda" in run("-q").stdout.str()
    assert "= attention =" not in run("--no-summary").stdout.str()


def test_a_suite_without_attention_tests_sees_nothing_of_it_and_the_plugin_can_be_switched_off(pytester):
    pytester.makepyfile("def test_nothing(): pass")
    for options, unseen in (((), "= attention ="), (("-p", "no:attn"), "attn:")):
        result = pytester.runpytest_inprocess(*options)
        result.assert_outcomes(passed=1)
        assert unseen not in result.stdout.str()


def test_life_without_benchmark_and_without_xdist(pytester, kernel_test):
    kernel_test('attn.check("math")')
    for options in (["-p", "no:benchmark"], ["-p", "no:xdist"], ["-p", "no:benchmark", "-p", "no:xdist", "--attn-list"]):
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)
        assert result.ret == 0
        result.stdout.fnmatch_lines(["*= attention =*"])


def test_strict_pytest_and_warnings_as_errors(run, kernel_test):
    kernel_test('attn.check("sdpa")')
    options = ["--strict-markers", "--strict-config", "-W", "error", "-W", "ignore:Benchmarks are automatically disabled"]
    run(*options).assert_outcomes(passed=1)


NAMES = {
    "two alike are numbered": (  # else the second would be the first to whoever reads records
        "with pytest.raises(AssertionError):\n    attn.check(lambda q, k, v: sdpa(q, k, v) * 2)\n"
        "right = lambda q, k, v: sdpa(q, k, v)\nattn.check(right)\nattn.check(right)",
        "passed",
    ),
    "one that is gone gives its number to no other": (
        *("for _ in range(12):\n    attn.check(lambda q, k, v: sdpa(q, k, v))", "passed"),
    ),
    "one with the name of a backend is none": ("attn.check(sdpa, name='math')", "passed"),
}


def test_callables_are_told_apart_by_their_names(tell, pytester):
    tell(NAMES, "--attn-output=run.jsonl")
    records = read_records(pytester.path / "run.jsonl")
    (first, second, again), gone, (named,) = (
        [one for one in records if one["test"].startswith(f"test_{number}.py")] for number in range(3)
    )
    assert second["subject"] == again["subject"] == f"{first['subject']} #2"
    assert len({record["subject"] for record in gone}) == len(gone) == 12
    assert (named["subject"], named["tags"]["family"], named["version"]) == ("math", "callable", "")


def test_a_compiled_callable_that_is_wrong_prints_no_trace_of_its_compiler(run, kernel_test):
    kernel_test("attn.check(lambda q, k, v: logging.getLogger('torch.__trace').debug('traced') or v)", before="import logging")
    result = run()
    result.assert_outcomes(failed=1)
    assert "mismatch: out of" in result.stdout.str()
    assert "traced" not in result.stdout.str().replace("debug('traced')", "")


def test_tests_that_parametrize_by_themselves_have_short_ids(pytester):
    pytester.makepyfile("""
        import pytest
        from pytest_attn import Backend, Workload

        class Mine(Backend):
            name = "my\\nown"

            def prepare(self, inputs, backward=False):
                raise NotImplementedError

        @pytest.mark.parametrize("given", [Workload(8), Workload(9, name="nine"), Mine(), Workload, Mine])
        def test_it(given):
            pass
        """)
    listed = pytester.runpytest_inprocess("--collect-only", "-q", "-p", "no:cacheprovider").outlines
    assert [line.partition("[")[2] for line in listed[:5]] == ["s8-d64]", "nine]", "my\\nown]", "Workload]", "Mine]"]


def test_what_a_callable_compiles_by_itself_is_recorded(run, kernel_test, pytester):
    kernel_test(
        "attn.check(torch.compile(lambda q, k, v: sdpa(q, k, v), backend='eager')); attn.check(lambda q, k, v: sdpa(q, k, v))"
    )
    run(f"--attn-output={pytester.path / 'run.jsonl'}").assert_outcomes(passed=1)
    compiled, plain = read_records(pytester.path / "run.jsonl")
    assert 0 < compiled["compile_seconds"] < 60
    assert plain["compile_seconds"] is None


@pytest.mark.parametrize(("option", "listed"), [("--durations=1", 1), ("--durations=0", 2), ("-v", 0)])
def test_durations_name_what_compilers_took_apart(run, kernel_test, pytester, option, listed):
    pytester.makeconftest("""
        from pytest_attn import Backend
        from pytest_attn.backends.subject import Compilation
        from torch.nn.functional import scaled_dot_product_attention

        class Compiling(Backend):
            name = "compiling"

            def prepare(self, inputs, backward=False):
                def call(q, k, v):
                    return scaled_dot_product_attention(q, k, v)

                call.compilation = Compilation(seconds=1.5 if inputs.workload.dtype == "float16" else 0.25)
                return call

        def pytest_attn_backends(registry):
            registry.add(Compiling())
        """)
    kernel_test("attn.check(attn_backend)", '"smoke-full", "smoke-half"', "attn, attn_backend")
    said = run("--attn-backends=compiling", option).stdout.str()
    lines = [line for line in said.splitlines() if "s compile  " in line]
    assert len(lines) == listed
    assert ("= slowest compilations =" in said) == bool(listed)
    assert [line.split("[")[1] for line in lines] == ["smoke-half-fp16-compiling]", "smoke-full-compiling]"][:listed]
    assert [line.partition("s ")[0] for line in lines] == ["1.50", "0.25"][:listed]
