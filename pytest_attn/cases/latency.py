"""`attn.measure`: time what was checked, and conclude what the time means."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from pytest_attn.backends.subject import Subject
from pytest_attn.cases.judgment import Evaluator, Judgment
from pytest_attn.cases.latency_modes import LatencyMode, latency_mode_of
from pytest_attn.cases.measurement import Measurement
from pytest_attn.cases.pytest_benchmark import is_asked_for, record_samples
from pytest_attn.cases.run import CaseRun
from pytest_attn.latency import description as messages
from pytest_attn.latency.gate import Decision
from pytest_attn.latency.profiler import profile_subject
from pytest_attn.latency.result import Latency
from pytest_attn.latency.work import StaleError
from pytest_attn.ranks.rank_group import RankRaisedError
from pytest_attn.reports.lines import labeled
from pytest_attn.reports.verdict import Verdict
from pytest_attn.session.deadline import DeadlineError

#: what fails under --attn-latency=require, as nothing can be said
_UNDECIDED = (Verdict.NO_BASELINE, Verdict.INCONCLUSIVE)


class Measuring:
    """The measurements of one test."""

    def __init__(self, run: CaseRun) -> None:
        self._run = run
        self._taken: Counter[tuple[str, ...]] = Counter()

    @property
    def mode(self) -> LatencyMode:
        """The run's."""
        return latency_mode_of(self._run.item.config)

    def prepare(self, device: torch.device) -> None:
        """Get ready for a time that is taken on a device, after a check."""
        if not self.mode.untimed_because(device):
            self.mode.prepare(device)

    def measure(self, measurement: Measurement) -> Latency:
        """Time what was checked; return the latency of what may pass, and end the test of anything else."""
        __tracebackhide__ = True
        kind = measurement.kind
        self._taken[kind] += 1
        numbered = replace(measurement, number=self._taken[kind], nth=sum(self._taken.values()))
        return self._run.conclude(LatencyEvaluator(self._run, numbered, self.mode))


class LatencyEvaluator(Evaluator[Latency]):
    """Times a subject, and holds the time against its baseline, or does with it what the mode of the run is."""

    question = "latency"

    def __init__(self, run: CaseRun, measurement: Measurement, mode: LatencyMode) -> None:
        self.subject: Subject = measurement.subject
        self.workload = measurement.spec.workload
        self._run, self._measurement, self._mode = run, measurement, mode
        self.doing, self.on = f"timing {measurement.subject.name}", self.workload.id

    def judge(self) -> Judgment[Latency]:
        """Time it, unless there is a reason not to."""
        __tracebackhide__ = True
        measurement, mode = self._measurement, self._mode
        if reason := mode.untimed_because(measurement.spec.device) or measurement.untimed_because:
            return self._untimed(reason)
        try:
            latency = mode.measure(measurement)
        except (StaleError, DeadlineError) as error:
            verdict = Verdict.NO_RESULT if isinstance(error, DeadlineError) else Verdict.RAISED
            text = f"cannot be timed: {measurement.name}: {error}"
            return self._found(verdict, str(error).splitlines()[0].rstrip(":"), text=text)
        except Exception as error:
            if refusal := measurement.subject.refusal_in(error):
                return Judgment.refused(self.subject, f"right, but not timed: {refusal}", fields={"question": "check"})
            raised: Any = {"text": str(error)} if isinstance(error, RankRaisedError) else {"error": error}
            return self._found(Verdict.RAISED, f"{type(error).__name__}: {error}".splitlines()[0], **raised)
        decision = latency.decision
        if not mode.reports or decision is None:
            return Judgment(Verdict.MEASURED, latency, is_recorded=False)
        if self._run.session.settings.cupti:
            latency = replace(latency, cupti=self._cupti())
        self._show_to_benchmark(latency)
        return self._decided(latency, decision)

    def _untimed(self, reason: str) -> Judgment[Latency]:
        if self._requires_decision:
            text = f"not timed, which --attn-latency=require asks for: {self._measurement.name}: {reason}"
            return self._found(Verdict.UNTIMED, reason, text=text)
        return self._found(Verdict.UNTIMED, reason, skip=f"{self.subject.name} passed the check, but was not timed: {reason}")

    def _decided(self, latency: Latency, decision: Decision) -> Judgment[Latency]:
        """Return what a decision means for the test: what accepts a regression, and what helps where nothing can be said."""
        facts: Any = {"result": latency, "latency": latency}
        name, command = self._measurement.name, self._run.command
        if decision.verdict == Verdict.REGRESSED:
            baseline = self._mode.baselines.of(self._measurement)
            assert baseline is not None
            facts["text"] = messages.describe_regression(decision, baseline, latency, self._run.session.collected.selected)
            facts["remedies"] = [labeled("accept", f"{command} {messages.ACCEPT}")]
        elif decision.verdict == Verdict.UNCONFIRMED:
            facts["text"] = messages.describe_unconfirmed(name, decision)
        elif self._requires_decision and decision.verdict in _UNDECIDED:
            facts["text"] = messages.describe_undecided(name, decision, command)
            facts["says_command"] = False  # the text does
        return self._found(decision.verdict, decision.reason, **facts)

    def _found(self, verdict: Verdict, reason: str, *, latency: Latency | None = None, **more: Any) -> Judgment[Latency]:
        """Return a judgment with the fields that records of times have."""
        measurement, decision = self._measurement, latency.decision if latency else None
        recorded = self._mode.baselines.of(measurement)
        direction, baseline = measurement.direction, {"baseline": recorded.to_report()} if recorded else {}
        taken = latency.to_dict() if latency else {}
        fields = {
            "cause": decision.cause if decision else "",
            "remedy": decision.remedy if decision else "",
            "direction": direction,
            "backward": direction != "forward",
            "latency": {**taken, **baseline, "direction": direction, "key": measurement.key},
            **measurement.record_fields(),
        }
        properties = {f"attn_p50_{self.subject.name}_{direction}": f"{latency.p50:.6g}"} if latency else {}
        return Judgment(verdict, reason=reason, fields=fields, properties=properties, **more)

    @property
    def _requires_decision(self) -> bool:
        return self._run.session.settings.latency == "require"

    def _cupti(self) -> float | None:
        """Return the device seconds of one call by torch's profiler, None where it has no such direction or device."""
        measurement = self._measurement
        is_one_kernel = measurement.is_of_one_kernel and measurement.direction != "forward+backward"
        if not is_one_kernel or measurement.spec.device.type != "cuda":
            return None
        spec = replace(measurement.spec, backward=measurement.direction == "backward", inputs=("randn",))
        return profile_subject(measurement.subject, spec, with_ceilings=False)[-1].seconds

    def _show_to_benchmark(self, latency: Latency) -> None:
        """Give the samples to pytest-benchmark, where it is there, enabled, and asked for."""
        if is_asked_for(self._run.item.config):
            facts = {key: value for key, value in latency.to_dict().items() if key != "samples"}
            record_samples(self._run.request, latency.samples, facts)
