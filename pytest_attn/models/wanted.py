"""The masks that a model of transformers wants, whatever its implementation is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_attn.models.catching import Caught, catching
from pytest_attn.models.interfaces import is_of_transformers
from pytest_attn.models.recognition import DropoutError

if TYPE_CHECKING:
    import torch


class WantedMasks:
    """Notes what each call may see. masks: (batch, 1 or heads, q_len, kv_len), by module and number of its call."""

    def __init__(self) -> None:
        self.masks: dict[tuple[str, int], torch.Tensor] = {}
        self._numbers: Counter[str] = Counter()

    def handle(self, caught: Caught) -> Any:
        """Note the mask, and let the call be computed."""
        if caught.is_again:
            return caught.compute()
        self._numbers[caught.module] += 1
        mask = caught.arguments.get("attention_mask")
        if mask is not None and getattr(mask, "ndim", 0) == 4 and str(mask.dtype) == "torch.bool":
            keys = caught.tensors[1].shape[-2]
            self.masks[caught.module, self._numbers[caught.module]] = mask[..., :keys]
        return caught.compute()

    def unread(self, module: str, function: str, reason: str) -> None:
        """Count the call."""
        self._numbers[module] += 1


def wanted_masks(step: Callable[[], Any], model: torch.nn.Module | None) -> tuple[dict[tuple[str, int], torch.Tensor], str]:
    """Run a step with every mask built in full, and return these; "" or why there are none.

    A name that is registered with the functions of transformers but not with its masks gets none: the model asks for a mask
    all the same, and here it is.
    """
    if not is_of_transformers(model):
        return {}, ""
    wanted = WantedMasks()
    try:
        with catching(wanted, model, replaces=True):
            step()
    except DropoutError:
        raise
    except Exception as error:
        return (
            {},
            f"the masks that the model wants were not built ({type(error).__name__}: {error}); each call's own was taken",
        )
    return wanted.masks, ""
