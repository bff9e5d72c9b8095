"""The identities of the faults that a diagnosis can name: what hints and records call them, and faulty kernels.

Plain data, which hints and faulty kernels share: neither knows of the other's code, so that one can be measured by the other.
What a fault predicts, and the words of its hint, are in attention_faults.py, forward_faults.py and backward_faults.py, and
with the masks; guests have their own.
"""

from collections.abc import Iterable

from pytest_attn.seam import each

#: before the identity of a fault with which P is computed again in the backward pass, while the forward pass is right
RECOMPUTED = "recomputed-"
#: before the name of a precision profile that fits
PRECISION = "precision-"
#: faults that amount to one another on some workloads: another alignment, keys at the end that are left out, lengths
OTHER_ALIGNMENT = ("causal-other-alignment", "window-other-alignment", "aligned-as-longest-sequence")
TAIL_MISSING = ("tail-tile-missing", "last-tile-missing", "last-visible-tile-missing", "last-key-missing")
LENGTHS_MISREAD = ("kv-lens-ignored", "kv-len-of-first-batch-entry")
EMPTY_ROWS = ("empty-rows", "empty-rows-nan", "empty-rows-mean-of-v")
#: what is fitted to a result, and so fits much
FITTED = (
    "denominator-off",
    "out-scaled",
    "gradient-scaled",
    "scale-wrong",
    "scores-rounded",
    "sinks-rounded",
    "smaller-dtype",
)

#: identity -> what is wrong
FAULTS = {
    # masks
    "mask-ignored": "the mask is ignored",
    "mask-inverted": "True in a mask is taken for hidden",
    "mask-of-key-head": "the mask of the key head is taken, not of the query head",
    "mask-of-another-head": "the mask of another head is taken",
    "mask-of-another-batch-entry": "the mask of another batch entry is taken",
    "tiles-beyond-diagonal-missing": "tiles of keys beyond the diagonal are left out",
    "mask-rows-within-tile": "the mask counts rows within their tile",
    "mask-shared-by-rows": "several rows are masked as one of them is",
    "mask-on-last-tile-only": "only the last tile of keys is masked, though an edge runs through earlier ones",
    "mask-ignored-within-tiles": "nothing is masked within the tiles that are visited",
    "causal-other-alignment": "a causal mask is aligned to the first key in place of the last, or the other way round",
    "causal-not-asked-for": "there is a causal mask that nobody asked for",
    "causal-shows-next-key": "a causal mask shows one key too many",
    "causal-hides-diagonal": "a causal mask hides the diagonal",
    "window-left-one-too-long": "a window is one key too long on the left",
    "window-left-one-too-short": "a window is one key too short on the left",
    "window-left-ignored": "a window is open on the left",
    "window-right-one-too-long": "a window is one key too long on the right",
    "window-right-one-too-short": "a window is one key too short on the right",
    "window-right-ignored": "a window is open on the right",
    "window-shifted": "a window stands one key too early or too late",
    "window-both-one-too-short": "a window is one key too short on both sides",
    "window-both-one-too-long": "a window is one key too long on both sides",
    "window-both-sided": "a window is as long on the right as on the left",
    "window-left-only": "a window has its left side alone",
    "window-right-only": "a window has its right side alone",
    "window-halved": "a window is half as long on each side",
    "window-edge-on-other-side": "a window hides keys beyond its length on the right, none on the left",
    "alignment-sign-flipped": "lengths are subtracted the wrong way round where rows are aligned to keys",
    "full-tiles-missing": "tiles that all rows of a tile see are left out",
    "mask-added": "a boolean mask is added to the scores",
    "hidden-scores-finite": "hidden scores are set to a finite number",
    "window-other-alignment": "a window is aligned to the first key, not to the last",
    "first-window-tile-missing": "the tile of keys in which a window begins is left out",
    "aligned-as-longest-sequence": "all sequences are aligned as the longest one",
    "documents-see-each-other": "documents see each other",
    "documents-begin-late": "documents begin one token late",
    "documents-begin-early": "documents begin one token early",
    "documents-not-causal": "documents are not causal",
    "neighborhood-one-larger": "a neighborhood is one token larger",
    "neighborhood-one-smaller": "a neighborhood is one token smaller",
    "neighborhood-not-causal": "a neighborhood is not causal",
    "padding-ignored": "padding that a mask hides is seen",
    # how far sequences go
    "last-key-missing": "the last key is left out",
    "first-key-missing": "the first key is left out",
    "tail-tile-missing": "the keys of the last part-filled tile are left out",
    "last-tile-missing": "the last tile of keys is left out",
    "last-visible-tile-missing": "the last tile of keys that a row sees is left out",
    "tail-zeros-counted": "zeros which fill up the last tile of keys, or stand for padding, are counted",
    "empty-splits-counted": "splits without keys are counted",
    "cached-keys-unread": "the keys before the new tokens are not read",
    "new-keys-unread": "the new keys beside a cache are not read",
    "new-keys-misplaced": "new keys are written to other slots of a cache, or not at all",
    "newest-key-missing": "lengths of keys are one too short",
    "kv-lens-ignored": "lengths of keys are ignored, and padding is seen",
    "padding-on-other-side": "padding on one side is taken to be on the other",
    "one-key-beyond-length": "one key beyond a length is seen",
    "kv-len-of-first-batch-entry": "the length of the first batch entry is taken for all",
    "kv-len-of-another-batch-entry": "the length of another batch entry is taken",
    "sequences-see-each-other": "packed sequences see each other",
    "tail-reads-next-sequence": "packed sequences see the next one's keys",
    "keys-at-offsets-of-queries": "packed keys are found by the cumulated lengths of the queries",
    "keys-begin-early": "packed sequences read from the last key of the one before",
    "keys-begin-late": "packed sequences read from their second key to the first of the next",
    "keys-with-stride-of-queries": "packed keys are found with the stride of the queries, which have more heads",
    "sequence-without-queries-left-out": "sequences without queries are left out of the queries' list only",
    "last-page-skipped": "the last page is left out where it is not full",
    "page-table-unread": "the page table is not read",
    "pages-of-first-sequence": "the pages of the first sequence are read for all",
    "pages-of-another-sequence": "the pages of another sequence are read",
    "page-beyond-length": "a page beyond a length is seen where the last page is full",
    "padding-of-pages-seen": "keys up to the end of a sequence's last page are seen",
    "pages-taken-in-order": "the pages of a sequence are taken to follow each other",
    "some-pages-looked-up": "one page of some is looked up, and the others are taken to follow it",
    "page-table-stride-ignored": "a row of the page table is found by the pages in use, not by its stride",
    "page-of-another-size": "pages are taken to be twice as long as they are",
    "slots-within-pages-misread": "tokens are read from other slots of their pages",
    "page-numbers-misread": "pages are found by a multiple of their numbers",
    "keys-unseen": "some keys are not seen",
    "keys-missing-with-a-period": "some of each number of keys are not seen",
    "keys-counted-twice": "some keys count twice",
    "keys-beyond-unseen": "keys beyond some number are not seen",
    "key-positions-wrap": "positions of keys wrap round",
    # heads and batch entries
    "heads-interleaved": "query head h uses key head h % kv_heads",
    "heads-in-neighboring-groups": "query head h uses key head h // group where groups are interleaved",
    "group-taken-for-kv-heads": "query head h uses key head h // kv_heads, not h // group",
    "group-rounded-to-power-of-two": "groups are rounded up to a power of two",
    "groups-ignored": "query head h uses key head h, as far as there are any",
    "first-key-head-for-all": "all query heads use the first key head",
    "key-heads-wrap": "numbers of key heads wrap round",
    "next-key-head": "query heads use the next key head",
    "heads-shifted": "heads of out are those of others",
    "keys-of-first-batch-entry": "the keys of the first batch entry are read for all",
    "values-of-first-batch-entry": "the values of the first batch entry are read for all",
    "kv-of-another-batch-entry": "k and v of another batch entry are read",
    "batch-entries-exchanged": "k and v of two batch entries are exchanged",
    "batch-entries-shifted": "batch entries of out are swapped",
    "heads-and-rows-swapped": "out has its heads and rows swapped",
    "batch-and-heads-swapped": "out has its batch entries and heads swapped",
    "heads-taken-for-rows": "heads are taken for rows, as q, k and v have another layout",
    "k-viewed-not-transposed": "k is viewed in another layout, not transposed",
    "v-viewed-not-transposed": "v is viewed in another layout, not transposed",
    "out-viewed-not-transposed": "out is viewed in another layout, not transposed",
    "columns-misplaced": "columns of out hold what belongs to other columns",
    "k-heads-and-rows-swapped": "k is read with its heads and rows swapped",
    # q, k and v
    "scores-without-effect": "the scores have no effect",
    "q-and-k-exchanged": "q is read in the place of k, and k in that of q",
    "k-and-v-exchanged": "k is read in the place of v, and v in that of k",
    "k-for-v": "k is read in the place of v",
    "v-for-k": "v is read in the place of k",
    "v-from-end-of-k": "v is read from the last elements of k, not the first",
    "v-with-head-dim-of-k": "rows of v are read head_dim apart, as those of k",
    "head-dim-tail-unread": "the last elements of heads are not read",
    "rope-inside-half-split": "q and k are rotated by position once more, in half-split pairs",
    "rope-inside-interleaved": "q and k are rotated by position once more, in interleaved pairs",
    **{f"descale-ignored-of-{name}": f"the descale of {name} is ignored" for name in "qkv"},
    "descale-ignored-of-kv": "the descales of k and v are ignored",
    "descale-ignored-of-qkv": "the descales of q, k and v are ignored",
    "descale-of-k-for-v": "the descale of k is taken for v",
    "descale-of-v-for-k": "the descale of v is taken for k",
    **{
        f"descale-of-{of.replace(' ', '-')}-for-{name}": f"{whose} descale of {'the ' * (of[0] == 'f')}{of} is taken for all"
        for name, whose in (("q", "q's"), ("k", "k's"), ("v", "v's"), ("kv", "k's and v's"), ("qkv", "q's, k's and v's"))
        for of in ("first head", "first batch entry", "one head")
    },
    "queries-misplaced": "queries of batch entries are found as if each had more rows",
    "strides-misread": "strides of tensors are not what the kernel takes them for",
    "input-changed": "an input is changed in place",
    # options
    "smaller-dtype": "out is computed in a smaller dtype, or cast to it",
    "scores-rounded": "the scores are rounded to a smaller dtype",
    "scale-missing": "the softmax scale is missing",
    "scale-applied-twice": "the softmax scale is applied twice",
    "scale-option-ignored": "the option scale is ignored",
    "scale-wrong": "the softmax scale is another",
    "log2e-missing": "exp2 is taken without its factor log2 e",
    "log2e-not-meant": "exp is taken where exp2 was meant",
    "softcap-ignored": "softcap is ignored",
    "softcap-cuts-off": "softcap cuts scores off, without tanh",
    "softcap-not-multiplied-back": "softcap is not multiplied back",
    "softcap-before-scale": "softcap comes before the scale",
    "softcap-before-bias": "softcap comes before the bias, not after",
    "softcap-after-bias": "softcap comes after the bias, not before",
    "softcap-after-mask": "softcap comes after the mask",
    "bias-ignored": "the bias is ignored",
    "bias-scaled": "the bias is scaled like the scores",
    "bias-of-another-head": "the bias of another head is taken",
    "bias-of-another-batch-entry": "the bias of another batch entry is taken",
    "bias-of-first-tile-only": "the bias is added to the first tile of rows or keys only",
    "bias-within-tile-constant": "the bias is that of the first row or key of a tile",
    **{
        fault: words
        for option, whose in (("bias", "the bias"), ("sinks", "a sink"), ("alibi", "ALiBi"))
        for fault, words in (
            (f"log2e-missing-in-{option}", f"{whose} is taken as of base 2"),
            (f"log2e-not-meant-in-{option}", f"{whose} is multiplied by log2 e"),
        )
    },
    "alibi-ignored": "ALiBi is ignored",
    "alibi-sign-flipped": "ALiBi has the wrong sign",
    "alibi-slope-of-next-power": "ALiBi's slopes are those of the next power",
    "alibi-slopes-of-paper": "ALiBi's slopes are the paper's for a number of heads that is not a power of two",
    "alibi-scaled": "ALiBi is scaled like the scores",
    "alibi-slope-of-another-head": "ALiBi's slope of another head is taken",
    "alibi-slope-of-key-head": "ALiBi's slope of the key head is taken, not of the query head",
    "alibi-slopes-of-first-batch-entry": "ALiBi's slopes of the first batch entry are taken for all",
    "alibi-from-first-key": "ALiBi counts rows from the first key",
    "alibi-one-sided": "ALiBi rewards the keys of the future",
    "sinks-ignored": "sinks are ignored",
    "sinks-scaled": "sinks are scaled like the scores",
    "sinks-rounded": "sinks are rounded",
    "sink-of-key-head": "the sink of the key head is taken, not of the query head",
    "sink-of-another-head": "the sink of another head is taken",
    "sink-in-every-split": "each sink counts in every split of the keys",
    "score-mod-ignored": "score_mod is ignored",
    "score-mod-rows-within-tile": "score_mod counts rows within their tile",
    "dropout-ignored": "dropout is ignored",
    "keep-mask-inverted": "True in the keep mask is taken for dropped",
    "dropout-not-rescaled": "dropout does not divide by 1 - dropout",
    "dropout-rescaled-twice": "dropout divides twice by 1 - dropout",
    # softmax, lse, weights and maxima
    "sum-not-rescaled": "the sum of P v is not rescaled to a new maximum",
    "denominator-not-rescaled": "the denominator is not rescaled to a new maximum",
    "rescaled-inversely": "the sum of P v is multiplied by the inverse of its factor",
    "splits-averaged": "splits of the keys are averaged, whatever their denominators",
    "splits-merged-in-base-2": "splits of the keys are merged by a natural lse as if it were one of base 2",
    "splits-merged-as-natural": "splits of the keys are merged by an lse of base 2 as if it were natural",
    "splits-merged-by-another-head": "splits of the keys are merged by the lse of another head",
    "splits-merged-by-another-row": "splits of the keys are merged by the lse of another row",
    "p-below-maximum-of-tile": "P of a tile is formed with the tile's maximum, not the running one",
    "sums-in-few-bits": "the sum of P v is rounded to a small dtype while it is formed",
    "out-scaled": "out is off by a factor",
    "denominator-off": "the denominators of rows are off: rounded, or summed in a smaller dtype",
    "blind-tile": "rows that see no key in the first tile visited are NaN",
    "blind-split": "rows that see no key in one of several splits are NaN",
    "exp-overflow": "exp(-lse) overflows in float32",
    "exp-out-of-reach": "exp(lse) leaves float32",
    "empty-rows": "rows that see no key are not what they must be",
    "empty-rows-nan": "rows that see no key are NaN",
    "empty-rows-mean-of-v": "rows that see no key are the mean of v",
    "lse-base-2": "lse is in base 2",
    "lse-converted-twice": "lse is converted from base 2 twice",
    "lse-negative": "lse has the wrong sign",
    "lse-ln-2-too-large": "lse is ln 2 too large",
    "lse-ln-2-too-small": "lse is ln 2 too small",
    "lse-rounded": "lse is rounded to a smaller dtype",
    "lse-layout": "lse has another layout in memory",
    "lse-without-maximum": "the maximum is not added to lse",
    "lse-is-maximum": "lse is the row's maximum",
    "max-base-2": "the maximum is in base 2",
    "max-converted-twice": "the maximum is converted from base 2 once too often",
    "max-before-scale": "the maximum is that before the scale",
    "max-is-lse": "the maximum is lse",
    "weights-not-divided": "the weights are not divided by the row's sum",
    "weights-not-shifted": "the weights are exp(score)",
    "weights-are-scores": "the weights are the scores",
    "weights-are-logarithms": "the weights are their logarithms",
    "weights-without-sink": "the weights are divided by the row's sum without its sink",
    "weights-averaged-over-heads": "the weights are the mean over all heads",
    "weights-transposed": "the weights are transposed",
    # backward passes
    "gradient-scale-missing": "softmax_scale is missing in a gradient",
    "gradient-scale-applied-twice": "softmax_scale is applied twice to a gradient",
    "gradient-averaged-over-group": "a gradient is the mean over the query heads of a group, not their sum",
    "bias-path-missing": "dq lacks what comes through a bias that is made of q",
    "gradient-sign-flipped": "a gradient has the wrong sign",
    "gradient-ln-2-too-much": "a gradient has a factor of ln 2 too much",
    "gradient-ln-2-missing": "a factor of ln 2 is missing in a gradient",
    "gradient-scaled": "a gradient is off by a factor",
    "gradients-swapped": "a gradient holds another one",
    "d-missing": "D is missing in dS",
    "d-added": "D is added in dS",
    "d-of-next-head": "D is that of the next head",
    "d-of-previous-head": "D is that of the head before",
    "p-missing-in-ds": "P is missing in dS",
    "dv-without-denominator": "dv takes P without its denominator",
    "lse-missing-in-backward": "P is computed again without lse",
    "lse-taken-for-base-2": "lse is taken for one of base 2",
    "lse-taken-for-natural": "lse of base 2 is taken for a natural one",
    "lse-of-first-batch-entry": "lse of the first batch entry is taken for all",
    "lse-of-next-head": "lse is that of the next head",
    "sink-missing-in-lse": "P is computed again without the sink's share of lse",
    "softcap-slope-missing": "softcap's derivative is missing",
    "softcap-slope-of-capped-score": "softcap's derivative is that at the capped score",
    "softcap-slope-scaled": "softcap's derivative is off by a factor softcap",
    "softcap-slope-wrong": "softcap's derivative is another function",
    "score-mod-slope-missing": "score_mod's derivative is missing",
    "group-overwritten": "only the last query head of each group is kept in dk and dv",
    "group-first-head-only": "only the first query head of each group is kept in dk and dv",
    "group-summed-interleaved": "query head h is added to key head h % kv_heads in dk and dv",
    "maximum-not-detached": "a gradient goes through the maximum of a tile",
    "row-tiles-overwrite": "only the last tile of rows is kept in dk and dv",
    # from call to call, and memory
    "calls-differ": "equal calls return different results",
    "other-calls-matter": "a result depends on other calls",
    "adds-to-earlier-calls": "a result is added to that of earlier calls",
    "result-changes-later": "a result changes while others are computed",
    "offset-wraps": "offsets wrap at a power of two",
    "not-finite": "there are NaN or infinite elements",
    "all-zeros": "a result is all zeros",
    "zeros-there": "a result is 0 where it is wrong",
}


def is_known(fault: str) -> bool:
    """Return whether an identity is one of a fault, of one in P computed again, or of a precision profile."""
    return fault.removeprefix(RECOMPUTED) in all_faults() or fault.startswith(PRECISION)


def all_faults() -> dict[str, str]:
    """Return all identities with what is wrong: also those of guests."""
    return FAULTS | {name: said for faults in each("faults") for name, said in faults.items()}


def is_of_rounding(fault: str) -> bool:
    """Return whether a fault is a profile, or a rounding or factor that was fitted: the same in each call."""
    return fault.startswith(PRECISION) or fault in FITTED


def recomputed(faults: Iterable[str]) -> tuple[str, ...]:
    """Return the identities of faults with which P is computed again in the backward pass."""
    return tuple(f"{RECOMPUTED}{fault}" for fault in faults)
