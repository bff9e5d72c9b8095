"""The tensors of one case, as a test may look at them, and what its judgments depend on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, NoReturn

import torch

from pytest_attn.backends.dense import boolean_mask
from pytest_attn.cases.executor import Executor
from pytest_attn.correctness.contract import poisoned
from pytest_attn.correctness.reference import Reference
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.session.marks import AttentionMark
from pytest_attn.session.session import AttentionSession
from pytest_attn.workloads.distributions import DEFAULT_DISTRIBUTIONS
from pytest_attn.workloads.inputs import Descales, Inputs, PageLists, page_lists
from pytest_attn.workloads.kv_layout import SplitCache, fused_pool, split_cache, with_keys_moved
from pytest_attn.workloads.parameters import PARAMETERS, parameters_of
from pytest_attn.workloads.workload import Workload

#: a spec is checked once, whichever tests ask for it
_known_spec = lru_cache(maxsize=256)(CheckSpec)


class ReferenceTensors(NamedTuple):
    """Exact results in float64, in the test's layout; the gradients are None unless the marker says backward=True."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], *_: Any) -> NoReturn:
        """Refuse it where a tensor belongs, as in torch.allclose(out, attn.reference)."""
        said = f"{function.__name__} takes a tensor, and attn.reference is (out, lse, dq, dk, dv)"
        raise TypeError(f"{said}; say attn.reference.out, or attn.check(fn), which needs no tolerance")


class CaseTensors:
    """One workload on one device: inputs and exact results, each the test's own copy."""

    def __init__(self, workload: Workload, mark: AttentionMark, session: AttentionSession, executor: Executor) -> None:
        self._workload, self._mark, self._session, self._executor = workload, mark, session, executor
        self._looked_at: set[str] = set()
        self._read: set[str] = set()

    @property
    def workload(self) -> Workload:
        """The attention problem."""
        self._looked_at.add("workload")
        return self._workload

    @property
    def looked_at(self) -> frozenset[str]:
        """What of it the test has asked for, of all that it could compute or judge with by itself."""
        return frozenset((*self._looked_at, *(name for name in ("q", "k", "v", "reference") if name in vars(self))))

    @property
    def unread(self) -> tuple[str, ...]:
        """Tensors that its workload has and that nobody has asked for, nor for the workload, which says as much."""
        w = self._workload
        needed = {
            "bias": bool(w.bias),
            "sinks": bool(w.sinks),
            "kv_lens": bool(w.kv_lens) and not w.packs_keys,
            "page_table": w.kv_pages is not None,
            "mask": w.plain_mask is not None and not w.has_positional_mask and not w.is_packed,
        }
        is_told = "workload" in self._looked_at
        return () if is_told else tuple(name for name, is_needed in needed.items() if is_needed and name not in self._read)

    @property
    def device(self) -> torch.device:
        """The torch device."""
        return self._session.machines.device(self._mark.device)

    @cached_property
    def q(self) -> torch.Tensor:
        """Queries: (batch, heads, q_len, head_dim), or with rows and heads swapped ("bshd"), or packed ("thd")."""
        return self._in_layout(self._inputs.q)

    @cached_property
    def k(self) -> torch.Tensor:
        """Keys; a pool (pages, page size, kv_heads, head_dim), or as `Pages` says, where it has kv_pages."""
        return self._keys_and_values[0]

    @cached_property
    def v(self) -> torch.Tensor:
        """Values, laid out as the keys."""
        return self._keys_and_values[1]

    @property
    def mask(self) -> torch.Tensor | None:
        """The mask with padding, boolean, True = visible, (batch or 1, heads or 1, q_len, kv_len).

        None where all is visible, and for packed sequences, whose masks are per sequence.
        """
        self._read |= {"mask", "kv_lens"}
        mask = None if self._workload.is_packed else boolean_mask(self._inputs)
        if mask is None:
            return None
        whole = mask.expand(-1, -1, self._workload.q_len, self._workload.kv_len)
        return with_keys_moved(self._workload, whole, 3)

    def additive_mask(self, low: float = -math.inf) -> torch.Tensor | None:
        """Return the mask as numbers that are added to scores, 0 where it is visible and `low` elsewhere.

        Shaped as `mask`, in the dtype of out; None where `mask` is. low: as torch.finfo(dtype).min of transformers; -10,000
        hides nothing among scores of that size, which the invariant `magnitude` makes. Raises ValueError where the dtype has
        no such number.
        """
        mask, dtype = self.mask, self._inputs.dout.dtype
        if math.isfinite(low) and abs(low) > torch.finfo(dtype).max:
            raise ValueError(f"attn.additive_mask: {dtype} has no {low:g}; say torch.finfo({dtype}).min, or nothing for -inf")
        if mask is None:
            return None
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, low)

    @property
    def key_mask(self) -> torch.Tensor | None:
        """Where there is a key, boolean, (batch, kv_len), as they are handed over; None where nothing is padded.

        The attention_mask of transformers; torch's key_padding_mask is its opposite.
        """
        lengths = None if self._workload.is_packed else self.kv_lens
        if lengths is None:
            return None
        inside = torch.arange(self._workload.kv_len, device=lengths.device) < lengths[:, None]
        return with_keys_moved(self._workload, inside, 1)

    @property
    def bias(self) -> torch.Tensor | None:
        """The additive bias, broadcastable to (batch, heads, q_len, kv_len), in the dtype of out, or its own."""
        self._read.add("bias")
        return self._inputs.bias

    @property
    def sinks(self) -> torch.Tensor | None:
        """One logit per head, (heads,), in the workload's dtype."""
        self._read.add("sinks")
        return self._inputs.sinks

    @property
    def alibi_slopes(self) -> torch.Tensor | None:
        """ALiBi's slopes, (heads,), float32."""
        return self._inputs.alibi_slopes

    @property
    def cu_seqlens(self) -> torch.Tensor | None:
        """Boundaries of packed query sequences, (batch + 1,), int32."""
        return self._inputs.cu_seqlens

    @property
    def cu_seqlens_kv(self) -> torch.Tensor | None:
        """Boundaries of packed key sequences, (batch + 1,), int32."""
        return self._inputs.cu_seqlens_kv

    @property
    def kv_lens(self) -> torch.Tensor | None:
        """Numbers of keys of the batch entries, (batch,), int32, where padded or paged."""
        self._read.add("kv_lens")
        return self._inputs.kv_lens

    @property
    def page_table(self) -> torch.Tensor | None:
        """Page numbers of each batch entry, (batch, pages per sequence), int32."""
        self._read.add("page_table")
        return self._inputs.page_table

    def workspace(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a kernel to work in, filled with NaN, or with the largest number of an integer dtype."""
        return poisoned(tuple(shape), dtype, self.device)

    @property
    def descales(self) -> Descales | None:
        """What gives q, k and v their values, .q, .k and .v, float32; None where they are not quantized."""
        return self._inputs.descales

    # -- of pages, padding and a cached prefix --------------------------------------------------------------------------

    @property
    def kv_indptr(self) -> torch.Tensor | None:
        """Where each batch entry's pages begin and end in `kv_indices`, (batch + 1,), int32; as FlashInfer takes them."""
        return None if self._page_lists is None else self._page_lists.indptr

    @property
    def kv_indices(self) -> torch.Tensor | None:
        """The pages in use, batch entry after batch entry, int32; token slots where a page has one token."""
        return None if self._page_lists is None else self._page_lists.indices

    @property
    def kv_last_page_len(self) -> torch.Tensor | None:
        """Numbers of tokens in the last pages of the batch entries, (batch,), int32; 0 where it has no keys."""
        return None if self._page_lists is None else self._page_lists.last_page_len

    @property
    def kv_starts(self) -> torch.Tensor | None:
        """At which row of k each batch entry's keys begin, (batch,), int32, where they are padded on the left."""
        lengths = self.kv_lens
        return self._workload.kv_len - lengths if lengths is not None and self._workload.pad == "left" else None

    def fused(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the pool of which k and v, as the callable is given them, are views: (pages, 2, ...), without a copy."""
        return fused_pool(k, v)

    def split_cache(self, k: torch.Tensor | None = None, v: torch.Tensor | None = None, appends: bool = True) -> SplitCache:
        """Split keys and values into a cache that holds the prefix of a workload with `cached`, and the new ones.

        Called by the callable that is checked, with the k and v that it is given; without them, those of the case. Each call
        makes a new cache. What the kernel writes into it is checked after the call: the new keys and values bit for bit at
        their slots, and nothing else. appends: False for a kernel that writes nothing. Raises ValueError without `cached`.
        """
        self._read |= {"kv_lens", "page_table"}
        own = self._keys_and_values
        k, v = own[0] if k is None else k, own[1] if v is None else v
        return split_cache(self._inputs, k, v, self._spec.layout, appends)

    @cached_property
    def reference(self) -> ReferenceTensors:
        """Exact results for q, k and v; raises ValueError for a long workload, of which only samples are computed.

        So it does with dropout.
        """
        if self._workload.dropout:
            raise ValueError("with dropout, exact results depend on what a kernel has dropped; use attn.check, which knows it")
        reference = self._reference
        if reference.is_sampled:
            raise ValueError(f"{self._workload.id} is long: only sampled rows are exact; use attn.check, which compares these")
        tensors = {name: self._native(expected.value).clone() for name, expected in reference.tensors.items()}
        return ReferenceTensors(
            self._as_returned("out", self._spec.in_layout(tensors["out"])),
            self._as_returned("lse", tensors["lse"]),
            *(self._in_layout(tensors[name]) if name in tensors else None for name in ("dq", "dk", "dv")),
        )

    @cached_property
    def _spec(self) -> CheckSpec:
        """The spec, with the tensors that a test may close over and is asked for gradients of."""
        if not self._mark.parameters:
            return self._declared
        named = parameters_of(self._workload, self._mark.parameters)
        asked = {name: getattr(self._inputs, PARAMETERS[name].tensor) for name in named}
        return dataclasses.replace(self._declared, parameters=asked)

    def _read_parameters(self) -> dict[str, torch.Tensor]:
        """Return those tensors of the test that may be trained; none where it has read no tensor."""
        if "_inputs" not in self.__dict__:
            return {}
        return {name: getattr(self._inputs, PARAMETERS[name].tensor) for name in parameters_of(self._workload)}

    @property
    def _declared(self) -> CheckSpec:
        """The spec, but for tensors."""
        mark, settings = self._mark, self._session.settings
        asked = mark.backward, mark.inputs or DEFAULT_DISTRIBUTIONS, mark.declared, settings.seed, settings.limits, mark.leaves
        return _known_spec(self._workload, self.device, *asked)

    @property
    def _reference(self) -> Reference:
        with self._session.progress.during("computing exact attention", self._workload.id):
            return self._session.references.reference_of(self._spec)

    @cached_property
    def _inputs(self) -> Inputs:
        """The case's own copies: a test may change its tensors without spoiling those of other tests."""
        if self._mark.parameters:
            drawn = self._session.references.inputs_of(self._declared, self._declared.inputs[0])
            for name in parameters_of(self._workload, self._mark.parameters):  # before anybody is given them
                getattr(drawn, PARAMETERS[name].tensor).requires_grad_()
            return drawn
        shared = self._reference.called_with
        values = {f.name: getattr(shared, f.name) for f in dataclasses.fields(shared)}
        copied = torch.Tensor | Descales
        own: dict[str, Any] = {name: t.clone() for name, t in values.items() if isinstance(t, copied)}
        if self._workload.v_in_k:
            own["v"] = own["k"][..., : self._workload.v_head_dim]
        return dataclasses.replace(shared, **own)

    @cached_property
    def _page_lists(self) -> PageLists | None:
        self._read |= {"kv_lens", "page_table"}
        return page_lists(self._inputs) if self._workload.kv_pages else None

    @cached_property
    def _keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self._spec
        _, k, v = spec.handed(self._inputs)
        return spec.declared.given(k, spec.workload, is_kv=True), spec.declared.given(v, spec.workload, is_kv=True)

    def _native(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._workload.is_packed:
            return tensor
        return tensor[0].transpose(0, 1) if tensor.dim() == 4 else tensor[0]

    def _in_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        return spec.declared.given(spec.in_layout(tensor), spec.workload)

    def _as_returned(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a result of the judgment as the marker says that a callable returns it."""
        return self._spec.declared.declared(name, tensor, self._workload.is_packed)
