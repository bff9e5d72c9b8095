"""Configurations: options that one kernel may be run with, and the names that make each of them a backend, "NAME@A=1:B=2"."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from pytest_attn.workloads.workload import Workload

Options: TypeAlias = "Mapping[str, Any]"
#: what `Registry.add_function` takes: a grid of values, a list of options, or a function of the workload that returns either
Declared: TypeAlias = "Mapping[str, Sequence[Any]] | Sequence[Any] | Callable[[Workload], Any]"

#: letters that no shell, no list of names and no test id takes for something else
_WORD = r"[\w.-]+"
_OPTION = rf"[A-Za-z_]\w*={_WORD}"
#: not "hub:REPO@REVISION", whose name has a colon before the @
_NAME = re.compile(rf"(?P<base>[\w.]+)@(?P<label>{_OPTION}(?::{_OPTION})*)(?P<variant>(?:\+\w+)?)", re.ASCII)


def split(name: str) -> tuple[str, str]:
    """Return a backend's name without its configuration, and the configuration's label, "" where there is none.

    Example: "flex@BLOCK_M=64:BLOCK_N=32" gives ("flex", "BLOCK_M=64:BLOCK_N=32"). A variant stays with the name.
    """
    found = _NAME.fullmatch(name)
    return (found["base"] + found["variant"], found["label"]) if found else (name, "")


def joined(name: str, options: Options) -> str:
    """Return the name of a backend ("mine" or "mine+graph") under options; its own where there are none."""
    base, plus, variant = name.partition("+")
    return f"{base}@{label_of(options)}{plus}{variant}" if options else name


def label_of(options: Options) -> str:
    """Return "A=1:B=2x4:C=True:D=word"; raise ValueError for a value that could not be read back from it."""
    for name, value in options.items():
        read_back = _value(_text(value))
        is_same = read_back == value and type(read_back) is type(value)
        if not is_same or not re.fullmatch(_OPTION, f"{name}={_text(value)}", re.ASCII):
            raise ValueError(
                f"option {name}={value!r} cannot be part of a backend's name; expected an int, float, bool, tuple of at least"
                " two ints, or a word of letters, digits, '_', '-' and '.'"
            )
    return ":".join(f"{name}={_text(value)}" for name, value in options.items())


def options_of(label: str) -> dict[str, Any]:
    """Return the options behind a label."""
    pairs = (one.partition("=") for one in label.split(":") if one)
    return {name: _value(text) for name, _, text in pairs}


def expanded(declared: Mapping[str, Sequence[Any]] | Sequence[Any]) -> list[dict[str, Any]]:
    """Return the options of every declared configuration once, without the empty one, which is the backend as it is.

    declared: {option: values}, of which every combination is meant, or a list of options. A `triton.Config` in the list
    stands for its meta-parameters, num_warps and num_stages. Raises ValueError for anything else.
    """
    if isinstance(declared, Mapping):
        for name, values in declared.items():
            if isinstance(values, str) or not isinstance(values, Sequence):
                raise ValueError(f"configurations: {name} needs a list of values, got {values!r}")
        found = [dict(zip(declared, values, strict=True)) for values in product(*declared.values())]
    elif isinstance(declared, Sequence) and not isinstance(declared, str):
        found = [_options_in(one) for one in declared]
    else:
        raise ValueError(f"configurations must be {{option: values}} or a list of {{option: value}}, got {declared!r}")
    return list({label_of(options): options for options in found if options}.values())


def out_of_resources(error: Exception) -> str | None:
    """Return the words of a kernel whose tiles do not fit the device (Triton's OutOfResources); None for other errors."""
    found = re.search(r"out of resource[^\n]*", str(error))
    return f"does not fit: {found[0].strip()}" if found else None


def _options_in(one: Any) -> dict[str, Any]:
    if isinstance(one, Mapping):
        return dict(one)
    meta = getattr(one, "kwargs", None)
    if not isinstance(meta, Mapping):
        raise ValueError(f"a configuration must be {{option: value}} or a triton.Config, got {one!r}")
    return {**meta, "num_warps": one.num_warps, "num_stages": one.num_stages}


def _text(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    if re.fullmatch(r"-?\d+", text, re.ASCII):
        return int(text)
    if re.fullmatch(r"\d+(x\d+)+", text, re.ASCII):
        return tuple(map(int, text.split("x")))
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text
