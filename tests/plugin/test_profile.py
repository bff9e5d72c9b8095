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


def test_support_is_written_as_a_table(run, kernel_test, pytester):
    kernel_test(**BACKENDS, marker='"smoke-full", "smoke-softcap", device="cpu"')
    result = run("--attn-support=support.md", "--attn-backends=sdpa,eager,sdpa_cudnn")
    result.assert_outcomes(passed=3, skipped=2)
    text = (pytester.path / "support.md").read_text()
    assert "| backend | smoke |\n| --- | --- |\n| `eager` | 2 right |\n| `sdpa` | 1 right, 1 refused |\n" in text
    assert "| `sdpa_cudnn` | not here |\n" in text
    assert (
        "## Refused because\n\n`sdpa`:\n\n- has no softcap (1 case)\n\n`sdpa_cudnn`:\n\n- needs a CUDA device (1 case)\n"
        in text
    )
    assert text.startswith("# Which backend runs what\n\nRun on 20")
    assert not list(pytester.path.glob("*.part"))


@pytest.mark.parametrize("path", ["nowhere/support.md", "test_kernel.py", "."])
def test_support_elsewhere_than_in_a_markdown_file_is_refused_before_anything_runs(run, kernel_test, path):
    kernel_test(FLASH)
    result = run(f"--attn-support={path}")
    assert result.ret == 4
    result.stderr.fnmatch_lines([f"*--attn-support: must be a file NAME.md in a folder that exists, got '{path}'*"])


def test_support_is_written_through_a_link(pytester, kernel_test):
    kernel_test(FLASH)
    (pytester.path / "real.md").write_text("old")
    (pytester.path / "link.md").symlink_to("real.md")
    pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-support=link.md")
    assert (pytester.path / "link.md").is_symlink()
    assert "| backend |" in (pytester.path / "real.md").read_text()


def test_a_profile_is_printed_under_quiet_too(pytester, kernel_test):
    kernel_test(FLASH)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-q", "--attn-profile")
    result.stdout.fnmatch_lines(["*attention kernels*", "sdpa_flash on *, forward"])


def test_a_kernel_that_was_not_launched_is_wrong_in_the_summary(run, kernel_test):
    kernel_test(f'{FLASH}\nattn.assert_launched("cudnn")')
    result = run()
    result.stdout.fnmatch_lines(
        ["mismatch * sdpa_flash on *: no kernel that answers to 'cudnn' was launched in the forward pass", "* 1 wrong; *"]
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ('attn.assert_launched("flash")', "assert_launched needs a callable: call attn.check(fn) first, or say fn=..."),
        (f"{FLASH}\nattn.assert_launched()", 'assert_launched needs words: attn.assert_launched("sm90", "flash"), got ()'),
        (f'{FLASH}\nattn.assert_launched("")', "assert_launched needs words: *, got ('',)"),
        (f'{FLASH}\nattn.assert_launched(["sm90"])', "assert_launched needs words: *, got ([[]'sm90'[]],)"),
    ],
)
def test_assert_launched_says_what_it_needs(pytester, kernel_test, call, message):
    kernel_test(call)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").stdout.fnmatch_lines([f"*ValueError: {message}"])


def test_assert_launched_takes_a_backends_name(run, kernel_test):
    kernel_test('attn.assert_launched("flash", fn="sdpa_flash")\nattn.assert_launched("sm90", fn="flash2")')
    result = run("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * flash2: flash-attn is not installed; *"])


def test_what_raises_while_it_is_profiled_is_no_right_case(run, kernel_test):
    kernel_test("""
calls = []

def flaky(q, k, v):
    calls.append(q)
    if len(calls) > 3:
        raise RuntimeError("fourth call")
    return sdpa(q, k, v)

attn.check(flaky)
""")
    result = run("--attn-profile")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["raised * flaky on *: while it was profiled, RuntimeError: fourth call"])
