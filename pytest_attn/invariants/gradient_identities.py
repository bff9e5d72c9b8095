"""Consequences of the softmax for its own gradients."""

import dataclasses
import math
from collections.abc import Mapping
from zlib import crc32

import torch
from torch import Tensor

from pytest_attn.correctness.reference import Expected, heads_first
from pytest_attn.invariants.invariant import (
    BACKWARD,
    FEW_PAIRS,
    OPERATORS,
    UNQUANTIZED,
    Need,
    NotApplicable,
    Probe,
    at_first,
    invariant,
    on,
    prefixed,
)
from pytest_attn.workloads.dtypes import DTYPES
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload, grouped

_SIGMAS = 8.0
_STRAY = 16.0  # times the budget of an element that is exactly 0: twice its limit


@invariant(
    "gradients",
    "a gradient of one row reaches that row and the keys that it sees; sums of gradients balance; all are finite",
    calls=1,
    needs=(BACKWARD, UNQUANTIZED, FEW_PAIRS),
)
def gradients(probe: Probe) -> str:
    """Gradients go where probabilities came from, and balance."""
    for name in _gradients_in(probe.base):
        if bool((bad := ~probe.base[name].isfinite()).any()):
            return at_first(name, probe.base[name], bad)
    return _imbalance(probe) or _stray_gradients(probe)


def _gradients_in(results: Mapping[str, Tensor]) -> list[str]:
    return [name for name in ("dq", "dv", "dk") if name in results]


def _imbalance(probe: Probe) -> str:
    """Scores do not change where q is scaled up and k down: sum dq * q = sum dk * k; nor out where all keys are shifted."""
    if not {"dq", "dk"} <= probe.base.keys():
        return ""
    w, inputs, tensors = probe.workload, probe.inputs, probe.reference(probe.inputs).tensors
    q, k = (heads_first(t, w).double() for t in (inputs.q, inputs.k))
    dq, dk = (heads_first(probe.base[name], w).double() for name in ("dq", "dk"))
    groups = (q.shape[0], w.kv_heads, w.group)
    of_rows = grouped((dq * q).sum((-1, -2)), w).view(groups).sum(-1)
    of_keys = (dk * k).sum((-1, -2))
    variance = grouped(_weighted(tensors["dq"], q), w).view(groups).sum(-1) + _weighted(tensors["dk"], k)
    off = (of_rows - of_keys).abs() > _SIGMAS * variance.sqrt() + _ulp(of_rows)
    if bool(off.any()):
        return (
            f"sum of dq * q and sum of dk * k differ in a head: {at_first('sum dq * q', of_rows, off)},"
            f" sum dk * k = {float(of_keys[off][0]):.6g}, and rounding explains {float(variance[off][0]) ** 0.5:.2g}"
        )
    if not _scores_are_products(w):
        return ""
    total, budget = dk.sum(-2), tensors["dk"].tau.double().square().sum(-2).sqrt()
    stray = total.abs() > _SIGMAS * budget + _ulp(dk.abs().sum(-2))
    if bool(stray.any()):
        return (
            f"dk does not sum up to 0 over the keys, so rows of dS do not: {at_first('sum of dk', total, stray)},"
            f" and rounding explains {float(budget[stray][0]):.2g}"
        )
    return ""


def _scores_are_products(w: Workload) -> bool:
    """Return whether scores are scale * q . k but for a constant."""
    return not w.sinks and w.softcap is None and w.score_mod is None


def _weighted(expected: Expected, by: Tensor) -> Tensor:
    """Return the variance of sum(tensor * by) per head."""
    return (expected.tau.double() * by).square().sum((-1, -2))


def _ulp(value: Tensor) -> Tensor:
    """Loss of float32 sums beside the budget, which counts roundings as independent."""
    return value.abs() * 1e-6 + 1e-30


def _stray_gradients(probe: Probe) -> str:
    """Let a gradient arrive at one row of each head: only this row, and the keys that it sees, have gradients."""
    inputs = _single_rows(probe.inputs)
    found, exact = probe.run(inputs), probe.reference(inputs).tensors
    for name in _gradients_in(found):
        gradient, right = heads_first(found[name], probe.workload), exact[name]
        idle = (right.value == 0).all(-1, keepdim=True)
        stray = idle & ~(gradient.abs() <= _STRAY * right.tau)  # a row that sees one key has the rounding of P (dP - dP)
        if bool(stray.any()):
            return f"dout of a single row in each head: {at_first(name, gradient, stray)}, which that row has no part in"
    return prefixed("dout of a single row in each head", probe.misfit(found, inputs))


def _single_rows(inputs: Inputs) -> Inputs:
    """Leave dout of one row in each head, another one in each."""
    dense = heads_first(inputs.dout, inputs.workload)
    batch, heads, rows, _ = dense.shape
    lane = torch.arange(batch * heads, device=dense.device).view(batch, heads, 1)
    chosen = (rows // 2 + lane * 5) % rows
    keep = torch.arange(rows, device=dense.device) == chosen
    kept = dense.where(keep[..., None], dense.new_zeros(()))
    return dataclasses.replace(inputs, dout=kept[0].transpose(0, 1).contiguous() if inputs.workload.is_packed else kept)


@invariant(
    "alone",
    "the gradient of q, k, v or a parameter is the same if nothing else needs one, as beside frozen layers",
    calls=5,
    needs=(
        BACKWARD,
        Need(lambda probe: not probe.subject.needs_all_gradients, "in other processes each of q, k and v needs a gradient"),
    ),
)
def alone(probe: Probe) -> str:
    """Gradients are the same where the others need none.

    Ask for one after the other.

    A kernel with a backend's many cases, or an operator that opcheck tries, is asked for dq, and for dk or dv by workload.
    """
    parameters, together = probe.spec.parameters, dict(probe.base)
    leaves = probe.spec.leaves
    asked = tuple(name for name in ("q", *parameters, "v", "k") if name in (*leaves, *parameters))
    if not probe.thorough:
        if probe.is_compiled:
            raise NotApplicable("each would be compiled anew")
        if probe.is_backend or isinstance(probe.subject.user_function, OPERATORS):
            at = 1 + crc32(probe.workload.id.encode()) % max(1, len(asked) - 1)
            asked = (*asked[:1], *asked[at : at + 1])
        asked = asked[: alone.calls - bool(parameters)]
    if parameters:
        together |= _gradients_of(probe, (*leaves, *parameters))
    for name in asked:
        expected = {f"d{name}": together[f"d{name}"]}
        words = f"where nothing but {name} needs a gradient"
        with on(words):
            found = _gradients_of(probe, (name,))
        if changed := probe.change(found, expected):
            return f"{words}: {changed}"
    return ""


def _gradients_of(probe: Probe, needing: tuple[str, ...]) -> dict[str, Tensor]:
    """Call while these of q, k, v and the parameters need a gradient, and nothing else does; return their gradients."""
    parameters = probe.spec.parameters
    before = {name: one.requires_grad for name, one in parameters.items()}
    try:
        for name, one in parameters.items():
            one.requires_grad_(name in needing)
        started = probe.begin(probe.handed(), needing)
        return started.some_gradients({name: one for name, one in parameters.items() if name in needing})
    finally:
        for name, one in parameters.items():
            one.requires_grad_(before[name])


@invariant(
    "lse-gradient",
    "gradients flow back through lse: shifting all keys by c changes lse by scale * q . c, but for the sink's share",
    calls=1,
    needs=(
        Need(lambda probe: probe.spec.declared.has_lse, "the kernel returns no lse"),
        Need(
            lambda probe: _scores_are_products(probe.workload.replace(sinks=False)),
            "softcap and score_mod change what a shift of the keys does",
        ),
        BACKWARD,
        Need(lambda probe: "k" in probe.spec.leaves, "the test asks for no gradient of k"),
        UNQUANTIZED,
        FEW_PAIRS,
    ),
)
def lse_gradient(probe: Probe) -> str:
    """An lse that autograd can follow carries its gradient.

    Send 1 back through lse of every row that sees a key, and nothing through out.
    """
    w, inputs = probe.workload, probe.inputs
    tensors = probe.handed()
    pending = probe.begin(tensors)
    lse = pending.handed_out["lse"]
    if not lse.requires_grad:
        raise NotApplicable("lse carries no gradient")
    arriving = probe.empty_rows.blanked(torch.where(lse.detach() > -math.inf, 1.0, 0.0).to(lse.dtype))
    parameters = {name: one for name, one in probe.spec.parameters.items() if name == "sinks" and one.requires_grad}
    found = pending.gradients(("out", "lse"), (torch.zeros_like(tensors.dout), arriving), parameters)
    q, dk = (heads_first(t, w).double() for t in (inputs.q, found["dk"]))
    groups = (q.shape[0], w.kv_heads, w.group)
    arrived = heads_first(arriving, w).double()
    of_sink = torch.zeros_like(arrived)
    if inputs.sinks is not None:
        of_sink = (inputs.sinks.double()[:, None] - heads_first(lse.detach(), w)).exp() * arrived
    share = (arrived - of_sink)[..., None] * q * w.softmax_scale
    expected, size = (grouped(t.sum(-2), w).view(*groups, -1).sum(2) for t in (share, share.abs()))
    unit = max(DTYPES[w.dtype].spacing, 2.0**-20, probe.spec.profile.operand_unit)
    total = dk.sum(-2)
    allowed = 16 * unit * (size + dk.abs().sum(-2))
    checked = [("sum of dk", total, expected, allowed)]
    if parameters:
        dsinks, exact = found["dsinks"], of_sink.sum((0, 2))
        checked.append(("dsinks", dsinks.double(), exact, 16 * max(unit, torch.finfo(dsinks.dtype).eps) * exact))
    for name, got, exact, allowed in checked:
        off = (got - exact).abs() > allowed
        if bool(off.any()):
            return f"a gradient of 1 for lse: {at_first(name, got, off)}, exact {float(exact[off][0]):.6g}"
    return ""
