"""`pytest_attn.capture`: what a model really asks of its attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pytest_attn.models.call import AttentionCall
from pytest_attn.models.catching import catching
from pytest_attn.models.recording import Recorder

if TYPE_CHECKING:
    import torch


class NotReadError(ValueError):
    """A call was caught that no workload can say."""


def capture(
    step: Callable[[], Any],
    model: torch.nn.Module | None = None,
    functions: Iterable[Callable[..., Any] | str] = (),
) -> list[AttentionCall]:
    """Run `step` once, and copy the attention calls that it makes.

    Each call holds its own copies of its tensors; they take as much memory as the model's activations of q, k, v and out.

    Args:
        step: a function without arguments. Where it runs a backward pass, each call has its gradients.
        model: names the calling modules; without it, names begin at the outermost module that runs.
        functions: attention of your own: functions of (q, k, v, ...), by themselves or as "package.module.function";
            tensors (batch, heads, rows, dim).

    Returns:
        The calls, in the order in which they are made.

    Raises:
        NotReadError: no workload can say a call.
        DropoutError: a call drops probabilities.
    """
    calls: list[AttentionCall] = []
    recorder = Recorder(lambda call: None)
    recorder.made = calls.append
    with catching(recorder, model, functions):
        step()
    recorder.finish()
    if recorder.unread_calls:
        module, function, reason = recorder.unread_calls[0]
        raise NotReadError(f"{module or 'a call'}: {function} is not read: {reason}")
    return calls
