"""What a configuration of transformers says of windows, and whether each layer's call asks for just that."""

from __future__ import annotations

import re
from typing import Any

from pytest_attn.models.capture import capture
from pytest_attn.models.token_model import TokenModel
from pytest_attn.workloads.masks import Causal, Window


def layer_windows(config: Any) -> list[int | None]:
    """Return the window of each layer in tokens, the token itself included; None of a layer that sees all before it."""
    layers = int(getattr(config, "num_hidden_layers", 0))
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def reach(config: Any) -> int | None:
    """Return how many tokens back the last row of the last layer sees through all windows; None where a layer sees all."""
    windows = layer_windows(config)
    return None if not windows or None in windows else sum(window - 1 for window in windows if window is not None)


def wrong_masks(of: TokenModel, config: Any) -> str:
    """Say which layer asks for another mask than the configuration names; "" where none does, or none is a causal window's."""
    windows, tokens = layer_windows(config), of.ids.shape[1]
    for call in capture(lambda: of.rows(of.ids), of.model):
        layer = re.search(r"layers\.(\d+)(?:\.|$)", call.module)
        mask = call.workload.mask
        if layer is None or int(layer[1]) >= len(windows) or not isinstance(mask, Causal | Window):
            continue
        window = windows[int(layer[1])]
        wanted = "Causal" if window is None or window >= tokens else f"a window of {window}"
        asked = "Causal" if isinstance(mask, Causal) or mask.left is None else f"a window of {mask.left + 1}"
        if isinstance(mask, Window) and mask.left is not None and mask.right not in (0, None):
            continue  # a window to both sides, which the configuration counts in another way
        if asked != wanted:
            return f"{call.module} asks for {asked} tokens".replace("Causal tokens", "all tokens before") + (
                f"; the configuration says {'all' if wanted == 'Causal' else wanted}"
            )
    return ""
