"""A run of --attn-against: its cases are timed at its end, by turns in new processes of both sides, by the gate's rule."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pytest_attn.cases.latency import (
    UNTIMED,
    LatencyMode,
    RunBaselines,
    TimedAtEnd,
    TimedCase,
    locked,
    once_each,
    too_few,
    with_runs,
)
from pytest_attn.cases.measurement import Measurement
from pytest_attn.guests.against.other_side import SELF, Moved, OtherSide, OtherSideError, installed_instead
from pytest_attn.latency.baseline_file import Baseline
from pytest_attn.latency.gate import Decision, GateContext, Policy, decide, shared_prior
from pytest_attn.latency.regression import describe_change
from pytest_attn.latency.result import Latency
from pytest_attn.latency.statistics import Run
from pytest_attn.processes.fork_server import Command
from pytest_attn.processes.last_words import last_words
from pytest_attn.processes.launcher import Ended
from pytest_attn.reports.files import ProcessFolder
from pytest_attn.reports.lines import count, duration, labeled, some
from pytest_attn.reports.records import Record, gathered, is_judged, is_wrong, latency_of, read_records
from pytest_attn.reports.verdict import Verdict
from pytest_attn.session.kinds import typed_name
from pytest_attn.session.repository import BUILT, commit_of, git
from pytest_attn.session.session import AttentionSession
from pytest_attn.session.worker_pool import Runs, WorkerPool, are_forked, fresh_runs, is_lacking, undisturbed, worker_command
from pytest_attn.workloads.functions import shell_word

#: who is timed in which of four processes: whatever drifts is the same for both
_TURNS = "ABBA"
#: how many times four; further processes for what was disturbed in some; and the fewest of a side that decide
ROUNDS, _MORE, _FEWEST = 4, 8, 5
_SECONDS = 3600
_DIFFERENT = (Verdict.SLOWER, Verdict.FASTER)
#: how a pytest ends that has judged what it has of the tests
_JUDGED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
#: what a test or a file has raised, as pytest shows it; lines of a wrong file stand further to the right
_RAISED = re.compile(r"^E {3}(\w.*)", re.MULTILINE)
#: a file of which it has collected nothing, and what it says of that
_BROKEN = re.compile(r"^_+ ERROR collecting (.+?) _+\n(.*?)^(?=[_=]{3})", re.MULTILINE | re.DOTALL)
#: modules of tests, which are of this tree on both sides of an interpreter
_OF_TESTS = re.compile(r"/(test_[^/]*|[^/]*_test|conftest|__init__)\.py$")


class AgainstOther(LatencyMode):
    """Checks and times each case once here, and leaves what is decided to the end of the run. Knows no baseline."""

    def __init__(self, session: AttentionSession, baselines: RunBaselines, at_end: BothSides) -> None:
        super().__init__(session, baselines)
        self._at_end = at_end

    @classmethod
    def of_run(cls, session: AttentionSession, baselines: RunBaselines, config: pytest.Config) -> LatencyMode | None:
        other = session.settings.more["against"]
        if other is None:
            return None
        at_end = BothSides(session, config, other)
        config.pluginmanager.register(at_end, "attn-against")
        return cls(session, baselines, at_end)

    def prepare(self, device: torch.device) -> None:
        """Do nothing: new processes are needed at the end only."""

    def recorded(self, measurement: Measurement) -> Baseline | None:
        return None

    def measure(self, measurement: Measurement) -> Latency:
        with locked(self.session, measurement.devices):
            latency = measurement.time(None)
        self._at_end.add(measurement, measurement.to_baseline(latency, "", ""))
        return replace(latency, decision=Decision(Verdict.RECORDED))  # until the end


class BothSides(TimedAtEnd):
    """Times the cases of a run on both sides at its end."""

    def __init__(self, session: AttentionSession, config: pytest.Config, other: OtherSide) -> None:
        super().__init__(session, config)
        self._other = other
        self._flag = f"--attn-against={shell_word(other.text)}"
        self._processes = 0  # that have timed

    def finish(self) -> bool:
        """Judge the other side, time both, and say what was found; return whether nothing is slower."""
        cases, other = once_each(self._cases), self._other
        if not cases and other.text == SELF:
            return True
        here = commit_of(self._config.rootpath)
        is_changed = "+" in here or git(self._config.rootpath, "ls-files", "--others", "--exclude-standard", "*.py")
        changes = ", with changes that are not committed" if is_changed else ""
        self.say("")
        if other.top:
            self.say(f"against {other.name}: A is this tree at {here[:10]}{changes}, B is {other.name}")
        found: dict[str, Decision] = {}
        problem = ""
        try:
            with other.placed() as placed, ProcessFolder() as folder:
                if other.text != SELF:
                    found = self._not_comparable(cases, *self._judged(placed, Path(folder)))
                found |= self._decided([one for one in cases if one.key not in found], placed)
        except (OtherSideError, *UNTIMED, OSError, ValueError) as error:
            problem = str(error) or "interrupted"
            self.say(f"against {other.name}: nothing was compared: {problem}", red=True)
        found |= {one.key: Decision(Verdict.INCONCLUSIVE, problem) for one in cases if one.key not in found}
        self._replace(found)
        if other.text == SELF and not problem:
            self._say_alarms(found)
        return not problem and self._fail_slower(cases, found)

    # -- correctness ---------------------------------------------------------------------------------------------------

    def _judged(self, placed: Callable[[Command], Command], folder: Path) -> tuple[list[Record], dict[str, str]]:
        """Return the records of the whole run on the other side, where nothing is timed, and why it lacks those of files.

        Raises OtherSideError.
        """
        path, root = folder / "records.jsonl", self._config.rootpath.resolve()
        if isinstance(placed, Moved) and not root.is_relative_to(placed.here):
            raise OtherSideError(f"{root}, pytest's root, is not in {placed.here}; run pytest in the repository of the tests")
        command = worker_command(self._config, folder / "judged", self._config.args, {"judges": True})
        own = {"attn_output": [str(path)], "attn_latency": "off", "tbstyle": "short", "no_summary": False}
        options = {**command.told["options"], **own, "continue_on_collection_errors": True}  # type: ignore[dict-item]
        here, there = (placed.here, placed.there) if isinstance(placed, Moved) else (root, None)
        told = {**command.told, "options": options, "here": str(here), "there": there and str(there)}
        arguments = ["-p", "pytest_attn.guests.against.other_side", *command.arguments]
        environment = {name: text for name, text in command.environment.items() if not name.startswith("GITHUB_")}
        command = placed(command._replace(arguments=arguments, environment=environment, told=told))
        with self._session.progress.during(f"judging {self._other.name}", ""):
            done = self._ran(command)
        strays = [one for message in done.messages for one in message.get("strays", ())]
        if there is None:
            if same := [os.path.relpath(one, here) for one in strays if not _OF_TESTS.search(one)]:
                self.say(f"the same on both sides: {some(same, 3)} of this tree; only what it calls can differ", yellow=True)
        elif strays := [*strays, *installed_instead(here, there)]:
            raise OtherSideError(
                f"{some(sorted({*strays}), 2)} was imported in place of the repository's own, so both may be the same; have"
                " the tree imported (pythonpath), or name the interpreter of an environment that has the other version:"
                " --attn-against=PYTHON"
            )
        elif not any(one.get("has_built") for one in done.messages) and (built := self._built_otherwise(here)):
            self.say(
                f"the same on both sides, unless a test builds it: what is built of {some(built, 3)}; name the interpreter of"
                " an environment that has the other build: --attn-against=PYTHON",
                yellow=True,
            )
        broken = {file: (_RAISED.findall(said) or [last_words(said)])[0] for file, said in _BROKEN.findall(done.output)}
        records = read_records(path) if path.exists() else []
        if done.returncode not in _JUDGED or not done.is_finished or (broken and not any(map(is_judged, records))):
            raised = [*broken.values(), *_RAISED.findall(done.output)]
            raise OtherSideError(f"it cannot run these tests: {raised[0] if raised else last_words(done.output)}")
        return records, broken

    def _built_otherwise(self, top: Path) -> list[str]:
        """Return the files to build a kernel of that differ from those of the other revision."""
        names = git(top, "diff", "--name-only", self._other.commit, "--", *(f"*{end}" for end in BUILT))
        return os.fsdecode(names).splitlines()

    def _ran(self, command: Command) -> Ended:
        """Run a command of the other side; of the tests that it names, those that are there."""
        done, names = WorkerPool.of(self._config).run(command, _SECONDS, is_forked=False), command.told["tests"]
        if done.returncode != pytest.ExitCode.USAGE_ERROR or _RAISED.search(done.output):
            return done
        there = [one for one in names if not _is_missing(one, command.folder, done.output)]  # type: ignore[attr-defined]
        return done if there == names else self._ran(command._replace(told={**command.told, "tests": there}))

    def _not_comparable(
        self, cases: Sequence[TimedCase], theirs: Sequence[Record], broken: Mapping[str, str]
    ) -> dict[str, Decision]:
        """Say which tests fail on one side only, and which on both; return why cases cannot be timed on the other side."""
        name, reasons = self._other.name, {}
        ours, others = ({one["test"] for one in run if is_wrong(one)} for run in (self._session.results.records, theirs))
        ran = {one["test"] for one in self._session.results.records}  # not all of them under -x
        sides = {"on both sides": ours & others, "here only": ours - others, f"in {name} only": ran & others - ours}
        for where, tests in sides.items():
            if tests:
                self.say(f"wrong {where}: {some(sorted(tests))}", yellow=True)
        for file, raised in broken.items():
            self.say(f"{name} cannot run {file}: {raised}", yellow=True)
        for one in cases:
            file = one.measurement.test.partition("::")[0]
            mine = [record for record in theirs if record["test"] == one.measurement.test]
            wrong = next((record for record in mine if is_wrong(record)), None)
            if file in broken:
                reasons[one.key] = f"{name} cannot run {file}: {broken[file]}"
            elif not mine:
                reasons[one.key] = f"{name} has no such test, or not with this workload"
            elif (shape := mine[0]["shape"].get("id")) not in (None, one.measurement.shape):
                reasons[one.key] = f"the workload is another one: {shape} in {name}, {one.measurement.shape} here"
            elif wrong is not None:
                reasons[one.key] = f"it fails in {name}: {wrong['reason'] or wrong['verdict']}"
            elif all(record["verdict"] == Verdict.SKIPPED for record in mine):
                reasons[one.key] = f"{name} skips it: {mine[0]['reason']}"
        return {key: Decision(Verdict.INCONCLUSIVE, reason) for key, reason in reasons.items()}

    # -- times ---------------------------------------------------------------------------------------------------------

    def _decided(self, cases: Sequence[TimedCase], placed: Callable[[Command], Command]) -> dict[str, Decision]:
        """Time the cases on both sides and decide; on a shared device what differs must do so again some time later."""
        if not cases:
            return {}
        runs = self._timed(cases, placed)
        self._say_tuned(runs)
        found = {one.key: self._decision(one, runs) for one in cases}
        doubtful = [one for one in cases if found[one.key].verdict in _DIFFERENT and self._policy(one).is_shared]
        if doubtful:
            time.sleep(max(self._policy(one).pause for one in doubtful))
            later = self._timed(doubtful, placed)
            both = runs + [{**run, "process": run["process"] + len(_TURNS) * 1000} for run in later]
            for one in doubtful:
                is_confirmed = self._decision(one, later).verdict == found[one.key].verdict
                why = "" if is_confirmed else "processes some time later do not confirm the difference"
                decision = self._decision(one, both, 2)
                found[one.key] = decision if is_confirmed else replace(decision, verdict=Verdict.INCONCLUSIVE, reason=why)
        return found

    def _timed(self, cases: Sequence[TimedCase], placed: Callable[[Command], Command]) -> Runs:
        """Return the times of both sides. Each has a server of its own where processes are forked."""
        names = {one.key: one.measurement.test_name for one in cases}
        modes = {one.key: one.baseline.mode for one in cases}
        processes, each = ROUNDS * len(_TURNS), ROUNDS * len(_TURNS) // 2
        kinds, pool = {one.device.type for one in cases}, WorkerPool()
        is_forked = are_forked(self._session.settings.fresh, kinds) and not self._other.is_foreign

        def lacking(runs: Runs) -> list[str]:
            return [name for key, name in names.items() if any(is_lacking(own, key, each) for own in _sides(runs))]

        doing = f"against {self._other.name}: {count(len(cases), 'case')}, process"
        with self._session.progress.counting(doing, processes, _MORE) as progress, ExitStack() as stack:
            stack.enter_context(locked(self._session, {one.device for one in cases}))
            stack.callback(pool.close)
            runs = fresh_runs(
                self._config,
                list(names.values()),
                processes,
                progress,
                modes,
                lacking,
                _MORE,
                is_forked,
                placed=lambda number, command: command if _is_here(number) else placed(command),
                pool_of=lambda number: None if _is_here(number) else pool,
            )
        self._processes += len({run["process"] for run in runs})
        return runs

    def _decision(self, one: TimedCase, runs: Runs, times: int = 1) -> Decision:
        """Decide over a case by the gate's rule, in both directions: what is faster would have been slower the other way."""
        sides = [[run for run in own if run["key"] == one.key] for own in _sides(runs)]
        ours, theirs = (undisturbed(own, one.key, times * ROUNDS * len(_TURNS) // 2) for own in sides)
        for own, used, name in zip(sides, (ours, theirs), ("this side", self._other.name), strict=True):
            if len(used) < _FEWEST:
                at_most = self._slower(one, *sides).detectable if all(sides) else None
                return Decision(Verdict.INCONCLUSIVE, f"of {name}, {too_few(one, own, _FEWEST)}", detectable=at_most)
        decision = replace(self._slower(one, ours, theirs), is_faster=False)
        if decision.verdict == Verdict.REGRESSED:
            return replace(decision, verdict=Verdict.SLOWER)
        if self._slower(one, theirs, ours).verdict == Verdict.REGRESSED:
            return replace(decision, verdict=Verdict.FASTER, reason="")
        return replace(decision, verdict=Verdict.ALIKE) if decision.verdict == Verdict.PASSED else decision

    def _slower(self, one: TimedCase, these: Runs, those: Runs) -> Decision:
        """Return what the gate says of these runs, had those been recorded."""
        recorded = with_runs(one.baseline, those).fit()
        if self._other.is_foreign and not self._policy(one).is_shared:
            recorded = replace(recorded.as_timed(), anchor_centers={})  # of another torch, no controls
        policy = replace(self._policy(one), runs=len(these))
        context = GateContext(recorded, shared_prior([recorded], one.device.type), policy, one.measurement.cases)
        return decide([Run(run["p50"], run["anchors"], run["launch"]) for run in these], context)

    def _policy(self, one: TimedCase) -> Policy:
        """Return what counts as slower: by turns on one GPU, half of what the gate takes for it between days."""
        policy, settings = one.measurement.policy, self._session.settings
        is_given = settings.max_slowdown is not None
        return policy if is_given or policy.is_shared else replace(policy, slowdown=policy.slowdown / 2)

    # -- what is said --------------------------------------------------------------------------------------------------

    def _replace(self, found: Mapping[str, Decision]) -> None:
        """Put the decisions into the records."""

        def decided(record: Record) -> dict[str, object]:
            decision = found[latency_of(record)["key"]]
            latency = {**latency_of(record), "decision": decision.to_dict(), "verdict": decision.verdict.value}
            is_different = decision.verdict in _DIFFERENT and not decision.reason
            reason = describe_change(decision, self._other.name) if is_different else decision.reason
            command = f"{record['command']} {self._flag}"
            return {"verdict": decision.verdict.value, "reason": reason, "latency": latency, "command": command}

        is_held = lambda record: record["verdict"] == Verdict.RECORDED and latency_of(record).get("key") in found  # noqa: E731
        self._session.results.replace(is_held, decided)

    def _say_tuned(self, runs: Runs) -> None:
        """Say which of Triton's kernels have tuned themselves to another configuration on the other side."""
        ours, theirs = (gathered(each for run in own for each in run.get("tuned", {}).items()) for own in _sides(runs))
        for kernel in sorted(ours.keys() & theirs.keys()):
            here, there = (some(sorted(set(own[kernel])), 3) for own in (ours, theirs))
            if here != there:
                self.say(f"autotuned otherwise: {kernel}: {here} here, {there} in {self._other.name}", yellow=True)

    def _say_alarms(self, found: Mapping[str, Decision]) -> None:
        verdicts = Counter(one.verdict for one in found.values())
        more = f"; {number} could not be decided" if (number := verdicts[Verdict.INCONCLUSIVE]) else ""
        alarms = sum(map(verdicts.__getitem__, _DIFFERENT))
        self.say(f"against self: {alarms} of {len(found)} alarms in {self._processes} runs on this machine{more}")

    def _fail_slower(self, cases: Sequence[TimedCase], found: Mapping[str, Decision]) -> bool:
        """Fail the tests of what is slower, and under --attn-latency=require of what is undecided; return whether none is."""
        failing = [Verdict.SLOWER, *([Verdict.INCONCLUSIVE] if self._session.settings.latency == "require" else [])]
        failed = [one for one in cases if found[one.key].verdict in failing]
        for one in failed:
            self.fail(one.item, self._described(one, found[one.key]))
        return not failed

    def _described(self, one: TimedCase, decision: Decision) -> str:
        again = f"pytest {shell_word(typed_name(one.item))} {self._flag}"
        change = describe_change(decision, self._other.name)
        lines = [
            f"{decision.verdict}: {one.measurement.name}: {change}",
            labeled("because", decision.reason) if decision.reason else "",
            labeled("runs", ", ".join(map(duration, decision.runs))) if decision.runs else "",
            labeled("reproduce", again),
        ]
        return "\n".join(line for line in lines if line)


def _is_missing(name: str, folder: Path, output: str) -> bool:
    """Return whether pytest has not found a test, file or folder, by its name or its path; in any color."""
    said = "|".join(map(re.escape, (name, os.path.abspath(folder / name))))
    return re.search(rf"ERROR: .*\bnot found: ({said})(?![^\s\x1b])", output) is not None


def _sides(runs: Runs) -> tuple[Runs, Runs]:
    """Return the runs of this side, and of the other."""
    ours, theirs = ([run for run in runs if _is_here(run["process"]) is side] for side in (True, False))
    return ours, theirs


def _is_here(number: int) -> bool:
    return _TURNS[number % len(_TURNS)] == "A"
