from pytest_attn.workloads.masks.boolean import BooleanMask, StoredMask
from pytest_attn.workloads.masks.causal import Causal
from pytest_attn.workloads.masks.document import Document
from pytest_attn.workloads.masks.mask import (
    Band,
    Mask,
    MaskMod,
    NearMiss,
    ScoreMod,
    Sequences,
    interval,
    intervals,
    visible_pairs,
)
from pytest_attn.workloads.masks.mask_mod import MaskModMask
from pytest_attn.workloads.masks.neighborhood import Neighborhood
from pytest_attn.workloads.masks.registry import as_mask
from pytest_attn.workloads.masks.window import Window

__all__ = [
    "Band",
    "BooleanMask",
    "Causal",
    "Document",
    "Mask",
    "MaskMod",
    "MaskModMask",
    "NearMiss",
    "Neighborhood",
    "ScoreMod",
    "Sequences",
    "StoredMask",
    "Window",
    "as_mask",
    "interval",
    "intervals",
    "visible_pairs",
]
