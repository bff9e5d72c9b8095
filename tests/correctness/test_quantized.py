"""fp8 and int8 tensors with descales: fault-free kernels pass, each descale that is wrong is found and named; MLA's v in k."""

from dataclasses import replace

import pytest
import torch
from judging import judged, spec_of
from reported_faults.kernel import Attention

import pytest_attn
from pytest_attn import Pages, Precision, Workload
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry
from pytest_attn.workloads.inputs import Descales, draw_inputs

SHAPES = (
    {"q_len": 24, "batch": 2, "heads": 4, "kv_heads": 2, "mask": "causal"},
    {"q_len": 3, "kv_len": 140, "batch": 2, "heads": 4, "kv_heads": 2},
    {"q_len": 1, "heads": 2, "kv_lens": (40, 21), "kv_pages": 16},
    *(
        {"q_len": 1, "heads": 4, "kv_heads": 2, "kv_lens": (40, 21), "kv_pages": pages}
        for pages in (Pages(8, "HND", fused=True, pool=20), Pages(8, sliced=True))
    ),
)
QUANTIZED = ({"dtype": "fp8"}, {"kv_dtype": "fp8"}, {"kv_dtype": "int8"})
DISTRIBUTIONS = ("structured", "flat", "randn", "peaky", "flux", "outlier", "onehot", "large")
WORKLOADS = [
    Workload(**shape, **quantized, descales=descales, head_dim=32)
    for shape in SHAPES
    for quantized in QUANTIZED
    for descales in ("tensor", "head", "token")
]
PER_HEAD = Workload(8, 40, batch=2, heads=4, kv_heads=2, dtype="fp8", descales="head")
LATENT = Workload(8, 24, batch=2, heads=4, kv_heads=1, head_dim=48, v_head_dim=32, v_in_k=True)


class Kernel(Attention):
    """A fault-free kernel that rounds P to fp8, by a scale of its own, or to bf16. `wrong`: makes other descales."""

    def __init__(self, workload, p_scale=None, wrong=lambda descales: descales):
        super().__init__()
        self.workload, self.p_scale, inputs = workload, p_scale, draw_inputs(workload)
        self.inputs = replace(inputs, descales=wrong(inputs.descales))

    def __call__(self, q, k, v):
        return super().__call__(self.inputs, q, k, v)[0]

    def rounded(self, t, p):
        if self.p_scale is None:
            return super().rounded(t, p)
        return (p * self.p_scale).to(torch.float8_e4m3fn).float() / self.p_scale


def check(kernel, **options):
    return pytest_attn.check(kernel, kernel.workload, device="cpu", **options)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.id)
def test_honest_kernels_pass_with_room_to_spare(workload):
    for p_scale in (1, 256) if workload.dtype == "float8_e4m3fn" else (None,):
        comparison = check(Kernel(workload, p_scale), inputs=DISTRIBUTIONS)
        assert max(row.z_element for row in comparison.tensors) < 6
        assert max(row.z_row for row in comparison.tensors) < 3
        assert not comparison.is_approximate


@pytest.mark.parametrize("workload", WORKLOADS[::4], ids=lambda w: w.id)
def test_they_keep_the_invariants(workload):
    p_scale = 1 if workload.dtype == "float8_e4m3fn" else None
    report = pytest_attn.check_invariants(Kernel(workload, p_scale), workload, device="cpu")
    held = {finding.invariant for finding in report.findings if finding.outcome == "passed"}
    assert held >= {"rerun", "poison", "layout", "leak", "algebra", "state"}


FAULTS = {
    "descale-ignored-of-q": lambda d: d._replace(q=torch.ones_like(d.q)),
    "descale-ignored-of-k": lambda d: d._replace(k=torch.ones_like(d.k)),
    "descale-ignored-of-v": lambda d: d._replace(v=torch.ones_like(d.v)),
    "descale-of-k-for-v": lambda d: d._replace(v=d.k),
    "descale-of-v-for-k": lambda d: d._replace(k=d.v),
    "descale-of-first-head-for-k": lambda d: d._replace(k=d.k[:, :1].expand_as(d.k)),
    "descale-of-first-head-for-v": lambda d: d._replace(v=d.v[:, :1].expand_as(d.v)),
    "descale-of-first-batch-entry-for-v": lambda d: d._replace(v=d.v[:1].expand_as(d.v)),
    "descale-ignored-of-kv": lambda d: d._replace(k=torch.ones_like(d.k), v=torch.ones_like(d.v)),
    "descale-of-first-head-for-kv": lambda d: d._replace(k=d.k[:, :1].expand_as(d.k), v=d.v[:, :1].expand_as(d.v)),
    "descale-of-one-head-for-k": lambda d: d._replace(k=d.k[:, -1:].expand_as(d.k)),
    "descale-of-one-head-for-v": lambda d: d._replace(v=d.v.amax(1, keepdim=True).expand_as(d.v)),
    "descale-of-first-head-for-qkv": lambda d: Descales(*(t[:, :1].expand_as(t) for t in d)),
    "descale-of-one-head-for-kv": lambda d: d._replace(k=d.k[0, 0].expand_as(d.k), v=d.v[0, 0].expand_as(d.v)),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_descale_is_found_and_named(fault):
    assert judged(Kernel(PER_HEAD, 1, FAULTS[fault]), spec_of(PER_HEAD)).faults == (fault,)


@pytest.mark.one_in(18)
@pytest.mark.parametrize("workload", [w for w in WORKLOADS if w.kv_dtype], ids=lambda w: w.id)
def test_a_wrong_descale_of_a_cache_is_found(workload):
    for fault in (*list(FAULTS)[1:5], "descale-ignored-of-kv"):
        assert judged(Kernel(workload, None, FAULTS[fault]), spec_of(workload)).faults == (fault,)


def test_p_of_few_bits_is_excused_where_tensor_cores_read_fp8_only():
    check(Kernel(PER_HEAD, 1))
    with pytest.raises(AssertionError):
        check(Kernel(PER_HEAD, 1), precision=Precision("bf16-p"))
    check(Kernel(PER_HEAD), precision=Precision("bf16-p"))
    with pytest.raises(AssertionError):
        check(Kernel(Workload(8, 40, kv_dtype="fp8"), 1))


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.id)
def test_dequantizing_in_bfloat16_is_exact(workload):
    inputs = draw_inputs(workload)
    values = inputs.dequantized()
    for name in "qkv":
        value = getattr(values, name)
        assert torch.equal(value.double(), value.to(torch.bfloat16).double())
    assert values.descales is None
    assert values.applied is inputs.descales
    assert values.dequantized() is values
    assert all(bool((d != 1).all()) for d in inputs.descales if d is not None)


def shapes(**fields):
    descales = draw_inputs(Workload(8, 16, batch=2, heads=4, kv_heads=2, **fields)).descales
    return [None if descale is None else tuple(descale.shape) for descale in descales]


def test_descales_have_the_shapes_that_libraries_take():
    assert shapes(dtype="fp8") == [(), (), ()]
    assert shapes(dtype="fp8", descales="head") == [(2, 2)] * 3
    assert shapes(dtype="fp8", descales="token") == [(2, 4, 8), (2, 2, 16), (2, 2, 16)]
    assert shapes(kv_dtype="int8", descales="token", kv_pages=8) == [None, (4, 8, 2), (4, 8, 2)]
    latent = draw_inputs(LATENT.replace(dtype="fp8")).descales
    assert isinstance(latent, Descales)
    assert latent.v is latent.k


def test_packed_sequences_have_descales_of_their_own_heads():
    w = Workload(q_lens=(5, 9), heads=4, kv_heads=2, dtype="fp8", descales="head")
    inputs = draw_inputs(w)
    dense = draw_inputs(Workload(9, batch=2, heads=4, kv_heads=2, dtype="fp8", descales="head")).descales
    value = inputs.dequantized().k
    assert torch.equal(value[5:], inputs.k[5:].double() * dense.k[1][None, :, None].double())
    assert torch.equal(value[:5], inputs.k[:5].double() * dense.k[0][None, :, None].double())


def test_ids_bytes_and_copies_of_quantized_workloads():
    w = Workload(8, dtype=torch.float8_e4m3fn, descales="head")
    assert (w.id, w.out_dtype) == ("s8-d64-descale.head-fp8", "bfloat16")
    assert Workload(8, dtype="fp8").bytes() == 8 * 64 * (1 + 1 + 1 + 2) + 4 * 8
    assert Workload(8, kv_dtype="int8").bytes() == 8 * 64 * (2 + 1 + 1 + 2) + 4 * 8
    assert Workload(8, v_in_k=True).bytes() == 8 * 64 * 2 * 3 + 4 * 8
    assert w.replace(dtype="bf16") == Workload(8)
    assert w.replace(q_len=16).descales == "head"
    assert Workload(8).replace(dtype="fp8").descales == "tensor"
    assert Workload(8, kv_dtype="int8").replace(dtype="fp8") == Workload(8, dtype="fp8")
    assert Workload(8, kv_dtype="int8", descales="head").replace(dtype="fp16").descales == "head"


@pytest.mark.parametrize("workload", [PER_HEAD, Workload(8, kv_dtype="int8"), LATENT], ids=lambda w: w.id)
def test_no_backward_pass_is_asked_for(workload):
    with pytest.raises(ValueError, match="leave out backward=True"):
        pytest_attn.check("math", workload, backward=True, device="cpu")


def test_only_backends_that_say_so_take_quantized_tensors():
    registry, machine = Registry(), machine_of(torch.device("cpu"))
    registry.add_function("mine", lambda q, k, v, workload: q)
    for name in ("sdpa", "sdpa_flash", "flex", "kv_cache", "int8_dynamic", "mine"):
        backend = registry[name]
        assert backend.obstacle(Workload(8, dtype="fp8", mask="causal"), machine, False) == "does not support fp8 tensors"
        assert (
            backend.obstacle(Workload(8, kv_dtype="int8", mask="causal"), machine, False)
            == "does not support int8 keys and values"
        )


@pytest.mark.parametrize("name", ["math", "eager"])
def test_backends_that_dequantize_are_right(name):
    for workload in (PER_HEAD, Workload(8, heads=2, kv_dtype="int8", descales="token"), LATENT):
        pytest_attn.check(name, workload, device="cpu")
        pytest_attn.check_invariants(name, workload, device="cpu")


# -- kernels that quantize by themselves ---------------------------------------------------------------------------------


def in_steps(t):
    step = t.float().abs().amax(-1, keepdim=True) / 127
    return (t.float() / step).round() * step


def int8_attention(q, k, v, steps=in_steps):
    p = (steps(q) @ steps(k).transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
    return (p.to(v.dtype).float() @ v.float()).to(v.dtype)


def what_int8_attention_makes(q, k, v):
    return in_steps(q), in_steps(k), v


def test_a_callable_that_quantizes_is_held_to_what_it_makes_of_its_inputs():
    w = Workload(64, heads=2)
    with pytest.raises(AssertionError):
        pytest_attn.check(int8_attention, w, device="cpu")
    comparison = pytest_attn.check(int8_attention, w, device="cpu", dequantized=what_int8_attention_makes)
    assert comparison.is_approximate
    pytest_attn.check_invariants(int8_attention, w, device="cpu", dequantized=what_int8_attention_makes)
    turned = lambda q, k, v: int8_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)  # noqa: E731
    pytest_attn.check(turned, w, device="cpu", layout="bshd", dequantized=what_int8_attention_makes)


@pytest.mark.parametrize("declared", [{"layout": "hsd"}, {"out_layout": "bshd"}, {"returns": ("ignored", "out")}])
def test_so_is_one_that_takes_or_returns_something_else(declared):
    dims = set()

    def attention(q, k, v):
        out = int8_attention(q, k, v)
        out = out.transpose(1, 2) if "out_layout" in declared else out
        return (None, out) if "returns" in declared else out

    def made(q, k, v):
        dims.add(q.dim())
        return what_int8_attention_makes(q, k, v)

    comparison = pytest_attn.check(attention, Workload(64, heads=2), device="cpu", dequantized=made, **declared)
    assert comparison.is_approximate
    assert dims == {3 if "layout" in declared else 4}


def test_what_goes_wrong_after_quantizing_is_found():
    w = Workload(64, heads=2)
    half = lambda q, k, v: int8_attention(1.01 * q, k, v)  # noqa: E731
    with pytest.raises(AssertionError, match="mismatch"):
        pytest_attn.check(half, w, device="cpu", dequantized=what_int8_attention_makes)


def test_what_is_no_dequantization_is_refused():
    w = Workload(8)
    with pytest.raises(TypeError, match="dequantized must be a function"):
        pytest_attn.check(int8_attention, w, device="cpu", dequantized="int8")
    with pytest.raises(TypeError, match="a backend says it itself"):
        pytest_attn.check("math", w, device="cpu", dequantized=what_int8_attention_makes)
    with pytest.raises(ValueError, match="must return three tensors"):
        pytest_attn.check(int8_attention, w, device="cpu", dequantized=lambda q, k, v: q)
    with pytest.raises(AssertionError, match="dequantized returned k of shape"):
        pytest_attn.check(int8_attention, w, device="cpu", dequantized=lambda q, k, v: (q, k[:, :, :3], v))


# -- v as a part of k ------------------------------------------------------------------------------------------------------


def absorbed(q, k, v, width=32):
    """Decode multi-head latent attention: v is what k begins with, read once."""
    assert v.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    p = (q.float() @ k.float().transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
    return (p.to(k.dtype).float() @ k[..., :width].float()).to(k.dtype)


def test_latent_attention_reads_v_from_k():
    pytest_attn.check(absorbed, LATENT, device="cpu", inputs=DISTRIBUTIONS)
    report = pytest_attn.check_invariants(absorbed, LATENT, device="cpu", thorough=True)
    assert {f.invariant for f in report.findings if f.outcome == "passed"} >= {"layout", "poison", "state", "leak"}
    in_rows = lambda q, k, v: absorbed(q.transpose(1, 2), k.transpose(1, 2), v).transpose(1, 2)  # noqa: E731
    pytest_attn.check(in_rows, LATENT, layout="bshd", device="cpu")


def test_a_wrong_part_of_k_is_found():
    last = lambda q, k, v: absorbed(q, k, v, 48)[..., 16:]  # noqa: E731
    with pytest.raises(AssertionError, match="mismatch"):
        pytest_attn.check(last, LATENT, device="cpu")


def test_latent_pages_share_memory():
    w = Workload(1, heads=4, kv_heads=1, head_dim=48, v_head_dim=32, v_in_k=True, kv_lens=(40, 21), kv_pages=16)
    inputs = draw_inputs(w)
    assert inputs.v.data_ptr() == inputs.k.data_ptr()
    assert inputs.v.shape == (*inputs.k.shape[:-1], 32)
    for pages in (16, Pages(8, "HND"), Pages(8, sliced=True)):
        kernel = Kernel(w.replace(kv_pages=pages))
        where_shared = lambda q, k, v, kernel=kernel: kernel(q, k, v) if v.data_ptr() == k.data_ptr() else k  # noqa: E731
        pytest_attn.check(where_shared, kernel.workload, device="cpu")
    pytest_attn.check("eager", w, device="cpu")
    pytest_attn.check("eager", w.replace(kv_dtype="int8", descales="token"), device="cpu")
