"""Draws of whole workloads.

What is simple takes few choices with small numbers, as Hypothesis shrinks toward both.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from pytest_attn.strategies.lengths import LAYOUTS, Draw, count, lengths, with_prefix
from pytest_attn.strategies.masks import free_mask, rows_of, square_mask
from pytest_attn.strategies.scope import PACKED, Place, Scope, is_square
from pytest_attn.workloads.examples import distance
from pytest_attn.workloads.fields import BIAS_DIMENSIONS
from pytest_attn.workloads.workload import Workload


@st.composite
def drawn(draw: Draw, scope: Scope) -> Workload:
    """Draw a workload of this scope."""
    place: Place = draw(st.sampled_from(scope.places))
    features: list[str] = draw(st.lists(st.sampled_from(scope.features), unique=True, max_size=3)) if scope.features else []
    fields = dict(scope.fixed)
    fields.update(_heads(draw, scope, "grouped heads" in features))
    fields["dtype"] = draw(st.sampled_from(scope.dtypes))
    fields["head_dim"], fields["v_head_dim"] = draw(st.sampled_from(scope.head_dims))
    if "v_head_dim" in features:
        others = dict.fromkeys(dim for dim, _ in scope.head_dims if dim != fields["head_dim"])
        fields["v_head_dim"] = draw(st.sampled_from(list(others)))
    for feature in features:
        if feature in _VALUES and not (feature == "bias" and place.layout in PACKED):
            fields[feature] = draw(_VALUES[feature])
    if is_square(place.mask):
        fields["mask"] = square_mask(draw, place.mask, scope.max_rows)
        q_len = kv_len = rows_of(fields["mask"])
    else:
        fields["mask"] = free_mask(draw, place.mask, scope.max_rows)
        q_len, kv_len = lengths(draw, scope, features)
    fields.update(LAYOUTS[place.layout](draw, scope, features, q_len, kv_len))
    if fields.get("cached") is not None:
        fields.update(with_prefix(fields, draw(st.integers(1, scope.max_rows))))
    if fields.get("pad") == "left":
        fields.pop("bias", None)
    return Workload(**fields)


def _heads(draw: Draw, scope: Scope, is_grouped: bool) -> dict[str, int]:
    if not is_grouped:
        return {"heads": draw(count(1, scope.max_heads))}
    group = draw(count(2, scope.max_heads))
    kv_heads = draw(count(1, scope.max_heads // group))
    return {"heads": group * kv_heads, "kv_heads": kv_heads}


def _biases() -> list[str]:
    """Return every part of "bhqk", the shortest first."""
    parts = ("".join(d for place, d in enumerate(BIAS_DIMENSIONS) if bits >> place & 1) for bits in range(1, 16))
    return sorted(parts, key=lambda part: (len(part), part))


_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "softcap": st.sampled_from((5.0, 1.0, 20.0)),
    "scale": st.sampled_from((0.5, 1.0, 0.03125)),
    "bias": st.sampled_from(_biases()),
    "alibi": st.just(True),
    "sinks": st.just(True),
    "score_mod": st.just(distance),
}
