"""What --attn-fuzz draws for a test: what its backend can do, or what is common to the workloads that its marker names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.session.marks import AttentionMark
from pytest_attn.workloads.masks.registry import kind_of_words
from pytest_attn.workloads.traits import layout_of, traits_of
from pytest_attn.workloads.workload import Workload

if TYPE_CHECKING:
    from pytest_attn.backends.backend import Backend


def scope_of(mark: AttentionMark, dtypes: Sequence[str], backend: Backend | None) -> dict[str, Any]:
    """Return the arguments of `strategies.workloads` for a test.

    A backend says itself what it can do, so all of that is drawn. A test of one kernel says so by the workloads that its
    marker names: what they have in common stays. One that names none, and so runs the catalog, takes all.
    """
    if backend is not None:
        scope = _within(backend.capabilities) if backend.capabilities else {}
    else:
        scope = like(mark.workloads) if mark.workloads else {}
    if mark.dtypes or dtypes:
        scope["dtypes"] = [d for d in mark.dtypes if not dtypes or d in dtypes] if mark.dtypes else list(dtypes)
    if mark.declared.layout == "thd":
        scope["layouts"] = [layout for layout in scope.get("layouts", ("packed",)) if "packed" in layout]
    return {**scope, "backward": mark.backward}


def like(named: Sequence[Workload]) -> dict[str, Any]:
    """Return the scope of workloads like these: what all of them have in common stays, as the test may rely on it.

    Lengths, batch and heads are always drawn, and unequal lengths, GQA and empty sequences where one has them.
    """
    scope: dict[str, Any] = {}
    traits = frozenset[str]().union(*map(traits_of, named))
    features: list[str] = [one for one in ("fewer queries", "fewer keys", "empty sequences", "grouped heads") if one in traits]
    for field in ("scale", "softcap", "bias", "alibi", "sinks", "score_mod"):
        values = {getattr(w, field) for w in named}
        features += [field] if len(values) > 1 else []
        if len(values) == 1 and values.isdisjoint((None, False)):
            scope[field] = values.pop()
    said = {"head_groups": "interleaved", "bias_before_softcap": True}
    scope |= {field: value for field, value in said.items() if all(getattr(w, field) == value for w in named)}
    if len(rates := {w.dropout for w in named}) == 1:
        scope |= {"dropout": rates.pop()} if any(rates) else {}
    if all(w.q_len == 1 for w in named):
        scope["q_len"] = 1  # a kernel for decoding
    masks: dict[object, list[object]] = {}
    for w in named:
        masks.setdefault(_kind(w), []).append(w.mask)
    scope["masks"] = [kind if len(set(found)) > 1 else found[0] for kind, found in masks.items()]
    scope["features"] = features
    scope["layouts"] = list(dict.fromkeys(map(layout_of, named)))
    scope["dtypes"] = list(dict.fromkeys(w.dtype for w in named))
    scope["head_dims"] = sorted({(w.head_dim, w.v_head_dim) for w in named})
    if pages := {w.kv_pages for w in named if w.kv_pages}:
        drawn = {dataclasses.replace(one, pool=None) for one in pages}  # as many as are needed
        in_order = sorted(drawn, key=lambda one: (one.size, repr(one)))
        scope["page_sizes"] = [one.size if one.is_plain else one for one in in_order]
    if all(w.cached for w in named):
        scope["cached"] = True
    if all(w.pad == "left" for w in named):
        scope["pad"] = "left"
    return scope


def _kind(workload: Workload) -> object:
    """Return the mask's kind; a mask of the user's own is a kind for itself."""
    mask = workload.plain_mask
    return mask if mask is None or mask.function is not None else mask.kind


def _within(limits: Capabilities) -> dict[str, Any]:
    """Return the scope of what an interface can say; what it refuses beyond that is refused draw by draw."""
    from pytest_attn.strategies import FEATURES, HEAD_DIMS, LAYOUT_KINDS

    masks = [word for word, kind in kind_of_words().items() if {"any", *kind.capabilities} & limits.masks]
    always = {"fewer queries", "fewer keys", "empty sequences"}
    able = {*limits.features, *always, "plain", *(["v_head_dim"] if limits.v_head_dim else [])}
    probes = [Workload(1, head_dim=dim, dtype=limits.dtypes[0]) for dim in HEAD_DIMS + (limits.head_dims or ())]
    return {
        "masks": [None, *masks],
        "layouts": [layout for layout in LAYOUT_KINDS if layout in able],
        "features": [feature for feature in FEATURES if feature in able],
        "dtypes": limits.dtypes,
        "head_dims": list(dict.fromkeys(p.head_dim for p in probes if not limits.refusals(p))) or HEAD_DIMS,
    }
