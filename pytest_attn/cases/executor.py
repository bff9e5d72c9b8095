"""Where the callable of a test runs: in this process, in one of its own, or where a guest says. All look alike from here."""

from __future__ import annotations

from typing import Any

from pytest_attn.backends.subject import Subject
from pytest_attn.cases.measurement import Measurement
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.diagnosis.diagnose import Locate
from pytest_attn.latency.profiler import Profile, profile_subject
from pytest_attn.session.progress import Progress
from pytest_attn.workloads.workload import Workload


class Executor:
    """Runs a callable in this process."""

    #: what to type where other processes compute, so that an output of the test's own is not that of the whole workload
    elsewhere = ""
    #: whether what runs there may be lost without this process
    is_expendable = False
    #: whether calls there have a time limit of their own
    has_deadline = False
    #: why no other process can run the callable of a test as it ran; None where one can
    unnamed_because: str | None = None

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def of(self, subject: Subject) -> Executor:
        """Return what runs a subject: a function that is named may bring its own."""
        found: Executor = subject.named.executor(self) if subject.named else self
        return found

    def asked(self, subject: Subject | None) -> Subject | None:
        """Return what is asked whether it takes the case there."""
        return subject

    def contains(self, subject: Subject) -> bool:
        """Return whether none of a subject's code runs in this process, unless that is this package's, or a library's."""
        return subject.is_contained

    def place(self, subject: Subject, progress: Progress) -> Subject:
        """Return what computes there what a subject computes: the same, until `leave`, for each judgment of one subject."""
        return subject

    def leave(self, result: object) -> None:
        """Let the test go on there, after a judgment that passed with this result."""

    @property
    def locate(self) -> Locate | None:
        """A function that adds to a mismatch where it was computed; None where that says nothing."""
        return None

    def profiles(self, subject: Subject, spec: CheckSpec, with_ceilings: bool) -> list[Profile]:
        """Return the profile of each direction of a subject. Raises ValueError where its launches are not seen."""
        return profile_subject(subject, spec, with_ceilings)

    def measurement(self, **facts: Any) -> Measurement:
        """Return what times a subject there. facts: the fields of `Measurement`."""
        return Measurement(**facts)
