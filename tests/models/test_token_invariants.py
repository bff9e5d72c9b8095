"""What must hold of a model of tokens: an honest one keeps it, and each planted fault breaks just what it is about."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_attn.models.mask_recognition import DropoutError
from pytest_attn.models.token_invariants import judge_model_invariants
from pytest_attn.suite.models import Library

TOKENS, WINDOW = 40, 8
IDS = torch.randint(64, (3, TOKENS), generator=torch.Generator().manual_seed(1))


class Layer(nn.Module):
    def __init__(self, number, fault):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.number, self.fault = number, fault if number == 1 else ""
        with torch.no_grad():
            self.qkv.weight[:64] *= 6

    def forward(self, x, mask, at):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        q, k = (t + torch.sin(at[:, None, :, None] / torch.arange(1, 17)).to(t.dtype) for t in (q, k))
        if self.fault == "next token in one head":
            mask = mask.repeat(1, 2, 1, 1)
            mask[:, 1] |= torch.ones_like(mask[0, 0]).tril(1)
        if self.fault == "no window":
            mask = mask | torch.ones_like(mask[0, 0]).tril()
        if self.fault == "window one too long":
            mask = mask | torch.ones_like(mask[0, 0]).tril(-WINDOW).triu(-WINDOW)
        if self.fault == "window one too short":
            mask = mask & ~torch.ones_like(mask[0, 0]).tril(1 - WINDOW)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if self.fault == "neighbor in the batch":
            out[1:] += 0.5 * out[:1]
        return x + self.out(out.transpose(1, 2).flatten(2))


class Tokens(nn.Module):
    """A causal model with a window; fault: what is wrong with it, in its second layer where it is one of attention."""

    def __init__(self, fault="", dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Layer(number, fault) for number in range(2))
        self.drop, self.head, self.fault = nn.Dropout(dropout), nn.Linear(32, 64), fault
        self.config = SimpleNamespace(sliding_window=WINDOW, num_hidden_layers=2, is_decoder=True)

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        n = input_ids.shape[1]
        at = torch.arange(n).expand(input_ids.shape) if position_ids is None else position_ids
        if self.fault == "positions that count padding":
            at = torch.arange(n).expand(input_ids.shape)
            at = at * at.float() / 8
        seen = torch.ones(n, n, dtype=torch.bool).tril().triu(1 - WINDOW)[None, None]
        if attention_mask is not None and self.fault != "padding ignored":
            seen = seen & attention_mask.bool()[:, None, None] | torch.eye(n, dtype=torch.bool)
        x = self.drop(self.embed(input_ids))
        for layer in self.layers:
            x = layer(x, seen, at.to(x.dtype))
        return self.head(x)


def broken(model, **options):
    report = judge_model_invariants(model, IDS, **options)
    return {finding.invariant: finding.evidence for finding in report.broken}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_honest_model_keeps_them_all_and_is_left_as_it_was(dtype):
    model = Tokens().to(dtype)
    report = judge_model_invariants(model, IDS)

    assert report.passed
    assert {f.invariant for f in report.applied} == {"future", "field", "padded-left", "padded-right", "order"}
    assert not any(part._forward_hooks for part in model.modules())


FAULTS = {
    "next token in one head": ("future", "another token at 13 changes rows before it: 1 of 13, the last is 12"),
    "no window": ("field", "layers.1 asks for all tokens before; the configuration says a window of 8"),
    "window one too long": ("field", "layers.1 asks for a window of 9 tokens; the configuration says a window of 8"),
    "window one too short": ("field", "layers.1 asks for a window of 7 tokens; the configuration says a window of 8"),
    "padding ignored": ("padded-left", "with 7 tokens of padding on the left: "),
    "positions that count padding": ("padded-left", "times what honest rounding does (limit 4)"),
    "neighbor in the batch": ("order", "with the batch in reverse: "),
}


@pytest.mark.parametrize(("fault", "dtype"), list(itertools.product(FAULTS, [torch.float32, torch.bfloat16])))
def test_each_fault_breaks_what_it_is_about(fault, dtype):
    name, evidence = FAULTS[fault]
    found = broken(Tokens(fault).to(dtype))

    assert evidence in found[name]
    assert name == "order" or "order" not in found


def test_a_window_that_the_masks_do_not_show_is_seen_in_the_rows():
    model = Tokens()
    model.layers[0].register_forward_hook(lambda part, args, out: out + 1e-3 * out[:, :1])

    assert "sees token 0, and the windows of all layers reach back 14 tokens only" in broken(model)["field"]


def test_dropout_is_refused_and_so_are_unknown_names_and_experts():
    with pytest.raises(DropoutError, match=r"set dropout to 0, or call model.eval\(\)"):
        broken(Tokens(dropout=0.2))
    assert not broken(Tokens(dropout=0.2).eval(), only="order")
    with pytest.raises(ValueError, match="unknown invariant 'futur'; known: future, field"):
        broken(Tokens(), only="futur")
    model = Tokens()
    model.layers[0].experts = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"layers.0.experts is a mixture of experts"):
        broken(model)


@pytest.mark.parametrize("batch", [torch.zeros(2, 3, 4), {"images": torch.zeros(2)}, torch.zeros(2, 9)])
def test_what_is_no_batch_of_tokens_is_refused(batch):
    with pytest.raises(TypeError, match="batch must be a tensor of token ids"):
        judge_model_invariants(Tokens(), batch)


# -- transformers, where it is installed ---------------------------------------------------------------------------------


def of_transformers(kind="Mistral", implementation="sdpa", **options):
    transformers = Library("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attn_implementation": implementation}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **heads, **options})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                parameter *= 8
    return model


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_models_of_transformers_keep_them(implementation):
    report = judge_model_invariants(of_transformers(implementation=implementation, sliding_window=WINDOW), IDS)

    assert report.passed
    assert len(report.applied) == 9


def test_documents_that_see_each_other_and_a_cache_that_forgets_are_found(monkeypatch):
    model = of_transformers("Llama")
    forward = model.forward

    def leaking(*args, position_ids=None, past_key_values=None, **more):
        if past_key_values is not None and past_key_values.get_seq_length() > 30:
            past_key_values.layers[0].keys[..., 3, :] = 0
        positions = None if position_ids is None else torch.arange(position_ids.shape[1])[None]
        return forward(*args, position_ids=positions, past_key_values=past_key_values, **more)

    leaking.__signature__ = __import__("inspect").signature(forward)
    monkeypatch.setattr(model, "forward", leaking)
    found = broken(model)

    assert "the second of two packed documents" in found["packed"]
    assert "decoding with a dynamic cache" in found["dynamic"]
