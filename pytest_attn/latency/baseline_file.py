"""Recordings: the key by which one is kept, the file, and the machine that its times belong to."""

from __future__ import annotations

import functools
import json
import math
import platform
import re
import secrets
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch

from pytest_attn.backends.machine import Machine, installed_version, usable_cores
from pytest_attn.latency.anchors import NOT_BESIDE_ALL
from pytest_attn.latency.statistics import Recording, Run, expected_sensitivity, fit
from pytest_attn.latency.timer import Mode
from pytest_attn.reports.files import write_atomically, written_alone
from pytest_attn.reports.lines import some
from pytest_attn.reports.strict_json import TEXT, array_of, by_name, first_fault, object_of, or_null, parse_json, sealed
from pytest_attn.workloads.functions import printable


@dataclass(frozen=True)
class Identity:
    """The hard keys: times of machines that differ in one of them are never compared.

    kind: "cuda", "cpu", ...; name: the full product name; units: multiprocessors of a GPU, logical cores of a CPU that this
    process may use; memory_gib: of a GPU, rounded, 0 for a CPU; mig: the MIG profile, "" where there is none.
    """

    kind: str
    name: str
    units: int
    memory_gib: int = 0
    mig: str = ""

    @property
    def slug(self) -> str:
        """The name as a file name: "nvidia-h200", "cpu-amd-epyc-9b14-2-cores"."""
        words = re.sub(r"\((?:r|tm)\)|\bcpu\b|\bprocessor\b|@.*", " ", self.name, flags=re.IGNORECASE)
        parts = [words, self.mig] if self.kind != "cpu" else ["cpu", words, f"{self.units} cores"]
        return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-") or "unknown"


def identify(device: torch.device, machine: Machine) -> Identity:
    """Return the identity of a device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        mig = re.search(r"MIG\s+([\w.]+)", properties.name)
        gib = round(properties.total_memory / 2**30)
        return Identity("cuda", properties.name, properties.multi_processor_count, gib, mig[1] if mig else "")
    return Identity(device.type, machine.name, usable_cores() if device.type == "cpu" else 0)


def gpu_of(device: torch.device) -> str:
    """Return what tells a GPU from others of its name: the first digits of its UUID; "" for what is none."""
    found = getattr(torch.cuda.get_device_properties(device), "uuid", "") if device.type == "cuda" else ""
    return str(found).removeprefix("GPU-")[:8]


def conditions_of(device: torch.device, read: dict[str, Any] | None = None) -> dict[str, str]:
    """Return the soft keys: where these differ from a baseline's, times are compared only if the anchors agree.

    read: what NVML says of the device; its driver and power limit are taken from there.
    """
    found: dict[str, object] = {"torch": torch.__version__, "python": ".".join(platform.python_version_tuple()[:2])}
    if device.type == "cuda":
        found |= {"runtime": torch.version.cuda or torch.version.hip, "cudnn": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]
        found |= {"triton": installed_version("triton")}
        found |= {key: (read or {}).get(key) for key in ("driver", "power_limit_w")}
    else:
        blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
        found |= {"blas": blas and blas[1], "system": platform.system()}
        found |= {"interpreter": sys.version}  # whose speed is an anchor
    return {key: str(value) for key, value in sorted(found.items()) if value not in (None, "")}


@dataclass(frozen=True)
class Baseline:
    """Recording of one case.

    shape: the workload's, in full: another shape under the same name is another case. version: of the library. p50, anchors,
    launch (of one call): seconds, one per new process. z: largest element, row and head of the check, which
    `check` describes. memory: bytes. conditions: the soft keys. gpu: which of those of its name, by the first digits of its
    UUID; "" where nobody knows. history: (date, median p50 in seconds, reason) of every recording, the oldest first.
    """

    shape: str
    mode: str
    p50: tuple[float, ...]
    launch: tuple[float, ...]
    anchors: Mapping[str, tuple[float, ...]]
    flops: int
    nbytes: int
    date: str
    reason: str
    protocol: int
    version: str = ""
    memory: int | None = None
    z: tuple[float, float, float] | None = None
    check: str = ""
    conditions: Mapping[str, str] = field(default_factory=dict)
    gpu: str = ""
    history: tuple[tuple[str, float, str], ...] = ()

    @property
    def runs(self) -> list[Run]:
        """One per process."""
        return [
            Run(p50, {name: times[i] for name, times in self.anchors.items()}, launch)
            for i, (p50, launch) in enumerate(zip(self.p50, self.launch, strict=True))
        ]

    def fit(self) -> Recording:
        """Fit the recorded runs."""
        return fit(self.runs, expected_sensitivity(self.flops, self.nbytes, median(self.p50)))

    def to_report(self) -> dict[str, Any]:
        """Return what a report shows, of builtin types."""
        return {
            "p50": list(self.p50),
            "date": self.date,
            "reason": self.reason,
            "history": [list(one) for one in self.history],
        }

    def after(self, older: Baseline | None) -> Baseline:
        """Return this baseline with the history of the one it replaces."""
        what = attrgetter("shape", "protocol", "mode")
        is_same = older is not None and what(older) == what(self)
        kept, reason = older.history if older and is_same else (), self.reason
        if kept:
            reason += f" ({median(self.p50) / kept[-1][1] - 1:+.1%})"
        return replace(self, reason=reason, history=(*kept, (self.date, median(self.p50), reason)))


def case_key(workload: str, subject: str, direction: str, l2: str, layout: str = "bhsd", threads: int | None = None) -> str:
    """Return the key of a case: what distinguishes its time from that of any other."""
    parts = [workload, subject, direction, l2]
    parts += [layout] if layout == "bshd" else []
    parts += [f"{threads} thread{'s' if threads != 1 else ''}"] if threads else []
    return " | ".join(parts)


def recorded_otherwise(key: str, keys: Iterable[str]) -> str:
    """Say with which L2 state, layout and threads the case was recorded, and with which it is timed; "" where with none."""
    case, mine = _parts(key)
    others = [otherwise for same, otherwise in map(_parts, keys) if same == case]
    return f"recorded {' and '.join(others)}, this is {mine}" if others else ""


def recorded_elsewhere(key: str, shape: str, file: BaselineFile | None, folder: Path) -> str:
    """Say under which other ids the same shape is recorded, or whose files there are instead; "" where there is nothing."""
    cases = file.cases if file else {}
    direction = _parts(key)[0][-1:]
    alike = [one for one, case in cases.items() if case.shape == shape and _parts(one)[0][-1:] == direction]
    if file and alike:
        return f"; the same shape is recorded there as {some(alike, 2)}: if it was renamed or moved, rename it in {file.path}"
    others = [path.name for path in sorted(folder.glob("*.json"))] if not cases and folder.is_dir() else []
    return f"; there {'are' if len(others) > 1 else 'is'} {some(others, 3)}, of other machines" if others else ""


def orphans(keys: Iterable[str], root: Path) -> list[str]:
    """Return keys of tests that are gone: their file is, or it has no function of that name. Methods may be inherited."""

    @functools.cache
    def text_of(path: Path) -> str:
        return path.read_text("utf-8", "replace")

    def is_gone(key: str) -> bool:
        if not (test := re.search(r" of ([^|]+?\.py)::(\w+)(::)?", key)):
            return False  # a backend's
        path, name, is_method = root / test[1], test[2], test[3]
        return not path.is_file() or not (is_method or re.search(rf"\b{name}\b", text_of(path)))

    return list(filter(is_gone, keys))


def _parts(key: str) -> tuple[tuple[str, ...], str]:
    """Return the workload, the subject and the direction of a key, and the rest of it."""
    parts = key.split(" | ")
    return tuple(parts[:3]), ", ".join(parts[3:])


SCHEMA = 1


class BaselineError(Exception):
    """A baseline file cannot be read or written; the text names it, says why, and what to do."""


@dataclass
class BaselineFile:
    """The cases of one machine, by key. Times beside other anchors, or of another protocol, are kept but never compared."""

    path: Path
    identity: Identity
    anchors: dict[str, str]
    cases: dict[str, Baseline] = field(default_factory=dict)

    def write(self, recorded: Mapping[str, Baseline]) -> None:
        """Put cases into the file atomically; those that are in it and not named stay as they are on disk.

        Raises BaselineError where the file cannot be written, or has become unreadable in the meantime; it says where else
        the cases are, which took minutes. A case that could not be read again is left out, and named by such an error.
        """
        faults = {key: fault for key, case in recorded.items() if (fault := _fault_in(case, key, self.anchors))}
        whole = {key: case for key, case in recorded.items() if key not in faults}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with written_alone(self.path.parent):
                older = read(self.path).cases if self.path.exists() else self.cases
                self.cases = {**older, **{key: case.after(older.get(key)) for key, case in whole.items()}}
                write_atomically(self.path, self._text())
        except (OSError, BaselineError) as error:
            text = str(error) if isinstance(error, BaselineError) else f"{self.path}: cannot be written: {error}"
            raise BaselineError(f"{text}{self._kept_elsewhere(whole)}") from None
        if faults:
            raise BaselineError(f"{self.path}: written but for what cannot be: {'; '.join(faults.values())}")

    def _kept_elsewhere(self, recorded: Mapping[str, Baseline]) -> str:
        """Write cases to another file, beside this one or among temporary ones; return what says so, "" where none can."""
        alone = replace(self, cases={key: case.after(None) for key, case in recorded.items()})
        name = f"{self.path.stem}.recorded-{secrets.token_hex(4)}.json"
        for folder in (self.path.parent, Path(tempfile.gettempdir())) if recorded else ():
            with suppress(OSError, BaselineError):
                write_atomically(folder / name, alone._text())
                return f"; what was recorded now is in {folder / name}"
        return ""

    def require_writable(self) -> None:
        """Raise BaselineError where the file's folder cannot be written to, before anything is timed for it."""
        folder = self.path.parent
        is_there = folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            if not is_there:  # nor is it, should nothing be recorded
                folder.rmdir()
        except OSError as error:
            raise BaselineError(f"{self.path}: cannot be written: {error}") from None

    def _text(self) -> str:
        """One line per case, keys sorted, so that a diff shows what was recorded anew."""
        head = {"schema": SCHEMA, "machine": asdict(self.identity), "anchors": self.anchors}
        different = dict.fromkeys(tuple(sorted(case.conditions.items())) for _, case in sorted(self.cases.items()))
        names = {found: f"c{number}" for number, found in enumerate(different, 1)}
        head["conditions"] = {name: dict(found) for found, name in names.items()}
        lines = [f" {json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in sorted(head.items())]
        cases = [
            f"  {json.dumps(key)}: {json.dumps(_to_json(case, names), sort_keys=True)}"
            for key, case in sorted(self.cases.items())
        ]
        return "{\n" + ",\n".join(lines) + ',\n "cases": {\n' + ",\n".join(cases) + "\n }\n}\n"


def find(folder: Path, identity: Identity, anchors: dict[str, str], protocol: int) -> BaselineFile:
    """Return the file of a machine, empty where there is none yet.

    Two machines of one name and other hard keys have files of longer names. protocol: of the times to come; a file all of
    whose times are of others may have other anchors. Raises BaselineError for a file that is damaged, or of a newer schema.
    """
    for slug in (identity.slug, f"{identity.slug}-{identity.units}-units-{identity.memory_gib}-gib"):
        path = folder / f"{slug}.json"
        if not path.exists():
            return BaselineFile(path, identity, anchors)
        found = read(path)
        if found.identity == identity:
            if found.anchors != anchors and any(case.protocol == protocol for case in found.cases.values()):
                raise BaselineError(
                    f"{path}: recorded beside other controls ({found.anchors}, this version has {anchors});"
                    " move it away and record anew with --attn-update-baselines REASON"
                )
            return replace(found, anchors=anchors)
    raise BaselineError(f"{path}: belongs to {found.identity}, this machine is {identity}; rename one of them")


def read(path: Path) -> BaselineFile:
    """Read a file; raise BaselineError if it is damaged or of a newer schema. Nothing is changed on disk."""
    try:
        text = path.read_text(encoding="utf-8")
        if conflict := re.search(r"^(<{7}|={7}|>{7})", text, re.MULTILINE):
            raise ValueError(
                f"line {text.count(chr(10), 0, conflict.start()) + 1}: has a merge conflict: keep one line of each case"
            )
        data = parse_json(text)
        schema = data.get("schema") if isinstance(data, dict) else None
        if type(schema) is int and schema > SCHEMA:  # of a newer version, whatever else is in it
            raise BaselineError(
                f"{path}: has schema {schema!r}, this pytest-attn knows up to {SCHEMA}; update pytest-attn, or record into"
                " another folder with --attn-baselines DIR"
            )
        if fault := first_fault(data, FILE) or _inconsistent(data):
            raise ValueError(fault)
    except (OSError, ValueError) as error:
        raise BaselineError(
            f"{path}: is damaged ({printable(str(error), 0)}); restore it from version control, or move it away and"
            " record anew with --attn-update-baselines REASON"
        ) from None
    cases = {key: _from_json(case, data["conditions"]) for key, case in data["cases"].items()}
    return BaselineFile(path, Identity(**data["machine"]), data["anchors"], cases)


def _inconsistent(data: Mapping[str, Any]) -> str:
    """Return where fields of a file that is as described contradict each other, "" where none do."""
    head = data["anchors"].keys()
    newest = max((case["protocol"] for case in data["cases"].values()), default=0)
    for key, case in data["cases"].items():
        field, number, anchors = f"cases.{key}", len(case["p50_ns"]), case["anchors_ns"]
        # of the reference loop there is no time where several processes compute at once, or no core was free for it; only a
        # kernel has attention like it
        is_whole = head - NOT_BESIDE_ALL <= anchors.keys() <= head
        if case["protocol"] == newest and not is_whole:
            expected = ", ".join(head)
            return (
                f"{field}.anchors_ns: found {', '.join(anchors) or 'none'}, expected {expected}, which the file's head names"
            )
        for name, times in {
            "host_ns": case["host_ns"],
            **{f"anchors_ns.{name}": one for name, one in anchors.items()},
        }.items():
            if len(times) != number:
                return f"{field}.{name}: found {len(times)} times, expected {number}, one of each process, as p50_ns has"
        if case["conditions"] not in data["conditions"]:
            found, known = case["conditions"], ", ".join(data["conditions"])
            return f"{field}.conditions: found {found!r}, expected one of those that the file's head names: {known}"
    return ""


_WHOLE = {"type": "integer", "minimum": 0, "maximum": 10**24}
#: nanoseconds: of what takes any time at all, and less than twelve days
_TIME = {"type": "number", "minimum": 0.1, "maximum": 1e15}
_TIMES = {"type": "array", "minItems": 1, "maxItems": 1000, "items": _TIME}
_DATE = {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}", "description": "a date, as 2026-11-22"}
_PAST = {"type": "array", "minItems": 3, "maxItems": 3, "prefixItems": [_DATE, _TIME, TEXT]}
#: description of a case, and of the file, in JSON Schema: for what is read, and for what is written
CASE = sealed(
    object_of(
        {
            **dict.fromkeys(("shape", "reason", "version", "check", "conditions"), TEXT),
            "mode": {"enum": list(get_args(Mode))},
            **dict.fromkeys(("flops", "bytes"), _WHOLE),
            "memory": or_null(_WHOLE),
            "protocol": {"type": "integer", "minimum": 1, "maximum": 10**6},
            "date": _DATE,
            "p50_ns": _TIMES,
            "host_ns": {**_TIMES, "items": {**_TIME, "minimum": 0}},
            "anchors_ns": by_name(_TIMES),
            "z": or_null(array_of({"type": "number", "minimum": 0, "maximum": 1e300}, 3)),
            "history": array_of(_PAST),
        },
        gpu=TEXT,  # which pytest-attn did not write at first
    )
)
FILE = sealed(
    object_of(
        {
            "schema": {"type": "integer", "minimum": 1, "maximum": SCHEMA},
            "machine": sealed(
                object_of({**dict.fromkeys(("kind", "name", "mig"), TEXT), **dict.fromkeys(("units", "memory_gib"), _WHOLE)})
            ),
            "anchors": {**by_name(TEXT), "minProperties": 1},
            "conditions": by_name(by_name(TEXT)),
            "cases": by_name(CASE),
        }
    )
)


#: the fields of a case that its line has as they are
_AS_THEY_ARE = ("shape", "mode", "flops", "date", "reason", "version", "memory", "check", "gpu", "protocol")


def _to_json(case: Baseline, names: Mapping[tuple[tuple[str, str], ...], str]) -> dict[str, Any]:
    return {
        **{name: getattr(case, name) for name in _AS_THEY_ARE},
        "p50_ns": [_nanoseconds(t) for t in case.p50],
        "host_ns": [round(t * 1e9) if math.isfinite(t) else t for t in case.launch],
        "anchors_ns": {name: [_nanoseconds(t) for t in times] for name, times in case.anchors.items()},
        "bytes": case.nbytes,
        "z": [float(f"{z:.4g}") for z in case.z] if case.z else None,
        "conditions": names[tuple(sorted(case.conditions.items()))],
        "history": [[date, _nanoseconds(p50), reason] for date, p50, reason in case.history],
    }


def _fault_in(case: Baseline, key: str, head: Mapping[str, str]) -> str:
    """Return what of a case could not be read again, "" for nothing. head: the anchors of its file."""
    written = _to_json(case, {tuple(sorted(case.conditions.items())): "c1"})
    alone = {"anchors": head, "conditions": {"c1": {}}, "cases": {key: written}}
    return first_fault(alone["cases"], FILE["properties"]["cases"], "cases") or _inconsistent(alone)


def _from_json(case: Mapping[str, Any], conditions: Mapping[str, Mapping[str, str]]) -> Baseline:
    """Return the case of a file that is as described."""
    case = {"gpu": "", **case}
    return Baseline(
        **{name: case[name] for name in _AS_THEY_ARE},
        p50=_seconds(case["p50_ns"]),
        launch=_seconds(case["host_ns"]),
        anchors={name: _seconds(times) for name, times in case["anchors_ns"].items()},
        nbytes=case["bytes"],
        z=tuple(case["z"]) if case["z"] else None,
        conditions=dict(conditions[case["conditions"]]),
        history=tuple((date, p50 * 1e-9, reason) for date, p50, reason in case["history"]),
    )


def _seconds(nanoseconds: Iterable[float]) -> tuple[float, ...]:
    return tuple(t * 1e-9 for t in nanoseconds)


def _nanoseconds(seconds: float) -> float:
    return round(seconds * 1e9, 1)
