"""diffusers.models.attention_dispatch of diffusers 0.42.1: enum, dispatcher and some of its functions, as written there."""

import contextlib
from enum import Enum

import torch
import torch.nn.attention.flex_attention as flex_attention

from fakes.signatures import function, row

try:
    from flash_attn import flash_attn_func, flash_attn_varlen_func
except ImportError:
    flash_attn_func = flash_attn_varlen_func = None


class AttentionBackendName(str, Enum):
    FLASH = "flash"
    FLASH_VARLEN = "flash_varlen"
    FLEX = "flex"
    NATIVE = "native"
    _NATIVE_MATH = "_native_math"
    SAGE = "sage"


class _AttentionBackendRegistry:
    _active_backend, _backends, _supported_arg_names = AttentionBackendName.NATIVE, {}, {}

    @classmethod
    def register(cls, backend):
        def decorator(compute):
            cls._backends[backend] = function("diffusers", backend.value, compute)
            cls._supported_arg_names[backend] = set(cls._backends[backend].__signature__.parameters)
            return compute

        return decorator


@contextlib.contextmanager
def attention_backend(backend=AttentionBackendName.NATIVE):
    if backend not in _AttentionBackendRegistry._backends:
        raise ValueError(f"Backend {backend} is not registered.")
    backend = AttentionBackendName(backend)
    _check_attention_backend_requirements(backend)
    old = _AttentionBackendRegistry._active_backend
    _AttentionBackendRegistry._active_backend = backend
    try:
        yield
    finally:
        _AttentionBackendRegistry._active_backend = old


def _check_attention_backend_requirements(backend):
    if backend in [AttentionBackendName.FLASH, AttentionBackendName.FLASH_VARLEN] and flash_attn_func is None:
        raise RuntimeError(
            f"Flash Attention backend '{backend.value}' is not usable because of missing package or the version is too old."
            " Please install `flash-attn>=2.6.3`."
        )


@row("diffusers", "dispatch_attention_fn")
def dispatch_attention_fn(attention_kwargs, backend, parallel_config, **given):
    backend_name = _AttentionBackendRegistry._active_backend if backend is None else AttentionBackendName(backend)
    kwargs = {**given, **(attention_kwargs or {}), "_parallel_config": parallel_config}
    known = _AttentionBackendRegistry._supported_arg_names[backend_name]
    return _AttentionBackendRegistry._backends[backend_name](**{k: v for k, v in kwargs.items() if k in known})


@_AttentionBackendRegistry.register(AttentionBackendName.FLASH)
def _flash_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, window_size):
    if attn_mask is not None:
        raise ValueError("`attn_mask` is not supported for flash-attn 2.")
    return flash_attn_func(
        q=query, k=key, v=value, dropout_p=dropout_p, softmax_scale=scale, causal=is_causal, window_size=window_size
    )


@_AttentionBackendRegistry.register(AttentionBackendName.FLASH_VARLEN)
def _flash_varlen_attention(query, key, value, attn_mask, dropout_p, scale, is_causal, window_size):
    batch, rows, keys = query.shape[0], query.shape[1], key.shape[1]
    lengths = torch.full((batch,), keys, dtype=torch.int32)
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool or attn_mask.shape != (batch, keys):
            raise ValueError(f"Unsupported attention mask shape: {attn_mask.shape}")
        lengths = attn_mask.sum(1, dtype=torch.int32)
    cu_k = torch.zeros(batch + 1, dtype=torch.int32)
    cu_k[1:] = lengths.cumsum(0)
    out = flash_attn_varlen_func(
        q=query.flatten(0, 1),
        k=torch.cat([key[b, : lengths[b]] for b in range(batch)]),
        v=torch.cat([value[b, : lengths[b]] for b in range(batch)]),
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32) * rows,
        cu_seqlens_k=cu_k,
        max_seqlen_q=rows,
        max_seqlen_k=int(lengths.max()),
        dropout_p=dropout_p,
        softmax_scale=scale,
        causal=is_causal,
        window_size=window_size,
    )
    return out.unflatten(0, (batch, -1))


@_AttentionBackendRegistry.register(AttentionBackendName.SAGE)
def _sage_attention(**given):
    raise TypeError("'NoneType' object is not callable")


def _causal_mask_mod(batch_idx, head_idx, q_idx, kv_idx):
    return q_idx >= kv_idx


@_AttentionBackendRegistry.register(AttentionBackendName.FLEX)
def _native_flex_attention(query, key, value, attn_mask, is_causal, scale, enable_gqa):
    score_mod = block_mask = None
    sizes = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    if attn_mask is None:
        block_mask = attn_mask
    elif is_causal:
        block_mask = flex_attention.create_block_mask(_causal_mask_mod, *sizes, query.device)
    else:
        attn_mask = attn_mask.expand(sizes)
        if attn_mask.dtype == torch.bool:

            def mask_mod(batch_idx, head_idx, q_idx, kv_idx):
                return attn_mask[batch_idx, head_idx, q_idx, kv_idx]

            block_mask = flex_attention.create_block_mask(mask_mod, sizes[0], None, *sizes[2:], query.device)
        else:

            def score_mod(score, batch_idx, head_idx, q_idx, kv_idx):
                return score + attn_mask[batch_idx, head_idx, q_idx, kv_idx]

    query, key, value = (x.permute(0, 2, 1, 3) for x in (query, key, value))
    out = flex_attention.flex_attention(
        query=query, key=key, value=value, score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=enable_gqa
    )
    return out.permute(0, 2, 1, 3)


@_AttentionBackendRegistry.register(AttentionBackendName.NATIVE)
def _native_attention(query, key, value, _parallel_config, **given):
    query, key, value = (x.permute(0, 2, 1, 3) for x in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, **given).permute(0, 2, 1, 3)


@_AttentionBackendRegistry.register(AttentionBackendName._NATIVE_MATH)
def _native_math_attention(**given):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return _native_attention(**given)
