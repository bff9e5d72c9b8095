"""What one pytest run knows: settings, registered backends and workloads, devices, shared references, results."""

from __future__ import annotations

import copy
import dataclasses
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_attn.session.collected import Collected
from pytest_attn.session.cuda_context import CudaContext
from pytest_attn.session.machines import Machines
from pytest_attn.session.registrations import Registrations
from pytest_attn.session.results import Results
from pytest_attn.session.settings import Settings
from pytest_attn.session.worker_context import WorkerContext

if TYPE_CHECKING:
    from pytest_attn.correctness.spec import ReferenceCache
    from pytest_attn.session.deadline import Deadline
    from pytest_attn.session.kernels import SelectedKernels
    from pytest_attn.session.manifest import Manifest
    from pytest_attn.session.progress import Progress


class AttentionSession:
    """The state of one run, each part of which is changed by its own methods only.

    Every start of pytest makes one, so it holds nothing yet. Backends and workloads are registered when a test first
    needs them, and torch is imported when a device is first asked for.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.rootpath = config.rootpath
        self.settings = Settings.from_config(config)
        self.registrations = Registrations(config)
        self.machines = Machines(self.settings.device)
        self.collected = Collected()
        self.results = Results()
        self.cuda = CudaContext()
        #: what the process that waits for a new one has sent to it, None in all others
        self.worker = WorkerContext.of_this_process()
        #: what becomes of each test, None where no .jsonl file asks
        self.manifest: Manifest | None = None
        if self.settings.timeout:
            self.deadline  # noqa: B018 - made now, while stderr is not captured yet

    @cached_property
    def kernels(self) -> SelectedKernels:
        """Whose kernels the run tests: the one place that asks for --attn-mutants and --attn-tune."""
        parts = self.settings, self.registrations, self.machines
        if self.settings.mutants:
            from pytest_attn.session.mutants import Mutants

            return Mutants(*parts)
        if self.settings.tune:
            from pytest_attn.session.tuning import Configurations

            return Configurations(*parts)
        from pytest_attn.session.kernels import SelectedKernels

        return SelectedKernels(*parts)

    @property
    def has_attention_tests(self) -> bool:
        """Whether a test with cases was collected."""
        return self.collected.tests > 0

    @cached_property
    def references(self) -> ReferenceCache:
        """The references shared by the run's kernels."""
        from pytest_attn.correctness.spec import ReferenceCache

        return ReferenceCache(self.settings.memory)

    @cached_property
    def progress(self) -> Progress:
        """What a terminal shows while something takes long; first asked for while output is not captured."""
        from pytest_attn.session.progress import Progress

        return Progress(self._config, is_child=self.worker is not None)

    @cached_property
    def deadline(self) -> Deadline:
        """The time limit of a callable."""
        from pytest_attn.session.deadline import Deadline

        made = Deadline(self.settings.timeout)
        self._config.add_cleanup(made.close)
        return made

    def for_draws(self, references: ReferenceCache) -> AttentionSession:
        """Return the session as draws of --attn-fuzz see it: with references of their own, and without profiles."""
        own = copy.copy(self)
        own.references = references
        own.settings = dataclasses.replace(self.settings, profile=False)
        return own

    @property
    def baselines_folder(self) -> Path:
        """The folder of --attn-baselines."""
        return self.rootpath / self.settings.baselines


SESSION = pytest.StashKey[AttentionSession]()


def session_of(config: pytest.Config) -> AttentionSession:
    """Return the session of a run."""
    return config.stash[SESSION]
