import math
from importlib import import_module

import pytest
from fakes import HERE, faulty, install, uninstall
from fakes.judged import HOST, assert_passes, judged

from pytest_attn import Machine, Neighborhood, Window, Workload
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.subject import RefusedError

FILES = {"natten/functional.py": "natten.py", "natten/backends.py": "natten_backends.py"}
LIBNATTEN = {"natten/libnatten.py": "'a shared library in fact'"}


def layout(*shape, **mask):
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "batch": 2}
    changed = {name: mask.pop(name) for name in list(mask) if name in Workload.__dataclass_fields__}
    return Workload(math.prod(shape), mask=Neighborhood(shape, **mask), **sizes | changed)


@pytest.fixture
def natten(monkeypatch, tmp_path):
    def put(**changed):
        install(monkeypatch, tmp_path, {**FILES, **changed}, "natten", "0.21.7")
        import_module("natten.functional")  # what is imported needs no trial in another process
        return Registry()["natten"]

    yield put
    uninstall(FILES)


CLAIMED = [
    layout(40, kernel=(7,)),
    layout(41, kernel=(6,), stride=(4,), dilation=(2,), causal=(True,), scale=0.3),
    layout(41, kernel=(7,), stride=(2,), dilation=(3,)),
    layout(9, 8, kernel=(4, 3), stride=(2, 1), dilation=(1, 2), causal=(True, False), kv_heads=4),
    layout(9, 7, kernel=(5, 4), stride=(4, 3), dtype="float32"),
    layout(5, 6, 4, kernel=(3, 2, 2), stride=(2, 1, 1), dilation=(1, 3, 1), causal=(True, False, False), dtype="float16"),
    layout(5, 6, kernel=(5, 6)),
]


@pytest.mark.parametrize("workload", CLAIMED, ids=lambda workload: workload.id)
def test_it_says_the_workload_in_the_words_of_the_library(natten, workload):
    backend = natten()
    assert backend.unsupported_because(workload, HOST, backward=True) == []
    assert_passes(backend, workload, backward=True)


@pytest.mark.parametrize(
    ("said", "instead", "workload"),
    [
        ("len(group) - kernel)  # shifted", "len(group) - 1)  # shifted", CLAIMED[0]),
        ("block[stride // 2]", "block[0]", CLAIMED[2]),
        ("token % dilation == position % dilation", "token % 1 == 0", CLAIMED[2]),
        ("if token <= position", "", CLAIMED[1]),
        ("index * size + token", "max(index, token)", CLAIMED[3]),
        ("scale=scale, visible", "visible", CLAIMED[1]),
    ],
)
def test_another_meaning_in_the_library_is_found(natten, said, instead, workload):
    backend = natten(**{"natten/functional.py": faulty("natten.py", said, instead)})
    assert not judged(backend, workload).passed


def test_the_version_says_whether_it_has_kernels_of_its_own(natten):
    backend = natten()
    assert backend.unavailable_because(Machine("cuda:0", "H200", (9, 0), "sm90", 1 << 37, 1, "2.11.0")) is None
    assert backend.version() == "0.21.7 (without libnatten)"
    assert backend.workspace(CLAIMED[0]) > 0


def test_with_libnatten_it_needs_no_room_for_scores(natten):
    backend = natten(**LIBNATTEN)
    assert backend.version() == "0.21.7"
    assert backend.workspace(CLAIMED[0]) == 0


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (Workload(32), "takes neighborhood masks only"),
        (Workload(32, mask=Window(3, 3)), "has no sliding window"),
        (Workload(32, mask="causal"), "has no causal mask"),
        (layout(30, kernel=(3,), softcap=2.0), "has no softcap"),
        (layout(1, 30, kernel=(1, 3)), "takes kernels of at least 2 tokens in each dimension, not (1, 3)"),
        (layout(2, 2, 2, 3, kernel=(2, 2, 2, 2)), "takes token layouts of at most 3 dimensions, not 4"),
    ],
    ids=lambda value: value.id if isinstance(value, Workload) else "",
)
def test_it_refuses_what_the_library_has_no_words_for(natten, workload, reason):
    assert natten().unsupported_because(workload, HOST) == [reason]


@pytest.mark.parametrize(
    ("workload", "operation", "last"),
    [
        (layout(30, kernel=(3,), head_dim=24), "FNA", "we only allow 8 <= head_dim <= 512 and only powers of two, got 24."),
        (layout(30, kernel=(30,), causal=(True,)), "FMHA", "Flex FMHA doesn't support causal mask yet."),
    ],
    ids=["head_dim", "full causal window"],
)
def test_it_refuses_in_the_words_of_every_kernel(natten, workload, operation, last):
    kernels = [
        f"Can't run {name} {operation}; NATTEN was not built with libnatten." for name in ("Blackwell", "Hopper", "CUTLASS")
    ]
    assert natten().unsupported_because(workload, HOST) == [*kernels, last]


def test_one_kernel_that_can_run_is_enough(natten):
    source = (HERE / "natten_backends.py").read_text()
    able = source + "\n\ndef can_run_cutlass_fna(query, key, value, raise_error=False):\n    return True\n"
    assert natten(**{"natten/backends.py": able}).unsupported_because(layout(30, kernel=(3,), head_dim=24), HOST) == []


def test_a_kernel_that_the_build_lacks_is_refused_in_its_own_words(natten):
    words = "Hopper FNA-2D forward kernel dispatch failed!\n invalid causal mask"
    source = (HERE / "natten.py").read_text() + f"\n\ndef na1d(*_, **__):\n    raise RuntimeError({words!r})\n"
    backend = natten(**{"natten/functional.py": source})
    with pytest.raises(RefusedError, match="Hopper FNA-2D forward kernel dispatch failed! invalid causal mask"):
        judged(backend, CLAIMED[0])
    assert backend.refusal_in(RuntimeError("CUDA error: an illegal memory access")) is None
