"""An option, declared once as a field of `Settings`: its flag, what its text may be, its place in the help."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from pytest_attn.seam import guests

#: the longest suffix first -> the field of `Settings` that names such a file
SUFFIXES = {".support.md": "support", ".jsonl": "json", ".html": "report", ".md": "summary"}


def kind_of(path: str) -> str:
    """Return which output a file is. Raises ValueError for another suffix."""
    for suffix, name in SUFFIXES.items():
        if path.endswith(suffix):
            return name
    raise ValueError(f"must end in {', '.join(list(SUFFIXES)[1:])} or {next(iter(SUFFIXES))}, got {path!r}")


def by_kind(paths: Sequence[str]) -> dict[str, str]:
    """Return the files of --attn-output by the field that each stands for; ValueError where a kind is asked for twice."""
    found: dict[str, str] = {}
    for path in paths:
        name = kind_of(path)
        if other := found.get(name):
            raise ValueError(f"{path!r} and {other!r} are the same kind of output; name one file of each suffix")
        found[name] = path
    return found


class Option(NamedTuple):
    """One option of the command line, `--attn-STEM`."""

    name: str  # of its field in `Settings`
    stem: str
    help: str
    default: str | None = None  # its text where it has an ini value of the same name
    metavar: str | None = None  # what stands for its value in the help, None for a switch
    parse: Callable[[str], Any] = str  # its text -> the field's value; a ValueError's text continues "--attn-STEM: "
    in_child: bool = True  # whether the new processes of a run are given it, too
    is_repeatable: bool = False  # whether it may be given several times; its field is a tuple
    alone: str | None = None  # its text where it is given without a value, None where it needs one
    is_ini_only: bool = False  # whether it is an ini value alone, which -o sets for one run
    instead_of_0: str = ""  # what is said of 0, which turns off only what an ini file has turned on; "" where it is a value
    is_serial: bool = False  # whether it times in processes of its own, so that workers of xdist would be beside them
    group: str = ""  # of a guest's: the name of the group in the help in which it stands
    short: str = ""  # of a guest's: its text there

    @property
    def flag(self) -> str:
        """The command-line spelling."""
        return f"--attn-{self.stem}"

    @property
    def dest(self) -> str:
        """The spelling in ini files, and in pytest's own namespace."""
        return f"attn_{self.stem.replace('-', '_')}"

    @property
    def is_switch(self) -> bool:
        """True where it is given without a value."""
        return self.metavar is None

    def typed(self, text: str) -> str:
        """Return what a user types to give it this text, none for ""."""
        from pytest_attn.workloads.functions import shell_word  # not at each start of pytest

        value = f"={shell_word(text)}" if text else ""
        return f"-o {self.dest}{value}" if self.is_ini_only else f"{self.flag}{value}"


def option(help: str, default: str, metavar: str, parse: Callable[[str], Any] = str, **more: Any) -> Any:  # noqa: A002
    """Declare an option with an ini value; its default is text, as a user would type it. more: as `Option` has it."""
    return _declared(help=help, default=default, metavar=metavar, parse=parse, **more)


def action(
    help: str,  # noqa: A002
    metavar: str,
    parse: Callable[[str], Any] = str,
    in_child: bool = False,
    alone: str | None = None,
    **more: Any,
) -> Any:
    """Declare an option of the command line alone; its field is None where it is not given. more: as `Option` has it."""
    return _declared(help=help, metavar=metavar, parse=parse, in_child=in_child, alone=alone, **more)


def switch(help: str, stem: str = "", in_child: bool = True, **more: Any) -> Any:  # noqa: A002
    """Declare an option without a value; its field is a bool. more: as `Option` has it."""
    return _declared(help=help, stem=stem, in_child=in_child, **more)


def _declared(**told: Any) -> Any:
    return field(metadata={"option": told})


def declared_options(settings: type) -> Iterator[Option]:
    """Yield the options that are declared in a dataclass, in their order."""
    for one in fields(settings):
        if "option" in one.metadata:
            yield _option(one.name, one)


def options_of_guests() -> Iterator[Option]:
    """Yield the options that guests declare."""
    for guest in guests():
        yield from (_option(name, declared) for name, declared in guest.options.items())


def _option(name: str, declared: Any) -> Option:
    told = dict(declared.metadata["option"])
    stem = told.pop("stem", "") or name.replace("_", "-")
    return Option(name, stem, **told)


# -- what their texts may be ---------------------------------------------------------------------------------------------


def names(text: str) -> tuple[str, ...]:
    """Return names that commas or spaces separate."""
    return tuple(name for name in re.split(r"[,\s]+", text.strip()) if name)


def dtypes(text: str) -> tuple[str, ...]:
    """Return dtypes by their full names."""
    if not names(text):
        return ()  # runs at every start of pytest: keep it free of imports
    from pytest_attn.workloads.dtypes import dtype_name

    return tuple(dtype_name(name) for name in names(text))


def device(text: str) -> str:
    """Return the name of a device, or "auto"."""
    if text == "auto":
        return text  # import-free, too
    from pytest_attn.backends.machine import is_device_name

    if not is_device_name(text):
        raise ValueError(f"must be auto, cpu, cuda, cuda:N, xpu or mps, got {text!r}")
    return text


def limits(text: str) -> str:
    """Return the name of a set of limits."""
    if text == "default":
        return text  # import-free, too
    from pytest_attn.correctness.limits import LIMITS

    if text not in LIMITS:
        raise ValueError(f"must be {' or '.join(LIMITS)}, got {text!r}")
    return text


def whole_number(text: str) -> int:
    """Return a number >= 0."""
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"must be a whole number >= 0, got {text!r}")
    return int(text)


def whole_numbers(text: str) -> tuple[int, ...]:
    """Return numbers >= 0."""
    return tuple(map(whole_number, names(text)))


#: what --attn-seed calls a seed that nobody has chosen
RANDOM = "random"


def random_seed() -> str:
    """Return a seed that nobody can know before, from 1 to 2^32, as text."""
    return str(int.from_bytes(os.urandom(4), "big") + 1)


def seed(text: str) -> int:
    """Return the seed of a run."""
    try:
        return whole_number(text)
    except ValueError as error:
        raise ValueError(str(error).replace(">= 0", f">= 0, or {RANDOM}")) from None


def seconds(text: str) -> float:
    """Return a time limit, 0 for none."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise ValueError(f"must be a number of seconds >= 0 (0 waits forever), got {text!r}")
    return found


def one_of(*known: str) -> Callable[[str], str]:
    """Return a parser of these words."""

    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(f"must be {', '.join(known[:-1])} or {known[-1]}, got {text!r}")
        return text

    return parse


def yes_or_no(text: str) -> bool:
    """Return whether a text says yes."""
    return one_of("yes", "no")(text) == "yes"


def percent(text: str) -> float | None:
    """Return a share, None for "", which leaves it to the kind of device."""
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%?", text.strip())
    if not match or not 0 < float(match[1]) <= 1000:
        raise ValueError(f"must be a number of percent above 0, such as 5, got {text!r}")
    return float(match[1]) / 100


def threads(text: str) -> int:
    """Return a number of threads, 0 to leave them as they are."""
    if not re.fullmatch(r"\d{1,4}", text):
        raise ValueError(f"must be a whole number of threads from 0 (which leaves them as they are) to 9999, got {text!r}")
    return int(text)


def clock(text: str) -> str:
    """Return "max", a number of MHz as text, or "" for no locked clock."""
    if text and text != "max" and not re.fullmatch(r"[1-9]\d*", text):
        raise ValueError(f"must be max or a number of MHz, got {text!r}")
    return text


def size(text: str) -> int:
    """Return the bytes of a size such as "4 GiB", "512MiB" or "2GB"; raise ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)", str(text).strip())
    if not match:
        raise ValueError(f"must be a size such as '4 GiB', got {text!r}")
    prefix = match[2].removesuffix("B")
    base = 1024 if prefix.endswith("i") else 1000
    return int(float(match[1]) * base ** ("KMGT".index(prefix[0]) + 1 if prefix else 0))


def recording_reason(text: str) -> str:
    """Return why baselines are recorded; what looks like a test or an option was meant as one."""
    if not text.strip() or text.startswith("-"):
        raise ValueError(f'must be followed by a reason, as in --attn-update-baselines="first recording", got {text!r}')
    if "::" in text or os.path.exists(text):
        raise ValueError(f'must be a reason such as "first recording", got the test {text!r}')
    return text.strip()


def output_file(text: str) -> str:
    """Return the path of a file to write, links followed; refused before anything runs."""
    kind_of(text)
    path = os.path.realpath(os.path.expanduser(text))
    is_file = os.path.isfile(path) if os.path.exists(path) else os.path.isdir(os.path.dirname(path))
    if not is_file:
        raise ValueError(f"must be a file NAME in a folder that exists, got {text!r}")
    return writable(path, path if path.endswith(".jsonl") and os.path.exists(path) else os.path.dirname(path))


def writable(path: str, changed: str) -> str:
    """Return a path; changed: the file or folder that is written to for it."""
    if not os.access(changed, os.W_OK):
        raise ValueError(f"cannot write {path}: permission denied")
    return path


@dataclass(frozen=True)
class OptionGroup:
    """A group of options by the names of their fields in `Settings`."""

    name: str
    title: str
    shown: Mapping[str, str]  # the short text of each that `pytest --help` lists
    rarely: tuple[str, ...] = ()  # those that it leaves to ini files and the reference page; no message names them

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, those that are shown first."""
        return (*self.shown, *self.rarely)


GROUPS = (
    OptionGroup(
        "run",
        "what to run",
        {
            "backends": "all, available, NAME,NAME, -NAME; NAME+compile",
            "workloads": "names, groups or globs of the catalog; -NAME",
            "list_only": "list backends, workloads and cases; run nothing",
        },
    ),
    OptionGroup(
        "on",
        "on what",
        {
            "device": "auto, cpu, cuda, cuda:N, xpu or mps",
            "dtypes": "such as bf16,fp16,fp32",
            "seed": "of the inputs; random draws one",
            "gpu_per_worker": "one GPU for each xdist worker",
            "rows": "of long workloads, compared in any case",
        },
        ("memory",),
    ),
    OptionGroup(
        "judge",
        "what to judge",
        {
            "thorough": "all invariants, with more repetitions",
            "profile": "which kernels each right case launches",
            "declines": "skip or fail what a kernel declines",
            "unjudged": "fail or warn where a run judged nothing",
        },
        ("limits",),
    ),
    OptionGroup(
        "wait",
        "how long to wait",
        {
            "timeout": "stop a callable that takes longer",
            "diagnosis_timeout": "of the search for what a failure suggests",
        },
    ),
    OptionGroup(
        "latency",
        "latency",
        {
            "latency": "off, auto or require (a missing baseline fails)",
            "update_baselines": "record, in ten new processes, and why",
            "max_slowdown": "below this no slowdown fails",
            "lock_clocks": "hold a GPU's clock while it is timed",
        },
        ("threads", "fresh", "l2", "cupti"),
    ),
    OptionGroup(
        "outputs",
        "outputs",
        {
            "outputs": "NAME.jsonl, .html, .md or .support.md; repeatable",
            "baselines": "the folder of recorded times",
        },
        ("json_samples",),
    ),
)
