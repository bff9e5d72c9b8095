"""What must hold of a model of tokens: an honest one keeps it, and each planted fault breaks just what it is about."""

import contextlib
import inspect
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from guests.models.tiny import HEADS, tiny
from guests.models.zoo import Of
from torch import nn

from pytest_attn.guests.models import token_invariants
from pytest_attn.guests.models.call_to_workload import DropoutError
from pytest_attn.guests.models.token_invariants import judge_model_invariants
from pytest_attn.guests.models.token_model import Routing

TOKENS, WINDOW = 40, 8
IDS = torch.randint(64, (3, TOKENS), generator=torch.Generator().manual_seed(1))


class Layer(nn.Module):
    def __init__(self, number, fault):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self._number, self._fault, self.scale = number, fault if number == 1 else "", None
        with torch.no_grad():
            self.qkv.weight[:64] *= 6

    def forward(self, x, mask, at):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        q, k = (t + torch.sin(at[:, None, :, None] / torch.arange(1, 17)).to(t.dtype) for t in (q, k))
        if self._fault == "next token in one head":
            mask = mask.repeat(1, 2, 1, 1)
            mask[:, 1] |= torch.ones_like(mask[0, 0]).tril(1)
        if self._fault == "no window":
            mask = mask | torch.ones_like(mask[0, 0]).tril()
        if self._fault == "own key unseen":
            mask = mask & ~torch.eye(TOKENS + 7, dtype=torch.bool)[: mask.shape[2], : mask.shape[3]]
        if self._fault == "next key seen":
            mask = mask | torch.ones_like(mask[0, 0]).tril(1).triu(1)
        if self._fault == "window one too long":
            mask = mask | torch.ones_like(mask[0, 0]).tril(-WINDOW).triu(-WINDOW)
        if self._fault == "window one too short":
            mask = mask & ~torch.ones_like(mask[0, 0]).tril(1 - WINDOW)
        if self._fault == "padding of the first sequence":
            mask = mask[:1]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        if self._fault == "neighbor in the batch":
            out[1:] += 0.5 * out[:1]
        if self._fault == "mean of the batch":
            out = out + 0.5 * out.mean(0)
        if self._fault == "another scale":
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Two of four experts for each token; fault: what their router gets wrong. The first two are all but the same to it."""

    def __init__(self, fault=""):
        super().__init__()
        self.router, self.experts, self.fault = nn.Linear(32, 4), nn.ModuleList(nn.Linear(32, 32) for _ in range(4)), fault
        with torch.no_grad():
            self.router.weight *= 4
            self.router.weight[1] = self.router.weight[0]
            self.router.bias[1] = self.router.bias[0] * (1 + 1e-7)

    def forward(self, x):
        seen = x.mean(1, keepdim=True).expand_as(x) if self.fault == "router sees all" else x
        weights, chosen = self.router(seen).flatten(0, 1).softmax(-1).topk(2)
        flat = x.flatten(0, 1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            at, rank = (chosen == number).nonzero(as_tuple=True)
            out[at] += weights[at, rank, None] * expert(flat[at])
        return x + out.view_as(x)


class Tokens(nn.Module):
    """A causal model with a window; fault: what is wrong with it, in its second layer where it is one of attention."""

    def __init__(self, fault="", dropout=0.0, experts=False, **config):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Layer(number, fault) for number in range(2))
        self.drop, self.head, self.fault = nn.Dropout(dropout), nn.Linear(32, 64), fault
        self.mlp = Experts(fault) if experts else nn.Identity()
        self.config = SimpleNamespace(**{"sliding_window": WINDOW, "num_hidden_layers": 2, "is_decoder": True, **config})

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
            x = self.mlp(layer(x, seen, at.to(x.dtype)))
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
    "own key unseen": ("field", "layers.1: its causal mask shows one key too few, and the right ones in layers.0, which is"),
    "next key seen": ("field", "layers.1: its causal mask shows one key too many, and the right ones in layers.0, which is"),
    "window one too long": ("field", "layers.1 asks for a window of 9 tokens; the configuration says a window of 8"),
    "window one too short": ("field", "layers.1 asks for a window of 7 tokens; the configuration says a window of 8"),
    "padding ignored": ("padded-left", "with 7 or 10 tokens of padding on the left: "),
    "positions that count padding": ("padded-left", "times what honest rounding does (limit 4)"),
    "neighbor in the batch": ("order", "with the batch in reverse: "),
    "mean of the batch": ("order", "without the rest of the batch: "),
    "another scale": ("field", "layers.1, call 2: its scale is 0.3, and 0.25 in layers.0, which is the same kind of module"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("fault", "dtype"), list(itertools.product(FAULTS, [torch.float32, torch.bfloat16])))
def test_each_fault_breaks_what_it_is_about(fault, dtype):
    name, evidence = FAULTS[fault]
    found = broken(Tokens(fault).to(dtype))

    assert evidence in found[name]
    assert name == "order" or "order" not in found


def test_padding_of_one_sequence_that_is_used_for_all_is_found():
    assert "with 7 or 10 tokens of padding on the left: " in broken(Tokens("padding of the first sequence"))["padded-left"]


def test_a_window_that_the_masks_do_not_show_is_seen_in_the_rows():
    model = Tokens()
    model.layers[0].register_forward_hook(lambda part, args, out: out + 1e-3 * out[:, :1])

    assert "sees token 0, and the windows of all layers reach back 14 tokens only" in broken(model)["field"]


def test_dropout_is_refused_and_so_are_unknown_names():
    with pytest.raises(DropoutError, match=r"set dropout to 0, or call model.eval\(\)"):
        broken(Tokens(dropout=0.2))
    assert not broken(Tokens(dropout=0.2).eval(), only="order")
    with pytest.raises(ValueError, match=r"unknown invariant 'futur'; did you mean future\? known: future, field"):
        broken(Tokens(), only="futur")


# -- which models are causal, and what they pad with -------------------------------------------------------------------------


def left_out(model, batch=IDS, **options):
    return {
        f.invariant: f.evidence
        for f in judge_model_invariants(model, batch, **options).findings
        if f.outcome == "not applicable"
    }


class NamedForCausalLM(Tokens):
    """Sees all, whatever it is called."""

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        return super().forward(input_ids.flip(1)).flip(1) + super().forward(input_ids)


def test_a_name_makes_no_model_causal_and_what_it_says_does():
    model = NamedForCausalLM(is_decoder=False, sliding_window=None)
    assert broken(model)["future"].endswith("all its calls are causal: say causal=False where the model is not")
    assert "future" not in broken(model, causal=False)

    model.forward = lambda input_ids: model.embed(input_ids.flip(1)).cumsum(1).flip(1)
    assert "nothing says that the model is causal, and another token at 13 changes rows" in left_out(model)["future"]
    assert not broken(model)
    assert "future" in broken(model, causal=True)

    model.config.is_decoder = True
    assert "future" in broken(model)


def test_a_model_that_says_nothing_is_causal_where_it_behaves_so():
    model = Tokens(is_decoder=False, sliding_window=None)
    model.forward = lambda input_ids: model.embed(input_ids).cumsum(1)

    assert {f.invariant for f in judge_model_invariants(model, IDS).applied} == {"future", "order"}


class Trigram(Tokens):
    """Each token's embedding has its neighbors', which are 0 at the ends as those of the padding are."""

    def __init__(self):
        super().__init__(pad_token_id=0, sliding_window=None, is_decoder=False)
        with torch.no_grad():
            self.embed.weight[0] = 0

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        return self.head(x + F.pad(x[:, 1:], (0, 0, 0, 1)) + F.pad(x[:, :-1], (0, 0, 1, 0)))


class CountsTokens(Tokens):
    """Counts positions from 2, and only tokens that are no padding, where it is given none."""

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        if position_ids is None:
            position_ids = (input_ids != 0).cumsum(1) + 1
        return super().forward(input_ids, attention_mask, position_ids)


@pytest.mark.parametrize("model", [Trigram(), CountsTokens(pad_token_id=0)], ids=["trigram", "counts"])
def test_padding_is_the_model_s_own_token_and_positions_are_given_to_both_runs_or_neither(model):
    ids = IDS.clamp(min=1)
    report = judge_model_invariants(model, ids, only=["padded-left", "padded-right"])

    assert report.passed
    assert "padded-right" in {f.invariant for f in report.applied}


def test_a_batch_is_cut_to_its_tokens_wherever_its_padding_is_and_so_is_what_else_it_holds_of_each():
    class Kinds(Tokens):
        def forward(self, input_ids, attention_mask=None, position_ids=None, kinds=None, named=None):
            assert kinds.shape == input_ids.shape
            moved = self.embed(kinds).masked_fill(~named[..., None], 0.0)
            return super().forward(input_ids, attention_mask, position_ids) + moved.sum(-1, keepdim=True)

    mask = torch.ones_like(IDS)
    mask[0, :5], mask[1, -7:] = 0, 0
    held = {"kinds": IDS % 3, "named": IDS % 2 > 0}
    report = judge_model_invariants(Kinds(), {"input_ids": IDS, "attention_mask": mask, **held})

    assert report.passed
    assert report.workload == f"(3, {TOKENS - 7}) tokens"


def rounded_by_place(router, given, scores):
    """Round scores otherwise in each place of a batch: not every CPU does so by itself where this is asked."""
    return scores + 1e-7 * torch.arange(scores.numel()).mul(7.0).sin().view_as(scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_experts_are_held_where_rounding_decides(dtype, monkeypatch):
    model = Tokens(experts=True).to(dtype)
    report = judge_model_invariants(model, IDS)

    assert report.passed
    assert {f.invariant for f in report.applied} == {"future", "field", "padded-left", "padded-right", "order"}
    if dtype == torch.float32:
        (note,) = report.notes
        assert "of 120 tokens kept their experts, because only rounding decided between them" in note
        held, free = Routing.held, contextlib.nullcontext()
        monkeypatch.setattr(Routing, "held", lambda self, places: held(self, places) if self.is_measuring else free)
        for part in model.modules():
            if isinstance(part, Experts):
                part.router.register_forward_hook(rounded_by_place)
        assert broken(model)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("fault", [*FAULTS, "router sees all"])
def test_faults_of_models_with_experts_are_found(fault):
    name, _ = FAULTS.get(fault, ("future", ""))

    assert name in broken(Tokens(fault, experts=True))


def test_experts_with_a_capacity_leave_out_what_depends_on_other_tokens():
    reasons = left_out(Tokens(experts=True, expert_capacity=8))

    assert "experts take so many tokens at most (expert_capacity)" in reasons["future"]
    assert "field" not in reasons
    assert "future" not in left_out(Tokens(expert_capacity=8))  # no experts, no capacity


def test_experts_behind_a_compiler_are_refused():
    with pytest.raises(ValueError, match=r"experts is a mixture of experts, .* give check_invariants the model before it is"):
        broken(torch.compile(Tokens(experts=True), backend="eager"))


@pytest.mark.parametrize("batch", [torch.zeros(2, 3, 4), {"images": torch.zeros(2)}, torch.zeros(2, 9)])
def test_what_is_no_batch_is_refused(batch):
    with pytest.raises(TypeError, match="batch must be a tensor of token ids"):
        judge_model_invariants(Tokens(), batch)


class WithImages(Tokens):
    """Has a token that stands for a part of an image, of which there must be as many as parts."""

    def __init__(self, **options):
        super().__init__(image_token_id=63, **options)

    def forward(self, input_ids, attention_mask=None, position_ids=None, *, pixels):
        if int((input_ids == 63).sum()) != pixels[..., 0].numel():
            raise ValueError("images and image tokens do not match")
        return super().forward(input_ids, attention_mask, position_ids)


def test_tokens_that_stand_for_images_stay_and_what_cannot_run_without_them_is_left_out(monkeypatch):
    ids = IDS.clamp(max=62)
    ids[:, 2:18] = 63
    batch = {"input_ids": ids, "pixels": torch.zeros(3, 16, 4)}
    report = judge_model_invariants(WithImages(), batch)

    assert report.passed
    assert {"future", "order"} <= {finding.invariant for finding in report.applied}
    assert [one.invariant for one in judge_model_invariants(WithImages(fault="next token in one head"), batch).broken][:1] == [
        "future"
    ]
    monkeypatch.setitem(token_invariants.INVARIANTS, "packed", lambda of: of.rows_of(of.ids[:, :9], of.places[:, :9]))
    assert (
        left_out(WithImages(), batch)["packed"] == "not run: the model raises ValueError: images and image tokens do not match"
    )


# -- models of other things than tokens ----------------------------------------------------------------------------------


class Images(nn.Module):
    """Patches of images, which attend to each other. mixes: how it mixes entries of its batch by mistake."""

    def __init__(self, mixes=lambda t: t, *parts):
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.layers, self.parts = nn.Conv2d(3, 32, 4, 4), stack_of(2), nn.Sequential(*parts)
        self.layers[1].register_forward_pre_hook(lambda part, args: (mixes(args[0]),))

    def forward(self, *args, pixels=None, **more):
        x = self.patches(args[0] if args else pixels).flatten(2).mT
        for layer in self.layers:
            x = layer(x)
        return {"rows": self.parts(x.mean(1)), **more}


def stack_of(layers):
    options = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
    return nn.ModuleList(nn.TransformerEncoderLayer(32, 2, **options) for _ in range(layers)).eval()


PIXELS = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
MIXED = {
    "another entry": lambda t: t.roll(1, 0),
    "the mean": lambda t: t + 0.1 * t.mean(0),
    "reshaped": lambda t: t.reshape(t.shape[1], len(t), -1).transpose(0, 1),
}


@pytest.mark.parametrize(
    "batch", [PIXELS, {"pixels": PIXELS, "steps": torch.arange(3), "size": torch.ones(2)}], ids=["tensor", "named"]
)
def test_entries_of_any_model_are_compared_with_themselves_elsewhere_and_alone(batch):
    report = judge_model_invariants(Images().eval(), batch)

    assert report.passed
    assert [finding.invariant for finding in report.applied] == ["field", "order"]
    assert left_out(Images(), batch)["future"] == "the batch has no token ids"
    for name, mixes in MIXED.items():
        assert [one.invariant for one in judge_model_invariants(Images(mixes).eval(), batch).broken] == ["order"], name


def test_a_model_that_normalizes_over_its_batch_or_pairs_its_entries_is_honest():
    training = Images(lambda t: t, nn.BatchNorm1d(32)).train()
    assert left_out(training, PIXELS)["order"] == "it normalizes over the batch"
    assert judge_model_invariants(training.eval(), PIXELS).passed


def test_outputs_that_may_be_scores_of_pairs_are_asked_for_with_another_batch():
    with pytest.raises(TypeError, match=r"rows \(2, 2\).*which a batch of another size tells"):
        judge_model_invariants(Images(lambda t: t, nn.Linear(32, 2)).eval(), PIXELS[:2])


def test_tensors_that_do_not_agree_about_the_batch_are_refused():
    with pytest.raises(TypeError, match="whose first dimension is the batch"):
        judge_model_invariants(Images(), {"pixels": PIXELS, "others": torch.zeros(7, 2, 2)})


# -- transformers, where it is installed ---------------------------------------------------------------------------------


def of_transformers(kind="Mistral", implementation="sdpa", **options):
    return tiny(kind, sharper=8, attn_implementation=implementation, **HEADS, **options)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_models_of_transformers_keep_them(implementation):
    report = judge_model_invariants(of_transformers(implementation=implementation, sliding_window=WINDOW), IDS)

    assert report.passed
    assert len(report.applied) == 10


@pytest.mark.parametrize(("more", "said"), [(0, ""), (1, "a row sees token 0, and the windows of all layers reach back 14")])
def test_a_window_that_a_function_applies_itself_is_seen_in_the_rows(monkeypatch, more, said):
    def windowed(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **options):
        q, k = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
        visible = (k <= q) & (q - k < sliding_window + more)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    modeling = pytest.importorskip("transformers.modeling_utils")
    monkeypatch.setitem(modeling.AttentionInterface._global_mapping, "windowed", windowed)
    found = broken(of_transformers(implementation="windowed", sliding_window=WINDOW), only="field")

    assert said in found.get("field", "")
    assert bool(found) == bool(said)


def test_documents_that_see_each_other_and_a_cache_that_forgets_are_found(monkeypatch):
    model = of_transformers("Llama")
    forward = model.forward

    def leaking(*args, position_ids=None, **more):
        cache = more.get("cache", more.get("past_key_values"))  # by the version of transformers
        if cache is not None and cache.get_seq_length() > 30:
            cache.layers[0].keys[..., 3, :] = 0
        positions = None if position_ids is None else torch.arange(position_ids.shape[1])[None]
        return forward(*args, position_ids=positions, **more)

    leaking.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(model, "forward", leaking)
    found = broken(model)

    assert "the second of two packed documents" in found["packed"]
    assert "decoding with a dynamic cache" in found["dynamic"]


BERT = {"num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 80, "pad_token_id": 1}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16}
FALCON = {"num_attention_heads": 4, "alibi": True, "bias": True, "parallel_attn": True}
#: that were once called wrong, or raised: kind, head, and what the configuration says besides
HONEST = {
    "roberta": ("Roberta", "ForMaskedLM", BERT),
    "mpnet": ("MPNet", "ForMaskedLM", BERT),
    "bert as a language model": ("Bert", "LMHeadModel", BERT),
    "xlnet": ("XLNet", "LMHeadModel", {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 64}),
    "opt": ("OPT", "ForCausalLM", {"num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 64, "pad_token_id": 1}),
    "bamba": ("Bamba", "ForCausalLM", {**HEADS, **MAMBA, "attn_layer_indices": [1]}),
    "falcon with alibi": ("Falcon", "ForCausalLM", FALCON),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_models_of_other_families_keep_them(name):
    kind, head, options = HONEST[name]
    report = judge_model_invariants(tiny(kind, head, **options), IDS.clamp(min=2))

    assert report.passed, report.broken
    assert {f.invariant for f in report.applied} >= {"padded-right", "order"}
    for finding in report.findings:
        assert finding.outcome != "not applicable" or finding.evidence
    if name == "falcon with alibi":
        assert any(
            note.startswith("static: not run: with a static cache the model raises RuntimeError: ") for note in report.notes
        )


EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
OF_EXPERTS = {
    "Mixtral": {},
    "Qwen2Moe": {"shared_expert_intermediate_size": 32},
    "Qwen3Moe": {},
    "GptOss": {"sliding_window": WINDOW},
    "Olmoe": {},
    "Phimoe": {},
    "GraniteMoe": {},
    "DeepseekV3": {
        **LATENT,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    },
}


@pytest.mark.parametrize("kind", OF_EXPERTS)
def test_mixtures_of_experts_of_transformers_keep_them(kind):
    model = tiny(kind, **{**HEADS, **EXPERTS, **OF_EXPERTS[kind]})
    report = judge_model_invariants(model, IDS)

    assert report.passed, report.broken
    assert {f.invariant for f in report.applied} >= {"future", "padded-left", "padded-right", "dynamic", "order"}


def test_a_forgotten_mask_and_a_stale_cache_are_found_in_a_mixture_of_experts(monkeypatch):
    model = tiny("Mixtral", **HEADS, **EXPERTS, attn_implementation="eager")
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *args, **more: forward(*args, **{**more, "attention_mask": None}))
    assert "future" in broken(model)

    def stale(*args, **more):
        cache = more.get("cache", more.get("past_key_values"))
        if cache is not None and cache.get_seq_length() > 30:
            cache.layers[1].values[..., -1, :] = 0
        return forward(*args, **more)

    monkeypatch.setattr(attention, "forward", stale)
    assert "dynamic" in broken(model)


def test_scales_that_layers_have_of_their_own_are_meant_as_a_check_takes_them():
    model = Tokens()
    model.layers[1].scale = 1.0

    assert judge_model_invariants(model, IDS, only="field").passed


def test_a_convolution_over_tokens_may_see_padding_and_one_that_does_not_run_excuses_nothing():
    model = Tokens(is_decoder=False)
    conv = nn.Conv2d(32, 32, (1, 3), padding=(0, 1))  # over neighboring tokens, as of an image that is one row high
    model.mlp = Of(lambda own, x: x + conv(x.mT[:, :, None])[:, :, 0].mT, conv=conv)
    assert "mixes tokens by more than attention" in left_out(model, only="padded-right")["padded-right"]

    model = Tokens("padding ignored")
    model.vision = nn.Conv2d(3, 32, 8)
    assert "padded-left" in broken(model)


@pytest.mark.parametrize("says", [{"use_bidirectional_attention": True}, {"is_causal": False}])
def test_a_configuration_that_says_both_sides_names_no_model_causal(says):
    model = Tokens(**says)
    model.layers[0].register_forward_hook(lambda part, args, out: out + out.mean(1, keepdim=True))

    assert "nothing says that the model is causal" in left_out(model, only="future")["future"]


def test_keys_that_are_rotated_the_other_way_are_found_where_all_positions_begin_later(monkeypatch):
    model = of_transformers("Llama")
    module = inspect.getmodule(type(model))
    rotate = module.apply_rotary_pos_emb
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, c, s: (rotate(q, k, c, s)[0], rotate(q, k, c, -s)[1]))

    assert set(broken(model)) == {"shifted"}
    assert "with positions that begin at 7: " in broken(model)["shifted"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_position_embeddings": 30}, "its positions end early"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "its angles depend on the length"),
    ],
)
def test_positions_that_mean_something_else_later_are_not_shifted(options, reason):
    assert reason in left_out(of_transformers("Llama", **options), only="shifted")["shifted"]


@pytest.mark.parametrize("factor", [0.25, 1.05, 2.0])
@pytest.mark.parametrize("layers", [slice(1, None), slice(None)], ids=["one", "all"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_scale_that_nothing_names_is_found_in_one_layer_and_in_all(count, layers, factor):
    model = of_transformers("Llama", num_hidden_layers=count)
    for layer in model.model.layers[layers] or model.model.layers:
        layer.self_attn.scaling *= factor

    assert f"its scale is {factor / 4:g}" in broken(model, only="field")["field"]


@pytest.mark.parametrize(
    ("kind", "options"), [("Granite", {"attention_multiplier": 0.3}), ("Gemma2", {"query_pre_attn_scalar": 7})]
)
def test_a_scale_of_the_configuration_is_right(kind, options):
    assert not broken(of_transformers(kind, "eager", **options), only="field")


def test_a_soft_cap_that_a_layer_drops_is_found():
    model = of_transformers("Gemma2", "eager", attn_logit_softcapping=20.0)
    model.model.layers[1].self_attn.attn_logit_softcapping = None

    assert "layers.1.self_attn asks for no soft-cap; the configuration says 20" in broken(model, only="field")["field"]


def test_several_tokens_at_once_through_a_cache_are_asked(monkeypatch):
    model = of_transformers("Llama", "eager")
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def from_the_top_left(*args, **more):
        mask = more["attention_mask"]
        if mask is not None and 1 < mask.shape[2] < mask.shape[3]:
            more["attention_mask"] = torch.zeros_like(mask).masked_fill(torch.ones_like(mask).tril() == 0, -1e9)
        return forward(*args, **more)

    monkeypatch.setattr(attention, "forward", from_the_top_left)

    assert "three tokens at once with a dynamic cache" in broken(model)["dynamic"]


_STACK = {"layers": 2, "ffn_dim": 64, "attention_heads": 4}
_STACKS = {f"{part}_{what}": number for part in ("encoder", "decoder") for what, number in _STACK.items()}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}
BART = {**_STACKS, **_TOKENS, "d_model": 64}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, "pad_token_id": 0}


@pytest.fixture(params=["Bart", "T5", "same length"])
def decoder(request):
    """A decoder beside an encoder, and its batch."""
    kind, options = ("T5", T5) if request.param == "T5" else ("Bart", BART)
    length = TOKENS if request.param == "same length" else 24
    return tiny(kind, "ForConditionalGeneration", sharper=8, **options), {
        "input_ids": IDS,
        "decoder_input_ids": IDS[:, -length:],
    }


def crossing(model):
    return [part for name, part in model.named_modules() if name.endswith(("encoder_attn", "EncDecAttention"))][1]


def test_a_decoder_beside_an_encoder_is_a_model_of_its_own_tokens(decoder):
    report = judge_model_invariants(*decoder)

    assert report.passed, report.broken
    assert {one.invariant for one in report.applied} == {"future", "field", "padded-right", "dynamic", "order"}


def test_a_decoder_that_reads_the_memory_of_another_sequence_is_found(decoder):
    model, batch = decoder
    name = "k_proj" if hasattr(crossing(model), "k_proj") else "k"
    getattr(crossing(model), name).register_forward_pre_hook(lambda part, args: (args[0].roll(1, 0),))

    assert "order" in {one.invariant for one in judge_model_invariants(model, batch).broken}


def test_padding_of_the_encoder_that_a_decoder_ignores_where_it_decodes_is_found(decoder):
    model, batch = decoder

    def ignoring(part, args, given):
        name = "mask" if "mask" in given else "attention_mask"
        states = args[0] if args else given["hidden_states"]
        return args, {**given, name: None} if states.shape[1] == 1 else given

    crossing(model).register_forward_pre_hook(ignoring, with_kwargs=True)
    broken = {one.invariant: one.evidence for one in judge_model_invariants(model, batch).broken}

    assert list(broken) == ["padded-right"]
    assert "with a dynamic cache" in broken["padded-right"]
    assert "with padding on the right of what the encoder is given" in broken["padded-right"]


def test_a_decoder_that_is_causal_in_its_cache_for_one_token_only_is_honest():
    fsmt = {**BART, "langs": ["en", "de"], "src_vocab_size": 64, "tgt_vocab_size": 64, "max_position_embeddings": 64}
    batch = {"input_ids": IDS, "decoder_input_ids": IDS[:, -24:]}
    report = judge_model_invariants(tiny("FSMT", "ForConditionalGeneration", **fsmt), batch)

    assert report.passed, report.broken
    assert "dynamic" in {one.invariant for one in report.applied}
