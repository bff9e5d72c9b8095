"""`attn.measure`: check a subject, time it, and let the outcome end the test where it became slower."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import pytest

from pytest_attn.cases.records import facts_of, leave_record
from pytest_attn.cases.run import CaseRun
from pytest_attn.latency.baseline import Baseline
from pytest_attn.latency.gate import Decision
from pytest_attn.latency.profiler import profile_subject
from pytest_attn.latency.result import Latency
from pytest_attn.latency.work import StaleError
from pytest_attn.messages import latency as messages
from pytest_attn.messages.lines import labeled
from pytest_attn.reports.records import new_record
from pytest_attn.session.deadline import DeadlineError
from pytest_attn.timing.measurement import Measurement
from pytest_attn.timing.pytest_benchmark import is_asked_for, record_samples
from pytest_attn.timing.timekeeper import Timekeeper, timekeeper_of
from pytest_attn.verdict import Verdict

if TYPE_CHECKING:
    import torch

#: what fails under --attn-latency=require, as nothing can be said
_UNDECIDED = (Verdict.NO_BASELINE, Verdict.INCONCLUSIVE)


class Measuring:
    """The measurements of one test."""

    def __init__(self, run: CaseRun) -> None:
        self._run = run
        self._taken: Counter[tuple[str, ...]] = Counter()

    @property
    def timekeeper(self) -> Timekeeper:
        """The run's."""
        return timekeeper_of(self._run.item.config)

    def expect(self, device: torch.device) -> None:
        """Get ready for a time that is taken on a device, after a check."""
        if not self.timekeeper.untimed_because(device):
            self.timekeeper.expect(device)

    def number(self, measurement: Measurement) -> Measurement:
        """Return a measurement that knows its index among those of its test."""
        kind = measurement.kind
        self._taken[kind] += 1
        return replace(measurement, number=self._taken[kind], nth=sum(self._taken.values()))

    def measure(self, measurement: Measurement) -> Latency:
        """Time what was checked; return the latency of what may pass, and end the test of anything else."""
        __tracebackhide__ = True
        run, keeper = self._run, self.timekeeper
        require = run.session.settings.latency == "require"
        if reason := keeper.untimed_because(measurement.spec.device) or measurement.untimed_because:
            self._leave_record(measurement, Verdict.UNTIMED, reason)
            if require:
                raise AssertionError(f"not timed, which --attn-latency=require asks for: {measurement.name}: {reason}")
            pytest.skip(f"{measurement.subject.name} passed the check, but was not timed: {reason}")
        latency = self._timed(measurement, keeper)
        decision = latency.decision
        if not keeper.reports or decision is None:
            return latency
        if run.session.settings.cupti:
            latency = replace(latency, cupti=self._cupti(measurement))
        self._leave_record(measurement, decision.verdict, decision.reason, latency, decision)
        self._show_to_benchmark(latency)
        self._fail_if_regressed(measurement, latency, decision)
        if require and decision.verdict in _UNDECIDED:
            self._fail_as_undecided(measurement, decision)
        return latency

    def _timed(self, measurement: Measurement, keeper: Timekeeper) -> Latency:
        __tracebackhide__ = True
        run = self._run
        try:
            with run.session.progress.during(f"timing {measurement.subject.name}", measurement.spec.workload.id):
                return keeper.take(measurement)
        except (StaleError, DeadlineError) as error:
            reason = str(error)
            verdict = Verdict.NO_RESULT if isinstance(error, DeadlineError) else Verdict.RAISED
        except Exception as error:
            if refusal := measurement.subject.refusal_in(error):
                run.outcome.skip(measurement.subject, f"right, but not timed: {refusal}")
            self._leave_record(measurement, Verdict.RAISED, f"{type(error).__name__}: {error}".splitlines()[0])
            raise
        self._leave_record(measurement, verdict, reason.splitlines()[0].rstrip(":"))
        run.outcome.fail(f"cannot be timed: {measurement.name}: {reason}")

    def _fail_if_regressed(self, measurement: Measurement, latency: Latency, decision: Decision) -> None:
        """Fail the test of a regression, or of one that nobody could confirm, with what repeats and what accepts it."""
        __tracebackhide__ = True
        run = self._run
        if decision.verdict == Verdict.REGRESSED:
            baseline = self._baseline(measurement)
            assert baseline is not None
            text = messages.describe_regression(decision, baseline, latency, run.session.collected.selected)
            run.outcome.fail(text, also=labeled("accept", f"{run.command} {messages.ACCEPT}"))
        if decision.verdict == Verdict.UNCONFIRMED:
            raise AssertionError(messages.describe_unconfirmed(measurement.name, decision))

    def _fail_as_undecided(self, measurement: Measurement, decision: Decision) -> NoReturn:
        __tracebackhide__ = True
        is_inconclusive, command = decision.verdict == Verdict.INCONCLUSIVE, self._run.command
        is_disturbed = is_inconclusive and decision.change is None  # what was recorded is good, and not to be replaced
        remedy = "" if is_disturbed else messages.RECORD if is_inconclusive else decision.remedy
        lines = [
            messages.describe_undecided(measurement.name, decision),
            *([labeled("repeat", f"{command}, when nothing else computes on this machine")] if is_inconclusive else []),
            *([labeled("record", f"{command} {remedy}")] if remedy else []),
            labeled("or", "--attn-latency=auto, which only says so"),
        ]
        raise AssertionError("\n".join(lines))

    def _baseline(self, measurement: Measurement) -> Baseline | None:
        return self.timekeeper.baselines.of(measurement)

    def _leave_record(
        self,
        measurement: Measurement,
        verdict: Verdict,
        reason: str,
        latency: Latency | None = None,
        decision: Decision | None = None,
    ) -> None:
        run, subject, direction = self._run, measurement.subject, measurement.direction
        taken = latency.to_dict() if latency else {}
        recorded = self._baseline(measurement)
        baseline = {"baseline": recorded.to_report()} if recorded else {}
        record = new_record(
            **facts_of(run.session, measurement.spec.workload, subject, run.mark.device),
            test=run.item.nodeid,
            command=run.command,
            question="latency",
            verdict=verdict.value,
            reason=reason,
            cause=decision.cause if decision else "",
            remedy=decision.remedy if decision else "",
            direction=direction,
            backward=direction != "forward",
            latency={**taken, **baseline, "direction": direction, "key": measurement.key},
            **measurement.record_fields(),
        )
        leave_record(run.item, record)
        if latency is not None:
            run.item.user_properties.append((f"attn_p50_{subject.name}_{direction}", f"{latency.p50:.6g}"))

    def _cupti(self, measurement: Measurement) -> float | None:
        """Return the device seconds of one call by torch's profiler, None where it has no such direction or device."""
        is_one_kernel = type(measurement) is Measurement and measurement.direction != "forward+backward"
        if not is_one_kernel or measurement.spec.device.type != "cuda":
            return None
        spec = replace(measurement.spec, backward=measurement.direction == "backward", inputs=("randn",))
        return profile_subject(measurement.subject, spec, with_ceilings=False)[-1].seconds

    def _show_to_benchmark(self, latency: Latency) -> None:
        """Hand the samples to pytest-benchmark, where it is there, enabled, and asked for."""
        if is_asked_for(self._run.item.config):
            facts = {key: value for key, value in latency.to_dict().items() if key != "samples"}
            record_samples(self._run.request, latency.samples, facts)
