"""The page of --attn-report: what is in it, and what a real Chromium makes of it."""

import base64
import hashlib
import itertools
import json
import math
import random
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from fakes.browser import CHROMIUM, Browser
from fakes.records import BACKENDS, GPU, HOSTILE, check, record, run_of, timing, workloads

from pytest_attn.reports.html.machines import by_machine, facts_in_words, sentence
from pytest_attn.reports.html.page import report_page
from pytest_attn.reports.html.payload import short, to_script
from pytest_attn.reports.html.verdicts import verdict_of, words_of

CPU = {**GPU, "name": "AMD EPYC", "device": "cpu", "kind": "cpu", "architecture": "cpu", "torch": "2.13.0+cpu"}
FLUX = list(workloads(6))
SDPA, FLASH = BACKENDS[0], BACKENDS[1]


@pytest.fixture(scope="module")
def small():
    return report_page(run_of(300), "Attention <of> & 'ours'")


class Elements(HTMLParser):
    """The elements of a page, and the text of each script."""

    def __init__(self, text):
        super().__init__()
        self.found, self.scripts, self._is_script = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        self._is_script = tag == "script"
        if self._is_script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._is_script = False

    def handle_data(self, data):
        if self._is_script:
            self.scripts[-1] += data


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


# -- what is in it ---------------------------------------------------------------------------------------------------------


def test_the_page_is_written_without_torch_or_pytest():
    script = """
import sys
from pytest_attn.reports.html.page import missing_libraries, report_page
assert not missing_libraries()
print(sorted({"torch", "pytest", "altair", "vl_convert"} & set(sys.modules)))
report_page([])
print(sorted({"torch", "pytest"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]


def test_what_comes_from_a_test_is_never_markup(small):
    page = Elements(small)
    assert HOSTILE[:20] not in small
    assert [tag for tag, _ in page.found].count("script") == 4
    assert not {"img", "iframe", "object", "embed"} & {tag for tag, _ in page.found}
    assert "<title>Attention &lt;of&gt; &amp; &#x27;ours&#x27;</title>" in small
    assert HOSTILE in "\n".join(data_of(small)["texts"])
    machine = {**GPU, "name": HOSTILE}
    header = report_page([check("passed", FLUX[0], SDPA, "forward", random.Random(0), machine=machine)])
    assert [tag for tag, _ in Elements(header).found].count("script") == 4


def test_nothing_in_the_page_names_another_place(small):
    for tag, attributes in Elements(small).found:
        assert "src" not in attributes, tag
        assert attributes.get("href", "#").startswith(("#", "data:,")), attributes


def test_the_policy_lets_the_own_scripts_run_and_nothing_else(small):
    page = Elements(small)
    policy = next(a["content"] for _, a in page.found if a.get("http-equiv") == "Content-Security-Policy")
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")}
    assert rules["default-src"] == ["'none'"]
    assert "connect-src" not in rules
    hashed = [base64.b64encode(hashlib.sha256(page.scripts[i].encode()).digest()).decode() for i in (2, 3)]
    assert rules["script-src"] == [f"'sha256-{one}'" for one in hashed]


def test_numbers_keep_the_digits_that_are_shown_and_json_takes_them_all():
    assert short([1.23456789e-5, math.inf, -math.inf, math.nan, 7, True, "a", None]) == [
        *(1.2346e-05, "Infinity", "-Infinity", "NaN", 7, True, "a", None)
    ]
    assert to_script({"a": "</script><!--\u2028"}) == '{"a":"\\u003c/script>\\u003c!--\\u2028"}'


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "passed"),
        ({"is_approximate": True}, "approximate"),
        ({"reason": "known defect"}, "unexpected"),
        ({"reason": "shrunk", "name": "fuzz"}, "passed"),
        ({"question": "latency", "reason": "+4 % since the first recording"}, "fast"),
        ({"verdict": "of tomorrow"}, "of tomorrow"),
    ],
)
def test_a_verdict_has_its_words(changes, expected):
    one = {**check("passed", FLUX[0], SDPA, "forward", random.Random(0)), **changes}
    assert verdict_of(one) == expected
    assert words_of(expected).word


def judged(*verdicts):
    questions = {"held": "invariants", "regressed": "latency", "no baseline": "latency"}
    return [record(questions.get(v, "check"), v, FLUX[0], SDPA, "forward") for v in verdicts]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ((), "No attention test ran."),
        (("passed", "passed", "held"), "Nothing went wrong. 2 right, 1 with all invariants."),
        (("passed", "mismatch"), "1 of 2 judgements went wrong: 1 wrong. The rest: 1 right."),
        (("regressed",), "1 of 1 judgement went wrong: 1 regressed."),
        (("passed", "inconclusive"), "Nothing went wrong. To look at: 1 inconclusive. 1 right."),
        (("skipped", "no baseline"), "Nothing was found right or wrong: 1 without a baseline, 1 skipped."),
        (("of tomorrow", "passed"), "Nothing went wrong. To look at: 1 of tomorrow. 1 right."),
    ],
)
def test_one_sentence_says_how_the_run_went(verdicts, expected):
    assert sentence(judged(*verdicts)) == expected


def test_machines_are_told_apart_but_not_the_gpus_of_one():
    def on(machine, verdict="passed"):
        return record("check", verdict, FLUX[0], SDPA, "forward", machine=machine)

    records = [on(GPU), on({**GPU, "device": "cuda:1"}), on(CPU, "mismatch"), on({**GPU, "torch": "2.12.0"})]
    assert [(m.facts["name"], len(m.records)) for m in by_machine(records)] == [
        *(("AMD EPYC", 1), ("NVIDIA H200", 2), ("NVIDIA H200", 1))
    ]
    assert [len(m.records) for m in by_machine([on({}), on(CPU)])] == [2], "it belongs to the only machine there is"
    assert [len(m.records) for m in by_machine([on({}), on(CPU), on(GPU)])] == [1, 1, 1]


def test_the_machine_is_described_in_words():
    (machine,) = by_machine(run_of(30))
    facts = dict(facts_in_words(machine))
    assert facts["Machine"] == "NVIDIA H200"
    assert facts["Device"] == "cuda:0 · sm90"
    assert facts["Memory"] == "140 GiB"
    assert facts["Run"] == "2026-11-21 19:34 UTC"
    assert "flash-attn 2.8.3" in facts["Libraries"]


def test_five_thousand_cases_are_a_few_megabytes():
    records = run_of(5000)
    assert sum(r["question"] == "check" and r["verdict"] != "skipped" for r in records) > 4800
    assert len(to_script(records)) > 15e6
    assert len(report_page(records)) < 6e6


# -- what Chromium makes of it -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH: apt-get install chromium")
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def show(browser, tmp_path_factory):
    """Write records as a page, and open it."""

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


def settled(page):
    page.wait_for("document.documentElement.dataset.drawn === 'all'")


def texts(page, selector):
    return page(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)")


def set_filter(page, field, value, event="change"):
    page(f"(() => {{ const f = document.getElementById('{field}'); f.value = {json.dumps(value)}; delete document"
         f".documentElement.dataset.drawn; f.dispatchEvent(new Event('{event}', {{ bubbles: true }})); }})()")  # fmt: skip
    settled(page)


def test_five_thousand_cases_open_in_under_two_seconds_and_ask_for_nothing(show):
    page = show(run_of(5000))
    painted = page("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    read = page("performance.getEntriesByName('attn-read')[0].startTime")
    assert painted < 2000
    assert read < 2000
    assert page("document.querySelectorAll('*').length") < 15_000
    assert page.said() == []
    assert [address for address in page.requests() if not address.startswith("file:///")] == []
    assert len(page.requests()) == 1
    page.close()


def test_hostile_text_is_shown_and_does_nothing(page):
    assert page("window.hacked") is None
    assert any(HOSTILE in text for text in texts(page, "#wrong .reason"))
    assert page("document.images.length") == 0
    assert page.said() == []


def test_what_is_wrong_comes_first_with_the_command_that_repeats_it(page):
    first, *_ = texts(page, "main section h2")
    assert first == "What is wrong"
    findings = texts(page, "#wrong ol:first-of-type > li")
    assert "✗ wrong" in findings[0]
    assert "xformers" in findings[0]
    assert "▼ regressed" in findings[-1]
    assert "--attn-backends=sdpa_flash" in findings[-1]
    assert page("document.getElementById('sentence').textContent").startswith("2 of ")
    assert "inconclusive" in texts(page, "#wrong ol")[1], "what is undecided stands apart"


def test_the_filters_narrow_the_whole_page(page):
    everything = page("document.getElementById('showing').textContent")
    set_filter(page, "filter-text", "flux-L512 flash2", "input")
    page.wait_for("document.getElementById('showing').textContent.includes(' of ')")
    settled(page)
    assert set(texts(page, "#cases tbody th")) == {"flash2", "flash2+compile"}
    assert texts(page, "#matrix tbody th") == ["flux-L512"]
    assert texts(page, "#wrong .nothing") == ["Nothing that is shown is wrong."]
    page("document.getElementById('clear').click()")
    settled(page)
    assert page("document.getElementById('showing').textContent") == everything
    set_filter(page, "filter-verdict", "regressed")
    assert [text.strip() for text in texts(page, "#cases .badge")] == ["▼ regressed"]
    set_filter(page, "filter-direction", "backward")
    assert texts(page, "#cases .nothing") == ["Nothing passes the filters."]
    set_filter(page, "filter-verdict", "")
    assert set(texts(page, "#cases tbody td:nth-child(5)")) == {"backward"}


def test_backends_are_chosen_by_their_boxes(page):
    page("document.querySelector('#filter-backends input[value=math]').click()")
    settled(page)
    assert "math" not in texts(page, "#curve .legend li")
    assert "math" not in texts(page, "#matrix thead th")
    assert texts(page, "#filter-backends summary span") == ["15 of 16"]
    page("[...document.querySelectorAll('#filter-backends button')].find((b) => b.textContent === 'None').click()")
    settled(page)
    assert texts(page, "#matrix .nothing, #wrong .nothing")[0] == "Nothing passes the filters."


def test_headers_sort_and_say_how(page):
    z = "document.querySelector('#cases thead th:nth-child(6)')"
    page(f"{z}.querySelector('button').click()")
    assert page(f"{z}.getAttribute('aria-sort')") == "ascending"
    column = [float(text.replace(",", "")) for text in texts(page, "#cases tbody td:nth-child(6)")]
    assert column == sorted(column)
    page(f"{z}.querySelector('button').click()")
    assert page(f"{z}.getAttribute('aria-sort')") == "descending"
    column = [float(text.replace(",", "")) for text in texts(page, "#cases tbody td:nth-child(6)")]
    assert column == sorted(column, reverse=True)
    assert column[0] > 100
    assert page("[...document.querySelectorAll('#cases th[aria-sort]')].filter((t) => t.ariaSort !== 'none').length") == 1
    assert len(column) == 100, "the rest waits for a button"
    page("[...document.querySelectorAll('#cases .more button')].find((b) => b.textContent === 'Show all').click()")
    assert len(texts(page, "#cases tbody tr")) > 300
    p50 = [t for t in texts(page, "#cases tbody td:nth-child(6)") if t == "-"]
    assert texts(page, "#cases tbody td:nth-child(6)")[-len(p50) :] == p50, "what has no z stands last"


def test_the_matrix_is_walked_with_arrows_and_shows_what_is_behind_a_cell(page):
    page("document.querySelector('#matrix td[data-cell][tabindex=\"0\"]').focus()")
    first = page("document.activeElement.ariaLabel")
    assert first.startswith("xformers on gpt-oss-s64-float32: wrong, 1 of 2, z ")
    assert "21,825" in first
    panel = page("document.querySelector('.panel').textContent")
    assert HOSTILE in panel
    assert "--attn-backends=xformers" in panel
    assert "limits 8, 4, 1.5" in panel
    page.press("ArrowDown")
    assert page("document.activeElement.ariaLabel").startswith("xformers on flux-L512: right")
    page.press("ArrowRight")
    assert page("document.activeElement.ariaLabel").startswith("sdpa_flash on flux-L512: regressed, 1 of 4")
    assert "p50 807.9 us" in page("document.querySelector('.panel').textContent")
    assert page("document.querySelectorAll('#matrix td[tabindex=\"0\"]').length") == 1, "one stop for the Tab key"


def test_groups_open_to_their_workloads(page):
    page("document.querySelector('input[name=matrix-rows][value=groups]').click()")
    settled(page)
    assert page("document.activeElement.value") in ("groups", None)
    button = "document.querySelector('#matrix .expand')"
    assert page(f"{button}.textContent") == "flux 6"
    before = len(texts(page, "#matrix tbody tr"))
    page(f"{button}.click()")
    assert page(f"{button}.getAttribute('aria-expanded')") == "true"
    assert texts(page, "#matrix .child th")[:2] == ["flux-L512", "flux-L256"], "the gravest first"
    page(f"{button}.click()")
    assert len(texts(page, "#matrix tbody tr")) == before
    page("document.querySelector('input[name=matrix-rows][value=workloads]').click()")


def test_backends_that_ran_nowhere_are_shown_on_demand(page):
    assert "natten" not in texts(page, "#matrix thead th")
    page("document.querySelector('#matrix input[type=checkbox]').click()")
    assert "natten" in texts(page, "#matrix thead th")
    assert "natten is not installed" in texts(page, "#skipped tbody th")
    page("document.querySelector('#matrix input[type=checkbox]').click()")


def test_the_curve_has_a_line_per_backend_linear_and_log(page):
    for scale in ("linear", "log"):
        page(f"document.querySelector('#curve input[value={scale}]').click()")
        page.wait_for(f"document.querySelectorAll('#curve .mark-line path').length === {len(BACKENDS)}")
        assert page("document.querySelectorAll('#curve .mark-symbol path').length") == 6 * len(BACKENDS)
        assert page("document.querySelectorAll('#curve .mark-rule.role-mark line').length") == 6 * len(BACKENDS), "intervals"
        ticks = texts(page, "#curve .role-axis-label text")
        assert {"4224", "4352", "4416", "4480", "4544", "4608"} <= set(ticks)
        assert ("0 us" in ticks) == (scale == "linear")
    assert "flux" in page(
        "document.querySelector('#curve svg').ariaLabel ?? document.querySelector('#curve [aria-label*=flux]').ariaLabel"
    )
    page("document.querySelector('#curve details').open = true")
    assert "sdpa_cudnn" in texts(page, "#curve details tbody th")


def test_speed_is_told_against_the_fastest_that_is_exact(page):
    row = page(
        "[...document.querySelectorAll('#speed tbody tr')].find((r) => r.textContent.startsWith('flux-L512forward')).innerText"
    )
    assert "1.00\u00d7\nfastest" in row
    assert re.search(r"≈ 0\.7\d\u00d7", row), "an approximate one is no measure"
    assert re.search(r"1\.99\u00d7\n1\.98 to 2\.0", row) or re.search(r"1\.9\d\u00d7\n1\.9\d to [12]\.\d", row)
    assert "tie" in row, "flash3 is 0.2 % slower, and its interval is as wide"


def test_errors_are_held_against_three_limits(page):
    assert texts(page, "#errors figcaption") == ["over an element, limit 8", "over a row, limit 4", "over a head, limit 1.5"]
    assert page("document.querySelectorAll('#errors svg').length") == 3
    backends = texts(page, "#errors svg:first-of-type .role-axis-label text")
    assert "xformers" in backends
    page("document.querySelector('#errors details').open = true")
    row = page(
        "[...document.querySelectorAll('#errors tbody tr')].find((r) => r.textContent.startsWith('xformers')).innerText"
    )
    assert "✗ " in row
    assert "gpt-oss-s64-float32" in row


def test_the_roofline_is_drawn_where_it_is_known(page, show):
    assert "bfloat16 ceiling" in texts(page, "#roofline svg text")
    unprofiled = show([timing("passed", FLUX[0], SDPA, "forward", random.Random(0))])
    assert "not known: --attn-profile" in unprofiled("document.querySelector('#roofline .lead').textContent")
    assert unprofiled("document.querySelectorAll('#roofline .mark-line path').length") == 0
    assert unprofiled("document.querySelectorAll('#roofline .mark-symbol path').length") == 1
    unprofiled.close()


def test_work_of_both_passes_is_added_up(show):
    both = timing("passed", FLUX[0], SDPA, "forward", random.Random(0))
    both["direction"] = "forward+backward"
    page = show([both])
    page("document.querySelector('#roofline details').open = true")
    flops = FLUX[0][2]["flops"]
    expected = (flops["forward"] + flops["backward"]) / both["latency"]["p50"] * 1e-12
    assert f"{expected:,.0f} TFLOP/s" in page("document.querySelector('#roofline tbody').innerText")
    page.close()


def test_history_shows_recordings_band_and_now_of_the_case_that_is_chosen(page):
    assert "sdpa_flash on flux-L512, forward" in page("document.querySelector('#history h3').textContent")
    ticks = texts(page, "#history svg .role-axis-label text")
    assert {"2026-08-02", "2026-09-14", "2026-10-30", "this run"} <= set(ticks)
    assert page("document.querySelectorAll('#history .mark-rect.role-mark path').length") == 1 + 10 + 2, "band, processes"
    first, second = texts(page, "#history tbody tr")[:2]
    assert first.startswith("sdpa_flash on flux-L512")
    assert "+3." in first
    page("document.querySelectorAll('#history tbody .link')[1].click()")
    assert second[:10] in page("document.querySelector('#history h3').textContent")


def test_kernels_are_listed_when_a_case_is_opened(page):
    assert page("document.querySelectorAll('#kernels table table').length") == 0
    page("document.querySelector('#kernels tbody details').open = true")
    page.wait_for("document.querySelectorAll('#kernels table table').length === 1")
    assert "void sdpa_cudnn_kernel<bfloat16, 128>" in page("document.querySelector('#kernels table table').textContent")


def test_machines_never_share_a_plot(show):
    draw = random.Random(0)
    records = [timing("passed", w, SDPA, "forward", draw) for w in FLUX]
    records += [timing("passed", w, SDPA, "forward", draw, slower=400.0, machine=CPU) for w in FLUX[:3]]
    page = show(records)
    assert page("document.getElementById('machine-field').hidden") is False
    assert texts(page, "#machine option") == ["NVIDIA H200, torch 2.11.0+cu130", "AMD EPYC, torch 2.13.0+cpu"]
    assert page("document.querySelectorAll('#curve .mark-symbol path').length") == 6
    page("(() => { const m = document.getElementById('machine'); m.value = 1; m.dispatchEvent(new Event('change')); })()")
    settled(page)
    assert page("document.querySelectorAll('#curve .mark-symbol path').length") == 3
    assert "AMD EPYC" in page("document.getElementById('facts').textContent")
    page.close()


def test_what_there_is_no_data_for_is_named_with_how_to_get_it(show):
    page = show([check("passed", FLUX[0], SDPA, "forward", random.Random(0))])
    assert texts(page, "main section h2") == ["What is wrong", "Verdicts", "Error distributions", "All judgements"]
    missing = " ".join(texts(page, "#missing li"))
    for option in ("--attn-profile", "--attn-update-baselines", "attn.measure(fn)"):
        assert option in missing
    assert page("document.getElementById('sentence').className") == "sentence fine"
    page.close()


def test_a_run_without_attention_tests_and_odd_records_open_as_well(show):
    page = show([])
    assert page("document.getElementById('sentence').textContent") == "No attention test ran."
    assert page.said() == []
    page.close()
    infinite = check("mismatch", FLUX[0], SDPA, "forward", random.Random(0), reason="inf at 3 elements")
    infinite["tensors"][0] |= {"z_element": math.inf, "found": math.inf}
    infinite |= {"z_element": math.inf, "z_row": math.nan}
    odd = {**record("check", "raised", FLUX[0], ("-", 1, "callable", ""), "", machine={}), "shape": {}, "workload": "?"}
    page = show([infinite, odd, record("latency", "of tomorrow", FLUX[0], SDPA, "forward")])
    assert page.said() == []
    assert "z infinite element, NaN row" in page(
        "document.querySelector('#matrix td.bad').click() || document.body.textContent"
    )
    page.close()


def test_the_theme_follows_the_system_and_the_button(show, small):
    page = show(small, dark=True)
    back = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('.chart svg text')).fill"
    assert (page(back), page(ink)) == ("rgb(20, 23, 28)", "rgb(231, 234, 239)")
    page("document.getElementById('theme').click()")
    assert (page(back), page(ink)) == ("rgb(255, 255, 255)", "rgb(27, 31, 38)")
    assert page("document.getElementById('theme').textContent") == "Theme: light"
    page.close()


CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const back = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = rgb(getComputedStyle(one).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const ratio = (element) => {
    const [a, b] = [light(rgb(getComputedStyle(element).color)), light(back(element))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const tags = "p, td, th, dd, dt, a, button, small, b, span, summary, label, code, h1, h2, h3, li, legend, caption";
  return [...document.querySelectorAll(tags)].filter((one) => one.offsetParent)
    .map((one) => [one.className || one.tagName, ratio(one)]).filter(([, found]) => found < 4.5);
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_has_enough_contrast(show, small, dark):
    page = show(small, dark=dark)
    assert page(CONTRAST) == []
    page.close()


def test_a_screen_reader_finds_names_headers_and_landmarks(page):
    tree = page.send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "link", "checkbox", "radio", "combobox", "searchbox", "region", "grid", "table"}
    named = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if not n.get("ignored")]
    assert [(role, name) for role, name in named if role in roles and not name.strip()] == []
    assert {"main", "navigation", "search", "banner", "complementary", "contentinfo"} <= {role for role, _ in named}
    assert page("[...document.querySelectorAll('th')].filter((t) => !t.scope).length") == 0
    assert page("document.documentElement.lang") == "en"
    levels = page("[...document.querySelectorAll('h1, h2, h3')].map((h) => Number(h.tagName[1]))")
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels)), "no level is left out"


def test_everything_is_reached_by_keyboard_and_seen_there(show, small):
    page = show(small)
    page.press("Tab")
    assert page("document.activeElement.className") == "skip"
    outlines = []
    for _ in range(12):
        page.press("Tab")
        outlines.append(page("getComputedStyle(document.activeElement).outlineStyle"))
    assert set(outlines) == {"solid"}
    page.close()


def test_a_command_is_copied_or_at_least_selected(page):
    button = "document.querySelector('#wrong .command button')"
    wanted = texts(page, "#wrong .command code")[0]
    page("Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })")
    page(f"{button}.click()")
    page.wait_for(f"{button}.textContent !== 'Copy'")
    assert page("getSelection().toString()") == wanted
    assert page("document.getElementById('said').textContent").startswith("Command ")


def test_a_narrow_page_does_not_scroll_sideways(show, small):
    page = show(small, width=400, height=800)
    assert page("document.documentElement.scrollWidth") <= 400
    page.close()


def test_paper_gets_every_section_and_no_controls(page, tmp_path):
    page.send("Emulation.setEmulatedMedia", media="print")
    visible = "(s) => [...document.querySelectorAll(s)].filter((e) => e.offsetParent).length"
    assert page(f"({visible})('#filters, #theme, .command button, select')") == 0
    assert page(f"({visible})('main section')") == 10
    assert page("document.querySelectorAll('main svg.marks').length") == 6
    page.print(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    page.send("Emulation.setEmulatedMedia", media="")
