import re

import pytest
import torch

from pytest_attn import Document, Neighborhood, Pages, Window, Workload
from pytest_attn.workloads.catalog import Catalog, builtin_catalog
from pytest_attn.workloads.workload import key_heads, repeated


def own_mod(score, b, h, q_idx, kv_idx):
    return score + 1


def make_prefix(length):
    def prefix(b, h, q_idx, kv_idx):
        return kv_idx < length

    return prefix


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        (Workload(128), "s128-d64"),
        (Workload(1, 2048, batch=8, heads=32, kv_heads=8, head_dim=128), "b8-h32-kv8-q1-k2048-d128"),
        (Workload(64, head_dim=192, v_head_dim=128, dtype="fp16", mask="causal"), "s64-d192-dv128-causal-fp16"),
        (
            Workload(64, mask=Window(127, 0), softcap=50.0, scale=0.1, sinks=True),
            "s64-d64-window127.0-softcap50-scale0.1-sinks",
        ),
        (
            Workload(64, sinks=0.0),
            "s64-d64-sinks0",
        ),
        (Workload(64, bias="hqk", alibi=True), "s64-d64-bias.hqk-alibi"),
        (Workload(64, score_mod=own_mod), "s64-d64-mod.own_mod"),
        (Workload(q_lens=(3, 5), heads=2), "h2-packed3.5-d64"),
        (Workload(q_lens=(3, 5), kv_lens=(9, 9)), "packed3.5-k9.9-d64"),
        (Workload(8, kv_lens=(8, 5)), "b2-s8-pad8.5-d64"),
        (Workload(1, 64, batch=2, kv_pages=Pages(16)), "b2-q1-k64-d64-page16"),
        (Workload(7, mask=Document((3, 4))), "s7-d64-documents-3.4"),
        (Workload(64, mask=Neighborhood((8, 8), (3, 3), causal=(True, False))), "s64-d64-na8x8-k3x3-c1x0"),
        (Workload(64, name="ours", dtype="float32"), "ours-fp32"),
    ],
)
def test_the_id_shows_every_field_that_is_not_the_default(workload, expected):
    assert workload.id == expected


def test_ids_tell_functions_apart_that_share_a_name():
    first, second = (Workload(64, mask=make_prefix(length)).id for length in (8, 16))
    assert first != second
    assert Workload(64, mask=make_prefix(8)).id == first


def test_catalog_ids_are_unique_and_every_shape_has_a_source():
    entries = list(builtin_catalog())
    assert len({entry.workload.id for entry in entries}) == len(entries)
    assert all(entry.source for entry in entries)


def test_flops_of_flux_are_those_of_the_field():
    """4 * batch * heads * S^2 * d forward, 2.5 times that backward (flash-attention's benchmark)."""
    (flux,) = builtin_catalog().select("flux-L512")
    assert flux.flops() == 4 * 24 * 4608**2 * 128
    assert flux.flops("backward") == 2.5 * flux.flops()
    width = 2 * 24 * 4608 * 128
    assert flux.bytes() == 4 * width + 4 * 24 * 4608
    assert flux.bytes("backward") == 8 * width + 4 * 24 * 4608


def test_a_causal_mask_counts_the_triangle():
    assert Workload(100, mask="causal").pairs() == 100 * 101 // 2
    assert Workload(q_lens=(3, 5), mask="causal").pairs() == 6 + 15


def test_replacing_a_field_drops_the_name_unless_only_the_dtype_changes():
    workload = Workload(64, name="ours")
    assert workload.replace(dtype="fp16").id == "ours-fp16"
    assert workload.replace(heads=2).id == "h2-s64-d64"


#: fields -> what is said of them, of a workload with a q_len of 8 where no other lengths of queries are given
REFUSED = [
    ({"q_len": None}, "q_len is missing; say Workload(q_len=...)"),
    ({"q_len": 0}, "q_len must be a whole number >= 1, got 0"),
    ({"heads": 3, "kv_heads": 2}, "heads must be a multiple of kv_heads, got heads=3 and kv_heads=2"),
    ({"softcap": 0}, "softcap must be a finite number > 0 or None, got 0"),
    ({"scale": float("nan")}, "scale must be a finite number > 0 or None, got nan"),
    ({"score_mod": lambda s: s}, "score_mod must be a function of (score, b, h, q_idx, kv_idx)"),
    ({"dropout": 1}, "dropout must be a number from 0 to below 1, got 1"),
    ({"q_lens": (4,), "dropout": 0.1}, "cannot be combined with dropout"),
    # masks
    ({"mask": Document((3, 4))}, "Document has 7 tokens, but q_len is 8 and kv_len 8"),
    ({"mask": Neighborhood((3, 3), (2, 2))}, "Neighborhood has 9 tokens, but q_len is 8"),
    ({"mask": "casual"}, "got 'casual'; did you mean causal"),
    ({"mask": "causal_bottom_rigth"}, "; did you mean causal-bottom-right"),
    ({"mask": "sliding_window"}, "; say mask=Window(left, right)"),
    ({"mask": (128, -1)}, "; did you mean Window(128, None)?"),
    ({"mask": True}, "; did you mean 'causal'?"),
    # bias, sinks, ALiBi
    ({"bias": "kq"}, "a part of 'bhqk' in this order, got 'kq'"),
    ({"q_lens": (3,), "bias": "hqk"}, "cannot be combined with Document, Neighborhood, BooleanMask or bias"),
    ({"bias_dtype": "float32"}, "bias_dtype='float32' needs a bias"),
    ({"bias": "q", "bias_dtype": "int8"}, "bias_dtype must be one of"),
    ({"bias_before_softcap": True, "bias": "hqk"}, "bias_before_softcap needs a bias and a softcap"),
    ({"bias_before_softcap": 1, "bias": "hqk", "softcap": 2.0}, "bias_before_softcap must be True or False"),
    ({"head_groups": "tiled"}, "head_groups must be one of 'contiguous', 'interleaved', got 'tiled'"),
    ({"sinks": "fp8"}, "sinks must be one of False, True, 'bfloat16', 'float16', 'float32', 0.0, got 'fp8'"),
    ({"sinks": float("inf")}, "sinks must be one of False, True, 'bfloat16', 'float16', 'float32', 0.0, got inf"),
    ({"alibi": "heads"}, "alibi must be one of False, True, 'batch'"),
    # lengths
    ({"kv_len": 8, "kv_lens": (8, 9)}, "kv_lens must not exceed 8, got (8, 9)"),
    ({"batch": 3, "kv_lens": (8, 9)}, "kv_lens must have one length per batch entry (3), got (8, 9)"),
    ({"kv_len": 70, "cached": 64}, "cached=(64,) with as many new keys as queries makes kv_lens (72,), got (70,)"),
    ({"cached": (5, 9), "kv_lens": (13, 14)}, "makes kv_lens (13, 17), got (13, 14); leave out kv_len and kv_lens"),
    ({"cached": -1}, "cached must be numbers of keys >= 0, got -1"),
    ({"cached": (1, 2), "batch": 3}, "cached must be one number, or one per batch entry (3), got (1, 2)"),
    ({"cached": 2.5}, "cached must be a tuple of whole numbers, got 2.5"),
    ({"pad": "both"}, "pad must be one of right, left, got 'both'"),
    ({"pad": "left"}, 'pad="left" needs kv_lens, or unequal numbers of cached keys, without q_lens and kv_pages'),
    ({"kv_lens": (8, 3), "pad": "left", "bias": "k"}, 'pad="left" cannot be combined with a bias that varies over keys'),
    # pages
    ({"kv_len": 30, "kv_pages": Pages(4, pool=7)}, "Pages(pool=7) holds fewer pages than the 8 of the page table"),
    ({"kv_pages": Pages(4, fused=True), "v_head_dim": 32}, "Pages(fused=True) needs v_head_dim equal to head_dim"),
    ({"kv_pages": Pages(4, shared=2), "kv_lens": (8, 7)}, "Pages(4, shared=2) needs 8 old keys or more"),
    ({"kv_pages": Pages(4, shared=2), "cached": (9, 5)}, "needs 8 old keys or more in each sequence, got 5"),
    ({"kv_pages": Pages(4, shared=1), "kv_lens": (8, 7), "kv_dtype": "int8", "descales": "head"}, "tensor"),
    # dtypes
    ({"dtype": "int8"}, "unknown dtype 'int8'; known: bfloat16 (bf16), float16 (fp16), float32 (fp32)"),
    ({"dtype": "fp8", "kv_dtype": "int8"}, "kv_dtype must be that of q"),
    ({"descales": "head"}, "needs quantized tensors"),
    ({"kv_dtype": "bf16"}, "unknown kv_dtype 'bf16'; known: float8_e4m3fn (fp8), int8 (int8)"),
    ({"dtype": "fp8", "descales": "row"}, "descales must be one of tensor, head, token, got 'row'"),
    ({"q_lens": (3, 5), "dtype": "fp8", "descales": "token"}, 'not per "token"'),
    ({"v_in_k": True, "v_head_dim": 128}, "v_in_k needs v_head_dim <= head_dim, got 128 and 64"),
    ({"v_in_k": 1}, "v_in_k must be True or False"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_fields_that_do_not_fit_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=f"^(Workload: .*)?{re.escape(message)}"):
        Workload(**({} if "q_lens" in fields else {"q_len": 8}) | fields)


def test_two_workloads_with_one_name_are_refused():
    catalog = Catalog()
    catalog.add(Workload(64, name="ours"))
    catalog.add(Workload(64, name="ours"))
    with pytest.raises(ValueError, match="two different workloads are named 'ours': s64-d64 and s65-d64; rename one"):
        catalog.add(Workload(65, name="ours"))
    with pytest.raises(ValueError, match=r"s64-d64 has no name; say Workload\(..., name='...'\)"):
        catalog.add(Workload(64))


def test_a_catalog_selects_by_name_group_alias_and_pattern():
    catalog = builtin_catalog()
    assert [w.name for w in catalog.select("cuda_attn_L128_bfloat16")] == ["flux-L128"]
    assert len(catalog.select("flux")) == len(catalog.select("flux-L*")) == 6
    assert len(catalog.select("all")) == len(catalog)
    with pytest.raises(ValueError, match="unknown workload 'nope'; groups: smoke, edges, features, flux"):
        catalog.select("nope")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Workload(8, headdim=64), "Workload has no field 'headdim'; did you mean head_dim"),
        (lambda: Workload(8).replace(num_kv_heads=2), "Workload has no field 'num_kv_heads'; did you mean kv_heads"),
        (lambda: Workload(seq_len=8), "Workload has no field 'seq_len'; did you mean q_len? fields: q_len"),
        (
            lambda: Workload(8, window_size=4),
            "Workload has no field 'window_size'; say mask=Window(left, right); fields: q_len",
        ),
        (lambda: Workload(8, is_causal=True), "Workload has no field 'is_causal'; say mask=\"causal\"; fields: q_len"),
        (lambda: Workload(8, layout="bshd"), "Workload has no field 'layout'; the marker takes it, beside the workload; "),
        (lambda: Window(causal=True), "Window has no field 'causal'; fields: left, right"),
        (lambda: Window(lft=3), "Window has no field 'lft'; did you mean left? fields: left, right"),
        (lambda: Pages(page_size=8), "Pages has no field 'page_size'; did you mean size"),
    ],
)
def test_an_unknown_field_names_the_nearest(make, told):
    with pytest.raises(TypeError) as raised:
        make()
    assert str(raised.value).startswith(told)


def test_suggestions_leave_the_signature_as_it_is():
    import inspect

    assert next(iter(inspect.signature(Workload).parameters)) == "q_len"
    with pytest.raises(TypeError, match="positional"):
        Window(1, 2, 3)


@pytest.mark.parametrize("head_groups", ["contiguous", "interleaved"])
@pytest.mark.parametrize("dim", [1, 2])
def test_the_gradient_of_a_repeated_head_is_rounded_once(head_groups, dim):
    """That of an index is rounded with each head: backends of groups of 20 were called wrong for it."""
    w = Workload(8, heads=40, kv_heads=2, head_groups=head_groups)
    k = torch.randn(1, 8, 8, 16).transpose(1, dim).bfloat16()[(slice(None),) * dim + (slice(2),)].requires_grad_()
    found = repeated(k, w, dim)
    assert torch.equal(found, k[(slice(None),) * dim + (key_heads(w),)])
    dout = torch.randn(found.shape).bfloat16()
    exact = torch.zeros(k.shape, dtype=torch.float64).index_add_(dim, torch.tensor(key_heads(w)), dout.double())
    (gradient,) = torch.autograd.grad(found, k, dout)
    assert ((gradient - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6).all()
