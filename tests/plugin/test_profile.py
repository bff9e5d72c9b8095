"""--attn-profile, attn.assert_launched and a table of backends, as a user sees them."""

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


NO_WORDS = "ValueError: assert_launched needs words: *, got"
LAUNCHED = {
    "the kernel ran": (
        f'{FLASH}\nattn.assert_launched("cpu", "Flash")\nattn.assert_launched("matmul", fn=lambda q, k, v: q @ k.mT @ v)',
        "passed",
    ),
    "a dispatcher took another": (
        f'{FLASH}\nattn.assert_launched("cudnn", "sm90")',
        "failed",
        [
            "AssertionError: no kernel that answers to 'cudnn', 'sm90' was launched in the forward pass; these were:",
            "PyTorch attention cpu flash forward: aten::_scaled_dot_product_flash_attention_for_cpu",
            "mismatch * sdpa_flash on *: no kernel that answers to 'cudnn', 'sm90' was launched in the forward pass",
        ],
    ),
    "not in the backward pass": (
        f'{FLASH}\nattn.assert_launched("flash forward")',
        "failed",
        ["no kernel that answers to 'flash forward' was launched in the backward pass"],
        {"marker": 'Workload(32), device="cpu", backward=True'},
    ),
    "no callable": (
        'attn.assert_launched("flash")',
        "failed",
        ["ValueError: assert_launched needs a callable: call attn.check(fn) first, or say fn=..."],
    ),
    "no words": (f"{FLASH}\nattn.assert_launched()", "failed", [f"{NO_WORDS} ()"]),
    "an empty word": (f'{FLASH}\nattn.assert_launched("")', "failed", [f"{NO_WORDS} ('',)"]),
    "a list": (f'{FLASH}\nattn.assert_launched(["sm90"])', "failed", [f"{NO_WORDS} ([[]'sm90'[]],)"]),
    "a backend's name": (
        'attn.assert_launched("flash", fn="sdpa_flash")\nattn.assert_launched("sm90", fn="sdpa_cudnn")',
        *("skipped", ["SKIPPED * sdpa_cudnn: needs a CUDA device"]),
    ),
}


def test_assert_launched_says_what_was_launched_and_what_it_needs(tell):
    tell(LAUNCHED)


def test_support_is_written_as_a_table(run, kernel_test, pytester):
    kernel_test(**BACKENDS, marker='"smoke-full", "smoke-softcap", device="cpu"')
    result = run("--attn-output=a.support.md", "--attn-backends=sdpa,eager,sdpa_cudnn")
    result.assert_outcomes(passed=3, skipped=2)
    text = (pytester.path / "a.support.md").read_text()
    assert "| backend | smoke |\n| --- | --- |\n| `eager` | 2 right |\n| `sdpa` | 1 right, 1 refused |\n" in text
    assert "| `sdpa_cudnn` | not here |\n" in text
    assert (
        "## Refused because\n\n`sdpa`:\n\n- has no softcap (1 case)\n\n`sdpa_cudnn`:\n\n- needs a CUDA device (1 case)\n"
        in text
    )
    assert text.startswith("# Which backend runs what\n\nRun on 20")
    assert not list(pytester.path.glob("*.part"))


def test_a_profile_is_printed_under_quiet_too(pytester, kernel_test):
    kernel_test(FLASH)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-q", "--attn-profile")
    result.stdout.fnmatch_lines(["*attention kernels*", "sdpa_flash on *, forward"])


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
