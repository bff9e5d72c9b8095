"""Additions to the core: what stands on it and not in it registers itself, by entry points of the group `pytest_attn`.

A guest of a distribution is a line of its pyproject, `[project.entry-points.pytest_attn]`, that names a `Guest`. Loads nothing
else, as every run of pytest reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

#: the group of entry points
GROUP = "pytest_attn"


@dataclass(frozen=True)
class Kind:
    """One kind of tests.

    Args:
        marker: of its tests.
        maker: "module:function" of (request, parameter) that makes the case of an item, loaded when one is set up.
        must_call: what a test calls so that something is judged, as a reader would write it.
        fixture: its own, which is the case.
        takes: the plugin's fixtures that a test of it may take, its own among them.
        items: "module:class" that makes its items of a marked test, loaded when one is collected.
        example: what to add to a test that takes the fixture and has no marker.
        help: of the marker, as `pytest --markers` shows it; "" where its items' `help()` says it.
        unknown: what reports call the workload of a test that raised before it was known; "" where its item says it. What its
            tests judge has then no workload that a run could select.
        about: what `pytest --fixtures` says of the fixture.
    """

    marker: str
    maker: str
    must_call: str
    fixture: str
    takes: tuple[str, ...]
    items: str = "pytest_attn.session.collection:Items"
    example: str = ""
    help: str = ""
    unknown: str = ""
    about: str = "The case of a test; its kind says what it judges."

    @property
    def has_workloads(self) -> bool:
        """True where its tests are of workloads, which a run selects."""
        return not self.unknown

    def made_items(self) -> Any:
        """Return what makes its items."""
        return resolve_name(self.items)(self)


class LatencyField(NamedTuple):
    """A field that a guest adds to a latency."""

    meaning: str
    line: str  # a function of its value that says it in a line, "module:function"


@dataclass(frozen=True)
class Guest:
    """The additions of a capability to a run; each by a name, "module:object", that is loaded when it is first needed.

    Args:
        kinds: kinds of tests: marker, fixture, items and case of each.
        items: by an argument of the marker `attention`, a class of `Items` for the tests that give it: its `mark` reads the
            argument, its cases say what makes them.
        backends: by such an argument, backends by their names that are for the tests that give it, and for no others; by "",
            backends for tests without any. "LIBRARY:PART" stands for all names that begin so: its class takes what is behind
            the colon, and says in `stands_for` what that makes.
        aliases: of backends, with the names that they stand for.
        options: by their names, declared as those of `Settings` are, with `group` and `short`, their place and their text in
            the help; read from `Settings.more`.
        contradiction: a function of the settings that says of options that do not go together what to type, a line that
            begins with one of them; "" where they do.
        kernels: by the name of an option of its, a class of `SelectedKernels` that says whose kernels a run tests,
            and what asks in place of judgments.
        cases: by the name of an option of its, a function of the cases of a kernel's test, and of the names of its fixtures,
            that yields more.
        elsewhere: by the name of an option of its, whose text are names of functions or "", a class that is made of (config,
            settings): called with the name of a function, it makes what runs that elsewhere, and its `require_contained` of
            (subject, executor) fails what would run here.
        failing: by the name of an option of its, a function of (context, text, judgment) of a failure that returns lines to
            add; comparisons then keep what they saw.
        methods: of `attn`, by their names: functions that take the `AttentionCase` first.
        attributes: of `attn`, by their names: functions of the `AttentionCase`.
        latency: by a field of `Latency.more`, what records say of it.
        fields: of a record: a TypedDict annotated as `Record` is, after the meaning with a part of JSON Schema where reports
            read what is within.
        invariants: by name, what makes them of it: run where a test's marker, or `only`, names them.
        lines: a function of records and a width that yields what the summary shows of them under -v.
        tables: such a function whose lines it always shows.
        advice: a function of records, and of the options of guests, that says what to type next; "" where nothing.
        timed: a function of records that yields lines to show below the table of latencies.
        closing: by the name of an option of its, a function of (session, config, reporter) that prints and writes what it asks
            for, below the summary.
        results: a function of records that yields, for pages, titles with the texts below.
        compares: what its mode compares with, and by which option, in words.
        mode: a class of `LatencyMode`, asked before those of the core whether a run is its own.
        commands: of `python -m pytest_attn`: functions that take the subparsers and add theirs, whose `run`
            may be "module:function", loaded when it runs.
        faults: identities that its diagnoses give to faults, with what is wrong: a mapping.
    """

    kinds: tuple[Kind, ...] = ()
    items: Mapping[str, str] = field(default_factory=dict)
    backends: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    contradiction: str = ""
    kernels: Mapping[str, str] = field(default_factory=dict)
    cases: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    failing: Mapping[str, str] = field(default_factory=dict)
    methods: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)
    latency: Mapping[str, LatencyField] = field(default_factory=dict)
    fields: str = ""
    invariants: Mapping[str, str] = field(default_factory=dict)
    lines: str = ""
    tables: str = ""
    advice: str = ""
    timed: str = ""
    closing: Mapping[str, str] = field(default_factory=dict)
    results: str = ""
    mode: str = ""
    compares: str = ""
    commands: tuple[str, ...] = ()
    faults: str = ""


@cache
def guests() -> tuple[Guest, ...]:
    """Return all guests. Raises TypeError for an entry point that names something else than a `Guest`.

    Those of this package come first, and are found beside it, too, where it is not installed but on sys.path.
    """
    beside = Path(__file__).parent / "guests"
    own = [f"pytest_attn.guests.{path.parent.name}.{path.stem}:GUEST" for path in sorted(beside.glob("*/*_guest.py"))]
    named = dict.fromkeys([*own, *(one.value for one in metadata.entry_points(group=GROUP))])
    found = []
    for name in named:
        guest = resolve_name(name)
        if not isinstance(guest, Guest):
            raise TypeError(f"the entry point {name} of {GROUP} must name a Guest, got {type(guest).__name__}")
        found.append(guest)
    return tuple(found)


def each(what: str) -> Iterator[Any]:
    """Yield what guests name in a field of `Guest`, loaded."""
    yield from (resolve_name(name) for guest in guests() if (name := getattr(guest, what)))


def added(what: str) -> dict[str, Any]:
    """Return what all guests add in a field of `Guest` that is a mapping."""
    return {key: value for guest in guests() for key, value in getattr(guest, what).items()}
