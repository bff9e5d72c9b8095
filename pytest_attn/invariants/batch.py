"""A batch entry does not depend on its company."""

from __future__ import annotations

from pytest_attn.invariants.derived import TOO_LONG
from pytest_attn.invariants.equivalence import one_sequence
from pytest_attn.invariants.invariant import CLOSED_OVER, Invariant, NotApplicable
from pytest_attn.invariants.probe import Probe
from pytest_attn.workloads.masks import BooleanMask, MaskModMask


class Batch(Invariant):
    """The last entry of a batch, alone, gives what it gave among the others."""

    name = "batch"
    summary = "an entry of a batch gives the same result alone"
    calls = 1

    def inapplicable_because(self, probe: Probe) -> str | None:
        """Only a backend can be asked about a smaller batch."""
        w = probe.workload
        if not probe.is_backend:
            return CLOSED_OVER
        if w.batch == 1 or w.kv_lens is not None:
            return "a batch of 1" if w.batch == 1 else "sequences of their own lengths are asked about under equivalence"
        if w.is_quantized:
            return "descales belong to the entries of the whole batch"
        if isinstance(w.plain_mask, BooleanMask | MaskModMask) or w.score_mod is not None:
            return "a function of the mask or score may depend on the entry's number"
        return None if probe.is_short else TOO_LONG

    def run(self, probe: Probe) -> str:
        """Ask about the last entry alone."""
        last = probe.workload.batch - 1
        alone = probe.on(one_sequence(probe.inputs, last))
        if alone is None:
            raise NotApplicable("the backend refuses a batch of 1")
        among = {name: t[last:] for name, t in probe.base.items()}
        changed = alone.change(alone.base, among)
        return f"entry {last} alone, against the same in its batch: {changed}" if changed else ""
