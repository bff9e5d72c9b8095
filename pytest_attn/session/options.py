"""What the user asked for: every option, declared here and nowhere else, read from command line, ini file or default."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pytest

from pytest_attn.processes.worker import Worker
from pytest_attn.seam import added, each
from pytest_attn.session import option_types
from pytest_attn.session.option_types import (
    GROUPS,
    Option,
    OptionGroup,
    action,
    by_kind,
    declared_options,
    option,
    options_of_guests,
    switch,
)


@dataclass(frozen=True)
class Settings:
    """The options of one run, checked. `given` holds those that differ from their default, as text."""

    backends: tuple[str, ...] = option(
        "Backends for tests that use attn_backend: all, available, or NAME,NAME; -NAME leaves one out."
        " NAME+compile, NAME+max_autotune and NAME+graph are variants. hub:REPO, diffusers:NAME, transformers:NAME"
        " and the names of diffusers, transformers and vLLM work too (default: available)",
        "available",
        "NAMES",
        option_types.names,
    )
    workloads: tuple[str, ...] = option(
        "Workloads of the catalog: names, groups or globs; -NAME leaves one out. Narrows what a marker names, and"
        " chooses for markers that name none (default for these: smoke, edges and features on a CPU, all on a GPU)",
        "",
        "NAMES",
        option_types.names,
    )
    dtypes: tuple[str, ...] = option(
        "Dtypes, e.g. bf16,fp16,fp32. Narrows what a marker names, and replaces a workload's own (default: its own)",
        "",
        "NAMES",
        option_types.dtypes,
    )
    device: str = option(
        "auto, cpu, cuda, cuda:N, xpu or mps (default: auto, the best there is)", "auto", "DEVICE", option_types.device
    )
    limits: str = option(
        "Largest z of an element, RMS of a row and of a head: default (8, 4, 1.5) or strict (6, 2, 1 for outputs)",
        "default",
        "NAME",
        option_types.limits,
    )
    seed: int = option(
        "Seed of the inputs; random draws one, and the header and the commands that repeat a case name it (default: 0)",
        "0",
        "N",
        option_types.seed,
    )
    rows: tuple[int, ...] = option(
        "Rows and keys of long workloads to compare in any case; a failure that may not repeat names them (default: none)",
        "",
        "N,N",
        option_types.whole_numbers,
    )
    timeout: float = option(
        "Stop a callable that takes longer; 0 waits forever (default: 0)", "0", "SECONDS", option_types.seconds
    )
    diagnosis_timeout: float = option(
        "Seconds to look for an explanation of a wrong result; a line says what was left out; 0 has no limit (default: 60)",
        "60",
        "SECONDS",
        option_types.seconds,
    )
    memory: int = option(
        "Memory of a device for references that backends share; those that do not fit are computed again (default: 4GiB)",
        "4GiB",
        "SIZE",
        option_types.size,
        is_ini_only=True,
    )
    latency: str = option(
        "attn.measure: off (check only), auto (time, and compare with a baseline if there is one), require (also fail if"
        " there is none, or the comparison is inconclusive) (default: auto)",
        "auto",
        "MODE",
        option_types.one_of("off", "auto", "require"),
    )
    declines: str = option(
        "What to do with a case that the kernel under test declines, by NotImplementedError or by its capabilities: skip or"
        " fail (default: skip)",
        "skip",
        "ACTION",
        option_types.one_of("skip", "fail"),
    )
    unjudged: str = option(
        "What to do with a marked test that passes without judging anything, and with a run that lost cases, or judged none"
        " because kernels declined or a named backend is missing: error, warn or ignore (default: error)",
        "error",
        "ACTION",
        option_types.one_of("error", "warn", "ignore"),
    )
    max_slowdown: float | None = option(
        "A smaller slowdown never fails a test (default: 2 on a GPU, 10 on a CPU)", "", "PERCENT", option_types.percent
    )
    baselines: str = option("Folder of the recorded latencies, from rootdir (default: baselines)", "baselines", "DIR")
    threads: int = option(
        "Threads of torch while a CPU is timed; 0 leaves their number (default: 0)",
        "0",
        "N",
        option_types.threads,
        instead_of_0="must be a number of threads to time with, as --attn-threads=1",
    )
    l2: str = option(
        "cold or warm: whether a GPU's L2 cache holds the data (default: cold)",
        "cold",
        "STATE",
        option_types.one_of("cold", "warm"),
        is_ini_only=True,
    )
    fresh: str = option(
        "How the new processes start that confirm and record a GPU's times: forked (on Linux, from a server that has"
        " imported torch) or started (slower) (default: forked)",
        "forked",
        "HOW",
        option_types.one_of("started", "forked"),
        is_ini_only=True,
    )
    lock_clocks: str = option(
        "Lock the GPU's clock while it is timed, to max or a number of MHz; needs permission (default: not)",
        "",
        "MHZ",
        option_types.clock,
    )
    list_only: bool = switch(
        "List backends and what they support, workloads, what would run and why the rest would not; run nothing", "list"
    )
    profile: bool = switch(
        "Print the kernels that each case really launches if it is right, with time, memory and share of roofline",
        in_child=False,
    )
    cupti: bool = option(
        "yes or no: whether to print beside each p50 the time of the same call by torch's profiler, CUPTI (default: no)",
        "no",
        "WHETHER",
        option_types.yes_or_no,
        is_ini_only=True,
    )
    thorough: bool = switch("attn.check_invariants: all invariants, with more repetitions")
    json_samples: bool = switch("Put every sample of each latency into the lines of --attn-output=FILE.jsonl", in_child=False)
    gpu_per_worker: bool = switch(
        "Give each xdist worker a GPU of its own, in the order of CUDA_VISIBLE_DEVICES", in_child=False
    )
    outputs: tuple[str, ...] = action(
        "Write a file; its suffix says which. May be given several times. .jsonl: one judgment per line. .html: one page that"
        " opens offline. .support.md: a table of backends and workloads. Any other .md: a summary",
        "FILE",
        option_types.output_file,
        stem="output",
        is_repeatable=True,
    )
    update_baselines: str | None = action(
        "Record the latencies of all selected cases that are right, in ten new processes, with this reason",
        "REASON",
        option_types.recording_reason,
        alone="",
        is_serial=True,
    )
    given: dict[str, str] = field(default_factory=dict)
    #: the options that guests declare, by their names
    more: Mapping[str, Any] = field(default_factory=dict)
    #: the files of --attn-output, by what each is
    json: str | None = None
    report: str | None = None
    summary: str | None = None
    support: str | None = None

    @classmethod
    def from_config(cls, config: pytest.Config) -> Settings:
        """Read every option: command line over ini file over default. Raises pytest.UsageError for a bad value."""
        values: dict[str, Any] = {}
        given: dict[str, str] = {}
        for one in all_options():
            values[one.name], text = _read(config, one)
            if text is not None:
                given[one.stem] = text
        try:
            values |= by_kind(values.get("outputs", ()))
        except ValueError as error:
            raise pytest.UsageError(f"--attn-output: {error}") from None
        more = {one.name: values.pop(one.name) for one in options_of_guests()}
        functions = next((more[name] for name in added("elsewhere") if more[name]), "")
        if functions and "backends" not in given:
            values["backends"] = option_types.names(functions)
            given["backends"] = functions
        settings = cls(**values, given=given, more=more)
        settings._refuse_contradictions(config)
        return settings

    def as_options(self) -> str:
        """Return what differs from the defaults, ready to paste, without the files that are written; "" where nothing does."""
        shown = []
        for one in all_options():
            found = self.more[one.name] if one.name in self.more else getattr(self, one.name)
            value = self.given.get(one.stem) if one.default is not None else found
            is_told = one.in_child or one.default is not None
            if one.is_switch and value:
                shown.append(one.flag)
            elif not one.is_switch and is_told and (value or (value == one.alone and value is not None)):
                shown.append(one.typed(value))
        return " ".join(shown)

    @cached_property
    def asked(self) -> dict[str, dict[str, str]]:
        """What guests name in fields of `Guest` for options that were given: by the field, then by the option."""
        given = [name for name, value in self.more.items() if value not in (None, False)]
        fields = {what: added(what) for what in ("cases", "closing", "elsewhere", "failing", "kernels")}
        return {what: {name: named[name] for name in given if name in named} for what, named in fields.items()}

    @property
    def serial_flags(self) -> list[str]:
        """The options that were given and time in processes of their own."""
        values = {**vars(self), **self.more}
        return [one.flag for one in all_options() if one.is_serial and values[one.name] is not None]

    def _refuse_contradictions(self, config: pytest.Config) -> None:
        """Raise pytest.UsageError for options that do not go together."""
        for contradiction in each("contradiction"):
            if said := contradiction(self):
                raise pytest.UsageError(said)
        for flag in self.serial_flags:
            if (other := self.serial_flags[0]) != flag:
                raise pytest.UsageError(f"{flag}: does not go with {other}; leave one of them out")
            if self.latency == "off":
                raise pytest.UsageError(f"{flag}: needs times; leave out --attn-latency=off")
            if config.getoption("numprocesses", None) or config.getoption("tx", None):
                raise pytest.UsageError(f"{flag}: times in processes of its own, one at a time; leave out -n")


def all_options() -> list[Option]:
    """Return all options: those of `Settings`, and those that guests declare."""
    return [*declared_options(Settings), *options_of_guests()]


def all_groups() -> list[OptionGroup]:
    """Return the groups of the help, with the options that guests declare."""
    of_guests = [*options_of_guests()]
    added = {group.name: {one.name: one.short for one in of_guests if one.group == group.name} for group in GROUPS}
    return [replace(group, shown={**group.shown, **added[group.name]}) for group in GROUPS]


def add_options(parser: pytest.Parser) -> None:
    """Declare every option, and its ini value where it has one."""
    declared = {one.name: one for one in all_options()}
    groups = all_groups()
    grouped = {name for group in groups for name in group.names}
    others = OptionGroup("others", "others", {name: one.help for name, one in declared.items() if name not in grouped})
    for group in (*groups, *([others] if others.shown else [])):
        shown = parser.getgroup(f"attn-{group.name}", f"attention kernels: {group.title}")
        for name in filter(declared.__contains__, group.names):
            one, text = declared[name], group.shown.get(name, argparse.SUPPRESS)
            if one.is_ini_only:
                parser.addini(one.dest, one.help, type="string", default=one.default)
                continue
            if one.is_switch:
                shown.addoption(one.flag, dest=one.dest, action="store_true", default=False, help=text)
                continue
            how: dict[str, Any] = {"action": "append" if one.is_repeatable else "store"}
            if one.alone is not None:
                how |= {"nargs": "?", "const": one.alone}
            shown.addoption(one.flag, dest=one.dest, metavar=one.metavar, default=None, help=text, **how)
            if one.default is not None:
                parser.addini(one.dest, one.help, type="string", default=one.default)


def require_known(args: Sequence[str], parser: pytest.Parser) -> None:
    """Raise pytest.UsageError for an option that begins with --attn- and is declared by nobody, be it a conftest."""
    known = [one.flag for one in all_options() if not one.is_ini_only]
    typed = [name for name in (one.partition("=")[0] for one in args) if name.startswith("--attn-") and name not in known]
    left_over = parser.parse_known_and_unknown_args(args, argparse.Namespace())[1] if typed else []
    if unknown := next((one for one in left_over if one.partition("=")[0] in typed), None):
        name = unknown.partition("=")[0]
        raise pytest.UsageError(f"{name}: no such option; {_instead_of(name, known)}")


def _instead_of(unknown: str, known: Sequence[str]) -> str:
    if unknown in LEFT:
        return f"say {LEFT[unknown]}"
    from difflib import get_close_matches  # few runs come here

    alike = get_close_matches(unknown.removeprefix("--attn-"), [one.removeprefix("--attn-") for one in known], n=2)
    return f"did you mean {' or '.join(f'--attn-{stem}' for stem in alike)}?" if alike else "pytest --help lists all"


#: options that there were -> what is typed in their place
LEFT = {
    "--attn-json": "--attn-output=FILE.jsonl",
    "--attn-report": "--attn-output=FILE.html",
    "--attn-summary": "--attn-output=FILE.md",
    "--attn-support": "--attn-output=FILE.support.md",
    "--attn-cupti": "-o attn_cupti=yes",
    "--attn-fresh": "-o attn_fresh=started",
    "--attn-l2": "-o attn_l2=warm",
    "--attn-memory": "-o attn_memory=SIZE",
}


def _read(config: pytest.Config, one: Option) -> tuple[Any, str | None]:
    """Return the value of an option, and its text where that differs from its default. Raises pytest.UsageError."""
    if one.is_switch:
        return bool(config.getoption(one.dest)), None
    text, origin = _text(config, one)
    if one.name == "seed" and text == option_types.RANDOM:
        drawn = getattr(config, "workerinput", {}).get("attn_seed")  # by xdist's controller
        text = config.option.attn_seed = drawn or option_types.random_seed()
    try:
        value = tuple(map(one.parse, text or ())) if one.is_repeatable else None if text is None else one.parse(text)
    except ValueError as error:
        raise pytest.UsageError(f"{origin}: {error}") from None
    if one.default is not None and text != one.default:
        return value, str(text)
    is_idle = origin == one.flag and one.instead_of_0 and config.getini(one.dest) == text
    if is_idle and Worker.of_this_process() is None:  # new processes are handed all numbers
        raise pytest.UsageError(f"{origin}: {one.instead_of_0}, got {text}; leave it out, or say a number")
    return value, None


def _text(config: pytest.Config, one: Option) -> tuple[Any, str]:
    """Return an option's text, or all of its texts, None where it has none, and where it comes from."""
    given = config.getoption(one.dest, None)
    if given is not None or one.default is None:
        return given, one.flag
    where = f" ({config.inipath.name})" if config.inipath else ""
    try:
        return str(config.getini(one.dest)), f"{one.dest}{where}"
    except (TypeError, ValueError) as error:
        raise pytest.UsageError(f"{one.dest}{where}: must be a string: {error}") from None
