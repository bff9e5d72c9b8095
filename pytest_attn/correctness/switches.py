"""The switches of torch that a kernel may turn for itself, and has to turn back: whatever follows would run with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from pytest_attn.correctness.contract import ContractError


@contextmanager
def switches_kept(kind: str) -> Iterator[None]:
    """Put torch's switches back after a call on a kind of device. Raises ContractError where the callable left one turned."""
    switches = _switches(kind)
    before = {name: read() for name, (read, _) in switches.items()}
    turned: dict[str, Any] = {}
    try:
        yield
    finally:
        for name, (read, turn) in switches.items():
            if (now := read()) != before[name]:
                turned[name] = now
                turn(before[name])
    for name, now in turned.items():
        raise ContractError(f"the callable left torch's {name} at {now}; it was {before[name]}: restore what it changes")


def _switches(kind: str) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return how each is read, and turned."""
    import torch

    return {
        "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "default device": (torch.get_default_device, _set_default_device),
        **{
            f"autocast on {one}": (partial(torch.is_autocast_enabled, one), partial(torch.set_autocast_enabled, one))
            for one in {"cpu", kind}
        },
    }


def _set_default_device(device: Any) -> None:
    import torch

    torch.set_default_device(None if device.type == "cpu" else device)
