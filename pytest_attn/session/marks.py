"""The markers, read into checked records: unknown arguments and values are refused with the known ones named."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import pytest
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from pytest_attn.backends.declaration import Argument, Declaration, argument, arguments_of, checked, described, one_of
from pytest_attn.backends.machine import is_device_name, satisfies
from pytest_attn.seam import added
from pytest_attn.session.kinds import KINDS
from pytest_attn.session.option_types import size
from pytest_attn.workloads.catalog import Catalog
from pytest_attn.workloads.distributions import DISTRIBUTIONS, distribution_names
from pytest_attn.workloads.dtypes import dtype_name
from pytest_attn.workloads.fields import instead_of
from pytest_attn.workloads.functions import describe
from pytest_attn.workloads.parameters import PARAMETERS, asked_gradients
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    from pytest_attn.backends.machine import Machine
    from pytest_attn.backends.registry import Registry


def _quoted(name: str) -> str:
    return f'"{name}"'


@dataclass(frozen=True)
class AttentionMark:
    """`@pytest.mark.attention(...)`; workloads is empty where the run's selection decides."""

    workloads: tuple[Workload, ...] = ()
    backends: tuple[str, ...] | None = argument(
        None, "names for attn_backend; --attn-backends narrows them", unset="the run's selection"
    )
    dtypes: tuple[str, ...] | None = argument(
        None, "replace the dtype of each workload, one item for each; --attn-dtypes narrows them", unset="the workload's"
    )
    declared: Declaration = dataclasses.field(default_factory=Declaration)
    device: str | None = argument(None, '"cpu", "cuda", "cuda:N", "xpu" or "mps"', unset="--attn-device")
    backward: bool = argument(
        False,
        'whether dq, dk and dv are compared as well; a tuple of "q", "k", "v",'
        f" {', '.join(map(_quoted, PARAMETERS))} compares only the gradients that it names",
        one_of(True, False),
    )
    inputs: tuple[str, ...] | None = argument(
        None, f"names of input distributions: {', '.join(map(_quoted, DISTRIBUTIONS))}", unset='("structured", "flat")'
    )
    leaves: tuple[str, ...] = ("q", "k", "v")
    parameters: tuple[str, ...] = ()
    covering: int | None = argument(
        None,
        "2 or 1: where nobody names workloads, a backend runs as few as cover each pair of values that it takes, or each"
        " value; one that compiles as few as cover each value, or one; `--attn-workloads=all` runs all",
        one_of(None, 1, 2),
        unset="all of them",
    )

    def __post_init__(self) -> None:
        checked(self)

    @classmethod
    def from_marker(cls, mark: pytest.Mark, catalog: Catalog, registry: Registry) -> AttentionMark:
        """Check every argument; raise ValueError naming what was found and what was expected."""
        values = _known(mark, [one.name for one in arguments_of_attention()])
        values["workloads"] = tuple(w for argument in mark.args for w in _workloads(argument, catalog))
        if mark.args and not values["workloads"]:
            raise ValueError("attention was given an empty list of workloads; name one, or nothing for the run's selection")
        for name, read in {
            "backends": lambda names: _backends(names, registry),
            "dtypes": lambda dtypes: tuple(map(dtype_name, _as_tuple(dtypes))),
            "inputs": distribution_names,
        }.items():
            if values.get(name) is not None:
                values[name] = read(values[name])
        said = {one.name: values.pop(one.name) for one in arguments_of(Declaration) if one.name in values}
        values["declared"] = Declaration(**said)
        if values.get("backward", False) not in (True, False):
            values["leaves"], values["parameters"] = asked_gradients(values["backward"], values["workloads"])
            values["backward"] = True
        device = values.get("device")
        if device is not None and not is_device_name(str(device)):
            raise ValueError(f"device must be cpu, cuda, cuda:N, xpu or mps, got {device!r}")
        if not values.keys() <= {field.name for field in dataclasses.fields(cls)}:
            raise ValueError(
                f"{' and '.join(sorted(values.keys() & added('items')))} are of two kinds of tests; leave one out"
            )
        return cls(**values | cls.read_more(values, said))

    @classmethod
    def read_more(cls, values: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a subclass makes of the arguments that it adds; raise as `from_marker` does.

        said: what the marker says of the callable.
        """
        return {}

    @property
    def argument(self) -> str:
        """The argument of a guest whose tests these are; "" for none."""
        return ""

    @property
    def invariants(self) -> tuple[str, ...]:
        """The invariants of a guest that are asked beside the default ones."""
        return ()

    @classmethod
    def from_keywords(cls, mark: pytest.Mark, names: Sequence[str], registry: Registry, **defaults: Any) -> AttentionMark:
        """Read another marker, which takes these arguments of `attention` and no workloads; raises as `from_marker` does."""
        values = {**defaults, **_keywords(mark, names)}
        if "backward" in values:
            one_of(True, False)("backward", values["backward"])
        return cls.from_marker(pytest.mark.attention(**values).mark, Catalog(), registry)


def arguments_of_attention() -> tuple[Argument, ...]:
    """Return the arguments of the marker attention, with those that guests add."""
    marks = (AttentionMark, *(resolve_name(items).mark for items in dict.fromkeys(added("items").values())))
    return tuple({one.name: one for mark in marks for one in arguments_of(mark)}.values())


@dataclass(frozen=True)
class RequiresMark:
    """`@pytest.mark.attention_requires(...)`: what the machine must have."""

    backend: str | None = argument(None, 'that can run here, of a version or of any: "flash2", "flash2>=2.7"')
    arch: str | None = argument(None, 'compute capability, ">=8.0,<10.0", or "sm90", "gfx942", "cpu"')
    memory: int | None = argument(None, 'of the device: "40 GiB"')
    gpus: int | None = argument(None, "how many")
    timed: bool = argument(
        False,
        "whether times can be taken: not by workers that share a device; `--attn-latency=require` runs the test",
        one_of(True, False),
    )

    def __post_init__(self) -> None:
        checked(self)

    @classmethod
    def from_marker(cls, mark: pytest.Mark, registry: Registry) -> RequiresMark:
        """Check every argument; raise ValueError naming what was found and what was expected."""
        values = _keywords(mark, [one.name for one in arguments_of(cls)])
        if values.get("backend") is not None:
            registry.require(_split_version(values["backend"])[0])
        if values.get("arch") is not None:
            _architectures(values["arch"])
        if values.get("memory") is not None:
            try:
                values["memory"] = size(values["memory"])
            except ValueError as error:
                raise ValueError(f"memory {error}") from None
        if values.get("gpus") is not None and (not isinstance(values["gpus"], int) or values["gpus"] < 0):
            raise ValueError(f"gpus must be a whole number >= 0, got {values['gpus']!r}")
        return cls(**values)

    def unmet_because(self, machine: Machine, registry: Registry) -> str | None:
        """Say which requirement the machine does not meet, or None."""
        wanted = None if self.arch is None else _architectures(self.arch)
        if isinstance(wanted, SpecifierSet):
            has_arch = machine.capability is not None and wanted.contains(".".join(map(str, machine.capability)))
        else:
            has_arch = wanted in (None, machine.architecture, machine.kind)
        if not has_arch:
            return f"needs arch {self.arch}, this device is {machine.architecture}"
        if self.memory is not None and machine.memory < self.memory:
            return f"needs {self.memory / 2**30:.0f} GiB of memory, this device has {machine.memory / 2**30:.0f} GiB"
        if self.gpus is not None and machine.device_count < self.gpus:
            return f"needs {self.gpus} GPUs, this machine has {machine.device_count}"
        if self.backend is None:
            return None
        name, operator, version = _split_version(self.backend)
        backend = registry[name]
        reason = backend.unavailable_because(machine) or backend.broken_because()
        if reason:
            return f"needs backend {name}: {reason}"
        if version and not satisfies(backend.version(), operator, version):
            return f"needs backend {self.backend}, version {backend.version()} is installed"
        return None


@dataclass(frozen=True)
class MarkerHelp:
    """The words of a marker for `pytest --markers` and docs/reference/markers.md. before: what its arguments begin with."""

    name: str
    summary: str
    arguments: tuple[Argument, ...]
    before: str = ""

    @property
    def signature(self) -> str:
        """The marker with its arguments and their defaults."""
        given = [self.before] if self.before else []
        return f"{self.name}({', '.join([*given, *(f'{one.name}={one.default!r}' for one in self.arguments)])})"

    @property
    def text(self) -> str:
        """The whole, as a line of pytest's ini value `markers` that goes on over several."""
        return f"{self.signature}: {self.summary}.\n{described(self.arguments, width=100)}"


def marker_help() -> tuple[MarkerHelp, ...]:
    """Return the help of each marker."""
    others = (kind.made_items().help() for kind in KINDS.values())
    return (
        MarkerHelp(
            "attention",
            "run the test on these attention workloads (catalog names, Workload objects, lists of both; by default the run's"
            " selection), which --attn-workloads narrows, and on each selected backend if it uses attn_backend",
            arguments_of_attention(),
            before="*workloads",
        ),
        *(one for one in others if one is not None),
        MarkerHelp(
            "attention_requires",
            "skip the test, with the reason, where something that it needs is missing",
            tuple(arguments_of(RequiresMark)),
        ),
    )


def _keywords(mark: pytest.Mark, known: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a marker that takes no others than these keywords."""
    if mark.args:
        raise ValueError(f"{mark.name} takes keyword arguments only, got {mark.args[0]!r}; known: {', '.join(known)}")
    return _known(mark, known)


def _known(mark: pytest.Mark, known: Sequence[str]) -> dict[str, Any]:
    for name in mark.kwargs:
        if name not in known:
            is_of_workload = any(name == one.name for one in dataclasses.fields(Workload))
            hint = instead_of(name, known) or (" Workload(...) takes it;" if is_of_workload else "")
            raise ValueError(f"{mark.name} got an unknown argument {name!r};{hint} known: {', '.join(known)}")
    return dict(mark.kwargs)


def _workloads(argument: object, catalog: Catalog) -> list[Workload]:
    if isinstance(argument, Workload):
        return [argument]
    if isinstance(argument, str):
        return catalog.select(argument)
    if isinstance(argument, list | tuple):
        return [w for one in argument for w in _workloads(one, catalog)]
    found = f"got {describe(argument)} {argument!r}"
    raise ValueError(f"a workload must be a name or a Workload, {found}; say for example Workload(200, heads=2)")


def _backends(given: object, registry: Registry) -> tuple[str, ...]:
    names = _as_tuple(given)
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"backends must be names, got {name!r}")
        registry.require(name)
    return tuple(map(registry.canonical, names))


def _as_tuple(value: object) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple | set) else (value,)


def _split_version(text: str) -> tuple[str, str, str]:
    match = re.fullmatch(r"([^<>=!]+?)\s*(?:(>=|<=|==|<|>)\s*([\d.]+))?", str(text))
    if not match:
        raise ValueError(f"backend must be NAME or NAME>=VERSION, got {text!r}")
    return match[1], match[2] or "", match[3] or ""


def _architectures(text: object) -> SpecifierSet | str:
    """Return a specifier of compute capabilities, or the name of an architecture. Raises ValueError for anything else."""
    if isinstance(text, str) and re.fullmatch(r"cpu|xpu|mps|gfx\w+|sm\d+", text):
        return text
    with suppress(InvalidSpecifier):
        if found := SpecifierSet(str(text)):
            return found
    raise ValueError(f"arch must be like '>=8.0,<10.0', 'sm90', 'gfx942' or 'cpu', got {text!r}")
