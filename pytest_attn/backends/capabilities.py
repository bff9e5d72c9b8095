"""The reach of a library's interface, declared once: its refusals and its row of --attn-list."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pytest_attn.workloads.dtypes import DTYPES, short_dtype
from pytest_attn.workloads.fields import did_you_mean, suggests_fields
from pytest_attn.workloads.masks import capability_words
from pytest_attn.workloads.traits import traits_of
from pytest_attn.workloads.workload import Workload

#: Traits of workloads that an interface may be unable to say, in the order of the table, with the words of the refusal:
#: changes of the score, options of the softmax, layouts and results. "backward" is asked for beside the workload.
REFUSALS = {
    "softcap": "has no softcap",
    "bias": "has no additive bias",
    "alibi": "has no ALiBi",
    "sinks": "has no sinks",
    "score_mod": "has no score_mod",
    "scale": "does not support a custom scale",
    "grouped heads": "does not support grouped-query attention (GQA)",
    "packed": "does not support packed sequences",
    "padded": "does not support padded keys",
    "paged": "does not support a paged KV cache",
    "packed pages": "does not support packed queries over a paged KV cache",
    "page layouts": "takes contiguous pools (pages, size, kv_heads, head_dim) only",
    "cached": "does not support a cached prefix beside new keys",
    "left-padded": "does not support keys padded on the left",
    "backward": "has no backward pass",
    "interleaved heads": "does not support interleaved head groups (h % kv_heads)",
    "bias before softcap": "adds a bias after the softcap, not before",
    "sinks of another dtype": "takes sinks in {dtype} only",
    "bias of another dtype": "takes a bias in {dtype} only",
    "ALiBi per batch entry": "does not support ALiBi slopes per batch entry",
}
FEATURES = tuple(REFUSALS)
#: Which quantized inputs it takes: fp8 q, k and v, or k and v quantized beside another q, and of what one descale may be.
QUANTIZED = ("fp8", "kv_dtype", "tensor", "head", "token")
COLUMNS = ("dtypes", "head_dim", "masks", "takes")
_ALIGNMENTS = {"top-left": "causal", "bottom-right": "causal-bottom-right"}


@suggests_fields
@dataclass(frozen=True)
class Capabilities:
    """The limits of one backend's interface.

    Args:
        masks: words out of `capability_words` ("causal", "causal-bottom-right", "window", ...; "any": an arbitrary
            tensor or mask_mod); no mask at all is always taken. "top-left" and "bottom-right" stand for the first two.
        features: parts of FEATURES.
        dtypes: full names of the dtypes that it takes.
        head_dim: the largest; None for no limit.
        head_dim_step: what head_dim must be a multiple of.
        head_dims: the only ones that it takes, in place of a largest.
        v_head_dim: whether values may differ in it.
        square: a causal or windowed mask needs q_len == kv_len.
        quantized: parts of QUANTIZED.

    Raises ValueError for a word that there is not, TypeError for another field.
    """

    masks: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    head_dim: int | None = 256
    head_dim_step: int = 8
    head_dims: tuple[int, ...] | None = None
    v_head_dim: bool = False
    square: bool = False
    quantized: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for field in ("masks", "features", "dtypes", "quantized"):
            given = getattr(self, field)
            if isinstance(given, str):
                raise ValueError(f"Capabilities: {field} must be a set of words, got {given!r}; say {{{given!r}}}")
        object.__setattr__(self, "masks", frozenset(_ALIGNMENTS.get(word, word) for word in self.masks))
        known = {"masks": capability_words(), "features": FEATURES, "dtypes": tuple(DTYPES), "quantized": QUANTIZED}
        for field, words in known.items():
            for word in getattr(self, field):
                if word not in words:
                    meant = did_you_mean(str(word), words)
                    raise ValueError(f"Capabilities: {field} has no {word!r};{meant} expected some of {', '.join(words)}")

    def refusals(self, w: Workload, backward: bool = False) -> list[str]:
        """Return a reason for everything in the workload that the interface cannot say."""
        reasons = []
        if w.out_dtype not in self.dtypes:
            reasons.append(f"takes {_listed(self.dtypes)} only, not {w.out_dtype}")
        reasons += [dropout_refusal(w)] if w.dropout else []
        reasons += self.quantized_refusals(w)
        reasons += self._dimension_refusals(w)
        mask = w.plain_mask if "any" not in self.masks else None
        if mask is not None:
            is_aligned = w.q_lens == w.kv_lens if w.is_packed else w.q_len == w.kv_len and w.kv_lens is None
            words, called = mask.needs(is_aligned)
            if not words & self.masks:
                reasons.append(f"has no {called}")
            elif self.square and w.q_len != w.kv_len:
                reasons.append(f"takes a {called} for q_len == kv_len only")
        reasons += refusals_without([one for one in FEATURES if one not in self.features], w, backward)
        if mask is not None and mask.refused_beside_padding and w.kv_lens is not None:
            reasons.append(mask.refused_beside_padding)
        return reasons

    def quantized_refusals(self, w: Workload) -> list[str]:
        """Return why it does not take the workload's quantized tensors; empty where it does, and where there are none."""
        if not w.is_quantized:
            return []
        needed = "kv_dtype" if w.kv_dtype else "fp8"
        if needed not in self.quantized:
            tensors = f"{short_dtype(w.kv_dtype)} keys and values" if w.kv_dtype else "fp8 tensors"
            return [f"does not support {tensors}"]
        return [] if w.descales in self.quantized else [f"does not support descales per {w.descales}"]

    def _dimension_refusals(self, w: Workload) -> list[str]:
        found = f"head_dim {w.head_dim}"
        if w.v_head_dim != w.head_dim:
            found += f", v_head_dim {w.v_head_dim}"
            if not self.v_head_dim:
                return ["needs v_head_dim equal to head_dim"]
        dims = (w.head_dim, w.v_head_dim)
        if self.head_dims is not None:
            fits = all(dim in self.head_dims for dim in dims)
            return [] if fits else [f"takes head_dim {_listed(self.head_dims)} only, not {found}"]
        if any(dim % self.head_dim_step for dim in dims):
            return [f"needs a head_dim that is a multiple of {self.head_dim_step}, not {found}"]
        if self.head_dim is not None and max(dims) > self.head_dim:
            return [f"takes a head_dim of at most {self.head_dim}, not {found}"]
        return []

    def row(self) -> tuple[str, ...]:
        """Return the table's cells under COLUMNS, in the order of `capability_words` and FEATURES."""
        masks = ["all"] if "any" in self.masks else _in_order(self.masks, capability_words())
        masks += ["if q_len == kv_len"] if self.square else []
        features = _in_order(self.features, FEATURES)
        features += [f"quantized: {' '.join(_in_order(self.quantized, QUANTIZED))}"] if self.quantized else []
        dtypes = " ".join(DTYPES[dtype].short for dtype in self.dtypes)
        dims = "any" if self.head_dim is None else f"<={self.head_dim}"
        dims += f" %{self.head_dim_step}" if self.head_dim_step > 1 else ""
        dims = dims if self.head_dims is None else "/".join(map(str, self.head_dims))
        dims += ", v differs" if self.v_head_dim else ""
        return dtypes, dims, ", ".join(masks) or "none", ", ".join(features) or "-"


def refusals_of(reasons: Mapping[str, object]) -> list[str]:
    """Return the reasons that hold, in their order."""
    return [reason for reason, holds in reasons.items() if holds]


#: the dtypes and sizes of attention that is written in torch's operations, or compiled for each
ANY_SIZE = Capabilities(dtypes=("bfloat16", "float16", "float32"), head_dim=None, head_dim_step=1, v_head_dim=True)


def dropout_refusal(w: Workload) -> str:
    """Return why no backend takes dropout: which probabilities were kept, only a callable can return."""
    return f"cannot say which probabilities it dropped (dropout={w.dropout:g})"


def refusals_without(features: Iterable[str], w: Workload, backward: bool = False) -> list[str]:
    """Return in which words an interface without these features refuses a workload that needs them."""
    needed = traits_of(w) | ({"backward"} if backward else set())
    return [REFUSALS[feature].format(dtype=w.dtype) for feature in features if feature in needed]


def _in_order(words: frozenset[str], known: Iterable[str]) -> list[str]:
    return [word for word in known if word in words]


def _listed(values: tuple[object, ...]) -> str:
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
