"""The page of --attn-output: what is in it, and what may not be."""

import base64
import hashlib
import json
import math
import random
import re
from html.parser import HTMLParser

import pytest
from fakes.pages import CPU, FLUX, SDPA
from fakes.records import GPU, HOSTILE, check, record, run_of

from pytest_attn.reports.html.page import (
    by_machine,
    facts_in_words,
    report_page,
    sentence,
    short,
    shown_verdict,
    to_script,
    why,
    words_of,
)
from pytest_attn.workloads.functions import printable_lines


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


def test_what_comes_from_a_test_is_never_markup(small):
    page = Elements(small)
    assert HOSTILE[:20] not in small
    assert [tag for tag, _ in page.found].count("script") == 4
    assert not {"img", "iframe", "object", "embed"} & {tag for tag, _ in page.found}
    assert "<title>Attention &lt;of&gt; &amp; &#x27;ours&#x27;</title>" in small
    assert printable_lines(HOSTILE) in "\n".join(data_of(small)["texts"])
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
        ({"reason": "x#1 did not show", "cause": "defect not shown"}, "unexpected"),
        ({"reason": "shrunk", "source": "fuzz"}, "passed"),
        ({"question": "latency", "reason": "+4 % since the first recording"}, "fast"),
        ({"verdict": "of tomorrow"}, "of tomorrow"),
    ],
)
def test_a_verdict_has_its_words(changes, expected):
    one = {**check("passed", FLUX[0], SDPA, "forward", random.Random(0)), **changes}
    assert shown_verdict(one) == expected
    assert words_of(expected).word


def judged(*verdicts):
    questions = {"held": "invariants", "regressed": "latency", "no baseline": "latency"}
    return [record(questions.get(v, "check"), v, FLUX[0], SDPA, "forward") for v in verdicts]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ((), "No attention test ran."),
        (("passed", "passed", "held"), "No attention test went wrong. 2 right, 1 with all invariants."),
        (("passed", "mismatch"), "1 test failed. 1 of 2 judgments went wrong: 1 wrong. The rest: 1 right."),
        (("regressed",), "1 test failed. 1 of 1 judgment went wrong: 1 regressed."),
        (("passed", "inconclusive"), "No attention test went wrong. To look at: 1 inconclusive. 1 right."),
        (("skipped", "no baseline"), "Nothing was found right or wrong: 1 without a baseline, 1 skipped."),
        (("of tomorrow", "passed"), "No attention test went wrong. To look at: 1 of tomorrow. 1 right."),
    ],
)
def test_one_sentence_says_how_the_run_went(verdicts, expected):
    assert sentence(judged(*verdicts)) == expected


def test_the_page_opens_with_what_most_cases_have():
    hint = ({"label": "suggests", "text": "the mask is left out"},)
    raised, once, *twice = judged("raised", "mismatch", "mismatch", "mismatch")
    often = [one | {"subject": "often", "explanation": hint} for one in twice]
    assert why([raised, once | {"subject": "alone", "explanation": hint}, *often]).startswith("often on ")
    few, many = twice[0] | {"z_element": 9.0, "subject": "few"}, twice[1] | {"z_element": 900.0, "subject": "many"}
    assert why([few, many]).startswith("many on "), "of those as frequent, the largest z, as the cards"


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
