"""What a kernel turns of torch for itself, it turns back, or is told to."""

import pytest
import torch
from judging import CAUSAL, causal, failure

import pytest_attn

SWITCHES = {
    "autocast on cpu": (lambda on: torch.set_autocast_enabled("cpu", on), lambda: torch.is_autocast_enabled("cpu")),
    "default dtype": (
        lambda on: torch.set_default_dtype(torch.float64 if on else torch.float32),
        lambda: torch.get_default_dtype() == torch.float64,
    ),
    "default device": (
        lambda on: torch.set_default_device("meta" if on else None),
        lambda: torch.get_default_device().type == "meta",
    ),
    "grad mode": (lambda on: torch.set_grad_enabled(not on), lambda: not torch.is_grad_enabled()),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_is_left_turned_is_named_and_turned_back(name):
    turn, is_on = SWITCHES[name]

    def leaves_it(q, k, v):
        out = causal(q, k, v)
        turn(True)
        return out

    try:
        assert f"the callable left torch's {name} at" in failure(leaves_it, CAUSAL, backward=True)
        assert not is_on()
    finally:
        turn(False)


@pytest.mark.parametrize("name", SWITCHES)
def test_a_kernel_may_turn_what_it_turns_back(name):
    turn, _ = SWITCHES[name]

    def turns_it_back(q, k, v):
        turn(True)
        turn(False)
        return causal(q, k, v)

    assert pytest_attn.check(turns_it_back, CAUSAL, backward=True, precision="torch_cpu", device="cpu").passed


def test_a_switch_is_turned_back_where_the_kernel_raises():
    def raises(q, k, v):
        torch.set_default_dtype(torch.float64)
        raise KeyError("q")

    with pytest.raises(KeyError):
        pytest_attn.check(raises, CAUSAL, device="cpu")
    assert torch.get_default_dtype() == torch.float32
