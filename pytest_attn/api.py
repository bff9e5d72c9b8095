"""The judgment without pytest: `pytest_attn.check`, `check_invariants` and `measure`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.machine import current, machine_of, resolve_device
from pytest_attn.backends.precision import Precision
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.subject import Dequantizer, RefusedError, Subject
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.references import ReferenceCache
from pytest_attn.correctness.signature import signature_of
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.diagnosis.diagnose import diagnose
from pytest_attn.invariants.check import Names, judge_invariants
from pytest_attn.invariants.report import InvariantReport
from pytest_attn.latency.protocol import stopwatch_of, threads
from pytest_attn.latency.result import Latency
from pytest_attn.latency.work import direction_of, work_of
from pytest_attn.messages import invariants, mismatch
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.distributions import distribution_names
from pytest_attn.workloads.workload import Workload

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

_Judged = TypeVar("_Judged", Comparison, InvariantReport)


def check(
    fn: Callable[..., Any] | Backend | str,
    workload: Workload | str,
    *,
    backward: bool = False,
    inputs: str | tuple[str, ...] | None = None,
    precision: str | Precision = "flash",
    layout: str = "bhsd",
    returns_lse: bool = False,
    returns: Sequence[str] | None = None,
    out_layout: str | None = None,
    lse_base: str | int = "e",
    lse_layout: str | None = None,
    takes_out: bool = False,
    device: str = "auto",
    seed: int = 0,
    limits: str = "default",
    empty_rows: str = "zero",
    contiguous: bool = False,
    name: str | None = None,
    dequantized: Dequantizer | None = None,
) -> Comparison:
    """Hold a callable against exact attention in float64, without pytest.

    Args:
        fn: a callable of (q, k, v) that returns out, or (out, lse) with returns_lse=True; a backend; or a backend's name.
        workload: a `Workload`, or a name of the catalog that stands for one.
        backward: compare dq, dk and dv as well.
        inputs: names of input distributions, by default ("structured", "flat").
        precision: where the kernel says it rounds ("flash", "flash2", "eager", ..., or a `Precision`).
        layout: "bhsd" or "bshd", in which fn takes and returns tensors; "hsd" or "shd" where they have no batch dimension;
            packed workloads are "thd".
        returns_lse: fn returns (out, lse): lse (batch, heads, q_len), float32, the natural logarithm.
        returns: what fn returns, in its order: "out", "lse", "weights" (the softmax matrix), "max" (the largest score of each
            row), "keep" (what dropout has left) and "ignored".
        out_layout: that of out, where it is another.
        lse_base: "e" or 2, of lse and max.
        lse_layout: "bhs", "bsh", "hs" or "sh", of lse and max.
        takes_out: fn writes out into its argument out=, which is filled with NaN before.
        device: "auto", "cpu", "cuda", "cuda:N", "xpu" or "mps".
        seed: of the inputs.
        limits: "default" or "strict": the largest z of an element, and RMS of a row and of a head.
        empty_rows: what fn returns in rows that see no key: "zero", "finite" (any finite numbers) or "any", which leaves
            these rows and their dout out.
        contiguous: whether fn takes contiguous tensors only, as its documentation says.
        name: what reports call a callable, by default its qualified name.
        dequantized: of a callable that quantizes inside, a function of (q, k, v) that returns what it makes of them, as float
            tensors: exact attention is that of these values.

    Returns:
        The comparison: a row per tensor and input distribution.

    Raises:
        AssertionError: fn is wrong; the text is the diagnosis.
        ContractError: what fn returned cannot be compared; an AssertionError, too.
        NotImplementedError: fn declines the workload by one with a text.
        ValueError: an argument is none of the known, or a backend cannot take the workload.
        TypeError: fn is none of the three.
    """
    __tracebackhide__ = True
    names = distribution_names(inputs)
    spec = CheckSpec(
        *(_named(workload), resolve_device(device), backward, names, precision, layout, returns_lse, seed, limits),
        *(empty_rows, contiguous, signature_of(layout, returns_lse, returns, out_layout, lse_base, lse_layout, takes_out)),
    )
    return _checked(spec.subject(Registry(), fn, name, dequantized=dequantized), spec)


def check_invariants(
    fn: Callable[..., Any] | Backend | str,
    workload: Workload | str,
    *,
    only: Names = None,
    skip: Names = None,
    thorough: bool = False,
    backward: bool = False,
    precision: str | Precision = "flash",
    layout: str = "bhsd",
    returns_lse: bool = False,
    returns: Sequence[str] | None = None,
    out_layout: str | None = None,
    lse_base: str | int = "e",
    lse_layout: str | None = None,
    takes_out: bool = False,
    device: str = "auto",
    seed: int = 0,
    empty_rows: str = "zero",
    contiguous: bool = False,
    name: str | None = None,
    dequantized: Dequantizer | None = None,
) -> InvariantReport:
    """Ask a callable every invariant that applies, without pytest: what holds of right kernels and needs no tolerance.

    Args:
        fn: a callable of (q, k, v) that returns out, or (out, lse) with returns_lse=True; a backend; or a backend's name.
        workload: a `Workload`, or a name of the catalog that stands for one.
        only: names of the invariants to ask; by default all but the thorough ones.
        skip: names of invariants to leave out.
        thorough: ask all of them, with more repetitions.
        backward: compare dq, dk and dv as well.
        precision: where the kernel says it rounds ("flash", "flash2", "eager", ..., or a `Precision`).
        layout: "bhsd" or "bshd", in which fn takes and returns tensors; "hsd" or "shd" where they have no batch dimension;
            packed workloads are "thd".
        returns_lse: fn returns (out, lse): lse (batch, heads, q_len), float32, the natural logarithm.
        returns: what fn returns, in its order: "out", "lse", "weights" (the softmax matrix), "max" (the largest score of each
            row), "keep" (what dropout has left) and "ignored".
        out_layout: that of out, where it is another.
        lse_base: "e" or 2, of lse and max.
        lse_layout: "bhs", "bsh", "hs" or "sh", of lse and max.
        takes_out: fn writes out into its argument out=, which is filled with NaN before.
        device: "auto", "cpu", "cuda", "cuda:N", "xpu" or "mps".
        seed: of the inputs.
        empty_rows: what fn returns in rows that see no key: "zero", "finite" (any finite numbers) or "any", which leaves
            these rows and their dout out.
        contiguous: whether fn takes contiguous tensors only, as its documentation says.
        name: what reports call a callable, by default its qualified name.
        dequantized: of a callable that quantizes inside, a function of (q, k, v) that returns what it makes of them, as float
            tensors: exact attention is that of these values.

    Returns:
        The report: a finding per invariant.

    Raises:
        AssertionError: an invariant is broken; the text is the evidence.
        ContractError: what fn returned cannot be compared; an AssertionError, too.
        NotImplementedError: fn declines the workload by one with a text.
        ValueError: an argument is none of the known, or a backend cannot take the workload.
        TypeError: fn is none of the three.
    """
    __tracebackhide__ = True
    spec = CheckSpec(
        _named(workload),
        resolve_device(device),
        backward,
        precision=precision,
        layout=layout,
        returns_lse=returns_lse,
        seed=seed,
        empty_rows=empty_rows,
        contiguous=contiguous,
        signature=signature_of(layout, returns_lse, returns, out_layout, lse_base, lse_layout, takes_out),
    )
    subject = spec.subject(Registry(), fn, name, dequantized=dequantized)
    report = judged_in_words(subject, spec, lambda: judge_invariants(subject, spec, ReferenceCache(), only, skip, thorough))
    if not report.passed:
        raise AssertionError(invariants.describe(report))
    return report


def measure(
    fn: Callable[..., Any] | Backend | str,
    workload: Workload | str,
    *,
    backward: bool | Literal["both"] = False,
    inputs: str | tuple[str, ...] | None = None,
    precision: str | Precision = "flash",
    layout: str = "bhsd",
    returns_lse: bool = False,
    returns: Sequence[str] | None = None,
    out_layout: str | None = None,
    lse_base: str | int = "e",
    lse_layout: str | None = None,
    takes_out: bool = False,
    device: str = "auto",
    seed: int = 0,
    cold: bool = True,
    cpu_threads: int | None = None,
    empty_rows: str = "zero",
    contiguous: bool = False,
    name: str | None = None,
) -> Latency:
    """Check a callable as `check` does, then time it, without pytest and without a baseline.

    Args:
        fn: a callable of (q, k, v) that returns out, or (out, lse) with returns_lse=True; a backend; or a backend's name.
        workload: a `Workload`, or a name of the catalog that stands for one.
        backward: False times the forward pass, True the backward pass alone, "both" one after the other.
        inputs: names of input distributions, by default ("structured", "flat").
        precision: where the kernel says it rounds ("flash", "flash2", "eager", ..., or a `Precision`).
        layout: "bhsd" or "bshd", in which fn takes and returns tensors; "hsd" or "shd" where they have no batch dimension;
            packed workloads are "thd".
        returns_lse: fn returns (out, lse): lse (batch, heads, q_len), float32, the natural logarithm.
        returns: what fn returns, in its order: "out", "lse", "weights" (the softmax matrix), "max" (the largest score of each
            row), "keep" (what dropout has left) and "ignored".
        out_layout: that of out, where it is another.
        lse_base: "e" or 2, of lse and max.
        lse_layout: "bhs", "bsh", "hs" or "sh", of lse and max.
        takes_out: fn writes out into its argument out=, which is filled with NaN before.
        device: "auto", "cpu", "cuda", "cuda:N", "xpu" or "mps".
        seed: of the inputs.
        cold: flush a GPU's L2 cache before each sample.
        cpu_threads: threads of torch while a CPU is timed; None leaves them.
        empty_rows: what fn returns in rows that see no key: "zero", "finite" (any finite numbers) or "any", which leaves
            these rows and their dout out.
        contiguous: whether fn takes contiguous tensors only, as its documentation says.
        name: what reports call a callable, by default its qualified name.

    Returns:
        The latency, in seconds.

    Raises:
        AssertionError: fn is wrong; the text is the diagnosis.
        StaleError: when called again, fn left results that are not those of its data.
        ContractError: what fn returned cannot be compared; an AssertionError, too.
        NotImplementedError: fn declines the workload by one with a text.
        ValueError: an argument is none of the known, or a backend cannot take the workload.
        TypeError: fn is none of the three.
    """
    __tracebackhide__ = True
    direction = direction_of(backward)
    where = resolve_device(device)
    names = distribution_names(inputs)
    spec = CheckSpec(
        *(_named(workload), where, bool(backward), names, precision, layout, returns_lse, seed),
        empty_rows=empty_rows,
        contiguous=contiguous,
        signature=signature_of(layout, returns_lse, returns, out_layout, lse_base, lse_layout, takes_out),
    )
    subject = spec.subject(Registry(), fn, name)
    _checked(subject, spec)
    with current(where), threads(cpu_threads if where.type == "cpu" else None):
        return stopwatch_of(where, cold).measure(work_of(subject, spec, direction), spec.workload.id, subject.name)


def _checked(subject: Subject, spec: CheckSpec) -> Comparison:
    """Judge a subject; raises as `check` does."""
    __tracebackhide__ = True
    comparison = judged_in_words(subject, spec, lambda: judge(subject, spec, ReferenceCache()))
    if not comparison.passed:
        raise AssertionError(mismatch.describe(diagnose(comparison, spec.diagnosis_timeout)))
    return comparison


def judged_in_words(subject: Subject, spec: CheckSpec, judged: Callable[[], _Judged], *lines: str) -> _Judged:
    """Return what `judged` returns of a subject; of a broken contract say whose it is, and add lines.

    Raises ContractError, ValueError where a backend refuses the spec's workload, before or as late as in `judged`, and
    NotImplementedError where a callable declines it.
    """
    __tracebackhide__ = True
    refused: object = None
    broken: ContractError | None = None
    if subject.is_backend:
        refused = subject.obstacle(spec.workload, machine_of(spec.device), spec.backward)
    if refused is None:
        try:
            return judged()
        except RefusedError as error:
            refused = error
        except ContractError as error:
            broken = error
    if broken is not None:
        raise ContractError("\n".join([mismatch.describe_contract(broken), *lines]))
    if not subject.is_backend:
        raise NotImplementedError(f"{subject.name} declines {spec.workload.id}: {refused}")
    raise ValueError(f"backend {subject.name!r} cannot take {spec.workload.id}: {refused}")


def _named(workload: Workload | str) -> Workload:
    """Return a workload, by its name in the catalog where it is one. Raises ValueError for a name that stands for several."""
    if not isinstance(workload, str):
        return workload
    found = builtin_catalog().select(workload)
    if len(found) != 1:
        names = ", ".join(w.id for w in found)
        raise ValueError(f"{workload!r} stands for {len(found)} workloads; name one: {names}")
    return found[0]
