"""natten.functional of NATTEN 0.21 without libnatten: what each query sees is written as a list, one query at a time."""

import math
from functools import partial
from itertools import product

import torch

from fakes.attention import attention
from fakes.signatures import function


def _seen_along(position, size, kernel, stride, dilation, causal):
    group = [token for token in range(size) if token % dilation == position % dilation]
    at = group.index(position)
    block = range(at // stride * stride, at // stride * stride + stride)
    if causal:  # the leader is the last of its stride group; nobody sees beyond itself
        leader = min(block[-1], len(group) - 1)
        return [token for token in group[max(0, leader - kernel + 1) : leader + 1] if token <= position]
    leader = min(block[stride // 2], len(group) - 1)
    start = min(max(leader - kernel // 2, 0), len(group) - kernel)  # shifted inwards at a border
    return group[start : start + kernel]


def _visible(shape, *parameters):
    seen = torch.zeros(math.prod(shape), math.prod(shape), dtype=torch.bool)
    for row, query in enumerate(product(*map(range, shape))):
        along = [_seen_along(*of_axis) for of_axis in zip(query, shape, *parameters, strict=True)]
        for key in product(*along):
            index = 0
            for token, size in zip(key, shape, strict=True):
                index = index * size + token
            seen[row, index] = True
    return seen


def _neighborhood(dimensions, query, key, value, kernel_size, stride, dilation, is_causal, scale, return_lse):
    assert query.dim() == 3 + dimensions
    if not all(isinstance(x, int) and x > 1 for x in kernel_size):
        raise ValueError(
            f"Invalid value for `kernel_size`; expected an integer or iterable of integers, all >= 2, {kernel_size=}"
        )
    if not all(isinstance(c, bool) for c in is_causal):
        raise ValueError(f"Invalid value for `is_causal`; expected a boolean or tuple of booleans, got {is_causal=}.")
    shape = query.shape[1 : 1 + dimensions]
    seen = _visible(shape, kernel_size, stride, dilation, is_causal)
    flat = (t.flatten(1, dimensions) for t in (query, key, value))
    out, _ = attention(*flat, scale=scale, visible=seen)
    return out.reshape(*query.shape[:-1], value.shape[-1])


na1d, na2d, na3d = (function("natten", f"na{n}d", partial(_neighborhood, n)) for n in (1, 2, 3))
