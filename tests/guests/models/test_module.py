"""One attention layer: hidden states are drawn for it, and its attention core is judged inside it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_attn import check_module


class Layer(nn.Module):
    """Causal attention between projections."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, hidden, turned=False):
        q, k, v = self.qkv(hidden).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=not turned).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, a, b):
        return self.first(a + b)


def workloads(comparison):
    assert comparison.passed
    return [call.workload.id for call in comparison.calls]


@pytest.mark.parametrize("batch_first", [True, False])
def test_hidden_states_are_drawn_for_torch_s_layers(batch_first):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(32, 2, batch_first=batch_first)
    assert workloads(check_module(attention)) == ["b2-h2-s64-d16-fp32"]
    other = nn.MultiheadAttention(32, 2, kdim=24, vdim=16, batch_first=batch_first)
    assert workloads(check_module(other)) == ["b2-h2-s64-d16-fp32"]
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=batch_first)
    assert workloads(check_module(layer)) == ["b2-h2-s64-d16-fp32"]


def test_gradients_and_what_leaves_the_module_are_judged_too():
    torch.manual_seed(0)
    comparison = check_module(Layer().bfloat16())
    (call,) = comparison.calls
    assert {tensor.name for tensor in call.comparison.tensors} == {"out", "dq", "dk", "dv"}
    assert {"0", "output", "gradient of qkv.weight"} & set(comparison.ratios)
    assert call.workload.id == "b2-h2-s64-d16-causal"
    assert not check_module(Layer(), backward=False).calls[0].has_gradients


def test_the_fast_path_of_inference_goes_the_ordinary_way_while_it_is_judged():
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    with torch.no_grad():
        assert workloads(check_module(layer, backward=False)) == ["b2-h2-s64-d16-fp32"]


def test_attention_that_is_written_out_for_its_weights_is_named():
    hidden = torch.randn(2, 8, 32)
    with pytest.raises(AssertionError, match="no attention call was caught") as caught:
        check_module(nn.MultiheadAttention(32, 2, batch_first=True), (hidden, hidden, hidden))
    assert "pass need_weights=False" in str(caught.value)


def test_inputs_are_handed_over_as_they_are():
    torch.manual_seed(0)
    hidden = torch.randn(1, 24, 32)
    for inputs in (hidden, (hidden,), [hidden], {"hidden": hidden}):
        assert workloads(check_module(Layer(), inputs)) == ["h2-s24-d16-causal-fp32"]
    assert workloads(check_module(Layer(), {"hidden": hidden, "turned": True})) == ["h2-s24-d16-fp32"]
    assert workloads(check_module(Encoder(), (hidden, hidden))) == ["h2-s24-d16-fp32"]


@pytest.mark.parametrize(("module", "inputs"), [(Encoder(), None), (nn.ReLU(), None), (Layer(), 3)])
def test_what_cannot_be_called_is_refused_in_words(module, inputs):
    with pytest.raises(ValueError, match="inputs"):
        check_module(module, inputs)
