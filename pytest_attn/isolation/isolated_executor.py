"""A function in a process of its own, as a case runs it there and times it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_attn.backends.named import NamedFunction
from pytest_attn.backends.subject import Subject
from pytest_attn.cases.executor import Executor
from pytest_attn.cases.measurement import Measurement
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.isolation.isolated_function import SECONDS, IsolatedFunction
from pytest_attn.isolation.isolated_measurement import IsolatedMeasurement
from pytest_attn.latency.profiler import Profile
from pytest_attn.processes.fork_server import modules_ahead as all_modules_ahead
from pytest_attn.processes.launcher import Launcher
from pytest_attn.session.progress import Progress


class InOwnProcess(Executor):
    """Runs a function in its own process, from where its case says."""

    is_expendable = True  # a process that is lost is replaced
    has_deadline = True

    def __init__(self, function: IsolatedFunction, executor: Executor) -> None:
        super().__init__(executor.workload)
        self._function, self._executor = function, executor
        self.elsewhere = executor.elsewhere

    def place(self, subject: Subject, progress: Progress) -> Subject:
        """Return the subject, whose module has been imported in its process. Raises as `IsolatedFunction.start`."""
        with progress.during(f"importing {subject.name} in its process", self.workload.id):
            self._function.start()
        return self._executor.place(subject, progress)

    def leave(self, result: object) -> None:
        self._executor.leave(result)

    def profiles(self, subject: Subject, spec: CheckSpec, with_ceilings: bool) -> list[Profile]:
        raise ValueError("launches are seen in this process only; leave out --attn-isolated, or attn.assert_launched")

    def measurement(self, **facts: Any) -> Measurement:
        return IsolatedMeasurement(**facts, function=self._function)


# -- those of a run ------------------------------------------------------------------------------------------------------


def isolate(config: pytest.Config, timeout: float) -> Callable[[str], NamedFunction]:
    """Return what makes functions by their names whose processes end with the run. timeout: of a call, 0 for the usual one."""
    launcher = Launcher(modules_ahead, keeps_server=True)
    config.add_cleanup(launcher.close)

    def named(name: str) -> NamedFunction:
        made = IsolatedFunction(name, timeout or SECONDS, launcher, InOwnProcess)
        config.add_cleanup(made.close)
        return made

    return named


def modules_ahead() -> list[str]:
    """Return what a server imports ahead: what each process needs, and neither pytest nor anything of the tests."""
    return [*(one for one in all_modules_ahead() if one.startswith(("torch", "triton"))), "pytest_attn.isolation.call_server"]
