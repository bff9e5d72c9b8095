"""The faults that attention kernels are known for, each said as the other attention to which it amounts."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_attn.diagnosis.hypothesis import AttentionFault, of_workload
from pytest_attn.diagnosis.masks import near_misses
from pytest_attn.diagnosis.options import ignored_options, misplaced_options, misread_options
from pytest_attn.diagnosis.reading import misread_tensors, wrong_descales
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload


def attention_faults(w: Workload, drawn: Inputs) -> Iterator[AttentionFault]:
    """Yield likely faults, of those that amount to the same the plainest first.

    They are for all draws of a workload's inputs. drawn: any of them, for what tensors there are, and where.
    """
    yield from wrong_descales(w, drawn)
    yield from ignored_options(w)
    for fault, words, mask in near_misses(w, drawn):
        yield AttentionFault(fault, words, of_workload(w, mask=mask))
    yield from misread_tensors(w, drawn)
    yield from misread_options(w, drawn)
    yield from misplaced_options(w, drawn)
