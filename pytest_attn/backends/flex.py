"""torch.nn.attention.flex_attention, compiled: masks as mask_mod, every change of the score as score_mod."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from pytest_attn.backends.backend import Backend, needs_cuda
from pytest_attn.backends.capabilities import ANY_SIZE, FEATURES, Capabilities, refusals_of, refusals_without
from pytest_attn.backends.configured import Options, out_of_resources
from pytest_attn.backends.defects import FLASH4_DQ, KnownDefect
from pytest_attn.backends.library import FLASH4
from pytest_attn.backends.machine import Machine, release
from pytest_attn.backends.subject import AttentionFn, compilation_of
from pytest_attn.backends.variants import compile_kernel
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.masks import MaskMod, ScoreMod, Sequences
from pytest_attn.workloads.workload import Workload, is_interleaved, repeated

#: Rows and keys of one block of a block mask.
BLOCK = 128

_ALL_BUT_PAGES = dataclasses.replace(
    ANY_SIZE,
    masks=frozenset(("any",)),
    features=frozenset(FEATURES) - {"paged", "packed pages", "page layouts", "cached", "left-padded"},
)
#: More rows of one key head do not fit its tile: inductor finds "no choices" (seen with 256 and 508, torch 2.11).
_MOST_DECODE_ROWS = 128
#: BLOCK_M, BLOCK_N, num_stages, num_warps of the forward pass: inductor's own candidates (template_heuristics/triton.py,
#: torch 2.13) and narrower ones for large head dimensions. All divide the blocks of a mask.
_FORWARD = (
    *((128, 64, 3, 4), (128, 128, 3, 4), (128, 128, 2, 8), (64, 128, 3, 4), (64, 64, 3, 4)),
    *((128, 64, 3, 8), (128, 64, 2, 4), (128, 32, 3, 4), (64, 32, 3, 4), (32, 64, 3, 4)),
)
#: M, N, num_stages, num_warps of the backward pass, where (BLOCK_M1, BLOCK_N1, BLOCK_M2, BLOCK_N2) is (M, N, N, M).
#: N must be a multiple of M.
_BACKWARD = (
    *((64, 128, 3, 8), (64, 128, 3, 4), (64, 128, 1, 8), (64, 64, 3, 4), (64, 64, 2, 4), (64, 64, 1, 4)),
    *((32, 128, 3, 8), (32, 128, 3, 4), (32, 64, 3, 4), (32, 64, 1, 4), (32, 32, 3, 4), (16, 16, 1, 4)),
)
#: BLOCK_N, num_stages, num_warps of the decoding kernel
_DECODING = ((64, 3, 2), (32, 3, 2), (128, 3, 2), (64, 1, 4), (128, 1, 4))
_SHARED = ("num_stages", "num_warps")
_BACKWARD_TILES = ("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2", "bwd_num_stages", "bwd_num_warps")


class Flex(Backend):
    """flex_attention under torch.compile; `flex+max_autotune` tunes its tiles."""

    name, precision = "flex", "flash"
    variants: tuple[str, ...] = ("max_autotune",)
    launches = ("FlexAttention",)
    needs = "CUDA, XPU, or a CPU with a C++ compiler (forward only)"
    capabilities: Capabilities = _ALL_BUT_PAGES
    max_autotune = False
    tunable = frozenset(("BLOCK_M", "BLOCK_N", *_SHARED, *_BACKWARD_TILES))

    def configurations(self, workload: Workload, machine: Machine, backward: bool = False) -> Sequence[Options]:
        """Tiles, stages and warps (`kernel_options`) of the forward pass, or of the backward pass where there is one."""
        if machine.kind == "cpu":
            return ()
        if backward:
            return [dict(zip(_BACKWARD_TILES, (m, n, n, m, stages, warps), strict=True)) for m, n, stages, warps in _BACKWARD]
        return [dict(zip(("BLOCK_M", "BLOCK_N", *_SHARED), one, strict=True)) for one in _FORWARD]

    def refusal_in(self, error: Exception) -> str | None:
        """A configuration whose tiles do not fit the device is refused, not wrong."""
        return out_of_resources(error) if self.configuration else None

    def variant(self, name: str) -> Backend | None:
        """Compile once in another mode, not twice."""
        if name not in self.variants:
            return None
        tuned = type(self)()
        tuned.name, tuned.max_autotune, tuned.configuration = f"{self.name}+{name}", True, self.configuration
        return tuned

    def unavailable_because(self, machine: Machine) -> str | None:
        if machine.kind == "mps":
            return "is tested on CPU, CUDA and XPU only"
        compilers = (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")  # as inductor looks for one
        if machine.kind == "cpu" and not any(map(shutil.which, compilers)):
            return "needs a C++ compiler on a CPU; install g++ or name yours in CXX"
        return None

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        reasons = refusals_without(("paged", "cached", "left-padded"), workload)
        if machine.kind == "cpu":
            if backward:
                reasons.append("flex_attention does not support backward on CPU")
            if self.configuration:
                reasons.append("takes no kernel options on a CPU")
        elif workload.head_dim < 16 or workload.v_head_dim < 16:
            reasons.append("needs a head dimension of at least 16")
        return reasons

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Build the block mask; the kernel is compiled at its first call."""
        return self._compiled(inputs, "TRITON")

    def _compiled(self, inputs: Inputs, kernel_name: str, block_rows: int = BLOCK) -> AttentionFn:
        from torch.nn.attention.flex_attention import flex_attention

        kernel_options: Any = {**_kernel_named(kernel_name, inputs), **self.configuration} or None
        w = inputs.workload
        packing = Packing.of(inputs) if w.is_packed else None
        score_mod, block_mask = score_mod_of(inputs, packing), block_mask_of(inputs, block_rows, packing)
        scale, grouped = w.scale, w.group > 1

        def uncompiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return flex_attention(q, k, v, score_mod, block_mask, scale, grouped, kernel_options=kernel_options)

        kernel = compile_kernel(uncompiled, self.max_autotune)
        packed, sinks, interleaved = w.is_packed, inputs.sinks is not None, is_interleaved(w)
        if not packed and not sinks and not interleaved:
            return kernel

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if packed:  # outside the compiled region, as inductor's CPU template takes no view of a 3-D tensor
                q, k, v = (t.transpose(0, 1).unsqueeze(0).contiguous() for t in (q, k, v))
            if interleaved:
                k, v = repeated(k, w), repeated(v, w)
            if sinks:
                k, v = with_key_of_sink(k), with_key_of_sink(v)
            out: torch.Tensor = kernel(q, k, v)
            return out[0].transpose(0, 1) if packed else out

        call.compilation = compilation_of(kernel)  # type: ignore[attr-defined]
        return call


class FlexDecode(Flex):
    """flex_attention's split-KV decoding kernel, asked for by name where torch knows the option."""

    name = "flex_decode"
    variants = ()
    needs = "CUDA or XPU, fewer than 128 query rows"
    capabilities = dataclasses.replace(_ALL_BUT_PAGES, features=_ALL_BUT_PAGES.features - {"packed", "backward"})
    tunable = frozenset(("BLOCK_N", *_SHARED))

    def configurations(self, workload: Workload, machine: Machine, backward: bool = False) -> Sequence[Options]:
        return [dict(zip(("BLOCK_N", *_SHARED), one, strict=True)) for one in _DECODING]

    def unavailable_because(self, machine: Machine) -> str | None:
        return None if machine.kind in ("cuda", "xpu") else "is a Triton kernel: needs a GPU"

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        reasons = super().unsupported_because(workload, machine, backward)
        if backward:
            reasons.append("decoding has no backward pass")
        return reasons + _not_decoded_because(workload)

    def declared_refusals(self, workload: Workload, backward: bool = False) -> list[str]:
        return super().declared_refusals(workload, backward) + _not_decoded_because(workload)

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Name the kernel where torch takes the name; older releases choose it by themselves for so few rows."""
        return self._compiled(inputs, "TRITON_DECODE")


def _not_decoded_because(workload: Workload) -> list[str]:
    """State flex_attention's own rules for choosing its decoding kernel."""
    reasons = []
    if workload.q_len >= 128 or workload.is_packed:
        reasons.append("decodes fewer than 128 query rows")
    if workload.group & (workload.group - 1):
        reasons.append(f"needs a group size that is a power of two, not {workload.group}")
    if workload.q_len * workload.group > _MOST_DECODE_ROWS:
        reasons.append(f"finds no kernel for q_len * group = {workload.q_len * workload.group} rows")
    return reasons


#: what only compilers find out
_NO_OPERATION = "inductor puts no {!r} of a mask_mod or score_mod into this kernel"
_NO_STORE = "its compiler stores no {} index of a mask_mod as {}"


class FlexFlash(Flex):
    """flex_attention on flash-attn 4's kernels, compiled with BACKEND="FLASH"."""

    name = "flex_flash"
    variants = ()
    launches = ("FlashAttention-4",)
    needs = "CUDA, sm90 to sm110, torch 2.10, flash-attn-4"
    capabilities = dataclasses.replace(_ALL_BUT_PAGES, dtypes=("bfloat16", "float16"), head_dim=256, head_dim_step=8)
    kernels = FLASH4
    known_defects = (
        FLASH4_DQ,
        KnownDefect(
            issue="seen on an H200 with torch 2.11 and flash-attn-4 4.0.0b36, no report found",
            summary="wrong dq, dk and dv with ALiBi slopes and GQA",
            applies=lambda workload, machine: bool(workload.alibi) and workload.group > 1 and machine.capability == (9, 0),
            tensors=("dq", "dk", "dv"),
        ),
    )
    tunable = frozenset()

    def configurations(self, workload: Workload, machine: Machine, backward: bool = False) -> Sequence[Options]:
        """None: the tiles are flash-attn 4's own."""
        return ()

    def unavailable_because(self, machine: Machine) -> str | None:
        """Refuse where torch does not know the option, or flash-attn 4 or its block-sparse kernels are missing."""
        if machine.torch_release < (2, 10):
            return f"needs torch 2.10, this is {machine.torch_version}"
        return self.kernels.missing_because() or needs_cuda(machine, (9, 0), (11, 0))

    def broken_because(self) -> str | None:
        """Import flash-attn 4, which torch would do while it compiles."""
        return self.kernels.broken_because()

    def unsupported_because(self, workload: Workload, machine: Machine, backward: bool = False) -> list[str]:
        """Refuse what flash-attn 4's kernels do: other dtypes and dimensions, and masks without blocks of its tile size."""
        reasons = self.declared_refusals(workload, backward)
        reasons += [r for r in super().unsupported_because(workload, machine, backward) if r not in reasons]
        on_hopper = machine.capability is None or machine.capability < (10, 0)
        is_masked = workload.mask is not None or workload.kv_lens is not None
        if on_hopper and is_masked and max(workload.head_dim, workload.v_head_dim) > 128:
            dims = f"head_dim {workload.head_dim}, v_head_dim {workload.v_head_dim}"
            reasons.append(f"has blocks for masks up to head_dim 128 on sm90, not {dims}")
        return reasons + refused_head_dims(workload, machine, backward)

    def declared_refusals(self, workload: Workload, backward: bool = False) -> list[str]:
        w, reasons = workload, super().declared_refusals(workload, backward)
        if reasons or release(torch.__version__) >= (2, 12):
            return reasons
        # what `refusal_in` would say of this file's mods after a second of compiling, as torch 2.11 does
        if w.sinks or (w.plain_mask is not None and w.plain_mask.kind == "neighborhood"):
            return [_NO_OPERATION.format("minimum")]
        return [_NO_STORE.format("Int64", "Int32")] if w.is_packed and w.mask is not None else []

    def refusal_in(self, error: Exception) -> str | None:
        """Some operations of a mask_mod or score_mod cannot be put into its kernel, which only the compiler finds out."""
        if unusable := re.search(r"flash attention cannot be used: ([^\n(]*)", str(error)):
            return f"its compiler says that {unusable[1].strip()[:1].lower()}{unusable[1].strip()[1:]}"
        missing = re.search(r"UNSUPPORTED CUTEDSL OPERATION: '(\w+)'", str(error))
        if missing:
            return _NO_OPERATION.format(missing[1])
        mixed = re.search(r"Type mismatch, store (\w+) .*element type (\w+)", str(error))
        return _NO_STORE.format(mixed[1], mixed[2]) if mixed else None

    def prepare(self, inputs: Inputs, backward: bool = False) -> AttentionFn:
        """Name the kernel; from sm100 on it works on two tiles of rows at a time, and so do its blocks."""
        on_blackwell = inputs.device.type == "cuda" and torch.cuda.get_device_capability(inputs.device) >= (10, 0)
        return self._compiled(inputs, "FLASH", 2 * BLOCK if on_blackwell else BLOCK)


def family_of(machine: Machine) -> int:
    """Return an architecture family: 8 for sm80 to sm89."""
    return machine.capability[0] if machine.capability else 9


def refused_head_dims(w: Workload, machine: Machine, backward: bool) -> list[str]:
    """Say for which head dimensions flash-attn 4 has no kernel there."""
    family, pair, dims = family_of(machine), (w.head_dim, w.v_head_dim), f"head_dim {w.head_dim}, v_head_dim {w.v_head_dim}"
    differ_on_hopper = backward and family == 9 and w.head_dim != w.v_head_dim
    is_beyond = family in (10, 11) and max(pair) > 128 and pair not in ((192, 128), (256, 256))
    no_kernel = f"has no backward kernel on sm90 for v_head_dim {w.v_head_dim}, not a multiple of 32"
    return refusals_of(
        {
            f"takes up to 128, 192 with 128, or 256 on sm{family}0, not {dims}": is_beyond,
            f"GQA backward needs equal dims, not {dims}": differ_on_hopper and w.group > 1,
            no_kernel: differ_on_hopper and w.v_head_dim % 32,
        }
    )


def _kernel_named(name: str, inputs: Inputs) -> dict[str, Any]:
    """Return the option that selects one of the two Triton kernels, in the words of this torch; a CPU has its own kernel."""
    if inputs.device.type == "cpu":
        return {}
    if release(torch.__version__) >= (2, 10):
        return {"BACKEND": name}
    return {"FORCE_USE_FLEX_ATTENTION": True} if name == "TRITON" else {}


# -- how a workload is said: its score_mod, its block mask, and sinks as one more key ----------------------------------------


def score_mod_of(inputs: Inputs, packing: Packing | None) -> ScoreMod | None:
    """Chain softcap, bias, ALiBi and the workload's own score_mod, in the workload's order; None where there is none."""
    w = inputs.workload
    sinks = inputs.sinks
    if w.softcap is None and inputs.bias is None and not w.alibi and w.score_mod is None and sinks is None:
        return None
    keys = inputs.k.shape[0] if w.is_packed else w.kv_len
    softcap, own, slopes = w.softcap, w.score_mod, inputs.alibi_slopes
    bias = None if inputs.bias is None else inputs.bias.expand(w.batch, w.heads, w.q_len, w.kv_len)
    ahead = packing.ahead if packing else w.kv_len - w.q_len if inputs.kv_lens is None else inputs.kv_lens - w.q_len

    def score_mod(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        raw_kv = kv
        if sinks is not None:
            kv = torch.clamp(kv, max=keys - 1)
        if packing is not None:
            b, _, q, kv = packing.within(q, kv)
        if bias is not None and w.bias_before_softcap:
            score = score + bias[b, h, q, kv]
        if softcap is not None:
            score = torch.tanh(score / softcap) * softcap
        if bias is not None and not w.bias_before_softcap:
            score = score + bias[b, h, q, kv]
        if slopes is not None:
            slope = slopes[b, h] if w.alibi == "batch" else slopes[h]
            score = score - slope * (q + (ahead if isinstance(ahead, int) else ahead[b]) - kv).abs()
        if own is not None:
            score = own(score, b, h, q, kv)
        return score if sinks is None else torch.where(raw_kv == keys, sinks[h].to(score.dtype), score)

    return score_mod


class Packing(NamedTuple):
    """Places of the tokens of packed sequences. ahead: by how many keys each sequence has more than queries."""

    sequence_q: torch.Tensor
    sequence_kv: torch.Tensor
    starts_q: torch.Tensor
    starts_kv: torch.Tensor
    ahead: torch.Tensor

    @classmethod
    def of(cls, inputs: Inputs) -> Packing:
        """Return that of packed inputs."""
        assert inputs.cu_seqlens is not None
        assert inputs.cu_seqlens_kv is not None
        starts_q, starts_kv = inputs.cu_seqlens.long(), inputs.cu_seqlens_kv.long()
        lengths_q, lengths_kv = starts_q.diff(), starts_kv.diff()
        sequences = torch.repeat_interleave(lengths_q), torch.repeat_interleave(lengths_kv)
        return cls(*sequences, starts_q, starts_kv, lengths_kv - lengths_q)

    def within(self, q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the sequence of a query, that of a key, and where each stands in its own."""
        mine, theirs = self.sequence_q[q], self.sequence_kv[kv]
        return mine, theirs, q - self.starts_q[mine], kv - self.starts_kv[theirs]


def block_mask_of(inputs: Inputs, block_rows: int, packing: Packing | None) -> Any:
    """Return the block mask of what is visible, with blocks of so many rows; None where every key is."""
    from torch.nn.attention.flex_attention import create_block_mask

    w = inputs.workload
    mask_mod = _packed_mask(inputs, packing) if packing else inputs.mask_mod()
    if mask_mod is None:
        return None
    keys = inputs.k.shape[0] if w.is_packed else w.kv_len
    if inputs.sinks is not None:
        mask_mod, keys = _showing_the_sink(mask_mod, keys), keys + 1
    per_batch = w.kv_lens is not None or not w.has_positional_mask
    batch = w.batch if per_batch and not w.is_packed else None
    heads = None if w.has_positional_mask else w.heads  # of positions alone: one block mask serves all
    rows = inputs.q.shape[0] if w.is_packed else w.q_len
    return create_block_mask(mask_mod, batch, heads, rows, keys, device=str(inputs.device), BLOCK_SIZE=(block_rows, BLOCK))


def _showing_the_sink(mask_mod: MaskMod, keys: int) -> MaskMod:
    return lambda b, h, q, kv: (kv == keys) | mask_mod(b, h, q, torch.clamp(kv, max=keys - 1))


def _packed_mask(inputs: Inputs, packing: Packing) -> MaskMod:
    """Tokens see their own sequence only, and there what the mask shows, in positions of the sequence."""
    w, inner = inputs.workload, None
    if w.plain_mask is not None:
        inner = w.plain_mask.bind(Sequences(w.batch, w.heads, 0, 0, inputs.device, kv_lens=packing.ahead))

    def same_sequence(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        mine, theirs, row, key = packing.within(q, kv)
        visible: torch.Tensor = mine == theirs
        return visible if inner is None else visible & inner(mine, h, row, key)

    return same_sequence


def with_key_of_sink(tensor: torch.Tensor) -> torch.Tensor:
    """Append a key of zeros, whose score the score_mod replaces by the sink's logit and whose value adds nothing."""
    return F.pad(tensor, (0, 0, 0, 1))
