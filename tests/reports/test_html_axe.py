"""axe-core, an accessibility checker, on the page of --attn-output: light on a phone, dark on a desk."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from fakes.records import run_of

#: packages that bring axe.min.js; the second needs Playwright, and its axe is newer
PACKAGES = ("axe_playwright_python", "axe_core_python")
GRAVE = ("serious", "critical")
RUN = "axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations)"


@pytest.fixture(scope="session")
def axe():
    found = [Path(spec.origin).with_name("axe.min.js") for name in PACKAGES if (spec := find_spec(name))]
    if not found:
        pytest.skip("no axe-core: pip install axe-core-python")
    return found[0].read_text()


def grave(page, axe):
    """Return 'rule: element' for each serious or critical finding."""
    page(f"{axe}; undefined")
    violations = page(RUN)
    return [f"{one['id']}: {node['html'][:200]}" for one in violations if one["impact"] in GRAVE for node in one["nodes"]]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("dark", "width"), [(False, 390), (True, 1280)], ids=["phone", "dark"])
def test_axe_has_no_serious_finding(show, axe, dark, width):
    page = show(run_of(1), dark=dark, width=width, height=844)
    assert grave(page, axe) == []
    page.close()


def test_axe_sees_what_is_planted(show, axe):
    page = show([])
    page("document.documentElement.removeAttribute('lang')")
    page("document.getElementById('theme').textContent = ''")
    page("document.getElementById('sentence').style.color = '#eee'")
    assert {finding.partition(":")[0] for finding in grave(page, axe)} == {"html-has-lang", "button-name", "color-contrast"}
    page.close()
