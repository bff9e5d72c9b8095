"""diffusers over ranks: Ulysses, a ring that gathers keys, or both, around its attention backends."""

from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch

from pytest_attn.backends.backend import needs_cuda
from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.defects import KnownDefect, is_half_tile
from pytest_attn.backends.layouts import in_bshd
from pytest_attn.backends.library import Library
from pytest_attn.backends.machine import Machine, release
from pytest_attn.backends.precision import Precision
from pytest_attn.backends.subject import AttentionFn
from pytest_attn.guests.ranks.over_ranks import CUDNN_NAN_OF_A_RANK, Place, RankBackend, heads_refusals
from pytest_attn.guests.ranks.sharding import Sharding
from pytest_attn.workloads.inputs import Inputs

#: its attention backends that know context parallelism, need no other library, and have a backward pass
_KERNELS = ("native", "_native_flash", "_native_cudnn", "flash")


class DiffusersCp(RankBackend):
    """dispatch_attention_fn(..., parallel_config=) as a model's attention calls it after enable_parallelism.

    ring: of how many ranks a ring is, 1 by default; the others share heads as Ulysses does. kernel: one of its attention
    backends; by default "native", which gives a ring no lse, so that a ring's is "_native_flash".
    """

    name = "diffusers_cp"
    source = Library(("diffusers",), "diffusers.models.attention_dispatch", "pip install diffusers")
    precision = "sdpa"
    needs = "diffusers >= 0.36, ranks; CUDA for a ring"
    choices = MappingProxyType({"ring": (), "kernel": _KERNELS})
    known_defects = (CUDNN_NAN_OF_A_RANK,)
    capabilities = Capabilities(features=frozenset(("scale", "backward")), dtypes=("bfloat16", "float16", "float32"))

    def unavailable_because(self, machine: Machine) -> str | None:
        """The library, in a release that has the configuration; CUDA where its kernel is one of CUDA."""
        if reason := self.source.missing_because():
            return reason
        if release(self.source.version()) < (0, 36):
            return f"needs diffusers 0.36, {self.source.version()} is installed"
        return None if self._kernel == "native" else needs_cuda(machine, *self.capability_range)

    def precision_on(self, kind: str) -> str | Precision:
        """Return that of the kernel which SDPA chooses on a CPU, where it rounds in another way."""
        return "torch_cpu" if kind == "cpu" else super().precision_on(kind)

    def defects_over(self, sharding: Sharding, machine: Machine, backward: bool) -> list[KnownDefect]:
        """Those of cuDNN's kernel, or of what torch chooses, where a ring's parts show them: Ulysses has whole sequences."""
        is_shown = self._kernel in ("native", "_native_cudnn") and is_half_tile(sharding.workload.q_len // self._ring)
        return super().defects_over(sharding, machine, backward) if is_shown else []

    def refused_over(self, sharding: Sharding, machine: Machine, backward: bool) -> list[str]:
        """Refuse degrees that do not make up the ranks, heads that they cannot share, and dtypes that a kernel has not."""
        w, ring = sharding.workload, self._ring
        if sharding.ranks == 1:
            return ["needs 2 ranks or more"]
        if sharding.ranks % ring:
            return [f"cannot split {sharding.ranks} ranks into rings of {ring}"]
        reasons = heads_refusals(w, sharding.ranks // ring)
        if ring > 1 and self._kernel == "native":
            reasons.append("its backend native does not support return_lse=True, which a ring needs")
        if self._kernel != "native" and w.dtype == "float32":
            reasons.append(f"its backend {self._kernel} takes bfloat16 and float16 only, not float32")
        if backward and w.q_len != w.kv_len and sharding.ranks > ring:
            reasons.append("its Ulysses has gradients for q_len == kv_len only")
        return reasons

    def prepare_on_rank(self, inputs: Inputs, sharding: Sharding, place: Place, backward: bool = False) -> AttentionFn:
        dispatch = self.source.load()
        config = _configuration(place.device, self._ring, place.ranks // self._ring, place.rank)
        backend = dispatch.AttentionBackendName(self._kernel)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return dispatch.dispatch_attention_fn(
                q, k, v, scale=sharding.workload.scale, backend=backend, parallel_config=config
            )

        return in_bshd(call)

    @property
    def _ring(self) -> int:
        ring = self.configuration.get("ring", 1)
        return ring if isinstance(ring, int) else 1

    @property
    def _kernel(self) -> str:
        return str(self.configuration.get("kernel", "native" if self._ring == 1 else "_native_flash"))


@cache
def _configuration(device: torch.device, ring: int, ulysses: int, rank: int) -> Any:
    """Return a ParallelConfig that is set up; made once, since each mesh makes process groups."""
    from torch.distributed.device_mesh import init_device_mesh

    library = import_module("diffusers.models._modeling_parallel")
    context = library.ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
    mesh = init_device_mesh(device.type, context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    config = library.ParallelConfig(context_parallel_config=context)
    config.setup(rank, ring * ulysses, device, mesh=mesh)
    return config
