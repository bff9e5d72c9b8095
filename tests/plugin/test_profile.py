"""--attn-profile, attn.assert_launched and --attn-support, as a user sees them."""

import pytest

FLASH = 'attn.check("sdpa_flash")'
BACKENDS = {"body": "attn.check(attn_backend)", "fixtures": "attn, attn_backend"}


def test_profile_shows_what_each_backend_launched(run, kernel_test):
    kernel_test(**BACKENDS, marker='Workload(32, heads=2, head_dim=32, name="mine"), device="cpu", backward=True')
    result = run("--attn-profile", "--attn-backends=eager,sdpa_flash")
    result.assert_outcomes(passed=2)
    result.stdout.re_match_lines(
        [
            r".* attention kernels .*",
            r"eager on mine, forward",
            r"  framework +category +arch +operation +calls +time +share",
            r"  PyTorch +matmul +cpu +matmul +2 +\d.* [mu]?s +\d+\.\d%",
            r"  total \d.*s, .* TFLOP/s, \d+% of the roofline",
            r"sdpa_flash on mine, forward",
            r"  PyTorch +attention +cpu +flash forward +\d +\d.*",
            r"  total .*, \d+\.\d\dx as fast as eager, .*",
            r"sdpa_flash on mine, backward",
            r"  PyTorch +attention +cpu +flash backward +\d +\d.*",
        ],
        consecutive=False,
    )


def test_without_the_option_nothing_is_profiled(run, kernel_test):
    kernel_test(FLASH)
    assert "attention kernels" not in run().stdout.str()


def test_assert_launched_passes_where_the_kernel_ran(run, kernel_test):
    kernel_test(
        f'{FLASH}\nattn.assert_launched("cpu", "Flash")\nattn.assert_launched("matmul", fn=lambda q, k, v: q @ k.mT @ v)'
    )
    run().assert_outcomes(passed=1)


def test_assert_launched_fails_where_a_dispatcher_took_another_kernel(run, kernel_test):
    kernel_test(f'{FLASH}\nattn.assert_launched("cudnn", "sm90")')
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*AssertionError: no kernel that answers to 'cudnn', 'sm90' was launched in the forward pass; these were:",
            "*PyTorch attention cpu flash forward: aten::_scaled_dot_product_flash_attention_for_cpu*",
        ]
    )


def test_assert_launched_looks_at_the_backward_pass_too(run, kernel_test):
    kernel_test(f'{FLASH}\nattn.assert_launched("flash forward")', marker='Workload(32), device="cpu", backward=True')
    run().stdout.fnmatch_lines(["*no kernel that answers to 'flash forward' was launched in the backward pass*"])


@pytest.mark.parametrize("call", ['attn.assert_launched("flash")', f"{FLASH}\nattn.assert_launched()"])
def test_assert_launched_needs_words_and_a_callable(run, kernel_test, call):
    kernel_test(call)
    run().stdout.fnmatch_lines(["*assert_launched needs words, and a callable: call attn.check(fn) first or say fn=...*"])


def test_support_is_written_as_a_table(run, kernel_test, pytester):
    kernel_test(**BACKENDS, marker='"smoke-full", "smoke-softcap", device="cpu"')
    result = run("--attn-support=support.md", "--attn-backends=sdpa,eager,sdpa_cudnn")
    result.assert_outcomes(passed=3, skipped=3)
    text = (pytester.path / "support.md").read_text()
    assert "| backend | smoke |\n| --- | --- |\n| `eager` | 2 right |\n| `sdpa` | 1 right, 1 refused |\n" in text
    assert (
        "## Refused because\n\n`sdpa`:\n\n- has no softcap (1 case)\n\n`sdpa_cudnn`:\n\n- needs a CUDA device (2 cases)\n"
        in text
    )
    assert text.startswith("Run on 20")
    assert not list(pytester.path.glob("*.part"))


def test_support_in_a_folder_that_is_not_there_is_refused_before_anything_runs(run, kernel_test):
    kernel_test(FLASH)
    result = run("--attn-support=nowhere/support.md")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*--attn-support: must be a file in a folder that exists, got 'nowhere/support.md'*"])
