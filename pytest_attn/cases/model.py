"""What a test of a model touches: `attn_model`, which judges the attention calls of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_attn.cases.run import CaseRun
from pytest_attn.session.items import ModelParameter
from pytest_attn.session.marks import model_mark
from pytest_attn.session.session import AttentionSession

if TYPE_CHECKING:
    import torch

    from pytest_attn.backends.backend import Backend
    from pytest_attn.models.check import Target
    from pytest_attn.models.comparison import ModelComparison


class AttentionModel:
    """The attention of a model, on one device, with one backend where the test takes one."""

    def __init__(self, run: CaseRun) -> None:
        self._run = run
        self.is_judged = False

    @property
    def backend(self) -> Backend | None:
        """The backend of the item, None where the test takes none."""
        return self._run.backend

    @property
    def device(self) -> torch.device:
        """The torch device."""
        return self._run.session.machines.device(self._run.mark.device)

    def check(
        self,
        model: torch.nn.Module,
        step: Callable[[], Any],
        backend: Target | None = None,
        *,
        functions: Iterable[Callable[..., Any] | str] = (),
        scatter: int = 4,
    ) -> ModelComparison:
        """Hold every attention call of `step` against exact attention on its own tensors; the marker says whether backward.

        step: a function without arguments that can be repeated; returns a tensor, a mapping of tensors or a model's output.
        backend: what computes the calls, by default the model itself. functions: attention of your own, as for
        `pytest_attn.capture`. scatter: runs with exact attention and random rounding, which `ratios` are made of; 0 for none.

        Returns the comparison. Raises AssertionError where a call is wrong, was not read or not replaced, and where none was
        caught. Skips where the backend refuses every call. The model is left as it was.
        """
        __tracebackhide__ = True
        from pytest_attn.cases.modeling import check_model

        self.is_judged = True
        return check_model(self._run, model, step, backend, tuple(functions), scatter)

    def check_module(
        self,
        module: torch.nn.Module,
        inputs: Any = None,
        backend: Target | None = None,
        *,
        functions: Iterable[Callable[..., Any] | str] = (),
        scatter: int = 4,
    ) -> ModelComparison:
        """Call one attention layer, and judge what its attention core gets and returns, as `check` does.

        inputs: a tensor, a tuple of positional or a mapping of keyword arguments; by default hidden states are drawn, as
        `pytest_attn.check_module` says. Raises ValueError where none can be drawn.
        """
        __tracebackhide__ = True
        from pytest_attn.models.module import module_step

        return self.check(module, module_step(module, inputs), backend, functions=functions, scatter=scatter)


def make_model_case(request: pytest.FixtureRequest, parameter: ModelParameter, session: AttentionSession) -> AttentionModel:
    """Make the case of a model's test; skips the test where its device or backend is not there."""
    item: pytest.Item = request.node
    marker = item.get_closest_marker("attention_model")
    assert marker is not None
    run = CaseRun(request, parameter, model_mark(marker, session.registrations.registry), session)
    if session.cuda.lost_because and session.machines.device(run.mark.device).type == "cuda":
        pytest.skip(session.cuda.lost_because)
    if run.backend is not None and (reason := run.backend.unavailable_because(run.machine) or run.backend.broken_because()):
        run.outcome.skip(run.backend, reason)
    return AttentionModel(run)
