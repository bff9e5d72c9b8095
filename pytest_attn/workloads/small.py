"""The groups "smoke", "edges" and "features", which are ours: small problems at the places where kernels break."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_attn.workloads.group import Group
from pytest_attn.workloads.masks import BooleanMask, Document, Neighborhood, Window
from pytest_attn.workloads.pages import Pages
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    import torch

W = Workload  # for lines that read as a table


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


def small_workloads() -> Iterator[Group]:
    """Yield the groups, in the order of the catalog."""
    yield from (_smoke(), _edges(), _features())


def _smoke() -> Group:
    return Group(
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


def _edges() -> Group:
    return Group(
        "edges",
        "ours: tile edges, tails, unequal lengths, odd groups and head dimensions",
        [
            W(127, heads=2, mask="causal", name="edges-s127"),
            W(129, heads=2, mask="causal", name="edges-s129"),
            W(257, heads=2, name="edges-s257"),
            W(704, heads=2, mask=BooleanMask(_diagonal_blocks), name="edges-s704-blocks"),
            W(1, 129, heads=2, name="edges-one-row"),
            W(129, 33, heads=2, name="edges-short-keys"),
            W(129, 257, heads=2, mask="causal", name="edges-q129-k257-top-left"),
            W(257, 129, heads=2, mask="causal-bottom-right", name="edges-q257-k129-bottom-right"),
            W(128, heads=3, kv_heads=1, mask="causal", name="edges-gqa3"),
            W(128, heads=10, kv_heads=2, mask="causal", name="edges-gqa5"),
            W(128, heads=14, kv_heads=2, mask="causal", name="edges-gqa7"),
            W(129, heads=2, head_dim=8, name="edges-d8"),
            W(129, heads=2, head_dim=40, mask="causal", name="edges-d40"),
            W(129, heads=2, head_dim=96, name="edges-d96"),
            W(129, heads=2, head_dim=192, name="edges-d192"),
            W(129, heads=2, head_dim=256, mask="causal", name="edges-d256"),
        ],
    )


def _features() -> Group:
    return Group(
        "features",
        "ours: every option of a workload, small, alone and with others",
        [
            W(130, heads=4, kv_heads=2, head_dim=32, sinks=True, mask=Window(40, 3), name="features-sinks-window"),
            W(130, heads=4, kv_heads=2, head_dim=32, sinks=True, mask="causal", name="features-sinks-causal"),
            W(70, 150, heads=4, kv_heads=2, head_dim=32, alibi=True, name="features-alibi"),
            W(70, 150, heads=4, head_dim=32, alibi=True, mask="causal-bottom-right", name="features-alibi-br"),
            W(130, batch=2, heads=4, head_dim=32, bias="bhqk", softcap=5.0, name="features-bias-softcap"),
            W(100, heads=2, head_dim=32, v_head_dim=48, scale=0.3, name="features-scale-dv48"),
            W(100, heads=2, head_dim=48, v_head_dim=32, mask=Document((30, 50, 20), causal=True), name="features-documents"),
            W(
                96,
                heads=2,
                head_dim=32,
                mask=Neighborhood((8, 12), (3, 5), causal=(True, False)),
                name="features-neighborhood",
            ),
            W(100, 40, heads=2, head_dim=32, mask="causal-bottom-right", name="features-blind-rows"),
            W(130, batch=2, heads=2, head_dim=32, mask="causal", name="features-batch"),
            W(8, heads=8, head_dim=32, name="features-square"),
            W(90, heads=4, kv_heads=2, head_dim=32, mask=_wider_with_each_head, name="features-mask-mod"),
            W(100, heads=2, head_dim=32, score_mod=_steeper_with_each_head, softcap=8.0, dtype="float32", name="features-mod"),
            W(100, heads=2, head_dim=32, kv_lens=(100, 0, 33), mask=Window(20, 5), dtype="float16", name="features-padded"),
            W(90, heads=6, kv_heads=2, head_dim=32, head_groups="interleaved", mask="causal", name="features-interleaved"),
            W(90, heads=2, head_dim=32, bias="hqk", softcap=4.0, bias_before_softcap=True, name="features-bias-first"),
            W(heads=4, head_dim=64, q_lens=(200, 70, 40), name="features-packed"),
            W(heads=4, kv_heads=2, head_dim=32, q_lens=(10, 70, 40), kv_lens=(70, 20, 30), name="features-packed-cross"),
            W(
                heads=4,
                kv_heads=2,
                head_dim=32,
                q_lens=(10, 0, 70, 33),
                kv_lens=(70, 20, 5, 90),
                mask="causal-bottom-right",
                name="features-packed-br",
            ),
            W(1, 100, batch=3, heads=4, kv_heads=2, kv_pages=Pages(16), kv_lens=(100, 90, 33), name="features-paged"),
            W(
                3,
                100,
                batch=3,
                heads=4,
                kv_heads=2,
                kv_pages=Pages(16),
                kv_lens=(100, 0, 33),
                mask="causal-bottom-right",
                name="features-paged-br",
            ),
            W(
                heads=4,
                kv_heads=2,
                head_dim=64,
                q_lens=(5, 1, 17),
                kv_lens=(64, 33, 17),
                kv_pages=Pages(16),
                mask="causal-bottom-right",
                name="features-packed-pages",
            ),
            W(16, cached=48, batch=2, heads=4, kv_heads=2, head_dim=32, mask="causal-bottom-right", name="features-cached"),
            W(1, 100, batch=2, heads=2, kv_pages=Pages(16, "HND", pool=20), kv_lens=(100, 33), name="features-paged-hnd"),
        ],
    )
