"""A user's function as a backend: what it is given, what it refuses, under which configurations it runs."""

import pytest
import torch

from pytest_attn import Workload, draw_inputs
from pytest_attn.backends.backend import FunctionBackend
from pytest_attn.backends.machine import machine_of

CPU = machine_of(torch.device("cpu"))
WORKLOAD = Workload(16, heads=2, head_dim=32)
PACKED = Workload(q_lens=(3, 5), heads=2, head_dim=32)


def called(workload=WORKLOAD, returned=None, **declared):
    """Call a function that notes what it is given; return that, and what comes out."""
    given = {}

    def fn(q, k, v, **rest):
        given.update(q=q, k=k, v=v, **rest)
        return q if returned is None else returned

    inputs = draw_inputs(workload)
    backend = FunctionBackend("mine", fn, **declared)
    out = backend.prepare(inputs)(inputs.q, inputs.k, inputs.v)
    return inputs, given, out


def test_it_is_given_the_tensors_and_the_workload():
    inputs, given, out = called()
    assert given.keys() == {"q", "k", "v", "workload"}
    assert given["workload"] == WORKLOAD
    assert all(given[name] is getattr(inputs, name) for name in "qkv")
    assert out is inputs.q


def test_of_layout_bshd_it_is_given_rows_before_heads_and_returns_them():
    inputs, given, out = called(layout="bshd")
    assert given["k"].shape == (1, 16, 2, 32)
    assert torch.equal(given["k"].transpose(1, 2), inputs.k)
    assert torch.equal(out, inputs.q)


def test_packed_tensors_have_one_layout():
    inputs, given, out = called(PACKED, layout="bshd")
    assert given["k"] is inputs.k
    assert out is inputs.q


def test_what_is_no_tensor_is_left_to_the_check():
    assert called(layout="bshd", returned="a word")[2] == "a word"


def test_it_declares_what_was_said_when_it_was_registered():
    backend = FunctionBackend("mine", print, precision="eager")
    assert (backend.name, backend.precision, backend.version(), backend.library) == ("mine", "eager", "-", "own")
    assert backend.is_backend
    assert backend.layout == "bhsd", "it turns tensors itself"
    assert FunctionBackend("mine", print, layout="bshd").layout == "bhsd"
    assert backend.obstacle(WORKLOAD, CPU, True) is None


@pytest.mark.parametrize(
    ("returned", "reasons"), [([], []), (["a", "b"], ["a", "b"]), ("one text", ["one text"]), (("a",), ["a"])]
)
def test_it_refuses_in_the_words_of_its_author(returned, reasons):
    backend = FunctionBackend("mine", print, unsupported_because=lambda workload: returned)
    assert backend.unsupported_because(WORKLOAD, CPU) == reasons
    assert backend.obstacle(WORKLOAD, CPU, False) == ("; ".join(reasons) or None)


@pytest.mark.parametrize("returned", [True, None, 3])
def test_reasons_that_are_none_are_an_error_that_says_what_they_must_be(returned):
    backend = FunctionBackend("mine", print, unsupported_because=lambda workload: returned)
    with pytest.raises(TypeError, match=f"backend 'mine': unsupported_because returned {returned} for .*; expected a list of"):
        backend.unsupported_because(WORKLOAD, CPU)


def test_its_configuration_is_given_beside_the_workload():
    inputs, backend = draw_inputs(WORKLOAD), FunctionBackend("mine", lambda q, k, v, **rest: rest)
    backend.configuration = {"BLOCK": 64}
    assert backend.prepare(inputs)(inputs.q, inputs.k, inputs.v) == {"workload": WORKLOAD, "BLOCK": 64}


def test_tiles_that_do_not_fit_refuse_a_configuration_and_fail_the_default():
    backend = FunctionBackend("mine", print)
    too_large = RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 232448.")
    assert backend.refusal_in(too_large) is None
    backend.configuration = {"BLOCK": 256}
    assert backend.refusal_in(too_large)
    assert backend.refusal_in(RuntimeError("a fault")) is None
