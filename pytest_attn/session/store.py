"""What one pytest run knows: settings, registered backends and workloads, the device, shared references, records."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_attn.session.settings import Settings, choose

if TYPE_CHECKING:
    from collections import Counter

    import torch

    from pytest_attn.backends.backend import Backend
    from pytest_attn.backends.machine import Machine
    from pytest_attn.backends.registry import Registry
    from pytest_attn.correctness.question import ReferenceCache
    from pytest_attn.session.deadline import Deadline
    from pytest_attn.session.mutation import Mutation
    from pytest_attn.session.progress import Progress
    from pytest_attn.workloads.catalog import Catalog

MARKERS = (
    "attention(*workloads, backends=None, dtypes=None, layout='bhsd', device=None, backward=False, inputs=None,"
    " precision='flash', returns_lse=False): run the test on these attention workloads (catalog names or Workload objects),"
    " and on each selected backend if it uses attn_backend. layout: 'bhsd' (torch) or 'bshd' (flash-attn), of the tensors that"
    " fn takes and returns; backward: gradients too; inputs: names of distributions ('structured', 'flat', 'randn', 'peaky',"
    " 'flux', 'outlier', 'onehot', 'large'); precision: where fn rounds ('flash', 'eager', ...); returns_lse: fn returns"
    " (out, lse)",
    "attention_requires(backend=None, arch=None, memory=None, gpus=None): skip the test, with the reason, where a backend"
    " ('flash2>=2.7'), a compute capability ('>=8.0,<10.0', 'gfx942', 'cpu'), device memory ('40 GiB') or a number of GPUs"
    " is missing",
)
FIXTURES = frozenset(
    ("attn", "attn_backend", "attn_workload", "attn_device", "qkv", "attn_reference", "assert_attention_close")
)
#: groups that a test without named workloads runs: on a CPU the small ones, on a GPU the whole catalog
CPU_GROUPS = ("smoke", "edges", "features")


class NoTorchError(Exception):
    """torch is missing or cannot be imported."""


class AttentionSession:
    """The state of one run.

    Every start of pytest makes one, so it holds nothing yet: backends and workloads are registered when a test first
    needs them, and torch is imported when a device is first asked for.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.settings = Settings.from_config(config)
        self.records: list[dict[str, Any]] = []
        self.cases = self.runnable = 0
        self.obstacles: dict[str, Counter[str]] = {}  # under --attn-list: why the others would not run, by backend
        self.selected = 0  # items with a case, after collection
        self.latencies: dict[str, Any] = {}  # what session/latency.py knows of each device
        self.mutants: list[dict[str, Any]] = []  # what became of each faulty kernel in each case
        self.is_crowded = False  # a CPU on which fresh processes were disturbed as well, when last asked
        self.pending: list[Any] = []  # cases whose baselines are recorded at the end
        self.recorded: dict[str, Any] = {}  # and those that were
        self.lost = ""  # which test left the CUDA context of this process unusable
        self.rootpath = config.rootpath
        self.has_attention_tests = False
        self._devices: dict[str, torch.device] = {}
        self._machines: dict[str, Machine] = {}
        self._versions: dict[str, str] = {}
        self._references: ReferenceCache | None = None
        self._deadline: Deadline | None = None
        if self.settings.timeout:
            self._make_deadline()  # now, while stderr is not captured yet

    @cached_property
    def registry(self) -> Registry:
        """The backends, with those of conftests; later conftests add theirs when pytest loads them."""
        from pytest_attn.backends.registry import Registry

        registry = Registry()
        _call_conftests(self._config.hook.pytest_attn_backends, registry=registry)
        return registry

    @cached_property
    def catalog(self) -> Catalog:
        """The workloads, likewise."""
        from pytest_attn.workloads.catalog import builtin_catalog

        catalog = builtin_catalog()
        _call_conftests(self._config.hook.pytest_attn_workloads, catalog=catalog)
        return catalog

    @cached_property
    def mutation(self) -> Mutation:
        """The faulty kernels of --attn-mutants."""
        from pytest_attn.session.mutation import Mutation

        return Mutation()

    @cached_property
    def progress(self) -> Progress:
        """What a terminal shows while something takes long; first asked for while output is not captured."""
        from pytest_attn.session.progress import Progress

        return Progress(self._config)

    def backend_named(self, name: str) -> Backend:
        """Return a registered backend, or under --attn-mutants a faulty kernel."""
        return self.mutation.backend(name) if self.settings.mutants else self.registry[name]

    def version_of(self, name: str) -> str:
        """Return the version of a backend's library, asked for once; "?" where the backend cannot say."""
        if name not in self._versions:
            try:
                self._versions[name] = self.registry[name].version()
            except Exception:  # of a conftest's backend: a fault there is no fault of the kernel
                self._versions[name] = "?"
        return self._versions[name]

    @property
    def deadline(self) -> Deadline:
        """The time limit of a callable."""
        return self._deadline or self._make_deadline()

    def _make_deadline(self) -> Deadline:
        from pytest_attn.session.deadline import Deadline

        self._deadline = Deadline(self.settings.timeout)
        self._config.add_cleanup(self._deadline.close)
        return self._deadline

    def check_names(self) -> None:
        """Raise pytest.UsageError for a selected backend or workload that is not registered."""
        for flag, tokens in (("--attn-backends", self.settings.backends), ("--attn-workloads", self.settings.workloads)):
            for token in tokens:
                name = token.removeprefix("-")
                if name in ("all", "available"):
                    continue
                try:
                    self.registry.require(name) if flag == "--attn-backends" else self.catalog.select(name)
                except ValueError as error:
                    raise pytest.UsageError(f"{flag}: {error}") from None
        if self.settings.tune:
            from pytest_attn.session.tuning import require_tunable

            try:
                require_tunable(self.registry, self.settings.tune)
            except ValueError as error:
                raise pytest.UsageError(f"--attn-tune: {error}") from None

    def device(self, wanted: str | torch.device | None = None) -> torch.device:
        """Return the device of the run, or the one that a marker names.

        Raises NoTorchError where torch cannot be imported, ValueError where the device is not there.
        """
        wanted = str(wanted or self.settings.device)
        if wanted not in self._devices:
            require_torch()
            from pytest_attn.backends.machine import resolve_device

            self._devices[wanted] = resolve_device(wanted)
            if self._devices[wanted].type == "cpu":
                _share_cores()
        return self._devices[wanted]

    def machine(self, wanted: str | torch.device | None = None) -> Machine:
        """Describe the device."""
        device = self.device(wanted)
        if str(device) not in self._machines:
            from pytest_attn.backends.machine import machine_of

            self._machines[str(device)] = machine_of(device)
        return self._machines[str(device)]

    @property
    def baselines_folder(self) -> Path:
        """The folder of --attn-baselines."""
        return self.rootpath / self.settings.baselines

    @property
    def references(self) -> ReferenceCache:
        """The references shared by the run's backends."""
        if self._references is None:
            from pytest_attn.correctness.question import ReferenceCache

            self._references = ReferenceCache(self.settings.memory)
        return self._references

    def backend_names(self, device: str | None = None) -> list[str]:
        """Return the selected backends; asks the machine only where "available" is part of the selection."""
        tokens = tuple(_signed(token, self.registry.canonical) for token in self.settings.backends)
        needs_machine = "available" in tokens or all(token.startswith("-") for token in tokens)
        available = self._available(device) if needs_machine else []
        chosen = choose(tuple(t for t in tokens if t != "available"), self.registry.names, available)
        if "available" in tokens:
            excluded = {t[1:] for t in tokens if t.startswith("-")}
            chosen = list(dict.fromkeys([*(n for n in available if n not in excluded), *chosen]))
        return chosen

    def _available(self, device: str | None) -> list[str]:
        machine = self.machine(device)
        return [name for name in self.registry.names if self.registry[name].unavailable_because(machine) is None]

    def workload_ids(self) -> set[str] | None:
        """Return the names that --attn-workloads selects, None where it was not given."""
        tokens = self.settings.workloads
        if not tokens:
            return None
        everything = [w.name for w in self.catalog.select("all") if w.name]
        expanded = tuple(
            ("-" if token.startswith("-") else "") + str(w.name)
            for token in tokens
            for w in self.catalog.select(token.removeprefix("-"))
        )
        return set(choose(expanded, everything, everything))

    def default_groups(self, device: str | None = None) -> tuple[str, ...]:
        """Return the groups that a test without named workloads runs."""
        return CPU_GROUPS if self.device(device).type == "cpu" else ("all",)


def _call_conftests(hook: Any, **arguments: object) -> None:
    """Let conftests register; raise pytest.UsageError with the words of one that raised anything but its own ValueError."""
    try:
        hook.call_historic(kwargs=arguments)
    except (ValueError, pytest.UsageError):
        raise
    except Exception as error:
        raise pytest.UsageError(f"{hook.name} of a conftest raised {type(error).__name__}: {error}") from error


def _signed(token: str, change: Callable[[str], str]) -> str:
    """Change the name in a token that may begin with a minus sign."""
    return f"-{change(token[1:])}" if token.startswith("-") else change(token)


SESSION = pytest.StashKey[AttentionSession]()


def require_torch() -> None:
    """Raise NoTorchError, with torch's own words, unless it can be imported."""
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise NoTorchError("pytest-attn needs torch, which is not installed; pip install torch") from None
        raise NoTorchError(_broken(error)) from None
    except Exception as error:
        raise NoTorchError(_broken(error)) from None


def _share_cores() -> None:
    """Give each xdist worker its share of the cores: threads of several workers on one core wait for one another, busily."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        import torch

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(min(torch.get_num_threads(), max(1, cores // workers)))


def _broken(error: Exception) -> str:
    return f"torch is installed but cannot be imported: {type(error).__name__}: {error}; reinstall torch"
