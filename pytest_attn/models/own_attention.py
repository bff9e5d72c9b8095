"""A model's own attention, where a backend could stand: what it chose by itself."""

from __future__ import annotations

from pytest_attn.backends.subject import AttentionFn, Subject
from pytest_attn.workloads.inputs import Inputs


class OwnAttention(Subject):
    """What the model calls itself; nothing is put in its place."""

    name = "model"
    is_backend = False

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Raise TypeError: it computes nothing outside of its model."""
        raise TypeError("a model's own attention runs in the model only")
