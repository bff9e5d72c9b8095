"""The attention functions of transformers, caught where a model fetches them, whatever implementation it is set to.

To replace them, a model is switched to a name of ours that is registered in both interfaces: of attention and of masks. A name
that is missing from the second gets no mask at all, without a word (transformers 5.23, `_preprocess_mask_arguments`).
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from pytest_attn.backends.attention_args import AttentionFunction
from pytest_attn.backends.libraries.transformers import function_called, read_call
from pytest_attn.models.exact import exact_attention
from pytest_attn.models.recognition import to_inputs

if TYPE_CHECKING:
    import torch

#: what a model is switched to while its attention is replaced
NAME = "pytest_attn"


@contextmanager
def transformers_caught(
    wrap: Callable[[AttentionFunction, Callable[..., Any]], Callable[..., Any]], model: torch.nn.Module | None, replaces: bool
) -> Iterator[None]:
    """Wrap each attention function that a model of transformers fetches; nothing where transformers is not imported."""
    modeling = sys.modules.get("transformers.modeling_utils")
    interface = getattr(modeling, "AttentionInterface", None)
    fetch = getattr(interface, "get_interface", None)
    if interface is None or fetch is None:
        yield
        return

    @functools.wraps(fetch)
    def fetched(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        original = fetch(self, attn_implementation, default)
        return wrap(function_called(str(attn_implementation)), original)

    with ExitStack() as stack:
        if replaces and model is not None:
            stack.enter_context(_switched(model, interface))
        interface.get_interface = fetched
        stack.callback(setattr, interface, "get_interface", fetch)
        yield


def is_of_transformers(model: torch.nn.Module | None) -> bool:
    """Whether a model has parts of transformers, which say what masks they want."""
    return model is not None and bool(_configs(model))


@contextmanager
def _switched(model: torch.nn.Module, interface: Any) -> Iterator[None]:
    """Switch every part of the model to our implementation, which builds all masks in full; then back."""
    masking_utils: Any = importlib.import_module("transformers.masking_utils")
    masks = masking_utils.AttentionMaskInterface._global_mapping
    functions = interface._global_mapping
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    try:
        masks[NAME] = functools.partial(_full_mask, masking_utils.sdpa_mask)
        functions[NAME] = _exact_forward
        for config, _ in before:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name
        masks.pop(NAME, None)
        functions.pop(NAME, None)


def _configs(model: torch.nn.Module) -> list[Any]:
    """Return the configurations of the model's parts, and those within them, each once."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if "_attn_implementation_internal" not in getattr(config, "__dict__", {}) or id(config) in found:
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", None) or ():
            add(getattr(config, name, None))

    for part in model.modules():
        add(getattr(part, "config", None))
    return list(found.values())


def _full_mask(sdpa_mask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a mask as SDPA takes it, boolean, and never leave it out."""
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def _exact_forward(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Compute exact attention: what stands in where a call is not replaced."""
    given = {"module": module, "query": query, "key": key, "value": value, "attention_mask": attention_mask, **kwargs}
    arguments = read_call(NAME, given)
    return arguments.to_result(exact_attention(to_inputs(arguments)))
