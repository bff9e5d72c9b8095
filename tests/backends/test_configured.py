"""Configurations: their names, how the registry reads them back, and what each backend declares."""

import shlex
from types import SimpleNamespace

import pytest
import torch
from fakes.judged import H200, judged

from pytest_attn import Machine, Workload
from pytest_attn.backends.configured import expanded, joined, label_of, options_of, split
from pytest_attn.backends.registry import Registry

CPU_MACHINE = Machine("cpu", "CPU", None, "cpu", 16 << 30, 1, "2.13.0+cpu")
W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)


@pytest.mark.parametrize(
    "options",
    [
        {"BLOCK_M": 64, "BLOCK_N": 32},
        {"USE_TMA": True, "pack": False},
        {"q_tile_shape": (8, 16), "kv_tile_shape": (8, 8, 4)},
        {"backend": "cutlass-fna", "schedule": "pp", "share": 0.5, "offset": -3},
    ],
    ids=label_of,
)
def test_a_name_is_read_back_as_the_same_options(options):
    name = joined("mine+graph", options)
    assert shlex.quote(name) == name
    plain, label = split(name)
    assert (plain, options_of(label)) == ("mine+graph", options)
    assert [type(value) for value in options_of(label).values()] == [type(value) for value in options.values()]


@pytest.mark.parametrize(
    "name", ["sdpa", "flex+max_autotune", "hub:org/repo@v1", "hub:org/repo@a=1", "x@", "x@a", "x@a=1,b=2"]
)
def test_other_names_have_no_configuration(name):
    assert split(name) == (name, "")


@pytest.mark.parametrize("value", ["64", "True", "8x8", "a b", "a+b", "", "a:b", (64,), None, [1], float("inf"), "0.5"])
def test_a_value_that_a_name_cannot_carry_is_refused(value):
    with pytest.raises(ValueError, match="cannot be part of a backend's name; expected an int"):
        label_of({"option": value})


class TritonConfig:
    """triton.Config, as far as it is looked at."""

    def __init__(self, kwargs, num_warps=4, num_stages=3):
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


def test_a_grid_a_list_and_triton_s_configurations_are_taken():
    grid = [{"A": 1, "B": 3}, {"A": 1, "B": 4}, {"A": 2, "B": 3}, {"A": 2, "B": 4}]
    assert expanded({"A": (1, 2), "B": [3, 4]}) == grid
    assert expanded([{"A": 1}, {}, {"A": 1}, {"A": 2}]) == [{"A": 1}, {"A": 2}]
    assert expanded([TritonConfig({"BLOCK": 64}, num_warps=8)]) == [{"BLOCK": 64, "num_warps": 8, "num_stages": 3}]
    assert expanded(()) == []


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"A": "12"}, "A needs a list of values, got '12'"),
        ({"A": 1}, "A needs a list of values, got 1"),
        ("A=1", "must be {option: values} or a list of {option: value}, got 'A=1'"),
        ([3], "must be {option: value} or a triton.Config, got 3"),
        ([{"A": "x y"}], "option A='x y' cannot be part of a backend's name"),
    ],
)
def test_what_is_no_list_of_options_is_refused_at_registration(declared, words):
    with pytest.raises(ValueError, match="backend 'mine'") as raised:
        Registry().add_function("mine", lambda q, k, v, workload: q, configurations=declared)
    assert words in str(raised.value)


# -- the registry --------------------------------------------------------------------------------------------------------


@pytest.fixture
def registry():
    made = Registry()
    made.seen = []

    def mine(q, k, v, workload, BLOCK=0, warps=4):
        made.seen.append((BLOCK, warps))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    made.add_function("mine", mine, configurations={"BLOCK": [16, 32], "warps": [4]})
    made.add_function("any", mine, layout="bhsd", configurations=lambda workload: [{"BLOCK": workload.q_len}])
    return made


def test_a_configuration_is_a_backend_of_its_own(registry):
    backend = registry["mine@BLOCK=32:warps=4"]
    assert (backend.name, backend.configuration) == ("mine@BLOCK=32:warps=4", {"BLOCK": 32, "warps": 4})
    assert registry["mine"].configuration == {}
    assert registry["mine@BLOCK=16+graph"].name == "mine@BLOCK=16+graph"
    assert "mine@BLOCK=32:warps=4" not in registry.names
    assert judged(backend, W).passed
    assert set(registry.seen) == {(32, 4)}


def test_configurations_may_depend_on_the_workload(registry):
    assert list(registry["any"].configurations(W, CPU_MACHINE)) == [{"BLOCK": 48}]
    assert registry["any@whatever=1"].configuration == {"whatever": 1}
    assert registry["mine"].configurations(W, CPU_MACHINE) == [{"BLOCK": 16, "warps": 4}, {"BLOCK": 32, "warps": 4}]
    assert (registry["mine"].tunable, registry["any"].tunable) == ({"BLOCK", "warps"}, None)
    registry.add_function("plain", dict)
    assert (registry["plain"].tunable, list(registry["plain"].configurations(W, CPU_MACHINE))) == (frozenset(), [])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mine@BLOKC=32", "backend 'mine' has no option 'BLOKC'; known: BLOCK, warps"),
        ("sdpa@BLOCK=32", "backend 'sdpa' has no configurations, got BLOCK=32"),
        ("nobody@BLOCK=32", "unknown backend 'nobody'"),
        ("mine@BLOCK", "unknown backend 'mine@BLOCK'"),
        ("mine@BLOCK=32+fast", "unknown variant 'fast' of backend 'mine'"),
    ],
)
def test_a_configuration_that_is_none_is_refused(registry, name, words):
    with pytest.raises(ValueError, match=words.replace("+", r"\+")):
        registry.require(name)
    assert not registry.is_known(name)


# -- what backends declare -----------------------------------------------------------------------------------------------


def test_flex_declares_tiles_for_gpus():
    flex, decode = Registry()["flex"], Registry()["flex_decode"]
    assert flex.configurations(W, CPU_MACHINE) == ()
    forward, backward = flex.configurations(W, H200), flex.configurations(W, H200, backward=True)
    assert all(set(one) == {"BLOCK_M", "BLOCK_N", "num_warps", "num_stages"} for one in forward)
    assert all(128 % one["BLOCK_M"] == 0 and 128 % one["BLOCK_N"] == 0 for one in forward)
    for one in backward:
        assert all(name.startswith("bwd_") for name in one)
        assert one["bwd_BLOCK_N1"] % one["bwd_BLOCK_M1"] == 0
        assert one["bwd_BLOCK_M2"] % one["bwd_BLOCK_N2"] == 0
    assert all("BLOCK_M" not in one for one in decode.configurations(W, H200))
    for backend in (flex, decode):
        for one in [*backend.configurations(W, H200), *backend.configurations(W, H200, backward=True)]:
            assert Registry()[joined(backend.name, one)].configuration == one
    assert Registry()["flex_flash"].tunable == frozenset()


def test_flex_hands_its_options_to_torch(monkeypatch):
    from pytest_attn.backends import flex

    given = []
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    for name in ("score_mod_of", "block_mask_of"):
        monkeypatch.setattr(flex, name, lambda *of: None)
    called = "torch.nn.attention.flex_attention.flex_attention"
    monkeypatch.setattr(called, lambda *tensors, kernel_options: given.append(kernel_options))
    monkeypatch.setattr(flex, "compile_kernel", lambda kernel, max_autotune: kernel)
    inputs = SimpleNamespace(workload=W, device=torch.device("cuda"), sinks=None)
    for name in ("flex@BLOCK_M=64:num_warps=8", "flex"):
        Registry()[name].prepare(inputs)(None, None, None)
    assert given == [{"BACKEND": "TRITON", "BLOCK_M": 64, "num_warps": 8}, {"BACKEND": "TRITON"}]


def test_flex_refuses_options_on_a_cpu_and_tiles_that_do_not_fit():
    backend = Registry()["flex@BLOCK_M=64"]
    assert backend.unsupported_because(W, CPU_MACHINE) == ["takes no kernel options on a CPU"]
    error = RuntimeError("No valid triton configs. OutOfMemoryError: out of resource: triton_tem Required: 264192\nReducing")
    assert backend.refusal_in(error) == "does not fit: out of resource: triton_tem Required: 264192"
    assert backend.refusal_in(RuntimeError("illegal memory access")) is None
    assert Registry()["flex"].refusal_in(error) is None
