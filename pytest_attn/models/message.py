"""How a model that did not pass reads: what was not judged first, then each call that is wrong, named by its module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_attn.messages import mismatch
from pytest_attn.messages.lines import labeled
from pytest_attn.models.comparison import ModelComparison

#: calls of which the whole diagnosis is written, and names that a line holds
_WHOLE, _NAMES = 3, 6


def describe(model: ModelComparison) -> str:
    """Return the text of a judgment that did not pass."""
    return "\n".join(
        [*_not_judged(model), *_wrong(model), *_compiled(model), *(labeled("note", note) for note in model.notes)]
    )


def headline(model: ModelComparison) -> str:
    """Say in one line what is wrong."""
    return describe(model).splitlines()[0]


def _not_judged(model: ModelComparison) -> Iterator[str]:
    if not model.calls and not model.unread:
        yield "no attention call was caught: nothing was judged"
        if model.with_softmax:
            yield labeled("softmax", f"ran in {_names(model.with_softmax)}: is attention written out there?")
        if not model.unseen:
            yield labeled("do", "name your own attention: functions=[my_function], a function of (q, k, v, ...)")
    for function in model.unseen:
        yield f"{function} was named in functions=, and no call of it was caught"
        yield labeled("do", "leave it out if this model does not use it; else have the model find it by its name in a module")
    if not model.calls and not model.unread:
        return
    for call in model.unread:
        yield f"{_place(call.module)}: a call of {call.function} was not judged: {call.reason}"
    for call in model.refused:
        yield f"{_place(call.module)}: a call of {call.function} was not replaced: {model.subject}: {call.reason}"
    if model.subject and model.silent:
        yield (
            f"{_names(model.silent)}: ran without an attention call that could be replaced by {model.subject}, while others"
            " built alike made one"
        )
        if softmax := [name for name in model.silent if name in model.with_softmax]:
            yield labeled("softmax", f"ran in {_names(softmax)}: is an old implementation left there?")
    if model.backward and model.calls and not any(call.has_gradients for call in model.calls):
        yield "backward=True, and no gradient arrived at any attention call; is something detached? else say backward=False"


def _wrong(model: ModelComparison) -> Iterator[str]:
    wrong = [call for call in model.calls if not call.passed]
    if not wrong:
        return
    whose = f" of {model.subject}" if model.subject else ""
    yield f"{len(wrong)} of {len(model.calls)} attention calls{whose} are wrong: {_names([call.label for call in wrong])}"
    for call in wrong[:_WHOLE]:
        text = mismatch.describe(call.comparison) if call.comparison else call.fault
        yield f"{call.label} ({call.function}{f', {call.kernel}' if call.kernel else ''}): {text}"
        if call.known:
            yield labeled("known", f"{call.known} may be it")
    if len(wrong) > _WHOLE:
        yield f"... and {len(wrong) - _WHOLE} more, each judged on its own tensors"


def _compiled(model: ModelComparison) -> Iterator[str]:
    """Say what is wrong with the compiled run."""
    run = model.compiled
    if run is None or not run.wrong:
        return
    eager = "are right" if all(call.passed for call in model.calls) else "are wrong, too"
    yield (
        f"the compiled run is wrong: {len(run.wrong)} of {len(run.limits)} tensors are further from exact attention than"
        f" honest rounding explains; the calls of the eager run {eager}"
    )
    worst = [f"{name} {run.ratios[name]:.3g} times (limit {run.limits[name]:g})" for name in run.wrong[:_WHOLE]]
    yield labeled("furthest", ", ".join(worst))
    yield labeled("launched", ", ".join(run.kernels) or "no kernel that is known as attention's")
    yield labeled("do", "torch.compile(model, backend='aot_eager') tells whether the compiler's kernels are at fault")


def _place(module: str) -> str:
    return module or "outside any module"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES])
    return shown + (f", ... ({len(names)} in all)" if len(names) > _NAMES else "")
