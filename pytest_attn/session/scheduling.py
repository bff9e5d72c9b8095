"""Which worker of xdist runs which items: those of one backend and workload one after the other in one, whatever --dist says.

What a backend compiles for a workload is kept in the process that compiled it.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from pytest_attn.session.kinds import kind_of, parameter_of

#: between an item's id and its group, where a worker hands its ids to the controller; stands in no id
_BETWEEN = "\0"
#: those that give each item to one worker
_DIVIDING = ("load", "worksteal", "loadscope", "loadfile", "loadgroup")


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives the items of a group to one worker, and any other item as the user's own scheduler would."""

    def __init__(self, config: pytest.Config, own: Any, groups: dict[str, str]) -> None:
        super().__init__(config, own.log)  # which says something under --debug only
        self._own_scope, self._groups = getattr(own, "_split_scope", str), groups
        for node in own.nodes:
            self.add_node(node)

    def _split_scope(self, nodeid: str) -> str:
        group = self._groups.get(nodeid)
        scope: str = self._own_scope(nodeid) if group is None else f"{_BETWEEN}{group}"
        return scope


def tell_groups(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker of xdist, hand the groups of items to the controller, beside the ids, which is all that a worker sends."""
    interactor: Any = next((one for one in config.pluginmanager.get_plugins() if hasattr(one, "sendevent")), None)
    if interactor is None:
        return
    send = interactor.sendevent
    groups = {item.nodeid: group for item in items if (group := _group(item))}

    def sendevent(name: str, **given: Any) -> None:
        if name == "collectionfinish":
            given["ids"] = [f"{one}{_BETWEEN}{groups[one]}" if one in groups else one for one in given["ids"]]
        send(name, **given)

    interactor.sendevent = sendevent


def _group(item: pytest.Item) -> str | None:
    """Return the group of an item; None where it has none, or one of xdist's own that this run asks for."""
    parameter = parameter_of(item)
    if parameter is None or (item.config.getoption("loadgroup") and item.get_closest_marker("xdist_group")):
        return None
    group: str | None = kind_of(item).made_items().group(item, parameter)
    return group


def take_groups(config: pytest.Config, ids: list[str]) -> None:
    """In the controller, take the groups off the ids of a worker, and schedule by them where there are any."""
    parted = [one.partition(_BETWEEN) for one in ids]
    ids[:] = [nodeid for nodeid, _, _ in parted]
    groups = {nodeid: group for nodeid, _, group in parted if group}
    distributed: Any = config.pluginmanager.getplugin("dsession")
    own = distributed.sched
    is_own = isinstance(own, GroupScheduling) or not type(own).__module__.startswith("xdist.")
    if groups and not is_own and config.getoption("dist") in _DIVIDING:
        distributed.sched = GroupScheduling(config, own, groups)
