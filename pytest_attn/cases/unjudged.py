"""A marked test that passes and has judged nothing: it would stay green whatever its kernel did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pytest_attn.cases.case import AttentionCase
from pytest_attn.session.fixture_names import FIXTURES
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
    arguments = FIXTURES.intersection(getattr(item, "fixturenames", ()))
    if not arguments:
        if any(mark.name == "attention_model" for mark in item.own_markers):
            return True, "it has the marker attention_model, but does not take attn_model; make it an argument of the test"
        names_workloads = any(mark.name == "attention" and mark.args for mark in item.own_markers)
        text = "it names workloads, but takes none of the fixtures: give it attn, and call attn.check(your_kernel)"
        return (True, text) if names_workloads else None
    case = getattr(item, "funcargs", {}).get("attn_model")
    if case is not None:
        return None if case.is_judged else (True, "it passed without a call of attn_model.check")
    case = getattr(item, "funcargs", {}).get("attn")
    if not isinstance(case, AttentionCase) or case.is_judged or _is_handed_on(item):
        return None
    if case.looked_at & _JUDGED_WITH:
        return None
    if case.looked_at:
        text = "computes with q, k and v, but calls none of attn.check, check_invariants, measure and assert_close"
        return False, f"{text}; if it compares by itself on purpose, say --attn-unjudged=ignore"
    return True, "it passed without a call of attn.check, check_invariants, measure or assert_close"


def _is_handed_on(item: pytest.Item) -> bool:
    """Whether a fixture that is none of ours takes the case, and may judge it before or after the test, or time it."""
    definitions: Mapping[str, Any] = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    others = [one for name, found in definitions.items() if name not in FIXTURES for one in found]
    is_timed = not {"benchmark", "attn_benchmark"}.isdisjoint(definitions)
    return is_timed or any(FIXTURES.intersection(one.argnames) for one in others)
