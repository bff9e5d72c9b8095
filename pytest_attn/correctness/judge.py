"""The judgement: call a kernel on every distribution of inputs, and hold each result against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pytest_attn.backends.backend import Backend, RefusedError
from pytest_attn.backends.compiled import compilation_of
from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.machine import current
from pytest_attn.correctness.compare import (
    Comparison,
    ContractError,
    TensorComparison,
    check_contract,
    compare_tensor,
    limits_named,
)
from pytest_attn.correctness.diagnose import explain
from pytest_attn.correctness.question import Question, ReferenceCache, in_layout, subject_name
from pytest_attn.correctness.reference import Reference
from pytest_attn.correctness.strides import CONTIGUOUS, PROJECTED, REWRITTEN_KEYS, Memory, refusals
from pytest_attn.correctness.words import failure_text, with_command
from pytest_attn.workloads.masks import function_label

if TYPE_CHECKING:
    import torch

#: given the first distribution on which a tensor is wrong, its reference, and all results there, by name, in native layout
OnMismatch: TypeAlias = "Callable[[str, Reference, dict[str, torch.Tensor]], None]"


def judge(
    subject: Callable[..., Any] | Backend,
    question: Question,
    cache: ReferenceCache,
    guard: Callable[[], AbstractContextManager[object]] = nullcontext,
    reproduce: str = "",
    on_mismatch: OnMismatch | None = None,
) -> Comparison:
    """Hold `subject` against exact attention on every input distribution of the question.

    Returns the comparison, with a message where it did not pass. Raises ContractError for a result that cannot be
    compared or for changed inputs, and RefusedError where a backend refuses as late as in its first call; other exceptions
    of the callable pass through. `guard` makes a context that surrounds each call; `reproduce` is the command that a
    failure's message ends with. `on_mismatch` is given the first distribution on which a tensor is wrong, its reference, and
    every tensor of the callable there, by name and in native layout.
    """
    __tracebackhide__ = True
    if not isinstance(subject, Backend) and not callable(subject):
        raise TypeError(f"check needs a callable of (q, k, v) or a backend, got {function_label(subject)}")
    judgement = _Judgement(subject, question.put_to(subject), guard, reproduce, on_mismatch)
    with current(question.device):
        for number, distribution in enumerate(question.inputs):
            reference = judgement.question.reference(cache, distribution, subject)
            judgement.ask(distribution, reference, PROJECTED if number == 1 else CONTIGUOUS)
        judgement.ask_again()
    return judgement.comparison()


class _Judgement:
    """What is found of one subject: on each distribution of inputs, and on the first one again after the others."""

    def __init__(
        self,
        subject: Callable[..., Any] | Backend,
        question: Question,
        guard: Callable[[], AbstractContextManager[object]],
        reproduce: str,
        on_mismatch: OnMismatch | None,
    ) -> None:
        self.subject, self.question, self.name = subject, question, subject_name(subject)
        self.guard, self.reproduce, self.on_mismatch = guard, reproduce, on_mismatch
        self.kernel: Callable[..., Any] | None = None if isinstance(subject, Backend) else subject
        self.rows: list[TensorComparison] = []
        self.changed: dict[str, float] = {}
        self.message = ""
        self.first: _Answer | None = None
        self.is_sampled = self.is_approximate = False

    def ask(self, distribution: str, reference: Reference, memory: Memory) -> None:
        """Judge the results on one distribution, of tensors that lie in memory as wished.

        They are contiguous where other strides would be compiled anew, and where these are refused.
        """
        __tracebackhide__ = True
        self.is_sampled |= reference.is_sampled
        self.is_approximate |= reference.given is not None
        tensors, lay = self._results(distribution, reference, memory)
        if self.first is None:
            kept = {name: t.clone() for name, t in tensors.items()} if len(self.question.inputs) > 1 else {}
            self.first = _Answer(distribution, reference, tensors, kept)
        for name, row in self._compared(distribution, reference, tensors):
            self.rows.append(row)
            if not row.passed and not self.message:
                self._fail(name, row, reference, tensors, self._about_strides(row, reference, lay))

    def ask_again(self) -> None:
        """Judge the first distribution once more, where its results are others now: nothing may be left of other calls."""
        __tracebackhide__ = True
        if self.message or self.first is None or not self.first.kept:
            return
        distribution, reference, handed_out, _ = self.first
        self._judge_once_more(handed_out, CONTIGUOUS, "its result was right, and has changed while others were computed")
        if not self.message:
            again, lay = self._results(distribution, reference, REWRITTEN_KEYS)
            self._judge_once_more(again, lay, "the same call was right before others came between")

    def _judge_once_more(self, tensors: dict[str, torch.Tensor], lay: Memory, words: str) -> None:
        """Judge those of the first distribution's tensors that are not what they were."""
        __tracebackhide__ = True
        assert self.first is not None
        distribution, reference, _, kept = self.first
        unequal = {name: t for name, t in tensors.items() if not _same(t, kept[name])}
        for name, row in self._compared(distribution, reference, unequal):
            if not row.passed:
                self.rows.append(row)
                if not self.message:
                    notes = self._about_strides(row, reference, lay) or [f"  state      {words}"]
                    self._fail(name, row, reference, tensors, notes)

    def comparison(self) -> Comparison:
        """Return what was found, with a message where it did not pass."""
        on = f"{self.name} on {self.question.workload.id}"
        if self.changed and not self.message:
            self.message = with_command(f"{_changed_text(self.changed)}\n  by         {on}", self.reproduce)
        return Comparison(
            self.question.workload.id,
            self.name,
            tuple(self.rows),
            self.is_sampled,
            self.message,
            self.is_approximate,
            tuple(self.changed),
            compilation_of(self.kernel) if self.kernel else None,
        )

    # -- details -------------------------------------------------------------------------------------------------------

    @property
    def _is_compiled(self) -> bool:
        return self.kernel is not None and compilation_of(self.kernel) is not None

    def _results(self, distribution: str, reference: Reference, memory: Memory) -> tuple[dict[str, torch.Tensor], Memory]:
        """Call the subject; return its results, and how the tensors that it took lay in memory."""
        __tracebackhide__ = True
        where = f"{self.name} on {self.question.workload.id}, inputs {distribution}"
        with self.guard(), _own_words(self.subject, where, self.reproduce):
            if self.kernel is None:
                assert isinstance(self.subject, Backend)
                self.kernel = self.subject.prepare(reference.called_with, self.question.backward)
            memory = CONTIGUOUS if self._is_compiled or self.question.workload.kv_pages else memory
            if memory != CONTIGUOUS:
                try:
                    with refusals():
                        tensors, changes = _call(self.kernel, self.question, reference, memory)
                except RefusedError:
                    memory = CONTIGUOUS
            if memory == CONTIGUOUS:
                tensors, changes = _call(self.kernel, self.question, reference, memory)
            self.changed |= changes
            if changes and not _is_known_to_change(self.subject, changes):
                raise ContractError(_changed_text(changes))
        return tensors, memory

    def _compared(
        self, distribution: str, reference: Reference, tensors: dict[str, torch.Tensor]
    ) -> Iterator[tuple[str, TensorComparison]]:
        out_limits, gradient_limits = limits_named(self.question.limits)
        for name, tensor in tensors.items():
            limits = gradient_limits if name.startswith("d") else out_limits
            yield name, compare_tensor(name, distribution, tensor, reference, self.question.workload, limits)

    def _about_strides(self, row: TensorComparison, reference: Reference, memory: Memory) -> list[str]:
        """Say how the tensors lay, if contiguous ones give the right result."""
        __tracebackhide__ = True
        if memory == CONTIGUOUS:
            return []
        tensors, _ = self._results(row.distribution, reference, CONTIGUOUS)
        contiguous = dict(self._compared(row.distribution, reference, {row.name: tensors[row.name]}))
        words = f"{memory.words(self.question.layout)}; contiguous tensors give the right result"
        return [f"  strides    {words}"] if contiguous[row.name].passed else []

    def _fail(
        self, name: str, row: TensorComparison, reference: Reference, tensors: dict[str, torch.Tensor], notes: list[str]
    ) -> None:
        """Write the message of the first tensor that is wrong."""
        workload = self.question.workload
        lines = explain(row, tensors[name], reference, workload)
        text = "\n".join([failure_text(row, self.name, workload, lines), *notes])
        self.message = with_command(text, self.reproduce)
        if self.on_mismatch is not None:
            self.on_mismatch(row.distribution, reference, tensors)


class _Answer(NamedTuple):
    """What a subject handed out on one distribution, and copies of it."""

    distribution: str
    reference: Reference
    handed_out: dict[str, torch.Tensor]
    kept: dict[str, torch.Tensor]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN where NaN is."""
    import torch

    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


@contextmanager
def _own_words(subject: object, where: str, reproduce: str) -> Iterator[None]:
    """Silence a library's warnings, say of a broken contract whose it was, and turn a late refusal into RefusedError."""
    with quiet() if isinstance(subject, Backend) else nullcontext():
        try:
            with late_refusals_of(subject):
                yield
        except ContractError as error:
            raise ContractError(with_command(f"{error}\n  by         {where}", reproduce)) from None


@contextmanager
def late_refusals_of(subject: object) -> Iterator[None]:
    """Turn what a backend knows as a refusal that only its compiler found out into RefusedError."""
    try:
        yield
    except ContractError:
        raise
    except Exception as error:
        if isinstance(subject, Backend) and (reason := subject.refusal_in(error)):
            raise RefusedError(reason) from error
        raise


def _is_known_to_change(subject: object, changes: dict[str, float]) -> bool:
    """Whether a known defect of the backend says that it changes these inputs, so that its values are judged all the same."""
    known = {name for d in subject.known_defects for name in d.changes_input} if isinstance(subject, Backend) else set()
    return known.issuperset(changes)


def _changed_text(changes: dict[str, float]) -> str:
    name, largest = next(iter(changes.items()))
    return f"the callable changed its input {name} in place (by up to {largest:.3g})"


def judge_output(
    out: object,
    question: Question,
    reference: Reference,
    reproduce: str = "",
    on_mismatch: OnMismatch | None = None,
) -> Comparison:
    """Compare one output, already computed and in the question's layout, with its reference; `on_mismatch` as for `judge`."""
    (tensor,) = check_contract(out, ("out",), reference, question.workload, question.layout)
    tensor = in_layout(tensor, question)
    limits, _ = limits_named(question.limits)
    row = compare_tensor("out", question.inputs[0], tensor, reference, question.workload, limits)
    message = ""
    if not row.passed:
        lines = explain(row, tensor, reference, question.workload)
        message = with_command(failure_text(row, "out", question.workload, lines), reproduce)
        if on_mismatch is not None:
            on_mismatch(question.inputs[0], reference, {"out": tensor})
    return Comparison(question.workload.id, "out", (row,), reference.is_sampled, message)


def _call(
    kernel: Callable[..., Any], question: Question, reference: Reference, memory: Memory
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Call the kernel on copies of the inputs, in its layout.

    Returns out, lse and gradients by name, in native layout, and by how much it changed each input that it changed.
    Raises ContractError for a result that cannot be compared.
    """
    __tracebackhide__ = True
    import torch

    pristine = reference.called_with
    kept = [in_layout(t, question, is_kv) for t, is_kv in ((pristine.q, False), (pristine.k, True), (pristine.v, True))]
    laid = [memory.of(name, t, question.layout) for name, t in zip("qkv", kept, strict=True)]
    given = [t.requires_grad_(question.backward) for t in laid]
    names = ("out", "lse") if question.returns_lse else ("out",)
    with nullcontext() if question.backward else torch.no_grad():
        result = kernel(*given)
    handed_out = check_contract(result, names, reference, question.workload, question.layout)
    tensors = dict(zip(names, handed_out, strict=True))
    if question.backward:
        tensors.update(
            _gradients(tensors["out"], given, memory.of("dout", in_layout(pristine.dout, question), question.layout))
        )
    if question.device.type == "cuda":
        torch.cuda.synchronize(question.device)
    changes = {
        name: float((now.detach().double() - before.double()).abs().max())
        for name, now, before in zip("qkv", given, kept, strict=True)
        if not torch.equal(now.detach(), before)
    }
    return {name: t if name == "lse" else in_layout(t, question) for name, t in tensors.items()}, changes


def _gradients(out: torch.Tensor, leaves: list[torch.Tensor], dout: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    import torch

    if not out.requires_grad:
        raise ContractError(
            "out carries no gradient; backward=True needs a callable that autograd can follow (no detach, no no_grad)"
        )
    grads = torch.autograd.grad(out, leaves, dout, allow_unused=True)
    for name, leaf, grad in zip(("dq", "dk", "dv"), leaves, grads, strict=True):
        if grad is None:
            raise ContractError(f"{name} is missing: out does not depend on {name[1:]}, as autograd sees it")
        if grad.shape != leaf.shape or grad.dtype != leaf.dtype:
            raise ContractError(
                f"{name} is a {grad.dtype} tensor of shape {tuple(grad.shape)}; expected {leaf.dtype} {tuple(leaf.shape)}"
            )
    return list(zip(("dq", "dk", "dv"), grads, strict=True))
