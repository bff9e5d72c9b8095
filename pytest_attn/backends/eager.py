"""Attention in torch's plain operations: as a model's fallback writes it, in its dtype, and on int8 values."""

import dataclasses
import math

import torch

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.capabilities import ANY_SIZE, FEATURES
from pytest_attn.backends.dense import alibi_bias, boolean_mask, index_tensors
from pytest_attn.backends.layouts import ALL_QUANTIZED, is_key, on_values
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.subject import AttentionFn, scores_bytes
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.kv_layout import canonical
from pytest_attn.workloads.workload import Workload, repeated


class Eager(Backend):
    """Scores and probabilities in the dtype, softmax in float32; takes every mask and option but packed sequences."""

    name, precision = "eager", "eager"
    variants = ("compile", "max_autotune", "graph")
    needs = "any device"
    capabilities = dataclasses.replace(
        ANY_SIZE,
        masks=frozenset(("any",)),
        features=frozenset(FEATURES) - {"packed", "packed pages", "cached"},
        quantized=ALL_QUANTIZED,
    )

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        return scores_bytes(workload, backward, copies=4)

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        w = inputs.workload
        visible = boolean_mask(inputs)
        alibi = alibi_bias(inputs) if w.alibi else None
        scale = w.softmax_scale

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = canonical(w, k, v)
            if inputs.page_table is not None:  # a page's unused tail may hold anything, and 0 * NaN is NaN
                there = is_key(inputs)
                assert there is not None
                k, v = dataclasses.replace(inputs, k=k, v=v).gathered()
                v = v.masked_fill(~there[:, None, :, None], 0)
            k, v = repeated(k, w), repeated(v, w)
            scores = (torch.matmul(q, k.transpose(-1, -2)) * scale).float()
            return torch.matmul(probabilities(scores, inputs, visible, alibi).to(v.dtype), v)

        return on_values(call, inputs)


def probabilities(
    scores: torch.Tensor, inputs: Inputs, visible: torch.Tensor | None, alibi: torch.Tensor | None
) -> torch.Tensor:
    """Return the probabilities of scaled scores, (batch, heads, q_len, kv_len). visible: boolean; alibi: what is added.

    Sinks are one more logit per head; a row that sees nothing gets zeros.
    """
    w, sinks = inputs.workload, inputs.sinks
    if inputs.bias is not None and w.bias_before_softcap:
        scores = scores + inputs.bias
    if w.softcap is not None:
        scores = (scores / w.softcap).tanh() * w.softcap
    if inputs.bias is not None and not w.bias_before_softcap:
        scores = scores + inputs.bias
    if alibi is not None:
        scores = scores + alibi
    if w.score_mod is not None:
        scores = w.score_mod(scores, *index_tensors(w, inputs.device))
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    fully_masked = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(fully_masked, 0).softmax(-1).masked_fill(fully_masked, 0)


_LARGEST = 127  # of symmetric int8
_ROW, _COLUMN = -1, -2


class Int8Dynamic(Backend):
    """Dynamically quantized: both products on int8 values whose scales are taken from the tensors of each call.

    q and k in int8 per row, P in steps of its row's largest / 127, v in int8 per column; softmax in float32. The idea is
    post-training dynamic quantization, which torch offers for linear layers only (quantize_dynamic; torchao's int8 dynamic
    activations as well, and its low-precision attention is fp8 on FlashAttention 3). The integer products are float64 ones of
    whole numbers, which are exact on every device, where torch._int_mm takes two-dimensional tensors of some sizes only. So
    this shows what int8 does to the values, not how fast it is.
    """

    name, precision = "int8_dynamic", "int8"
    is_approximate = True
    needs = "float64, so any device but MPS"
    capabilities = dataclasses.replace(
        ANY_SIZE, masks=frozenset(("any",)), features=frozenset(("scale", "grouped heads", "padded"))
    )

    def unavailable_because(self, machine: Machine) -> str | None:
        return "needs float64, which MPS does not have" if machine.kind == "mps" else None

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        """The scores in float64 and float32, with temporaries."""
        return scores_bytes(workload, backward, copies=8)

    def dequantized(self, inputs: Inputs) -> Inputs:
        """Return whole numbers times their scales, which is what the products see."""
        own = _without_padding(inputs.v, inputs)
        q, k, v = (
            steps.float() * scale
            for steps, scale in (quantized(inputs.q, _ROW), quantized(inputs.k, _ROW), quantized(own, _COLUMN))
        )
        return dataclasses.replace(inputs, q=q, k=k, v=v)

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        visible = boolean_mask(inputs)
        scale, group = inputs.workload.softmax_scale, inputs.workload.group

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q_steps, q_scale = quantized(q, _ROW)
            k_steps, k_scale = (t.repeat_interleave(group, 1) for t in quantized(k, _ROW))
            own = _without_padding(v, inputs)
            v_steps, v_scale = (t.repeat_interleave(group, 1) for t in quantized(own, _COLUMN))
            scores = (q_steps @ k_steps.transpose(-1, -2)).float() * (q_scale * scale) * k_scale.transpose(-1, -2)
            if visible is not None:
                scores = scores.masked_fill(~visible, -math.inf)
            top = scores.amax(-1, keepdim=True)
            weights = (scores - top.masked_fill(top == -math.inf, 0)).exp()  # a row's largest is 1, or 0 if it sees nothing
            total = weights.sum(-1, keepdim=True).clamp(min=1)
            weight_steps = (weights * _LARGEST).round().double()
            return ((weight_steps @ v_steps).float() * (v_scale / _LARGEST) / total).to(v.dtype)

        return call


def _without_padding(v: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Zero the values beyond each length, which would have a say in the scales of the columns."""
    there = is_key(inputs)
    return v if there is None else v.masked_fill(~there[:, None, :, None], 0)


def quantized(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (steps, scale) with x near steps * scale: whole numbers from -127 to 127, in float64, and a float32 per `dim`.

    Halves go to the even number.
    """
    x = x.float()
    scale = x.abs().amax(dim, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / _LARGEST
    return (x / scale).round().double(), scale
