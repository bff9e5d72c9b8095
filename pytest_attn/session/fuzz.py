"""`--attn-fuzz N`: each marked test also runs on N workloads that Hypothesis draws, and a failure shrinks to the smallest.

One item `test_mine[fuzz]`, or `test_mine[fuzz-BACKEND]`, stands for all draws of a test. Its call runs the test's function
once for each draw, with the plugin's fixtures made anew for it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import pytest

from pytest_attn.session.case import AttentionCase
from pytest_attn.session.marker import AttentionMark
from pytest_attn.session.parametrize import PARAMETER, CaseParameter
from pytest_attn.session.record import RECORD, CaseRecord
from pytest_attn.session.scope import scope_of
from pytest_attn.session.store import FIXTURES, SESSION, AttentionSession
from pytest_attn.session.written import write_test, write_workload
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from pytest_attn.backends.backend import Backend
    from pytest_attn.latency.protocol import Latency

#: stands in the item's id, and for the workload until one is drawn
PLACEHOLDER = Workload(1, name="fuzz")
#: references are looked at while a failure shrinks, and by several `check`s of one test
_CACHE_BYTES = 64 << 20


class FuzzParameter(CaseParameter):
    """Stands for all draws of one test, with one backend where the test takes one."""


def require_hypothesis() -> None:
    """Raise pytest.UsageError where Hypothesis is not installed."""
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        raise pytest.UsageError("--attn-fuzz needs Hypothesis: pip install pytest-attn[fuzz]") from None


def fuzz_parameters(cases: Iterable[CaseParameter]) -> list[FuzzParameter]:
    """Return the fuzz items of a test with these cases: one, or one per backend."""
    return [FuzzParameter(PLACEHOLDER, backend) for backend in dict.fromkeys(case.backend for case in cases)]


def make_fuzz_case(request: pytest.FixtureRequest, parameter: FuzzParameter) -> AttentionCase:
    """Make the case that stands for the draws until the test is called; skips the test where nothing can be drawn for it."""
    from pytest_attn.backends.contexts import quiet

    item = request.node
    session = item.config.stash[SESSION]
    case = FuzzCase(request, parameter, _mark_of(item, session), session)
    if late := _fixtures_made_once(item):
        pytest.skip(f"not fuzzed: fixture {late!r} asks for an attention fixture, and would be made once for all draws")
    if _is_hypothesis_test(item.obj):
        pytest.skip("not fuzzed: the test already draws with Hypothesis")
    if case.backend is not None:
        with quiet():
            reason = case.backend.unavailable_because(session.machine(case.mark.device)) or case.backend.broken_because()
        if reason:
            case.record_skip(reason)
            pytest.skip(f"{case.backend.name}: {reason}")
    return case


def run_fuzz(item: pytest.Function, draws: int) -> bool | None:
    """Call the test of a fuzz item on `draws` workloads; return None for any other item, whose call pytest makes."""
    __tracebackhide__ = True
    case = getattr(item, "funcargs", {}).get("attn")
    if not isinstance(case, FuzzCase):
        return None
    Fuzzing(item, case, draws).run()
    return True


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a test raised on one workload, and the records that it left."""

    workload: Workload
    error: BaseException
    records: list[CaseRecord]

    @property
    def first_line(self) -> str:
        """The failure in one line."""
        text = str(self.error) if isinstance(self.error, AssertionError) else f"{type(self.error).__name__}: {self.error}"
        return text.splitlines()[0] if text else type(self.error).__name__

    @property
    def written(self) -> str:
        """The workload as it would be written."""
        return write_workload(self.workload)[0]


def _fail_of_a_flaky(failure: Failure) -> NoReturn:
    """Fail with the words of a failure that did not repeat; this frame is not hidden, as pytest 8.4 needs one that is not."""
    pytest.fail(f"{failure.first_line}\nIt did not fail again on {failure.written}", pytrace=False)


class FuzzCase(AttentionCase):
    """One drawn workload, or, as the fixture makes it, what stands for all of them."""

    @property
    def mark(self) -> AttentionMark:
        """The test's marker."""
        return self._mark

    def on(self, workload: Workload, session: AttentionSession) -> FuzzCase:
        """Return the same case on another workload."""
        backend = self.backend.name if self.backend else None
        return FuzzCase(self._request, CaseParameter(workload, backend), self._mark, session)

    def measure(self, fn: Callable[..., Any] | Backend | str, backward: bool | Literal["both"] = False) -> Latency:
        """Check `fn` and end the draw: its latency is of no interest."""
        __tracebackhide__ = True
        self._check(self._resolved(fn, backward=bool(backward)), self._mark.backward or bool(backward))
        raise _DrawEndsError

    def record_skip(self, reason: str) -> None:
        """Leave the record of a backend that cannot run at all."""
        assert self.backend is not None
        self._record(self.backend.name, "skipped", reason=reason)


class _DrawEndsError(BaseException):
    """The rest of the test is not for drawn workloads; no `except Exception` of the test can swallow this."""


class Fuzzing:
    """The draws of one item, and what became of them."""

    def __init__(self, item: pytest.Function, case: FuzzCase, draws: int) -> None:
        self._item, self._case, self._draws = item, case, draws
        self._session = _own_session(item.config.stash[SESSION])
        self._checked = self._unjudged = 0
        self._refusals: Counter[str] = Counter()
        self._known: Counter[str] = Counter()
        self._worst: CaseRecord | None = None  # of those that passed
        self._failure: Failure | None = None  # the last, which is the smallest once Hypothesis has shrunk it
        self._failed_at = 0

    def run(self) -> None:
        """Draw, and raise what the test raised on the smallest workload; skip a test that never judged anything."""
        __tracebackhide__ = True
        import hypothesis

        phase = hypothesis.Phase
        settings = hypothesis.settings(  # the rest, such as the database, is that of the user's profile
            max_examples=self._draws,
            deadline=None,
            phases=(phase.reuse, phase.generate, phase.shrink),
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(hypothesis.HealthCheck),
            verbosity=hypothesis.Verbosity.quiet,
        )

        def one(workload: Workload) -> None:
            __tracebackhide__ = True
            self._try(workload)

        path, _, name = self._item.location
        one._hypothesis_internal_add_digest = f"{path}::{name}".encode()  # type: ignore[attr-defined] # as its own plugin does
        try:
            settings(hypothesis.given(self._strategy())(one))()
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

        return workloads(**scope_of(self._case.mark, self._session.settings.dtypes, self._case.backend))

    def _try(self, workload: Workload) -> None:
        """Run the test's function on one drawn workload, which Hypothesis forgets if it is refused."""
        __tracebackhide__ = True
        import hypothesis

        item = self._item
        case = self._case.on(workload, self._session)
        item.stash[RECORD] = []
        properties = len(item.user_properties)
        refusal = None
        try:
            case.skip_unless_runnable()
            item.obj(**self._arguments(case))
        except _DrawEndsError:
            pass
        except pytest.skip.Exception as skipped:
            refusal = str(skipped)
        except pytest.xfail.Exception as known:
            self._known[str(known)] += 1
        except (Exception, pytest.fail.Exception) as error:
            self._failed_at = self._failed_at or self._checked + 1
            self._failure = Failure(workload, error, item.stash[RECORD])
            raise
        finally:
            records, item.stash[RECORD] = item.stash[RECORD], []
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
        assert drawn.keys() == FIXTURES
        names = self._item._fixtureinfo.argnames
        return {name: drawn[name]() if name in drawn else self._item.funcargs[name] for name in names}

    def _keep_worst(self, records: Sequence[CaseRecord]) -> None:
        for record in records:
            if record.verdict == "passed" and (self._worst is None or (record.z_element or 0) > (self._worst.z_element or 0)):
                self._worst = record

    # -- what is left behind: one record per item ----------------------------------------------------------------------

    def _leave_record(self) -> None:
        if self._checked == 0:
            reason = f"every draw was refused, most often because: {self._refusals.most_common(1)[0][0]}"
            self._item.stash[RECORD] = [self._record("skipped", reason)]
            pytest.skip(f"not fuzzed: {reason}")
        if self._unjudged == self._checked:
            pytest.skip("not fuzzed: the test judges nothing; it never calls attn.check")
        if self._worst is None and self._known:
            pytest.xfail(f"every draw shows a known defect, most often: {self._known.most_common(1)[0][0]}")
        if self._worst is not None:
            left = dataclasses.replace(self._worst, workload="fuzz", name="fuzz", reason=self._counts())
            self._item.stash[RECORD] = [left]

    def _record(self, verdict: str, reason: str) -> CaseRecord:
        backend = self._case.backend
        subject = backend.name if backend else "-"
        return CaseRecord(
            test=self._item.nodeid,
            workload="fuzz",
            name="fuzz",
            subject=subject,
            verdict=verdict,
            backward=self._case.mark.backward,
            reason=reason,
        )

    def _leave_failure(self, failure: Failure) -> str:
        """Leave the record and the test to paste; return what the failure's message says about them."""
        found = f"found by --attn-fuzz={self._draws}, draw {self._failed_at}"
        judged = next((r for r in failure.records if r.verdict == "mismatch"), None)
        left = judged or self._record("raised", failure.first_line)
        reason = f"{left.reason} ({found}; the smallest that fails)"
        self._item.stash[RECORD] = [dataclasses.replace(left, workload=failure.workload.id, name="fuzz", reason=reason)]
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


def _mark_of(item: pytest.Item, session: AttentionSession) -> AttentionMark:
    marker = item.get_closest_marker("attention")
    assert marker is not None
    return AttentionMark.from_marker(marker, session.catalog, session.registry)


def _own_session(session: AttentionSession) -> AttentionSession:
    """Return the session as draws see it: their references leave those of other tests in the cache; nothing is profiled."""
    from pytest_attn.correctness.question import ReferenceCache

    own = copy.copy(session)
    own._references = ReferenceCache(_CACHE_BYTES)
    own.settings = dataclasses.replace(session.settings, profile=False)
    return own


def _fixtures_made_once(item: pytest.Function) -> str | None:
    """Return the name of a fixture of the user's that asks for one of the plugin's."""
    own = {*FIXTURES, PARAMETER}
    for name, definitions in item._fixtureinfo.name2fixturedefs.items():
        if name not in own and any(own.intersection(definition.argnames) for definition in definitions):
            return name
    return None


def _is_hypothesis_test(function: object) -> bool:
    from hypothesis import is_hypothesis_test

    return bool(is_hypothesis_test(function))
