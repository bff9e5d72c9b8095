"""What the user asked for: every option once, read from command line, ini file or default, and checked."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest


class Option(NamedTuple):
    """One option `--attn-STEM`, with the ini value `attn_STEM` unless it is a mere action."""

    stem: str
    default: str
    metavar: str
    help: str
    parse: Callable[[str], Any]

    @property
    def flag(self) -> str:
        """The command-line spelling."""
        return f"--attn-{self.stem}"

    @property
    def name(self) -> str:
        """The spelling in Python."""
        return self.stem.replace("-", "_")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in re.split(r"[,\s]+", text.strip()) if name)


def _dtypes(text: str) -> tuple[str, ...]:
    names = _names(text)
    if not names:
        return ()  # every start of pytest comes here: nothing to import
    from pytest_attn.workloads.workload import dtype_name

    return tuple(dtype_name(name) for name in names)


def _device(text: str) -> str:
    if text == "auto":
        return text  # every start of pytest comes here: nothing to import
    from pytest_attn.backends.machine import is_device_name

    if not is_device_name(text):
        raise ValueError(f"must be auto, cpu, cuda, cuda:N, xpu or mps, got {text!r}")
    return text


def _limits(text: str) -> str:
    if text == "default":
        return text  # likewise
    from pytest_attn.correctness.compare import LIMITS

    if text not in LIMITS:
        raise ValueError(f"must be {' or '.join(LIMITS)}, got {text!r}")
    return text


def _seed(text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"must be a whole number >= 0, got {text!r}")
    return int(text)


def _timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"must be a number of seconds >= 0 (0 waits forever), got {text!r}")
    return seconds


def _one_of(*known: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(f"must be {', '.join(known[:-1])} or {known[-1]}, got {text!r}")
        return text

    return parse


def _percent(text: str) -> float | None:
    """Return a share, None for "", which leaves it to the kind of device."""
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%?", text.strip())
    if not match or not 0 < float(match[1]) <= 1000:
        raise ValueError(f"must be a number of percent above 0, such as 5, got {text!r}")
    return float(match[1]) / 100


def _threads(text: str) -> int:
    if not re.fullmatch(r"\d{1,4}", text):
        raise ValueError(f"must be a whole number of threads from 0 (which leaves them as they are) to 9999, got {text!r}")
    return int(text)


def _clock(text: str) -> str:
    if text and text != "max" and not re.fullmatch(r"[1-9]\d*", text):
        raise ValueError(f"must be max or a number of MHz, got {text!r}")
    return text


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "4 GiB", "512MiB" or "2GB"; raise ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)", str(text).strip())
    if not match:
        raise ValueError(f"must be a size such as '4 GiB', got {text!r}")
    prefix = match[2].removesuffix("B")
    base = 1024 if prefix.endswith("i") else 1000
    return int(float(match[1]) * base ** ("KMGT".index(prefix[0]) + 1 if prefix else 0))


class OutputFile(NamedTuple):
    """A file that `--attn-STEM` names and a run writes."""

    suffix: str
    help: str


FILES = {
    "support": OutputFile(".md", "Write which backend passed, refused or failed which group of workloads, as a table"),
    "json": OutputFile(".jsonl", "Write a JSON object per line and judgement, as the run goes"),
    "report": OutputFile(".html", "Write one page that opens offline: verdicts, latencies, errors, roofline, history"),
    "summary": OutputFile(".md", "Write a summary in Markdown, as GitHub Actions gets it by itself"),
}

OPTIONS = (
    Option(
        "backends",
        "available",
        "NAMES",
        "Backends for tests that use attn_backend: all, available, or NAME,NAME; -NAME leaves one out;"
        " NAME+compile, NAME+max_autotune and NAME+graph are variants; hub:REPO, diffusers:NAME, transformers:NAME"
        " and the names of diffusers, transformers and vLLM work too (default: available)",
        _names,
    ),
    Option(
        "workloads",
        "",
        "NAMES",
        "Workloads of the catalog: names, groups or globs, -NAME leaves one out. Narrows what a marker names and"
        " chooses where it names none (default there: smoke, edges and features on a CPU, all on a GPU)",
        _names,
    ),
    Option(
        "dtypes",
        "",
        "NAMES",
        "Dtypes, e.g. bf16,fp16,fp32. Narrows what a marker names and replaces a workload's own (default: its own)",
        _dtypes,
    ),
    Option("device", "auto", "DEVICE", "auto, cpu, cuda, cuda:N, xpu or mps (default: auto, the best there is)", _device),
    Option(
        "limits",
        "default",
        "NAME",
        "Largest z of an element, RMS of a row and of a head: default (8, 4, 1.5) or strict (6, 2, 1 for outputs)",
        _limits,
    ),
    Option("seed", "0", "N", "Seed of the inputs (default: 0)", _seed),
    Option(
        "fuzz",
        "0",
        "N",
        "Also run each marked test on N workloads that Hypothesis draws; a failure shrinks (default: 0)",
        _seed,
    ),
    Option("timeout", "0", "SECONDS", "Stop a callable that takes longer, 0 waits forever (default: 0)", _timeout),
    Option(
        "memory",
        "4GiB",
        "SIZE",
        "Memory for references that backends share; what does not fit is computed again (default: 4GiB)",
        parse_size,
    ),
    Option(
        "latency",
        "auto",
        "MODE",
        "attn.measure: off (check only), auto (time, and hold against a baseline where there is one), require (fail where"
        " there is none, or nothing can be said) (default: auto)",
        _one_of("off", "auto", "require"),
    ),
    Option(
        "max-slowdown",
        "",
        "PERCENT",
        "A slowdown of less never fails a test (default: 2 on a GPU, 10 on a CPU)",
        _percent,
    ),
    Option("baselines", "baselines", "DIR", "Folder of the recorded latencies, from rootdir (default: baselines)", str),
    Option("threads", "0", "N", "Threads of torch on a CPU while it is timed, 0 leaves them (default: 0)", _threads),
    Option(
        "l2", "cold", "STATE", "cold or warm: whether a GPU's L2 cache holds the data (default: cold)", _one_of("cold", "warm")
    ),
    Option(
        "lock-clocks",
        "",
        "MHZ",
        "Lock the GPU's clock while it is timed, max or a number of MHz, and undo it; needs permission (default: not)",
        _clock,
    ),
)


@dataclass(frozen=True)
class Settings:
    """The options of one run, checked. `given` holds those that differ from their default, as text."""

    backends: tuple[str, ...]
    workloads: tuple[str, ...]
    dtypes: tuple[str, ...]
    device: str
    limits: str
    seed: int
    fuzz: int
    timeout: float
    memory: int
    latency: str
    max_slowdown: float | None
    baselines: str
    threads: int
    l2: str
    lock_clocks: str
    list_only: bool
    profile: bool
    cupti: bool
    gpu_per_worker: bool
    mutants: bool
    thorough: bool
    support: str | None
    json: str | None
    json_samples: bool
    report: str | None
    summary: str | None
    update_baselines: str | None
    save_failures: str | None
    rank: bool
    rank_to: str | None
    tune: str | None
    given: dict[str, str]

    @classmethod
    def from_config(cls, config: pytest.Config) -> Settings:
        """Read every option: command line over ini file over default. Raises pytest.UsageError for a bad value."""
        values: dict[str, Any] = {}
        given: dict[str, str] = {}
        for option in OPTIONS:
            text, origin = _text(config, option)
            try:
                values[option.name] = option.parse(text)
            except ValueError as error:
                raise pytest.UsageError(f"{origin}: {error}") from None
            if text != option.default:
                given[option.stem] = text
        actions: dict[str, Any] = {
            "list_only": bool(config.getoption("attn_list")),
            "profile": bool(config.getoption("attn_profile")),
            "cupti": bool(config.getoption("attn_cupti")),
            "gpu_per_worker": bool(config.getoption("attn_gpu_per_worker")),
            "mutants": bool(config.getoption("attn_mutants")),
            "thorough": bool(config.getoption("attn_thorough")),
            "json_samples": bool(config.getoption("attn_json_samples")),
            **{
                stem: _writable_file(f"--attn-{stem}", config.getoption(f"attn_{stem}"), one.suffix)
                for stem, one in FILES.items()
            },
            "update_baselines": _reason(config),
            "save_failures": _failures_folder(config.getoption("attn_save_failures")),
            **_ranking(config, values["latency"]),
        }
        return cls(**values, **actions, given=given)

    def as_options(self) -> str:
        """Return what differs from the defaults, ready to paste; the seed always, as inputs depend on it."""
        chosen = {"tune": self.tune} if self.tune else {"backends": "available"}
        shown = {**chosen, "device": "auto", "seed": "0", **self.given}
        return " ".join(f"--attn-{stem}={shlex.quote(text)}" for stem, text in shown.items())


def add_options(parser: pytest.Parser) -> None:
    """Declare every option and its ini value."""
    group = parser.getgroup("attn", "attention kernels")
    for option in OPTIONS:
        group.addoption(option.flag, dest=f"attn_{option.name}", metavar=option.metavar, default=None, help=option.help)
        parser.addini(f"attn_{option.name}", option.help, type="string", default=option.default)
    for flag, text in (
        ("list", "List backends, what they can do, and workloads; what would run and why the rest would not; run nothing"),
        (
            "profile",
            "Print which kernels each case that is right really launches, with time, memory and share of roofline",
        ),
        ("cupti", "Print beside each p50 what torch's profiler (CUPTI) says of the same call"),
        ("thorough", "attn.check_invariants: all invariants, with more repetitions"),
        ("mutants", "Run the tests with faulty kernels in place of theirs, and print which of these they find"),
        ("json-samples", "Put every sample of each latency into the lines of --attn-json"),
        ("rank", "Print for each workload which backend is fastest and right, and which cannot be told from it"),
        ("gpu-per-worker", "Give each xdist worker a GPU of its own, in the order of CUDA_VISIBLE_DEVICES"),
    ):
        dest = f"attn_{flag.replace('-', '_')}"
        group.addoption(f"--attn-{flag}", dest=dest, action="store_true", default=False, help=text)
    for stem, file in FILES.items():
        metavar = f"FILE{file.suffix}"
        group.addoption(f"--attn-{stem}", dest=f"attn_{stem}", metavar=metavar, default=None, help=file.help)
    group.addoption(
        "--attn-save-failures",
        dest="attn_save_failures",
        metavar="DIR",
        default=None,
        help="Save the tensors of each failing case in a folder of DIR, with a script that judges the kernel again",
    )
    group.addoption(
        "--attn-rank-to",
        dest="attn_rank_to",
        metavar="STEM",
        default=None,
        help="--attn-rank, written to STEM.json, and to STEM.py as tables {workload: backend} that a model can load",
    )
    group.addoption(
        "--attn-tune",
        dest="attn_tune",
        metavar="BACKEND",
        default=None,
        help="Check and time one backend under each of its configurations, in tests that use attn_backend, and rank these",
    )
    group.addoption(
        "--attn-update-baselines",
        dest="attn_update_baselines",
        metavar="REASON",
        default=None,
        help="Record the latencies of all selected cases that are right, in ten fresh processes, and why",
    )


def _reason(config: pytest.Config) -> str | None:
    """Return why baselines are recorded; raise pytest.UsageError for an empty reason, or several processes."""
    text: str | None = config.getoption("attn_update_baselines")
    if text is None:
        return None
    if not text.strip() or text.startswith("-"):
        raise pytest.UsageError(f'--attn-update-baselines: must be a reason such as "first recording", got {text!r}')
    if "::" in text or os.path.exists(text):
        raise pytest.UsageError(f'--attn-update-baselines: must be a reason such as "first recording", got the test {text!r}')
    if config.getoption("attn_latency") == "off":
        raise pytest.UsageError("--attn-update-baselines: needs times; leave out --attn-latency=off")
    if config.getoption("numprocesses", None) or config.getoption("tx", None):
        raise pytest.UsageError("--attn-update-baselines: records in processes of its own, one at a time; leave out -n")
    return text.strip()


def _failures_folder(text: str | None) -> str | None:
    if text is None:
        return None  # every start of pytest comes here: nothing to import
    from pytest_attn.session.saving import failures_folder

    return failures_folder(text)


def _ranking(config: pytest.Config, latency: str) -> dict[str, Any]:
    """Return what is to be ranked and written; raise pytest.UsageError where no times could come of it."""
    stem, tune = config.getoption("attn_rank_to"), config.getoption("attn_tune")
    asked = {"--attn-tune": tune, "--attn-rank-to": stem, "--attn-rank": config.getoption("attn_rank")}
    flag = next((name for name, value in asked.items() if value), None)
    if flag and latency == "off":
        raise pytest.UsageError(f"{flag}: needs times; leave out --attn-latency=off, or say --attn-latency=auto")
    if flag and config.getoption("attn_mutants"):
        raise pytest.UsageError(f"{flag}: needs times, and --attn-mutants takes none; leave one of them out")
    if tune and latency == "require":
        raise pytest.UsageError("--attn-tune: configurations have no baselines; say --attn-latency=auto")
    if tune is not None and (not tune.strip() or "," in tune):
        raise pytest.UsageError(f"--attn-tune: must be the name of one backend, got {tune!r}")
    if tune and config.getoption("attn_backends") is not None:
        raise pytest.UsageError("--attn-tune: chooses the backends itself; leave out --attn-backends")
    if stem is not None:
        path = os.path.realpath(os.path.expanduser(stem))
        is_stem = os.path.basename(stem) and not os.path.isdir(path) and not path.endswith((".json", ".py"))
        if not is_stem or not os.path.isdir(os.path.dirname(path)):
            raise pytest.UsageError(f"--attn-rank-to: must be a name without suffix in a folder that exists, got {stem!r}")
        stem = path
    return {"rank": bool(flag), "rank_to": stem, "tune": tune}


def _writable_file(flag: str, text: str | None, suffix: str) -> str | None:
    """Return the path of a file to write, links followed; raise pytest.UsageError, before anything runs, for any other."""
    if text is None:
        return None
    path = os.path.realpath(os.path.expanduser(text))
    is_file = os.path.isfile(path) if os.path.exists(path) else os.path.isdir(os.path.dirname(path))
    if not is_file or not path.endswith(suffix):
        raise pytest.UsageError(f"{flag}: must be a file NAME{suffix} in a folder that exists, got {text!r}")
    return path


def _text(config: pytest.Config, option: Option) -> tuple[str, str]:
    """Return an option's text and where it comes from."""
    given = config.getoption(f"attn_{option.name}")
    if given is not None:
        return str(given), option.flag
    where = f" ({config.inipath.name})" if config.inipath else ""
    try:
        return str(config.getini(f"attn_{option.name}")), f"attn_{option.name}{where}"
    except (TypeError, ValueError) as error:
        raise pytest.UsageError(f"attn_{option.name}{where}: must be a string: {error}") from None


def choose(tokens: tuple[str, ...], everything: list[str], default: list[str]) -> list[str]:
    """Apply a selection to names: plain tokens choose, -NAME leaves out; only exclusions start from `default`."""
    positive = [token for token in tokens if not token.startswith("-")]
    excluded = {token[1:] for token in tokens if token.startswith("-")}
    chosen = list(dict.fromkeys(positive)) if positive else default
    chosen = [name for token in chosen for name in (everything if token == "all" else [token])]
    return [name for name in dict.fromkeys(chosen) if name not in excluded]
