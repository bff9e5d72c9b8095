"""The attention functions of transformers 5.17.0, as written there: modeling_utils, flash attention's and Llama's."""

import inspect
from collections import UserDict

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fakes.signatures import row


def repeat_kv(states, n_rep):
    return states.repeat_interleave(n_rep, 1)


@row("transformers", "sdpa")
def sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **others):
    sdpa_kwargs = {}
    if hasattr(module, "num_key_value_groups") and module.num_key_value_groups > 1:
        if attention_mask is not None:
            key, value = (repeat_kv(t, module.num_key_value_groups) for t in (key, value))
        else:
            sdpa_kwargs = {"enable_gqa": True}
    rows, keys = query.shape[2], key.shape[2]
    is_causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    is_causal = rows > 1 and attention_mask is None and is_causal
    if is_causal and keys > rows:
        key, value = key[:, :, :rows, :], value[:, :, :rows, :]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, is_causal=is_causal, **sdpa_kwargs
    )
    return out.transpose(1, 2).contiguous(), None


@row("transformers", "eager")
def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout, **others):
    key, value = (repeat_kv(t, module.num_key_value_groups) for t in (key, value))
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = torch.nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = torch.nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


@row("transformers", "flex_attention")
def flex_attention_forward(query, key, value, attention_mask, scaling, softcap, s_aux, position_bias, kwargs=None, **others):
    if (kwargs or {}).get("dropout", 0.0) > 0:
        raise ValueError("`flex_attention` does not support `dropout`.")
    block_mask = attention_mask if isinstance(attention_mask, BlockMask) else None
    score_mask = None if block_mask is not None else attention_mask
    assert score_mask is None
    if query.device.type == "cpu" and s_aux is not None:
        raise ValueError("Attention sinks cannot be run on CPU with flex attention.")

    def score_mod(score, batch_idx, head_idx, q_idx, kv_idx):
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if position_bias is not None:
            score = score + position_bias[batch_idx, head_idx, q_idx, kv_idx]
        return score

    enable_gqa = True
    if query.shape[1] & (query.shape[1] - 1):
        key, value = (repeat_kv(t, query.shape[1] // key.shape[1]) for t in (key, value))
        enable_gqa = False
    # transformers compiles it, and the compiled kernel has scores in float32, as no release before torch 2.10 has without
    q, k, v = (t.float() for t in (query, key, value))
    out = flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=enable_gqa, scale=scaling)
    out = out.to(query.dtype)
    return out.transpose(1, 2).contiguous(), None


@row("transformers", "flash_attention_2")
def flash_attention_forward(module, query, key, value, attention_mask, scaling, is_causal, kwargs=None, **options):
    rows = query.shape[2]
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    head_dim, v_head_dim = query.shape[-1], value.shape[-1]
    if v_head_dim != head_dim:
        value = torch.nn.functional.pad(value, [0, head_dim - v_head_dim])
    is_causal = is_causal if is_causal is not None else module.is_causal
    options |= {"softmax_scale": scaling, "attn_implementation": module.config._attn_implementation, **(kwargs or {})}
    out = _flash_attention_forward(query, key, value, attention_mask, query_length=rows, is_causal=is_causal, **options)
    return out[..., :v_head_dim], None


@row("transformers", "_flash_attention_forward")
def _flash_attention_forward(
    query, key, value, attention_mask, query_length, is_causal, dropout, softmax_scale, sliding_window, softcap,
    cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, attn_implementation, s_aux,
):  # fmt: skip
    assert attn_implementation == "flash_attention_2"
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    known = inspect.signature(flash_attn_varlen_func).parameters
    options = {"causal": is_causal, "softmax_scale": softmax_scale, "dropout_p": dropout}
    if sliding_window is not None and key.size(1) > sliding_window:
        options["window_size"] = (sliding_window - 1, sliding_window - 1)
    if softcap is not None:
        options["softcap"] = softcap
    if "s_aux" in known and s_aux is not None:
        options["s_aux"] = s_aux
    batch, _, heads, dim = query.shape
    if attention_mask is not None:
        assert attention_mask.shape == key.shape[:2]
        lengths = attention_mask.sum(-1, dtype=torch.int32)
        cu_k = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        at_key = attention_mask.flatten().nonzero().flatten()
        key, value = (t.reshape(-1, *t.shape[2:])[at_key] for t in (key, value))
        if query_length == attention_mask.shape[1]:
            at_query, cu_q, longest = at_key, cu_k, int(lengths.max())
        else:
            assert query_length == 1  # else queries are taken to be padded on the left
            at_query, longest = torch.arange(batch), 1
            cu_q = torch.arange(batch + 1, dtype=torch.int32)
        packed = query.reshape(-1, heads, dim)[at_query]
        out = flash_attn_varlen_func(
            packed, key, value, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest,
            max_seqlen_k=int(lengths.max()), **options,
        )  # fmt: skip
        padded = out.new_zeros(batch * query_length, heads, out.shape[-1])
        padded[at_query] = out
        return padded.view(batch, query_length, heads, -1)
    if all(given is not None for given in (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)):
        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (query, key, value))
        out = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu_seq_lens_q, cu_seqlens_k=cu_seq_lens_k, max_seqlen_q=max_length_q,
            max_seqlen_k=max_length_k, **options,
        )  # fmt: skip
        return out.view(batch, -1, *out.shape[1:])
    return flash_attn_func(query, key, value, **options)


def _not_here(*args, **kwargs):
    raise ValueError("was called without a paged attention cache")


class AttentionInterface(UserDict):
    """What a model fetches its attention function from."""

    def __init__(self):
        self.data = self._global_mapping

    def get_interface(self, attn_implementation, default):
        return self.get(attn_implementation, default)


AttentionInterface._global_mapping = {
    "flash_attention_2": flash_attention_forward,
    "flex_attention": flex_attention_forward,
    "sdpa": sdpa_attention_forward,
    "paged|sdpa": _not_here,
}
ALL_ATTENTION_FUNCTIONS = AttentionInterface()
FLASH_ATTENTION_COMPATIBILITY_MATRIX = {2: {"general_availability_check": lambda: True}}
