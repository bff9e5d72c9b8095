"""Attention as a model's fallback writes it: two matrix products with a softmax between, in the workload's dtype."""

from __future__ import annotations

import math

import torch

from pytest_attn.backends.backend import Backend
from pytest_attn.backends.capabilities import FEATURES, Capabilities
from pytest_attn.backends.dense import alibi_bias, boolean_mask
from pytest_attn.backends.layouts import ALL_QUANTIZED, on_values
from pytest_attn.backends.sizes import scores_bytes
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.workloads.heads import repeated
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.kv_layout import canonical
from pytest_attn.workloads.workload import Workload


class Eager(Backend):
    """Scores and probabilities in the dtype, softmax in float32; takes every mask and option but packed sequences."""

    name, precision = "eager", "eager"
    variants = ("compile", "max_autotune", "graph")
    needs = "any device"
    capabilities = Capabilities(
        masks=frozenset(("any",)),
        features=frozenset(FEATURES) - {"packed", "packed pages", "cached"},
        dtypes=("bfloat16", "float16", "float32"),
        head_dim=None,
        head_dim_step=1,
        v_head_dim=True,
        quantized=ALL_QUANTIZED,
    )

    def workspace(self, workload: Workload, backward: bool = False) -> int:
        """The scores, four times."""
        return scores_bytes(workload, backward, copies=4)

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Write out mask, bias and ALiBi once."""
        w = inputs.workload
        visible = boolean_mask(inputs)
        alibi = alibi_bias(inputs) if w.alibi else None
        scale = w.softmax_scale

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = _gather(inputs, *canonical(inputs.workload, k, v))
            k, v = repeated(k, w), repeated(v, w)
            scores = (torch.matmul(q, k.transpose(-1, -2)) * scale).float()
            scores = _modify(scores, inputs, alibi)
            if visible is not None:
                scores = scores.masked_fill(~visible, -math.inf)
            return torch.matmul(_probabilities(scores, inputs.sinks).to(v.dtype), v)

        return on_values(call, inputs)


def _gather(inputs: Inputs, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if inputs.page_table is None:
        return k, v
    import dataclasses

    k, v = dataclasses.replace(inputs, k=k, v=v).gathered()
    unseen = _beyond_length(inputs)
    return k, v.masked_fill(unseen, 0)  # a page's unused tail may hold anything, and 0 * NaN is NaN


def _beyond_length(inputs: Inputs) -> torch.Tensor:
    assert inputs.kv_lens is not None
    positions = torch.arange(inputs.workload.kv_len, device=inputs.device)
    return (positions >= inputs.kv_lens[:, None])[:, None, :, None]


def _modify(scores: torch.Tensor, inputs: Inputs, alibi: torch.Tensor | None) -> torch.Tensor:
    from pytest_attn.backends.dense import index_tensors

    w = inputs.workload
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
    return scores


def _probabilities(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax with one more logit per head where there are sinks; a row that sees nothing gets zeros."""
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    fully_masked = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(fully_masked, 0).softmax(-1).masked_fill(fully_masked, 0)
