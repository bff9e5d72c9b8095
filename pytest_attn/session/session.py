"""The state of one pytest run: settings, registered backends and workloads, devices, shared references, results."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import pytest

from pytest_attn.processes.worker import Worker
from pytest_attn.session.devices import PATIENCE, Machines, memory_lock, sharers_of
from pytest_attn.session.lost_cuda import CudaContext
from pytest_attn.session.option_types import Option
from pytest_attn.session.options import Settings, all_options
from pytest_attn.session.registrations import Registrations

if TYPE_CHECKING:
    import torch

    from pytest_attn.backends.machine import Machine
    from pytest_attn.backends.subject import Subject
    from pytest_attn.correctness.spec import ReferenceCache
    from pytest_attn.reports.records import Record, RecordWriter
    from pytest_attn.session.deadline import Deadline
    from pytest_attn.session.manifest import Manifest
    from pytest_attn.session.progress import Progress
    from pytest_attn.session.selection import SelectedKernels
    from pytest_attn.workloads.workload import Workload


#: bytes that torch may keep of a shared GPU between two tests: giving back waits for the device, which less is not worth
_MUCH = 256 << 20
#: how much memory a check takes for each byte that its kernel reads and writes: float64 results, their limits, comparisons
_OF_A_CHECK = 32


class Collected:
    """Numbers of cases that a run has collected, and under --attn-list how many of them would run."""

    def __init__(self) -> None:
        self.tests = self.cases = 0  # the tests with cases, and the cases of them all
        self.takes_backend = False  # whether one of the tests runs on each selected backend
        self.selected = 0  # cases that are left after deselection, which share the rate of false alarms
        self.due = self.begun = 0  # cases that are to run in this process, and those whose turn came
        self.runnable = 0  # cases of a listing that would run
        #: of those of which a covering set runs (session/cover.py), as far as they are declared
        self.chosen = self.unchosen = 0
        self.covering: list[str] = []  # each covering set in words
        self.generated: list[str] = []  # for each kernel of a test the generated workloads that it is asked, in words
        #: why the others would not run: by reason, how many of each backend
        self.obstacles: dict[str, Counter[str]] = {}

    def add_test(self, cases: int, takes_backend: bool) -> None:
        """Count a test that was collected, and its cases."""
        self.tests += 1
        self.cases += cases
        self.takes_backend |= takes_backend

    @property
    def listed(self) -> int:
        """The cases of a listing: another parametrize of the test multiplies those that its marker has."""
        return max(self.cases, self.runnable + sum(sum(kernels.values()) for kernels in self.obstacles.values()))

    def count(self, reason: str | None, kernel: str) -> None:
        """Count a case of a listing: reason says why it would not run, None where it would."""
        self.runnable += reason is None
        if reason:
            self.obstacles.setdefault(reason, Counter())[kernel] += 1


class Results:
    """A plugin of pytest that takes the records off its test reports, on which they also come from xdist's workers."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        #: the cases of a test, and of a backend where it takes one, that ran
        self.taken: dict[tuple[str, str], set[str]] = {}
        #: writes each record to a .jsonl file, as it comes, and last what the run collected and ran
        self.lines: RecordWriter | None = None
        self.manifest: Manifest | None = None
        self._held: list[Record] = []  # what is to be recorded, until it is
        self._begun: dict[str, dict[str, str] | None] = {}  # by id of a test that runs: its case, None where it has none
        self._beside: list[dict[str, str]] = []  # what ended tests, or the run, from outside

    def pytest_sessionstart(self) -> None:
        """Begin the file at once: that of an earlier run must not stand for this one if it is killed."""
        if self.lines is not None:
            self.lines.write([])

    def replace(self, is_meant: Callable[[Record], bool], changes: Callable[[Record], Mapping[str, Any]]) -> None:
        """Change fields of records, as where what was to be recorded was not."""
        from pytest_attn.reports.records import changed

        for records in (self.records, self._held):
            records[:] = [changed(one, **changes(one)) if is_meant(one) else one for one in records]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what a report carries."""
        if report.when == "setup" and report.passed:
            self._begun[report.nodeid] = getattr(report, "attn_begins", None)
        elif report.when == "teardown":
            self._begun.pop(report.nodeid, None)
        elif report.when not in ("setup", "call") and report.failed:
            self._note_killed(report)
        records = getattr(report, "attn", ())
        if records and str(report.outcome) == "rerun":  # of pytest-rerunfailures
            records = [{**one, "phase": "rerun"} for one in records if one["question"] != "test"]
        self._take(records)

    def _take(self, records: Sequence[Record]) -> None:
        if records:
            from pytest_attn.reports.files import uninterrupted

            with uninterrupted():  # or the .jsonl file would lack what the others have
                self._add(records)

    def _add(self, records: Sequence[Record]) -> None:
        self.records.extend(records)
        for one in records:
            if one["verdict"] != "skipped":
                backend = one["subject"] if one["tags"].get("family") != "callable" else ""
                self.taken.setdefault((one["test"].partition("[")[0], backend), set()).add(one["test"])
        if self.lines is not None:
            from pytest_attn.reports.verdict import Verdict

            self._held += [one for one in records if one["verdict"] == Verdict.RECORDED]
            self.lines.write(one for one in records if one["verdict"] != Verdict.RECORDED)

    def _note_killed(self, report: pytest.TestReport) -> None:
        """Note a test whose worker of xdist has ended; one that was not set up yet may be of a kernel, too."""
        case = self._begun.pop(report.nodeid, {"test": report.nodeid, "workload": "-", "subject": "-"})
        said = str(report.longrepr).partition("\n")[0]
        if case is not None:
            self._beside.append({**case, "reason": said, "verdict": "no result", "phase": "call"})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be collected: nobody knows its tests."""
        if report.failed:
            reason = "could not be collected, so its tests are not known; pytest's output says why"
            self._beside.append({"test": report.nodeid, "reason": reason, "phase": "collect"})

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Note that the run was stopped."""
        from pytest_attn.reports.lines import raised_words

        self._beside.append({"reason": raised_words(excinfo.typename, str(excinfo.value)), "phase": "run"})

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Note that the run broke down."""
        self._beside.append({"reason": f"INTERNALERROR of pytest ({excinfo.typename})", "phase": "run"})

    def settle(self, is_asked: bool) -> None:
        """Make records of what ended tests or the run from outside, where attention was judged or files are asked for."""
        beside, self._beside = self._beside, []
        if not beside or not (self.records or is_asked):
            return
        from pytest_attn.reports.records import TEST, new_record

        known: dict[str, Any] = {"workload": "-", "subject": "-", "question": TEST, "verdict": "failed"}
        self._take([new_record(**{**known, **one}) for one in beside])

    def close(self, exitstatus: int) -> RecordWriter | None:
        """Finish the .jsonl file of --attn-output, once; return what wrote it, None where there is none left to finish."""
        lines, self.lines = self.lines, None
        if lines is not None:
            lines.write(self._held)
            if self.manifest is not None:
                lines.write_lines([self.manifest.closing_line(exitstatus, self.records, lines)])
        return lines


#: seconds after the gate was opened within which a process finds the device as warm as the one before has left it
_WARM_SECONDS = 2.0


class WorkerContext:
    """What the process that waits for this one has sent to it.

    number: of this process among those that time the same. selected_invariants: those that it runs instead of timing.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, told = worker, worker.told
        self.number: int = told.get("number", 0)
        self.selected_invariants: tuple[str, ...] = tuple(told.get("invariants", ()))
        self._modes: Mapping[str, str] = told.get("modes", {})
        self._was_warm_at = -math.inf

    @classmethod
    def of_this_process(cls) -> WorkerContext | None:
        """Return what this process knows, None where nobody waits for it, or only for its end."""
        worker = Worker.of_this_process()
        return cls(worker) if worker and not worker.told.get("judges") else None

    def wait_at_gate(self) -> None:
        """Wait until others have been timed, where this process was prepared beside them."""
        self._was_warm_at = time.monotonic() if self._worker.wait_at_gate() else -math.inf

    @property
    def finds_device_warm(self) -> bool:
        """True where another process timed on the device until the gate was opened for this one, a moment ago."""
        return time.monotonic() - self._was_warm_at < _WARM_SECONDS

    def mode_of(self, key: str) -> str | None:
        """Return the mode in which a case is timed for its new baseline; None where it is for none."""
        return self._modes.get(key)

    def return_result(self, result: Mapping[str, Any]) -> None:
        """Hand a time or a finding, in builtin types, to the process that waits for it."""
        self._worker.channel.send(**result)


class AttentionSession:
    """The state of one run, each part of which is changed by its own methods only.

    Every start of pytest makes one, so it holds nothing yet. Backends and workloads are registered when a test first
    needs them, and torch is imported when a device is first asked for.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.rootpath = config.rootpath
        self.settings = Settings.from_config(config)
        self.registrations = Registrations(config)
        self.machines = Machines(self.settings.device)
        self.collected = Collected()
        self.results = Results()
        self.cuda = CudaContext()
        #: the GPU that a test shares with other workers, and what it holds of the memory
        self.memory_of_test: tuple[torch.device, ExitStack] | None = None
        #: why a backend refused a workload, with gradients or without, on a machine: what only its compiler found out
        self.refused: dict[tuple[Subject, Workload, bool, Machine], str] = {}
        #: what the process that waits for a new one has sent to it, None in all others
        self.worker = WorkerContext.of_this_process()
        #: whether all tests have ended, so that the run has its status
        self.has_ended = False
        #: why a run that has judged nothing must not look like a pass, "" where it may
        self.unjudged_because = ""
        #: the files that could not be written
        self.unwritten: list[str] = []
        self.has_written = False  # the others
        #: what becomes of each test, None where no .jsonl file asks
        self.manifest: Manifest | None = None
        if self.settings.timeout:
            self.deadline  # noqa: B018 - made now, while stderr is not captured yet

    @cached_property
    def kernels(self) -> SelectedKernels:
        """Whose kernels the run tests: the one place that asks for options of guests that choose others."""
        return self.kind_of_kernels(self.settings, self.registrations, self.machines)

    @property
    def kind_of_kernels(self) -> type[SelectedKernels]:
        """The class of these."""
        from pytest_attn.session.selection import SelectedKernels

        *_, asked = ["", *self.settings.asked["kernels"].values()]
        chosen: type[SelectedKernels] = resolve_name(asked) if asked else SelectedKernels
        return chosen

    @property
    def has_attention_tests(self) -> bool:
        """True where a test with cases was collected."""
        return self.collected.tests > 0

    @cached_property
    def references(self) -> ReferenceCache:
        """The references shared by the run's kernels. The workers of one device share its memory, too."""
        from pytest_attn.correctness.spec import ReferenceCache

        return ReferenceCache(self.settings.memory // self.sharers, self.settings.rows)

    @cached_property
    def sharers(self) -> int:
        """Number of workers of xdist on the device of this process."""
        return sharers_of(self.settings.gpu_per_worker, self.machines.device())

    @contextmanager
    def sharing_memory(self, workload: Workload | None) -> Iterator[None]:
        """Leave the other workers of a GPU what a test does not need of its memory: half is for those that take little.

        Tests that take much share the other half, and wait for one another. What torch keeps afterwards is given back.
        `take_whole_memory` is for what takes more than that.
        """
        machine = self.machines.known_default
        if machine is None or machine.kind != "cuda" or self.sharers == 1 or self.cuda.lost_because:
            yield
            return
        device = sys.modules["torch"].device(machine.device)  # torch knows the machine
        half, needed = machine.memory / 2, _OF_A_CHECK * workload.bytes() if workload else 0
        is_large = needed > half / self.sharers
        with ExitStack() as held:
            if is_large:
                _hold_memory(held, self.progress, device, needed / half)
            self.memory_of_test = device, held
            yield
            is_large = is_large or self.memory_of_test is None
            self.memory_of_test = None
            if is_large:
                gc.collect()
            with suppress(RuntimeError):  # of a context that the test has lost, which the next one says
                cuda = sys.modules["torch"].cuda
                if cuda.memory_reserved(device) - cuda.memory_allocated(device) > _MUCH:
                    cuda.empty_cache()

    def take_whole_memory(self) -> bool:
        """Hold all that large tests may take of a GPU's memory until the test ends, once others leave it.

        False where no worker shares the GPU, or the test holds that already.
        """
        if self.memory_of_test is None:
            return False
        (device, held), self.memory_of_test = self.memory_of_test, None
        held.close()
        gc.collect()
        with suppress(RuntimeError):  # as above
            sys.modules["torch"].cuda.empty_cache()
        _hold_memory(held, self.progress, device, 1.0)
        return True

    @cached_property
    def progress(self) -> Progress:
        """What is written while something takes long; first asked for while output is not captured."""
        from pytest_attn.session.progress import Progress

        return Progress(self._config, is_child=self.worker is not None)

    @cached_property
    def deadline(self) -> Deadline:
        """The time limit of a callable."""
        from pytest_attn.session.deadline import Deadline

        made = Deadline(self.settings.timeout)
        self._config.add_cleanup(made.close)
        return made

    @cached_property
    def options(self) -> dict[str, Option]:
        """The options of the command line, by their stems."""
        return {one.stem: one for one in all_options()}

    @property
    def baselines_folder(self) -> Path:
        """The folder of --attn-baselines."""
        return self.rootpath / self.settings.baselines


def _hold_memory(held: ExitStack, progress: Progress, device: torch.device, share: float) -> None:
    with progress.during("waiting for memory that other tests take", str(device), PATIENCE, True):
        held.enter_context(memory_lock(device, share))


SESSION = pytest.StashKey[AttentionSession]()


def session_of(config: pytest.Config) -> AttentionSession:
    """Return the session of a run."""
    return config.stash[SESSION]
