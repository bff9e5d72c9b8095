"""The README's options exist. test_docs.py runs its blocks and checks its links and its length."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def without_figures(text):
    return re.sub(r"-?\d[\d,.e+-]*", "N", text)


def test_every_option_of_the_readme_exists(pytester):
    declared = set(re.findall(r"--attn-[a-z0-9-]+", pytester.runpytest_inprocess("--help").stdout.str()))
    assert declared >= set(re.findall(r"--attn-[a-z0-9-]+", README))
