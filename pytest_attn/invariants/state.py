"""Nothing is left over from another call."""

from __future__ import annotations

import dataclasses

from pytest_attn.invariants.difference import first_difference
from pytest_attn.invariants.invariant import Invariant
from pytest_attn.invariants.probe import Probe
from pytest_attn.workloads.arithmetic import mirrored, times
from pytest_attn.workloads.inputs import Inputs


class State(Invariant):
    """A kernel remembers neither values nor shapes, nor memory that it handed out.

    It runs last, so that the first inputs, A, come again after every other shape and option that was asked about.
    """

    name = "state"
    summary = "A, B, A gives A's result again; what is held from a call does not change; changed data is seen"
    calls = 3

    def run(self, probe: Probe) -> str:
        """Hold A across B, then put B's values into A's tensors."""
        base, tensors, other = probe.base, probe.handed(), other_values(probe.inputs)
        held = probe.begin(tensors)
        first = held.outputs
        if changed := first_difference(first, {name: base[name] for name in first}):
            return f"called again after other inputs and shapes: {changed}"
        of_other = probe.run(other)
        if changed := first_difference(held.outputs, first):
            return f"a result that is held while the kernel is called again, on other inputs: {changed}"
        if changed := probe.change(held.finish()):
            return f"the backward pass of a call, run after another call: {changed}"
        with_others = probe.handed(other)
        for name in ("q", "k") if probe.workload.v_in_k else ("q", "v"):
            getattr(tensors, name).detach().copy_(getattr(with_others, name))
        changed = probe.change(probe.call(tensors), of_other, other)
        return (
            f"the same tensors with other values in them, against new tensors with these values: {changed}" if changed else ""
        )


def other_values(inputs: Inputs) -> Inputs:
    """Return inputs of the same workload with q's elements in another order and v negated, with all of k where it is there."""
    if inputs.workload.v_in_k:
        k = times(inputs.k, -1)
        return dataclasses.replace(inputs, q=mirrored(inputs.q), k=k, v=k[..., : inputs.workload.v_head_dim])
    return dataclasses.replace(inputs, q=mirrored(inputs.q), v=times(inputs.v, -1))
