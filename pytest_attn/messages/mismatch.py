"""How a mismatch reads: the verdict first, then the worst element, the levels, where, the usual figures, what it suggests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pytest_attn.correctness.calling import fault_of_change
from pytest_attn.correctness.comparison import Comparison, Location, Members, Mismatch, Suggestion, TensorComparison
from pytest_attn.correctness.contract import ContractError
from pytest_attn.messages.lines import figure, labeled

#: sizes of tiles, after the last full one of which a tail begins
_TILES = (128, 64, 32, 16)
#: the words of each kind of `Suggestion`
_SUGGESTIONS: dict[str, str | Callable[[Mapping[str, Any]], str]] = {
    "mistake": "it equals attention {mistake} (z {z:.1f} there)",
    "scale": "it equals attention with scale {scale:.4g}, not {expected:.4g} (z {z:.1f} there)",
    "profiles": lambda facts: _profiles(**facts),
    "shifted heads": "head h holds what belongs to head h - {shift}: heads are swapped",
    "all zeros": "{tensor} is all zeros",
    "not finite": lambda facts: _not_finite(**facts),
    "zeros there": "{tensor} is 0 in all of these rows",
    "beyond a power of two": "{tensor} is wrong from element {reach:,} (2^{bits}) on and right before: do offsets wrap there?",
    "exp overflow": "each of these rows has lse below -88 (at most {largest:.1f}), where exp(-lse) overflows in float32",
    "exp out of reach": "each of these rows has lse beyond 88 ({lowest:.1f} to {largest:.1f}), where exp(lse) leaves float32",
    "no key": "each of these rows sees no key at all: {tensor} must be {exact} there",
    "mean without keys": "each of these rows sees no key at all: out must be {exact} there, and is the mean of v"
    ' (where that is meant, the marker says empty_rows="finite")',
    "NaN without keys": "each of these rows sees no key at all: out must be {exact} there, and is NaN"
    ' (where that is meant, the marker says empty_rows="any")',
    "not finite without keys": "each of these rows sees no key at all: {tensor} must be finite there",
    "shifted batch": "batch entry b holds what belongs to batch entry b - {shift}: batch entries are swapped",
    "heads and rows swapped": "{tensor} has its heads and rows swapped, which no shape shows where these are equal",
    "batch and heads swapped": "{tensor} has its batch entries and heads swapped, which no shape shows where these are equal",
    "lse base": "lse is off by a factor of {factor}",
    "other result": "{tensor} is {words}",
    "lse shift": "lse is {shift} in every row",
    "lse rounded": "lse is rounded to {dtype}; float32 expected",
    "lse layout": "lse lies in memory as {layout}; (batch, heads, rows) expected",
    "lse without maximum": "lse is the logarithm of the sum relative to the row's maximum: the maximum is not added",
    "lse is maximum": "lse is the row's maximum: the logarithm of the sum is not added",
    "lse of a mistake": "lse is that of attention {mistake}",
    "gradient factor": "{tensor} is {slope:.4g} times the exact gradient: {factor}",
    "blind tile": "each of these rows sees no key in the first tile of {tile} keys that is visited: -inf less -inf is NaN",
    "online": "{tensor} is that of an online softmax {text}",
    "swapped gradients": "{tensor} holds {other}",
    "backward": "{tensor} is that of a backward pass {text}",
}


def describe(comparison: Comparison) -> str:
    """Return the text of a comparison that did not pass, "" for one that did."""
    if comparison.mismatch is not None:
        return _describe_mismatch(comparison.mismatch, comparison)
    if comparison.changes:
        fault = fault_of_change(dict(comparison.changes))
        return f"{fault}\n{labeled('by', f'{comparison.subject} on {comparison.workload}')}"
    return ""


def describe_contract(error: ContractError) -> str:
    """Return the text of a broken contract: the fault, and whose it is."""
    return f"{error}\n{labeled('by', error.where)}" if error.where else str(error)


def headline(comparison: Comparison) -> str:
    """Say in a few words what is wrong: of the first tensor that is, which the diagnosis is about."""
    row = next((t for t in comparison.tensors if not t.passed), None)
    if row is None:
        return f"changed its input {comparison.changed[0]} in place"
    return f"{row.name} {_excess(row)} (inputs {row.distribution})"


def _describe_mismatch(mismatch: Mismatch, comparison: Comparison) -> str:
    row = mismatch.row
    at = ", ".join(map(str, row.worst))
    whose = row.name if row.name == comparison.subject else f"{row.name} of {comparison.subject}"
    of_finite = "of finite elements: " if row.wrong_positions else ""
    lines = [
        f"mismatch: {whose}: {_excess(row)} ({comparison.workload}, inputs {row.distribution})",
        labeled(
            "worst", f"{row.name}[{at}] = {_value(row.found)}, exact {_value(row.exact)}, budget {figure(row.budget, '.3g')}"
        ),
        labeled(
            "levels",
            f"element {_short(row.z_element)} (limit {row.limits.element:g}), row {_short(row.z_row)}"
            f" ({row.limits.row:g}), head {_short(row.z_head)} ({row.limits.head:g});"
            f" {row.exceeding:,} of {row.elements:,} elements over",
        ),
        labeled("where", _describe_location(mismatch.location)),
        labeled(
            "figures",
            f"{of_finite}absmax {figure(row.absmax, '.3g')}, mean abs {figure(row.mean_abs, '.3g')},"
            f" mse {figure(row.mse, '.3g')}, relative L2 {figure(row.relative_l2, '.3g')},"
            f" cosine {row.cosine:.6f}, slope {figure(row.alpha, '.4f')}",
        ),
        *(labeled("suggests", _describe_suggestion(one)) for one in mismatch.suggestions),
        *(labeled(label, text) for label, text in mismatch.notes),
    ]
    return "\n".join(lines)


# -- by how much ---------------------------------------------------------------------------------------------------------


def _excess(row: TensorComparison) -> str:
    if row.wrong_positions:
        return f"{row.wrong_positions:,} elements are NaN or infinite and should not be, or should be and are not"
    level, value, limit = _worst_level(row)
    return f"z {_short(value)} over {level}, limit {limit:g}"


def _worst_level(row: TensorComparison) -> tuple[str, float, float]:
    levels = (
        ("an element", row.z_element, row.limits.element),
        ("a row", row.z_row, row.limits.row),
        ("a head", row.z_head, row.limits.head),
    )
    return next((level for level in levels if not level[1] <= level[2]), levels[0])


def _short(z: float) -> str:
    return figure(z, ".2f" if z < 100 else ",.0f")


def _value(value: float) -> str:
    return f"{value}" if math.isnan(value) or math.isinf(value) else figure(value, ".6g")


# -- where ---------------------------------------------------------------------------------------------------------------


def _describe_location(location: Location) -> str:
    parts = [f"rows {_describe_rows(location.rows, location.length)}", _describe_set("head", location.heads)]
    if location.batches.size > 1:
        parts.append(_describe_set("batch entry", location.batches).replace("entrys", "entries"))
    return "; ".join(parts)


def _describe_set(noun: str, members: Members) -> str:
    found, size = members
    if len(found) == size:
        return f"all {size} {noun}s" if size > 1 else f"the only {noun}"
    shown = ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
    return f"{noun}{'s' if len(found) > 1 else ''} {shown} (of {size})"


def _describe_rows(members: Members, length: int) -> str:
    """Describe which rows are wrong: all, one, a tail after the last full tile, every n-th, a range, or their number."""
    rows, looked_at = members
    of = f"of {length}" if looked_at == length else f"of {looked_at} looked at"
    if len(rows) == looked_at:
        return f"all {looked_at}"
    if len(rows) == 1:
        return f"only {rows[0]} {of}" + (" (the last)" if rows[0] == length - 1 else "")
    is_range = looked_at == length and rows == tuple(range(rows[0], rows[-1] + 1))
    for tile in _TILES:
        if is_range and rows[-1] == length - 1 and rows[0] == length // tile * tile and length % tile:
            return f"{rows[0]} to {rows[-1]} {of}, the tail after the last full tile of {tile}"
        residues = {row % tile for row in rows}
        if len(residues) == 1 and len(rows) >= 2 and not is_range:
            return f"{len(rows)} {of}, every one at {residues.pop()} modulo {tile}"
    if is_range:
        return f"{rows[0]} to {rows[-1]} {of}"
    return f"{len(rows)} {of}, first {rows[0]}, last {rows[-1]}"


# -- what it suggests ----------------------------------------------------------------------------------------------------


def _describe_suggestion(suggestion: Suggestion) -> str:
    template = _SUGGESTIONS[suggestion.kind]
    return template(suggestion.facts) if callable(template) else template.format(**suggestion.facts)


def _not_finite(tensor: str, nans: int, infinities: int, location: Location) -> str:
    rows = _describe_rows(location.rows, location.length)
    return f"{tensor} holds {nans:,} NaN and {infinities:,} infinite elements (rows: {rows})"


def _profiles(profiles: Mapping[str, float], declared: str) -> str:
    found = ", ".join(f"{name!r} (z {z:.1f} there)" for name, z in profiles.items())
    first = next(iter(profiles))
    return f"it fits the precision profile {found}, not {declared!r}; if it rounds there, say precision={first!r}"
