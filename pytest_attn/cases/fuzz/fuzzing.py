"""`--attn-fuzz N`: each marked test also runs on N workloads that Hypothesis draws, and a failure shrinks to the smallest.

One item `test_mine[fuzz]`, or `test_mine[fuzz-BACKEND]`, stands for all draws of a test. Its call runs the test's function
once for each draw, with the plugin's fixtures made anew for it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pytest_attn.cases.fuzz.case import DrawEndsError, FuzzCase
from pytest_attn.cases.fuzz.scope import scope_of
from pytest_attn.cases.fuzz.source import write_test, write_workload
from pytest_attn.cases.records import RECORDS
from pytest_attn.correctness.reference_cache import ReferenceCache
from pytest_attn.reports.records import Record, changed, new_record
from pytest_attn.session.kinds import ATTENTION
from pytest_attn.session.session import session_of
from pytest_attn.verdict import Verdict
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import hypothesis
    from hypothesis.strategies import SearchStrategy


#: references are looked at while a failure shrinks, and by several `check`s of one test
_CACHE_BYTES = 64 << 20


def require_hypothesis() -> None:
    """Raise pytest.UsageError where Hypothesis is not installed."""
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        raise pytest.UsageError('--attn-fuzz needs Hypothesis: pip install "pytest-attn[fuzz]"') from None


def run_fuzz(item: pytest.Function, draws: int) -> bool | None:
    """Call the test of a fuzz item on `draws` workloads; return None for any other item, whose call pytest makes."""
    __tracebackhide__ = True
    case = getattr(item, "funcargs", {}).get("attn")
    if not isinstance(case, FuzzCase):
        return None
    Fuzzing(item, case, draws).run()
    return True


@dataclasses.dataclass(frozen=True)
class FailingDraw:
    """What a test raised on one workload, and the records that it left."""

    workload: Workload
    error: BaseException
    records: list[Record]

    @property
    def first_line(self) -> str:
        """The failure in one line."""
        text = str(self.error) if isinstance(self.error, AssertionError) else f"{type(self.error).__name__}: {self.error}"
        return text.splitlines()[0] if text else type(self.error).__name__

    @property
    def written(self) -> str:
        """The workload as it would be written."""
        return write_workload(self.workload)[0]


def _fail_of_a_flaky(failure: FailingDraw) -> NoReturn:
    """Fail with the words of a failure that did not repeat; this frame is not hidden, as pytest 8.4 needs a visible one."""
    pytest.fail(f"{failure.first_line}\nIt did not fail again on {failure.written}", pytrace=False)


class Fuzzing:
    """The draws of one item, and what happened to them."""

    def __init__(self, item: pytest.Function, case: FuzzCase, draws: int) -> None:
        self._item, self._case, self._draws = item, case, draws
        self._session = session_of(item.config).for_draws(ReferenceCache(_CACHE_BYTES))
        self._checked = self._unjudged = 0
        self._refusals: Counter[str] = Counter()
        self._known: Counter[str] = Counter()
        self._worst: Record | None = None  # of those that passed
        self._failure: FailingDraw | None = None  # the last, which is the smallest once Hypothesis has shrunk it
        self._failed_at = 0

    def run(self) -> None:
        """Draw, and raise what the test raised on the smallest workload; skip a test that never judged anything."""
        __tracebackhide__ = True
        import hypothesis

        def one(workload: Workload) -> None:
            __tracebackhide__ = True
            self._try(workload)

        path, _, name = self._item.location
        one._hypothesis_internal_add_digest = f"{path}::{name}".encode()  # type: ignore[attr-defined] # as its own plugin does
        try:
            _settings(self._draws)(hypothesis.given(self._strategy())(one))()
        except hypothesis.errors.Unsatisfiable:
            pass  # every draw was refused
        except hypothesis.errors.Flaky:
            if self._failure is None:
                raise
            self._leave_failure(self._failure)
            _fail_of_a_flaky(self._failure)
        except BaseException as error:
            if self._failure is None or error is not self._failure.error:
                raise
            error.__notes__ = [self._leave_failure(self._failure)]  # type: ignore[attr-defined] # in place of Hypothesis's
            raise
        self._leave_record()

    def _strategy(self) -> SearchStrategy[Workload]:
        from pytest_attn.strategies import workloads

        drawn = workloads(**scope_of(self._case.mark, self._session.settings.dtypes, self._case.backend))
        declared = self._case.mark.declared
        return drawn.map(declared.fitted).filter(lambda w: not declared.unfit_for(w))

    def _try(self, workload: Workload) -> None:
        """Run the test's function on one drawn workload, which Hypothesis forgets if it is refused."""
        __tracebackhide__ = True
        import hypothesis

        item = self._item
        case = self._case.on(workload, self._session)
        item.stash[RECORDS] = []
        properties = len(item.user_properties)
        refusal = None
        try:
            case.skip_unless_runnable()
            item.obj(**self._arguments(case))
        except DrawEndsError:
            pass
        except pytest.skip.Exception as skipped:
            refusal = str(skipped)
        except pytest.xfail.Exception as known:
            self._known[str(known)] += 1
        except (Exception, pytest.fail.Exception) as error:
            self._failed_at = self._failed_at or self._checked + 1
            self._failure = FailingDraw(workload, error, item.stash[RECORDS])
            raise
        finally:
            records, item.stash[RECORDS] = item.stash[RECORDS], []
            del item.user_properties[properties:]
        if refusal is not None:
            self._refusals[refusal] += 1
            hypothesis.reject()
        self._checked += 1
        self._unjudged += not records
        self._keep_worst(records)

    def _arguments(self, case: FuzzCase) -> dict[str, Any]:
        """Return the test's arguments, with this draw's in place of those that its fixtures made."""
        drawn: dict[str, Callable[[], object]] = {
            "attn": lambda: case,
            "attn_backend": lambda: case.backend,
            "attn_workload": lambda: case.workload,
            "attn_device": lambda: case.device,
            "qkv": lambda: (case.q, case.k, case.v),
            "attn_reference": lambda: case.reference,
            "assert_attention_close": lambda: case.assert_close,
        }
        assert tuple(drawn) == ATTENTION.takes
        names = self._item._fixtureinfo.argnames
        return {name: drawn[name]() if name in drawn else self._item.funcargs[name] for name in names}

    def _keep_worst(self, records: Sequence[Record]) -> None:
        for record in records:
            if record["verdict"] == Verdict.PASSED and (self._worst is None or _z(record) > _z(self._worst)):
                self._worst = record

    # -- what is left behind: one record per item ----------------------------------------------------------------------

    def _leave_record(self) -> None:
        if self._checked == 0:
            reason = f"every draw was refused, most often because: {self._refusals.most_common(1)[0][0]}"
            self._item.stash[RECORDS] = [self._record(Verdict.SKIPPED, reason)]
            pytest.skip(f"not fuzzed: {reason}")
        if self._unjudged == self._checked:
            pytest.skip("not fuzzed: the test judges nothing; it never calls attn.check")
        if self._worst is None and self._known:
            pytest.xfail(f"every draw shows a known defect, most often: {self._known.most_common(1)[0][0]}")
        if self._worst is not None:
            fuzz = {"workload": "fuzz", "name": "fuzz", "source": "fuzz", "reason": self._counts(), "cause": ""}
            left = changed(self._worst, **fuzz)
            self._item.stash[RECORDS] = [left]

    def _record(self, verdict: Verdict, reason: str) -> Record:
        backend = self._case.backend
        return new_record(
            test=self._item.nodeid,
            question="check",
            workload="fuzz",
            name="fuzz",
            source="fuzz",
            subject=backend.name if backend else "-",
            verdict=verdict.value,
            backward=self._case.mark.backward,
            reason=reason,
        )

    def _leave_failure(self, failure: FailingDraw) -> str:
        """Leave the record and the test to paste; return what the failure's message says about them."""
        found = f"found by --attn-fuzz={self._draws}, draw {self._failed_at}"
        judged = next((r for r in failure.records if r["verdict"] in (Verdict.MISMATCH, Verdict.NO_RESULT)), None)
        left = judged or self._record(Verdict.RAISED, failure.first_line)
        reason = f"{left['reason']} ({found}; the smallest that fails)"
        named: Record = {**left, "workload": failure.workload.id, "name": "fuzz", "source": "fuzz", "reason": reason}
        self._item.stash[RECORDS] = [named]
        settings = self._session.settings
        title = f"{found}, --attn-seed={settings.seed}: {failure.first_line}"
        backend = self._case.backend.name if self._case.backend else None
        self._item.add_report_section("call", "fuzz", write_test(self._item, failure.workload, backend, title))
        return f"  fuzz       draw {self._failed_at} failed; the smallest workload that does is {failure.written}"

    def _counts(self) -> str:
        refused, known = sum(self._refusals.values()), sum(self._known.values())
        parts = [
            f"{self._checked:,} draws",
            f"{refused:,} refused" if refused else "",
            f"{known:,} known defects" if known else "",
        ]
        return ", ".join(part for part in parts if part)


def _settings(draws: int) -> hypothesis.settings:
    """Return Hypothesis's settings; the rest, such as the database, is that of the user's profile."""
    import hypothesis

    phase = hypothesis.Phase
    return hypothesis.settings(
        max_examples=draws,
        deadline=None,
        phases=(phase.reuse, phase.generate, phase.shrink),
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )


def _z(record: Record) -> float:
    return record["z_element"] or 0.0
