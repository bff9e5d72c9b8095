"""Texts of valid JSON that were changed in one place, and whether any reader of JSON Schema judges them as ours does."""

import json

import jsonschema
from hypothesis import settings
from hypothesis import strategies as st
from left_out import IS_ALL

from pytest_attn.reports.strict_json import first_fault, parse_json

#: of a test that mutates one kind of file: these are four, and 2,000 mutations in all
MUTATED = settings(max_examples=500 if IS_ALL else 60, deadline=None)
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just([]), st.just({}), st.just("NaN"),
    st.sampled_from([0, -1, 1e308, 5e-324, 10**30, 10**400, [None], [[1]], [[[]]], {"a": 1}, "x\n"]),
)  # fmt: skip
#: to which 1.0 is no integer
_STRICT = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int),
)


def _places(value, path=()):
    """Yield the path of each value within a value."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(inner, (*path, key))


@st.composite
def mutated(draw, text):
    """Return a text in which one value was replaced, removed or renamed, or some characters were."""
    data = json.loads(text)
    path = draw(st.sampled_from([path for path in _places(data) if path]))
    how = draw(st.sampled_from(["replace", "remove", "rename", "text"]))
    if how == "text":
        at = draw(st.integers(0, len(text) - 1))
        return text[:at] + draw(st.text(max_size=3)) + text[at + draw(st.integers(0, 3)) :]
    within = data
    for key in path[:-1]:
        within = within[key]
    if how == "replace":
        within[path[-1]] = draw(VALUES)
    elif how == "remove" or isinstance(within, list):
        del within[path[-1]]
    else:
        within[draw(st.text(max_size=5))] = within.pop(path[-1])
    return json.dumps(data)


def require_one_judgment(text, description):
    """Assert that the schema which is made of a description takes what our reader takes, and nothing else."""
    try:
        data = parse_json(text)
    except ValueError:
        return
    fault = first_fault(data, description)
    assert _STRICT(description).is_valid(data) == (not fault), fault


def read_or_refused(read, *given):
    """Return what was read and "", or None and the one line that refuses it."""
    try:
        return read(*given), ""
    except ValueError as error:
        refused = str(error)
    assert "\n" not in refused
    return None, refused
