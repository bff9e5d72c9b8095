"""Kernels of two how-to pages with one fault each: their tests, as the pages have them, find it."""

import re
from pathlib import Path

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
FAULTS = {
    "into_out": (".transpose(1, 2))", ".transpose(1, 2)[:, :-1])"),
    "one_sequence": ("exp2()", "exp()"),
    "interleaved": ("t.repeat(1, q.shape[1] // t.shape[1], 1, 1)", "t.repeat_interleave(q.shape[1] // t.shape[1], 1)"),
    "dropout": ("keep / (1 - p)", "keep"),
    "cache": ("v_cache.float() * v_scales", "v_cache.float() * k_scales"),
    "inside": ("* q.shape", "* 1.01 * q.shape"),
}


def test_each_planted_fault_is_found(pytester):
    pages = "".join((HOWTO / f"{name}.md").read_text() for name in ("signatures", "quantized"))
    named = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", pages, re.S))
    files = {name: text for name, text in named.items() if name.removeprefix("test_") in FAULTS}
    for name, (right, wrong) in FAULTS.items():
        assert right in files[name]
        files[name] = files[name].replace(right, wrong)
    files["into_out"] = files["into_out"].replace("out.copy_(", "out[:, :-1].copy_(")
    pytester.makepyfile(**files)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-device=cpu")
    result.assert_outcomes(failed=6)
    said = (
        "*of the out= that it was given unwritten*",
        "*mismatch: out of attention: *",
        "*key head h // group (groups of neighbors)*",
        "*does not divide what is left by 1 - dropout*",
        "*with the descale of k for v*",
    )
    for line in said:
        result.stdout.fnmatch_lines([line])
