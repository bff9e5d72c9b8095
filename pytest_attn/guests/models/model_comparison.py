"""Results of a check of a model: a judgment per attention call, what was not judged, and how far the whole moved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from pytest_attn.correctness import mismatch_text
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.correctness.judge import without_each
from pytest_attn.guests.models.capture import Unread, label_of
from pytest_attn.guests.models.compiled import CompiledRun
from pytest_attn.guests.models.handed_masks import MaskUse
from pytest_attn.reports.lines import labeled, some
from pytest_attn.reports.verdict import LONG_SUMS
from pytest_attn.workloads.workload import Workload


class Traits(NamedTuple):
    """Traits of a call that its siblings may have otherwise; None where one is not known.

    reach: how many keys back and ahead its windows show, as many or none. last: how many keys after its own most rows see, -1
    where the last is the one before, where that is at most one. keys: of each head of q the first one that has the
    same keys; values: the same of values. gradients: which of dq, dk and dv arrived of those that were waited for. held: the
    narrowest of its dtype, bfloat16 and float16 that holds q, k or v. seen: its shape, and a digest of what its mask shows,
    "" for all. has_bias: whether it adds to scores. memory: a digest of the other sequence that its module was handed.
    """

    reach: tuple[int, int] | None = None
    keys: tuple[int, ...] | None = None
    values: tuple[int, ...] | None = None
    gradients: frozenset[str] | None = None
    held: str | None = None
    seen: tuple[tuple[int, int], str] | None = None
    has_bias: bool | None = None
    memory: str | None = None
    last: int | None = None
    masks: tuple[MaskUse, ...] = ()


@dataclass(frozen=True)
class CallComparison:
    """The judgment of one call. module: who made it; function: what it went through. fault: why nothing could be compared.

    has_gradients: whether its gradients arrived and were judged. is_replaced: whether something else computed it. order: among
    all calls. kernel: what computed it, as far as that is known. known: the known defect that explains what is wrong.
    misled: what its layer should have asked: the mask that it was handed, and the call does not keep, or its siblings' scale.
    traits: what its tensors show.
    """

    module: str
    label: str
    function: str
    workload: Workload
    comparison: Comparison | None
    has_gradients: bool = False
    fault: str = ""
    is_replaced: bool = False
    order: int = 0
    kernel: str = ""
    known: str = ""
    misled: str = ""
    traits: Traits = field(default_factory=Traits)

    @property
    def passed(self) -> bool:
        """True where every tensor is within its budget, and its layer asked what it should."""
        return self.comparison is not None and self.comparison.passed and not self.misled

    @property
    def explained(self) -> bool:
        """True where it is right, or a known defect explains what is wrong."""
        return self.passed or (bool(self.known) and not self.misled)


@dataclass(frozen=True)
class ModelComparison:
    """The judgment of one model.

    Args:
        subject: what computed its attention, "" for what it chose by itself.
        calls: in the order in which they were made.
        unread: calls that were intercepted and not judged.
        refused: calls that were to be replaced and were not.
        silent: modules built like one that makes calls, which made none.
        unseen: functions that were named, and made no call.
        with_softmax: modules with a softmax outside of every call.
        written_out: modules that compute attention outside of every call, with the shape of its scores.
        inline: names of those of which that is known, with * for anything.
        backward: whether gradients were judged.
        notes: what else is worth knowing.
        ratios: name of an output or of a parameter's gradient -> its deviation from exact attention in units of honest
            scatter.
        compiled: what is known of the run of a compiled model; None where nothing is compiled.
        message: what a failure says, "" where it passed.
    """

    subject: str
    calls: tuple[CallComparison, ...]
    unread: tuple[Unread, ...] = ()
    refused: tuple[Unread, ...] = ()
    silent: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    with_softmax: tuple[str, ...] = ()
    written_out: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    inline: tuple[str, ...] = ()
    backward: bool = True
    notes: tuple[str, ...] = ()
    ratios: Mapping[str, float] = field(default_factory=dict)
    compiled: CompiledRun | None = None
    message: str = ""

    @property
    def passed(self) -> bool:
        """True where every call was judged, and is right."""
        is_right = all(call.passed for call in self.calls) and not (self.compiled and self.compiled.wrong)
        return self.is_complete and is_right

    @property
    def untested(self) -> tuple[str, ...]:
        """Options and sums that no call would have shown, and what was not judged, as `Comparison.untested` and `unjudged`."""
        judged = [(call.workload, (*one.untested, *one.unjudged)) for call in self.calls if (one := call.comparison)]
        untested = dict.fromkeys(one for _, unshown in judged for one in unshown)
        shown = {one for w, unshown in judged for one in (*without_each(w), LONG_SUMS) if one not in unshown}
        return tuple(one for one in untested if one not in shown)

    @property
    def is_complete(self) -> bool:
        """True where there are calls, of each function that was named, too, and each was judged, and replaced if so asked.

        And whether no module computes attention by itself but those that are named as such.
        """
        is_replaced = not self.refused and not (self.subject and self.kept)
        has_gradients = not self.backward or any(call.has_gradients for call in self.calls)
        is_seen = not self.unread and not self.unseen and not self.hidden and not self.not_inline
        return bool(self.calls) and is_seen and is_replaced and has_gradients

    @property
    def kept(self) -> list[str]:
        """Modules built like one that makes calls, which made none, and are not named as having attention of their own."""
        return [name for name in self.silent if not self._is_inline(name)]

    @property
    def hidden(self) -> list[str]:
        """Modules that compute attention of their own, and are not named as such."""
        own = [*self.written_out, *(name for name in self.silent if name in self.with_softmax)]
        return [name for name in dict.fromkeys(own) if not self._is_inline(name)]

    @property
    def not_inline(self) -> list[str]:
        """Names in inline= of modules that compute no attention of their own."""
        return [name for name in self.inline if not any(fnmatchcase(one, name) for one in (*self.written_out, *self.silent))]

    def _is_inline(self, module: str) -> bool:
        return any(fnmatchcase(module, name) for name in self.inline)

    @property
    def known_defects(self) -> tuple[str, ...]:
        """The known defects of what computed the calls, where these explain everything that is wrong; else none."""
        known = dict.fromkeys(call.known for call in self.calls if not call.passed)
        return tuple(known) if self.is_complete and self.explained else ()

    @property
    def explained(self) -> bool:
        """True where known defects explain all that is wrong, or nothing is."""
        is_compiled_right = not (self.compiled and self.compiled.wrong)
        return is_compiled_right and not self.unread and all(call.explained for call in self.calls)

    @property
    def worst(self) -> CallComparison | None:
        """The call that comes closest to its limits, or exceeds them most; None without calls."""
        judged = [call for call in self.calls if call.comparison is not None]
        return max(judged, key=lambda call: call.comparison.worst.excess if call.comparison else 0.0, default=None)


# -- how one that did not pass reads -----------------------------------------------------------------------------------------


#: calls of which the whole diagnosis is written
_WHOLE = 3


def describe(model: ModelComparison) -> str:
    """Return the text of a judgment that did not pass."""
    return "\n".join(
        [*_not_judged(model), *_wrong(model), *_compiled(model), *(labeled("note", note) for note in model.notes)]
    )


def _not_judged(model: ModelComparison) -> Iterator[str]:
    is_caught = bool(model.calls or model.unread)
    if not is_caught:
        yield "no attention call was caught: nothing was judged"
        how = "name the model's attention, a function of (q, k, v, ...), or make one of what it computes inline"
        if softmax := list(dict.fromkeys([*model.written_out, *model.with_softmax])):
            yield labeled("softmax", f"ran in {some(softmax)}: is attention computed inline there?")
            how = "have it call a function of (q, k, v, ...), and name that"
        if not model.unseen:
            yield labeled("do", f"{how}: functions=[my_function]")
    for function in model.unseen:
        yield f"{function} was named in functions=, and no call of it was caught"
        yield labeled(
            "do", "leave it out if this model does not use it; otherwise let the model look it up by its name in a module"
        )
    for name in model.not_inline:
        yield f"{name} was named in inline=, and computes no attention of its own"
    if not is_caught:
        return
    if model.hidden:
        yield from _written_out(model)
    for call in model.unread:
        yield f"{label_of(call.module)}: a call of {call.function} was not judged: {call.reason}"
    yield from _not_replaced(model)
    if model.backward and model.calls and not any(call.has_gradients for call in model.calls):
        yield "backward=True, and no gradient arrived at any attention call: is something detached?"
        yield labeled(
            "do", "look for detach() and no_grad() around it; where all before it is frozen, backward=False judges out alone"
        )


def _not_replaced(model: ModelComparison) -> Iterator[str]:
    for call in model.refused:
        yield f"{label_of(call.module)}: a call of {call.function} was not replaced: {model.subject}: {call.reason}"
    if model.subject and model.kept:
        yield (
            f"{some(model.kept)}: ran without an attention call that could be replaced by {model.subject}, while others"
            " of its kind made one"
        )
        if softmax := [name for name in model.kept if name in model.with_softmax]:
            yield labeled("softmax", f"ran in {some(softmax)}: is an old implementation left there?")


def _written_out(model: ModelComparison) -> Iterator[str]:
    names, first = model.hidden, model.hidden[0]
    over = f" over {model.written_out[first]}" if first in model.written_out else ""
    calls = {call.module for call in model.calls}
    beside = "beside the calls that were judged" if calls.issuperset(names) else "through no attention function"
    verb, whose = ("computes", "its") if len(names) == 1 else ("compute", "their")
    yield f"not judged: {some(names)} {verb} a softmax of {whose} own{over}, {beside}"
    patterns = list(dict.fromkeys(names if len(names) == 1 else (re.sub(r"\d+", "*", name) for name in names)))
    judged = "hand q, k and v to a function that functions= names, which is then judged"
    yield labeled("do", f"{judged}; inline={patterns} leaves this out, unjudged")


def _wrong(model: ModelComparison) -> Iterator[str]:
    wrong = [call for call in model.calls if not call.passed]
    if not wrong:
        return
    whose = f" of {model.subject}" if model.subject else ""
    yield f"{len(wrong)} of {len(model.calls)} attention calls{whose} are wrong: {some([call.label for call in wrong])}"
    for call in wrong[:_WHOLE]:
        who = f"{call.label} ({call.function}{f', {call.kernel}' if call.kernel else ''})"
        if call.misled:
            yield f"{who}: {call.misled}"
            yield labeled(
                "do",
                f"look at what the layer passes to its attention function, which computes what it is asked to{_meant(call)}",
            )
        if not (call.comparison and call.comparison.passed):
            yield f"{who}: {mismatch_text.describe(call.comparison) if call.comparison else call.fault}"
        if call.known:
            yield labeled("known", f"{call.known} may be it")
    if len(wrong) > _WHOLE:
        yield f"... and {len(wrong) - _WHOLE} more, each judged on its own tensors"


def _meant(call: CallComparison) -> str:
    """Say how a module says that it is to differ from its kind."""
    is_told = call.misled.endswith("the same kind of module") and ("mask" in call.misled or "added" in call.misled)
    return "; if it is to differ, let a setting of the module say so, such as self.is_local = True" if is_told else ""


def _compiled(model: ModelComparison) -> Iterator[str]:
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
    yield labeled("launched", ", ".join(run.kernels) or "no known attention kernel")
    yield labeled("do", "torch.compile(model, backend='aot_eager') tells whether the compiler's kernels are at fault")
