"""What a real Chromium makes of the page of --attn-output: filters, tables, plots, and that it asks for nothing."""

import math
import random
import re

import pytest
from fakes.pages import CPU, FLUX, SDPA, set_filter, settled, texts
from fakes.records import BACKENDS, HOSTILE, check, record, run_of, timing, workloads

from pytest_attn.reports.latency_output import decided
from pytest_attn.reports.lines import duration


@pytest.mark.slow("is another way")
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


def test_speed_is_told_against_the_fastest_that_is_exact(page):
    row = page(
        "[...document.querySelectorAll('#speed tbody tr')].find((r) => r.textContent.startsWith('flux-L512forward')).innerText"
    )
    assert "1.00\u00d7\nfastest" in row
    assert re.search(r"≈ 0\.7\d\u00d7", row), "an approximate one is no measure"
    assert re.search(r"1\.99\u00d7\n1\.98 to 2\.0", row) or re.search(r"1\.9\d\u00d7\n1\.9\d to [12]\.\d", row)
    assert "tie" in row, "flash3 is 0.2 % slower, and its interval is as wide"


def call_of(module, z, tensor="out", passed=True):
    levels = dict.fromkeys(("z_element", "z_row", "z_head"), z)
    return {"module": module, "workload": "h2-s24-d16-causal", "tensor": tensor, "passed": passed, **levels}


@pytest.mark.slow("opens another page")
def test_a_models_layers_stand_in_a_table_with_a_column_per_backend(show):
    model = ("Gpt <b>", "", None)
    records = [
        check(
            "passed",
            model,
            SDPA,
            "backward",
            random.Random(0),
            calls=[call_of("0", 1.5), call_of("10", 0.9), call_of("2", 0.8)],
        ),
        check(
            "mismatch",
            model,
            BACKENDS[3],
            "backward",
            random.Random(0),
            calls=[call_of("0", 1.1), call_of("2", 41, "dk", False)],
        ),
        check("raised", model, BACKENDS[4], "backward", random.Random(0), calls=[{**call_of("0", None), "passed": False}]),
        check("passed", FLUX[0], SDPA, "forward", random.Random(0)),
    ]
    page = show(records)
    settled(page)

    assert texts(page, "#layers caption") == ["Layers of Gpt <b>"]
    assert texts(page, "#layers thead th") == ["layer", "workload", SDPA[0], "math", "flex"]
    cells = page(
        "[...document.querySelectorAll('#layers tbody tr')].map((row) => [...row.cells].map((one) => one.textContent))"
    )
    asks = "h2-s24-d16-causal"
    assert cells == [
        ["0", asks, "1.50 out", "1.10 out", "✗ not compared"],
        ["10", asks, "0.90 out", "-", "-"],
        ["2", asks, "0.80 out", "✗ 41.00 dk", "-"],
    ]
    assert "flex in Gpt <b>, 0: ✗ not compared" in texts(page, "#layers .lead")[0]
    page("document.querySelectorAll('#layers thead button')[3].click()")
    page("document.querySelectorAll('#layers thead button')[3].click()")
    assert texts(page, "#layers tbody th") == ["2", "0", "10"]
    set_filter(page, "filter-text", "flux", "input")
    page.wait_for("document.querySelector('#layers .nothing') !== null")
    assert page.said() == []
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


def test_a_time_is_that_which_was_compared_as_a_terminal_writes_it(page):
    """That of new processes, where these decided: in the tables of all judgments and of baselines."""
    slower = next(one for one in run_of(300) if one["verdict"] == "regressed")
    latency = slower["latency"]
    compared = duration(decided(latency))
    assert compared != duration(latency["p50"])
    set_filter(page, "filter-verdict", "regressed")
    assert compared in texts(page, "#cases tbody tr:first-child td")
    assert compared in texts(page, "#history tbody tr:first-child td")


@pytest.mark.slow("opens another page")
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


@pytest.mark.slow("is another way")
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


@pytest.mark.one_in(3)
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_card_says_what_the_terminal_says_and_the_page_opens_with_why(show, width, dark):
    lines = [
        ("", "mismatch: out of mine"),
        ("worst", "out[0, 3, 96, 63] = -0.38"),
        ("suggests", "it equals attention with scale 0.1"),
    ]
    said = [{"label": label, "text": text} for label, text in lines]
    reason, case = "out z 1,542 in one element, limit 8", next(workloads(1))
    wrong = check("mismatch", case, BACKENDS[0], "forward", random.Random(0), explanation=said, reason=reason)
    less = check("mismatch", case, BACKENDS[1], "forward", random.Random(0), reason=reason) | {"z_element": 9.0}
    less["tensors"][0]["z_element"] = 1.1
    wrong["z_element"] = 1541.7
    page = show([less, wrong], width=width, dark=dark)
    assert page("document.getElementById('why').textContent").endswith("limit 8; it equals attention with scale 0.1")
    assert page("document.getElementById('why').getBoundingClientRect().bottom < 500")
    assert "1, z 1,542" in texts(page, "#matrix td small")
    assert texts(page, "#cases td.number")[0] == "1,542", "worst first"
    assert page("document.querySelector('#cases tbody tr').clientHeight < 80"), "a reason is not one word a line"
    assert texts(page, "#wrong .explanation dt") == ["worst", "suggests"]
    assert texts(page, "#wrong .explanation dd") == [text for _, text in lines[1:]]
    axis = page("""[...document.querySelectorAll('#errors .chart:first-of-type .role-axis-label text')]
      .filter((one) => one.getAttribute('opacity') !== '0').map((one) => one.textContent)""")
    assert {"10", "100", "1000"} <= set(axis), "where labels would overlap, powers of ten stay"
    assert page("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), "nothing sticks out"
    page.close()


def test_a_plot_of_one_point_is_a_line_of_text_and_labels_of_axes_are_round(show):
    draw, case = random.Random(0), next(workloads(1))
    one = check("passed", case, BACKENDS[0], "forward", draw)
    one["tensors"] = one["tensors"][:1]
    time = timing("passed", case, BACKENDS[0], "forward", draw)
    page = show([one, time])
    assert page("document.querySelectorAll('#errors .chart, #roofline .chart').length") == 0
    assert re.fullmatch(r"sdpa_cudnn, out on flux-L128: z .+ in one element \(limit 8\), .+", texts(page, "#errors .lead")[0])
    assert re.match(
        r"sdpa_cudnn on flux-L128, forward: .+ at .+ FLOP per byte, the ceiling", texts(page, "#roofline .lead")[0]
    )
    page.close()
    wrong = [check("mismatch", workload, BACKENDS[0], "forward", draw) for workload in workloads(8)]
    wrong[0]["tensors"][0]["z_element"] = 3e6
    page = show(wrong + [timing("passed", workload, BACKENDS[1], "forward", draw) for workload in workloads(8)])
    labels = texts(page, ".chart .role-axis-label text")
    numbers = [label for label in labels if re.fullmatch(r"[\d.]+(e.\d+)?[kMG]?( ?[mu]?s)?", label)]
    assert numbers
    assert max(len(label.replace(" ", "")) for label in numbers) <= 7
    assert "1e+6" in numbers
    page.close()
