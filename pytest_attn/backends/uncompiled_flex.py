"""How flex_attention rounds without torch.compile: torch then writes out the whole matrix of scores."""

from __future__ import annotations

import dataclasses

from pytest_attn.backends.precision import PRECISIONS, Precision
from pytest_attn.backends.versions import release

#: torch that forms the scores in float32; before it they are a matrix product in the dtype, and so are dP.
#: Source: _math_attention_inner in torch/_higher_order_ops/flex_attention.py of 2.6.0, 2.9.1, 2.10.0, 2.11.0 and 2.15.0.
_FLOAT32_SCORES = (2, 10)


def uncompiled_flex_precision(torch_version: str) -> Precision:
    """Return the profile of flex_attention without torch.compile in a release of torch."""
    newest = PRECISIONS["sdpa"]
    if release(torch_version) >= _FLOAT32_SCORES:
        return newest
    return dataclasses.replace(newest, name="flex_uncompiled", rounds_scores=True)
