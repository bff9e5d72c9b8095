"""The README's options exist. test_docs.py runs its blocks and checks its links and its length."""

import re
from pathlib import Path

from pytest_attn.session.options import declared_options
from pytest_attn.session.settings import Settings

README = (Path(__file__).parent.parent / "README.md").read_text()


def without_figures(text):
    return re.sub(r"-?\d[\d,.e+-]*", "N", text)


def test_every_option_of_the_readme_exists():
    declared = {one.flag for one in declared_options(Settings)}  # those for experts are not in --help
    assert declared >= set(re.findall(r"--attn-[a-z0-9-]+", README))
