"""Lengths and head dimensions at the places where kernels break."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_attn.invariants.derived import Variation, judge_variations
from pytest_attn.invariants.invariant import CLOSED_OVER, Invariant
from pytest_attn.invariants.probe import Probe
from pytest_attn.workloads.inputs import draw_inputs
from pytest_attn.workloads.masks import Causal, Window
from pytest_attn.workloads.workload import Workload

#: (q_len, kv_len): one row, one key, beside tiles of 32, 64 and 128, and lengths that differ either way
_LENGTHS = ((1, 1), (1, 65), (63, 64), (64, 65), (127, 129), (129, 257), (257, 33), (33, 1), (160, 160))
_HEAD_DIMS = (8, 16, 40, 80, 96, 128, 192)
_HEADS = ((1, 1), (3, 1), (5, 5), (6, 2), (7, 1))


class Shapes(Invariant):
    """The same attention in other shapes is right, too."""

    name = "shapes"
    summary = "the workload's mask and options are right in other lengths, head dimensions and groups"
    calls = len(_LENGTHS) + len(_HEAD_DIMS) + len(_HEADS)
    thorough = True

    def inapplicable_because(self, probe: Probe) -> str | None:
        """Only a backend can be asked about other shapes, and only masks that fit any."""
        if not probe.is_backend:
            return CLOSED_OVER
        w = probe.workload
        if w.v_in_k or w.is_packed or w.kv_lens is not None or not isinstance(w.plain_mask, Causal | Window | None):
            return "the mask or the lengths belong to this shape"
        return None

    def run(self, probe: Probe) -> str:
        """Change one dimension at a time."""
        w, seed = probe.workload, probe.spec.seed
        made = (Variation(words, draw_inputs(other, "structured", seed, probe.device)) for words, other in _shapes(w))
        return judge_variations(probe, made, self.calls)


def _shapes(w: Workload) -> Iterator[tuple[str, Workload]]:
    for q_len, kv_len in _LENGTHS:
        yield f"q_len {q_len}, kv_len {kv_len}", w.replace(q_len=q_len, kv_len=kv_len)
    for head_dim in _HEAD_DIMS:
        yield f"head_dim {head_dim}", w.replace(head_dim=head_dim)
    for heads, kv_heads in _HEADS:
        yield f"{heads} heads, {kv_heads} key heads", w.replace(heads=heads, kv_heads=kv_heads)
