"""flash-attn 4 (CuTe DSL): dense, packed (varlen) and paged sequences; a new configuration is compiled at its first call."""

from __future__ import annotations

from typing import Any

from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.defects import FLASH4_DQ
from pytest_attn.backends.flash_attention import FLASH4, FlashAttention, refused_by_compiler
from pytest_attn.backends.machine import Machine
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload


class Flash4(FlashAttention):
    """flash_attn_func; flash_attn_varlen_func for packed sequences, documents, padding and pages.

    Its score_mod and mask_mod are CuTe functions, not torch's: see flex_flash for those.
    """

    name = "flash4"
    source = FLASH4
    paged_words = ("flash_attn_varlen_func", "seqused_k", "page_table")
    open_side = None
    variants = ("graph",)
    full_graph = False
    launches = ("FlashAttention-4",)
    needs = "CUDA, sm80 to sm121; backward and pages from sm90 on"
    capabilities = Capabilities(
        masks=frozenset(("bottom-right", "window", "documents")),
        features=frozenset(("softcap", "sinks", "scale", "grouped heads", "packed", "padded", "paged", "backward")),
        v_head_dim=True,
    )
    known_defects = (FLASH4_DQ,)

    def native_refusals(self, workload: Workload, machine: Machine, backward: bool) -> list[str]:
        """State what its asserts would say for this architecture."""
        family = machine.capability[0] if machine.capability else 9
        return [words for refused, words in _limits(workload, family, backward) if refused]

    def refusal_in(self, error: Exception) -> str | None:
        """Return the words of its compiler, which finds no layout for some head sizes."""
        return refused_by_compiler(error)

    def options(self, inputs: Inputs) -> dict[str, Any]:
        """Add the sinks."""
        return {**super().options(inputs), "learnable_sink": inputs.sinks}


def _limits(w: Workload, family: int, backward: bool) -> list[tuple[bool, str]]:
    """Return what may stand in the workload's way on an architecture family (8 for sm80 to sm89), and how to say it."""
    dims = f"head_dim {w.head_dim}, v_head_dim {w.v_head_dim}"
    ampere_kernel = family in (8, 12)
    return [
        (family in (10, 11) and not _fits_blackwell(w), f"takes up to 128, 192 with 128, or 256 on sm{family}0, not {dims}"),
        (ampere_kernel and bool(w.sinks), f"has no sinks on sm{family}0"),
        (ampere_kernel and w.kv_pages is not None, f"does not support a paged KV cache on sm{family}0"),
        (family == 9 and w.kv_pages is not None and _is_irregular(w), f"needs multiples of 16 with pages, not {dims}"),
        (backward and family == 8, "has no backward pass on sm80"),
        (
            backward and family == 9 and w.group > 1 and w.head_dim != w.v_head_dim,
            f"GQA backward needs equal dims, not {dims}",
        ),
        (backward and family in (10, 11) and w.head_dim == 256 and w.softcap is not None, "has no softcap backward for 256"),
        (backward and family in (10, 11) and w.head_dim == 256 and bool(w.sinks), "has no backward with sinks for 256"),
        (backward and family == 12 and w.softcap is not None, "has no backward with softcap on sm120"),
    ]


def _fits_blackwell(w: Workload) -> bool:
    dims = (w.head_dim, w.v_head_dim)
    return max(dims) <= 128 or dims in ((192, 128), (256, 256))


def _is_irregular(w: Workload) -> bool:
    return bool(w.head_dim % 16 or w.v_head_dim % 16)
