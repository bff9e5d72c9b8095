"""The catalog: attention as real models call it, by name, each with the source of its shape.

A group name ("flux") stands for all its workloads ("flux-L128" ... "flux-L512"). "smoke", "edges" and "features" are ours:
small problems at the places where kernels break; so are "long-64k", "long-256k" and "long-1m", contexts in which indices and
chunks go wrong. Tests may ask for "all". The group "covering" is generated when it is asked for (covering.py).
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pytest_attn.workloads.covering import GROUP, for_any_kernel
from pytest_attn.workloads.fields import did_you_mean
from pytest_attn.workloads.masks import BooleanMask, Document, Neighborhood, Window
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.source import decode_workload
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

W = Workload  # for lines that read as a table
#: name, the place where the shapes come from, workloads
Group: TypeAlias = tuple[str, str, list[Workload]]


class Entry(NamedTuple):
    """A workload with its group and the place its shape comes from. on_request: run only where it is named."""

    workload: Workload
    group: str
    source: str
    on_request: bool = False


class Catalog:
    """Workloads by name, in the order in which they were added."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._aliases: dict[str, str] = {}

    def add(
        self,
        workload: Workload,
        group: str | None = None,
        source: str = "",
        alias: str | None = None,
        on_request: bool = False,
    ) -> None:
        """Add a named workload; raise ValueError where it has no name or another workload bears it already.

        on_request: leave it to those who name it, or say "all".
        """
        name = workload.name
        if name is None:
            raise ValueError(f"catalog: {workload.id} has no name; say Workload(..., name='...')")
        if name in self._entries and self._entries[name].workload != workload:
            raise ValueError(
                f"catalog: two different workloads are named {name!r}: {self._entries[name].workload.shape_id}"
                f" and {workload.shape_id}; rename one"
            )
        self._entries[name] = Entry(workload, group or name, source, on_request)
        if alias:
            self._aliases[alias] = name

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def default(self) -> list[Workload]:
        """The workloads that run where none is named, and the device is a GPU."""
        return [entry.workload for entry in self if not entry.on_request]

    def group_of(self, name: str | None) -> str:
        """Return the group of a workload's name, "" where it is not in the catalog."""
        entry = self._entries.get(name or "")
        return entry.group if entry else GROUP if is_generated(name) else ""

    def aliases_of(self, name: str | None) -> list[str]:
        """Return the other names of a workload."""
        return [alias for alias, meant in self._aliases.items() if meant == name]

    @property
    def names(self) -> list[str]:
        """Every name that `select` takes: groups, workloads and aliases."""
        groups = {entry.group: None for entry in self}
        return [*groups, GROUP, *(name for name in self._entries if name not in groups), *self._aliases]

    def select(self, name: str) -> list[Workload]:
        """Return the workloads of a name, id, group, alias, glob pattern or "all"; raise ValueError where there is none."""
        name = self._aliases.get(name, name)
        found = [
            entry.workload
            for entry in self
            if name in ("all", entry.group, entry.workload.name, entry.workload.id)
            or ("*" in name and fnmatch.fnmatchcase(entry.workload.id, name))
        ]
        if name.startswith(GROUP):
            found += [w for w in for_any_kernel() if name in (GROUP, w.name) or fnmatch.fnmatchcase(w.id, name)]
        if not found:
            groups = ", ".join([*dict.fromkeys(entry.group for entry in self), GROUP])
            meant = did_you_mean(name, self.names)
            others = "pytest --attn-list shows all workloads, Workload(...) is one of your own"
            raise ValueError(f"unknown workload {name!r};{meant} groups: {groups}; {others}")
        return found


def is_generated(name: str | None) -> bool:
    """Return whether a name is that of a workload of covering.py."""
    return (name or "").startswith(f"{GROUP}-")


def builtin_catalog() -> Catalog:
    """Return a new catalog with every built-in workload."""
    catalog = Catalog()
    for group, source, workloads in _groups():
        for workload in workloads:
            # the name that Flux's benchmark has for it
            alias = f"cuda_attn_{str(workload.name).removeprefix('flux-')}_bfloat16" if group == "flux" else None
            catalog.add(workload, group, source, alias, on_request=group in (*LONG_GROUPS, _BITS))
    return catalog


@cache
def _groups() -> tuple[Group, ...]:
    return (*_small(), *_models(), *_long(), _bits())


# -- ours: small problems at the places where kernels break -------------------------------------------------------------------


def _wider_with_each_head(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return kv <= q + 17 * h


def _steeper_with_each_head(
    score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
) -> torch.Tensor:
    return score * (1 + h) / 2 - (q - kv).abs() / 64


def _diagonal_blocks(batch: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
    import torch

    rows = torch.arange(q_len, device=device)[:, None] // 32
    return (rows == torch.arange(kv_len, device=device)[None, :] // 32)[None, None]


def _small() -> Iterator[Group]:
    yield (
        "smoke",
        "ours: seconds on two CPU cores",
        [
            W(128, heads=2, name="smoke-full"),
            W(160, heads=4, kv_heads=2, mask="causal", name="smoke-causal-gqa"),
            W(65, 193, heads=2, mask="causal-bottom-right", name="smoke-cross-br"),
            W(128, heads=2, dtype="float16", name="smoke-half"),
            W(96, heads=2, head_dim=32, dtype="float32", mask="causal", name="smoke-single"),
            W(128, heads=2, mask=Window(31, 0), name="smoke-window"),
            W(96, heads=2, head_dim=32, kv_lens=(96, 41), name="smoke-padded"),
            W(heads=2, head_dim=32, q_lens=(7, 64, 33), mask="causal", name="smoke-packed"),
            W(1, 192, batch=2, heads=4, kv_heads=2, kv_pages=Pages(16), kv_lens=(192, 77), name="smoke-paged"),
            W(64, heads=2, head_dim=32, softcap=5.0, mask="causal", name="smoke-softcap"),
        ],
    )
    yield (
        "edges",
        "ours: tile edges, tails, unequal lengths, odd groups, head dimensions and pages",
        [
            W(127, heads=2, mask="causal", name="edges-s127"),
            W(129, heads=2, mask="causal", name="edges-s129"),
            W(257, heads=2, name="edges-s257"),
            W(704, heads=2, mask=BooleanMask(_diagonal_blocks), name="edges-s704-blocks"),
            W(1, 129, heads=2, name="edges-one-row"),
            W(129, 33, heads=2, name="edges-short-keys"),
            W(16, 2304, heads=2, head_dim=32, name="edges-long-keys"),
            W(129, 257, heads=2, mask="causal", name="edges-q129-k257-top-left"),
            W(257, 129, heads=2, mask="causal-bottom-right", name="edges-q257-k129-bottom-right"),
            W(128, heads=3, kv_heads=1, mask="causal", name="edges-gqa3"),
            W(128, heads=10, kv_heads=2, mask="causal", name="edges-gqa5"),
            W(128, heads=14, kv_heads=2, mask="causal", name="edges-gqa7"),
            W(40, heads=40, kv_heads=2, head_dim=32, mask="causal", name="edges-gqa20"),
            W(129, heads=2, head_dim=8, name="edges-d8"),
            W(129, heads=2, head_dim=40, mask="causal", name="edges-d40"),
            W(129, heads=2, head_dim=96, name="edges-d96"),
            W(129, batch=2, heads=4, kv_heads=2, head_dim=128, mask="causal", name="edges-d128"),
            W(129, heads=2, head_dim=192, name="edges-d192"),
            W(129, heads=2, head_dim=192, v_head_dim=128, mask="causal", name="edges-d192-dv128"),
            W(129, heads=2, head_dim=256, mask="causal", name="edges-d256"),
            W(2, 400, heads=2, head_dim=32, kv_pages=Pages(16), kv_lens=(400, 77), mask=Window(20, 0), name="edges-freed"),
        ],
    )
    fp8 = "float8_e4m3fn"
    br = partial(W, heads=4, kv_heads=2, mask="causal-bottom-right")
    yield (
        "features",
        "ours: every option of a workload, small, alone and with each other that a kernel can take beside it",
        [
            W(130, heads=4, kv_heads=2, head_dim=32, sinks=True, mask=Window(40, 3), name="features-sinks-window"),
            W(130, heads=4, kv_heads=2, head_dim=32, sinks=True, mask="causal", name="features-sinks-causal"),
            W(70, 150, heads=4, kv_heads=2, head_dim=32, alibi=True, name="features-alibi"),
            W(70, 150, heads=4, head_dim=32, alibi=True, mask="causal-bottom-right", name="features-alibi-br"),
            W(130, batch=2, heads=4, head_dim=32, bias="bhqk", softcap=5.0, name="features-bias-softcap"),
            W(100, heads=2, head_dim=32, v_head_dim=48, scale=0.3, name="features-scale-dv48"),
            W(100, heads=2, head_dim=48, v_head_dim=32, mask=Document((30, 50, 20), causal=True), name="features-documents"),
            W(96, heads=2, head_dim=32, mask=Neighborhood((8, 12), (3, 5), 1, 1, (True, False)), name="features-neighborhood"),
            W(100, 40, heads=2, head_dim=32, mask="causal-bottom-right", name="features-blind-rows"),
            W(66, batch=2, heads=2, head_dim=32, mask="causal", name="features-batch"),
            W(8, heads=8, head_dim=32, name="features-square"),
            W(90, heads=4, kv_heads=2, head_dim=32, mask=_wider_with_each_head, name="features-mask-mod"),
            W(100, heads=2, head_dim=32, score_mod=_steeper_with_each_head, softcap=8.0, dtype="float32", name="features-mod"),
            W(70, heads=2, head_dim=32, kv_lens=(70, 0, 33), mask=Window(20, 5), dtype="float16", name="features-padded"),
            W(66, heads=6, kv_heads=2, head_dim=32, head_groups="interleaved", mask="causal", name="features-interleaved"),
            W(128, heads=2, head_dim=16, bias="hqk", name="features-bias-128"),
            W(90, heads=2, head_dim=32, bias="hqk", softcap=4.0, bias_before_softcap=True, name="features-bias-first"),
            W(heads=4, head_dim=64, q_lens=(200, 70, 40), name="features-packed"),
            W(heads=4, kv_heads=2, head_dim=32, q_lens=(10, 70, 40), kv_lens=(70, 20, 30), name="features-packed-cross"),
            br(head_dim=32, q_lens=(10, 0, 70, 33), kv_lens=(70, 20, 5, 90), name="features-packed-br"),
            W(1, 100, batch=3, heads=4, kv_heads=2, kv_pages=Pages(16), kv_lens=(100, 90, 33), name="features-paged"),
            br(3, 100, batch=3, kv_pages=Pages(16), kv_lens=(100, 0, 33), name="features-paged-br"),
            br(q_lens=(5, 1, 17), kv_lens=(64, 33, 17), kv_pages=Pages(16), name="features-packed-pages"),
            br(16, cached=48, batch=2, head_dim=32, name="features-cached"),
            br(5, cached=(59, 21), kv_pages=Pages(16), name="features-paged-cached"),
            W(1, 100, batch=2, heads=2, kv_pages=Pages(16, "HND", pool=20), kv_lens=(100, 33), name="features-paged-hnd"),
            W(heads=2, head_dim=32, q_lens=(33, 64), mask="causal", dtype=fp8, descales="head", name="features-packed-fp8"),
            br(q_lens=(1, 3), kv_lens=(130, 77), kv_pages=Pages(32), kv_dtype=fp8, name="features-packed-pages-fp8"),
            W(140, heads=2, head_dim=32, kv_dtype=fp8, descales="token", name="features-token-descales"),
            W(65, batch=2, heads=4, kv_heads=2, head_dim=32, mask="causal", dropout=0.2, name="features-dropout"),
            W(
                70,
                heads=4,
                head_dim=32,
                kv_lens=(140, 31),
                bias="hqk",
                dtype="float16",
                dropout=0.1,
                name="features-dropout-bias",
            ),
            W(40, 65, heads=2, head_dim=32, alibi=True, mask=Window(31, 0), dropout=0.2, name="features-dropout-window"),
            W(2, heads=2, kv_pages=Pages(16), kv_lens=(130, 70), mask=Window(31, 0), name="features-paged-window"),
            W(1, heads=2, kv_pages=Pages(256), kv_lens=(300, 129), name="features-paged-256"),
            W(heads=20, kv_heads=1, head_dim=32, q_lens=(1, 0, 1), kv_lens=(65, 33, 129), name="features-packed-decode"),
            W(65, 33, heads=2, head_dim=32, kv_lens=(20,), name="features-padded-alone"),
            W(70, batch=2, heads=2, head_dim=16, bias="bk", name="features-bias-keys"),
            *_pairs(),
        ],
    )


def _pairs() -> list[Workload]:
    """Return what benchmarks/features.py prints: few workloads with every pair of options that a kernel can take."""
    lines = Path(__file__).with_name("features.jsonl").read_text(encoding="utf-8").splitlines()
    return [decode_workload(json.loads(line)) for line in lines]


# -- as real models and libraries call it -------------------------------------------------------------------------------------


def _relative_position(score: torch.Tensor, _b: object, _h: object, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return score - (q - kv).abs() / 64


def _prefix_lm(_b: object, _h: object, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return (kv <= q) | (kv < 64)


def _models() -> Iterator[Group]:
    yield (
        "flux",
        "HF kernels-benchmarks, attn.py: batch 1, 24 heads, 4096 image + L text tokens, d 128",
        [W(4096 + L, heads=24, head_dim=128, name=f"flux-L{L}") for L in (128, 256, 320, 384, 448, 512)],
    )
    yield ("flux-4k", "NATTEN profiler.md: 256 x 256 tokens", [W(65_536, heads=24, head_dim=128, name="flux-4k")])
    yield (
        "hunyuan-video",
        "NATTEN profiler.md: 30 x 48 x 80 tokens",
        [W(115_200, heads=24, head_dim=128, name="hunyuan-video")],
    )
    yield (
        "wan",
        "Wan 2.x 14B: diffusers' 40 x 128 heads; tokens derived as 21 x 30 x 52 (480p); text 512",
        [W(32_760, heads=40, head_dim=128, name="wan-480p"), W(32_760, 512, heads=40, head_dim=128, name="wan-cross")],
    )
    yield (
        "sdxl",
        "Stable Diffusion XL: 10 or 20 heads of 64, 4096 or 1024 tokens, 77 text tokens",
        [
            W(4096, batch=2, heads=10, name="sdxl-4096"),
            W(1024, batch=2, heads=20, name="sdxl-1024"),
            W(4096, 77, batch=2, heads=10, name="sdxl-cross"),
        ],
    )
    yield (
        "vit",
        "ViT-B/16: 12 heads of 64; 14 x 14 and 56 x 56 tokens",
        [W(196, batch=8, heads=12, name="vit-196"), W(3136, batch=1, heads=12, name="vit-3136")],
    )
    llama_8b = partial(W, heads=32, kv_heads=8, head_dim=128)
    llama_70b = partial(W, heads=64, kv_heads=8, head_dim=128)
    yield (
        "llama3-8b",
        "Llama 3 8B: 32 heads, 8 key heads, d 128",
        [
            llama_8b(2048, mask="causal", name="llama3-8b-prefill"),
            llama_8b(1, 8192, batch=8, mask="causal-bottom-right", name="llama3-8b-decode"),
        ],
    )
    yield (
        "llama3-70b",
        "Llama 3 70B: 64 heads, 8 key heads, d 128",
        [
            llama_70b(2048, mask="causal", name="llama3-70b-prefill"),
            llama_70b(1, 8192, batch=4, mask="causal-bottom-right", name="llama3-70b-decode"),
        ],
    )
    yield ("qwen3", "Qwen3-8B: 32 heads, 8 key heads, d 128", [llama_8b(4096, mask="causal", name="qwen3-8b-prefill")])
    yield (
        "gemma2",
        "transformers' Gemma2Config: 8 heads, 4 key heads, d 256, window 4096, softcap 50",
        [
            W(1024, heads=8, kv_heads=4, head_dim=256, softcap=50.0, mask="causal", name="gemma2-global"),
            W(6144, heads=8, kv_heads=4, head_dim=256, softcap=50.0, mask=Window(4095, 0), name="gemma2-window"),
        ],
    )
    yield (
        "gpt-oss",
        "transformers' GptOssConfig: 64 heads, 8 key heads, d 64, window 128, one learned sink per head",
        [
            W(1024, heads=64, kv_heads=8, sinks=True, mask=Window(127, 0), name="gpt-oss-window"),
            W(1024, heads=64, kv_heads=8, sinks=True, mask="causal", name="gpt-oss-full"),
        ],
    )
    yield (
        "deepseek-mla",
        "DeepSeek V3 config: 128 heads, q and k 128 + 64, v 128",
        [W(1024, heads=128, head_dim=192, v_head_dim=128, mask="causal", name="deepseek-mla-prefill")],
    )
    yield (
        "whisper",
        "Whisper: 1500 audio tokens; tiny 6 x 64, large 20 x 64",
        [W(1500, heads=6, name="whisper-tiny"), W(1500, heads=20, name="whisper-large")],
    )
    yield (
        "bert",
        "BERT base: 12 heads of 64, 512 tokens, padded batch",
        [W(512, heads=12, kv_lens=(512, 384, 129, 7), name="bert-padded")],
    )
    yield (
        "natten-1d",
        "NATTEN's front page sizes, 1-D",
        [W(2048, heads=8, mask=Neighborhood((2048,), (255,)), name="natten-1d")],
    )
    yield (
        "natten-2d",
        "NATTEN, 2-D with dilation",
        [W(4096, heads=8, mask=Neighborhood((64, 64), (13, 13), dilation=(2, 4)), name="natten-2d")],
    )
    yield (
        "natten-3d",
        "NATTEN profiler.md, 3-D with stride, scaled to 12 x 16 x 16 tokens",
        [W(3072, heads=8, mask=Neighborhood((12, 16, 16), (6, 8, 8), stride=(4, 4, 4)), name="natten-3d")],
    )
    yield (
        "softcap",
        "attention-gym: tanh soft-capping of scores",
        [W(512, heads=4, softcap=20.0, mask="causal", name="softcap-20")],
    )
    yield (
        "alibi",
        "Press et al. 2022 (ALiBi): linear distance penalty per head",
        [W(512, heads=8, alibi=True, mask="causal", name="alibi-causal")],
    )
    yield (
        "prefix-lm",
        "attention-gym: a prefix of 64 tokens seen by all, causal after it",
        [W(512, heads=4, mask=_prefix_lm, name="prefix-lm-64")],
    )
    yield (
        "documents",
        "attention-gym: documents packed into one causal sequence",
        [
            W(1024, heads=4, mask=Document((300, 17, 451, 256), causal=True), name="documents-1024"),
            W(heads=8, q_lens=(128, 192, 256, 200, 150), mask="causal", name="documents-packed"),
        ],
    )
    yield (
        "relative-bias",
        "T5-style additive bias per head and position; and as a score_mod",
        [
            W(512, heads=8, bias="hqk", name="relative-bias-dense"),
            W(512, heads=8, score_mod=_relative_position, name="relative-bias-mod"),
        ],
    )
    yield (
        "neighborhood",
        "NATTEN, small and causal along one axis",
        [W(1024, heads=4, mask=Neighborhood((32, 32), (7, 7), causal=(True, False)), name="neighborhood-2d-causal")],
    )
    yield (
        "kv-cache",
        "decoding 64 tokens after a prompt of 448",
        [W(64, 512, batch=2, heads=8, kv_heads=2, mask="causal-bottom-right", name="kv-cache-512")],
    )
    yield (
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
            )
        ],
    )


# -- ours: long contexts, asked for by name -----------------------------------------------------------------------------------


#: group -> its tokens
LONG_GROUPS = {"long-64k": 1 << 16, "long-256k": 1 << 18, "long-1m": 1 << 20}


def _long() -> Iterator[Group]:
    of = partial(W, head_dim=128)
    for name, tokens in LONG_GROUPS.items():
        workloads = [
            of(tokens, heads=8, mask="causal", name=f"{name}-causal"),
            of(tokens, heads=8, mask=Window(4095, 0), name=f"{name}-window"),
            of(tokens, heads=32, kv_heads=8, mask="causal", name=f"{name}-gqa"),
            of(tokens + 37, heads=2, mask="causal", name=f"{name}-tail"),
            of(1, tokens, heads=32, kv_heads=8, mask="causal-bottom-right", name=f"{name}-decode"),
        ]
        yield (name, f"ours: {tokens:,} tokens on one GPU, asked for by name", workloads)


# -- ours: where equal calls may take other splits and tiles, asked for by name ----------------------------------------------


_BITS = "promises"


def _bits() -> Group:
    half = partial(W, heads=8, kv_heads=2, dtype="float16")
    append = partial(half, 24, mask="causal-bottom-right")
    decode = partial(half, 1, kv_lens=(2049, 511, 63))
    workloads = [
        half(577, mask="causal", name="promises-prefill"),
        W(300, heads=4, head_dim=128, mask="causal", name="promises-d128"),
        append(2064, name="promises-append"),
        half(1, 2049, head_dim=128, name="promises-decode"),
        decode(name="promises-padded"),
        half(q_lens=(513, 65, 257), mask="causal", name="promises-packed"),
        decode(kv_pages=Pages(16), name="promises-paged"),
        decode(kv_pages=Pages(256), name="promises-paged-256"),
        append(kv_lens=(2064, 270), kv_pages=Pages(16), name="promises-paged-append"),
    ]
    return _BITS, "ours: both sides of lengths at which kernels change splits and tiles, asked for by name", workloads


def is_for_gpu(workload: Workload) -> bool:
    """Return whether a workload is of one of these groups."""
    return (workload.name or "").rpartition("-")[0] in LONG_GROUPS
