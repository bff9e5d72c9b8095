"""--attn-profile and `attn.assert_launched`: which kernels a case really launches."""

from __future__ import annotations

from pytest_attn.backends.subject import Subject
from pytest_attn.cases.judgment import Evaluator, Judgment
from pytest_attn.cases.run import CaseRun
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.latency.profiler import Profile, answers_to, may_answer, profile_subject
from pytest_attn.verdict import Verdict


class LaunchEvaluator(Evaluator[list[Profile]]):
    """Whether each direction of a subject launches a kernel that answers to all of some words."""

    def __init__(self, run: CaseRun, subject: Subject, spec: CheckSpec, words: tuple[str, ...]) -> None:
        self.subject: Subject = subject
        self._run, self._spec, self._words, self.workload = run, spec, words, run.workload
        self.doing, self.on = f"profiling {subject.name}", run.workload.id

    def judge(self) -> Judgment[list[Profile]]:
        """Profile it, and look through what was launched."""
        __tracebackhide__ = True
        profiles = profiles_of(self._run, self.subject, self._spec, with_ceilings=False)
        for profile in profiles:
            if not any(answers_to(self._words, symbol) for symbol in profile.symbols):
                wanted = ", ".join(map(repr, self._words))
                missed = f"no kernel that answers to {wanted} was launched in the {profile.direction} pass"
                ran = [f"  {x.words}: {x.symbol[:120]}" for x in profile.launches if may_answer(x.symbol)]
                text = "\n".join([f"{missed}; these were:", *ran] if ran else [f"{missed}, and none at all"])
                return Judgment(Verdict.MISMATCH, reason=missed, text=text)
        return Judgment(Verdict.PASSED, profiles, is_recorded=False)


def profiles_of(run: CaseRun, subject: Subject, spec: CheckSpec, with_ceilings: bool) -> list[Profile]:
    """Return the profiles of a subject, each direction of which must end in time."""
    __tracebackhide__ = True
    with run.deadline(subject)():
        return profile_subject(subject, spec, with_ceilings)
