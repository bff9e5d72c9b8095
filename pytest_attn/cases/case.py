"""What a test touches: `attn`, one case of a marked test, with its tensors and its judgments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import pytest

from pytest_attn.cases.run import CaseRun
from pytest_attn.cases.tensors import CaseTensors
from pytest_attn.session.items import CaseParameter
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.session import AttentionSession

if TYPE_CHECKING:
    import torch

    from pytest_attn.backends.backend import Backend
    from pytest_attn.backends.subject import Dequantizer, Subject
    from pytest_attn.cases.measuring import Measuring
    from pytest_attn.correctness.comparison import Comparison
    from pytest_attn.invariants.report import InvariantReport
    from pytest_attn.latency.profiler import Profile
    from pytest_attn.latency.result import Latency
    from pytest_attn.models.check import Target
    from pytest_attn.models.comparison import ModelComparison


class AttentionCase(CaseTensors):
    """One workload, on one device, with one backend where the test takes one.

    Tensors (q, k, v, bias, ...) are those of the first input distribution, in the layout that the marker names. `check`
    draws every distribution anew and hands each callable its own copy.
    """

    def __init__(
        self, request: pytest.FixtureRequest, parameter: CaseParameter, mark: AttentionMark, session: AttentionSession
    ) -> None:
        super().__init__(parameter.workload, mark, session)
        self._run = CaseRun(request, parameter, mark, session)
        self._checked: Subject | None = None
        self._comparison: Comparison | None = None
        self._measuring: Measuring | None = None
        self._has_asserted = False

    @property
    def backend(self) -> Backend | None:
        """The backend of the case, None where the test takes none."""
        self._looked_at.add("backend")
        return self._run.backend

    @property
    def ranks(self) -> int:
        """How many ranks compute the case together; 1 in a test without ranks=."""
        return 1

    def check(
        self, fn: Callable[..., Any] | Backend | str, name: str | None = None, dequantized: Dequantizer | None = None
    ) -> Comparison:
        """Hold `fn` against exact attention on every input distribution of the marker.

        Skips the test where a backend cannot take the case or fn declines it; expects its failure (xfail) where a known defect
        of the backend explains all that is wrong.

        Args:
            fn: a callable of (q, k, v), the backend of the case, or a backend's name.
            name: what reports call a callable, by default its qualified name with what it closes over.
            dequantized: of a callable that quantizes inside, a function of (q, k, v) that returns what it makes of them, as
                float tensors: exact attention is that of these values.

        Returns:
            The comparison of an fn that is right.

        Raises:
            AssertionError: fn is wrong; the text is the diagnosis, with the command that repeats the case.
            TypeError: fn is none of the three.
            ValueError: no backend has the name.
        """
        __tracebackhide__ = True
        return self._check(self._run.subject(fn, name, self._spec, dequantized=dequantized), self._mark.backward)

    def check_invariants(
        self,
        fn: Callable[..., Any] | Backend | str,
        only: Iterable[str] | str | None = None,
        skip: Iterable[str] | str | None = None,
        name: str | None = None,
        dequantized: Dequantizer | None = None,
    ) -> InvariantReport:
        """Ask `fn` what needs no tolerance: poisoned memory, odd strides, leaks, reruns, state, equivalences, algebra.

        Skips the test where no invariant applies, or fn declines the case itself; an invariant whose variant fn declines does
        not apply. Expects the failure (xfail) where a known defect explains what is broken.

        Args:
            fn: as for `check`.
            only: names of the invariants to ask (docs/reference/invariants.md).
            skip: names of invariants to leave out.
            name: as for `check`.
            dequantized: as for `check`.

        Returns:
            The report of an fn that breaks none.

        Raises:
            AssertionError: an invariant is broken; the text is the smallest evidence.
            ValueError: no invariant has the name, or none is left.
        """
        __tracebackhide__ = True
        from pytest_attn.cases.checking import check_invariants

        subject = self._run.subject(fn, name, self._spec, dequantized=dequantized)
        return check_invariants(self._run, subject, self._spec, only, skip)

    def check_module(
        self,
        module: torch.nn.Module,
        inputs: Any = None,
        backend: Target | None = None,
        *,
        functions: Iterable[Callable[..., Any] | str] = (),
        scatter: int = 4,
    ) -> ModelComparison:
        """Call one attention layer, and judge what its attention core gets and returns, as `attn_model.check_module` does.

        Hidden states that are drawn have the workload's batch and q_len; heads, mask and dtype are the module's own.
        """
        __tracebackhide__ = True
        from pytest_attn.cases.modeling import check_model
        from pytest_attn.models.check import module_step

        self._has_asserted = True
        step = module_step(module, inputs, (self._workload.batch, self._workload.q_len))
        return check_model(self._run, module, step, backend, functions, scatter)

    def measure(
        self, fn: Callable[..., Any] | Backend | str, backward: bool | Literal["both"] = False, name: str | None = None
    ) -> Latency:
        """Check `fn`, time it, and compare its p50 with the baseline of this machine.

        Skips the test where nothing can be timed, where nothing can be decided, and where `check` would.

        Args:
            fn: as for `check`.
            backward: False times the forward pass as in inference, True the backward pass alone, "both" one after the other.
            name: as for `check`; it also names the baseline of a callable.

        Returns:
            The latency, in seconds; its `verdict` is "passed", "inconclusive", "no baseline" or "recorded".

        Raises:
            AssertionError: fn is wrong, left results that are not those of its data when called again, or became slower, less
                accurate or larger in memory than recorded.
            ValueError: `backward` is none of the three.
        """
        __tracebackhide__ = True
        from pytest_attn.cases.measuring import Measuring
        from pytest_attn.latency.work import direction_of
        from pytest_attn.timing.measurement import Measurement

        direction, needs_gradients = direction_of(backward), self._mark.backward or bool(backward)
        measuring = self._measuring = self._measuring or Measuring(self._run)
        subject = self._run.subject(fn, name, self._spec, backward=bool(backward))
        measuring.expect(self._spec.device)
        if measuring.timekeeper.checks_first and not self._is_checked(subject, needs_gradients):
            self._check(subject, needs_gradients)
        run = self._run
        measurement = Measurement(run.session, run.item, self._spec, subject, direction, self._comparison, number=1)
        return measuring.measure(measuring.number(measurement))

    def assert_close(self, out: torch.Tensor) -> None:
        """Compare an output that the test computed from attn.q, attn.k and attn.v with the reference.

        Args:
            out: (batch, heads, q_len, v_head_dim) in the marker's layout, of the workload's dtype.

        Raises:
            AssertionError: out is wrong; the text is the diagnosis.
        """
        __tracebackhide__ = True
        from pytest_attn.cases.checking import check_output

        self._has_asserted = True
        check_output(self._run, out, self._spec, self._reference)

    def assert_launched(self, *words: str, fn: Callable[..., Any] | Backend | str | None = None) -> list[Profile]:
        """Assert that `fn` launches a kernel that answers to all of `words`; copies and elementwise kernels do not count.

        Args:
            words: parts of what --attn-profile prints or of the kernel's symbol, whatever the case: "sm90", "flash".
            fn: by default what `check` was last given.

        Returns:
            The profile of each direction that ran.

        Raises:
            AssertionError: no such kernel ran; the text lists what did.
            ValueError: no word was given, or nothing was checked yet.
        """
        __tracebackhide__ = True
        from pytest_attn.cases.launches import assert_launched

        if not self._session.kernels.are_tested:
            return []
        if not words or not all(isinstance(word, str) and word.strip() for word in words):
            raise ValueError(f'assert_launched needs words: attn.assert_launched("sm90", "flash"), got {words!r}')
        subject = self._checked if fn is None else self._run.subject(fn, None, self._spec)
        if subject is None:
            raise ValueError("assert_launched needs a callable: call attn.check(fn) first, or say fn=...")
        self._has_asserted = True
        return assert_launched(self._run, subject, self._spec, words)

    @property
    def is_judged(self) -> bool:
        """Whether the test has judged something, or tried to."""
        return self._run.asked is not None or self._has_asserted

    # -- details -------------------------------------------------------------------------------------------------------

    def _check(self, subject: Subject, backward: bool) -> Comparison:
        """Check a subject with or without gradients, and keep what came of it."""
        __tracebackhide__ = True
        from pytest_attn.cases.checking import check, spec_with

        self._checked, self._comparison = subject, None
        self._comparison = check(self._run, subject, spec_with(self._spec, backward))
        if self._session.settings.profile:
            from pytest_attn.cases.launches import add_profiles

            add_profiles(self._run, subject, self._spec)
        return self._comparison

    def _is_checked(self, subject: Subject, backward: bool) -> bool:
        """Whether the test has just checked the same subject, with gradients if they are needed."""
        has_gradients = self._mark.backward or not backward
        return self._comparison is not None and has_gradients and subject == self._checked


def backend_of(case: AttentionCase) -> Backend:
    """Return the backend of a case whose test takes one; which does not count as a look at the case."""
    run: CaseRun | None = getattr(case, "_run", None)
    backend = run.backend if run else case.backend  # a rank has no run
    assert backend is not None
    return backend
