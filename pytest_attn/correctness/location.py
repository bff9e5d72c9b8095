"""Where the faults of a tensor lie, and in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_attn.correctness.compare import residual_over_budget
from pytest_attn.correctness.comparison import Location, Members, TensorComparison
from pytest_attn.correctness.expected import Expected
from pytest_attn.correctness.reference import as_compared
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

#: sizes of tiles, after the last full one of which a tail begins
_TILES = (128, 64, 32, 16)


def looked_at(name: str, tensor: torch.Tensor, expected: Expected, workload: Workload) -> torch.Tensor:
    """Return those rows of a native result, heads-first, which the reference has."""
    got = as_compared(name, tensor.detach(), workload)
    return got if expected.rows is None else got[:, :, expected.rows.to(got.device)]


def wrong_rows(row: TensorComparison, got: torch.Tensor, expected: Expected) -> torch.Tensor:
    """Return (batch, heads, rows): True where a row of a heads-first tensor holds a fault."""
    value = expected.value
    if row.wrong_positions:
        rounded = value.to(got.dtype)
        wrong = ~((got.isfinite() & rounded.isfinite()) | (got == rounded))
        return wrong.any(-1) if wrong.dim() == 4 else wrong
    if row.name in ("lse", "max"):
        return (got.double() - value).abs() > row.budget
    z = residual_over_budget(got.double() - value, expected.tau)
    bad = (z.abs().amax(-1) > row.limits.element) | (z.square().mean(-1).sqrt() > row.limits.row)
    return bad if bool(bad.any()) else z.square().mean(-1).sqrt() > 1


def location_of(bad: torch.Tensor, sampled: torch.Tensor | None) -> Location:
    """Return where (batch, heads, rows) is True; sampled: the positions of the rows, None where all are there."""
    batch, heads, rows = bad.shape
    positions = bad.any(0).any(0).nonzero().flatten()
    if sampled is not None:
        positions = sampled.to(positions.device)[positions]
    at_heads = bad.any(-1).any(0).nonzero().flatten().tolist()
    at_batches = bad.any(-1).any(-1).nonzero().flatten().tolist()
    return Location(
        rows=Members(tuple(positions.tolist()), rows),
        heads=Members(tuple(at_heads), heads),
        batches=Members(tuple(at_batches), batch),
        length=rows if sampled is None else int(sampled[-1]) + 1,
    )


def describe_rows(members: Members, length: int) -> str:
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
