"""A mask that a layer is handed and its attention call does not keep; and honest layers that keep it in their own way."""

import pytest
import torch
import torch.nn.functional as F
from guests.models.zoo import DIM, HEADS, Of
from torch import nn

from pytest_attn.guests.models.call_to_workload import AttentionArguments
from pytest_attn.guests.models.check_model import judge_model
from pytest_attn.guests.models.handed_masks import HandedMasks, beyond_window, causal_across

BATCH, TOKENS = 2, 24
REAL = torch.ones(BATCH, TOKENS, dtype=torch.bool)
REAL[1, :7] = False  # padded on the left
AHEAD = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
VISIBLE = (AHEAD >= 0) & REAL[:, None, None]
LOWEST = torch.finfo(torch.float32).min


def additive(visible):
    return torch.zeros(visible.shape).masked_fill(~visible, LOWEST)


#: what a layer is handed, by the name of its parameter
MASKS = {
    "additive": ("attention_mask", additive(VISIBLE)),
    "boolean": ("attention_mask", VISIBLE),
    "inverted": ("attn_mask", ~VISIBLE),
    "per head": ("attn_mask", VISIBLE.expand(-1, HEADS, -1, -1)),
    "folded heads": ("attn_mask", VISIBLE.expand(-1, HEADS, -1, -1).flatten(0, 1)),
    "padding": ("attention_mask", REAL.long()),
    "padding, true hides": ("key_padding_mask", ~REAL),
    "padding, additive": ("src_key_padding_mask", additive(REAL)),
    "padding, of diffusers": ("attention_mask", -1e4 * (~REAL).float()[:, None, None]),
    "rows by keys": ("mask", AHEAD >= 0),
    "room for more": ("attention_mask", F.pad(VISIBLE, (0, 40))),
}


class Layer(nn.Module):
    """Attends as `attend` does with q, k, v and the masks that it was handed."""

    def __init__(self, attend):
        super().__init__()
        self.qkv, self.attend = nn.Linear(DIM, 3 * DIM), attend

    def forward(
        self, x, attention_mask=None, attn_mask=None, key_padding_mask=None, src_key_padding_mask=None, mask=None, key_ok=None
    ):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        given = (attention_mask, attn_mask, key_padding_mask, src_key_padding_mask, mask, key_ok)
        return x + self.attend(4 * q, k, v, next((one for one in given if one is not None), None)).transpose(1, 2).flatten(2)


class Layers(nn.Module):
    def __init__(self, *attends):
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, attends))

    def forward(self, x, **masks):
        for layer in self.layers:
            x = layer(x, **masks)
        return x


def keeps(q, k, v, mask):
    """Keep whatever mask it is, as a boolean one."""
    visible = VISIBLE if mask.dim() > 2 or mask.shape[0] == TOKENS else REAL[:, None, None]
    visible = AHEAD >= 0 if mask.shape[0] == TOKENS else visible
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def forgets(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v)


def judged(model, **masks):
    x = torch.randn(BATCH, TOKENS, DIM, generator=torch.Generator().manual_seed(1))
    return judge_model(model, lambda: model(x, **masks), backward=False)


@pytest.mark.parametrize(("name", "mask"), MASKS.values(), ids=MASKS)
def test_a_mask_that_one_layer_forgets_is_found_and_named(name, mask):
    found = judged(Layers(keeps, forgets), **{name: mask})

    assert [call.module for call in found.calls if not call.passed] == ["layers.1"]
    assert f"layers.1 (F.scaled_dot_product_attention, {found.calls[1].kernel}): a mask was forgotten: {name}" in found.message
    assert f"{name} {tuple(mask.shape)} of layers.1 hides key" in found.message
    assert not found.known_defects


@pytest.mark.parametrize(("name", "mask"), MASKS.values(), ids=MASKS)
def test_layers_that_keep_their_mask_in_their_own_way_pass(name, mask):
    assert judged(Layers(keeps, keeps), **{name: mask}).passed


@pytest.mark.parametrize(
    "attend",
    [
        pytest.param(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, is_causal=True), id="flag"),
        pytest.param(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask * 0.5), id="weakened"),
        pytest.param(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask.clamp(-1e4)), id="clamped"),
        pytest.param(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=AHEAD.abs() < 1), id="sparser"),
    ],
)
def test_a_causal_mask_may_become_a_flag_or_other_numbers_or_a_narrower_one(attend):
    assert judged(Layers(attend), attention_mask=additive(AHEAD >= 0)[None, None]).passed


def folding(low):
    """A layer with a bias of positions, into which it folds its boolean mask, as UMT5 does; None forgets it."""
    bias = torch.randn(1, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2))

    def attend(q, k, v, mask):
        of_dtype = bias.to(q.dtype)
        lowest = torch.finfo(q.dtype).min if low == "lowest" else low
        folded = of_dtype if low is None else torch.where(mask, of_dtype, lowest)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=folded)

    return attend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("visible", [VISIBLE, (AHEAD >= 0).expand(BATCH, 1, -1, -1)], ids=["padded", "causal"])
def test_a_mask_that_is_folded_into_a_bias_is_kept(visible, dtype):
    def found(low):
        model = Layers(folding(low)).to(dtype)
        x = torch.randn(BATCH, TOKENS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
        return judge_model(model, lambda: model(x, attention_mask=visible), backward=False)

    for low in ("lowest", -float("inf"), -800.0):
        assert found(low).passed, low
    for low in (None, -3.0):  # which scores outweigh
        assert "a mask was forgotten: attention_mask" in found(low).message


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(REAL.new_ones(BATCH, TOKENS), id="nothing hidden"),
        pytest.param(-AHEAD.abs()[None, None] / 8, id="a bias"),
        pytest.param(torch.ones(BATCH, TOKENS + 3).tril(1), id="of other tokens"),
        pytest.param(torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) // 9, id="numbers of documents"),
    ],
)
def test_what_hides_nothing_or_is_not_about_these_keys_may_be_left_out(mask):
    assert judged(Layers(forgets), attention_mask=mask).passed


def test_rows_of_padded_queries_are_free():
    """As where the padding is on the right, and causality hides it from every token that counts."""
    real = REAL.flip(1)
    causal = Layers(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, is_causal=True))

    assert judged(causal, attention_mask=additive((AHEAD >= 0) & real[:, None, None])).passed
    assert judged(causal, attention_mask=real.long()).passed


def reads(q, k, v, mask):
    """Read a mask for another purpose than to hide keys."""
    scale = 1.0 + (mask != 0).float().mean()
    return F.scaled_dot_product_attention(q, k, scale * v)


OF_KEYS = {"true shows": REAL, "true hides": ~REAL, "additive": additive(REAL), "four dimensions": REAL[:, None, None]}


@pytest.mark.parametrize("mask", OF_KEYS.values(), ids=OF_KEYS)
def test_a_padding_mask_is_known_by_what_it_does_whatever_its_name(mask):
    def lost(*attends):
        return [call.module for call in judged(Layers(*attends), key_ok=mask).calls if not call.passed]

    assert lost(forgets) == ["layers.0"]
    assert lost(keeps, forgets) == ["layers.1"]
    assert lost(keeps, reads, keeps) == ["layers.1"]  # alone
    assert not lost(keeps, keeps)
    assert not lost(reads, reads)
    assert not lost(reads, forgets)  # what others read for something else
    said = f"a mask was forgotten: key_ok {tuple(mask.shape)} of layers.0 hides key "
    assert said in judged(Layers(forgets), key_ok=mask).message


def test_a_mask_of_keys_may_have_one_dimension():
    def shows(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])

    assert judged(Layers(shows, shows), key_ok=REAL[1]).passed
    assert "key_ok (24,) of layers.0 hides key 0" in judged(Layers(forgets), key_ok=REAL[1]).message


class Modal(nn.Module):
    """Has parameters of its own for the tokens that a mask names, and hands it on to what is handed all."""

    def __init__(self):
        super().__init__()
        self.attn, self.own = Layer(forgets), nn.Linear(DIM, DIM)

    def forward(self, x, key_ok):
        x = self.attn(x, key_ok=key_ok)
        return torch.where(key_ok[..., None], x, self.own(x))


def test_a_mask_that_is_read_where_it_is_handed_on_is_for_that():
    assert judged(Modal(), key_ok=REAL).passed


def test_a_mask_of_pairs_under_another_name_may_be_for_some_layers_only():
    def lost(*attends, mask=VISIBLE):
        return [call.module for call in judged(Layers(*attends), key_ok=mask).calls if not call.passed]

    assert lost(forgets, forgets) == ["layers.0", "layers.1"]
    assert lost(forgets, mask=additive(VISIBLE)) == ["layers.0"]
    assert not lost(keeps, keeps, forgets)
    assert not lost(reads, forgets)


def test_numbers_that_hide_nothing_are_no_mask_under_another_name():
    for numbers in (REAL.float(), REAL.long(), torch.zeros(BATCH, TOKENS), torch.randn(BATCH, TOKENS)):
        assert judged(Layers(forgets), key_ok=numbers).passed


class Attending(Layer):
    """Attends to itself or to a memory, and takes the mask of each."""

    def forward(self, x, memory=None, x_ok=None, kv_ok=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        k, v = (k, v) if memory is None else self.qkv(memory).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)[1:]
        visible = (x_ok if memory is None else kv_ok)[:, None, None]
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("x_ok", [REAL.flip(1), torch.ones_like(REAL)], ids=["padded", "full"])
@pytest.mark.parametrize("keys", [TOKENS, 15])
def test_the_mask_of_a_memory_is_not_asked_of_the_sequence_itself(x_ok, keys):
    layers, memory, kv_ok = nn.ModuleList(Attending(None) for _ in range(2)), torch.randn(BATCH, keys, DIM), REAL[:, :keys]
    x = torch.randn(BATCH, TOKENS, DIM)

    def step():
        return layers[1](layers[0](x, None, x_ok, kv_ok), memory, x_ok, kv_ok)

    assert judge_model(layers, step, backward=False).passed


class Block(nn.Module):
    """Has a mask, and a layer to which it does not hand it on."""

    def __init__(self):
        super().__init__()
        self.attn = Layer(forgets)

    def forward(self, x, attention_mask=None, key_ok=None):
        return self.attn(x)


def test_a_mask_that_is_not_handed_down_is_found_in_the_module_that_had_it():
    found = judged(Block(), attention_mask=VISIBLE)

    assert "attention_mask (2, 1, 24, 24) of Block hides key 1 from row 0 of batch entry 0" in found.message
    found = judged(Block(), key_ok=REAL)
    assert "key_ok (2, 24) of Block hides key 0 from row 7 of batch entry 1" in found.message


def test_padding_of_tokens_is_not_asked_of_patches():
    """Of a part that takes no mask: padding of the tokens outside says nothing about its patches, however many there are."""
    images = Of(lambda own, x: own.attn(x), attn=Layer(forgets))
    model = Of(lambda own, x, attention_mask: own.images(x), images=images)
    assert judged(model, attention_mask=REAL.long()).passed


class Decoder(nn.Module):
    """Attends to itself and to another sequence, which is as long and not padded."""

    def __init__(self, forgetful):
        super().__init__()
        self.itself, self.other = Layer(forgets if forgetful else keeps), Layer(forgets)

    def forward(self, x, encoder_hidden_states, attention_mask=None, encoder_attention_mask=None):
        return self.other(self.itself(x, attention_mask=attention_mask), attention_mask=encoder_attention_mask)


def test_the_mask_of_one_sequence_is_not_asked_of_the_other():
    other = torch.randn(BATCH, TOKENS, DIM)

    assert judged(Decoder(False), encoder_hidden_states=other, attention_mask=VISIBLE).passed
    found = judged(Decoder(True), encoder_hidden_states=other, attention_mask=VISIBLE)
    assert [call.module for call in found.calls if not call.passed] == ["itself"]


def test_the_layers_of_torch_keep_theirs():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(DIM, HEADS, DIM, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    decoder = nn.TransformerDecoderLayer(DIM, HEADS, DIM, dropout=0.0, batch_first=True)
    x = torch.randn(BATCH, TOKENS, DIM, generator=torch.Generator().manual_seed(1))
    causal = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    options = {"mask": causal, "src_key_padding_mask": additive(REAL.flip(1)), "is_causal": True}

    assert judge_model(encoder, lambda: encoder(x, **options), backward=False).passed
    options = {"tgt_mask": causal, "memory_key_padding_mask": ~REAL}
    assert judge_model(decoder, lambda: decoder(x, x, **options), backward=False).passed


def test_a_backend_in_a_layers_place_does_not_hide_what_the_layer_forgot():
    model = Layers(keeps, forgets)
    x = torch.randn(BATCH, TOKENS, DIM)

    found = judge_model(model, lambda: model(x, attention_mask=VISIBLE), "math", backward=False)
    assert [call.module for call in found.calls if not call.passed] == ["layers.1"]


@pytest.mark.parametrize("padding", [None, slice(0, 7), slice(17, None)], ids=["full", "left", "right"])
@pytest.mark.parametrize(("reach", "is_causal"), [(8, True), (9, True), (9, False)], ids=["kept", "too far", "to both sides"])
def test_a_window_that_a_layer_names_is_that_of_causal_attention(reach, is_causal, padding):
    real = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    if padding:
        real[1, padding] = False
    visible = (reach > AHEAD) & ((-1 if is_causal else -reach) < AHEAD) & real[:, None, None]
    visible |= ~real[:, None, :, None]  # rows of padding see all
    tensors = (torch.zeros(BATCH, HEADS, TOKENS, 8) for _ in range(3))

    found = beyond_window(AttentionArguments(*tensors, visible=visible), window=8)
    is_wrong = is_causal and reach > 8
    assert found == ("its layer says sliding_window=8, and the call shows key 0 to row 8" if is_wrong else "")


def across(rows, keys, shown, handed=24):
    level = HandedMasks("layer", {}, (), True, torch.zeros(BATCH, handed, DIM))
    q, kv = torch.zeros(BATCH, HEADS, rows, 8), torch.zeros(BATCH, HEADS, keys, 8)
    return causal_across(AttentionArguments(q, kv, kv, visible=shown), [level])


def test_a_causal_mask_over_the_keys_of_another_sequence_is_told():
    causal = torch.ones(9, TOKENS, dtype=torch.bool).tril()

    assert across(9, TOKENS, causal) == "its mask is causal, and its 24 keys are of another sequence than its 9 rows"
    assert not across(9, TOKENS, causal, handed=15)  # which is then not all that it attends to
    assert not across(9, TOKENS, causal | (torch.arange(TOKENS) < 2))
    assert not across(TOKENS, TOKENS, AHEAD >= 0)  # of the same tokens, it may be
    assert not across(1, TOKENS, causal[:1])
