"""The tests of a repository, each run with its own kernel, with fault-free ones and with every mutant that its calls reach."""

from __future__ import annotations

import io
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from _pytest.assertion import rewrite
from _pytest.runner import runtestprotocol

from pytest_attn.guests.audit.kernel_calls import KernelCalls, Run, in_layout, with_pages
from pytest_attn.guests.audit.tolerances import Line, Tolerances
from pytest_attn.guests.models.call_to_workload import imported_functions
from pytest_attn.guests.models.interception import InterceptedCall, intercept_attention, user_function, user_functions
from pytest_attn.guests.mutants.all_mutants import MUTANTS
from pytest_attn.guests.mutants.kernel import Kernel, KernelBackend, SplitKernel
from pytest_attn.guests.mutants.mutant import Mutant
from pytest_attn.reports.lines import count

#: fault-free kernels
HONEST: dict[str, Callable[[], Kernel]] = {
    "tiles of 64": Kernel,
    "tiles of 32 by 128": lambda: Kernel(32, 128),
    "keys in two parts": SplitKernel,
}
#: parts of the time that is left, of which the next test has one where more tests follow
_PARTS = 4
#: how much of what pytest says is shown where it runs nothing
_LONGEST = 2000
#: options, of a repository too, that would run tests in other processes, not at all, or not after one that failed
_ALL_HERE: dict[str, Any] = dict.fromkeys(("stepwise", "usepdb", "trace", "setuponly", "setupplan"), False)
_ALL_HERE |= {"maxfail": 0, "numprocesses": 0, "dist": "no", "distload": False, "tx": [], "looponfail": False}


class Fate(IntEnum):
    """Fate of a mutant of which a call ran the faulty step; of several parameters the last of these counts."""

    WITHIN_ROUNDING = 0
    NOT_TRIED = 1
    PASSED = 2
    FOUND = 3


class Outcome(NamedTuple):
    """How one run of a test ended: passed, failed or skipped, the reason in a line, its calls and its tolerances."""

    word: str
    reason: str
    run: Run
    used: dict[Line, float]


@dataclass
class AuditedTest:
    """One test function, over all its parameters.

    kernel: what was replaced. cases: how many of its parameters were audited. because: why others were not. fates: by name, of
    the mutants that it reaches. passed: by name, the run with the largest error that it let pass. honest: by line, the largest
    share of its tolerance that a fault-free kernel used. notes: what else there is to say of it.
    """

    name: str
    kernel: str = ""
    cases: int = 0
    because: str = ""
    fates: dict[str, Fate] = field(default_factory=dict)
    passed: dict[str, Outcome] = field(default_factory=dict)
    honest: dict[Line, float] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def settle(self, mutant: Mutant, fate: Fate, outcome: Outcome | None = None) -> None:
        """Note the fate of a mutant with some parameters."""
        name = mutant.name
        self.fates[name] = max(self.fates.get(name, fate), fate)
        if outcome and fate is Fate.PASSED and (name not in self.passed or outcome.run.off > self.passed[name].run.off):
            self.passed[name] = outcome

    def those(self, fate: Fate) -> list[str]:
        """Return the mutants of a fate, those with the largest error first."""
        found = [name for name, own in self.fates.items() if own is fate]
        return sorted(found, key=lambda name: -self.passed[name].run.off if name in self.passed else 0)

    @property
    def lines(self) -> list[Line]:
        """The lines that decide: of whose tolerance some mutant that passed used another share than fault-free kernels."""
        return [line for line, share in self.honest.items() if any(o.used.get(line) != share for o in self.passed.values())]

    def pass_at_the_tightest(self) -> list[str]:
        """Return those that would pass where each line's tolerance was what fault-free kernels use of it."""
        shares = {name: self.passed[name].used for name in self.those(Fate.PASSED)}
        return [name for name, used in shares.items() if all(used[line] <= self.honest.get(line, 1.0) for line in used)]


def audited(
    tests: Sequence[str], replaced: Sequence[str], layout: str, seconds: float, say: Callable[[str], None]
) -> list[AuditedTest]:
    """Run pytest, and return each test that it ran. tests: its arguments. Raises ValueError where it ran none."""
    tolerances, said = Tolerances(Path.cwd()), io.StringIO()
    auditor = Auditor(replaced, layout, time.monotonic() + seconds, tolerances, say)
    options = ["-q", "-s", "--assert=rewrite", "-o", "enable_assertion_pass_hook=true"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # as errors, by the repository, they end pytest
    with (
        TemporaryDirectory() as cache,  # no test has failed last
        tolerances.spread(),
        _assertions_rewritten_anew(),
        redirect_stdout(said),
        redirect_stderr(said),
    ):
        code = pytest.main([*options, "-o", f"cache_dir={cache}", *tests], plugins=[auditor])
    if auditor.refused:
        raise ValueError(f"argument --replace: {auditor.refused.removeprefix('functions: ')}")
    if not auditor.tests or code > pytest.ExitCode.TESTS_FAILED:
        ran = count(len(auditor.tests), "test")
        raise ValueError(f"pytest ran {ran}, and exited with {int(code)}:\n{said.getvalue()[-_LONGEST:].rstrip()}")
    return list(auditor.tests.values())


@contextmanager
def _assertions_rewritten_anew() -> Iterator[None]:
    """Have pytest read no bytecode of a repository that it wrote in an earlier run, which lacks the hook of assertions."""
    read = rewrite._read_pyc

    def read_installed(source: Path, *args: Any) -> Any:
        return read(source, *args) if "site-packages" in source.parts else None

    with patch.object(rewrite, "_read_pyc", read_installed), patch.object(sys, "dont_write_bytecode", True):
        yield


class Auditor:
    """The plugin of pytest that audits, until a time of the monotonic clock.

    replaced: names of the kernel, "module:function" or of an argument of tests. layout: of one of the repository.
    """

    def __init__(
        self, replaced: Sequence[str], layout: str, ends: float, tolerances: Tolerances, say: Callable[[str], None]
    ) -> None:
        self.tests: dict[str, AuditedTest] = {}
        self.refused = ""
        self._functions = [name.replace(":", ".") for name in replaced if ":" in name]
        self._arguments = [name for name in replaced if ":" not in name]
        self._layout, self._tolerances, self._say = layout, tolerances, say
        self._calls, self._ends, self._until = KernelCalls(), ends, ends
        self._subtests: list[pytest.TestReport] = []

    # -- pytest's side -----------------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Iterator[Any]:
        """Run every test here."""
        vars(config.option).update(_ALL_HERE)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[Any]:
        """Intercept attention while tests run; functions of known libraries are read as these say."""
        try:
            named = user_functions(self._functions)
        except ValueError as error:
            self.refused = str(error)
            raise pytest.UsageError(self.refused) from None
        known = {one.place: with_pages(one) for one in imported_functions()}
        functions = [known.get(one.place) or in_layout(one, self._layout) for one in named]
        self._calls.places = {*(one.place for one in functions), *(("", name) for name in self._arguments)}
        with intercept_attention(self._calls, read=(*known.values(), *functions)):
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run one test many times."""
        name = _test_of(item)
        if name not in self.tests:
            self._say(name)
            left = {_test_of(one) for one in item.session.items}.difference(self.tests)
            now = time.monotonic()  # most tests may call no attention, and take next to nothing
            self._until = now + max(self._ends - now, 0.0) / min(len(left), _PARTS)
        test = self.tests.setdefault(name, AuditedTest(name))
        self._tolerances.test_file = item.path
        because = self._audit(item, test)
        test.because, test.cases = test.because or because, test.cases + (not because)
        item.session._setupstate.teardown_exact(nextitem)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Draw the same numbers in every run of a test."""
        random.seed(0)
        torch.manual_seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> None:
        """Wrap kernels that tests take as arguments."""
        for name in self._arguments:
            if callable(kernel := pyfuncitem.funcargs.get(name)):
                pyfuncitem.funcargs[name] = self._wrapped(name, kernel)

    def _wrapped(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        function = in_layout(user_function("", name, kernel), self._layout)

        def called(*args: Any, **kwargs: Any) -> Any:
            given = function.bind(args, kwargs)
            return self._calls.handle(InterceptedCall("", function, given, kernel, positional=len(args)))

        return called

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self) -> bool:
        """Set no timer of pytest-timeout, which would take all runs of a test for one."""
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take down that a subtest failed, which alone is logged here: the report of its test passes."""
        self._subtests += [report] if report.failed else []

    def pytest_assertion_pass(self, orig: str, expl: str) -> None:
        """Read a bound that an assertion has."""
        self._tolerances.see_assertion(orig, expl)

    # -- one test ------------------------------------------------------------------------------------------------------------

    def _audit(self, item: pytest.Item, test: AuditedTest) -> str:
        """Audit a test with one set of parameters; return why it is not counted, "" where it is."""
        if item.get_closest_marker("attention") is not None:
            return "a test of pytest-attn: pytest --attn-mutants asks it"
        own = self._run(item, None)
        if because := self._uncounted(own):
            return because
        honest = [self._run(item, KernelBackend(name, kernel())) for name, kernel in HONEST.items()]
        if failed := next((one for one in honest if one.word == "failed"), None):
            return f"it fails with a fault-free kernel, too: {failed.reason}"
        if any(one.run.off for one in honest):
            return "fault-free kernels are beyond rounding on its inputs, which tell no fault from that"
        if own.word == "failed":  # on a device that its kernel is not for
            test.notes[f"fails with its own kernel, and not with fault-free ones: {own.reason}"] = None
        test.notes |= {f"left to its own kernel: {reason}": None for one in honest for reason in one.run.unread}
        for line, share in ((line, share) for one in honest for line, share in one.used.items()):
            test.honest[line] = max(test.honest.get(line, 0.0), share)
        functions = honest[0].run.functions
        test.kernel = ", ".join(shown for place, shown in functions.items() if place in (self._calls.places or functions))
        asked = honest[0].run.asked
        reached = [mutant for mutant in MUTANTS if any(mutant.is_reached_by(*one) for one in asked)]
        random.Random(0).shuffle(reached)  # time may end
        for mutant in reached:
            if test.fates.get(mutant.name) is not Fate.FOUND:
                self._try(item, test, mutant)
        return ""

    def _uncounted(self, own: Outcome) -> str:
        """Say why a test is not counted that ran with its own kernel, "" where it is."""
        run = own.run
        if own.word == "skipped" or (own.word == "failed" and not run.asked):
            return f"it {'is skipped' if own.word == 'skipped' else 'fails'} with its own kernel: {own.reason}"
        if len(run.functions) > 1 and not self._calls.places:
            return f"it calls {' and '.join(run.functions.values())}: say by --replace which is the kernel"
        if run.asked:
            return ""
        if run.unread:
            return f"its calls cannot be replaced: {next(iter(run.unread))}"
        return "it does not call the kernel" if self._calls.places else "it calls no attention that is known: say --replace"

    def _try(self, item: pytest.Item, test: AuditedTest, mutant: Mutant) -> None:
        if time.monotonic() > self._until:
            test.settle(mutant, Fate.NOT_TRIED)
            return
        outcome = self._run(item, with_stale_memory(mutant.backend()))
        shown = Fate.PASSED if outcome.run.off else Fate.WITHIN_ROUNDING
        test.settle(mutant, Fate.FOUND if outcome.word == "failed" else shown, outcome)

    def _run(self, item: pytest.Item, kernel: KernelBackend | None) -> Outcome:
        """Run a test with a kernel, None for its own, and take down what is its alone."""
        self._calls.start(kernel)
        self._tolerances.used, self._subtests = {}, []
        # its parent as what comes next: fixtures of the module stay
        reports = [*runtestprotocol(item, log=False, nextitem=item.parent), *self._subtests]  # type: ignore[arg-type]
        ended = next((one for word in ("failed", "skipped") for one in reports if one.outcome == word), reports[0])
        return Outcome(ended.outcome, _reason(ended), self._calls.run, self._tolerances.used)


def _test_of(item: pytest.Item) -> str:
    """Return the name of a test without its parameters."""
    return item.nodeid.partition("[")[0]


def with_stale_memory(backend: KernelBackend) -> KernelBackend:
    """Have the memory of a kernel hold what another call may have left there, the same in every run."""

    def allocate(shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        left = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(1))
        return left.to(device=like.device, dtype=dtype or like.dtype)

    backend.kernel.allocate = allocate  # type: ignore[method-assign]
    return backend


def _reason(report: pytest.TestReport) -> str:
    """Return in one line why a test failed or was skipped."""
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}"
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash: Any = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longreprtext).splitlines()
    return next((line.strip() for line in lines if line.strip()), "")[:200]
