"""`pytest_attn.check_model`: compare every attention call of a model, or a layer, with exact attention."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

import torch

from pytest_attn.backends.contexts import eager_because, unlimited_recompiles
from pytest_attn.backends.layouts import first_of
from pytest_attn.backends.machine import Machine, machine_of
from pytest_attn.backends.precision import Precision, precision_named
from pytest_attn.backends.raised import ending_no_test
from pytest_attn.backends.subject import Subject
from pytest_attn.correctness.comparison import TensorComparison
from pytest_attn.correctness.contract import ContractError
from pytest_attn.correctness.judge import RERUN
from pytest_attn.correctness.known_pair import judge_kept
from pytest_attn.correctness.limits import limits_named, limits_of
from pytest_attn.diagnosis.diagnose import Context
from pytest_attn.guests.models.call_judge import judge_call, known_defect_of
from pytest_attn.guests.models.call_to_workload import DropoutError
from pytest_attn.guests.models.capture import AttentionCall, ConfiguredMasks, Recorder, bare, label_of
from pytest_attn.guests.models.compiled import CompiledRun, judge_compiled, runs_compiled
from pytest_attn.guests.models.interception import (
    Handler,
    InterceptedCall,
    Named,
    as_functions,
    intercept_attention,
    is_of_transformers,
    lacks_masks,
    never_called,
    outside_inference,
)
from pytest_attn.guests.models.model_comparison import CallComparison, ModelComparison, describe
from pytest_attn.guests.models.ratios import RepeatableStep, ratios_of
from pytest_attn.guests.models.siblings import traits_of, with_strangers
from pytest_attn.guests.models.step import StepResult, device_of, refuse_scripted, require_arguments, run_step, untouched
from pytest_attn.guests.models.substitution import Replacer, replacement
from pytest_attn.reports.lines import some
from pytest_attn.workloads.distributions import Draw
from pytest_attn.workloads.functions import type_name

#: what computes a model's attention instead of what it calls itself
Target = Callable[..., Any] | Subject | str


def check_model(
    model: torch.nn.Module,
    step: Callable[[], Any],
    backend: Target | None = None,
    backward: bool = True,
    *,
    functions: Iterable[Callable[..., Any] | str] = (),
    inline: Iterable[str] | str = (),
    limits: str = "default",
    scatter: int = 4,
    precision: str | Precision | None = None,
) -> ModelComparison:
    """Run `step`, and compare every attention call that the model makes with exact attention on its own tensors.

    The model is left as it was: parameters, gradients, buffers, training mode, random numbers.

    Args:
        model: the module whose calls are judged.
        step: a function without arguments that can be repeated; returns a tensor, a mapping of tensors or a model's
            output. Its loss, "loss" or a scalar that needs a gradient, is where the backward pass begins, unless the step
            runs that itself.
        backend: a backend, its name, or a function of (q, k, v, workload=...) that computes every call; by default the
            model's own attention is judged.
        backward: gradients, too; a step in torch.inference_mode() has none, and a note says so.
        functions: attention of your own, as for `capture`.
        inline: names of modules that write attention out, as "blocks.0.attn" or "blocks.*.attn": not judged, and no failure.
        limits: "default" or "strict".
        scatter: runs with exact attention and random rounding, which are the unit of `ratios`; 0 for none. These say how far
            outputs, loss and gradients of a model in half precision are from exact.
        precision: where a function of yours says it rounds ("flash", "eager", ..., or a `Precision`): what `backend` or
            `functions` name, else the model's own. A backend says it itself.

    Returns:
        The comparison of a model that is right.

    Raises:
        AssertionError: a call is wrong, was not read, or was not replaced, or none was caught, or none of a function that
            is named, or attention is written out in a module that `inline` does not name; the text has the calls.
        DropoutError: attention drops probabilities.
        TypeError: `model` is not a module, or torch.jit made it, or `step` is not a function.
        ValueError: the backend or the precision is unknown.
    """
    __tracebackhide__ = True
    options: Any = {"functions": functions, "inline": inline, "limits": limits, "scatter": scatter, "precision": precision}
    with judge_kept(type_name(model), torch.device("cpu")):
        comparison = judge_model(model, step, backend, backward, **options)
    if not comparison.passed:
        raise AssertionError(comparison.message)
    return comparison


def judge_model(
    model: torch.nn.Module, step: Callable[[], Any], backend: Target | None = None, backward: bool = True, **options: Any
) -> ModelComparison:
    """Return what `check_model` judges; wrong calls raise nothing. Arguments and other errors are those of `check_model`.

    options: those of `check_model`, and two more. compiled: judge the run of a compiled model, too. context: of each call; its
    deadline surrounds the run that is judged.
    """
    require_arguments(model, step)
    refuse_scripted(model)
    if torch.is_inference_mode_enabled():  # the step alone runs in it
        step = torch.inference_mode()(step)
    judge = _ModelJudge(model, step, backend, backward, **options)
    name = judge.subject.name if judge.subject else "the step"
    try:
        with outside_inference(), ending_no_test(name), unlimited_recompiles(), untouched(model) as again:
            judge.judge_calls(again)
            judge.repeat_unexplained(again)
            judge.compare_with_exact_runs(again)
    except DropoutError as error:
        if any(part.training for part in model.modules()):
            raise
        what = str(error).partition(";")[0]
        raise DropoutError(f"{what}, and the model is in evaluation: pass it only where self.training is True") from None
    return judge.comparison()


_INFERS = "the step runs in inference mode, where nothing has a gradient: forward passes alone were judged"
_NOT_COMPILED = "{} took the place of attention in the eager model; the compiled one was not run"
_EMPTY_ROWS_COMPILED = "what the compiled model holds in rows that see no key is not checked"


class _ModelJudge:
    """Judges the calls of a model's step, then compares its whole with runs of exact attention. subject: None for its own."""

    def __init__(
        self,
        model: torch.nn.Module,
        step: Callable[[], Any],
        backend: Target | None,
        backward: bool,
        *,
        functions: Iterable[Named] = (),
        inline: Iterable[str] | str = (),
        limits: str = "default",
        scatter: int = 4,
        precision: str | Precision | None = None,
        compiled: bool = True,
        context: Context | None = None,
    ) -> None:
        if precision is not None:
            precision_named(precision)
        self._model, self._step, self._backward = model, step, backward
        self._functions, self._precision = as_functions(functions), precision
        self._inline = (inline,) if isinstance(inline, str) else tuple(inline)
        self._scatter, self._looks_at_compiled = scatter, compiled
        self.subject = None if backend is None else replacement(backend, precision=precision)
        self._context = context or Context()
        self._judged = _CallJudge(limits, machine_of(device_of(model)), self._context)
        #: None where the step did not end
        self._result: StepResult | None = None
        self._ratios: dict[str, float] = {}
        self._compiled: CompiledRun | None = None
        self._note, self._about_gradients, self._about_compiled = "", "", ""

    def judge_calls(self, again: Callable[[], None]) -> None:
        """Run the step, and judge each attention call that it makes. again: makes the model what it was."""
        model, subject, backward = self._model, self.subject, self._backward
        if subject is None:
            masks, self._note = configured_masks(self._step, model)
            again()
            self._recorder = Recorder(self._judged.judge, backward, masks, judges=True, precision=self._precision)
        else:
            self._recorder = Replacer(subject, self._judged.machine, self._judged.judge, backward)
        self._replaces = subject is not None and lacks_masks(model, is_replaced=True)
        intercepting = intercept_attention(self._recorder, model, self._functions, self._replaces)
        calling = subject.calling() if subject else nullcontext()
        with self._context.deadline(), intercepting as self._tracker, calling:
            try:
                self._result = run_step(self._step, model, backward)
            except Exception as error:
                if not self._recorder.unread_calls:  # which are to be told first
                    raise
                self._note = f"the step did not end: {type(error).__name__}: {error}"
        self._recorder.finish()
        self._calls = tuple(with_strangers(sorted(self._judged.calls, key=lambda call: call.order), self._tracker))

    def repeat_unexplained(self, again: Callable[[], None]) -> None:
        """Say of wrong calls that no cause explains whether two equal ones differ."""
        if not any(map(_is_unexplained, self._calls)):
            return
        repeated = RepeatedCalls()
        if self.subject is not None:
            repeated = RepeatedCalls(Replacer(self.subject, self._judged.machine, lambda call: None, backward=False))
        again()
        with suppress(Exception), intercept_attention(repeated, self._model, self._functions, self._replaces):
            run_step(self._step, self._model, backward=False)
        self._calls = tuple(
            _as_differing(call) if _is_unexplained(call) and call.label in repeated.differing else call for call in self._calls
        )

    def compare_with_exact_runs(self, again: Callable[[], None]) -> None:
        """Compare outputs and gradients of the step, and of its compiled run, with those of exact attention."""
        if self._result is None:
            return
        if self._backward and self._result.infers and not self._result.gradients:
            self._backward, self._about_gradients = False, _INFERS
        model, step, subject, beside = self._model, self._step, self.subject, self._recorder.beside
        repeatable = RepeatableStep(model, step, again, self._backward, self._functions, subject, self._precision, beside)
        is_approximate = subject is not None and subject.is_approximate
        if self._scatter and self._judged.all_are_rounded and not is_approximate:
            self._ratios = ratios_of(self._result, repeatable, self._scatter)
        if self._looks_at_compiled and runs_compiled(model, step):
            self._judge_compiled(repeatable)

    def _judge_compiled(self, repeatable: RepeatableStep) -> None:
        if self.subject is not None:
            self._about_compiled = _NOT_COMPILED.format(self.subject.name)
            return
        self._compiled, self._about_compiled = judge_compiled(repeatable), eager_because()
        if self._judged.has_empty_rows and self._compiled.wrong:
            self._compiled = self._compiled.not_compared(_EMPTY_ROWS_COMPILED)

    def comparison(self) -> ModelComparison:
        """Return what was found."""
        tracker, recorder = self._tracker, self._recorder
        comparison = ModelComparison(
            subject="" if self.subject is None else self.subject.name,
            calls=self._calls,
            unread=tuple(recorder.unread_calls),
            refused=tuple(recorder.refused) if isinstance(recorder, Replacer) else (),
            silent=tuple(tracker.silent),
            unseen=() if self._replaces else never_called(self._functions, tracker.functions),
            with_softmax=tuple(tracker.with_softmax),
            written_out=tracker.written_out,
            inline=self._inline,
            backward=self._backward,
            ratios=self._ratios,
            compiled=self._compiled,
            notes=tuple(filter(None, self._notes())),
        )
        return dataclasses.replace(comparison, message="" if comparison.passed else describe(comparison))

    def _notes(self) -> Iterator[str]:
        """Say what was left out, and which modules attend in a way that cannot be seen, or made no call; "" says nothing."""
        tracker = self._tracker
        yield self._note
        names = dict.fromkeys((*tracker.written_out, *tracker.silent))
        if left_out := [name for name in names if any(fnmatchcase(name, pattern) for pattern in self._inline)]:
            yield f"not judged, because inline= names them: {some(left_out)}"
        yield self._about_gradients
        yield from self._judged.notes()
        layers = [name for name, module in self._model.named_modules() if isinstance(module, torch.nn.MultiheadAttention)]
        if (layers and not self._calls) or not tracker.written_out.keys().isdisjoint(layers):
            yield "torch.nn.MultiheadAttention computes attention inline when it returns its weights: pass need_weights=False"
        if silent := [name for name in tracker.silent if name not in {**tracker.written_out, **tracker.with_softmax}]:
            yield f"not judged: {some(silent)} made no attention call, while others of its kind made one"
        yield self._about_compiled


def _is_unexplained(call: CallComparison) -> bool:
    """Return whether a call is wrong for a reason that nothing says."""
    mismatch = call.comparison.mismatch if call.comparison else None
    return mismatch is not None and not call.misled and not any(hint.fault for hint in mismatch.hints)


def _as_differing(call: CallComparison) -> CallComparison:
    assert call.comparison is not None
    assert call.comparison.mismatch is not None
    mismatch = dataclasses.replace(call.comparison.mismatch, hints=(RERUN,))
    return dataclasses.replace(call, comparison=dataclasses.replace(call.comparison, mismatch=mismatch))


_DIVERGED = "hold NaN or infinite elements in q, k or v: results that depend on these mean nothing"
_DETACHED = "give no gradient, though q, k or v need one: none was compared there"
_NARROWER = "hide keys that the masks of the model's configuration show, as sparse attention does: judged by their own"


class _CallJudge:
    """Judges each call once it is complete, and keeps the judgment only."""

    def __init__(self, limits: str, machine: Machine, context: Context) -> None:
        self.calls: list[CallComparison] = []
        self.fills_empty_rows, self.has_empty_rows = False, False
        self.machine = machine
        self._limits, self._context = limits, context
        #: by what is worth knowing of some calls, their order and label
        self._noted: dict[str, list[tuple[int, str]]] = {_DIVERGED: [], _DETACHED: [], _NARROWER: []}

    @property
    def all_are_rounded(self) -> bool:
        """True where calls are in half precision, and what they hold in rows that see no key counts for nothing."""
        return bool(self.calls) and not self.fills_empty_rows and all(c.workload.dtype != "float32" for c in self.calls)

    def notes(self) -> Iterator[str]:
        """Say what cannot be seen in calls, and what was not judged of them."""
        for what, noted in self._noted.items():
            if noted:
                yield f"{len(noted)} of {len(self.calls)} calls {what} ({some([label for _, label in sorted(noted)])})"
        both = limits_named(self._limits)

        def is_raised(row: TensorComparison) -> bool:
            """Return whether fault-free kernels are further from exact than the limits allow."""
            usual = limits_of(row.name, both)
            is_of_few_rows = row.limits.head == usual.row
            return row.limits.row > usual.row or (row.limits.head > 2 * usual.head and not is_of_few_rows)

        if raised := [one.label for one in self.calls if one.comparison and any(map(is_raised, one.comparison.tensors))]:
            yield (
                f"small faults cannot be seen in {len(raised)} of {len(self.calls)} calls ({some(raised)}): attention is"
                " almost uniform there, and honest rounding adds up; use trained weights, or enlarge the projections of"
                " q and k"
            )
        if self.fills_empty_rows:
            yield (
                "rows that see no key are not 0 in some calls, so how far outputs and gradients are from exact is not reported"
            )

    def judge(self, call: AttentionCall) -> None:
        """Hold a call against exact attention."""
        is_replaced = call.subject is not None
        facts = call.module, call.label, call.function, call.workload
        more: Any = {"is_replaced": is_replaced, "order": call.order, "kernel": call.kernel, "traits": traits_of(call)}
        found = CallComparison(*facts, None, bool(call.gradients), misled=call.misled, **more)
        self.fills_empty_rows |= call.fills_empty_rows
        self.has_empty_rows |= call.empty_rows is not None and call.empty_rows.are_there
        is_finite = all(bool(t.isfinite().all()) for t in (call.q, call.k, call.v))
        for what, holds in ((_DIVERGED, not is_finite), (_DETACHED, call.is_detached), (_NARROWER, call.is_narrower)):
            if holds:
                self._noted[what].append((call.order, call.label))
        try:
            comparison = judge_call(call, self._limits, self._context)
            known = known_defect_of(call, comparison, self.machine)
            self.calls.append(dataclasses.replace(found, comparison=comparison, known=known))
        except ContractError as error:
            self.calls.append(dataclasses.replace(found, fault=str(error)))


#: which part of the largest element two equal calls differ by, beyond the order of their sums
_DIFFERENCE = 1e-2


class RepeatedCalls(Handler):
    """Makes each call again on copies of its tensors. differing: labels of those that give something else each time.

    replacer: what computes them, where that is not the model. It may count its calls, so that each has to differ from two.
    """

    def __init__(self, replacer: Replacer | None = None) -> None:
        self.differing: set[str] = set()
        self._compute: Callable[[InterceptedCall], Any] = replacer.handle if replacer else InterceptedCall.compute
        self._times = 3 if replacer else 2

    def handle(self, intercepted: InterceptedCall) -> Any:
        """Compare results of a call, and let it be computed."""
        found = [
            bare(first_of(self._compute(intercepted.with_tensors(*(t.clone() for t in intercepted.tensors)))))
            for _ in range(self._times)
        ]
        far = _DIFFERENCE * float(found[0].abs().max())
        if all(float((one - other).abs().max()) > far for one, other in combinations(found, 2)):
            self.differing.add(label_of(intercepted.module, intercepted.number))
        return self._compute(intercepted)


class MaskRecorder(Handler):
    """Notes what each call may see, by module and number of its call."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int], ConfiguredMasks] = {}

    def handle(self, intercepted: InterceptedCall) -> Any:
        """Note the masks, and let the call be computed."""
        if intercepted.is_again:
            return intercepted.compute()
        mask, visible = intercepted.arguments.get("attention_mask"), None
        if mask is not None and getattr(mask, "ndim", 0) == 4 and str(mask.dtype) == "torch.bool":
            visible = mask[..., : intercepted.tensors[1].shape[-2]]
        self.found[intercepted.module, intercepted.number] = ConfiguredMasks(visible, intercepted.handed)
        return intercepted.compute()


def configured_masks(
    step: Callable[[], Any], model: torch.nn.Module | None
) -> tuple[dict[tuple[str, int], ConfiguredMasks], str]:
    """Run a step with every mask built in full, and return these; "" or why there are none.

    A name that is registered with the functions of transformers but not with its masks gets none: the model asks for a mask
    all the same, and here it is.
    """
    if not is_of_transformers(model):
        return {}, ""
    expected = MaskRecorder()
    try:
        with intercept_attention(expected, model, replaces=True):
            step()
    except DropoutError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        return {}, f"the masks of the model's configuration could not be built ({said}); each call is judged by its own mask"
    return expected.found, ""


#: batch entries and tokens of drawn hidden states
_SHAPE = (2, 64)
#: hidden states are so large that freshly initialized projections give attention that is far from uniform
_SPREAD = 3.0


def check_module(
    module: torch.nn.Module,
    inputs: Any = None,
    backend: Target | None = None,
    backward: bool = True,
    **options: Any,
) -> ModelComparison:
    """Call an attention layer, and compare its attention with exact attention on the same tensors.

    Projections and rotary embeddings are the module's own.

    Args:
        module: the layer, such as torch.nn.MultiheadAttention or one of transformers or timm.
        inputs: a tensor, a tuple of positional arguments or a mapping of keyword arguments. By default hidden states are
            drawn for torch.nn.MultiheadAttention and its layers, and for a module whose forward takes them alone.
        backend: a backend, its name, or a function of (q, k, v, workload=...), in place of the layer's own attention.
        backward: gradients, too.
        options: functions, inline, limits, scatter and precision, as for `check_model`.

    Returns:
        The comparison of a layer that is right.

    Raises:
        AssertionError: a call is wrong, was not read, or was not replaced, or none was caught; the text has the calls.
        DropoutError: attention drops probabilities.
        ValueError: no inputs can be drawn for this module, or the backend is unknown.
    """
    __tracebackhide__ = True
    return check_model(module, module_step(module, inputs), backend, backward, **options)


def module_step(module: torch.nn.Module, inputs: Any = None, shape: tuple[int, int] = _SHAPE) -> Callable[[], Any]:
    """Return a step that calls the module. shape: batch entries and tokens of hidden states that are drawn."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    if inputs is None:
        args, kwargs = _drawn(module, shape)
    elif isinstance(inputs, Mapping):
        kwargs = inputs
    elif isinstance(inputs, torch.Tensor):
        args = (inputs,)
    elif isinstance(inputs, tuple | list):
        args = tuple(inputs)
    else:
        raise ValueError(f"inputs must be a tensor, a tuple or a mapping of arguments, got {type(inputs).__name__}")
    return lambda: module(*args, **kwargs)


def _drawn(module: torch.nn.Module, shape: tuple[int, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments for a module that takes hidden states, as far as it says how wide they are."""
    if isinstance(module, torch.nn.MultiheadAttention):
        widths = {"query": module.embed_dim, "key": module.kdim, "value": module.vdim}
        query, key, value = (_hidden(module, name, shape, width, module.batch_first) for name, width in widths.items())
        is_self = len({*widths.values()}) == 1
        return (query, query, query) if is_self else (query, key, value), {"need_weights": False}
    if isinstance(module, torch.nn.TransformerEncoderLayer):
        attention = module.self_attn
        return (_hidden(module, "src", shape, attention.embed_dim, attention.batch_first),), {}
    taken = [p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
    plain = [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    projection = next((m for m in module.modules() if isinstance(m, torch.nn.Linear)), None)
    if len(plain) != 1 or projection is None:
        names = ", ".join(p.name for p in plain) or "nothing"
        raise ValueError(
            f"no inputs can be drawn for {type(module).__name__}, whose forward takes {names};"
            " say inputs=(hidden_states, ...) or inputs={'hidden_states': ...}"
        )
    return (_hidden(module, plain[0].name, shape, projection.in_features, True),), {}


def _hidden(module: torch.nn.Module, name: str, shape: tuple[int, int], width: int, is_batch_first: bool) -> torch.Tensor:
    """Draw hidden states in the dtype and on the device of the module's first parameter."""
    like = next(module.parameters())
    drawn = Draw(f"{type(module).__name__}/0", like.dtype, like.device).normal(name, (*shape, width), _SPREAD)
    return drawn if is_batch_first else drawn.transpose(0, 1)
