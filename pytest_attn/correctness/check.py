"""Judge one callable on one workload: draw inputs, call it, hold every result against the reference, explain a failure."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.backend import Backend, RefusedError, obstacle
from pytest_attn.backends.compiled import compilation_of
from pytest_attn.backends.library import quiet
from pytest_attn.backends.machine import current, machine_of, resolve_device
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.compare import (
    Comparison,
    ContractError,
    TensorComparison,
    check_contract,
    compare_tensor,
    limits_named,
)
from pytest_attn.correctness.diagnose import explain
from pytest_attn.correctness.precision import PRECISIONS, Precision, precision_named
from pytest_attn.correctness.reference import Reference, compute_reference
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.inputs import Inputs, distribution_names, draw_inputs
from pytest_attn.workloads.masks import function_label
from pytest_attn.workloads.workload import LAYOUTS, Workload

if TYPE_CHECKING:
    import torch

DEFAULT_CACHE_BYTES = 4 << 30


class ReferenceCache:
    """References shared by all callables of a run; those unused for longest go when `limit` bytes are full."""

    def __init__(self, limit: int = DEFAULT_CACHE_BYTES) -> None:
        self.limit = limit
        self.computed = 0
        self._kept: OrderedDict[tuple[object, ...], Reference] = OrderedDict()

    def get(
        self, workload: Workload, distribution: str, seed: int, device: torch.device, precision: Precision, backward: bool
    ) -> Reference:
        """Return the reference, computing it where it is not kept; one with gradients also serves without."""
        for with_gradients in (True,) if backward else (False, True):
            key = (workload, distribution, seed, str(device), precision, with_gradients)
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        inputs = draw_inputs(workload, distribution, seed, device)
        reference = compute_reference(inputs, precision, backward)
        self.computed += 1
        self._kept[(workload, distribution, seed, str(device), precision, backward)] = reference
        while len(self._kept) > 1 and sum(map(_held_bytes, self._kept.values())) > self.limit:
            self._kept.popitem(last=False)
        if _held_bytes(reference) > self.limit:
            self._kept.clear()
        return reference


def _held_bytes(reference: Reference) -> int:
    i = reference.inputs
    return reference.nbytes + sum(t.nbytes for t in (i.q, i.k, i.v, i.dout))


@dataclass(frozen=True)
class Question:
    """All that a judgement depends on, beside the callable. Raises ValueError for a value that is not one of the known."""

    workload: Workload
    device: torch.device
    backward: bool = False
    inputs: tuple[str, ...] = ("structured", "flat")
    precision: str = "flash"
    layout: str = "bhsd"
    returns_lse: bool = False
    seed: int = 0
    limits: str = "default"

    def __post_init__(self) -> None:
        precision_named(self.precision)
        limits_named(self.limits)
        distribution_names(self.inputs)
        if not isinstance(self.workload, Workload):
            raise ValueError(f"workload must be a name or a Workload, got {self.workload!r}")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be a whole number >= 0, got {self.seed!r}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"unknown layout {self.layout!r}; known: {', '.join(LAYOUTS)}")
        if (self.layout == "thd") != self.workload.is_packed:
            if self.layout == "thd":
                raise ValueError(f"layout 'thd' needs a packed workload (q_lens), {self.workload.id} is not one")
            object.__setattr__(self, "layout", "thd")
        if self.backward and self.workload.kv_pages:
            raise ValueError(f"{self.workload.id} reads paged keys, which have no gradient; leave out backward=True")

    def put_to(self, subject: object) -> Question:
        """Return the question as a backend answers it: in the native layout, with the precision and lse that it declares.

        A callable answers it as it is. Raises ValueError for a backend of an unknown precision.
        """
        if not isinstance(subject, Backend):
            return self
        precision = subject.precision_on(self.device.type)
        if precision not in PRECISIONS:
            raise ValueError(f"backend {subject.name!r}: unknown precision {precision!r}; known: {', '.join(PRECISIONS)}")
        layout = "thd" if self.workload.is_packed else "bhsd"
        return dataclasses.replace(self, precision=precision, returns_lse=subject.returns_lse, layout=layout)

    def reference(self, cache: ReferenceCache, distribution: str | None = None, subject: object = None) -> Reference:
        """Return the reference of one distribution, by default the first.

        For a backend that quantises its inputs it is exact attention on the quantised values, kept for this backend only.
        """
        precision = precision_named(self.precision)
        distribution = distribution or self.inputs[0]
        with quiet():  # the arithmetic is ours, its warnings are not the test's
            if not isinstance(subject, Backend) or not subject.is_approximate:
                return cache.get(self.workload, distribution, self.seed, self.device, precision, self.backward)
            given = draw_inputs(self.workload, distribution, self.seed, self.device)
            reference = compute_reference(_quantised_by(subject, given), precision, self.backward)
            reference.given = given
            return reference


def judge(
    subject: Callable[..., Any] | Backend,
    question: Question,
    cache: ReferenceCache,
    guard: Callable[[], AbstractContextManager[object]] = nullcontext,
    reproduce: str = "",
) -> Comparison:
    """Hold `subject` against exact attention on every input distribution of the question.

    Returns the comparison, with a message where it did not pass. Raises ContractError for a result that cannot be
    compared or for changed inputs, and RefusedError where a backend refuses as late as in its first call; other exceptions
    of the callable pass through. `guard` makes a context that surrounds each call; `reproduce` is the command that a
    failure's message ends with.
    """
    __tracebackhide__ = True
    question = question.put_to(subject)
    name = subject_name(subject)
    if not isinstance(subject, Backend) and not callable(subject):
        raise TypeError(f"check needs a callable of (q, k, v) or a backend, got {function_label(subject)}")
    kernel: Callable[..., Any] | None = None if isinstance(subject, Backend) else subject
    found: list[TensorComparison] = []
    message = ""
    is_sampled = is_approximate = False
    changed: dict[str, float] = {}
    with current(question.device):
        for distribution in question.inputs:
            reference = question.reference(cache, distribution, subject)
            is_sampled = is_sampled or reference.is_sampled
            is_approximate = is_approximate or reference.given is not None
            where = f"{name} on {question.workload.id}, inputs {distribution}"
            with guard(), _own_words(subject, where, reproduce):
                if kernel is None:
                    kernel = subject.prepare(reference.called_with, question.backward)  # type: ignore[union-attr]
                tensors, changes = _call(kernel, question, reference)
                changed |= changes
                if changes and not _is_known_to_change(subject, changes):
                    raise ContractError(_changed_text(changes))
            out_limits, gradient_limits = limits_named(question.limits)
            for tensor_name, tensor in tensors.items():
                limits = gradient_limits if tensor_name.startswith("d") else out_limits
                row = compare_tensor(tensor_name, distribution, tensor, reference, question.workload, limits)
                found.append(row)
                if not row.passed and not message:
                    lines = explain(row, tensor, reference, question.workload)
                    message = _with_command(failure_text(row, name, question.workload, lines), reproduce)
    if changed and not message:
        message = _with_command(f"{_changed_text(changed)}\n  by         {name} on {question.workload.id}", reproduce)
    return Comparison(
        question.workload.id,
        name,
        tuple(found),
        is_sampled,
        message,
        is_approximate,
        tuple(changed),
        compilation_of(kernel) if kernel else None,
    )


@contextmanager
def _own_words(subject: object, where: str, reproduce: str) -> Iterator[None]:
    """Silence a library's warnings, say of a broken contract whose it was, and turn a late refusal into RefusedError."""
    with quiet() if isinstance(subject, Backend) else nullcontext():
        try:
            with late_refusals_of(subject):
                yield
        except ContractError as error:
            raise ContractError(_with_command(f"{error}\n  by         {where}", reproduce)) from None


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


def _quantised_by(subject: Backend, given: Inputs) -> Inputs:
    """Return what the backend makes of its inputs; raise ContractError where that has other shapes."""
    made = subject.dequantised(given)
    for name in "qkv":
        shape = getattr(getattr(made, name, None), "shape", None)
        if shape != getattr(given, name).shape:
            found = type(made).__name__ if shape is None else f"{name} of shape {tuple(shape)}"
            raise ContractError(f"{subject.name}.dequantised returned {found}; expected {tuple(getattr(given, name).shape)}")
    return made


def _is_known_to_change(subject: object, changes: dict[str, float]) -> bool:
    """Whether a known defect of the backend says that it changes these inputs, so that its values are judged all the same."""
    known = {name for d in subject.known_defects for name in d.changes_input} if isinstance(subject, Backend) else set()
    return known.issuperset(changes)


def _changed_text(changes: dict[str, float]) -> str:
    name, largest = next(iter(changes.items()))
    return f"the callable changed its input {name} in place (by up to {largest:.3g})"


def judge_output(out: object, question: Question, reference: Reference, reproduce: str = "") -> Comparison:
    """Compare one output, already computed and in the question's layout, with its reference."""
    (tensor,) = check_contract(out, ("out",), reference, question.workload, question.layout)
    tensor = in_layout(tensor, question)
    limits, _ = limits_named(question.limits)
    row = compare_tensor("out", question.inputs[0], tensor, reference, question.workload, limits)
    message = ""
    if not row.passed:
        lines = explain(row, tensor, reference, question.workload)
        message = _with_command(failure_text(row, "out", question.workload, lines), reproduce)
    return Comparison(question.workload.id, "out", (row,), reference.is_sampled, message)


def subject_name(subject: object) -> str:
    """Return what to call a backend or callable in messages."""
    return subject.name if isinstance(subject, Backend) else function_label(subject)


def _call(
    kernel: Callable[..., Any], question: Question, reference: Reference
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Call the kernel on copies of the inputs, in its layout.

    Returns out, lse and gradients by name, in native layout, and by how much it changed each input that it changed.
    Raises ContractError for a result that cannot be compared.
    """
    __tracebackhide__ = True
    import torch

    pristine = reference.called_with
    kept = [in_layout(t, question, is_kv) for t, is_kv in ((pristine.q, False), (pristine.k, True), (pristine.v, True))]
    given = [t.clone().requires_grad_(question.backward) for t in kept]
    names = ("out", "lse") if question.returns_lse else ("out",)
    with nullcontext() if question.backward else torch.no_grad():
        result = kernel(*given)
    handed_out = check_contract(result, names, reference, question.workload, question.layout)
    tensors = dict(zip(names, handed_out, strict=True))
    if question.backward:
        tensors.update(_gradients(tensors["out"], given, in_layout(pristine.dout, question).clone()))
    if question.device.type == "cuda":
        torch.cuda.synchronize(question.device)
    changes = {
        name: float((now.detach().double() - before.double()).abs().max())
        for name, now, before in zip("qkv", given, kept, strict=True)
        if not torch.equal(now.detach(), before)
    }
    return {name: t if name == "lse" else in_layout(t, question) for name, t in tensors.items()}, changes


def in_layout(tensor: torch.Tensor, question: Question, is_kv: bool = False) -> torch.Tensor:
    """Swap rows and heads for "bshd", there and back; page pools have a layout of their own."""
    if question.layout != "bshd" or (is_kv and question.workload.kv_pages):
        return tensor
    return tensor.transpose(1, 2).contiguous()


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


# -- the words -------------------------------------------------------------------------------------------------------------


def failure_text(row: TensorComparison, subject: str, workload: Workload, explanation: list[str]) -> str:
    """Write a mismatch: the verdict first, then the worst element, the levels, where, the usual figures, what it suggests."""
    at = ", ".join(map(str, row.worst))
    where, *suggestions = explanation
    of_finite = "of finite elements: " if row.wrong_positions else ""
    lines = [
        f"mismatch: {_tensor_of(row.name, subject)}: {verdict(row)} ({workload.id}, inputs {row.distribution})",
        f"  worst      {row.name}[{at}] = {row.found:.6g}, exact {row.exact:.6g}, budget {row.budget:.3g}",
        f"  levels     element {_short(row.z_element)} (limit {row.limits.element:g}), row {_short(row.z_row)}"
        f" ({row.limits.row:g}), head {_short(row.z_head)} ({row.limits.head:g});"
        f" {row.exceeding:,} of {row.elements:,} elements over",
        f"  where      {where}",
        f"  figures    {of_finite}absmax {row.absmax:.3g}, mean abs {row.mean_abs:.3g}, mse {row.mse:.3g},"
        f" relative L2 {row.relative_l2:.3g}, cosine {row.cosine:.6f}, slope {row.alpha:.4f}",
    ]
    return "\n".join(lines + [f"  suggests   {line}" for line in suggestions])


def _short(z: float) -> str:
    return f"{z:.2f}" if z < 100 else f"{z:,.0f}"


def _tensor_of(tensor: str, subject: str) -> str:
    return tensor if tensor == subject else f"{tensor} of {subject}"


def verdict(row: TensorComparison) -> str:
    """Say in a few words by how much a tensor is wrong."""
    if row.wrong_positions:
        return f"{row.wrong_positions:,} elements are NaN or infinite and should not be, or should be and are not"
    level, value, limit = _worst_level(row)
    return f"z {_short(value)} over {level}, limit {limit:g}"


def _worst_level(row: TensorComparison) -> tuple[str, float, float]:
    levels = (
        ("an element", row.z_element, row.limits.element),
        ("a row", row.z_row, row.limits.row),
        ("a head", row.z_head, row.limits.head),
    )
    return next((level for level in levels if not level[1] <= level[2]), levels[0])


def _with_command(text: str, command: str) -> str:
    return f"{text}\n  reproduce  {command}" if command else text


# -- without pytest --------------------------------------------------------------------------------------------------------


def check(
    fn: Callable[..., Any] | Backend | str,
    workload: Workload | str,
    *,
    backward: bool = False,
    inputs: str | tuple[str, ...] | None = None,
    precision: str = "flash",
    layout: str = "bhsd",
    returns_lse: bool = False,
    device: str = "auto",
    seed: int = 0,
    limits: str = "default",
) -> Comparison:
    """Hold a callable against exact attention, without pytest.

    fn: a callable of (q, k, v) that returns out, or (out, lse) with returns_lse=True; or a backend's name.
    workload: a `Workload` or a name of the catalog that stands for one workload.
    backward: compare dq, dk and dv as well. inputs: names of input distributions, by default ("structured", "flat").
    precision: the rounding that the kernel declares ("flash", "flash2", "eager", ...: correctness/precision.py).
    layout: "bhsd" or "bshd", in which fn takes and returns tensors; packed workloads are "thd".
    device: "auto", "cpu", "cuda", "cuda:N", "xpu", "mps".

    Returns a `Comparison`. Raises AssertionError where fn is wrong, with the diagnosis as its text, ValueError for an
    argument that is not one of the known.
    """
    __tracebackhide__ = True
    where = resolve_device(device)
    names = distribution_names(inputs)
    question = Question(named(workload), where, backward, names, precision, layout, returns_lse, seed, limits)
    return check_question(fn, question)[1]


def check_question(
    fn: Callable[..., Any] | Backend | str, question: Question
) -> tuple[Callable[..., Any] | Backend, Comparison]:
    """Judge a callable, or a backend by its name; return it with the comparison. Raises as `check` does."""
    __tracebackhide__ = True
    with taken_by(fn, question) as subject:
        comparison = judge(subject, question, ReferenceCache())
    if not comparison.passed:
        raise AssertionError(comparison.message)
    return subject, comparison


@contextmanager
def taken_by(fn: Callable[..., Any] | Backend | str, question: Question) -> Iterator[Callable[..., Any] | Backend]:
    """Yield a callable or backend as it is, and a backend by its name.

    Raises ValueError for a backend that refuses the question's workload, before the block or as late as in it.
    """
    subject: Callable[..., Any] | Backend = Registry()[fn] if isinstance(fn, str) else fn
    reason: object = None
    if isinstance(subject, Backend):
        reason = obstacle(subject, question.workload, machine_of(question.device), question.backward)
    if reason is None:
        try:
            yield subject
        except RefusedError as error:
            reason = error
    if reason is not None:
        raise ValueError(f"backend {subject_name(subject)!r} cannot take {question.workload.id}: {reason}") from None


def named(workload: Workload | str) -> Workload:
    """Return a workload, by its name in the catalog where it is one. Raises ValueError for a name that stands for several."""
    if not isinstance(workload, str):
        return workload
    found = builtin_catalog().select(workload)
    if len(found) != 1:
        names = ", ".join(w.id for w in found)
        raise ValueError(f"{workload!r} stands for {len(found)} workloads; name one: {names}")
    return found[0]
