"""JSON that others may have written: read strictly, and compared with a description; knows nothing of this project."""

import json
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

#: part of JSON Schema: type (one, or several), enum, pattern, minimum, maximum, minItems, maxItems, items, prefixItems,
#: properties, required, dependentRequired, if with then of required, minProperties, additionalProperties (a description, or
#: False); description is what a message says that was expected
Description = Mapping[str, Any]
#: characters of a number, and containers within one another, beyond which a text is none of ours
_DIGITS, _DEPTH = 40, 32
_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}


def parse_json(text: str) -> Any:
    """Return what a JSON text says. Raises ValueError for what is not strict JSON, or is none that anybody would write.

    That is NaN, a number that is infinite or has more than 40 digits, a key that an object has twice, and 33 levels.
    """
    try:
        found = json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_number(float), parse_int=_number(int)
        )
    except RecursionError:
        raise ValueError(f"has more than {_DEPTH} levels") from None
    level = [found]
    for _ in range(_DEPTH):
        level = [inner for one in level if _holds(one) for inner in (one.values() if isinstance(one, dict) else one)]
    if any(map(_holds, level)):
        raise ValueError(f"has more than {_DEPTH} levels")
    return found


def _holds(value: object) -> bool:
    return isinstance(value, dict | list)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"has {_shown(twice)} twice in one object")
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"has {text}, expected a finite number")


def _number(kind: type) -> Any:
    def parsed(text: str) -> float:
        if len(text) > _DIGITS or not math.isfinite(number := kind(text)):
            raise ValueError(f"has {text[:_DIGITS]}, expected a finite number of at most {_DIGITS} digits")
        return number  # type: ignore[no-any-return]

    return parsed


def first_fault(value: Any, description: Description, field: str = "") -> str:
    """Return where a value is not as described, what was found and expected: "p50_ns[3]: found -1, expected ..."; "" if it is.

    field: the name of the value itself.
    """
    if not _is_of(value, description):
        return f"{field or 'it'}: found {_shown(value)}, expected {_expected(description)}"
    if isinstance(value, dict):
        return _fault_in_object(value, description, field)
    if isinstance(value, list):
        each = [*description.get("prefixItems", ()), *[description.get("items", {})] * len(value)]
        faults = (first_fault(one, each[at], f"{field}[{at}]") for at, one in enumerate(value))
        return next(filter(None, faults), "")
    return ""


def _fault_in_object(value: Mapping[str, Any], description: Description, field: str) -> str:
    within = f"{field}." if field else ""
    known, unknown = description.get("properties", {}), description.get("additionalProperties", {})
    needed = [other for name, others in description.get("dependentRequired", {}).items() if name in value for other in others]
    if "if" in description and _is_of(value, description["if"]):
        needed += description["then"]["required"]
    for name in (*description.get("required", ()), *needed):
        if name not in value:
            return f"{within}{name}: found nothing, expected {_expected(known.get(name, {}))}"
    for name, one in value.items():
        if name not in known and unknown is False:
            return f"{within}{_shown(name)[1:-1]}: found a field that is unknown, expected {', '.join(known)}"
        if fault := first_fault(one, known.get(name, unknown), f"{within}{_shown(name)[1:-1]}"):
            return fault
    return ""


def _is_of(value: Any, description: Description) -> bool:
    names = description.get("type", ())
    names = (names,) if isinstance(names, str) else names
    is_typed = not names or any(
        isinstance(value, _KINDS[one]) and (type(value) is not bool or one == "boolean") for one in names
    )
    if not is_typed or ("enum" in description and value not in description["enum"]):
        return False
    if isinstance(value, str):
        return re.search(description.get("pattern", ""), value) is not None
    if isinstance(value, dict):
        return bool(len(value) >= description.get("minProperties", 0))
    if isinstance(value, list):
        return bool(description.get("minItems", 0) <= len(value) <= description.get("maxItems", math.inf))
    if isinstance(value, int | float):
        return bool(description.get("minimum", -math.inf) <= value <= description.get("maximum", math.inf))
    return True


def _expected(description: Description) -> str:
    """Return a description in words: "number from 0.1 to 1e+15"."""
    if "description" in description:
        return str(description["description"])
    if "enum" in description:
        return " or ".join(map(_shown, description["enum"]))
    names = description.get("type", "anything")
    words = names if isinstance(names, str) else " or ".join(names)
    ends = (("minimum", "from"), ("maximum", "to"), ("minItems", "of at least"), ("maxItems", "of at most"))
    return " ".join([words, *(f"{word} {description[name]}" for name, word in ends if name in description)])


def _shown(value: object) -> str:
    """Return a value as JSON has it, short and printable."""
    text = (
        json.dumps(value) if not isinstance(value, dict | list) else f"an {'object' if isinstance(value, dict) else 'array'}"
    )
    return text if len(text) <= 60 else f"{text[:60]}..."


# -- descriptions ------------------------------------------------------------------------------------------------------


def object_of(required: Mapping[str, Any] = MappingProxyType({}), **optional: Any) -> dict[str, Any]:
    """Return the description of an object, by its keys."""
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def sealed(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of an object that has no other keys."""
    return {**description, "additionalProperties": False}


def by_name(of_each: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of an object of any keys, and of each of its values."""
    return {"type": "object", "additionalProperties": of_each}


def or_empty(required: Mapping[str, Any], **optional: Any) -> dict[str, Any]:
    """Return the description of an object that has nothing, or all that is required."""
    return {**object_of(**required, **optional), "if": {"minProperties": 1}, "then": {"required": list(required)}}


def array_of(items: Mapping[str, Any], length: int | None = None) -> dict[str, Any]:
    """Return the description of an array, of so many items where a length is given."""
    return {"type": "array", "items": items, **({"minItems": length, "maxItems": length} if length else {})}


def or_null(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of what may be null, too."""
    names = description["type"]
    return {**description, "type": [*([names] if isinstance(names, str) else names), "null"]}


TEXT, TRUTH, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
NUMBER = {
    "type": ["number", "string"],
    "pattern": "^(NaN|-?Infinity)$",
    "description": 'a number, "NaN", "Infinity" or "-Infinity"',
}
BY_NAME = by_name(NUMBER)
