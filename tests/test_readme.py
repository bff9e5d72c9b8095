"""The README's first test is run, and prints what the README shows."""

import re
from pathlib import Path

from pytest_attn.session.options import declared_options
from pytest_attn.session.settings import Settings

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def without_figures(text):
    return re.sub(r"-?\d[\d,.e+-]*", "N", text)


def test_the_first_test_prints_what_the_readme_shows(pytester):
    pytester.makepyfile(test_first=blocks("python")[0])
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-device=cpu")
    result.assert_outcomes(failed=1)
    printed = {without_figures(line) for line in result.outlines}
    for line in blocks("console")[0].splitlines()[2:]:
        if line.strip() and not line.startswith("___"):
            assert without_figures(line) in printed


def test_every_option_of_the_readme_exists():
    declared = {one.flag for one in declared_options(Settings)}  # those for experts are not in --help
    assert declared >= set(re.findall(r"--attn-[a-z0-9-]+", README))


def test_the_readme_is_short():
    assert len(README.splitlines()) < 200
