"""torch.distributed.tensor.experimental.context_parallel: a ring around SDPA's kernels; its Flex form gathers all keys."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytest_attn.backends.capabilities import ANY_SIZE
from pytest_attn.backends.contexts import within
from pytest_attn.backends.defects import KnownDefect
from pytest_attn.backends.flex import BLOCK, block_mask_of
from pytest_attn.backends.library import Library
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.precision import Precision, uncompiled_flex_precision
from pytest_attn.backends.sdpa import Flash
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.guests.ranks.over_ranks import (
    BALANCED_RING_OF_CUTLASS,
    CUDNN_NAN_OF_A_RANK,
    Place,
    RankBackend,
    has_half_tile,
)
from pytest_attn.guests.ranks.sharding import Sharding
from pytest_attn.workloads.inputs import Inputs
from pytest_attn.workloads.workload import Workload

_MODULE = "torch.distributed.tensor.experimental._attention"
_TORCH = Library(("torch",), "torch.distributed.tensor.experimental", "pip install torch")
#: SDPA's kernels by the words of the option `kernel`
_KERNELS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}


class _OfTorch(RankBackend):
    """The base of both forms. Head-tail shards are the library's load balance, contiguous ones its absence."""

    source = _TORCH
    shards = ("contiguous", "head-tail")

    def broken_because(self) -> str | None:
        """Nothing: torch is there."""
        return None


class TorchCp(_OfTorch):
    """F.scaled_dot_product_attention within context_parallel(), which rotates keys and values between the ranks.

    rotate: how, as `set_rotate_method` has it. kernel: which of SDPA's kernels, by default its own choice.
    """

    name = "torch_cp"
    precision = "sdpa"
    needs = "CUDA, sm80 to sm121, ranks"
    choices = MappingProxyType({"rotate": ("allgather", "alltoall"), "kernel": tuple(_KERNELS)})
    known_defects = (CUDNN_NAN_OF_A_RANK, BALANCED_RING_OF_CUTLASS)
    capabilities = Flash.capabilities

    def defects_over(self, sharding: Sharding, machine: Machine, backward: bool) -> list[KnownDefect]:
        kernel, found = self.configuration.get("kernel"), super().defects_over(sharding, machine, backward)
        is_of_cudnn = kernel in (None, "cudnn") and has_half_tile(sharding)
        is_of_cutlass = kernel == "efficient" and sharding.shard == "head-tail"
        shown = [CUDNN_NAN_OF_A_RANK] * is_of_cudnn + [BALANCED_RING_OF_CUTLASS] * is_of_cutlass
        return [defect for defect in found if defect in shown]

    def refused_over(self, sharding: Sharding, machine: Machine, backward: bool) -> list[str]:
        w = sharding.workload
        reasons = []
        if sharding.shard == "head-tail" and w.mask is None:
            reasons.append("load balancing requires is_causal=True; shards must be contiguous")
        if w.q_len != w.kv_len:
            reasons.append("takes q_len == kv_len only")
        if w.group > 1 and self.configuration.get("kernel") == "efficient":
            reasons.append("has no grouped-query attention (GQA) in the kernel efficient")
        return reasons

    def prepare_on_rank(self, inputs: Inputs, sharding: Sharding, place: Place, backward: bool = False) -> AttentionFn:
        """Call SDPA in the context that patches it, in both directions."""
        return within(partial(self._parallel, sharding, place), partial(_sdpa, sharding.workload))

    @contextmanager
    def _parallel(self, sharding: Sharding, place: Place) -> Iterator[None]:
        """Enter context_parallel; its options are globals, which come back."""
        api = import_module(_MODULE)
        kernel = self.configuration.get("kernel")
        kernels = [getattr(SDPBackend, name) for word, name in _KERNELS.items() if kernel in (None, word)]
        positions = torch.arange(sharding.workload.q_len, device=place.device)
        rotate, balances = str(self.configuration.get("rotate", "allgather")), sharding.shard == "head-tail"
        with (
            _options(api, rotate, balances),
            sdpa_kernel(kernels),
            api.context_parallel(place.mesh, buffers=[positions], buffer_seq_dims=[0]),
        ):
            theirs, ours = positions.tolist(), sharding.rows[place.rank].tolist()
            if theirs != ours:  # the library would have cut other rows for this rank than those that it is handed
                raise RuntimeError(
                    f"context_parallel holds rows {theirs[:4]}... on this rank; the test's shard has {ours[:4]}..."
                )
            yield


class TorchCpFlex(_OfTorch):
    """flex_attention in a module that parallelize_module has given the plan _ContextParallel, with its part of the mask."""

    name = "torch_cp_flex"
    needs = "torch >= 2.10, ranks; a GPU for gradients"
    capabilities = replace(
        ANY_SIZE, masks=frozenset(("any",)), features=frozenset(("scale", "grouped heads", "padded", "backward"))
    )

    def unavailable_because(self, machine: Machine) -> str | None:
        if machine.torch_release < (2, 10):
            return f"needs torch 2.10, this is {machine.torch_version}"
        return None

    def precision_on(self, kind: str) -> str | Precision:
        """On a CPU flex_attention is not compiled here: a compilation for each shape takes longer than the rest."""
        return uncompiled_flex_precision(torch.__version__) if kind == "cpu" else super().precision_on(kind)

    def refused_over(self, sharding: Sharding, machine: Machine, backward: bool) -> list[str]:
        """Refuse lengths without whole blocks on each rank, as torch does, and what flex_attention refuses."""
        w, blocks = sharding.workload, sharding.ranks * BLOCK
        reasons = []
        if w.q_len % blocks or w.kv_len % blocks:
            reasons.append(f"needs q_len and kv_len that are multiples of {blocks}, {sharding.ranks} ranks times a block")
        if sharding.shard == "head-tail" and w.q_len != w.kv_len:
            reasons.append("orders keys as queries under load balance: takes q_len == kv_len only")
        if machine.kind == "cpu" and backward:
            reasons.append("flex_attention does not support backward on CPU")
        return reasons

    def prepare_on_rank(self, inputs: Inputs, sharding: Sharding, place: Place, backward: bool = False) -> AttentionFn:
        from torch.distributed.tensor.parallel import parallelize_module
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        api, w = import_module(_MODULE), sharding.workload
        balancer = None
        if sharding.shard == "head-tail":
            balancer = api._HeadTailLoadBalancer(w.q_len, place.ranks, place.device)
        whole = block_mask_of(inputs, BLOCK, None)
        if whole is None:
            whole = create_block_mask(lambda b, h, q, kv: q >= 0, None, None, w.q_len, w.kv_len, device=str(place.device))
        is_cpu = place.device.type == "cpu"
        with torch.compiler.set_stance("force_eager") if is_cpu else nullcontext():  # it compiles create_block_mask
            (mask,) = api._context_parallel_shard(place.mesh, [whole], [2], balancer)
        flex = flex_attention if is_cpu else torch.compile(flex_attention, dynamic=False)

        class Attention(torch.nn.Module):
            """A stand-in for a model's attention module."""

            def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = flex(q, k, v, None, mask, w.scale, w.group > 1)
                return out

        plan = api._ContextParallel(seq_dim=2, attention_type=api._ContextParallel.AttentionType.FLEX)
        module: AttentionFn = parallelize_module(Attention(), place.mesh, plan)
        return module


def _sdpa(w: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    grouped: dict[str, Any] = {"enable_gqa": True} if w.group > 1 else {}
    return F.scaled_dot_product_attention(q, k, v, is_causal=w.mask is not None, scale=w.scale, **grouped)


@contextmanager
def _options(api: ModuleType, rotate: str, balances: bool) -> Iterator[None]:
    options = api._cp_options
    before = options.rotate_method, options.enable_load_balance
    try:
        api.set_rotate_method(rotate)
        options.enable_load_balance = balances
        yield
    finally:
        options.rotate_method, options.enable_load_balance = before
