"""The judgment without pytest: `pytest_attn.check`, `check_invariants` and `measure`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_type_hints

import torch

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.declaration import Declaration, Declared, arguments_of, described
from pytest_attn.backends.machine import current, machine_of, resolve_device
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.subject import Dequantizer, RefusedError, Subject
from pytest_attn.correctness import mismatch_text
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.judge import Kernel
from pytest_attn.correctness.known_pair import judge_kept
from pytest_attn.correctness.replaced_functions import require_clocks
from pytest_attn.correctness.rounded import OwnForm, OwnReferences
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.correctness.switches import KeptSwitches
from pytest_attn.diagnosis.diagnose import Context, judged
from pytest_attn.invariants.all_invariants import Names, judge_invariants
from pytest_attn.invariants.report import InvariantReport, describe_invariants
from pytest_attn.latency.kernel_work import KernelWork, work_of
from pytest_attn.latency.protocol import stopwatch_of, threads
from pytest_attn.latency.result import Latency
from pytest_attn.latency.work import LatencyDirection, direction_of
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.distributions import distribution_names
from pytest_attn.workloads.fields import instead_of
from pytest_attn.workloads.inputs import draw_inputs
from pytest_attn.workloads.parameters import PARAMETERS, asked_gradients
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    from typing_extensions import Unpack

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Judged = TypeVar("_Judged", Comparison, InvariantReport)


def takes_declaration(function: _Function) -> _Function:
    """Show the fields of `Declaration` in place of a function's **declared: in its signature, annotations and docstring."""
    signature = inspect.signature(function)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    types = get_type_hints(Declaration)
    keywords = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=types[one.name])
        for one in arguments_of(Declaration)
    ]
    shown = signature.replace(parameters=[*own, *keywords])
    function.__signature__ = shown  # type: ignore[attr-defined]
    function.__annotations__ = {
        **{name: one.annotation for name, one in shown.parameters.items()},
        "return": signature.return_annotation,
    }
    if function.__doc__:  # there is none under python -OO
        function.__doc__ = re.sub(
            r"( +)\*\*declared: .*", lambda line: described(arguments_of(Declaration), line[1]), function.__doc__
        )
    return function


def declaration_of(function: Callable[..., Any], keywords: Declared) -> Declaration:
    """Return what keywords of a function declare; raises TypeError for one that it does not have."""
    known = inspect.signature(function).parameters
    for name in keywords.keys() - known.keys():
        meant = instead_of(name, known).rstrip(";")
        raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{meant and f';{meant}'}")
    return Declaration(**keywords)


@takes_declaration
def check(
    fn: Callable[..., Any] | Backend | str,
    workload: Workload | str,
    *,
    backward: bool | Sequence[str] = False,
    inputs: str | tuple[str, ...] | None = None,
    device: str = "auto",
    seed: int = 0,
    limits: str = "default",
    name: str | None = None,
    dequantized: Dequantizer | None = None,
    reference: OwnForm | None = None,
    **declared: Unpack[Declared],
) -> Comparison:
    """Compare a callable with exact attention in float64, without pytest.

    Args:
        fn: a callable of (q, k, v) that returns out, or (out, lse) with returns_lse=True; a backend; or a backend's name.
        workload: a `Workload`, or a name of the catalog that stands for one.
        backward: compare dq, dk and dv as well; or the gradients of these alone: any of "q", "k", "v", "sinks", "bias" and
            "alibi". Of the last three fn uses the tensor of `draw_inputs` for the workload and the seed, with
            `requires_grad_()`.
        inputs: names of input distributions, by default ("structured", "flat").
        device: "auto", "cpu", "cuda", "cuda:N", "xpu" or "mps".
        seed: of the inputs.
        limits: "default" or "strict": the largest z of an element, and RMS of a row and of a head.
        name: what reports call a callable, by default its qualified name.
        dequantized: of a callable that quantizes inside, a function of (q, k, v) that returns what it makes of them, as float
            tensors: exact attention is that of these values.
        reference: what out is exactly, where fn is not softmax attention: a function of q, k and v in float64, each step of
            which is torch's and in float64. Gradients are its own, by autograd. No cause is looked for.
        **declared: what fn says of itself (`Declaration`).

    Returns:
        The comparison: a row per tensor and input distribution.

    Raises:
        AssertionError: fn is wrong; the text is the diagnosis.
        ContractError: what fn returned cannot be compared; an AssertionError, too.
        NotImplementedError: fn declines the workload by one with a text.
        ValueError: an argument is none of the known, a backend cannot take the workload, or reference can judge no kernel.
        TypeError: fn is none of the three, or there is no such argument.
    """
    __tracebackhide__ = True
    made, names = _named(workload), distribution_names(inputs)
    leaves, wanted = asked_gradients(backward, [made])
    spec = CheckSpec(made, resolve_device(device), bool(backward), names, declaration_of(check, declared), seed, limits)
    if wanted:
        drawn = draw_inputs(made, names[0], seed, spec.device)
        parameters = {name: getattr(drawn, PARAMETERS[name].tensor) for name in wanted}
        spec = replace(spec, parameters=parameters)
    spec = replace(spec, leaves=leaves) if backward else spec
    subject = spec.subject(Registry(), fn, name, dequantized=dequantized)
    if reference is None:
        return checked(subject, spec)
    # no fault of a softmax is the cause
    return checked(subject, spec, references=OwnReferences(reference, spec), is_known=lambda comparison: True)


@takes_declaration
def check_invariants(
    fn: Callable[..., Any] | Backend | str,
    workload: Workload | str,
    *,
    only: Names = None,
    skip: Names = None,
    thorough: bool = False,
    backward: bool | Sequence[str] = False,
    device: str = "auto",
    seed: int = 0,
    name: str | None = None,
    dequantized: Dequantizer | None = None,
    **declared: Unpack[Declared],
) -> InvariantReport:
    """Check every invariant that applies to a callable, without pytest: what holds of every attention kernel.

    Args:
        fn: as for `check`.
        workload: as for `check`.
        only: names of the invariants to run; by default all but the thorough ones.
        skip: names of invariants to leave out.
        thorough: run all of them, with more repetitions.
        backward: run those of dq, dk and dv as well, or of these alone: any of "q", "k" and "v".
        device: as for `check`.
        seed: as for `check`.
        name: as for `check`.
        dequantized: as for `check`.
        **declared: what fn says of itself (`Declaration`).

    Returns:
        The report: a finding per invariant.

    Raises:
        AssertionError: an invariant is broken; the text is the evidence.
        ContractError: as for `check`.
        NotImplementedError: as for `check`.
        ValueError: as for `check`, or no invariant has the name.
        TypeError: as for `check`.
    """
    __tracebackhide__ = True
    made = declaration_of(check_invariants, declared)
    asked = _named(workload)
    leaves, wanted = asked_gradients(backward, [asked])
    if wanted:
        raise ValueError(
            f"without pytest invariants take gradients of q, k and v; those of {', '.join(wanted)} need a test with a marker"
        )
    spec = CheckSpec(asked, resolve_device(device), bool(backward), declared=made, seed=seed)
    spec = replace(spec, leaves=leaves) if backward else spec
    subject = spec.subject(Registry(), fn, name, dequantized=dequantized)
    return checked_invariants(subject, spec, references=ReferenceCache(), only=only, skip=skip, thorough=thorough)


@takes_declaration
def measure(
    fn: Callable[..., Any] | Backend | str,
    workload: Workload | str,
    *,
    backward: bool | Literal["both"] = False,
    inputs: str | tuple[str, ...] | None = None,
    device: str = "auto",
    seed: int = 0,
    cold: bool = True,
    cpu_threads: int | None = None,
    name: str | None = None,
    **declared: Unpack[Declared],
) -> Latency:
    """Check a callable as `check` does, then time it, without pytest and without a baseline.

    Args:
        fn: as for `check`.
        workload: as for `check`.
        backward: False times the forward pass, True the backward pass alone, "both" one after the other.
        inputs: as for `check`.
        device: as for `check`.
        seed: as for `check`.
        cold: flush a GPU's L2 cache before each sample.
        cpu_threads: threads of torch while a CPU is timed; None leaves them.
        name: as for `check`.
        **declared: what fn says of itself (`Declaration`).

    Returns:
        The latency, in seconds.

    Raises:
        AssertionError: as for `check`.
        StaleError: when called again, fn left results that are not those of its data.
        RuntimeError: a clock of Python, or the judge, has been replaced.
        ContractError: as for `check`.
        NotImplementedError: as for `check`.
        ValueError: as for `check`.
        TypeError: as for `check`.
    """
    __tracebackhide__ = True
    direction, where = direction_of(backward), resolve_device(device)
    made = declaration_of(measure, declared)
    spec = CheckSpec(_named(workload), where, bool(backward), distribution_names(inputs), made, seed)
    subject = spec.subject(Registry(), fn, name)
    checked(subject, spec)

    def take(work: KernelWork) -> Latency:
        return stopwatch_of(where, cold).measure(work, spec.workload.id, subject.name)

    return timed(subject, spec, direction, take, cpu_threads)


def timed(
    subject: Subject,
    spec: CheckSpec,
    direction: LatencyDirection,
    take: Callable[[KernelWork], Latency],
    cpu_threads: int | None = None,
) -> Latency:
    """Return the time that `take` finds of what was judged right, once the device is as it is to be."""
    require_clocks()
    where = spec.device
    kept, limited = _kept(subject, spec), threads(cpu_threads if where.type == "cpu" else None)
    with kept, current(where), subject.calling(), limited, KeptSwitches(where.type):
        return take(work_of(subject, spec, direction, machine_of(where)))


def checked(subject: Subject, spec: CheckSpec, *lines: str, **context: Any) -> Comparison:
    """Judge a subject; raises as `check` does, with lines added. context: of `Context`."""
    __tracebackhide__ = True
    comparison = judged_in_words(subject, spec, lambda: judged(Kernel(subject, spec), Context(**context)), *lines)
    if not comparison.passed:
        raise AssertionError("\n".join([mismatch_text.describe(comparison), *lines]))
    return comparison


def checked_invariants(subject: Subject, spec: CheckSpec, *lines: str, **asked: Any) -> InvariantReport:
    """Check invariants of a subject; raises as `check_invariants` does, with lines added. asked: of `judge_invariants`."""
    __tracebackhide__ = True
    report = judged_in_words(subject, spec, lambda: judge_invariants(subject, spec, **asked), *lines)
    if not report.passed:
        raise AssertionError("\n".join([describe_invariants(report), *lines]))
    return report


def judged_in_words(subject: Subject, spec: CheckSpec, answer: Callable[[], _Judged], *lines: str) -> _Judged:
    """Return what `answer` returns of a subject; of a broken contract say whose it is, and add lines.

    Raises ContractError, ValueError where a backend refuses the spec's workload, before or as late as in `answer`, and
    NotImplementedError where a callable declines it.
    """
    __tracebackhide__ = True
    w = spec.workload
    refused = subject.obstacle(w, machine_of(spec.device), spec.backward) if subject.is_backend else None
    if refused is None:
        try:
            with _kept(subject, spec):
                return answer()
        except RefusedError as error:
            refused = str(error)
        except ContractError as error:
            raise ContractError("\n".join([mismatch_text.describe_contract(error), *lines])) from None
    if not subject.is_backend:
        raise NotImplementedError(f"{subject.name} declines {spec.workload.id}: {refused}")
    raise ValueError(f"backend {subject.name!r} cannot take {spec.workload.id}: {refused}")


@contextmanager
def _kept(subject: Subject, spec: CheckSpec) -> Iterator[None]:
    """Keep the judge as it is, and the caller's `torch.no_grad` or `inference_mode` from a kernel that is not within."""
    with torch.inference_mode(False), judge_kept(f"{subject.name} on {spec.workload.id}", spec.device):
        yield


def _named(workload: Workload | str) -> Workload:
    """Return a workload, by its name in the catalog where it is one. Raises ValueError for a name that stands for several."""
    if not isinstance(workload, str):
        return workload
    found = builtin_catalog().select(workload)
    if len(found) != 1:
        names = ", ".join(w.id for w in found)
        raise ValueError(f"{workload!r} stands for {len(found)} workloads; name one: {names}")
    return found[0]
