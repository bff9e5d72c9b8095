"""What a test of a model touches: `attn_model`, which judges the attention calls of a model, and times its step."""

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
    from pytest_attn.backends.precision import Precision
    from pytest_attn.cases.modeling import Excuse, ModelMeasuring
    from pytest_attn.invariants.report import InvariantReport
    from pytest_attn.latency.result import Latency
    from pytest_attn.models.check import Target
    from pytest_attn.models.comparison import ModelComparison


class AttentionModel:
    """The attention of a model, on one device, with one backend where the test takes one."""

    def __init__(self, run: CaseRun) -> None:
        self._run = run
        self._measuring: ModelMeasuring | None = None
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
        precision: str | Precision | None = None,
        excused: Iterable[Excuse] = (),
    ) -> ModelComparison:
        """Hold every attention call of `step` against exact attention on its own tensors; the marker says whether backward.

        step: a function without arguments that can be repeated; returns a tensor, a mapping of tensors or a model's output.
        backend: what computes the calls, by default the model itself. functions: attention of your own, as for
        `pytest_attn.capture`. scatter: runs with exact attention and random rounding, which `ratios` are made of; 0 for none.
        precision: where a function of yours says it rounds, as in the marker `attention`; a backend says it itself.
        excused: what else does not fail the test. "refusals" skips it where the backend refuses some of the calls and computes
        the others right. "known defects" expects those of what the model itself chose.

        Returns the comparison. Raises AssertionError where a call is wrong, was not read or not replaced, and where none was
        caught. Skips where the backend refuses every call; a known defect of the backend is an expected failure. The model is
        left as it was.
        """
        __tracebackhide__ = True
        from pytest_attn.cases.modeling import check_model

        self.is_judged = True
        options: Any = {"precision": precision, "excused": tuple(excused)}
        found = check_model(self._run, model, step, backend, functions, scatter, **options)
        self._timed.note((model, step, backend), found)
        return found

    def measure(
        self,
        model: torch.nn.Module,
        step: Callable[[], Any],
        backend: Target | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        functions: Iterable[Callable[..., Any] | str] = (),
    ) -> Latency:
        """Check the model, time its step, and hold the p50 against the baseline of this test, backend and machine.

        A step is forward and backward, or forward without autograd where the marker says backward=False; with an optimizer its
        step as well. Gradients are dropped before each. Reported beside the time: the first call, peak memory (of a GPU), and
        what attention takes of a step. So it says how much a faster kernel can speed up the step at most.

        Returns the latency. Raises AssertionError as `check` does, where the step became slower than recorded, where it is not
        repeatable, and where torch.compile compiles it again while it is timed. Skips where nothing can be timed. Model and
        optimizer are left as they were.
        """
        __tracebackhide__ = True
        from pytest_attn.models.user_functions import as_functions

        self.is_judged = True
        return self._timed.measure(model, step, backend, optimizer, as_functions(functions))

    def check_invariants(
        self,
        model: torch.nn.Module,
        batch: Any,
        *,
        only: Iterable[str] | str | None = None,
        skip: Iterable[str] | str | None = None,
        causal: bool | None = None,
    ) -> InvariantReport:
        """Ask a model of tokens what must hold whatever its weights, without any reference.

        batch: token ids (batch, tokens), or a mapping with input_ids. only, skip: names of invariants: future, field,
        padded-left, padded-right, packed, dynamic, static, sliding, order. causal: whether a token sees only those before it,
        by default what the model's class or configuration says.

        Returns the report. Raises AssertionError where an invariant is broken, DropoutError for a model that drops at random,
        ValueError for a mixture of experts. Skips where no invariant applies. The model is left as it was.
        """
        __tracebackhide__ = True
        from pytest_attn.cases.modeling import check_invariants

        self.is_judged = True
        return check_invariants(self._run, model, batch, only, skip, causal)

    @property
    def _timed(self) -> ModelMeasuring:
        from pytest_attn.cases.modeling import ModelMeasuring

        if self._measuring is None:
            self._measuring = ModelMeasuring(self._run)
        return self._measuring

    def check_module(
        self,
        module: torch.nn.Module,
        inputs: Any = None,
        backend: Target | None = None,
        *,
        functions: Iterable[Callable[..., Any] | str] = (),
        scatter: int = 4,
        precision: str | Precision | None = None,
    ) -> ModelComparison:
        """Call one attention layer, and judge what its attention core gets and returns, as `check` does.

        inputs: a tensor, a tuple of positional or a mapping of keyword arguments; by default hidden states are drawn, as
        `pytest_attn.check_module` says. Raises ValueError where none can be drawn.
        """
        __tracebackhide__ = True
        from pytest_attn.models.check import module_step

        step = module_step(module, inputs)
        return self.check(module, step, backend, functions=functions, scatter=scatter, precision=precision)


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
