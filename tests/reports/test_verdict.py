"""The verdicts: which is graver, how each reads, and what follows from it."""

import itertools
import json

import pytest

from pytest_attn.reports.records import fields
from pytest_attn.reports.verdict import Cause, Tone, Verdict

#: what a report tells apart where JSON has another name, and what no record holds
NOT_IN_JSON = {Verdict.UNEXPECTED, Verdict.HELD_IN_PART, Verdict.APPROXIMATE, Verdict.FAST, Verdict.MEASURED}
BY_SEVERITY = list(Verdict)
OF_RECORDS = {name: field.meaning for name, field in fields().items()}


def test_what_is_wrong_is_graver_than_what_is_doubtful_and_that_than_the_rest():
    assert [tone for tone, _ in itertools.groupby(verdict.tone for verdict in Verdict)] == list(Tone)


@pytest.mark.parametrize(
    ("graver", "than"),
    [
        (Verdict.MISMATCH, Verdict.RAISED),
        (Verdict.RAISED, Verdict.REGRESSED),
        (Verdict.REGRESSED, Verdict.UNCONFIRMED),
        (Verdict.UNRECORDED, Verdict.INCONCLUSIVE),
        (Verdict.INCONCLUSIVE, Verdict.KNOWN_DEFECT),
        (Verdict.UNEXPECTED, Verdict.PASSED),
        (Verdict.PASSED, Verdict.NO_BASELINE),
        (Verdict.UNTIMED, Verdict.SKIPPED),
    ],
)
def test_the_graver_of_two_comes_first(graver, than):
    assert BY_SEVERITY.index(graver) < BY_SEVERITY.index(than)


def test_what_is_wrong_is_shown_as_bad_and_everything_else_is_not():
    assert {verdict for verdict in Verdict if verdict.is_wrong} == {verdict for verdict in Verdict if verdict.tone is Tone.BAD}
    assert {verdict for verdict in Verdict if verdict.is_doubtful} == {Verdict.INCONCLUSIVE, Verdict.KNOWN_DEFECT}
    assert not [verdict for verdict in Verdict if verdict.is_wrong and verdict.is_doubtful]


@pytest.mark.parametrize("verdict", Verdict)
def test_a_verdict_is_its_name_wherever_it_is_written(verdict):
    assert f"{verdict}" == str(verdict) == "".join((verdict,)) == verdict.value
    assert f"{verdict:>20}" == verdict.value.rjust(20)
    assert json.loads(json.dumps({verdict: verdict})) == {verdict.value: verdict.value}
    assert Verdict.named(verdict.value) is verdict
    assert verdict.word
    assert verdict.glyph


def test_a_name_of_tomorrow_is_none():
    assert Verdict.named("of tomorrow") is None
    assert Verdict.named("") is None


def test_the_record_says_which_verdicts_and_causes_there_are():
    said = {word.strip() for part in OF_RECORDS["verdict"].split(";") for word in part.split(":")[1].split(",")}
    assert said == {verdict.value for verdict in Verdict} - {verdict.value for verdict in NOT_IN_JSON}
    named = {word.strip() for part in OF_RECORDS["cause"].split(";")[1:] for word in part.split(":")[1].split(",")}
    assert named == {cause.value for cause in Cause}
