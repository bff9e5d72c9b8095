"""The items of a model's test, and what its marker says."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from pytest_attn.backends.declaration import Argument, arguments_of
from pytest_attn.session.collection import Items
from pytest_attn.session.kinds import CaseParameter
from pytest_attn.session.marks import AttentionMark, MarkerHelp
from pytest_attn.session.session import AttentionSession
from pytest_attn.workloads.workload import Workload

#: arguments of the marker `attention` that this one takes, too
_TAKEN = ("backends", "backward", "device", "covering")


class ModelItems(Items):
    """The items of a model's test: one, or one per backend. What its calls ask for is known once it runs."""

    def read(self, marker: pytest.Mark, session: AttentionSession) -> AttentionMark:
        return AttentionMark.from_keywords(marker, _TAKEN, session.registrations.registry, backward=True)

    def help(self) -> MarkerHelp:
        of = {one.name: one for one in arguments_of(AttentionMark)}
        of["backward"] = Argument("backward", True, "whether gradients are compared as well", "")
        summary = "the test holds a model's attention with attn_model, on each selected backend if it uses attn_backend"
        return MarkerHelp(self.kind.marker, summary, tuple(of[name] for name in _TAKEN))

    def cases(self, mark: AttentionMark, names: Collection[str], session: AttentionSession) -> Sequence[CaseParameter]:
        """Return a case per backend; none where a run asks about workloads."""
        backends = session.kernels.backends(mark) if "attn_backend" in names else [None]
        is_left_out = not session.kernels.are_tested or session.kernels.are_configurations
        return [] if is_left_out else [CaseParameter(Workload(1), backend) for backend in backends]

    def case_id(self, case: CaseParameter) -> str:
        return case.backend or "model"

    def group(self, item: pytest.Item, case: CaseParameter) -> str | None:
        """Keep together the tests of a file that are parametrized with the same backend and model."""
        return f"{item.path.stem} {item.name.partition('[')[2]}" if case.backend else None

    def obstacle(self, case: CaseParameter, marker: pytest.Mark, session: AttentionSession) -> str | None:
        machine = session.machines.machine(marker.kwargs.get("device"))
        return session.registrations.registry[case.backend].unavailable_because(machine) if case.backend else None
