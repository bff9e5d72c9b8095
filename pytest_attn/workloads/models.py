"""Attention as real models and libraries call it, each with the source of its shape."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from pytest_attn.workloads.group import Group
from pytest_attn.workloads.masks import Document, Neighborhood, Window
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

W = Workload  # for lines that read as a table


def _relative_position(score: torch.Tensor, _b: object, _h: object, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return score - (q - kv).abs() / 64


def _prefix_lm(_b: object, _h: object, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return (kv <= q) | (kv < 64)


def model_workloads() -> Iterator[Group]:
    """Yield the groups, in the order of the catalog."""
    yield from _images_and_video()
    yield from _language_models()
    yield from _encoders()
    yield from _neighborhoods()
    yield from _masks_and_scores()
    yield from _decoding()


def _images_and_video() -> Iterator[Group]:
    yield Group(
        "flux",
        "HF kernels-benchmarks, attn.py: batch 1, 24 heads, 4096 image + L text tokens, d 128",
        [W(4096 + L, heads=24, head_dim=128, name=f"flux-L{L}") for L in (128, 256, 320, 384, 448, 512)],
    )
    yield Group("flux-4k", "NATTEN profiler.md: 256 x 256 tokens", [W(65_536, heads=24, head_dim=128, name="flux-4k")])
    yield Group(
        "hunyuan-video",
        "NATTEN profiler.md: 30 x 48 x 80 tokens",
        [W(115_200, heads=24, head_dim=128, name="hunyuan-video")],
    )
    yield Group(
        "wan",
        "Wan 2.x 14B: diffusers' 40 x 128 heads; tokens derived as 21 x 30 x 52 (480p); text 512",
        [
            W(32_760, heads=40, head_dim=128, name="wan-480p"),
            W(32_760, 512, heads=40, head_dim=128, name="wan-cross"),
        ],
    )
    yield Group(
        "sdxl",
        "Stable Diffusion XL: 10 or 20 heads of 64, 4096 or 1024 tokens, 77 text tokens",
        [
            W(4096, batch=2, heads=10, name="sdxl-4096"),
            W(1024, batch=2, heads=20, name="sdxl-1024"),
            W(4096, 77, batch=2, heads=10, name="sdxl-cross"),
        ],
    )
    yield Group(
        "vit",
        "ViT-B/16: 12 heads of 64; 14 x 14 and 56 x 56 tokens",
        [
            W(196, batch=8, heads=12, name="vit-196"),
            W(3136, batch=1, heads=12, name="vit-3136"),
        ],
    )


def _language_models() -> Iterator[Group]:
    llama_8b = partial(W, heads=32, kv_heads=8, head_dim=128)
    llama_70b = partial(W, heads=64, kv_heads=8, head_dim=128)
    yield Group(
        "llama3-8b",
        "Llama 3 8B: 32 heads, 8 key heads, d 128",
        [
            llama_8b(2048, mask="causal", name="llama3-8b-prefill"),
            llama_8b(1, 8192, batch=8, mask="causal-bottom-right", name="llama3-8b-decode"),
        ],
    )
    yield Group(
        "llama3-70b",
        "Llama 3 70B: 64 heads, 8 key heads, d 128",
        [
            llama_70b(2048, mask="causal", name="llama3-70b-prefill"),
            llama_70b(1, 8192, batch=4, mask="causal-bottom-right", name="llama3-70b-decode"),
        ],
    )
    yield Group(
        "qwen3",
        "Qwen3-8B: 32 heads, 8 key heads, d 128",
        [llama_8b(4096, mask="causal", name="qwen3-8b-prefill")],
    )
    yield Group(
        "gemma2",
        "transformers' Gemma2Config: 8 heads, 4 key heads, d 256, window 4096, softcap 50",
        [
            W(1024, heads=8, kv_heads=4, head_dim=256, softcap=50.0, mask="causal", name="gemma2-global"),
            W(6144, heads=8, kv_heads=4, head_dim=256, softcap=50.0, mask=Window(4095, 0), name="gemma2-window"),
        ],
    )
    yield Group(
        "gpt-oss",
        "transformers' GptOssConfig: 64 heads, 8 key heads, d 64, window 128, one learned sink per head",
        [
            W(1024, heads=64, kv_heads=8, sinks=True, mask=Window(127, 0), name="gpt-oss-window"),
            W(1024, heads=64, kv_heads=8, sinks=True, mask="causal", name="gpt-oss-full"),
        ],
    )
    yield Group(
        "deepseek-mla",
        "DeepSeek V3 config: 128 heads, q and k 128 + 64, v 128",
        [W(1024, heads=128, head_dim=192, v_head_dim=128, mask="causal", name="deepseek-mla-prefill")],
    )


def _encoders() -> Iterator[Group]:
    yield Group(
        "whisper",
        "Whisper: 1500 audio tokens; tiny 6 x 64, large 20 x 64",
        [
            W(1500, heads=6, name="whisper-tiny"),
            W(1500, heads=20, name="whisper-large"),
        ],
    )
    yield Group(
        "bert",
        "BERT base: 12 heads of 64, 512 tokens, padded batch",
        [W(512, heads=12, kv_lens=(512, 384, 129, 7), name="bert-padded")],
    )


def _neighborhoods() -> Iterator[Group]:
    yield Group(
        "natten-1d",
        "NATTEN's front page sizes, 1-D",
        [W(2048, heads=8, mask=Neighborhood((2048,), (255,)), name="natten-1d")],
    )
    yield Group(
        "natten-2d",
        "NATTEN, 2-D with dilation",
        [W(4096, heads=8, mask=Neighborhood((64, 64), (13, 13), dilation=(2, 4)), name="natten-2d")],
    )
    yield Group(
        "natten-3d",
        "NATTEN profiler.md, 3-D with stride, scaled to 12 x 16 x 16 tokens",
        [W(3072, heads=8, mask=Neighborhood((12, 16, 16), (6, 8, 8), stride=(4, 4, 4)), name="natten-3d")],
    )


def _masks_and_scores() -> Iterator[Group]:
    yield Group(
        "softcap",
        "attention-gym: tanh soft-capping of scores",
        [W(512, heads=4, softcap=20.0, mask="causal", name="softcap-20")],
    )
    yield Group(
        "alibi",
        "Press et al. 2022 (ALiBi): linear distance penalty per head",
        [W(512, heads=8, alibi=True, mask="causal", name="alibi-causal")],
    )
    yield Group(
        "prefix-lm",
        "attention-gym: a prefix of 64 tokens seen by all, causal after it",
        [W(512, heads=4, mask=_prefix_lm, name="prefix-lm-64")],
    )
    yield Group(
        "documents",
        "attention-gym: documents packed into one causal sequence",
        [
            W(1024, heads=4, mask=Document((300, 17, 451, 256), causal=True), name="documents-1024"),
            W(heads=8, q_lens=(128, 192, 256, 200, 150), mask="causal", name="documents-packed"),
        ],
    )
    yield Group(
        "relative-bias",
        "T5-style additive bias per head and position; and as a score_mod",
        [
            W(512, heads=8, bias="hqk", name="relative-bias-dense"),
            W(512, heads=8, score_mod=_relative_position, name="relative-bias-mod"),
        ],
    )
    yield Group(
        "neighborhood",
        "NATTEN, small and causal along one axis",
        [W(1024, heads=4, mask=Neighborhood((32, 32), (7, 7), causal=(True, False)), name="neighborhood-2d-causal")],
    )


def _decoding() -> Iterator[Group]:
    yield Group(
        "kv-cache",
        "decoding 64 tokens after a prompt of 448",
        [W(64, 512, batch=2, heads=8, kv_heads=2, mask="causal-bottom-right", name="kv-cache-512")],
    )
    yield Group(
        "paged-decode",
        "vLLM: pages of 16 tokens, one query token per sequence",
        [
            W(
                1,
                1024,
                batch=8,
                heads=32,
                kv_heads=8,
                head_dim=128,
                kv_pages=Pages(16),
                kv_lens=(1024, 1000, 513, 512, 129, 64, 17, 1),
                name="paged-decode-16",
            ),
        ],
    )
