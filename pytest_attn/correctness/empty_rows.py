"""Query rows that see no key: out is 0 and lse -inf, unless a test says that its kernel leaves them to the caller."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import MaskMod, Sequences
from pytest_attn.workloads.workload import sequence_lengths

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: (query, key) pairs that are looked at together
_PAIRS = 1 << 26
_EXACT = {"out": 0.0, "lse": -math.inf, "dq": 0.0, "weights": 0.0, "max": -math.inf}


class EmptyRows:
    """The rows of some inputs that see no key and belong to the caller: neither what they hold nor their dout counts.

    empty_rows: "zero", where all rows count; "finite", where such a row holds finite numbers; "any".
    """

    def __init__(self, inputs: Inputs, empty_rows: str) -> None:
        self._accepted = empty_rows
        self._rows = None if empty_rows == "zero" or inputs.workload.sinks else rows_without_keys(inputs)
        if self._rows is not None and not bool(self._rows.any()):
            self._rows = None

    @property
    def are_there(self) -> bool:
        """Whether there are such rows."""
        return self._rows is not None

    def blanked(self, tensor: Tensor) -> Tensor:
        """Return out, dq or dout, in native layout, with 0 in these rows: no loss depends on them, so their dout is 0."""
        return tensor if self._rows is None else tensor.masked_fill(self._of(tensor), 0)

    def forget(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put the exact values in these rows of out, lse and dq, in native layout, where the kernel may leave others there.

        It is done in place: results are watched for later changes.
        """
        if self._rows is not None:
            for name in _EXACT.keys() & results.keys():
                results[name] = self._forgotten(name, results[name])
        return results

    def _forgotten(self, name: str, tensor: Tensor) -> Tensor:
        own = tensor.detach()
        accepted = self._of(own)
        if self._accepted == "finite":
            accepted = accepted & (~own.isnan() if name in ("lse", "max") else own.isfinite())
        if 0 in own.stride():  # elements that share memory cannot be written one by one
            return own.masked_fill(accepted, _EXACT[name])
        return own.masked_fill_(accepted, _EXACT[name])

    def _of(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor: (batch, heads, rows, 1), packed (rows, heads, 1), of lse without the last."""
        assert self._rows is not None
        is_lse = tensor.dim() == self._rows.dim()
        if self._rows.dim() == 2:  # packed
            return self._rows if is_lse else self._rows.transpose(0, 1).unsqueeze(-1)
        return self._rows if is_lse else self._rows.unsqueeze(-1)


def rows_without_keys(inputs: Inputs) -> Tensor:
    """Return True where a row sees no key: (batch, heads, q_len), packed (heads, all rows)."""
    import torch

    w, device = inputs.workload, inputs.device
    if not w.is_packed:
        return _rows_without_keys(inputs.mask_mod(), (w.batch, w.heads, w.q_len, w.kv_len), device)
    parts = []
    for batch, (q_len, kv_len) in enumerate(sequence_lengths(w)):
        mask_mod = w.plain_mask.bind(Sequences(1, w.heads, q_len, kv_len, device)) if w.plain_mask else None
        parts.append(_rows_without_keys(mask_mod, (1, w.heads, q_len, kv_len), device, batch)[0])
    return torch.cat(parts, -1)


def _rows_without_keys(
    mask_mod: MaskMod | None, sizes: tuple[int, int, int, int], device: torch.device, first_batch: int = 0
) -> Tensor:
    """Return True where a row of (batch, heads, q_len) sees none of kv_len keys. first_batch: the first entry's."""
    import torch

    batch, heads, q_len, kv_len = sizes
    empty = torch.full(sizes[:3], kv_len == 0, device=device)
    if mask_mod is None or kv_len == 0:
        return empty
    b, h, rows, keys = (torch.arange(size, device=device) for size in sizes)
    step = max(1, _PAIRS // (batch * heads * kv_len))
    for start in range(0, q_len, step):
        some = rows[None, None, start : start + step, None]
        seen = mask_mod(b[:, None, None, None] + first_batch, h[None, :, None, None], some, keys[None, None, None])
        empty[:, :, start : start + step] = ~seen.any(-1)
    return empty
