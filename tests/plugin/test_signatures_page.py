"""The kernels of docs/howto/signatures.md with one fault each: their tests, as the page has them, find it."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "signatures.md"
FAULTS = {
    "into_out": (".transpose(1, 2))", ".transpose(1, 2)[:, :-1])"),
    "one_sequence": ("exp2()", "exp()"),
    "interleaved": ("t.repeat(1, q.shape[1] // t.shape[1], 1, 1)", "t.repeat_interleave(q.shape[1] // t.shape[1], 1)"),
    "gated": ("torch.sigmoid(gate)", "torch.sigmoid(gate.roll(1, 1))"),
    "dropout": ("keep / (1 - p)", "keep"),
}


def test_each_planted_fault_is_found(pytester):
    files = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text(), re.S))
    for name, (right, wrong) in FAULTS.items():
        assert right in files[name]
        files[name] = files[name].replace(right, wrong)
    files["into_out"] = files["into_out"].replace("out.copy_(", "out[:, :-1].copy_(")
    pytester.makepyfile(**files)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-device=cpu")
    result.assert_outcomes(failed=7)
    said = (
        "*of the out= that it was given unwritten*",
        "*mismatch: out of attention: *",
        "*key head h // group (groups of neighbors)*",
        "*does not divide what is left by 1 - dropout*",
    )
    for line in said:
        result.stdout.fnmatch_lines([line])
