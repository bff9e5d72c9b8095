"""What a mutant is: a faulty kernel, named after the defect of a real library that it models, and how a diagnosis names it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from pytest_attn.diagnosis.faults import EMPTY_ROWS, LENGTHS_MISREAD, OTHER_ALIGNMENT, TAIL_MISSING, recomputed
from pytest_attn.mutants.kernel import Kernel, KernelBackend
from pytest_attn.workloads.workload import Workload

#: Whether a workload, called with or without backward, reaches the faulty step.
Applies: TypeAlias = Callable[[Workload, bool], bool]
AnyKernel = TypeVar("AnyKernel", bound=type[Kernel])

#: What it takes to see a mutant, beside a workload where it applies.
Condition: TypeAlias = Literal[
    "call",  # nothing: one call with the default inputs shows it
    "magnitude",  # inputs with large scores, such as the distributions outlier and large
    "poison",  # NaN in padding and in unused parts of pages
    "layout",  # tensors with other strides than contiguous ones
    "strides",  # tensors with strides, or at addresses, that no model passes
    "layouts",  # calls whose tensors have different strides, with one kernel
    "calls",  # calls with different values, with one kernel
    "workloads",  # calls with workloads that differ in one option or length, with one kernel
    "held",  # a result, or a graph not yet run backward, that is held across another call
    "repeats",  # many calls
    "lse-gradient",  # a gradient with respect to lse
]


@dataclass(frozen=True)
class Mutant:
    """One faulty kernel.

    name: after the defect, in kebab-case. kind: the class of defects. summary: the defect in one sentence.
    references: issues, pull requests ("FA#1133") and commits ("FA@a4f148b6") of the defects that it models; FA is
    Dao-AILab/flash-attention, FI flashinfer-ai/flashinfer, PT pytorch/pytorch, TE NVIDIA/TransformerEngine, xf
    facebookresearch/xformers. applies: which workloads reach the faulty step, at the default tile size. condition: what else
    it takes to see it.
    """

    name: str
    kind: str
    summary: str
    references: tuple[str, ...]
    kernel: type[Kernel]
    applies: Applies
    condition: Condition = "call"

    @property
    def faults(self) -> tuple[str, ...]:
        """The identities by which a diagnosis may name its fault; none where it has no name."""
        return FAULTS_OF.get(self.name, ())

    def is_reached_by(self, workload: Workload, backward: bool) -> bool:
        """Whether a workload runs its faulty step: none drops, dequantizes, reads v from k, or has gradients of pages."""
        is_refused = workload.dropout or workload.is_quantized or workload.v_in_k
        no_gradient = backward and workload.has_no_gradient_because
        return not (is_refused or no_gradient) and self.applies(workload, backward)

    def backend(self) -> KernelBackend:
        """Return a new backend, whose kernel has kept nothing yet."""
        return KernelBackend(self.name, self.kernel())


class Defects:
    """The mutants of one class of defects, in the order in which they are declared."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._mutants: list[Mutant] = []

    def __iter__(self) -> Iterator[Mutant]:
        return iter(self._mutants)

    def __call__(
        self, name: str, *references: str, applies: Applies, condition: Condition = "call"
    ) -> Callable[[AnyKernel], AnyKernel]:
        """Declare the decorated kernel a mutant; its docstring is the summary."""

        def declare(kernel: AnyKernel) -> AnyKernel:
            summary = " ".join((inspect.getdoc(kernel) or "").split())
            self._mutants.append(Mutant(name, self.kind, summary, references, kernel, applies, condition))
            return kernel

        return declare


#: its memory holds what another call, or nothing, has written there
_CALLS_DIFFER = ("calls-differ",)
_STRIDES = ("strides-misread",)

#: mutant -> identities
FAULTS_OF: dict[str, tuple[str, ...]] = {
    # masks
    "right-edge-one-key-late": ("causal-shows-next-key", "window-right-one-too-long"),
    "right-edge-one-key-early": ("causal-hides-diagonal", "window-right-one-too-short"),
    "left-edge-one-key-early": ("window-left-one-too-long",),
    "left-edge-one-key-late": ("window-left-one-too-short",),
    "bottom-right-taken-for-top-left": OTHER_ALIGNMENT,
    "top-left-taken-for-bottom-right": ("causal-other-alignment", "mask-ignored"),
    "rows-counted-within-their-tile": ("mask-rows-within-tile",),
    "mask-on-last-tile-only": ("mask-on-last-tile-only",),
    # one key more on the right may be all that are there
    "window-right-edge-open": ("window-right-ignored", "window-right-one-too-long", "mask-ignored"),
    "window-first-tile-skipped": ("first-window-tile-missing",),
    "last-key-tile-missing": TAIL_MISSING,
    "tail-keys-counted": ("tail-zeros-counted",),
    "tile-of-one-key-lost": TAIL_MISSING,
    "mask-inverted": ("mask-inverted",),
    "mask-dropped": ("mask-ignored",),
    "mask-of-key-head": ("mask-of-key-head",),
    "document-begins-one-token-late": ("documents-begin-late",),
    "documents-not-separated": ("documents-see-each-other",),
    "neighborhood-one-token-larger": ("neighborhood-one-larger",),
    "empty-row-is-nan": EMPTY_ROWS,
    "empty-row-averages-values": ("empty-rows-mean-of-v",),
    "blind-tile-is-nan": ("blind-tile",),
    # lengths
    "kv-length-ignored": LENGTHS_MISREAD,
    "newest-key-not-seen": ("newest-key-missing", "last-key-missing", "causal-hides-diagonal"),
    "length-of-first-sequence": LENGTHS_MISREAD,
    "queries-offsets-for-keys": ("keys-at-offsets-of-queries",),
    "keys-begin-one-token-late": ("keys-begin-late",),
    "key-offset-with-queries-heads": ("keys-with-stride-of-queries",),
    "sequences-not-separated": ("sequences-see-each-other",),
    "tail-reads-next-sequence": ("tail-reads-next-sequence",),
    "alignment-of-longest-sequence": ("aligned-as-longest-sequence", "causal-other-alignment", "window-other-alignment"),
    "last-page-skipped": ("last-page-skipped", "tail-tile-missing"),
    "pages-of-first-sequence": ("pages-of-first-sequence",),
    "pages-taken-in-order": ("pages-taken-in-order",),
    "page-table-without-its-stride": ("page-table-stride-ignored",),
    "page-of-another-size": ("page-of-another-size",),
    "no-keys-is-nan": EMPTY_ROWS,
    "sequence-without-queries-shifts-keys": ("sequence-without-queries-left-out",),
    "remainder-of-split-lost": TAIL_MISSING,
    # heads
    "groups-interleaved": ("heads-interleaved",),
    "group-taken-for-number-of-key-heads": ("group-taken-for-kv-heads",),
    "group-rounded-to-power-of-two": ("group-rounded-to-power-of-two",),
    "groups-ignored": ("groups-ignored",),
    "last-odd-head-lost": ("zeros-there",),
    "head-dim-tail-not-read": ("head-dim-tail-unread", "scores-without-effect"),
    "values-read-with-keys-head-dim": ("v-with-head-dim-of-k",),
    "keys-of-first-batch-entry": ("keys-of-first-batch-entry",),
    "sink-of-key-head": ("sink-of-key-head",),
    "alibi-slope-of-key-head": ("alibi-slope-of-key-head",),
    "bias-of-first-head": ("bias-of-first-head",),
    # options
    "scale-ignored": ("scale-option-ignored",),
    "scale-hard-coded": ("scale-wrong", "scale-missing", "scale-applied-twice", "scale-option-ignored"),
    "scale-dropped": ("scale-missing",),
    "scale-applied-twice": ("scale-applied-twice",),
    "scale-with-log2e": ("log2e-not-meant",),
    "causal-ignored": ("mask-ignored",),
    "window-ignored": ("window-left-ignored", "mask-ignored"),
    "softcap-ignored": ("softcap-ignored",),
    "softcap-not-multiplied-back": ("softcap-not-multiplied-back",),
    "softcap-after-mask": ("softcap-after-mask",),
    "softcap-after-bias": ("softcap-after-bias",),
    "bias-ignored": ("bias-ignored",),
    "bias-scaled": ("bias-scaled",),
    "alibi-sign": ("alibi-sign-flipped",),
    "alibi-slope-of-next-power": ("alibi-slope-of-next-power",),
    "alibi-from-first-key": ("alibi-from-first-key",),
    "alibi-one-sided": ("alibi-one-sided",),
    "sink-ignored": ("sinks-ignored",),
    "sink-scaled": ("sinks-scaled",),
    "sink-counted-in-every-split": ("sink-in-every-split",),
    "score-mod-with-tile-rows": ("score-mod-rows-within-tile",),
    # lse
    "lse-in-base-2": ("lse-base-2",),
    "lse-without-maximum": ("lse-without-maximum",),
    "lse-off-by-ln-2": ("lse-ln-2-too-large",),
    "lse-without-sink": ("sinks-ignored",),
    "lse-without-last-tile": TAIL_MISSING,
    "lse-in-the-tensors-dtype": ("lse-rounded",),
    "lse-of-empty-row-is-nan": EMPTY_ROWS,
    "sum-not-rescaled": ("sum-not-rescaled",),
    "denominator-not-rescaled": ("denominator-not-rescaled",),
    "rescaled-inversely": ("rescaled-inversely",),
    "merge-in-base-2": ("splits-merged-in-base-2",),
    "merge-without-weights": ("splits-averaged",),
    "merge-of-empty-splits-is-nan": EMPTY_ROWS,
    # magnitude
    "no-maximum-subtracted": ("exp-out-of-reach",),
    "maximum-taken-for-10": ("exp-out-of-reach",),
    "scores-in-float16": ("scores-rounded",),
    "exponent-in-the-tensors-dtype": ("precision-eager",),
    "products-in-tf32": ("precision-tf32",),
    "denominator-in-the-tensors-dtype": ("denominator-off",),
    "p-from-exponential-of-lse": ("exp-out-of-reach", "exp-overflow"),
    # overflow
    "query-offset-wraps": ("offset-wraps",),
    "out-offset-wraps": ("offset-wraps",),
    "gradient-offset-wraps": ("offset-wraps",),
    # of two pages, the second is read as the first in either case
    "key-position-wraps": ("key-positions-wrap", "page-of-another-size"),
    "grid-too-large": _CALLS_DIFFER,
    # memory
    "last-row-tile-unwritten": _CALLS_DIFFER,
    "empty-rows-unwritten": EMPTY_ROWS,
    "gradient-of-padding-unwritten": _CALLS_DIFFER,
    "lse-unwritten": _CALLS_DIFFER,
    "split-merged-before-it-is-written": _CALLS_DIFFER,
    "share-of-out-lost": _CALLS_DIFFER,
    "values-of-previous-tile": _CALLS_DIFFER,
    "share-of-dk-lost": _CALLS_DIFFER,
    "delta-read-before-it-is-written": _CALLS_DIFFER,
    # state
    "result-kept-by-address": ("result-changes-later", "other-calls-matter", "calls-differ"),
    "gradient-sums-not-cleared": _CALLS_DIFFER,
    "out-buffer-reused": ("result-changes-later",),
    "strides-of-first-call": _STRIDES,
    # layout
    "q-assumed-contiguous": _STRIDES,
    "v-read-with-strides-of-k": _STRIDES,
    "out-written-with-strides-of-q": _STRIDES,
    "head-stride-from-batch-stride": _STRIDES,
    "storage-offset-ignored": _STRIDES,
    "expanded-read-as-contiguous": _STRIDES,
    "innermost-stride-ignored": _STRIDES,
    "keys-read-again-with-strides-of-q": _STRIDES,
    "dout-assumed-contiguous": _STRIDES,
    "dq-written-with-strides-of-q": _STRIDES,
    "keys-centred-in-place": ("input-changed",),
    "keys-transposed-where-square": ("k-heads-and-rows-swapped",),
    "out-transposed-where-square": ("heads-and-rows-swapped",),
    # gradients
    "tail-not-masked-again": ("exp-overflow",),
    "delta-missing": ("d-missing",),
    "delta-of-next-head": ("d-of-next-head",),
    "lse-of-first-batch-entry": ("lse-of-first-batch-entry",),
    "null-lse": ("lse-missing-in-backward",),
    "lse-without-sink-again": ("sink-missing-in-lse",),
    "scale-missing-in-dk": ("gradient-scale-missing",),
    "dq-scaled-twice": ("gradient-scale-applied-twice",),
    "group-overwritten": ("group-overwritten",),
    "group-summed-interleaved": ("group-summed-interleaved",),
    "row-tiles-overwrite-dk": ("row-tiles-overwrite",),
    "mask-missing-in-backward": recomputed(
        ("mask-ignored", "mask-ignored-within-tiles", "window-left-ignored", "window-right-ignored")
    ),
    "always-causal-in-backward": ("recomputed-causal-not-asked-for", "causal-not-asked-for"),
    "aligned-top-left-in-backward": recomputed(OTHER_ALIGNMENT) + OTHER_ALIGNMENT,
    "last-key-tile-missing-in-backward": recomputed(TAIL_MISSING) + TAIL_MISSING,
    "kv-length-ignored-in-backward": recomputed(LENGTHS_MISREAD) + LENGTHS_MISREAD,
    "bias-missing-in-backward": recomputed(("bias-ignored", "alibi-ignored")),
    "softcap-slope-missing": ("softcap-slope-missing",),
    "softcap-slope-of-capped-score": ("softcap-slope-of-capped-score",),
    "score-mod-slope-missing": ("score-mod-slope-missing",),
    "empty-row-is-nan-in-backward": EMPTY_ROWS,
}
