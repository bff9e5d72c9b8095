"""What an interface cannot say is refused in words; the table of --attn-list has what each can."""

import re

import pytest
from fakes.judged import HOST

from pytest_attn import Document, Neighborhood, Pages, Window, Workload
from pytest_attn.backends.capabilities import FEATURES, Capabilities
from pytest_attn.backends.registry import Registry

W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)
SQUARE = W.replace(kv_len=48)
PAGED = W.replace(kv_pages=256, kv_lens=(80, 33))
ALL_BUT_MASKS = Capabilities(features=frozenset(FEATURES), quantized=frozenset(("fp8", "head")))
BARE = Capabilities(features=frozenset(("grouped heads",)))
ONE_WAY = Capabilities(features=frozenset(("grouped heads", "softcap", "bias", "sinks", "alibi")))
OF_SQUARES = Capabilities(masks=frozenset(("top-left", "window")), square=True)
FEW_SIZES = Capabilities(head_dims=(64, 96, 128), features=frozenset(("grouped heads",)))
FLOAT32 = Capabilities(dtypes=("float32",), features=frozenset(("grouped heads",)))


def everything(b, h, q_idx, kv_idx):
    return kv_idx >= 0


REFUSED = {
    "takes bfloat16 and float16 only, not float32": (BARE, W.replace(dtype="fp32")),
    "takes float32 only, not bfloat16": (FLOAT32, W),
    "takes a head_dim of at most 256, not head_dim 264": (BARE, W.replace(head_dim=264)),
    "takes head_dim 64, 96 and 128 only, not head_dim 32": (FEW_SIZES, W),
    "needs a head_dim that is a multiple of 8, not head_dim 20": (BARE, W.replace(head_dim=20)),
    "needs v_head_dim equal to head_dim": (BARE, W.replace(v_head_dim=64)),
    "has no softcap": (BARE, W.replace(softcap=2.0)),
    "has no additive bias": (BARE, W.replace(bias="hqk")),
    "has no ALiBi": (BARE, W.replace(alibi=True)),
    "has no sinks": (BARE, W.replace(sinks=True)),
    "does not support a custom scale": (BARE, W.replace(scale=0.3)),
    "does not support grouped-query attention (GQA)": (OF_SQUARES, W),
    "does not support packed sequences": (BARE, Workload(q_lens=(3, 4))),
    "does not support padded keys": (BARE, W.replace(kv_lens=(80, 33))),
    "does not support a paged KV cache": (BARE, PAGED),
    "takes contiguous pools (pages, size, kv_heads, head_dim) only": (
        Capabilities(features=frozenset(("grouped heads", "paged"))),
        PAGED.replace(kv_pages=Pages(256, "HND")),
    ),
    "does not support a cached prefix beside new keys": (BARE, Workload(9, cached=31, heads=2, head_dim=32)),
    "does not support keys padded on the left": (
        Capabilities(features=frozenset(("grouped heads", "padded"))),
        W.replace(kv_lens=(80, 33), pad="left"),
    ),
    "has no causal mask aligned to the first key": (ALL_BUT_MASKS, W.replace(mask="causal")),
    "has no causal mask aligned to the last key": (ALL_BUT_MASKS, W.replace(mask="causal-bottom-right")),
    "has no causal mask": (ALL_BUT_MASKS, SQUARE.replace(mask="causal")),
    "has no sliding window": (ALL_BUT_MASKS, W.replace(mask=Window(9, 3))),
    "has no mask of documents": (ALL_BUT_MASKS, SQUARE.replace(mask=Document((40, 8)))),
    "has no neighborhood mask": (ALL_BUT_MASKS, SQUARE.replace(mask=Neighborhood((48,), (3,)))),
    "has no mask given as a tensor or function": (ALL_BUT_MASKS, W.replace(mask=everything)),
    "takes documents or padded keys, not both": (
        Capabilities(masks=frozenset(("documents",)), features=frozenset(FEATURES)),
        SQUARE.replace(mask=Document((40, 8)), kv_lens=(48, 33)),
    ),
    "takes a causal mask aligned to the first key for q_len == kv_len only": (
        OF_SQUARES,
        W.replace(kv_heads=4, mask="causal"),
    ),
    "does not support interleaved head groups (h % kv_heads)": (ONE_WAY, W.replace(head_groups="interleaved")),
    "adds a bias after the softcap, not before": (
        ONE_WAY,
        W.replace(bias="hqk", softcap=2.0, bias_before_softcap=True),
    ),
    "takes sinks in bfloat16 only": (ONE_WAY, W.replace(sinks="float32")),
    "does not support ALiBi slopes per batch entry": (ONE_WAY, W.replace(alibi="batch")),
    "does not support fp8 tensors": (BARE, W.replace(dtype="fp8")),
    "does not support int8 keys and values": (ALL_BUT_MASKS, W.replace(kv_dtype="int8")),
    "does not support descales per token": (ALL_BUT_MASKS, W.replace(dtype="fp8", descales="token")),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_an_interface_cannot_say_is_refused_in_words(reason):
    capabilities, workload = REFUSED[reason]
    assert capabilities.refusals(workload) == [reason]


def test_a_backward_pass_is_asked_for_beside_the_workload():
    assert BARE.refusals(W) == []
    assert BARE.refusals(W, backward=True) == ["has no backward pass"]
    assert ALL_BUT_MASKS.refusals(W, backward=True) == []


#: torch's own kernels refuse by rules of their own
OF_TORCH = {"math", "sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "kv_cache", "flex", "flex_decode"}


@pytest.mark.parametrize("name", [name for name in Registry().names if name not in OF_TORCH])
def test_a_backend_refuses_what_its_interface_cannot_say(name):
    backend = Registry()[name]
    for _, workload in REFUSED.values():
        if reasons := backend.capabilities.refusals(workload):
            assert backend.unsupported_because(workload, HOST) == reasons


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"masks": {"casual"}}, "masks has no 'casual'; did you mean causal"),
        ({"masks": "causal"}, "masks must be a set of words, got 'causal'; say {'causal'}"),
        ({"features": {"backwards"}}, "features has no 'backwards'; did you mean backward? expected some of softcap,"),
        ({"dtypes": ("bf16",)}, "dtypes has no 'bf16'; "),
    ],
)
def test_a_word_that_there_is_not_is_refused_with_those_that_there_are(given, said):
    with pytest.raises(ValueError, match=f"^Capabilities: {re.escape(said)}"):
        Capabilities(**given)
    with pytest.raises(TypeError, match="Capabilities has no field 'mask'; did you mean masks"):
        Capabilities(mask={"causal"})
