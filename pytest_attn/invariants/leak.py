"""Keys that a row sees, read from the kernel itself."""

import dataclasses

import torch
from torch import Tensor

from pytest_attn.correctness.contract import rows_without_keys
from pytest_attn.correctness.reference import heads_first
from pytest_attn.invariants.invariant import FEW_PAIRS, UNQUANTIZED, Probe, Results, at_first, difference, invariant, prefixed
from pytest_attn.workloads.dtypes import DTYPES, exchanged
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import sequence_lengths

#: Relative error of a probability read through the kernel: it is rounded up to four times.
_ROUNDINGS = {name: max(4 * one.spacing, 2.0**-16) for name, one in DTYPES.items()}
#: Probabilities above this are far from underflow, and from the steps of float16 near 0.
_CERTAIN = 2.0**-14
_LSE_TOLERANCE = 1e-5
_LARGE = 100.0  # its products with q and dout do not overflow float16


@invariant(
    "leak",
    "unit vectors as values show the probabilities, which are right; keys that a row may not see do not change it",
    calls=3,
    needs=(UNQUANTIZED, FEW_PAIRS),
)
def leak(probe: Probe) -> str:
    """A row sees the keys that the mask leaves it, all of them and no other."""
    read = "" if probe.workload.v_in_k else _read_probabilities(probe)  # v cannot be chosen apart from k
    return read or _change_hidden_keys(probe)


def _read_probabilities(probe: Probe) -> str:
    """Call with q = k = 0, values of 1 in the last column and unit vectors of single keys in the others."""
    inputs = _reading(probe.inputs)
    results = probe.run(inputs)
    expected = probe.reference(inputs).tensors
    found, exact = heads_first(results["out"], probe.workload), expected["out"].value
    seen = exact > 0
    if bool((wrong := (found != 0) & ~seen).any()):
        return f"q = k = 0, v unit vectors: {at_first('out', found, wrong)}, the probability of a key that the row may not see"
    if bool((wrong := (found == 0) & (exact > _CERTAIN)).any()):
        return f"q = k = 0, v unit vectors: {at_first('out', found, wrong)}, the probability of a key that the row sees"
    if not probe.misfit(results, inputs):  # what its precision profile grants, as rounded sinks
        return ""
    off = (found.double() - exact).abs() > _ROUNDINGS[probe.workload.out_dtype] * exact.clamp(min=_CERTAIN)
    if bool(off.any()):
        what = "the sum of the row's probabilities" if off.nonzero()[0, -1] == exact.shape[-1] - 1 else "a probability"
        return f"q = k = 0: {at_first('out', found, off)}, {what}, exact {float(exact[off][0]):.6g}"
    if "lse" in results:
        lse, right = heads_first(results["lse"], probe.workload).double(), expected["lse"].value
        close = torch.isclose(lse, right, rtol=_LSE_TOLERANCE, atol=_LSE_TOLERANCE)
        if not bool(close.all()):
            exactly = f"the logarithm of the number of keys is {float(right[~close][0]):.6g}"
            return f"q = k = 0: {at_first('lse', lse, ~close)}, {exactly}"
    return ""


def _reading(inputs: Inputs) -> Inputs:
    """Return inputs whose out shows probabilities: of a single key in each column, of others in other heads, and their sum."""
    packed, paged = inputs.workload.packs_keys, inputs.page_table is not None
    v = inputs.v.transpose(0, 1) if packed else inputs.v.permute(2, 0, 1, 3) if paged else inputs.v
    *_, columns = v.shape
    lanes = v.new_zeros(v.shape).flatten(1, 2) if paged else v.new_zeros(v.shape).flatten(0, -3)  # (lanes, keys, columns)
    count, length = lanes.shape[:2]
    single = torch.arange(columns - 1, device=v.device)
    step = max(1, length // max(1, columns - 1))
    lane = torch.arange(count, device=v.device)[:, None]
    lanes[lane, (single * step + lane * (columns - 1 if step == 1 else 1)) % length, single] = 1
    lanes[..., -1] = 1
    read = lanes.view(v.shape)
    v = read.transpose(0, 1) if packed else read.permute(1, 2, 0, 3) if paged else read
    zeros = (torch.zeros_like(t) for t in (inputs.q, inputs.k))
    return dataclasses.replace(inputs, q=next(zeros), k=next(zeros), v=v.contiguous())


def _change_hidden_keys(probe: Probe) -> str:
    """Change the second half of every sequence's keys: rows that see none of them stay as they are.

    out and lse stay so bit for bit, unless the same call gives other bits as well, as after a kernel is compiled anew; dq,
    which may be summed in any order, within rounding.
    """
    inputs = probe.inputs
    if inputs.page_table is not None:
        return ""
    halves = torch.tensor([kv_len // 2 for _, kv_len in sequence_lengths(inputs.workload)], device=inputs.device)
    unseeing = rows_without_keys(inputs, among=lambda b, h, q, kv: kv >= halves[b])
    fully_masked = unseeing[None] if inputs.workload.is_packed else unseeing
    if not bool(fully_masked.any()):
        return ""
    changed = _second_half(inputs)
    late = changed[:, None, None] if inputs.workload.is_packed else changed[:, None, :, None]
    k, v = (exchanged(t, late, (_LARGE * (1 - 2 * (t.float() < 0).float())).to(t.dtype)) for t in (inputs.k, inputs.v))
    found = probe.run(dataclasses.replace(inputs, k=k, v=v))
    text = _outputs_differ(found, probe.base, fully_masked, inputs) and _outputs_differ(
        found, probe.run(inputs), fully_masked, inputs
    )
    text = text or _dq_is_off(probe, found, fully_masked)
    return prefixed("the second half of the keys set to 100 or -100, which this row may not see", text)


def _outputs_differ(found: Results, base: Results, rows: Tensor, inputs: Inputs) -> str:
    """Say where out or lse of these rows differs in any bit, "" where neither does."""
    for name in ("out", "lse"):
        if name in base:
            seen, before = (heads_first(t[name], inputs.workload) for t in (found, base))
            if text := difference(name, seen, before, where=rows if name == "lse" else rows[..., None]):
                return text
    return ""


def _dq_is_off(probe: Probe, found: Results, rows: Tensor) -> str:
    """Say where dq of these rows is another, and further from the exact one than rounding explains; "" where it is not."""
    if "dq" not in found:
        return ""
    seen, before = (heads_first(t["dq"], probe.workload) for t in (found, probe.base))
    unequal = difference("dq", seen, before, where=rows[..., None])
    if not unequal:
        return ""
    dq = probe.base["dq"].clone()
    heads_first(dq, probe.workload).copy_(seen.where(rows[..., None], before))
    misfit = probe.misfit({"dq": dq})
    return f"{unequal}; {misfit}" if misfit else ""


def _second_half(inputs: Inputs) -> Tensor:
    """Return True for keys in the second half of their sequence, padding included: (batch, kv_len), or (tokens,) packed."""
    w = inputs.workload
    if not w.is_packed:
        half = torch.tensor([kv_len // 2 for _, kv_len in sequence_lengths(w)], device=inputs.device)
        return torch.arange(w.kv_len, device=inputs.device) >= half[:, None]
    parts = [torch.arange(kv_len, device=inputs.device) >= kv_len // 2 for _, kv_len in sequence_lengths(w)]
    return torch.cat(parts)
