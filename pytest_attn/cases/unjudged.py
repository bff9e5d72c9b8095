"""A marked test that passes and has judged nothing: it would stay green whatever its kernel did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pytest_attn.session.kinds import ATTENTION, KINDS, fixtures, kind_of
from pytest_attn.session.session import session_of

#: of a case, what a test may hand to a judgment of its own
_JUDGED_WITH = frozenset(("workload", "reference", "backend"))


class UnjudgedWarning(pytest.PytestWarning):
    """A marked test has judged nothing, or compares by itself what the plugin would compare with an error budget."""


#: of an item whose test was refused: its kernel has done nothing wrong
REFUSED = pytest.StashKey[bool]()


def refuse_unjudged(item: pytest.Item) -> None:
    """Fail a test that has passed and looked at nothing of its case; warn of one that has only taken its tensors."""
    session = session_of(item.config)
    action = session.settings.unjudged
    is_asked = session.kernels.are_tested and session.worker is None and not session.settings.fuzz
    if action == "ignore" or not is_asked or not (missing := _what_is_missing(item)):
        return
    is_certain, text = missing
    text = f"{text} (--attn-unjudged=warn or ignore lets it pass)" if is_certain else text
    if action == "error" and is_certain:
        item.stash[REFUSED] = True
        pytest.fail(f"judges nothing: {text}", pytrace=False)
    item.warn(UnjudgedWarning(f"judges nothing: {text}" if is_certain else text))


def _what_is_missing(item: pytest.Item) -> tuple[bool, str] | None:
    """Return what a test lacks, and whether that is certain; None if it judges, or does not test a kernel."""
    kind = kind_of(item)
    if fixtures().isdisjoint(getattr(item, "fixturenames", ())):
        return next(filter(None, map(_untaken, item.own_markers)), None)
    case = getattr(item, "funcargs", {}).get(kind.fixture)
    looked_at: frozenset[str] = getattr(case, "looked_at", frozenset())
    if case is None or case.is_judged or _is_handed_on(item) or looked_at & _JUDGED_WITH:
        return None
    if looked_at:
        text = f"computes with q, k and v, but calls none of {kind.must_call.replace(' or ', ' and ')}"
        return False, f"{text}; if it compares by itself on purpose, say --attn-unjudged=ignore"
    return True, f"it passed without a call of {kind.must_call}"


def _untaken(mark: pytest.Mark) -> tuple[bool, str] | None:
    """Say that a test has a marker, and takes no fixture; a module's may be for others of its tests."""
    kind = KINDS.get(mark.name)
    if kind is ATTENTION:
        text = "it names workloads, but takes none of the fixtures: give it attn, and call attn.check(your_kernel)"
        return (True, text) if mark.args else None
    if kind is None:
        return None
    return True, f"it has the marker {kind.marker}, but does not take {kind.fixture}; make it an argument of the test"


def _is_handed_on(item: pytest.Item) -> bool:
    """Whether a fixture that is none of ours takes the case, and may judge it before or after the test, or time it."""
    own = fixtures()
    definitions: Mapping[str, Any] = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    others = [one for name, found in definitions.items() if name not in own for one in found]
    is_timed = not {"benchmark", "attn_benchmark"}.isdisjoint(definitions)
    return is_timed or any(own.intersection(one.argnames) for one in others)
