"""Consequences of attention's formula for other values."""

from dataclasses import replace

import torch
from torch import Tensor

from pytest_attn.invariants.invariant import SHORT, UNQUANTIZED, Need, Probe, Results, at_first, invariant, on, prefixed
from pytest_attn.workloads.dtypes import times
from pytest_attn.workloads.inputs import Inputs, draw_inputs
from pytest_attn.workloads.workload import Workload, is_interleaved


@invariant(
    "algebra",
    "v times -2 gives out times -2; heads, batch entries and unmasked keys in another order change nothing else",
    calls=2,
    needs=(UNQUANTIZED,),
)
def algebra(probe: Probe) -> str:
    """Out is linear in v, and neither the order of heads nor, without a mask, that of keys matters."""
    return _is_linear(probe) or _is_symmetric(probe) or (_is_merged(probe) if probe.thorough else "")


def _is_linear(probe: Probe) -> str:
    """Hold v times -2 and dout times -1/2, which rounding does not see, against the base."""
    inputs = probe.inputs
    if inputs.workload.v_in_k:
        return ""  # v cannot be chosen apart from k
    if inputs.descales is not None:  # whose elements may be the largest of their dtype
        undone = {name: t if name == "lse" else -t for name, t in probe.run(replace(inputs, v=times(inputs.v, -1))).items()}
        return prefixed("v times -1, undone in the results", probe.change(undone))
    found = probe.run(replace(inputs, v=inputs.v * -2, dout=inputs.dout * -0.5))
    factors = {"out": -0.5, "dv": -2.0}
    undone = {name: t * factors.get(name, 1.0) for name, t in found.items()}
    return prefixed("v times -2 and dout times -1/2, undone in the results", probe.change(undone))


def _is_symmetric(probe: Probe) -> str:
    """Roll heads, batch entries and keys as far as the workload does not tell them apart, and roll the results back."""
    w, inputs = probe.workload, probe.inputs
    if w.is_packed or w.kv_pages is not None:
        return ""
    heads, batches, keys = _heads_are_alike(w), _entries_are_alike(w), _keys_are_alike(w)
    if not (heads or batches or keys):
        return ""
    steps = {"heads": int(heads), "batch": int(batches), "keys": w.kv_len // 3 if keys else 0}

    def rolled(tensor: Tensor, of_keys: bool, sign: int) -> Tensor:
        by_heads = steps["heads"] * (1 if of_keys or is_interleaved(w) else w.group)
        tensor = tensor.roll((sign * steps["batch"], sign * by_heads), (0, 1))
        return tensor.roll(sign * steps["keys"], 2) if of_keys else tensor

    changes = {name: rolled(getattr(inputs, name), name in "kv", 1) for name in ("q", "k", "v", "dout")}
    found = probe.run(replace(inputs, **changes))  # type: ignore[arg-type]
    undone = {name: rolled(t, name in ("dk", "dv"), -1) for name, t in found.items()}
    what = ", ".join(name for name, step in steps.items() if step)
    return prefixed(f"{what} rolled, and the results rolled back", probe.change(undone))


def _is_merged(probe: Probe) -> str:
    """Ask about the two halves of the keys, and put the results together by their lse, as split kernels do."""
    w, inputs = probe.workload, probe.inputs
    is_plain = w.mask is None and _keys_are_alike(w) and not w.sinks and w.bias is None and w.kv_pages is None
    if not probe.spec.declared.has_lse or not is_plain or w.is_packed or w.kv_len < 2 or not probe.is_short:
        return ""
    halves = []
    for keys in (slice(0, w.kv_len // 2), slice(w.kv_len // 2, None)):
        k, v = inputs.k[:, :, keys].contiguous(), inputs.v[:, :, keys].contiguous()
        half = replace(inputs, workload=w.replace(kv_len=k.shape[2], name=None), k=k, v=v)
        other = probe.on(half)
        if other is None:
            return ""
        halves.append(other.begin(other.handed()).outputs)
    lse = torch.logaddexp(halves[0]["lse"], halves[1]["lse"])
    out = sum((half["lse"] - lse).exp()[..., None] * half["out"].float() for half in halves)
    assert isinstance(out, torch.Tensor)
    misfit = probe.misfit({"out": out.to(inputs.dout.dtype), "lse": lse})
    return prefixed("two halves of the keys, put together by their lse", misfit)


def _heads_are_alike(w: Workload) -> bool:
    told_apart = w.alibi or w.sinks or w.descales in ("head", "token") or w.score_mod is not None or "h" in (w.bias or "")
    return not told_apart and w.has_positional_mask


def _entries_are_alike(w: Workload) -> bool:
    told_apart = w.kv_lens is not None or w.score_mod is not None or "b" in (w.bias or "")
    told_apart = told_apart or w.alibi == "batch" or w.descales in ("head", "token")
    return w.batch > 1 and not told_apart and w.has_positional_mask


def _keys_are_alike(w: Workload) -> bool:
    told_apart = w.kv_lens is not None or w.descales == "token" or w.alibi or w.score_mod is not None or "k" in (w.bias or "")
    return w.mask is None and not told_apart


#: Largest q . k asked for, before it is scaled: kernels may hold it in the tensors' dtype, whose largest is 65,504 in float16.
_LARGEST = {"bfloat16": 4e6, "float16": 3e4, "float32": 4e6}
_SPREAD = 2e4
_ROUNDING = 1.02  # an average in 16 bits may exceed the largest value by so much


@invariant(
    "magnitude",
    "scores of about 10,000, and rows whose scores are all far from 0, give finite and right results",
    calls=2,
    needs=(
        UNQUANTIZED,
        Need(lambda probe: not probe.workload.is_quantized, "quantized tensors hold no such numbers"),
        Need(lambda probe: not probe.workload.v_in_k, "v is a part of k, so large keys would be large values"),
        SHORT,
    ),
)
def magnitude(probe: Probe) -> str:
    """The softmax is that of differences: neither large scores nor a large common shift make it overflow."""
    drawn = draw_inputs(probe.workload, "randn", probe.spec.seed, probe.device)
    for words, inputs in (("large scores", _large(drawn)), ("all scores of a row far from 0", _shifted(drawn))):
        with on(words):
            found = probe.run(inputs)
        # where scores of 10,000 are off by more than the softmax bears, out may be any average of values
        rounds_scores = probe.spec.profile.rounds_scores or probe.spec.profile.rounds_scaled_query
        misfit = _no_average(found, inputs) if rounds_scores else probe.misfit(found, inputs)
        if misfit:
            return f"{words}: {misfit}"
    return ""


def _no_average(found: Results, inputs: Inputs) -> str:
    """Say where out lies outside the values, or a gradient is not finite; "" where all are."""
    largest = inputs.gathered()[1].abs().max() * _ROUNDING
    for name, tensor in found.items():
        wrong = tensor.isnan() if name == "lse" else ~tensor.isfinite()
        if name == "out":
            wrong = wrong | (tensor.abs() > largest)
        if bool(wrong.any()):
            return at_first(name, tensor, wrong)
    return ""


def _large(drawn: Inputs) -> Inputs:
    """Scale q and k of N(0, 1) so that scores are about 10,000."""
    w = drawn.workload
    wanted = min(_SPREAD / w.softmax_scale, _LARGEST[w.dtype] / 4)
    factor = (wanted / w.head_dim**0.5) ** 0.5
    return replace(drawn, q=drawn.q * factor, k=drawn.k * factor)


def _shifted(drawn: Inputs) -> Inputs:
    """Give all keys one large channel, and queries one that moves all scores of a row down, in every third head up."""
    w = drawn.workload
    shift = min(_LARGEST[w.dtype] / 4, 2e5 / w.softmax_scale)
    k, q = drawn.k.clone(), drawn.q.clone()
    k[..., 0] = 64
    sign = torch.where(torch.arange(w.heads, device=drawn.device) % 3 == 2, 1.0, -1.0)
    per_head = sign * shift / 64
    q[..., 0] = (per_head if w.is_packed else per_head[:, None]).expand(q.shape[:-1]).to(q.dtype)
    return replace(drawn, q=q, k=k)
