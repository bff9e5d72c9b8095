"""natten.backends of NATTEN 0.21 without libnatten: its reasons, word by word."""

import math

import torch


def _without_libnatten(name):
    def can_run(query, key, value, is_causal=False, is_varlen=False, raise_error=False):
        if raise_error:
            raise RuntimeError(f"Can't run {name}; NATTEN was not built with libnatten.")
        return False

    return can_run


for _kind in ("fna", "fmha"):
    for _name, _words in (("cutlass_blackwell", "Blackwell"), ("cutlass_hopper", "Hopper"), ("cutlass", "CUTLASS")):
        globals()[f"can_run_{_name}_{_kind}"] = _without_libnatten(f"{_words} {_kind.upper()}")


def can_run_flex_attention(query, key, value, torch_compile, is_causal=False, is_varlen=False, raise_error=False):
    assert isinstance(query, torch.Tensor)
    dim, value_dim = query.shape[-1], value.shape[-1]
    if is_causal:
        reason = "Flex FMHA doesn't support causal mask yet."
    elif dim != value_dim:
        reason = f"Flex FMHA/FNA does not support different head dims for QK and V, got {dim=}, {value_dim=}."
    elif not 8 <= dim <= 512 or not math.log2(dim).is_integer():
        reason = f"we only allow 8 <= head_dim <= 512 and only powers of two, got {dim}."
    else:
        return True
    if raise_error:
        raise RuntimeError(reason)
    return False
