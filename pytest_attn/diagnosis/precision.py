"""Whether another softmax scale, or another precision profile, explains what was returned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch

from pytest_attn.backends.precision import RARE, SUGGESTED, Precision
from pytest_attn.correctness.comparison import Hint
from pytest_attn.correctness.judge import compare_all
from pytest_attn.correctness.reference import compute_reference, score_elements
from pytest_attn.diagnosis.case import Case
from pytest_attn.diagnosis.faults import PRECISION
from pytest_attn.diagnosis.hypothesis import AttentionFault, explains, of_workload
from pytest_attn.diagnosis.out import RowsOfOut, on_rows, spread_rows
from pytest_attn.workloads.heads import is_interleaved, key_heads

#: scores of a workload above which its exact attention takes long
_AGAIN_ELEMENTS = 1 << 26
_SCALE_STEPS = 6
#: what is left out where time is over
_PROFILES = "precision profiles"


def scale_or_profile(tried: RowsOfOut, case: Case) -> list[Hint]:
    """Name the scale that explains out, or the precision profiles: what fits the rows better."""
    w, declared = case.workload, tried.reference.precision
    as_it_is = on_rows(AttentionFault("", "", of_workload(w)), case.limits[0])
    profiles = case.time.each(_PROFILES, SUGGESTED.items())
    fits = {name: explains(as_it_is, dataclasses.replace(tried, precision=profile)) for name, profile in profiles}
    scale = None if case.time.is_over("another scale") else _fitted_scale(tried, case)
    if scale is not None:
        words = f"with scale {scale:.4g}, not {w.softmax_scale:.4g}"
        other = on_rows(AttentionFault("scale-wrong", words, of_workload(w, scale=scale)), case.limits[0])
        fit = explains(other, tried)
        is_best = fit is not None and all(fit.z < of_profile.z for of_profile in fits.values() if of_profile is not None)
        if fit is not None and is_best and all(explains(other, rows) for rows in spread_rows(case)):
            return [Hint(other.fault, f"{other.words} (z {fit.z:.1f} there)")]
    if fits.get(declared.name) is not None:
        return []
    return fitting_profiles("out", [name for name, of_profile in fits.items() if of_profile is not None], case)


def _fitted_scale(tried: RowsOfOut, case: Case) -> float | None:
    """Return the scale that explains the rows best, by Gauss-Newton in its logarithm; None where it is the workload's own."""
    w, got = case.workload, tried.view.got
    inputs, precision = tried.reference.inputs, tried.reference.precision

    def out(scale: float) -> torch.Tensor:
        return compute_reference(inputs, precision, rows=tried.rows, workload=w.replace(scale=scale)).tensors["out"].value

    scale, step = w.softmax_scale, 0.01
    for _ in range(_SCALE_STEPS):
        at = out(scale)
        slope = (out(scale * math.exp(step)) - at) / step
        steepness = float(slope.square().sum())
        off = (got.double() - at).nan_to_num(0, 0, 0)
        change = float((off * slope).sum()) / steepness if steepness else 0.0
        if not math.isfinite(change):
            return None
        scale *= math.exp(max(-1.0, min(1.0, change)))
        if abs(change) < 1e-5:
            break
    return scale if abs(math.log(scale / w.softmax_scale)) > 1e-3 else None


def fitting_profiles(name: str, profiles: Iterable[str], case: Case) -> list[Hint]:
    """Name those of the profiles under which the whole case would pass, rare ones where no other does."""
    declared = case.returned[0].reference.precision.name
    names = [one for one in profiles if one != declared]
    names = [one for one in names if not (SUGGESTED[one].moves_lse and case.scores_are_exact)]
    for some in ([one for one in names if one not in RARE], [one for one in names if one in RARE]):
        tried = case.time.each(_PROFILES, some)
        found = {profile: z for profile in tried if (z := _z_under(SUGGESTED[profile], name, case)) is not None}
        if found:
            first = next(iter(found))
            fitting = ", ".join(f"{profile!r} (z {z:.1f} there)" for profile, z in found.items())
            words = f"it fits the precision profile {fitting}, not {declared!r}; if it rounds there, say precision={first!r}"
            return [Hint(PRECISION + first, words)]
    return []


def _z_under(profile: Precision, name: str, case: Case) -> float | None:
    """Return the largest |z| of the tensors of this name under another profile, None unless the whole case passes."""
    if _takes_too_long_again(case) or _fails_on_one_head(profile, name, case):
        return None
    largest = 0.0
    for distribution, reference, tensors in case.returned:
        other = compute_reference(
            reference.inputs,
            profile,
            backward="dq" in tensors,
            workload=case.workload,
            parameters=reference.parameters,
            extra=reference.extra,
        )
        for row in compare_all(distribution, tensors, other, case.workload, case.limits):
            if not row.passed:
                return None
            largest = max(largest, row.z_element if row.name == name else 0.0)
    return largest


def _takes_too_long_again(case: Case) -> bool:
    """Whether exact attention for all that was returned takes long; sampled rows of out do not."""
    is_sampled = any(one.reference.is_sampled for one in case.returned)
    has_gradients = any("dq" in one.tensors for one in case.returned)
    return score_elements(case.workload) > _AGAIN_ELEMENTS and (has_gradients or not is_sampled)


def _fails_on_one_head(profile: Precision, name: str, case: Case) -> bool:
    """Whether the worst head alone fails under a profile: as much as costs little to find out, where heads are alike."""
    w, row = case.workload, next((row for row in case.rows if row.name == name and not row.passed), None)
    has_tensors = w.bias or w.alibi or w.sinks or w.score_mod or not w.has_positional_mask
    is_alone = w.batch * w.kv_heads == 1
    if row is None or is_alone or has_tensors or w.is_packed or w.kv_lens or case.returned[0].reference.is_sampled:
        return False
    one = next(one for one in case.returned if one.distribution == row.distribution)
    batch, head = row.worst[0], row.worst[1] if name in ("dk", "dv") else key_heads(w)[row.worst[1]]
    of_keys = (slice(batch, batch + 1), slice(head, head + 1))
    mine = slice(head, None, w.kv_heads) if is_interleaved(w) else slice(head * w.group, (head + 1) * w.group)
    of_queries = (of_keys[0], mine)
    alone, inputs = w.replace(batch=1, heads=w.group, kv_heads=1), one.reference.inputs
    q, dout = inputs.q[of_queries], inputs.dout[of_queries]
    inputs = dataclasses.replace(inputs, workload=alone, q=q, dout=dout, k=inputs.k[of_keys], v=inputs.v[of_keys])
    reference = compute_reference(inputs, profile, backward=name.startswith("d"))
    got = one.tensors[name][of_keys if name in ("dk", "dv") else of_queries]
    return not all(found.passed for found in compare_all(row.distribution, {name: got}, reference, alone, case.limits))
