"""The signatures of attention libraries, and what makes a function of one: it refuses what the library's own would.

A library of a family is a row here: the names of its functions, with their parameters as the library has them.
"""

import inspect

_LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_DESCALES = "q_descale=None, k_descale=None, v_descale=None"
_ROTARY = "rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None"

_OPTIONS_2 = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,"
    " deterministic=False, return_attn_probs=False"
)
_OLD_OPTIONS_3 = (
    f"softmax_scale=None, causal=False, qv=None, {_DESCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0,"
    " num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0"
)
_OPTIONS_3 = f"{_OLD_OPTIONS_3}, return_attn_probs=False"
_CACHE_3 = (
    f"q, k_cache, v_cache, k=None, v=None, qv=None, {_ROTARY}, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,"
    f" max_seqlen_q=None, rotary_seqlens=None, {_DESCALES}, softmax_scale=None, causal=False, window_size=(-1, -1),"
    " attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None,"
    " sm_margin=0, return_softmax_lse=False"
)
_OPTIONS_4 = (
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,"
    " pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None"
)
_OPTIONS_HUB = (
    "softmax_scale=None, causal=False, window_size=(None, None), softcap=0.0, deterministic=False, return_attn_probs=False"
)
_KERNEL_2 = "softmax_scale, causal, window_size_left{open}, window_size_right{open}, softcap{off}, alibi_slopes{none}"
_SAGE = "q, k, v, tensor_layout='HND', is_causal=False"
_SDPA_BSHD = "query, key, value, attn_mask=None, dropout_p=0.0"
_MODULE = "module, query, key, value, attention_mask"
_BAND = (
    "bias=None, use_padding_mask=False, seq_len_q=None, seq_len_kv=None, diagonal_alignment=None,"
    " diagonal_band_left_bound=None, diagonal_band_right_bound=None"
)
_PLAN = "custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False"

SIGNATURES = {
    "flash2": {
        "flash_attn_func": f"q, k, v, {_OPTIONS_2}",
        "flash_attn_varlen_func": f"q, k, v, {_LENGTHS}, {_OPTIONS_2}, block_table=None",
        "flash_attn_qkvpacked_func": f"qkv, {_OPTIONS_2}",
        "flash_attn_kvpacked_func": f"q, kv, {_OPTIONS_2}",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_OPTIONS_2}",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {_LENGTHS}, {_OPTIONS_2}",
        "flash_attn_with_kvcache": (
            f"q, k_cache, v_cache, k=None, v=None, {_ROTARY}, block_table=None, softmax_scale=None, causal=False,"
            " window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,"
            " return_softmax_lse=False"
        ),
    },
    "flash3": {
        "flash_attn_func": f"q, k, v, {_OPTIONS_3}",
        "flash_attn_varlen_func": f"q, k, v, {_LENGTHS}, seqused_q=None, seqused_k=None, {_OPTIONS_3}",
        "flash_attn_with_kvcache": _CACHE_3,
    },
    "flash3_old": {
        "flash_attn_func": f"q, k, v, {_OLD_OPTIONS_3}",
        "flash_attn_varlen_func": f"q, k, v, {_LENGTHS}, seqused_q=None, seqused_k=None, {_OLD_OPTIONS_3}",
        "flash_attn_with_kvcache": _CACHE_3,
    },
    "flash4": {
        "flash_attn_func": (
            f"q, k, v, qv=None, gather_kv_indices=None, {_OPTIONS_4}, aux_tensors=None, aux_scalars=None,"
            " block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False, gather_bwd_recompute_p=False,"
            " gather_bwd_token_chunk=None"
        ),
        "flash_attn_varlen_func": (
            "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,"
            " min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,"
            f" {_OPTIONS_4}, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False,"
            " scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,"
            " gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
        ),
    },
    # a kernel of the Hub: None for an open side, no dropout, and (out, lse)
    "hub": {
        "flash_attn_func": f"q, k, v, {_OPTIONS_HUB}",
        "flash_attn_varlen_func": f"q, k, v, {_LENGTHS}, {_OPTIONS_HUB}, block_table=None",
    },
    # what rings call of flash-attn 2
    "flash2_kernels": {
        "_flash_attn_forward": f"q, k, v, dropout_p, {_KERNEL_2.format(open='', off='', none='')}, return_softmax",
        "_flash_attn_backward": (
            f"dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, {_KERNEL_2.format(open='', off='', none='')},"
            " deterministic, rng_state=None"
        ),
        "_flash_attn_varlen_forward": (
            f"q, k, v, {_LENGTHS}, dropout_p, {_KERNEL_2.format(open='=-1', off='=0.0', none='=None')},"
            " return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False"
        ),
        "_flash_attn_varlen_backward": (
            f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {_LENGTHS}, dropout_p,"
            f" {_KERNEL_2.format(open='', off='', none='')}, deterministic, rng_state=None, zero_tensors=False"
        ),
        "flash_attn_func": f"q, k, v, {_OPTIONS_2}",
    },
    "sage2": {
        "sageattn": f"{_SAGE}, sm_scale=None, return_lse=False, **kwargs",
        "sageattn_qk_int8_pv_fp16_cuda": (
            f"{_SAGE}, qk_quant_gran='per_thread', sm_scale=None, pv_accum_dtype='fp32', smooth_k=True, smooth_v=False,"
            " return_lse=False, **kwargs"
        ),
        "sageattn_qk_int8_pv_fp8_cuda": (
            f"{_SAGE}, qk_quant_gran='per_thread', sm_scale=None, pv_accum_dtype='fp32+fp16', smooth_k=True,"
            " smooth_v=False, return_lse=False, **kwargs"
        ),
        "sageattn_qk_int8_pv_fp8_cuda_sm90": (
            f"{_SAGE}, qk_quant_gran='per_thread', sm_scale=None, pv_accum_dtype='fp32+fp32', smooth_k=True,"
            " return_lse=False, **kwargs"
        ),
    },
    "te": {
        "__init__": (
            "self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format='sbhd',"
            " attn_mask_type='causal', window_size=None, bottom_right_diagonal=None, softcap=0.0, attention_type='self',"
            " softmax_scale=None, softmax_type='vanilla'"
        ),
        "forward": (
            "self, query_layer=None, key_layer=None, value_layer=None, attention_mask=None, qkv_format=None,"
            " cu_seqlens_q=None, cu_seqlens_kv=None, max_seqlen_q=None, max_seqlen_kv=None, attn_mask_type=None,"
            " window_size=None, core_attention_bias_type='no_bias', core_attention_bias=None, alibi_slopes=None"
        ),
    },
    "natten": dict.fromkeys(
        ("na1d", "na2d", "na3d"),
        "query, key, value, kernel_size, stride=1, dilation=1, is_causal=False, scale=None, return_lse=False",
    ),
    "diffusers": {
        "dispatch_attention_fn": (
            f"{_SDPA_BSHD}, is_causal=False, scale=None, enable_gqa=False, attention_kwargs=None, *, backend=None,"
            " parallel_config=None"
        ),
        "flash": f"{_SDPA_BSHD}, is_causal=False, scale=None, window_size=(-1, -1)",
        "flash_varlen": f"{_SDPA_BSHD}, scale=None, is_causal=False, window_size=(-1, -1)",
        "flex": "query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False",
        **dict.fromkeys(
            ("native", "_native_math"),
            f"{_SDPA_BSHD}, is_causal=False, scale=None, enable_gqa=False, _parallel_config=None",
        ),
        "sage": "query, key, value, attn_mask=None, is_causal=False, scale=None",
    },
    "transformers": {
        "sdpa": f"{_MODULE}, dropout=0.0, scaling=None, is_causal=None, position_bias=None, **kwargs",
        "eager": f"{_MODULE}, scaling, dropout=0.0, **kwargs",
        "flex_attention": f"{_MODULE}, scaling=None, softcap=None, s_aux=None, position_bias=None, **kwargs",
        "flash_attention_2": (
            f"{_MODULE}, dropout=0.0, scaling=None, sliding_window=None, softcap=None, is_causal=None, s_aux=None, **kwargs"
        ),
        "_flash_attention_forward": (
            "query, key, value, attention_mask, query_length, is_causal, dropout=0.0, softmax_scale=None,"
            " sliding_window=None, softcap=None, cu_seq_lens_q=None, cu_seq_lens_k=None, max_length_q=None,"
            " max_length_k=None, attn_implementation=None, s_aux=None"
        ),
    },
    "xformers": {
        "memory_efficient_attention": ("query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None"),
    },
    "cudnn": {
        "__init__": "self, *, io_data_type, intermediate_data_type, compute_data_type, handle",
        "sdpa": f"self, q, k, v, attn_scale=1.0, generate_stats=None, {_BAND}",
        "sdpa_backward": f"self, q, k, v, o, dO, stats, attn_scale=1.0, {_BAND}",
    },
    "sage1": {
        "sageattn": f"{_SAGE}, sm_scale=None, smooth_k=True, **kwargs",
    },
    "flashinfer": {
        "single_prefill_with_kv_cache": (
            "q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, packed_custom_mask=None,"
            " causal=False, kv_layout='NHD', pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None,"
            " window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None, backend='auto', return_lse=False"
        ),
        "ragged plan": (
            "self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None,"
            f" {_PLAN}, window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,"
            " q_data_type='float16', kv_data_type=None"
        ),
        "paged plan": (
            "self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,"
            f" head_dim_qk, page_size, head_dim_vo=None, {_PLAN}, sm_scale=None, window_left=-1,"
            " logits_soft_cap=None, rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None"
        ),
    },
}


def function(library, name, compute):
    """Return a function of a library, by its row, that hands all its arguments by name to `compute`."""
    return of_signature(name, inspect.signature(eval(f"lambda {SIGNATURES[library][name]}: None")), compute)


def row(library, name):
    """Return a decorator: a function of a library that gets all arguments of its row by name, whatever was left out."""
    return lambda compute: function(library, name, compute)


def of_signature(name, signature, compute):
    """Return a function that takes what a signature says, and nothing else."""

    def called(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return compute(**bound.arguments)

    called.__name__ = called.__qualname__ = name
    called.__signature__, called.compute = signature, compute
    return called


def without(taken, *names):
    """Return a function of the same library in a build that has no such parameters."""
    kept = [one for one in taken.__signature__.parameters.values() if one.name not in names]
    defaults = {name: taken.__signature__.parameters[name].default for name in names}
    signature = taken.__signature__.replace(parameters=kept)
    return of_signature(taken.__name__, signature, lambda **given: taken.compute(**defaults, **given))
