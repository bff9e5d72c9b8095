"""--attn-profile and `attn.assert_launched`: which kernels a case really launches."""

from __future__ import annotations

from pytest_attn.backends.subject import Subject
from pytest_attn.cases.records import change_last_record
from pytest_attn.cases.run import CaseRun
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.latency.profiler import Profile, answers_to, may_answer, profile_subject
from pytest_attn.verdict import Verdict


def assert_launched(run: CaseRun, subject: Subject, spec: CheckSpec, words: tuple[str, ...]) -> list[Profile]:
    """Return the profiles of a subject, each of which has a kernel that answers to all words; end the test of another."""
    __tracebackhide__ = True
    profiles = _profiles(run, subject, spec, with_ceilings=False)
    for profile in profiles:
        if not any(answers_to(words, symbol) for symbol in profile.symbols):
            wanted = ", ".join(map(repr, words))
            missed = f"no kernel that answers to {wanted} was launched in the {profile.direction} pass"
            run.outcome.record(subject, Verdict.MISMATCH, reason=missed)
            ran = [f"  {x.words}: {x.symbol[:120]}" for x in profile.launches if may_answer(x.symbol)]
            raise AssertionError("\n".join([f"{missed}; these were:", *ran] if ran else [f"{missed}, and none at all"]))
    return profiles


def add_profiles(run: CaseRun, subject: Subject, spec: CheckSpec) -> None:
    """Put the profiles of a subject on the record that its check has just left."""
    try:
        profiles = _profiles(run, subject, spec, with_ceilings=True)
    except Exception as error:
        reason = f"while it was profiled, {type(error).__name__}: {error}".splitlines()[0]
        change_last_record(run.item, verdict=Verdict.RAISED.value, reason=reason)
        raise
    change_last_record(run.item, profiles=tuple(profile.to_dict() for profile in profiles))


def _profiles(run: CaseRun, subject: Subject, spec: CheckSpec, with_ceilings: bool) -> list[Profile]:
    __tracebackhide__ = True
    with run.deadline(subject)():
        return profile_subject(subject, spec, with_ceilings)
