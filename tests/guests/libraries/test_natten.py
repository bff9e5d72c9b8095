import sys
from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from fakes import HERE
from fakes.judged import judged

from pytest_attn import Machine, Neighborhood, Workload
from pytest_attn.backends.configured import joined
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.subject import RefusedError

W = Workload(40, batch=2, heads=4, kv_heads=2, head_dim=16, mask=Neighborhood((40,), (7,)))
LIBNATTEN = {"natten/libnatten.py": "'a shared library in fact'"}


def test_the_version_says_whether_it_has_kernels_of_its_own(installed):
    backend = installed("natten")
    assert backend.version() == "0.21.7 (without libnatten)"
    assert backend.workspace(W) > 0


def test_with_libnatten_it_needs_no_room_for_scores(installed):
    backend = installed("natten", **LIBNATTEN)
    assert backend.version() == "0.21.7"
    assert backend.workspace(W) == 0


def test_a_kernel_that_the_build_lacks_is_refused_in_its_own_words(installed):
    words = "Hopper FNA-2D forward kernel dispatch failed!\n invalid causal mask"
    source = (HERE / "natten.py").read_text() + f"\n\ndef na1d(*_, **__):\n    raise RuntimeError({words!r})\n"
    backend = installed("natten", **{"natten/functional.py": source})
    with pytest.raises(RefusedError, match="Hopper FNA-2D forward kernel dispatch failed! invalid causal mask"):
        judged(backend, W)
    assert backend.refusal_in(RuntimeError("CUDA error: an illegal memory access")) is None


class Schedule(Enum):
    """natten.types.KernelSchedule."""

    NonPersistent = 0
    WarpSpecializedPingpong = 2


def test_natten_lists_its_kernels_and_their_tiles(monkeypatch):
    def of(*configs):
        return lambda query, key, value: list(configs) if query.shape == (2, 8, 6, 4, 32) else []

    natten = SimpleNamespace(
        get_configs_for_cutlass_hopper_fna=of((((8, 8), (16, 8)), Schedule.NonPersistent)),
        get_configs_for_cutlass_fna=of(((8, 8), (8, 8)), ((16, 2), (64, 2))),
        get_bwd_configs_for_cutlass_fna=of(((8, 8), (8, 8))),
    )
    monkeypatch.setitem(sys.modules, "natten", natten)
    backend, machine = Registry()["natten"], Machine("cpu", "H200", (9, 0), "sm90", 150 << 30, 1, "2.11.0")
    workload = Workload(48, batch=2, heads=4, kv_heads=2, head_dim=32, mask=Neighborhood((8, 6), (3, 3)))
    forward = backend.configurations(workload, machine)
    assert [joined("natten", one) for one in forward] == [
        "natten@backend=hopper-fna:kernel_schedule=non:q_tile_shape=8x8:kv_tile_shape=16x8",
        "natten@backend=cutlass-fna:q_tile_shape=8x8:kv_tile_shape=8x8",
        "natten@backend=cutlass-fna:q_tile_shape=16x2:kv_tile_shape=64x2",
    ]
    assert [joined("natten", one) for one in backend.configurations(workload, machine, backward=True)] == [
        "natten@backend=cutlass-fna:backward_q_tile_shape=8x8:backward_kv_tile_shape=8x8"
    ]
    assert all(Registry()[joined(backend.name, one)].configuration == one for one in forward)
    full = workload.replace(mask=Neighborhood((8, 6), (8, 6)))
    assert backend.configurations(full, machine) == ()


def test_natten_gets_its_tiles(monkeypatch):
    given = {}
    functional = SimpleNamespace(na1d=lambda q, k, v, **options: given.update(options) or q)
    backend = Registry()["natten@backend=cutlass-fna:q_tile_shape=64:kv_tile_shape=128"]
    monkeypatch.setattr(type(backend), "source", SimpleNamespace(load=lambda: functional))
    workload = Workload(16, heads=2, head_dim=32, mask=Neighborhood((16,), (3,)))
    tensor = torch.zeros(1, 2, 16, 32)
    backend.prepare(SimpleNamespace(workload=workload))(tensor, tensor, tensor)
    assert (given["backend"], given["q_tile_shape"], given["kv_tile_shape"]) == ("cutlass-fna", (64,), (128,))
