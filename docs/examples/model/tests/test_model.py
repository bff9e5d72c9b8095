"""Every attention call of the model, on its own tensors: as the model makes it, and computed by other backends."""

import pytest
import torch
from example_model import Model


def model_and_step(device):
    torch.manual_seed(0)
    model = Model().to(device)
    tokens = torch.randn(2, 24, 64, device=device)
    return model, lambda: model(tokens).square().mean()


@pytest.mark.attention_model
def test_as_it_is(attn_model):
    model, step = model_and_step(attn_model.device)
    attn_model.check(model, step)


@pytest.mark.attention_model(backends=["math", "eager"])
def test_on_a_backend(attn_model, attn_backend):
    model, step = model_and_step(attn_model.device)
    attn_model.check(model, step, attn_backend)
