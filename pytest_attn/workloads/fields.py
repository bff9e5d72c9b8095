"""Checks of what a field of a workload or mask may hold, and the field that was meant by a name that there is not.

Each check raises ValueError, naming the field, what was found and what was expected.
"""

import functools
import math
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeGuard, TypeVar

from pytest_attn.workloads.dtypes import DTYPES, QUANTIZED_DTYPES, known_dtype

_T = TypeVar("_T")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return " did you mean flux-L512?" with the three names that are most alike, or those in one text; "" where none is."""
    several, names = tuple(one.strip() for one in name.split(",")), list(names)
    if len(several) > 1 and set(several) <= set(names):
        return f" did you mean {several}?"
    alike = get_close_matches(name, names, n=3)
    return f" did you mean {' or '.join(alike)}?" if alike else ""


#: what many try in a marker and in functions, and what to say in its place
_TRIED = {
    **dict.fromkeys(
        ("atol", "rtol", "tol", "tolerance"),
        " each element has a budget of its own: precision= says where fn rounds, attn_limits (limits= of pytest_attn.check)"
        " how near it must be;",
    ),
    **dict.fromkeys(("causal", "is_causal"), ' say Workload(..., mask="causal");'),
    **dict.fromkeys(("mask", "masks"), " say Workload(..., mask=...);"),
    **dict.fromkeys(("workload", "workloads"), ' they come first and have no name: attention("smoke", ...);'),
}


def instead_of(name: str, names: Iterable[str]) -> str:
    """Return what to say in place of an argument that there is not, " " before it and ";" after it, "" if nobody knows."""
    return _TRIED.get(name) or did_you_mean(name, names)


#: names that are none of a workload's fields: what to say in their place
_SAID = {
    **dict.fromkeys(("n", "seq", "seqlen", "seq_len", "tokens"), "did you mean q_len?"),
    **dict.fromkeys(("d", "dim", "hdim", "D"), "did you mean head_dim?"),
    **dict.fromkeys(("h", "H", "nheads"), "did you mean heads?"),
    **dict.fromkeys(("causal", "is_causal"), 'say mask="causal";'),
    **dict.fromkeys(("window", "window_size", "sliding_window"), "say mask=Window(left, right);"),
    **dict.fromkeys(("layout", "backward", "inputs", "precision"), "the marker takes it, beside the workload;"),
}


def suggests_fields(made: type[_T]) -> type[_T]:
    """Let a dataclass answer an unknown argument with the field that may have been meant.

    Returns the class, whose `__init__` now raises TypeError naming the argument, the nearest field and all fields.
    """
    of_class: Any = made  # a dataclass, which the type cannot say
    plain = of_class.__init__
    known = tuple(field.name for field in fields(of_class))

    @functools.wraps(plain)
    def init(self: _T, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                said = f" {_SAID[name]}" if name in _SAID and "q_len" in known else did_you_mean(name, known)
                raise TypeError(f"{made.__name__} has no field {name!r};{said} fields: {', '.join(known)}")
        plain(self, *args, **given)

    of_class.__init__ = init
    return made


#: what one descale is of
DESCALES = ("tensor", "head", "token")
BIAS_DIMENSIONS = ("b", "h", "q", "k")


def settled_quantization(dtype: str, kv_dtype: object, descales: object) -> tuple[str | None, str | None]:
    """Return kv_dtype, None where k and v have the dtype of q, and what one descale is of, None where there are none."""
    if kv_dtype is not None:
        kv_dtype = known_dtype("kv_dtype", kv_dtype, QUANTIZED_DTYPES)
        if dtype in QUANTIZED_DTYPES and kv_dtype != dtype:
            raise ValueError(f"Workload: kv_dtype must be that of q where q is quantized, got {kv_dtype} beside {dtype}")
    if dtype not in QUANTIZED_DTYPES and kv_dtype is None:
        if descales is not None:
            raise ValueError(f'Workload: descales={descales!r} needs quantized tensors: dtype="float8_e4m3fn" or a kv_dtype')
        return None, None
    if descales is None:
        descales = "tensor"
    if not isinstance(descales, str) or descales not in DESCALES:
        raise ValueError(f"Workload: descales must be one of {', '.join(DESCALES)}, got {descales!r}")
    return None if dtype in QUANTIZED_DTYPES else str(kv_dtype), descales


def settled_sinks(sinks: Any) -> bool | str:
    """Return whether there are sinks, their dtype, or the number that all are, as text: 0.0 equals False, and is none."""
    if isinstance(sinks, str) and sinks not in DTYPES:
        with suppress(ValueError):
            sinks = float(sinks)
    if isinstance(sinks, float) and math.isfinite(sinks):
        return repr(sinks)
    require_one_of("sinks", sinks, (False, True, *DTYPES, 0.0))
    return bool(sinks) if isinstance(sinks, bool) else str(sinks)


def is_whole(value: object, least: int | None = None) -> TypeGuard[int]:
    """Return whether a value is a whole number, and not less than `least`; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def require_count(field: str, value: object) -> None:
    """Refuse anything but a whole number >= 1."""
    if not is_whole(value, 1):
        raise ValueError(f"Workload: {field} must be a whole number >= 1, got {value!r}")


def require_flag(field: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"Workload: {field} must be True or False, got {value!r}")


def require_one_of(field: str, value: object, known: tuple[object, ...]) -> None:
    """Refuse what is not one of the known values; True and False do not count as numbers."""
    if not any(value is one or (isinstance(value, str) and value == one) for one in known):
        raise ValueError(f"Workload: {field} must be one of {', '.join(map(repr, known))}, got {value!r}")


def require_dropout(value: object, is_packed: bool) -> None:
    """Refuse anything but a probability below 1, and any for packed sequences."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"Workload: dropout must be a number from 0 to below 1, got {value!r}")
    if value and is_packed:
        raise ValueError("Workload: q_lens (packed sequences) cannot be combined with dropout")


def require_positive_or_none(field: str, value: object) -> None:
    """Refuse what is neither None nor a finite number > 0."""
    if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
        raise ValueError(f"Workload: {field} must be a finite number > 0 or None, got {value!r}")


def require_bias(bias: object) -> None:
    """Refuse what names no dimensions of a bias, or names them in another order."""
    if not isinstance(bias, str) or not bias or [d for d in BIAS_DIMENSIONS if d in bias] != list(bias):
        raise ValueError(
            f"Workload: bias must name the dimensions it varies over, a part of 'bhqk' in this order, got {bias!r}; 'hqk' is a"
            " bias of shape (1, heads, q_len, kv_len)"
        )


def as_tuple(field: str, values: object) -> tuple[int, ...]:
    """Return a sequence of whole numbers as a tuple."""
    if not isinstance(values, list | tuple) or not all(map(is_whole, values)):
        raise ValueError(f"{field} must be a tuple of whole numbers, got {values!r}")
    return tuple(values)


def short_lengths(lengths: tuple[int, ...]) -> str:
    """Write lengths for an id: in full up to four, else their number and a checksum."""
    if len(lengths) <= 4:
        return ".".join(map(str, lengths))
    return f"{len(lengths)}x{zlib.crc32(repr(lengths).encode()) & 0xFFFF:04x}"
