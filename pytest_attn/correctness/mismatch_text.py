"""Text of a mismatch: the verdict, then the worst element, the largest z, where, the usual figures, what it suggests."""

from pytest_attn.correctness.call import fault_of_change
from pytest_attn.correctness.comparison import Comparison, Location, Members, TensorComparison, describe_rows
from pytest_attn.correctness.contract import ContractError
from pytest_attn.reports.lines import count, figure, labeled, told_apart, z_figure


def describe(comparison: Comparison) -> str:
    """Return the text of a comparison that did not pass, "" for one that did."""
    mismatch = comparison.mismatch
    if mismatch is None and comparison.changes:
        fault = fault_of_change(dict(comparison.changes))
        return f"{fault}\n{labeled('by', f'{comparison.subject} on {comparison.workload}')}"
    if mismatch is None:
        return ""
    row = mismatch.row
    whose = row.name if row.name == comparison.subject else f"{row.name} of {comparison.subject}"
    where = _describe_location(mismatch.location, ", drawn or named by --attn-rows" if mismatch.drawn else "")
    lines = [
        *describe_row(row, whose, f" ({comparison.workload}, inputs {row.distribution})", where),
        *([labeled("factor", _factor(row))] if row.excess > row.z_slope and _is_scaled(row) else []),
        *(labeled(hint.label, hint.words) for hint in mismatch.hints),
    ]
    return "\n".join(lines)


def describe_row(row: TensorComparison, whose: str, on: str, where: str, whole: str = "one head") -> list[str]:
    """Return the lines of a tensor that is wrong, but for why. whole: what its third level is of."""
    at = ", ".join(map(str, row.worst))
    found, exact = told_apart(row.found, row.exact)
    of_finite = "of finite elements: " if row.wrong_positions else ""
    above = f"{row.exceeding:,} of {row.elements:,} elements above {row.limits.element:g}"
    return [
        f"mismatch: {whose}: {_excess(row, whole)}{on}",
        labeled("worst", f"{row.name}[{at}] = {found}, exact {exact}, budget {figure(row.budget, '.3g')}"),
        labeled("largest z", f"{_levels(row, whole)}; {above}"),
        labeled("where", where),
        labeled(
            "figures",
            f"{of_finite}absmax {figure(row.absmax, '.3g')}, mean abs {figure(row.mean_abs, '.3g')},"
            f" mse {figure(row.mse, '.3g')}, relative L2 {figure(row.relative_l2, '.3g')},"
            f" cosine {row.cosine:.6f}, slope {figure(row.alpha, '.4f')}",
        ),
    ]


def describe_contract(error: ContractError) -> str:
    """Return the text of a broken contract: the fault, and whose it is."""
    return f"{error}\n{labeled('by', error.where)}" if error.where else str(error)


def headline(comparison: Comparison) -> str:
    """Say in a few words what is wrong: of the first tensor that is, which the diagnosis is about."""
    row = comparison.reported
    if row.passed:
        return f"changed its input {comparison.changed[0]} in place"
    return f"{row.name} {_excess(row)} (inputs {row.distribution})"


# -- by how much ---------------------------------------------------------------------------------------------------------

#: standard errors of a slope that make it a factor
CLEAR = 20


def _excess(row: TensorComparison, whole: str = "one head") -> str:
    if row.wrong_positions:
        found = count(row.wrong_positions, "element is", "elements are")
        return f"{found} NaN or infinite where the exact result is not, or the reverse"
    levels = (
        ("one element", row.z_element, row.limits.element),
        ("one row", row.z_row, row.limits.row),
        (whole, row.z_head, row.limits.head),
    )
    level, value, limit = next((level for level in levels if not level[1] <= level[2]), levels[0])
    return _factor(row) if value <= limit else f"z {z_figure(value)} in {level}, limit {limit:g}"


def _is_scaled(row: TensorComparison) -> bool:
    """Return whether a head is off by a factor, and by much more than what else is wrong in it."""
    return row.z_slope > row.limits.slope and abs(row.slope - 1) > CLEAR * row.slope_error


def _factor(row: TensorComparison) -> str:
    """Say by how much the head of the worst slope is too large or too small."""
    off = row.slope - 1
    batch, head = row.slope_head
    of_batch = f" of batch entry {batch}" if batch else ""
    return (
        f"head {head}{of_batch} is {abs(off):.2%} too {'large' if off > 0 else 'small'}: slope {row.slope:.4f} ±"
        f" {row.slope_error:.4f}, limit ±{abs(off) / row.z_slope * row.limits.slope:.4f}"
    ).replace("%", " %")


def _levels(row: TensorComparison, whole: str) -> str:
    if row.limits.element == 1:  # lse, max
        return f"element {z_figure(row.z_element)} (limit 1: this budget is all that {row.name} may be off)"
    return (
        f"element {z_figure(row.z_element)} (limit {row.limits.element:g}), row {z_figure(row.z_row)}"
        f" ({row.limits.row:g}), {whole.split()[-1]} {z_figure(row.z_head)} ({row.limits.head:g})"
    )


# -- where ---------------------------------------------------------------------------------------------------------------


def _describe_location(location: Location, drawn: str) -> str:
    parts = [f"rows {describe_rows(location.rows, location.length)}{drawn}", _describe_set("head", location.heads)]
    if location.batches.size > 1:
        parts.append(_describe_set("batch entry", location.batches).replace("entrys", "entries"))
    return "; ".join(parts)


def _describe_set(noun: str, members: Members) -> str:
    found, size = members
    if len(found) == size:
        return f"all {size} {noun}s" if size > 1 else f"the only {noun}"
    shown = ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
    return f"{noun}{'s' if len(found) > 1 else ''} {shown} (of {size})"
