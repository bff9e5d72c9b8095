"""How a mismatch reads."""

from __future__ import annotations

from pytest_attn.correctness.compare import TensorComparison
from pytest_attn.workloads.workload import Workload


def failure_text(row: TensorComparison, subject: str, workload: Workload, explanation: list[str]) -> str:
    """Write a mismatch: the verdict first, then the worst element, the levels, where, the usual figures, what it suggests."""
    at = ", ".join(map(str, row.worst))
    where, *suggestions = explanation
    of_finite = "of finite elements: " if row.wrong_positions else ""
    lines = [
        f"mismatch: {_tensor_of(row.name, subject)}: {verdict(row)} ({workload.id}, inputs {row.distribution})",
        f"  worst      {row.name}[{at}] = {row.found:.6g}, exact {row.exact:.6g}, budget {row.budget:.3g}",
        f"  levels     element {_short(row.z_element)} (limit {row.limits.element:g}), row {_short(row.z_row)}"
        f" ({row.limits.row:g}), head {_short(row.z_head)} ({row.limits.head:g});"
        f" {row.exceeding:,} of {row.elements:,} elements over",
        f"  where      {where}",
        f"  figures    {of_finite}absmax {row.absmax:.3g}, mean abs {row.mean_abs:.3g}, mse {row.mse:.3g},"
        f" relative L2 {row.relative_l2:.3g}, cosine {row.cosine:.6f}, slope {row.alpha:.4f}",
    ]
    return "\n".join(lines + [f"  suggests   {line}" for line in suggestions])


def verdict(row: TensorComparison) -> str:
    """Say in a few words by how much a tensor is wrong."""
    if row.wrong_positions:
        return f"{row.wrong_positions:,} elements are NaN or infinite and should not be, or should be and are not"
    level, value, limit = _worst_level(row)
    return f"z {_short(value)} over {level}, limit {limit:g}"


def _short(z: float) -> str:
    return f"{z:.2f}" if z < 100 else f"{z:,.0f}" if z < 1e9 else f"{z:.2g}"


def _tensor_of(tensor: str, subject: str) -> str:
    return tensor if tensor == subject else f"{tensor} of {subject}"


def _worst_level(row: TensorComparison) -> tuple[str, float, float]:
    levels = (
        ("an element", row.z_element, row.limits.element),
        ("a row", row.z_row, row.limits.row),
        ("a head", row.z_head, row.limits.head),
    )
    return next((level for level in levels if not level[1] <= level[2]), levels[0])


def with_command(text: str, command: str) -> str:
    """Add the command that repeats the case, where there is one."""
    return f"{text}\n  reproduce  {command}" if command else text
