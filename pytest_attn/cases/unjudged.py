"""A marked test must judge something: one that passed without is failed, one that compares by itself is warned of.

What a test may do is read from its code: what it names, and what the functions name that it names.
"""

import dis
import inspect
import sys
import unittest
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import pytest

from pytest_attn.session.kinds import ATTENTION, KINDS, PARAMETER, fixtures, kind_of, taker_of_fixtures
from pytest_attn.session.session import session_of

#: how names begin of what fails a test by itself
_ASSERTING = ("assert", "raises", "warns", "fail")
#: the fixture that is one backend
BACKEND = "attn_backend"
#: where pytest_attn.check and the like are
_OWN_JUDGES = ("pytest_attn.cases.", "pytest_attn.guests.")


class UnjudgedWarning(pytest.PytestWarning):
    """A marked test has judged nothing, or compares by itself what the plugin would compare with an error budget."""


#: of an item whose test was refused: its kernel has done nothing wrong
REFUSED = pytest.StashKey[bool]()


def refuse_unjudged(item: pytest.Item) -> None:
    """Fail a test that has passed and looked at nothing of its case; warn of one that has only taken its tensors."""
    session = session_of(item.config)
    action = session.settings.unjudged
    is_asked = session.kernels.are_tested and session.worker is None and not session.settings.asked["cases"]
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
    names = getattr(item, "fixturenames", ())
    if PARAMETER not in names:
        if issubclass(getattr(item, "cls", None) or object, unittest.TestCase):
            return _untakable(item)
        return next(filter(None, map(_untaken, item.own_markers)), None)
    given = getattr(item, "funcargs", {})
    case = given.get(kind.fixture)
    if case is None or taker_of_fixtures(item) or not {"benchmark", "attn_benchmark"}.isdisjoint(names):
        return None  # the fixture may judge it before or after the test, or time it
    if case.is_judged:
        return _unused_backend(item, case)
    looked_at: frozenset[str] = getattr(case, "looked_at", frozenset())
    asserts = _asserts(item, given) if looked_at else ""
    if not asserts:
        return True, f"it passed without a call of {kind.must_call}"
    if "reference" in looked_at or (asserts == "itself" and looked_at.isdisjoint("qkv")):
        return None
    reads = "computes with q, k and v" if looked_at & set("qkv") else f"reads {' and '.join(sorted(looked_at))}"
    text = f"{reads}, but calls none of {kind.must_call.replace(' or ', ' and ')}"
    return False, f"{text}; if it compares by itself on purpose, say --attn-unjudged=ignore"


def _unused_backend(item: pytest.Item, case: Any) -> tuple[bool, str] | None:
    """Return that a test has judged something else once for each backend; None where it reads its backend anywhere."""
    test = inspect.unwrap(getattr(item, "function", _untaken))
    if BACKEND not in getattr(item, "fixturenames", ()) or not isinstance(test, FunctionType):
        return None
    steps = (step for code in _codes(test.__code__) for step in dis.get_instructions(code) if step.opname.startswith("LOAD"))
    read = {name for step in steps for name in (step.argval if isinstance(step.argval, tuple) else (step.argval,))}
    is_taken = BACKEND in inspect.signature(test).parameters
    if not is_taken or BACKEND in read or "backend" in getattr(case, "looked_at", ()):
        return None
    return True, f"no backend was judged, as it takes {BACKEND} and does not use it: judge that, or leave the argument out"


def _asserts(item: pytest.Item, given: Mapping[str, Any]) -> str:
    """Say what of a test may fail, as far as code shows: "itself", "others", which it calls or is given; "" for nothing."""
    test, own = inspect.unwrap(getattr(item, "function", _untaken)), fixtures()
    called = list(functions_named(test, getattr(item, "cls", None)))
    if _can_fail(test) or any(one.__module__.startswith(_OWN_JUDGES) for one in called):
        return "itself"
    helpers = [*called, *(value for name, value in given.items() if name not in own)]
    return "others" if any(_helper_can_fail(one, {id(test)}) for one in helpers) else ""


def _helper_can_fail(helper: Any, seen: set[int]) -> bool:
    helper = inspect.unwrap(helper) if callable(helper) else helper
    if not isinstance(helper, FunctionType):  # a callable object may do anything; check is what pytest-regressions has
        return hasattr(helper, "check") or (callable(helper) and not isinstance(helper, (type, BuiltinFunctionType)))
    if id(helper) in seen or helper.__module__.partition(".")[0] == "torch":
        return False
    seen.add(id(helper))
    return _can_fail(helper) or any(_helper_can_fail(one, seen) for one in functions_named(helper))


def _can_fail(function: FunctionType) -> bool:
    """Whether a function asserts, raises more than a kernel that declines, or calls what says by its name that it does."""
    for code in _codes(function.__code__):
        if any(name.startswith(_ASSERTING) for name in code.co_names if name != "assert_attention_close"):
            return True
        steps = list(dis.get_instructions(code))
        raised = {name for name in code.co_names if name.endswith(("Error", "Exception"))}
        declines = raised == {"NotImplementedError"} and not any("ASSERT" in f"{s.opname} {s.argrepr}".upper() for s in steps)
        if not declines and any(step.opname == "RAISE_VARARGS" for step in steps):
            return True
    return False


def _untakable(item: pytest.Item) -> tuple[bool, str] | None:
    """Say that a test of a unittest.TestCase, or its class, has a marker, whose fixtures it cannot take."""
    marks = [mark for node in (item, item.parent) if node for mark in node.own_markers]
    if (mark := next(filter(_untaken, marks), None)) is None:
        return None
    do = f"make it a plain class, or a function, whose test takes {KINDS[mark.name].fixture}"
    return True, f"it has the marker {mark.name}, and a unittest.TestCase can take no fixture: {do}"


def _untaken(mark: pytest.Mark) -> tuple[bool, str] | None:
    """Say that a test has a marker, and takes no fixture; a module's may be for others of its tests."""
    kind = KINDS.get(mark.name)
    if kind is ATTENTION:
        text = "it names workloads, but takes none of the fixtures: give it attn, and call attn.check(your_kernel)"
        return (True, text) if mark.args else None
    if kind is None:
        return None
    return True, f"it has the marker {kind.marker}, but does not take {kind.fixture}; make it an argument of the test"


# -- what code names -----------------------------------------------------------------------------------------------------


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for within in code.co_consts:
        if isinstance(within, CodeType):
            yield from _codes(within)


def names_in(function: FunctionType) -> set[str]:
    """Return the globals and attributes that a function names, with those of its inner functions."""
    return {name for code in _codes(function.__code__) for name in code.co_names}


def functions_named(function: FunctionType, cls: type | None = None) -> Iterator[FunctionType]:
    """Yield functions that a function names: of its module, of modules that it imports, and of its class."""
    names = names_in(function)
    known = [found for name in names if (found := function.__globals__.get(name) or sys.modules.get(name)) is not None]
    for owner in (*known, cls):
        yield from (found for name in names if isinstance(found := getattr(owner, name, None), FunctionType))
    yield from (found for found in known if isinstance(found, FunctionType))
