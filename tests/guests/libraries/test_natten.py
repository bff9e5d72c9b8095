import pytest
from fakes import HERE
from fakes.judged import judged

from pytest_attn import Neighborhood, Workload
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
