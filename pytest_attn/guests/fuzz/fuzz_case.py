"""`--attn-fuzz N`: each marked test also runs on N workloads that Hypothesis draws, and a failure shrinks to the smallest.

One item `test_mine[fuzz]`, or `test_mine[fuzz-BACKEND]`, stands for all draws of a test. Its call runs the test's function
once for each draw, with the plugin's fixtures made anew for it.
"""

from __future__ import annotations

import ast
import builtins
import copy
import dataclasses
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import pytest

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.precision import Precision
from pytest_attn.cases.case import AttentionCase, KernelEvaluator, context_of
from pytest_attn.cases.case_records import RECORDS
from pytest_attn.cases.conclude import conclude, skip, skip_unless_runnable
from pytest_attn.cases.context import CaseContext
from pytest_attn.cases.executor import Executor
from pytest_attn.correctness.spec import ReferenceCache
from pytest_attn.latency.result import Latency
from pytest_attn.reports.records import Record, changed, gathered, new_record
from pytest_attn.reports.verdict import Cause, Verdict
from pytest_attn.session.kinds import ATTENTION, CaseParameter, id_from_root, taker_of_fixtures
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.session import AttentionSession, session_of
from pytest_attn.workloads.masks import kind_of_words
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.source import import_lines, write_workload
from pytest_attn.workloads.traits import layout_of, traits_of
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import hypothesis


def write_test(item: pytest.Function, workload: Workload, backend: str | None, title: str) -> str:
    """Return the text of a test that runs `item`'s function on one workload, for its file or one beside it.

    title: the comment above. The text has the imports that it needs.
    """
    text, imports = write_workload(workload, home=item.function.__module__)
    marker = item.get_closest_marker("attention")
    assert marker is not None
    options = {name: value for name, value in marker.kwargs.items() if name != "dtypes"}  # the workload has its own
    if backend:
        options["backends"] = backend
    if isinstance(options.get("precision"), Precision):
        imports.add(("pytest_attn", "Precision"))
    arguments = ", ".join([text, *(f"{name}={value!r}" for name, value in options.items())])
    written = _renamed(item, re.sub(r"\W+", "_", workload.id), arguments)
    modules = {"import pytest", *_imported("\n".join(written), item.function, imports)}
    return "\n".join([f"# {title}", *sorted(modules), *import_lines(imports), "", "", *written])


def _renamed(item: pytest.Function, suffix: str, arguments: str) -> list[str]:
    """Return the lines of a test's source with another name and marker."""
    function = item.function
    name = f"{function.__name__}_{suffix}"
    mark = f"@pytest.mark.attention({arguments})"
    try:
        source = textwrap.dedent(inspect.getsource(function))
        definition = ast.parse(source).body[0]
        assert isinstance(definition, ast.FunctionDef)
    except (OSError, SyntaxError, AssertionError):  # made by other code
        parameters = ", ".join(inspect.signature(function).parameters)
        return [mark, f"def {name}({parameters}):", f"    ...  # as in {function.__name__}"]
    kept = [f"@{ast.unparse(one)}" for one in definition.decorator_list if not _is_attention_mark(one, function)]
    header, *body = source.splitlines()[definition.lineno - 1 :]
    lines = [mark, *kept, header.replace(function.__name__, name, 1), *body]
    return lines if item.cls is None else [f"class {item.cls.__name__}Again:", *(f"    {line}".rstrip() for line in lines)]


def _is_attention_mark(decorator: ast.expr, function: Callable[..., object]) -> bool:
    """Return whether a decorator is the marker, whatever its module calls it."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    if isinstance(called, ast.Attribute):
        return called.attr == "attention"
    known = getattr(function, "__globals__", {}).get(getattr(called, "id", ""))
    return isinstance(known, pytest.MarkDecorator) and known.name == "attention"


# -- imports: one for each global name that a test's source needs where it stands alone --------------------------------


def _imported(source: str, function: Callable[..., object], imports: set[tuple[str, str]]) -> Iterator[str]:
    """Note what the names of `source` must import that `function` finds in its module, and yield lines that import modules.

    source: the text of a test, whatever it is called there. A constant of the test's module is imported from there. A name
    that the module lacks is left out. imports: as `import_lines` takes them.
    """
    known = getattr(function, "__globals__", {})
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    for name in names & known.keys() - vars(builtins).keys():
        value = known[name]
        if not isinstance(value, ModuleType):
            imports.add(_home_of(name, value, function.__module__))
            continue
        parent, _, last = value.__name__.rpartition(".")
        if parent and last == name:
            imports.add((parent, name))
        else:
            yield f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}")


def _home_of(name: str, value: object, module: str) -> tuple[str, str]:
    """Return from where a name is imported, and what there: where its value is defined, else the test's module."""
    home, own = str(getattr(value, "__module__", "") or ""), str(getattr(value, "__name__", "") or "")
    for place in (home.partition(".")[0], home):
        if own and getattr(sys.modules.get(place), own, None) is value:
            return place, own if own == name else f"{own} as {name}"
    return module, name


# -- what is drawn for a test: what its backend can do, or what is common to the workloads that its marker names -------


def scope_of(mark: AttentionMark, dtypes: Sequence[str], backend: Backend | None) -> dict[str, Any]:
    """Return the arguments of `strategies.workloads` for a test.

    A backend says itself what it can do, so all of that is drawn. A test of one kernel says so by the workloads that its
    marker names: what they have in common stays. One that names none, and so runs the catalog, takes all.
    """
    if backend is not None:
        scope = _within(backend.capabilities) if backend.capabilities else {}
    else:
        scope = like(mark.workloads) if mark.workloads else {}
    if mark.dtypes or dtypes:
        scope["dtypes"] = [d for d in mark.dtypes if not dtypes or d in dtypes] if mark.dtypes else list(dtypes)
    if mark.declared.inner_layout == "thd":
        scope["layouts"] = [layout for layout in scope.get("layouts", ("packed",)) if "packed" in layout]
    return {**scope, "backward": mark.backward}


def like(named: Sequence[Workload]) -> dict[str, Any]:
    """Return the scope of workloads like these: what all of them have in common stays, as the test may rely on it.

    Lengths, batch and heads are always drawn, and unequal lengths, GQA and empty sequences where one has them.
    """
    traits = frozenset[str]().union(*map(traits_of, named))
    values = {field: set(map(attrgetter(field), named)) for field in (*_DRAWN, *_NEVER_DRAWN)}
    common = {field: found.pop() for field, found in values.items() if len(found) == 1}
    scope: dict[str, Any] = {
        **{field: value for field, value in common.items() if value != getattr(Workload, field)},
        "masks": _masks(named),
        "features": [*filter(traits.__contains__, _FEATURES), *(field for field in _DRAWN if field not in common)],
        "layouts": list(dict.fromkeys(map(layout_of, named))),
        "dtypes": list(dict.fromkeys(w.dtype for w in named)),
        "head_dims": sorted({(w.head_dim, w.v_head_dim) for w in named}),
    }
    if pages := _pages(named):
        scope["page_sizes"] = pages
    if all(w.q_len == 1 for w in named):
        scope["q_len"] = 1  # a kernel for decoding
    if all(w.cached for w in named):
        scope["cached"] = True
    return scope


def _pages(named: Sequence[Workload]) -> list[int | Pages]:
    """Return the kinds of pages of some workloads, in pools of as many as are needed; plain ones by their size."""
    pages = {dataclasses.replace(w.kv_pages, pool=None) for w in named if w.kv_pages}
    in_order = sorted(pages, key=lambda one: (one.size, repr(one)))
    return [one.size if one.is_plain else one for one in in_order]


#: what is drawn where one of the workloads has it
_FEATURES = ("fewer queries", "fewer keys", "empty sequences", "grouped heads")
#: options that are drawn where workloads differ in them, and those that stay where all have them
_DRAWN, _NEVER_DRAWN = (
    ("scale", "softcap", "bias", "alibi", "sinks", "score_mod"),
    ("head_groups", "bias_before_softcap", "dropout", "pad"),
)


def _masks(named: Sequence[Workload]) -> list[object]:
    """Return the kinds of masks of some workloads, or the only mask of a kind; one of the user's own is a kind for itself."""
    masks = gathered((mask.kind if mask and mask.function is None else mask, mask) for mask in (w.plain_mask for w in named))
    return [kind if len(set(found)) > 1 else found[0] for kind, found in masks.items()]


def _within(capabilities: Capabilities) -> dict[str, Any]:
    """Return the scope of what an interface can say; what it refuses beyond that is refused draw by draw."""
    from pytest_attn.strategies import FEATURES, HEAD_DIMS, LAYOUT_KINDS

    masks = [word for word, kind in kind_of_words().items() if {"any", *kind.capabilities} & capabilities.masks]
    always = {"fewer queries", "fewer keys", "empty sequences"}
    able = {*capabilities.features, *always, "plain", *(["v_head_dim"] if capabilities.v_head_dim else [])}
    probes = [Workload(1, head_dim=dim, dtype=capabilities.dtypes[0]) for dim in HEAD_DIMS + (capabilities.head_dims or ())]
    return {
        "masks": [None, *masks],
        "layouts": [layout for layout in LAYOUT_KINDS if layout in able],
        "features": [feature for feature in FEATURES if feature in able],
        "dtypes": capabilities.dtypes,
        "head_dims": list(dict.fromkeys(p.head_dim for p in probes if not capabilities.refusals(p))) or HEAD_DIMS,
    }


# -- the case of an item: the fixture `attn` as the test of each draw sees it, and what stands for all draws until then


def make_fuzz_case(request: pytest.FixtureRequest, parameter: CaseParameter) -> AttentionCase:
    """Make the case that stands for the draws until the test is called; skips the test where nothing can be drawn for it."""
    item = request.node
    session = session_of(item.config)
    case = FuzzCase(CaseContext.of_item(request, parameter))
    mark = context_of(case).mark
    if late := taker_of_fixtures(item):
        pytest.skip(f"not fuzzed: fixture {late!r} asks for an attention fixture, and would be made once for all draws")
    from hypothesis import is_hypothesis_test

    if is_hypothesis_test(item.obj):
        pytest.skip("not fuzzed: the test already draws with Hypothesis")
    if any(w.is_quantized or w.v_in_k for w in [parameter.workload, *mark.workloads]):
        pytest.skip("not fuzzed: drawn workloads have neither descales nor values in their keys")
    if case.backend is not None:
        with quiet():
            reason = case.backend.unavailable_because(session.machines.machine(mark.device)) or case.backend.broken_because()
        if reason:
            skip(context_of(case), case.backend, reason)
    return case


class FuzzCase(AttentionCase):
    """One drawn workload, or, as the fixture makes it, what stands for all of them."""

    def on(self, workload: Workload, session: AttentionSession) -> FuzzCase:
        """Return the same case on another workload."""
        backend = self.backend.name if self.backend else None
        drawn, executor = CaseParameter(workload, backend), Executor(workload)
        return FuzzCase(CaseContext(self._context.request, drawn, self._mark, session, executor))

    def measure(
        self, fn: Callable[..., Any] | Backend | str, backward: bool | Literal["both"] = False, name: str | None = None
    ) -> Latency:
        """Check `fn` and end the draw: its latency is of no interest."""
        __tracebackhide__ = True
        subject = self._subject(fn, name, backward=bool(backward))
        spec = dataclasses.replace(self._spec, backward=self._mark.backward or bool(backward))
        conclude(self._context, KernelEvaluator(subject, spec))
        raise DrawEndsError


class DrawEndsError(BaseException):
    """The rest of the test is not for drawn workloads; no `except Exception` of the test can swallow this."""


# -- the draws ---------------------------------------------------------------------------------------------------------


#: references are looked at while a failure shrinks, and by several `check`s of one test
_CACHE_BYTES = 64 << 20


def run_fuzz(item: pytest.Function) -> None:
    """Call the test of a fuzz item on as many workloads as are asked for."""
    __tracebackhide__ = True
    if inspect.iscoroutinefunction(item.obj):
        pytest.skip("not fuzzed: an async test, which nothing awaits here")
    Fuzzing(item).run()


@dataclasses.dataclass(frozen=True)
class FailingDraw:
    """A failure of a test on one workload, and the records that it left."""

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

    def __init__(self, item: pytest.Function) -> None:
        case = item.funcargs["attn"]
        assert isinstance(case, FuzzCase)
        self._item, self._case = item, case
        self._mark, session = context_of(self._case).mark, session_of(item.config)
        self._draws = session.settings.more["fuzz"]
        self._session = copy.copy(session)
        self._session.references = ReferenceCache(_CACHE_BYTES)
        self._session.settings = dataclasses.replace(session.settings, profile=False, declines="skip")
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

        from pytest_attn.strategies import workloads

        def one(workload: Workload) -> None:
            __tracebackhide__ = True
            self._try(workload)

        path, _, name = self._item.location
        one._hypothesis_internal_add_digest = f"{path}::{name}".encode()  # type: ignore[attr-defined] # as its own plugin does
        try:
            fitting = workloads(**scope_of(self._mark, self._session.settings.dtypes, self._case.backend))
            fitting = fitting.map(self._mark.declared.fitted).filter(lambda w: not self._mark.declared.unfit_for(w))
            drawn = _settings(self._draws)(hypothesis.given(fitting)(one))
            if "seed" in self._session.settings.given:
                drawn = hypothesis.seed(self._session.settings.seed)(drawn)
            drawn()
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

    def _try(self, workload: Workload) -> None:
        """Run the test's function on one drawn workload, which Hypothesis forgets if it is refused."""
        __tracebackhide__ = True
        import hypothesis

        item = self._item
        case = self._case.on(workload, self._session)
        item.stash[RECORDS] = []
        refusal = None
        try:
            skip_unless_runnable(context_of(case), case.backend)
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
        if refusal is not None:
            self._refusals[refusal] += 1
            hypothesis.reject()
        self._checked += 1
        self._unjudged += not records
        passed = [record for record in records if record["verdict"] == Verdict.PASSED]
        self._worst = max([*filter(None, [self._worst]), *passed], key=lambda one: one["z_element"] or 0.0, default=None)

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

    # -- what is left behind: one record per item ----------------------------------------------------------------------

    def _leave_record(self) -> None:
        if self._checked == 0:
            reason = f"every draw was refused, most often because: {self._refusals.most_common(1)[0][0]}"
            is_failure = session_of(self._item.config).settings.declines == "fail"
            verdict = Verdict.NO_RESULT if is_failure else Verdict.SKIPPED
            self._item.stash[RECORDS] = [self._record(verdict, reason, Cause.DECLINED.value)]
            if is_failure:
                pytest.fail(f"declined: {reason}", pytrace=False)
            pytest.skip(f"not fuzzed: {reason}")
        if self._unjudged == self._checked:
            pytest.skip("not fuzzed: the test judges nothing; it never calls attn.check")
        if self._worst is None and self._known:
            pytest.xfail(f"every draw shows a known defect, most often: {self._known.most_common(1)[0][0]}")
        if self._worst is not None:
            fuzz = {"workload": "fuzz", "name": "fuzz", "source": "fuzz", "reason": self._counts(), "cause": ""}
            self._item.stash[RECORDS] = [changed(self._worst, **fuzz)]

    def _record(self, verdict: Verdict, reason: str, cause: str = "") -> Record:
        backend = self._case.backend
        return new_record(
            test=id_from_root(self._item),
            question="check",
            workload="fuzz",
            name="fuzz",
            source="fuzz",
            subject=backend.name if backend else "-",
            verdict=verdict.value,
            backward=self._mark.backward,
            reason=reason,
            cause=cause,
        )

    def _leave_failure(self, failure: FailingDraw) -> str:
        """Leave the record and the test to paste; return what the failure's message says about them."""
        found = f"found by --attn-fuzz={self._draws}, draw {self._failed_at}"
        judged = next((r for r in failure.records if r["verdict"] in (Verdict.MISMATCH, Verdict.NO_RESULT)), None)
        record = judged or self._record(Verdict.RAISED, failure.first_line)
        reason = f"{record['reason']} ({found}; the smallest that fails)"
        named: Record = {**record, "workload": failure.workload.id, "name": "fuzz", "source": "fuzz", "reason": reason}
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
