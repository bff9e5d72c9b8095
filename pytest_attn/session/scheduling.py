"""Which worker of xdist runs which items: those of one backend and workload one after the other in one, whatever --dist says.

What a backend compiles for a workload is kept in the process that compiled it. What takes longest begins first, by the run
before or else by what compiles it: else one worker would still compile when all others are through. What other processes
compile meanwhile (ahead.py) comes as soon as it is compiled, else last. Of what is short, a worker stays with its backends:
to import a library, or a compiler, takes it seconds.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice, takewhile
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from pytest_attn.backends.compilers import COMPILED, seconds_to_compile
from pytest_attn.backends.library import noted_in_a_run
from pytest_attn.session.durations import Durations
from pytest_attn.session.kinds import MODEL, CaseParameter, asks_gradients, is_case, kind_of, parameter_of
from pytest_attn.session.session import session_of

#: between a case's id, its group, and how long its backend compiles, where a worker hands its ids to the controller; in no id
_BETWEEN = "\0"
#: seconds that a group takes next to nothing below, and up to which it need not begin before others
_QUICK, _SHORT = 0.1, 5.0
#: groups that are looked at for the next one of a worker
_LOOKED_AT = 400
#: those that give each item to one worker
_DIVIDING = ("load", "worksteal", "loadscope", "loadfile", "loadgroup")


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives the items of a group to one worker, and any other item as the user's own scheduler would.

    groups: by item. seconds: that items took before. compiling: seconds of items, of which their backend compiles; below 0
    where other processes do. run: as its workers know it.
    """

    def __init__(
        self,
        config: pytest.Config,
        own: Any,
        groups: Mapping[str, str],
        seconds: Mapping[str, float],
        compiling: Mapping[str, float],
        run: str,
    ) -> None:
        super().__init__(config, own.log)  # which says something under --debug only
        self._own_scope, self._groups = getattr(own, "_split_scope", str), groups
        self._seconds, self._compiling = seconds, compiling
        self._reorders = getattr(config.option, "loadscopereorder", True)
        self._run, self._is_compiled_ahead = run, self._reorders and any(one < 0 for one in compiling.values())
        self._length: dict[str, float] = {}  # of groups and other scopes, as _seconds_of says
        self._called: defaultdict[Any, set[str]] = defaultdict(set)  # backends, by worker
        for node in own.nodes:
            self.add_node(node)

    def _assign_work_unit(self, node: Any) -> None:
        if self._reorders:
            if not self._length:
                self._length = {scope: self._seconds_of(items) for scope, items in self.workqueue.items()}
                for scope in self._in_order():
                    self.workqueue.move_to_end(scope)
            scope = self._next_of(node)
            if backend := _backend_of(scope):
                self._called[node].add(backend)
            self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        """Hand out until a worker has two tests: it begins none before it knows the next, and a crash leaves empty groups."""
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)

    def _next_of(self, node: Any) -> str:
        """Return what a worker runs next: what is ready, of that a backend that it has called, else one that nobody has."""
        ready = list(islice(self._ready(), _LOOKED_AT)) or [next(iter(self.workqueue))]
        backends = {scope: backend for scope in ready if (backend := _backend_of(scope)) and self._length[scope] <= _SHORT}
        if (first := ready[0]) not in backends:
            return first
        mine, anybodys = self._called[node], set[str]().union(*self._called.values())
        own = (scope for scope, backend in backends.items() if backend in mine)
        new = (scope for scope, backend in backends.items() if backend not in anybodys)
        return next(own, None) or next(new, first)

    def _ready(self) -> Iterator[str]:
        """Yield what waits for no other process, in order, what these have compiled first."""
        compiled = [scope for scope in self._compiled_ahead() if scope in self.workqueue]
        return chain(compiled, takewhile(lambda scope: self._length[scope] >= 0, self.workqueue))

    def _compiled_ahead(self) -> Iterator[str]:
        """Yield the groups for which other processes have compiled all meanwhile, the first first."""
        for note in noted_in_a_run(self._run) if self._is_compiled_ahead else ():
            if note.endswith(COMPILED):
                yield f"{_BETWEEN}{note.removesuffix(COMPILED)}"

    def _in_order(self) -> Iterator[str]:
        """Yield the groups, what takes longest first, and what took next to nothing evenly among the others.

        Of thousands that are skipped one after the other, workers would wait for the controller to take the reports.
        """
        ordered = sorted(self.workqueue, key=self._length.__getitem__, reverse=True)
        quick: list[str] = []
        others: list[str] = []
        for scope in ordered:
            (quick if self._are_quick(self.workqueue[scope]) else others).append(scope)
        for number, scope in enumerate(others):
            start, end = (len(quick) * place // len(others) for place in (number, number + 1))
            yield from (scope, *quick[start:end])
        if not others:
            yield from quick

    def _are_quick(self, items: Iterable[str]) -> bool:
        return sum(self._seconds.get(one, _QUICK) for one in items) < _QUICK

    def _seconds_of(self, items: Iterable[str]) -> float:
        """Return how long items took before; where nobody knows, how long their backend compiles."""
        known = [self._seconds[one] for one in items if one in self._seconds]
        return sum(known) if known else max(self._compiling.get(one, 0.0) for one in items)

    def _split_scope(self, nodeid: str) -> str:
        group = self._groups.get(nodeid)
        scope: str = self._own_scope(nodeid) if group is None else f"{_BETWEEN}{group}"
        return scope


def _backend_of(scope: str) -> str | None:
    """Return whose kernels the items of a group call, by its name; None for any other scope."""
    return scope.rpartition(" ")[2] if scope.startswith(_BETWEEN) else None


def tell_groups(config: pytest.Config, items: list[pytest.Item], compiled_ahead: Mapping[str, float]) -> None:
    """In a worker of xdist, hand the groups of items to the controller, beside the ids, which is all that a worker sends.

    compiled_ahead: how many seconds other processes compile, by group.
    """
    interactor: Any = next((one for one in config.pluginmanager.get_plugins() if hasattr(one, "sendevent")), None)
    if interactor is None:
        return
    send = interactor.sendevent
    cases = [item for item in items if is_case(item)]
    told = {item.nodeid: _BETWEEN.join((item.nodeid, *_group(item, compiled_ahead))) for item in cases}

    def sendevent(name: str, **given: Any) -> None:
        if name == "collectionfinish":
            given["ids"] = [told.get(one, one) for one in given["ids"]]
        send(name, **given)

    interactor.sendevent = sendevent


def _group(item: pytest.Item, compiled_ahead: Mapping[str, float]) -> tuple[str, str]:
    """Return the group of a case, "" where it has none, or one of xdist's own that this run asks for; and what it compiles.

    In seconds; what another process compiles comes behind what compiles nothing, the group that takes least first.
    """
    parameter = parameter_of(item)
    if parameter is None:
        return "", "0"
    is_grouped = item.config.getoption("loadgroup", False) and item.get_closest_marker("xdist_group")
    group: str | None = None if is_grouped else kind_of(item).made_items().group(item, parameter)
    return group or "", str(-compiled_ahead.get(group or "", 0) or _seconds_to_compile(item, parameter))


def _seconds_to_compile(item: pytest.Item, parameter: CaseParameter) -> float:
    registry, name = session_of(item.config).registrations.registry, parameter.backend or ""
    if not registry.is_known(name):
        return 0.0
    backend = registry[name]
    seconds = seconds_to_compile(name, backend.compiles)
    is_claimed = not seconds or kind_of(item) is MODEL or backend.claims(parameter.workload, asks_gradients(item))
    return seconds if is_claimed else 0.0


def take_groups(config: pytest.Config, ids: list[str]) -> list[str]:
    """In the controller, take the groups off the ids of a worker, and schedule by them; return the ids of cases."""
    parted = [one.split(_BETWEEN) for one in ids]
    ids[:] = [nodeid for nodeid, *_ in parted]
    groups = {nodeid: more[0] for nodeid, *more in parted if more and more[0]}
    distributed: Any = config.pluginmanager.getplugin("dsession")
    own = distributed.sched
    is_own = isinstance(own, GroupScheduling) or not type(own).__module__.startswith("xdist.")
    if groups and not is_own and config.getoption("dist") in _DIVIDING:
        compiling = {nodeid: float(more[1]) for nodeid, *more in parted if more}
        run = distributed.nodemanager.testrunuid
        distributed.sched = GroupScheduling(config, own, groups, Durations(config).earlier, compiling, run)
    return [nodeid for nodeid, *more in parted if more]
