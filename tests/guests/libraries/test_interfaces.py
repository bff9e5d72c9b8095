"""What each library's adapter says in the library's own words, that another meaning of them is found, and what has no words.

What a library has that no other has: in the file of its name.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from fakes import planted
from fakes.judged import A100, B200, CPU, H200, HOST, RTX, assert_passes, judged
from fakes.masks import checkered

from pytest_attn import BooleanMask, Document, Machine, Neighborhood, Pages, Window, Workload
from pytest_attn.backends.machine import machine_of

W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)
SQUARE = W.replace(kv_len=48)
BOTTOM_RIGHT = W.replace(mask="causal-bottom-right")
RAGGED = W.replace(kv_lens=(80, 51), mask="causal-bottom-right")
DOCUMENTS = SQUARE.replace(mask=Document((30, 11, 7)))
CAUSAL_DOCUMENTS = SQUARE.replace(mask=Document((30, 11, 7), causal=True))
PACKED = Workload(q_lens=(30, 7, 50), heads=2, head_dim=32, mask="causal")
PAGED = W.replace(q_len=3, kv_pages=Pages(16), kv_lens=(80, 33), mask="causal-bottom-right")
FP8 = W.replace(dtype="fp8", descales="head")
PACKED_PAGES = Workload(
    q_lens=(5, 0, 9), kv_lens=(300, 20, 9), kv_pages=Pages(256), heads=2, head_dim=32, mask="causal-bottom-right"
)


def by_batch(batch, heads, q_len, kv_len, device):
    seen = torch.arange(kv_len, device=device) % 3 != torch.arange(batch, device=device)[:, None]
    return seen.view(batch, 1, 1, kv_len)


def by_head(b, h, q_idx, kv_idx):
    return (kv_idx + h) % 3 != 0


def every_third(b, h, q_idx, kv_idx):
    return (kv_idx + q_idx + b) % 3 != 0


def without_visible_keys(batch, heads, q_len, kv_len, device):
    return torch.arange(q_len, device=device)[:, None].expand(q_len, kv_len)[None, None] > 0


def both(names, *workloads):
    return [(name, workload, True) for name in names.split() for workload in workloads]


class Refusal(NamedTuple):
    """What is said against a workload. machine, backward: where it is asked, and whether for gradients."""

    name: str
    workload: Workload
    reasons: str | tuple[str, ...]
    machine: Machine = HOST
    backward: bool = False


def forward(names, *workloads):
    return [(name, workload, False) for name in names.split() for workload in workloads]


# -- cuDNN ---------------------------------------------------------------------------------------------------------------

#: what each takes: backend, workload, and whether gradients are asked for
CLAIMED = both(
    "cudnn",
    W,
    W.replace(mask="causal", scale=0.3),
    BOTTOM_RIGHT.replace(dtype="float16"),
    SQUARE.replace(mask="causal-bottom-right", v_head_dim=64),
    W.replace(mask=Window(9, 3)),
    W.replace(mask=Window(None, 5)),
    SQUARE.replace(mask=Window(7, None)),
    W.replace(kv_lens=(80, 33)),
    RAGGED,
    SQUARE.replace(kv_lens=(48, 31), mask="causal"),
    W.replace(bias="hqk"),
    W.replace(bias="bk", mask="causal"),
)
#: backend, a file of its library, what it says there, what it is to say instead, and the workload that shows it
FAULTS = [
    ("cudnn", "cudnn.py", "scale=options.attn_scale", "scale=1.0", W),
    ("cudnn", "cudnn.py", "(length - rows if", "(0 if", BOTTOM_RIGHT),
    ("cudnn", "cudnn.py", "j > diagonal + right", "j > diagonal + right + 1", W.replace(mask=Window(9, 3))),
    ("cudnn", "cudnn.py", "j <= diagonal - left", "j < diagonal - left", W.replace(mask=Window(9, 3))),
    ("cudnn", "cudnn.py", "(j < length)", "(j < keys)", W.replace(kv_lens=(80, 33))),
    ("cudnn", "cudnn.py", "scale=options.attn_scale, bias=bias", "scale=options.attn_scale", W.replace(bias="hqk")),
    ("cudnn", "cudnn.py", 'dict(zip(("dq", "dk", "dv")', 'dict(zip(("dq", "dv", "dk")', W),
]
#: the parts of a refusal
REFUSED = [
    (
        "cudnn",
        W.replace(kv_len=40, mask="causal-bottom-right"),
        "Bottom right causal mask does not support max_s_q > max_s_kv.",
    ),
    ("cudnn", BOTTOM_RIGHT.replace(bias="hqk"), "Bottom right causal mask is only supported with is_bias=False."),
    (
        "cudnn",
        W.replace(kv_len=40, mask=Window(7, None)),
        "Sliding window attention is only supported with max_s_q <= max_s_kv.",
    ),
]

# -- diffusers -------------------------------------------------------------------------------------------------------------

MASKED = (
    BOTTOM_RIGHT,
    W.replace(mask=Window(9, 3)),
    W.replace(kv_lens=(80, 33), bias="hk"),
    SQUARE.replace(mask=Document((30, 18)), v_head_dim=64),
)
CLAIMED += both(
    "diffusers:native diffusers:_native_math", W, SQUARE.replace(mask="causal"), W.replace(mask="causal", scale=0.3), *MASKED
)
#: what is claimed alike, of which `make test` asks a part
MANY = forward("diffusers:flex", W, *MASKED)
CLAIMED += both("diffusers:flash", BOTTOM_RIGHT.replace(scale=0.3), SQUARE.replace(mask="causal"))
CLAIMED += both("diffusers:flash_varlen", RAGGED, W.replace(kv_lens=(80, 0)))
FAULTS += [
    ("diffusers:flash", "flash2.py", '"bottom-right" if causal', '"top-left" if causal', BOTTOM_RIGHT),
    ("diffusers:flash_varlen", "flash2.py", '"bottom-right" if causal', '"top-left" if causal', BOTTOM_RIGHT),
    ("diffusers:native", "diffusers.py", "value, **given)", "value, **given | {'scale': None})", W.replace(scale=0.3)),
    ("diffusers:flex", "diffusers.py", "scale=scale, enable_gqa", "enable_gqa", W.replace(scale=0.3)),
]
REFUSED += [
    ("diffusers:native", W.replace(softcap=2.0), "has no softcap"),
    ("diffusers:native", W.replace(alibi=True), "would round ALiBi's distances to bfloat16 in attn_mask"),
    ("diffusers:native", Workload(q_lens=(3, 4)), "does not support packed sequences"),
    ("diffusers:flash", W.replace(mask="causal"), "has no causal mask aligned to the first key"),
    ("diffusers:flash", W.replace(kv_lens=(80, 3)), "does not support padded keys"),
    ("diffusers:flash_varlen", W.replace(bias="q"), "has no additive bias"),
    ("diffusers:flex", W, "FlexAttention does not support backward on CPU", HOST, True),
]

# -- flash-attention ---------------------------------------------------------------------------------------------------------

CLAIMED += both("flash2 flash3 flash3/old flash4", W, BOTTOM_RIGHT.replace(scale=0.3), RAGGED, CAUSAL_DOCUMENTS, PACKED)
CLAIMED += both("flash2", SQUARE.replace(mask="causal", alibi=True), W.replace(mask=Window(9, 3), softcap=2.0), DOCUMENTS)
CLAIMED += both("flash2", W.replace(kv_lens=(80, 33)))
CLAIMED += forward("flash2", W.replace(q_len=1, kv_len=600, kv_pages=Pages(256), kv_lens=(600, 77)), PACKED_PAGES)
CLAIMED += forward("flash2_kvcache", W.replace(q_len=3, mask="causal-bottom-right"))
CLAIMED += both("flash3 flash3/old", W.replace(mask=Window(9, None), softcap=2.0), W.replace(head_dim=192, v_head_dim=128))
CLAIMED += forward("flash3 flash3/old", PAGED, W.replace(head_dim=64, v_head_dim=512))
CLAIMED += forward("flash3", FP8, FP8.replace(descales="tensor"), FP8.replace(mask="causal-bottom-right"))
CLAIMED += both("flash4", W.replace(mask=Window(9, 3), softcap=2.0), W.replace(mask=Window(None, 5)))
CLAIMED += both("flash4", W.replace(mask=Window(9, 0), sinks=True), W.replace(head_dim=192, v_head_dim=128, kv_heads=4))
CLAIMED += forward("flash4", PAGED)
FAULTS += [
    ("flash2", "flash2.py", '"bottom-right" if causal', '"top-left" if causal', BOTTOM_RIGHT),
    ("flash3", "flash3.py", '"bottom-right" if causal', '"top-left" if causal', BOTTOM_RIGHT),
    ("flash3", "flash3.py", '"window": window_size', '"window": (-1, -1)', W.replace(mask=Window(9, 3))),
    ("flash3", "flash3.py", '"softcap": softcap', '"softcap": 0.0', W.replace(softcap=0.5)),
    ("flash3", "flash3.py", '"scale": softmax_scale', '"scale": None', W.replace(scale=0.5)),
    *(("flash3", "flash3.py", f"{one}_descale, ", "None, ", FP8) for one in "qk"),
    ("flash3", "flash3.py", "v_descale))", "None))", FP8),
    ("flash4", "flash4.py", '"bottom-right" if causal', '"top-left" if causal', BOTTOM_RIGHT),
    ("flash4", "flash4.py", "-1 if side is None else side", "-1", W.replace(mask=Window(9, 3))),
    ("flash4", "flash4.py", '"softcap": softcap', '"softcap": 0.0', W.replace(softcap=0.5)),
    ("flash4", "flash4.py", '"scale": softmax_scale', '"scale": None', W.replace(scale=0.5)),
    ("flash4", "flash4.py", '"sink": learnable_sink', '"sink": None', W.replace(sinks=True)),
]
WIDER = W.replace(head_dim=192, v_head_dim=128)
IN_DENSE_ONLY = "takes fp8 in dense tensors only, as far as is known: descales of packed and paged ones are not documented"
PAIRS_OF_FLASH3 = "takes a v_head_dim of 97 to 128 with a head_dim of 129 to 192, or any with a head_dim of at most 64"
UP_TO_256 = "takes a head_dim of at most 256"
SHORT_OF_128 = "takes up to 128, 192 with 128, or 256 on sm100, not head_dim 160, v_head_dim 160"
BLOCKS = "has blocks for masks up to head_dim 128 on sm90"
NO_BACKWARD_FOR_48 = "has no backward kernel on sm90 for v_head_dim 48, not a multiple of 32"
REFUSED += [
    ("flash2", W.replace(kv_pages=Pages(16)), "takes pages of a multiple of 256 tokens, not 16"),
    ("flash3", W.replace(head_dim=128, v_head_dim=64), f"{PAIRS_OF_FLASH3}, not head_dim 128, v_head_dim 64"),
    ("flash3", W.replace(head_dim=64, v_head_dim=512), f"{UP_TO_256}, not head_dim 64, v_head_dim 512", H200, True),
    ("flash3", FP8.replace(kv_lens=(80, 51)), IN_DENSE_ONLY),
    ("flash3", FP8.replace(q_len=3, kv_pages=Pages(16)), IN_DENSE_ONLY),
    ("flash4", W.replace(head_dim=72, kv_pages=Pages(16)), "needs multiples of 16 with pages, not head_dim 72, v_head_dim 72"),
    ("flash4", WIDER, "GQA backward needs equal dims, not head_dim 192, v_head_dim 128", H200, True),
    ("flash4", W.replace(kv_heads=4, v_head_dim=48), NO_BACKWARD_FOR_48, H200, True),
    ("flash4", W, "has no backward pass on sm80", A100, True),
    ("flash4", W.replace(sinks=True), "has no sinks on sm80", A100),
    ("flash4", W.replace(kv_pages=Pages(16)), "does not support a paged KV cache on sm120", RTX),
    ("flash4", W.replace(softcap=2.0), "has no backward with softcap on sm120", RTX, True),
    ("flash4", W.replace(head_dim=160), SHORT_OF_128, B200),
    ("flash4", W.replace(head_dim=256, softcap=2.0), "has no softcap backward for 256", B200, True),
    ("flash4", W.replace(head_dim=256, sinks=True), "has no backward with sinks for 256", B200, True),
    ("flex_flash", W.replace(head_dim=8), "needs a head dimension of at least 16", H200),
    ("flex_flash", W.replace(head_dim=256, mask="causal"), f"{BLOCKS}, not head_dim 256, v_head_dim 256", H200),
    ("flex_flash", WIDER, "GQA backward needs equal dims, not head_dim 192, v_head_dim 128", H200, True),
    ("flex_flash", W.replace(kv_heads=4, v_head_dim=48), NO_BACKWARD_FOR_48, H200, True),
    ("flex_flash", W.replace(head_dim=160), SHORT_OF_128, B200),
]

# -- FlashInfer --------------------------------------------------------------------------------------------------------------

INFERRED = Workload(24, 40, batch=2, heads=4, kv_heads=2, head_dim=64)
ENTRIES = Workload(q_lens=(30, 7, 20), kv_lens=(30, 12, 40), heads=2, head_dim=64)
BOTH = "flashinfer_fa2 flashinfer_fa3"
STEPS = INFERRED.replace(q_len=2, kv_len=70, kv_pages=Pages(16), kv_lens=(70, 33), mask="causal-bottom-right")
CLAIMED += [
    *forward(BOTH, INFERRED, INFERRED.replace(mask="causal-bottom-right", scale=0.3), INFERRED.replace(mask=Window(9, 0))),
    *forward(BOTH, INFERRED.replace(kv_len=24, mask="causal", softcap=2.0), INFERRED.replace(kv_lens=(40, 0))),
    *forward(BOTH, INFERRED.replace(kv_lens=(40, 31), mask="causal-bottom-right"), ENTRIES, STEPS),
    *forward(BOTH, INFERRED.replace(kv_len=24, mask=Document((13, 11), causal=True))),
    *forward(
        BOTH, INFERRED.replace(head_dim=192, v_head_dim=128, dtype="float16"), ENTRIES.replace(mask="causal-bottom-right")
    ),
    *forward(BOTH, STEPS.replace(kv_pages=Pages(1), kv_lens=(70, 0), scale=0.2, mask=None)),
    *forward(BOTH, ENTRIES.replace(kv_pages=Pages(16), mask="causal-bottom-right")),
    *forward(BOTH, ENTRIES.replace(kv_pages=Pages(8, "HND", pool=40), q_lens=(5, 0, 9), mask=Window(9, 0))),
]
CLAIMED += forward("flashinfer_fa2", *(INFERRED.replace(mask=mask) for mask in ("causal", Window(5, 3), Window(5, None))))
CLAIMED += forward("flashinfer_fa2", *(INFERRED.replace(mask=mask) for mask in (BooleanMask(by_batch), every_third)))
CLAIMED += forward("flashinfer_fa2", *(ENTRIES.replace(mask=mask) for mask in ("causal", every_third)))
CLAIMED += forward("flashinfer_fa2", INFERRED.replace(kv_len=24, mask=Neighborhood((4, 6), (3, 3))))
UNEVEN_PAGES = INFERRED.replace(kv_pages=Pages(16), head_dim=192, v_head_dim=128)
WIDE = INFERRED.replace(q_len=1 << 16, kv_len=1 << 15, mask="causal")
TO_THE_LAST = "takes padded keys and a paged KV cache with masks up to the last key only"
SCALED = INFERRED.replace(mask="causal-bottom-right", scale=0.3)
FAULTS += [
    ("flashinfer_fa2", "flashinfer.py", right, wrong, workload)
    for right, wrong, workload in (
        ('"bottom-right" if causal', '"top-left" if causal', SCALED),
        ("dim**-0.5 if sm_scale is None else sm_scale", "dim**-0.5", SCALED),
        ('"softcap": soft_cap', '"softcap": 2 * soft_cap', INFERRED.replace(kv_len=24, mask="causal", softcap=2.0)),
        ("(window_left, -1)", "(window_left - 1, -1)", INFERRED.replace(mask=Window(9, 0))),
        ("logits_soft_cap, custom_mask)", "logits_soft_cap, custom_mask.flip(0))", INFERRED.replace(mask="causal")),
        (": self._lens_kv[b]]", ": self._lens_kv[0]]", STEPS),
        ("self._sequences(q, keys_of, ", "self._sequences(q, lambda b: keys_of(0), ", STEPS),
    )
]
REFUSED += [
    ("flashinfer_fa2", INFERRED.replace(head_dim=192), "has no kernel for head_dim 192 with v_head_dim 192"),
    ("flashinfer_fa2", UNEVEN_PAGES, "needs v_head_dim equal to head_dim where keys are paged"),
    ("flashinfer_fa2", INFERRED.replace(mask=by_head), "takes one mask for all heads"),
    ("flashinfer_fa2", INFERRED.replace(kv_lens=(40, 20), mask="causal"), f"{TO_THE_LAST} (bottom-right causal, or right=0)"),
    ("flashinfer_fa2", WIDE, "counts the entries of a custom_mask in 32 bits, too few for 4,294,967,296"),
    ("flashinfer_fa3", INFERRED.replace(mask=Window(3, 3)), "takes windows up to the last key only (right=0)"),
]

# -- NATTEN ------------------------------------------------------------------------------------------------------------------


def layout(*shape, **mask):
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "batch": 2}
    changed = {name: mask.pop(name) for name in list(mask) if name in Workload.__dataclass_fields__}
    return Workload(math.prod(shape), mask=Neighborhood(shape, **mask), **sizes | changed)


LINE = layout(40, kernel=(7,))
STRIDED = layout(41, kernel=(6,), stride=(4,), dilation=(2,), causal=(True,), scale=0.3)
DILATED = layout(41, kernel=(7,), stride=(2,), dilation=(3,))
PLANE = layout(9, 8, kernel=(4, 3), stride=(2, 1), dilation=(1, 2), causal=(True, False), kv_heads=4)
CLAIMED += both(
    "natten",
    LINE,
    STRIDED,
    DILATED,
    PLANE,
    layout(9, 7, kernel=(5, 4), stride=(4, 3), dtype="float32"),
    layout(5, 6, 4, kernel=(3, 2, 2), stride=(2, 1, 1), dilation=(1, 3, 1), causal=(True, False, False), dtype="float16"),
    layout(5, 6, kernel=(5, 6)),
)
FAULTS += [
    ("natten", "natten.py", "len(group) - kernel)  # shifted", "len(group) - 1)  # shifted", LINE),
    ("natten", "natten.py", "block[stride // 2]", "block[0]", DILATED),
    ("natten", "natten.py", "token % dilation == position % dilation", "token % 1 == 0", DILATED),
    ("natten", "natten.py", "if token <= position", "", STRIDED),
    ("natten", "natten.py", "index * size + token", "max(index, token)", PLANE),
    ("natten", "natten.py", "scale=scale, visible", "visible", STRIDED),
]
WITHOUT_LIBNATTEN = tuple(
    f"Can't run {name} {{}}; NATTEN was not built with libnatten." for name in ("Blackwell", "Hopper", "CUTLASS")
)
REFUSED += [
    ("natten", Workload(32), "takes neighborhood masks only"),
    ("natten", layout(1, 30, kernel=(1, 3)), "takes kernels of at least 2 tokens in each dimension, not (1, 3)"),
    ("natten", layout(2, 2, 2, 3, kernel=(2, 2, 2, 2)), "takes token layouts of at most 3 dimensions, not 4"),
    (
        "natten",
        layout(30, kernel=(3,), head_dim=24),
        (
            *(words.format("FNA") for words in WITHOUT_LIBNATTEN),
            "we only allow 8 <= head_dim <= 512 and only powers of two, got 24.",
        ),
    ),
    (
        "natten",
        layout(30, kernel=(30,), causal=(True,)),
        (*(words.format("FMHA") for words in WITHOUT_LIBNATTEN), "Flex FMHA doesn't support causal mask yet."),
    ),
]

# -- Transformer Engine ------------------------------------------------------------------------------------------------------

T = Workload(24, 40, batch=2, heads=4, kv_heads=2, head_dim=16)
T_SQUARE = T.replace(kv_len=24)
T_PACKED = Workload(q_lens=(30, 7, 20), heads=2, head_dim=16)
T_LONGER = T_PACKED.replace(kv_lens=(30, 40, 50), kv_len=None)
T_DOCUMENTS = T_SQUARE.replace(mask=Document((13, 11)))
TE = "te_fused te_flash te_unfused"
MANY += [
    *both(TE, T, T_SQUARE.replace(mask="causal"), T.replace(kv_lens=(40, 33)), T_PACKED.replace(mask="causal")),
    *both(TE, T_SQUARE.replace(mask=Document((13, 11), causal=True))),
    *both("te_fused te_unfused", T.replace(mask="causal", scale=0.3), T.replace(sinks=True, mask="causal-bottom-right")),
    *both("te_flash", T.replace(alibi=True, mask="causal-bottom-right")),
    *both("te_unfused", T.replace(mask=BooleanMask(checkered))),
    *forward(TE, T.replace(mask="causal-bottom-right"), T.replace(mask=Window(9, 0)), T.replace(mask=Window(9, 3))),
    *forward(TE, T.replace(v_head_dim=32), T.replace(kv_lens=(40, 31), mask="causal-bottom-right"), T_DOCUMENTS),
    *forward(TE, T.replace(kv_lens=(40, 31), mask=Window(9, 2)), T_LONGER.replace(mask="causal-bottom-right")),
    *forward("te_fused te_unfused", T.replace(kv_lens=(40, 33), mask="causal"), T_PACKED.replace(kv_heads=1, sinks=True)),
    *forward("te_fused", T.replace(mask=Window()), T.replace(bias="hqk"), T.replace(bias="bk")),
    *forward("te_flash", T.replace(mask=Window(None, 0)), T.replace(alibi=True, kv_lens=(40, 33)), T.replace(softcap=3.0)),
    *forward("te_unfused", T.replace(bias="hqk", dtype="fp32"), T.replace(bias="bq", kv_lens=(40, 33), dtype="fp32")),
    *forward("te_unfused", T.replace(alibi=True, dtype="fp32"), T.replace(softcap=3.0, dtype="fp32")),
    *forward("te_unfused", T_DOCUMENTS.replace(kv_lens=(24, 17)), T_SQUARE.replace(mask=Neighborhood((24,), (5,)))),
]
FAULTS += [
    (name, "te_dpa.py", right, wrong, workload)
    for name, right, wrong, workload in (
        ("te_fused", '"top-left" if top_left', '"bottom-right" if top_left', T.replace(mask="causal")),
        ("te_flash", 'and "bottom-right"', 'and "top-left"', T.replace(mask="causal-bottom-right")),
        ("te_flash", "(window[0], ", "(window[0] - 1, ", T.replace(mask=Window(9, 3))),
        ("te_fused", '"scale": self.scale', '"scale": None', T.replace(scale=0.3)),
        ("te_unfused", "attention_mask.logical_not()", "attention_mask", T.replace(mask=BooleanMask(checkered))),
        ("te_fused", '"softmax_offset", None)', '"no_offset", None)', T.replace(sinks=True)),
        ("te_fused", "bias=core_attention_bias", "bias=-core_attention_bias", T.replace(bias="hqk")),
        ("te_flash", '"alibi": alibi_slopes', '"alibi": None', T.replace(alibi=True)),
        ("te_flash", "cu_seqlens_kv, **options", "cu_seqlens_q, **options", T_LONGER),
    )
]
FULLY_MASKED = "gives queries that see no key other results than zeros"
REFUSED += [
    ("te_fused", T.replace(bias="hqk", kv_lens=(40, 33)), "Disabling FusedAttention for arbitrary mask"),
    (
        "te_fused",
        T.replace(kv_len=20, mask=Window(9, 0)),
        "Disabling FusedAttention as it does not support sliding window attention with s_q > s_kv for cross-attention",
    ),
    ("te_flash", T.replace(mask=Window(9, None)), "takes no window that is open on one side"),
    ("te_unfused", T_PACKED.replace(mask=every_third), "takes no mask of its own for packed sequences"),
    ("te_unfused", T.replace(alibi=True), "would round the scores with ALiBi to bfloat16"),
    ("te_unfused", T.replace(bias="k"), "would round the scores with a bias to bfloat16"),
    ("te_unfused", T.replace(softcap=3.0), "would round each step of softcap to bfloat16"),
    ("te_unfused", T.replace(alibi=True, kv_lens=(40, 33), dtype="fp32"), "takes no ALiBi for packed or padded sequences"),
    ("te_unfused", T.replace(alibi=True, mask="causal", dtype="fp32"), "aligns ALiBi to the first key with such a mask"),
    ("te_unfused", T.replace(kv_len=20, mask="causal-bottom-right"), FULLY_MASKED),
    ("te_unfused", T.replace(kv_lens=(40, 11), mask=Window(3, 3)), FULLY_MASKED),
    ("te_unfused", T.replace(mask=BooleanMask(without_visible_keys)), FULLY_MASKED),
]

# -- transformers ------------------------------------------------------------------------------------------------------------

DENSE = (
    *(W, W.replace(mask="causal", scale=0.3), W.replace(q_len=1, mask="causal"), BOTTOM_RIGHT, W.replace(mask=Window(9, 3))),
    *(W.replace(kv_lens=(80, 33)), SQUARE.replace(mask=Document((30, 18)), v_head_dim=64)),
)
CLAIMED += both("transformers:sdpa", *DENSE, W.replace(bias="hk"), W.replace(q_len=90, mask=Window(2, 2)))
MANY += forward("transformers:flex_attention", *DENSE[:6], W.replace(bias="hk", alibi=True, kv_lens=(80, 33)))
MANY += forward("transformers:flex_attention", W.replace(softcap=2.0))
CLAIMED += both("transformers:eager", *DENSE, W.replace(bias="hq", alibi=True, dtype="fp32"))
CLAIMED += both(
    "transformers:flash_attention_2",
    *(W.replace(mask=mask) for mask in (Window(9, 9), Window(200, 0), Window(None, 0))),
    *(
        BOTTOM_RIGHT.replace(scale=0.3),
        SQUARE.replace(mask="causal", v_head_dim=16),
        W.replace(mask=Window(9, 0), softcap=2.0),
    ),
    *(W.replace(q_len=1, kv_lens=(80, 33), mask="causal-bottom-right"), W.replace(q_len=1, kv_lens=(80, 0))),
    *(DOCUMENTS, CAUSAL_DOCUMENTS, PACKED, PACKED.replace(mask=Window(5, 5))),
)
FAULTS += [
    (f"transformers:{name}", "transformers.py", right, wrong, workload.replace(scale=0.3))
    for name, workload, right, wrong in (
        ("sdpa", W.replace(mask="causal"), "scale=scaling", "scale=None"),
        ("sdpa", SQUARE.replace(mask="causal"), "is_causal=is_causal, **sdpa", "is_causal=False, **sdpa"),
        ("eager", SQUARE.replace(mask="causal"), "weights = weights + attention_mask", "pass"),
        ("flex_attention", W.replace(softcap=2.0), "softcap * torch.tanh(score / softcap)", "score"),
        ("flex_attention", W.replace(mask=Window(9, 3)), "block_mask=block_mask", "block_mask=None"),
        ("flash_attention_2", W.replace(mask=Window(9, 0)), "(sliding_window - 1, sliding", "(sliding_window, sliding"),
        ("flash_attention_2", PACKED, '{"causal": is_causal', '{"causal": False'),
    )
]
FAULTS.append(
    ("transformers:flash_attention_2", "flash2.py", '"bottom-right" if causal', '"top-left" if causal', BOTTOM_RIGHT)
)
LEFT_OUT, DROPPED = "leaves out a window as long as the keys", "drops queries along with padded keys"
EMPTY_ROWS = "averages all values in rows that see no key"
REFUSED += [
    (f"transformers:{name}", *said)
    for name, *said in (
        ("sdpa", W.replace(softcap=2.0), "has no softcap"),
        ("sdpa", PACKED, "does not support packed sequences"),
        ("sdpa", W.replace(alibi=True), "would round ALiBi's distances to bfloat16 in attn_mask"),
        ("eager", W.replace(q_len=90, mask="causal-bottom-right"), EMPTY_ROWS),
        ("eager", W.replace(kv_lens=(80, 0)), EMPTY_ROWS),
        ("eager", Workload(6, 6, heads=1, head_dim=8, kv_lens=(6, 0), mask=Document((4, 2))), EMPTY_ROWS),
        ("flex_attention", PACKED, "does not support packed sequences"),
        ("flex_attention", W.replace(q_len=100), "finds no kernel for q_len * group = 200 rows", H200),
        ("flex_attention", W.replace(sinks=True), "Attention sinks cannot be run on CPU with flex attention"),
        ("flash_attention_2", W.replace(mask="causal"), "has no causal mask aligned to the first key"),
        ("flash_attention_2", W.replace(sinks=True), "has no sinks"),
        ("flash_attention_2", W.replace(mask=Window(9, 3)), "takes windows (left, 0) and (n, n) only"),
        ("flash_attention_2", W.replace(mask=Window(9, None)), "takes windows (left, 0) and (n, n) only"),
        ("flash_attention_2", W.replace(q_len=90, mask=Window(9, 9)), f"{LEFT_OUT}: takes (n, n) for q_len <= kv_len only"),
        ("flash_attention_2", W.replace(v_head_dim=64), "pads values up to head_dim: takes no larger v_head_dim"),
        ("flash_attention_2", W.replace(kv_lens=(80, 3)), f"{DROPPED}: takes padded keys for q_len == 1 only"),
    )
]

# -- xformers ----------------------------------------------------------------------------------------------------------------

X = Workload(41, 75, batch=2, heads=4, head_dim=32)
X_SQUARE = X.replace(kv_len=41)
X_GROUPED = X.replace(kv_heads=2)
X_LONGER = PACKED.replace(kv_lens=(30, 60, 50), kv_len=None)
XFORMERS = "xformers xformers_cutlass"
MANY += [
    *both(
        XFORMERS,
        *(X.replace(mask=mask) for mask in (None, "causal-bottom-right", Window(None, 0), BooleanMask(checkered))),
        *(X_SQUARE.replace(mask=mask) for mask in ("causal", Document((30, 11)), Document((30, 11), causal=True))),
        *(X.replace(kv_lens=(75, 33), **more) for more in ({}, {"mask": "causal"}, {"alibi": True, "dtype": "fp32"})),
        *(X.replace(mask="causal", scale=0.3), X.replace(bias="hk", dtype="fp32"), X.replace(v_head_dim=48), PACKED),
        *(X.replace(bias="bq", mask="causal", kv_lens=(75, 33)), X.replace(kv_lens=(75, 51), mask="causal-bottom-right")),
        *(X_SQUARE.replace(mask=Document((30, 11)), kv_lens=(41, 33)), X_LONGER.replace(mask="causal-bottom-right")),
    ),
    *both("xformers", X.replace(mask=Window(9, 0)), X.replace(mask=Window(9, 3))),
    *both("xformers", X.replace(kv_lens=(75, 51), mask=Window(9, 0))),
    *forward("xformers", X.replace(mask=Window(None, 3)), X.replace(mask=Window(4, None))),
    *forward("xformers_cutlass", X.replace(mask=Window(9, 0))),
    *forward(XFORMERS, X_SQUARE.replace(mask=Neighborhood((41,), (5,))), PACKED.replace(mask=None, kv_heads=1)),
    *forward(XFORMERS, X_GROUPED.replace(mask="causal-bottom-right"), X_GROUPED.replace(bias="hqk")),
]
MASKS, CALLS = "xformers_attn_bias.py", "xformers_fmha.py"
TOP_LEFT, BOTTOM = "right, bottom_right = 0, False\n\n\n", "right, bottom_right = 0, True\n\n\n"
FAULTS += [
    ("xformers", file, right, wrong, workload)
    for file, right, wrong, workload in (
        (MASKS, f"{TOP_LEFT}class LowerTriangularFrom", f"{BOTTOM}class LowerTriangularFrom", X.replace(mask="causal")),
        (MASKS, f"{TOP_LEFT}@dataclass", f"{BOTTOM}@dataclass", X_LONGER),
        (MASKS, "self.left = self._window_size - 1", "self.left = self._window_size", X.replace(mask=Window(9, 0))),
        (MASKS, "self.left, self.right = self.win", "self.right, self.left = self.win", X.replace(mask=Window(9, 3))),
        (CALLS, "scale=scale, **options", "**options", X.replace(scale=0.3)),
        (CALLS, "attn_bias.flatten(1, -3)", "-attn_bias.flatten(1, -3)", X.replace(bias="hqk")),
        (CALLS, "for t in (query, key, value))\n    o", "for t in (query, key.roll(1, 2), value))\n    o", X_GROUPED),
    )
]
LOCAL = "attn_bias type is <class 'xformers.ops.fmha.attn_bias.LocalAttentionFromBottomRightMask'>"
NO_WINDOW, UNEQUAL = "has no window to the right of a query", "query.shape[-1] != value.shape[-1]"
FEWER = PACKED.replace(kv_lens=(30, 6, 50), mask="causal-bottom-right")
NO_GROUPS = "operator does not support BMGHK format"
REFUSED += [
    ("xformers", X.replace(alibi=True), "would round ALiBi's distances to bfloat16 in attn_bias"),
    ("xformers", PACKED.replace(mask=every_third), "takes neither ALiBi nor a mask of its own for packed sequences"),
    ("xformers", X.replace(kv_lens=(75, 33), mask=Window(3, 3)), f"{NO_WINDOW} for packed or padded sequences"),
    ("xformers", FEWER, "Block #1 has num_keys=6 and num_queries=7. Expected `num_keys >= num_queries`"),
    ("xformers", X_GROUPED, (f"fa2B@2.8.3: {NO_GROUPS}", f"cutlassB-pt: {NO_GROUPS}"), HOST, True),
    ("xformers", X.replace(mask=Window(3, 3), v_head_dim=64), (f"fa2F@2.8.3: {UNEQUAL}", f"cutlassF-pt: {LOCAL}")),
    ("xformers_cutlass", X.replace(mask=Window(3, 3)), LOCAL, HOST, True),
    ("xformers_cutlass", X_GROUPED, NO_GROUPS, HOST, True),
]

# -- machines ----------------------------------------------------------------------------------------------------------------

HAS_SAGE = "has kernels for sm80, sm86, sm89, sm90, sm120, sm121, this device is sm100"
OLD_TORCH = {version: replace(H200, torch_version=version) for version in ("2.9.1", "2.10.0")}
#: backend, machine, and why it is not there on it; None where it is
AVAILABLE = [
    *(
        (name, H200, None)
        for name in ("cudnn", "flash2", "flash3", "flash3/old", "flex_flash", "natten", "sdpa_fa4", "xformers")
    ),
    *(("flash4", machine, None) for machine in (A100, H200, B200, RTX)),
    ("flash3", B200, "needs sm90, this device is sm100"),
    ("flex_flash", A100, "needs sm90 to sm110, this device is sm80"),
    ("flex_flash", RTX, "needs sm90 to sm110, this device is sm120"),
    ("flex_flash", HOST, "needs a CUDA device"),
    ("flex_flash", OLD_TORCH["2.9.1"], "needs torch 2.10, this is 2.9.1"),
    ("flashinfer_fa2", A100, None),
    ("flashinfer_fa3", H200, None),
    ("flashinfer_fa3", A100, "needs sm90, this device is sm80"),
    ("sage", B200, HAS_SAGE),
    ("sage_fp16", A100, None),
    ("sage_fp8", A100, "has kernels for sm89, sm90, sm120, sm121, this device is sm80"),
    ("sdpa_fa4", RTX, "needs sm90 to sm103, this device is sm120"),
    ("sdpa_fa4", HOST, "needs a CUDA device"),
    ("sdpa_fa4", OLD_TORCH["2.10.0"], "needs torch 2.11, this is 2.10.0"),
    ("transformers:flash_attention_2", H200, None),
    ("xformers_cutlass", B200, "needs sm50 to sm90, this device is sm100"),
]


# -- what holds of each ------------------------------------------------------------------------------------------------------


def named(rows, marks=()):
    """Return a parameter for each row, whose id is what it says in text, and its workload."""
    return [
        pytest.param(*row, marks=marks, id="-".join(getattr(one, "id", one) for one in row if isinstance(one, str | Workload)))
        for row in rows
    ]


@pytest.mark.parametrize(
    ("name", "workload", "backward"), [*named(CLAIMED, pytest.mark.one_in(4)), *named(MANY, pytest.mark.one_in(12))]
)
def test_it_says_the_workload_in_the_words_of_the_library(installed, name, workload, backward):
    backend = installed(name)
    assert backend.unsupported_because(workload, HOST, backward) == []
    assert_passes(backend, workload, backward)


@pytest.mark.parametrize(
    "name", ["diffusers:native", "diffusers:_native_math", "diffusers:flex", "transformers:sdpa", "transformers:eager"]
)
def test_a_dispatcher_runs_torchs_own_kernels_on_a_cpu(installed, name):
    assert installed(name).obstacle(W, machine_of(CPU), name != "diffusers:flex") is None


@pytest.mark.parametrize(("name", "machine", "reason"), AVAILABLE)
def test_it_is_there_on_machines_that_it_has_kernels_for(installed, name, machine, reason):
    assert installed(name).unavailable_because(machine) == reason


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("name", "file", "right", "wrong", "workload"), named(FAULTS))
def test_another_meaning_in_the_library_is_found(installed, name, file, right, wrong, workload):
    backend = installed(name, **planted(file, right, wrong))
    assert not judged(backend, workload, backward=name == "cudnn").passed


@pytest.mark.parametrize(("name", "workload", "reasons", "machine", "backward"), named(Refusal(*row) for row in REFUSED))
def test_it_refuses_what_the_library_has_no_words_for(installed, name, workload, reasons, machine, backward):
    said = installed(name).unsupported_because(workload, machine, backward)
    assert said == ([reasons] if isinstance(reasons, str) else [*reasons])
