"""Pages of --attn-output in a Chromium that is started once."""

import pytest
from fakes.browser import CHROMIUM, Browser
from fakes.records import run_of

from pytest_attn.reports.html.page import report_page


@pytest.fixture(scope="session")
def small():
    return report_page(run_of(300), "Attention <of> & 'ours'")


@pytest.fixture(scope="session")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH: apt-get install chromium")
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def show(browser, tmp_path_factory):
    def show_it(records, **how):
        path = tmp_path_factory.mktemp("page") / "report.html"
        path.write_text(records if isinstance(records, str) else report_page(records), encoding="utf-8")
        return browser.open(path, **how)

    return show_it


@pytest.fixture(scope="module")
def opened(show, small):
    page = show(small)
    yield page
    page.close()


@pytest.fixture
def page(opened):
    opened.send("Page.bringToFront")
    opened("document.getElementById('clear').click()")
    opened.wait_for("document.documentElement.dataset.drawn === 'all'")
    return opened
