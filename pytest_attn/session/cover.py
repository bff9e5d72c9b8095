"""Which cases of a large suite run where nobody names workloads: as few as reach every option and kernel of each backend.

That is for tests with the marker `attention_chosen`. A backend of this package gets a cover of its options and kernels. One
that compiles for each workload gets no more than the marker's `compiled` cases, or than it compiles in two minutes, and none
forward alone of what is reached with gradients. A backend of one's own that does not compile gets all small workloads, and the
larger ones that reach a kernel which those do not. Libraries may take seconds to answer: they are asked about covers alone.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.compilers import seconds_to_compile
from pytest_attn.backends.defects import KnownDefect
from pytest_attn.backends.library import once_in_a_run
from pytest_attn.backends.registry import try_libraries
from pytest_attn.session.collection import Items, absent_because, kernel_of, missing_because
from pytest_attn.session.devices import untimed_because
from pytest_attn.session.kinds import (
    ATTENTION,
    MODEL,
    PARAMETER,
    CaseParameter,
    asks_gradients,
    device_of,
    kind_of,
    marker_of,
    parameter_of,
    test_of,
)
from pytest_attn.session.manifest import left_in
from pytest_attn.session.marks import ChosenMark
from pytest_attn.session.options import Settings
from pytest_attn.session.selection import CPU_GROUPS
from pytest_attn.session.session import AttentionSession
from pytest_attn.workloads.traits import OF_SCORES, kernels_of, layout_of, options_of

if TYPE_CHECKING:
    import torch

MARKER = "attention_chosen"
#: the question whether the kernel for inference is right: a compiler makes another one where gradients are needed
INFERENCE = "inference"
#: seconds that a backend may compile for the cases of one test
_COMPILING = 120.0


@dataclass(eq=False)
class _Case:
    """A case that may be left out."""

    item: pytest.Item
    parameter: CaseParameter
    session: AttentionSession

    def __str__(self) -> str:
        return f"{self.parameter.workload.id}{' backward' if self.asks_gradients else ''}"

    @cached_property
    def runs(self) -> bool:
        """Whether nothing that is known stands in its way, as libraries say, which may take them a while."""
        marker, made = marker_of(self.item), kind_of(self.item).made_items()
        assert isinstance(made, Items)
        assert marker is not None
        with contextlib.suppress(Exception):  # what raises will raise when it runs, and the test says so then
            return made.obstacle(self.parameter, marker, self.session) is None
        return True

    @cached_property
    def mark(self) -> ChosenMark:
        """What its test says of how few cases are enough."""
        marker = self.item.get_closest_marker(MARKER)
        assert marker is not None
        return ChosenMark.from_marker(marker)

    @cached_property
    def reached(self) -> frozenset[str]:
        """What it reaches: options and kernels, and the values of other parameters of its test."""
        return self.options | kernels_of(self.parameter.workload) | self.others

    @cached_property
    def options(self) -> frozenset[str]:
        """The options of its workload."""
        return options_of(self.parameter.workload)

    @cached_property
    def layout(self) -> str:
        """Where its queries and keys lie."""
        return layout_of(self.parameter.workload)

    @cached_property
    def others(self) -> frozenset[str]:
        """The values of other parameters of its test."""
        params: dict[str, object] = self.item.callspec.params  # type: ignore[attr-defined]
        return frozenset(f"{name}={value!r}" for name, value in params.items() if name != PARAMETER)

    @property
    def backend(self) -> Backend:
        """Whose case it is."""
        return self.session.kernels.backend_named(str(self.parameter.backend))

    @cached_property
    def kernel(self) -> Hashable:
        """For what its backend compiles a kernel."""
        return kernel_of(self.backend, self.parameter.workload)

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of its forward pass."""
        return self.parameter.workload.flops()

    @property
    def asks_once(self) -> bool:
        """Whether its test says so, and its backend compiles, or makes plans."""
        marker, is_slow = self.item.get_closest_marker(MARKER), self.backend.compiles or self.backend.makes_plans
        return marker is not None and ChosenMark.from_marker(marker).asks_once and is_slow

    @property
    def has_two_kernels(self) -> bool:
        """Whether it compiles a kernel without gradients where another one has them, and its test says that few are enough."""
        marker = self.item.get_closest_marker(MARKER)
        few = marker is not None and not self.mark.timed and self.backend.compiles
        return few and not self.asks_gradients and self.is_sound(INFERENCE)

    @property
    def place(self) -> Hashable:
        """What it shares with a case of the same file with gradients."""
        return self.item.path, self.others, self.parameter.workload

    def is_sound(self, invariant: str) -> bool:
        """Whether nothing is known that may break this invariant on it."""
        return all(defect.invariants and invariant not in defect.invariants for defect in self._defects)

    def is_known_to_break(self, invariant: str) -> bool:
        """Whether a known defect names this invariant, which is to be seen."""
        return any(invariant in defect.invariants for defect in self._defects)

    @cached_property
    def _defects(self) -> list[KnownDefect]:
        machine = self.session.machines.machine(device_of(self.item))
        return self.backend.defects_on(self.parameter.workload, machine, self.asks_gradients)

    @property
    def asks_gradients(self) -> bool:
        """Whether its marker says so."""
        return asks_gradients(self.item)


def choose(config: pytest.Config, session: AttentionSession, items: list[pytest.Item]) -> None:
    """Take away what need not run; note how many cases are chosen, and how many --attn-workloads=all adds.

    Who names workloads, tests by -k or -m, or one case, is understood: the choice is made of what these leave. Who names
    workloads gets no models, which have none, and who names backends only models with these in their place.
    """
    settings = session.settings
    if "all" in settings.workloads or settings.mutants or settings.tune or session.worker or config.option.collectonly:
        return
    groups: dict[tuple[str, str], list[pytest.Item]] = {}
    wanted = left_in(config, items)
    unwanted = {*_models_not_meant(wanted, settings)}
    for item in (item for item in wanted if item not in unwanted):
        parameter = parameter_of(item)
        is_named = bool(settings.workloads) and kind_of(item) is not MODEL
        if parameter and parameter.backend and not is_named and _may_be_left_out(item, session):
            groups.setdefault((test_of(item), parameter.backend), []).append(item)
    tests: dict[str, list[list[_Case]]] = {}  # by backend
    for (_, name), group in groups.items():
        if missing_because(session, group[0]) is None:  # else one case is skipped, and says so
            cases = [_Case(item, parameter, session) for item in group if (parameter := parameter_of(item))]
            tests.setdefault(name, []).append(cases)
    try_libraries(list(map(session.kernels.backend_named, tests)))
    session.collected.unchosen += len(unwanted)
    for name in _in_own_order(tests):
        question = f"choice of {name} of {[case.item.nodeid for cases in tests[name] for case in cases]}"
        places, is_cut_short = once_in_a_run(question, partial(_places, tests[name]))
        session.collected.cut_short += [name] if is_cut_short else []
        for cases, chosen in zip(tests[name], places, strict=True):
            unwanted.update(case.item for place, case in enumerate(cases) if place not in chosen)
            _count(cases, chosen)
            if cases[0].mark.timed:
                _say_that_it_is_not_timed(cases[chosen[0]])
    items[:] = [item for item in items if item not in unwanted]
    if groups:
        _leave_memory(session.machines.device())


def _models_not_meant(items: Sequence[pytest.Item], settings: Settings) -> list[pytest.Item]:
    """Return models that say nothing of what is named, where other cases run: of workloads any, of backends those without one.

    Tests of models that do not say attention_chosen are the user's own, and run.
    """
    models = [item for item in items if kind_of(item) is MODEL and item.get_closest_marker(MARKER)]
    backends = {item: parameter.backend for item in items if (parameter := parameter_of(item))}
    if _is_any_named(settings.workloads) and any(kind_of(item) is ATTENTION for item in backends):
        return models
    if _is_any_named(settings.backends) and any(backends.values()):
        return [item for item in models if backends.get(item, "") is None]
    return []


def _is_any_named(tokens: Sequence[str]) -> bool:
    """Whether an option names some: -NAME leaves one out of all, and all and available name none."""
    return any(not token.startswith("-") for token in tokens) and not {"all", "available"}.intersection(tokens)


def left_to_others(item: pytest.Item, session: AttentionSession, is_declared: bool = False) -> dict[str, str]:
    """Return what other cases of the same file ask of a backend, and the workloads of those.

    Invariants, where the test says asks_once, and the backend compiles or makes plans. INFERENCE, where it compiles, and a
    case of the same workload has gradients. is_declared: whether cases that its backend declares to take stand for others.
    """
    settings, parameter = session.settings, parameter_of(item)
    if parameter is None or parameter.backend is None or settings.thorough or settings.mutants or session.worker:
        return {}
    key = parameter.backend, is_declared
    if key not in session.collected.left_to_others:
        items = ((one, parameter_of(one)) for one in item.session.items)
        own = [_Case(one, found, session) for one, found in items if found and found.backend == parameter.backend]
        runs: Callable[[_Case], bool] = _is_claimed if is_declared else attrgetter("runs")
        left = _dealt([case for case in own if case.asks_once], runs, _INVARIANTS)
        without = [case for case in own if case.has_two_kernels]
        places = {case.place for case in without}
        trained = {case.place for case in own if case.asks_gradients and case.place in places and runs(case)}
        twice = [case for case in without if case.place in trained]
        for nodeid, others in _dealt(twice, runs, (INFERENCE,)).items():
            left.setdefault(nodeid, {}).update(others)
        session.collected.left_to_others[key] = left
    return session.collected.left_to_others[key].get(item.nodeid, {})


def left_to(item: pytest.Item, session: AttentionSession) -> dict[str, int]:
    """Return the questions that other cases of its file have left to this case of a backend, and how many cases have."""
    parameter = parameter_of(item)
    assert parameter is not None
    name, of_file = str(_Case(item, parameter, session)), (one for one in item.session.items if one.path == item.path)
    of_backend = (one for one in of_file if (found := parameter_of(one)) and found.backend == parameter.backend)
    left = (question for one in of_backend for question in left_to_others(one, session).items())
    return dict(Counter(question for question, others in left if name in others.split(" and ")))


def asked_once(item: pytest.Item, session: AttentionSession) -> tuple[str, ...]:
    """Return the invariants of which few cases of its file are asked, and this one is; none where its test does not say so.

    That is as far as backends declare what they take: each worker would wait for the libraries that it asks.
    """
    parameter = parameter_of(item)
    if parameter is None or not _Case(item, parameter, session).asks_once:
        return ()
    left = left_to_others(item, session, is_declared=True)
    return tuple(one for one in _INVARIANTS if one not in left)


def is_called_as_in_training(item: pytest.Item, session: AttentionSession) -> bool:
    """Whether it compiles what a case with gradients does, as far as backends declare what they take."""
    return INFERENCE in left_to_others(item, session, is_declared=True)


def _dealt(cases: Sequence[_Case], runs: Callable[[_Case], bool], questions: Sequence[str]) -> dict[str, dict[str, str]]:
    """Deal questions out among cases, so that each is asked with all that it depends on; return what each leaves to which.

    Only cases that run stand for others.
    """
    dealt, left = Counter[str](), dict[str, dict[str, str]]()
    by_file: dict[Hashable, list[_Case]] = {}
    for case in cases:
        by_file.setdefault((case.item.path, case.others), []).append(case)
    for group, question in product(by_file.values(), questions):
        depended_on = _DEPENDENCIES[question]
        asked: dict[Hashable, _Case] = {}
        able = {case: depended_on(case) for case in group if case.is_sound(question) and runs(case)}
        while best := _next_to_ask(able, asked, dealt):
            asked |= dict.fromkeys(able[best] - asked.keys(), best)
            dealt[best.parameter.workload.id] += 1
        for case in group:
            others = {asked.get(one) for one in depended_on(case)}
            if not others & {None, case} and not case.is_known_to_break(question):
                left.setdefault(case.item.nodeid, {})[question] = " and ".join(sorted(map(str, others)))
    return left


def _next_to_ask(
    able: Mapping[_Case, frozenset[Hashable]], asked: Mapping[Hashable, _Case], dealt: Counter[str]
) -> _Case | None:
    """Return the case with the most that is still to be asked, None where nothing is.

    Those with gradients come first: they compile the forward pass, too. float32 comes last: it compiles longest.
    """
    new = {case: len(depended_on - asked.keys()) for case, depended_on in able.items()}

    def order(case: _Case) -> tuple[bool, bool, int, int, int]:
        w = case.parameter.workload
        return not case.asks_gradients, w.dtype == "float32", -new[case], dealt[w.id], len(case.options)

    return min(filter(new.get, new), key=order, default=None)


def _options(case: _Case) -> frozenset[Hashable]:
    """Each option of the scores and, unless the backend takes any, the kind of mask."""
    mask, declared = case.parameter.workload.mask, case.backend.capabilities
    kind = None if mask is None or (declared and "any" in declared.masks) else mask.kind
    return frozenset((kind, *(case.options & OF_SCORES)))


#: invariants for which a kernel may be compiled, or a plan made, anew
_INVARIANTS = ("layout", "options", "equivalence")
#: what of a case the answer to a question depends on. `options` changes all options at once, so that an option need not meet
#: each layout; `equivalence` asks padded, packed and paged sequences one by one, whether heads are grouped or not.
_DEPENDENCIES: dict[str, Callable[[_Case], frozenset[Hashable]]] = {
    "layout": lambda case: frozenset((case.layout,)),
    "options": lambda case: frozenset((case.layout, *_options(case))),
    "equivalence": lambda case: frozenset((case.layout if case.layout != "plain" else "grouped heads" in case.options,)),
    INFERENCE: lambda case: frozenset((case.layout, option) for option in _options(case)),
}


def _in_own_order(names: Iterable[str]) -> list[str]:
    """Return the names of backends as one worker of xdist takes them, so that not all of them wait for the same library."""
    ordered = sorted(names)
    random.Random(os.environ.get("PYTEST_XDIST_WORKER", "")).shuffle(ordered)
    return ordered


def _count(cases: Sequence[_Case], chosen: Sequence[int]) -> None:
    """Count what was chosen of a test's cases of one backend, and what `all` adds to it."""
    collected, claimed = cases[0].session.collected, [_is_claimed(case) for case in cases]
    of_these = sum(claimed[place] for place in chosen)
    collected.chosen += of_these
    collected.unchosen += sum(claimed) - of_these + _uncollected(cases)


def _leave_memory(device: torch.device) -> None:
    """Leave to other workers the memory in which libraries were asked."""
    from pytest_attn.backends.streams import leave_memory  # imports torch

    leave_memory(device)


def _may_be_left_out(item: pytest.Item, session: AttentionSession) -> bool:
    marker = item.get_closest_marker(MARKER)
    if marker is None or absent_because(item, device_of(item), session):
        return False
    device = session.machines.device(device_of(item))
    if kind_of(item) is MODEL and device.type == "cpu":
        return False  # the suite leaves out most of them there by itself
    return not ChosenMark.from_marker(marker).timed or untimed_because(session.settings.gpu_per_worker, device) is not None


def _places(tests: Sequence[Sequence[_Case]]) -> tuple[list[list[int]], bool]:
    """Return which cases of each test of one backend are chosen, and whether more of them would compile too long."""
    found: list[list[int]] = [[] for _ in tests]
    reached: dict[Path, frozenset[str]] = {}  # with gradients, by file
    is_cut_short = False
    for number, cases in sorted(enumerate(tests), key=lambda test: not test[1][0].asks_gradients):
        file = cases[0].item.path
        if cases[0].mark.timed:
            chosen, is_cut = [next(filter(_is_claimed, cases), cases[0])], False
        else:
            chosen, is_cut = _chosen(cases, reached.get(file, frozenset()))
        if cases[0].asks_gradients:
            reached[file] = _reached(chosen)
        found[number], is_cut_short = [cases.index(case) for case in chosen], is_cut_short or is_cut
    return found, is_cut_short


def _chosen(cases: Sequence[_Case], with_gradients: frozenset[str]) -> tuple[list[_Case], bool]:
    """Choose of the cases that one backend has in one test, and say whether more of them would compile too long.

    with_gradients: what cases of another test reach with gradients.
    """
    backend, most, is_cut = cases[0].backend, cases[0].mark.compiled, False
    is_whole = not backend.is_slow and not backend.is_contained
    kept = [case for case in cases if is_whole and _is_small(case)]
    left = [case for case in cases if case not in kept]
    reached = with_gradients if backend.is_slow else frozenset()
    seconds, compiled = seconds_to_compile(backend.name, backend.compiles), set[Hashable]()
    while not (backend.is_slow and len(kept) == most):
        best = _reaching_most(left, reached | _reached(kept))
        if best is None:
            break
        left.remove(best)
        if not best.runs:
            continue
        if best.kernel not in compiled and seconds * (len(compiled) + 1) > _COMPILING:
            is_cut = True
            left = [case for case in left if case.kernel in compiled]
            continue
        kept.append(best)
        compiled.add(best.kernel)
    if not kept:  # one that runs, where all is reached; else a backend that takes nothing says why
        kept = [next((case for case in cases if case.runs), cases[0])]
    return kept, is_cut


def _reached(cases: Sequence[_Case]) -> frozenset[str]:
    return frozenset().union(*(case.reached for case in cases))


def _reaching_most(cases: Sequence[_Case], reached: frozenset[str]) -> _Case | None:
    """Return the case that reaches most of what is not, of the compiled kernel whose cases do; None where none does."""
    by_kernel: dict[Hashable, set[str]] = {}
    for case in cases:
        by_kernel.setdefault(case.kernel, set()).update(case.reached - reached)

    def reaches(case: _Case) -> tuple[int, int, int]:
        return len(by_kernel[case.kernel]), len(case.reached - reached), -case.flops

    best = max(cases, key=reaches, default=None)
    return best if best and best.reached - reached else None


def _say_that_it_is_not_timed(case: _Case) -> None:
    """Skip a case whose times cannot be taken, before anything is compiled for its check: others check what it would check."""
    settings, device = case.session.settings, case.session.machines.device(device_of(case.item))
    if settings.latency != "require":
        reason = untimed_because(settings.gpu_per_worker, device)
        case.item.add_marker(pytest.mark.skip(reason=f"not timed: {reason}"))


def _is_small(case: _Case) -> bool:
    """Whether a workload is of the groups that a CPU runs, or no one's but the test's."""
    return case.session.registrations.catalog.group_of(case.parameter.workload.name) in (*CPU_GROUPS, "")


def _uncollected(cases: Sequence[_Case]) -> int:
    """Count the cases that `all` adds to those that were collected: the large ones on a CPU, long contexts on a GPU."""
    first, marker = cases[0], marker_of(cases[0].item)
    if marker is None or marker.args or kind_of(first.item) is MODEL:
        return 0
    known = {case.parameter.workload.name for case in cases}
    others = [w for w in first.session.registrations.catalog.select("all") if w.name not in known]
    return sum(_is_claimed(replace(first, parameter=replace(first.parameter, workload=workload))) for workload in others)


def _is_claimed(case: _Case) -> bool:
    """Whether its backend declares that it takes the workload, as asking a library may take memory for all tensors of it."""
    return kind_of(case.item) is MODEL or case.backend.claims(case.parameter.workload, case.asks_gradients)
