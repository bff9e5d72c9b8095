"""The lines that a run prints at its end, and the files that it writes for people and machines."""

import contextlib
import datetime
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pkgutil import resolve_name
from typing import Any

import pytest

from pytest_attn.backends.configured import split
from pytest_attn.backends.registry import tables
from pytest_attn.reports import files
from pytest_attn.reports.latency_output import is_notable, latency_summary
from pytest_attn.reports.lines import count, room, some
from pytest_attn.reports.markdown import markdown_summary, support_page, workflow_commands
from pytest_attn.reports.records import Record, RecordWriter, function_of, gathered, is_wrong
from pytest_attn.reports.terminal import Line, listing, profile_tables, slowest_compilations, summary
from pytest_attn.reports.verdict import Cause, Verdict
from pytest_attn.session.collection import unmet_because
from pytest_attn.session.devices import NoTorchError
from pytest_attn.session.kinds import made_items, marker_of, parameter_of
from pytest_attn.session.manifest import Manifest
from pytest_attn.session.pytest_versions import verbosity_of
from pytest_attn.session.session import AttentionSession
from pytest_attn.workloads.covering import FEW
from pytest_attn.workloads.functions import printable_lines
from pytest_attn.workloads.traits import options_of


def open_json_lines(session: AttentionSession, config: pytest.Config) -> None:
    """Have records written to the .jsonl file of --attn-output, unless another process writes it, and all tests noted."""
    session.manifest = Manifest(config, session.settings, session.machines)
    config.pluginmanager.register(session.manifest, "attn-manifest")
    if session.settings.json is not None and not hasattr(config, "workerinput"):
        session.results.lines = RecordWriter(session.settings.json, session.settings.json_samples)
        session.results.manifest = session.manifest


def print_end(session: AttentionSession, reporter: Any, config: pytest.Config) -> None:
    """Print the summary of the cases, or the listing, and write the outputs."""
    settings, records = session.settings, session.results.records
    if settings.list_only:
        print_listing(session, reporter)
    elif records and not config.getoption("no_summary", False):
        print_summary(session, reporter, verbosity_of(config))
    if session.unjudged_because:
        is_error = settings.unjudged == "error"
        allow = "; --attn-unjudged=warn lets it pass" if is_error else ""
        reporter.write_line(f"{session.unjudged_because}{allow}", red=is_error, yellow=not is_error)
    for closing in () if settings.list_only else dict.fromkeys(settings.asked["closing"].values()):
        resolve_name(closing)(session, config, reporter)
    write_outputs(session, reporter)


def write_outputs(session: AttentionSession, reporter: Any) -> None:
    """Write the files of --attn-output, once; in a job of GitHub Actions also its annotations, and its summary."""
    if session.has_written or hasattr(reporter.config, "workerinput"):
        return
    settings, records = session.settings, session.results.records
    if settings.summary:
        write_whole(session, settings.summary, lambda: markdown_summary(records), reporter)
    if records and os.environ.get("GITHUB_ACTIONS") == "true":
        _write_job(records, reporter)
    if settings.support and records:
        write_support(session, settings.support, reporter)
    if settings.report and not settings.list_only:
        write_report(session, settings.report, reporter)
    session.has_written = True


def _write_job(records: Sequence[Record], reporter: Any) -> None:
    """Write the annotations of a job of GitHub Actions, and its summary."""
    for command in workflow_commands(records):
        reporter.write_line(command)
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with open(path, "a", encoding="utf-8", errors=files.ESCAPED) as file:
                file.write(markdown_summary(records))
        except OSError as error:
            reporter.write_line(f"GITHUB_STEP_SUMMARY: cannot write {path}: {error}", red=True)


class _Stderr:
    """Where lines go if pytest has no terminal reporter."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def write_line(self, text: str, **markup: bool) -> None:
        """Write what is wrong."""
        if markup.get("red"):
            print(text, file=sys.stderr)


def finish_outputs(session: AttentionSession, run: pytest.Session) -> None:
    """Write what is not written yet, as without a terminal, and end with another status than 0 where that fails.

    Where an interrupt has stopped it, only the records are finished.
    """
    reporter = run.config.pluginmanager.get_plugin("terminalreporter") or _Stderr(run.config)
    try:
        with files.uninterrupted():
            if run.exitstatus != pytest.ExitCode.INTERRUPTED:
                write_outputs(session, reporter)
            if lines := session.results.close(int(run.exitstatus)):
                if lines.problem:
                    session.unwritten.append(lines.path)
                said = lines.problem or f"--attn-output: written to {lines.path}"
                reporter.write_line(said, **({"red": True} if lines.problem else {}))
    except KeyboardInterrupt:
        run.exitstatus = pytest.ExitCode.INTERRUPTED
    if session.unwritten and run.exitstatus == pytest.ExitCode.OK:
        run.exitstatus = pytest.ExitCode.TESTS_FAILED


def place_of(session: AttentionSession) -> Callable[[Any], tuple[int, str]]:
    """Return the order of backends in the registry, as a key for records, which arrive from workers in any order."""
    names = session.registrations.registry.names

    def place(record: Any) -> tuple[int, str]:
        base = record["subject"].partition("+")[0]
        return (names.index(base) if base in names else len(names), record["subject"])

    return place


def write_support(session: AttentionSession, path: str, reporter: Any) -> None:
    """Write the .support.md file of --attn-output atomically, in the order of registry and catalog."""
    from pytest_attn.backends.registry import status_of

    machine = session.machines.machine()
    groups = {str(entry.workload.name): entry.group for entry in session.registrations.catalog}
    columns = list(dict.fromkeys(groups.values()))
    by_backend = place_of(session)

    def place(record: Record) -> tuple[int, str, int]:
        group = groups.get(record["name"])
        return (*by_backend(record), columns.index(group) if group else len(columns))

    judged = [r for r in session.results.records if r["question"] == "check"]
    records = sorted(judged, key=place)
    ran = dict.fromkeys(r["subject"] for r in records if r["verdict"] != Verdict.SKIPPED)
    backends = [session.registrations.registry[name] for name in ran if session.registrations.registry.is_known(name)]
    versions = [f"{backend.name} {status_of(backend, machine)[1]}" for backend in backends]
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    title = f"Run on {today} on {machine.name}, torch {machine.torch_version}: {', '.join(versions)}."
    write_whole(session, path, lambda: support_page(records, groups, title), reporter)


def require_report_libraries() -> None:
    """Raise pytest.UsageError where what draws the charts of a report is not installed."""
    from pytest_attn.reports.html.page import INSTALL, missing_libraries

    if missing := missing_libraries():
        raise pytest.UsageError(f"--attn-output=FILE.html: needs {' and '.join(missing)}; {INSTALL}")


def write_report(session: AttentionSession, path: str, reporter: Any) -> None:
    """Write the .html file of --attn-output atomically, with backends in the order of the registry."""
    records = sorted(session.results.records, key=place_of(session))

    def drawn() -> str:
        with session.progress.during(f"drawing {os.path.basename(path)}", ""):
            from pytest_attn.reports.html.page import report_page

            return report_page(records)

    write_whole(session, path, drawn, reporter)


def write_whole(
    session: AttentionSession, path: str, text: Callable[[], str], reporter: Any, flag: str = "--attn-output"
) -> None:
    """Write a file atomically; say that it is written, or why not, and go on: the run will not end with 0."""
    try:
        files.write_atomically(path, text())
        reporter.write_line(f"{flag}: written to {path}")
    except OSError as error:
        session.unwritten.append(path)
        reporter.write_line(f"{flag}: cannot write {path}: {error}", red=True)


def print_summary(session: AttentionSession, reporter: Any, verbosity: int) -> None:
    """Print the profiles that were asked for, then the summary: nothing more under -q unless something is wrong."""
    records, settings, width = session.results.records, session.settings, room(reporter.isatty)
    kernels = session.kind_of_kernels
    if kernels.section:
        print_section(reporter, kernels.summary(records, verbosity > 0), kernels.section)
        return
    if settings.profile:
        print_section(reporter, profile_tables(sorted(records, key=place_of(session)), width), "attention kernels")
    judged = [record for record in records if record["latency"] is None]
    timed = [r for r in records if r["latency"] is not None and not (kernels.are_configurations and split(r["subject"])[1])]
    if _is_shown(judged, is_wrong, verbosity):
        print_section(reporter, summary(judged, verbosity > 0, width, settings.more))
    if _is_shown(timed, is_notable, verbosity):
        print_section(reporter, latency_summary(timed, verbosity > 0, width), "attention latency")
    if verbosity >= 0:
        for line in (*few_words(session), *chosen_words(session), *without_effect(session, reporter.config, bool(timed))):
            reporter.write_line(line)
    number = reporter.config.getoption("durations", None)
    if compilations := [] if number is None else list(slowest_compilations(judged, number)):
        print_section(reporter, compilations, "slowest compilations")


def _is_shown(records: Sequence[Record], matters: Callable[[Record], bool], verbosity: int) -> bool:
    return any(map(matters, records)) if verbosity < 0 else bool(records)


def chosen_words(session: AttentionSession) -> Iterator[str]:
    """Say what of a large suite was chosen, and what would run besides; nothing where nothing was left out."""
    chosen, unchosen = session.collected.chosen, session.collected.unchosen
    if unchosen and not chosen:
        others = count(unchosen, "case")
        yield f"not run: {others} without workloads, which say nothing of what is named; --attn-workloads=all adds them"
    elif unchosen:
        of = f"{chosen:,} of {chosen + unchosen:,} cases"
        yield f"chosen: {of}, which cover what each backend takes; --attn-workloads=all runs all"


#: options that a line names at most
_MOST_OPTIONS = 12


def few_words(session: AttentionSession) -> Iterator[str]:
    """Say of a kernel of one's own that takes few of the workloads which nobody named, what it was not asked."""
    if session.settings.workloads:
        return
    for (test, name), records in _checks_of_own(session).items():
        declined = [one for one in records if one["cause"] == Cause.DECLINED]
        judged = [one for one in records if one["verdict"] != Verdict.SKIPPED]
        if len(judged) < FEW and len(declined) > 2 * FEW:
            options = sorted(_options_in(declined, session) - _options_in(judged, session))
            yield (
                f"few cases     {name or test} took {count(len(judged), 'workload')} of {len(records)}; not asked:"
                f" {some(options, _MOST_OPTIONS)}; Workload(...) in the marker asks what it takes"
            )


def _checks_of_own(session: AttentionSession) -> dict[tuple[str, str], list[Record]]:
    """Return the checks of each test's callable, and of each backend of one's own in it, by both names; "" for a callable."""
    checks = (one for one in session.results.records if one["question"] == "check")
    named = ((one, "" if one["tags"].get("family") == "callable" else one["subject"]) for one in checks)
    is_own = session.registrations.registry.is_own
    return gathered(((function_of(one), name), one) for one, name in named if not name or is_own(name))


def _options_in(records: Iterable[Record], session: AttentionSession) -> frozenset[str]:
    """Return the options of the workloads of some records, as far as the catalog knows these."""
    found: set[str] = set()
    for name in {one["name"] for one in records}:
        with contextlib.suppress(ValueError):
            found.update(*map(options_of, session.registrations.catalog.select(name)))
    return frozenset(found)


def without_effect(session: AttentionSession, config: pytest.Config, has_timed: bool) -> Iterator[str]:
    """Say of options of the command line that no test of the run asks for what they select."""
    collected = session.collected  # by no process that has workers of xdist
    if config.getoption("attn_backends") is not None and collected.tests and not collected.takes_backend:
        yield "--attn-backends: no test here takes attn_backend, so none ran on these backends"
    asked = ["--attn-latency=require"] if config.getoption("attn_latency") == "require" else []
    for flag in [*asked, *session.settings.serial_flags] if not has_timed else []:
        yield f"{flag}: nothing was timed; a test times a kernel with attn.measure(fn)"


def unjudged_because(session: AttentionSession, config: pytest.Config) -> str:
    """Return why this run must not exit 0, as it was to judge, and has judged nothing or not all; "" where it may.

    One that nothing stopped has run all its cases. One that has judged nothing may look like a pass where nobody was to
    judge, and where what is missing is the machine's: a GPU, or a library that nobody has named. A part of a run that was
    divided says nothing of the whole.
    """
    records, collected = session.results.records, session.collected
    if session.kernels.judges_nothing:
        return f"nothing was judged: {session.kernels.judges_nothing}"
    if (lost := collected.due - collected.begun) > 0:
        return f"{lost} of {collected.due} cases never ran, and nothing stopped the run: they were taken out of pytest's list"
    is_part = config.getoption("splits", None) or (config.getoption("num_shards", None) or 1) > 1
    is_whole = not is_part and session.kernels.are_tested and session.worker is None and not session.kernels.are_configurations
    if not is_whole or not records or any(one["verdict"] != Verdict.SKIPPED for one in records):
        return ""
    return _all_skipped_because(session, config)


def _all_skipped_because(session: AttentionSession, config: pytest.Config) -> str:
    """Return why a run that has skipped all its cases must not exit 0; "" where it may."""
    records = session.results.records
    missing = {one["subject"] for one in records if one["cause"] == Cause.NOT_HERE}
    if any(one["cause"] == Cause.DECLINED and one["subject"] not in missing for one in records):
        return "nothing was judged: the kernels declined every case that could run"
    is_named = config.getoption("attn_backends") is not None and {"all", "available"}.isdisjoint(session.settings.backends)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if is_named and all(one["subject"] in missing for one in records) and not (reporter and reporter.stats.get("passed")):
        return "nothing was judged: the backends that --attn-backends names are missing here"
    return ""


def print_section(reporter: Any, lines: Iterable[Line], title: str = "attention") -> None:
    """Print lines below a title."""
    reporter.write_sep("=", title)
    for text, markup in lines:
        reporter.write_line(printable_lines(text), **markup)


def count_runnable(session: AttentionSession, items: list[pytest.Item]) -> None:
    """Count the collected cases that no backend, device or workload stands in the way of, and the others by their reasons."""
    for item in items:
        parameter, marker = parameter_of(item), marker_of(item)
        if parameter is None or marker is None:
            continue
        with contextlib.suppress(Exception):  # one whose checks fail will fail when it runs, and say so then
            reason = unmet_because(item, session) or made_items(item).obstacle(parameter, marker, session)
            session.collected.count(reason, parameter.backend or "any kernel")


def print_listing(session: AttentionSession, reporter: Any) -> None:
    """Print the tables, and how many cases would run."""
    try:
        machine = session.machines.machine()
    except (ValueError, NoTorchError) as error:
        print_section(reporter, [(str(error), {"red": True})])
        return
    collected, registrations = session.collected, session.registrations
    closing = (
        f"{collected.runnable:,} of {collected.listed:,} cases would run on {machine.name}"
        f" ({machine.device}, torch {machine.torch_version}); leave out --attn-list to run them"
    )
    shown = tables(registrations.registry, registrations.catalog, machine)
    print_section(reporter, listing(shown, closing, room(reporter.isatty), collected.obstacles))
    is_verbose = reporter.config.option.verbose > 0
    for line in sorted([*collected.covering, *collected.generated]) if is_verbose else []:
        reporter.write_line(line)
    kernels = count(len(collected.generated), "kernel")
    generated = f"generated: workloads beside the catalog's, for {kernels}" if collected.generated else ""
    for said in filter(None, (*chosen_words(session), generated)):
        reporter.write_line(said if is_verbose else f"{said}; -v lists them")
