"""Small models of transformers with random weights; a test that wants one is skipped where it is not installed."""

import pytest
import torch

from pytest_attn.guests.models.small_models import Library

#: what the configurations of most kinds say of heads
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 16}


def tiny(kind, head="ForCausalLM", sharper=1, **options):
    """Return a model whose configuration says most by itself. sharper: how much larger q and k are projected."""
    transformers = Library("transformers")
    if not hasattr(transformers, f"{kind}{head}"):
        pytest.skip(f"transformers has no {kind}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, **options})
    model = getattr(transformers, f"{kind}{head}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                parameter *= sharper
    return model
