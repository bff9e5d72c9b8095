"""What each backend over ranks refuses before it is called, and with which arguments it calls its library."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from fakes import install, uninstall

from pytest_attn import Machine, Window, Workload
from pytest_attn.backends.contexts import within
from pytest_attn.backends.library import Library
from pytest_attn.backends.registry import TORCH, Registry
from pytest_attn.guests.libraries import libraries_guest
from pytest_attn.guests.ranks.libraries import ring_flash
from pytest_attn.guests.ranks.over_ranks import Place
from pytest_attn.guests.ranks.ranks_guest import BACKENDS
from pytest_attn.guests.ranks.sharding import Sharding
from pytest_attn.workloads.inputs import draw_inputs

CPU = Machine("cpu", "a CPU", None, "cpu", 64 << 30, 0, "2.13.0")
H200 = Machine("cuda:0", "NVIDIA H200", (9, 0), "sm90", 150 << 30, 8, "2.13.0+cu130")
W = Workload(64, batch=2, heads=4, kv_heads=2, head_dim=32, mask="causal", scale=0.3)
FULL = W.replace(mask=None)
PACKED = Workload(q_lens=(16, 64), heads=4, head_dim=32, mask="causal")
GROUP = object()


def place(rank, ranks):
    return Place(rank, ranks, GROUP, None, torch.device("cpu"))


def refusals(name, workload, ranks=2, shard="contiguous", backward=False, machine=H200):
    return "; ".join(Registry()[name].refusals_over(Sharding(workload, shard, ranks), machine, backward))


REFUSED = [
    ("torch_cp", FULL, 2, "head-tail", "load balancing requires is_causal=True; shards must be contiguous"),
    ("torch_cp", W.replace(q_len=66, kv_len=66), 2, "head-tail", "multiples of 4 over 2 ranks, not 66"),
    ("torch_cp", W.replace(softcap=5.0), 2, "contiguous", "has no softcap"),
    ("torch_cp", FULL.replace(kv_len=128), 2, "contiguous", "takes q_len == kv_len only"),
    ("torch_cp", W.replace(mask=Window(3, 0)), 2, "contiguous", "has no sliding window"),
    ("torch_cp", W, 2, "striped", "takes contiguous and head-tail shards only, not striped"),
    ("torch_cp@kernel=efficient", W, 2, "contiguous", "has no grouped-query attention (GQA) in the kernel efficient"),
    ("torch_cp@rotate=ring", W, 2, "contiguous", "has no rotate=ring; it takes allgather, alltoall"),
    ("torch_cp_flex", W, 2, "contiguous", "multiples of 256, 2 ranks times a block"),
    ("torch_cp_flex", W.replace(bias="hqk"), 2, "contiguous", "has no additive bias"),
    ("ring_flash", W, 2, "head-tail", "takes contiguous shards only, not head-tail"),
    ("ring_flash", W.replace(mask=Window(3, 0)), 2, "contiguous", "has no sliding window"),
    ("ring_flash", PACKED.replace(kv_lens=(32, 64), mask=None), 2, "contiguous", "takes one cu_seqlens"),
    ("zigzag", FULL, 2, "head-tail", "is meaningless for causal=False, as it says"),
    ("zigzag", PACKED.replace(q_lens=(16, 62), kv_lens=None), 2, "head-tail", "multiples of 4 over 2 ranks, not 62"),
    ("llama3", PACKED, 2, "contiguous", "does not support packed sequences"),
    ("llama3", FULL.replace(kv_len=128), 2, "contiguous", "takes one cu_seqlens for queries and keys"),
    ("ulysses", W, 4, "contiguous", "needs kv_heads that are a multiple of 4, not 2"),
    ("usp", W, 4, "head-tail", "orders rows otherwise than head-tail where ulysses is 2"),
    ("usp@ulysses=3", W, 4, "contiguous", "cannot split 4 ranks into groups of 3"),
    ("usp@ulysses=many", W, 4, "contiguous", "takes a number of ranks, 1 or more, as ulysses, not many"),
    ("usp@ulysses=1", FULL, 2, "head-tail", "its zigzag ring is meaningless for causal=False"),
    ("te_cp", W, 2, "contiguous", "takes head-tail shards only, not contiguous"),
    ("te_cp", W.replace(mask=Window(3, 3)), 2, "head-tail", "has sliding windows with comm=all_gather and comm=a2a only"),
    ("te_cp@comm=a2a", W, 4, "head-tail", "needs kv_heads that are a multiple of 4, not 2"),
    ("te_cp@comm=all_gather", PACKED, 2, "head-tail", "has packed sequences with comm=p2p and comm=a2a only"),
    ("te_cp@comm=mpi", W, 2, "head-tail", "has no comm=mpi; it takes p2p, all_gather, a2a"),
    ("diffusers_cp", W, 2, "contiguous", "has no causal mask; does not support grouped-query attention (GQA)"),
    ("diffusers_cp", FULL.replace(kv_heads=4), 1, "contiguous", "needs 2 ranks or more"),
    ("diffusers_cp@ring=3", FULL.replace(kv_heads=4), 4, "contiguous", "cannot split 4 ranks into rings of 3"),
    ("diffusers_cp@ring=2:kernel=native", FULL.replace(kv_heads=4), 2, "contiguous", "return_lse=True, which a ring needs"),
    ("diffusers_cp@ring=2", FULL.replace(kv_heads=4, dtype="float32"), 2, "contiguous", "not float32"),
]


@pytest.mark.parametrize(("name", "workload", "ranks", "shard", "words"), REFUSED)
def test_it_refuses_what_its_interface_cannot_say(name, workload, ranks, shard, words):
    assert words in refusals(name, workload, ranks, shard)


CLAIMED = [
    *(("torch_cp", W, 4, shard) for shard in ("contiguous", "head-tail")),
    *(("torch_cp@rotate=alltoall:kernel=cudnn", FULL, 4, "contiguous"), ("torch_cp@kernel=flash", W, 2, "head-tail")),
    *(("torch_cp_flex", W.replace(q_len=512, kv_len=512), 4, shard) for shard in ("contiguous", "head-tail")),
    *((name, PACKED, 4, "contiguous") for name in ("ring_flash",)),
    *((name, FULL.replace(kv_len=128), 2, "contiguous") for name in ("ring_flash", "ulysses", "usp")),
    *(("zigzag", PACKED, 4, "head-tail"), ("llama3", W, 4, "contiguous")),
    *(("ulysses", W.replace(mask=Window(3, 0), softcap=5.0), 2, "contiguous"), ("usp", W, 4, "contiguous")),
    *(
        ("usp@ulysses=1", W, 4, "head-tail"),
        ("te_cp", PACKED, 4, "head-tail"),
        ("te_cp@comm=a2a:kernel=flash", W, 2, "head-tail"),
    ),
    *(
        ("diffusers_cp", FULL.replace(kv_heads=4), 4, "contiguous"),
        ("diffusers_cp@ring=2", FULL.replace(kv_heads=4), 4, "contiguous"),
    ),
]


@pytest.mark.parametrize(("name", "workload", "ranks", "shard"), CLAIMED)
def test_it_claims_what_it_can_say(name, workload, ranks, shard):
    assert refusals(name, workload, ranks, shard, backward=True) == ""


def test_gradients_are_refused_where_gloo_or_flex_has_none():
    assert "sends gradients to itself in a ring of one rank" in refusals("usp@ulysses=2", W, 2, backward=True, machine=CPU)
    longer = W.replace(q_len=256, kv_len=256)
    assert "does not support backward on CPU" in refusals("torch_cp_flex", longer, 2, backward=True, machine=CPU)
    assert "gradients for q_len == kv_len only" in refusals(
        "diffusers_cp", FULL.replace(kv_heads=4, kv_len=128), 2, backward=True
    )


def test_one_process_is_not_enough_and_what_is_missing_is_said():
    registry = Registry()
    for name in BACKENDS:
        assert (
            registry[name].obstacle(W, H200, False)
            == f"{name} computes over several ranks; say ranks=2 in the marker of the test"
        )
        assert registry.argument_of(name) == "ranks"
        with pytest.raises(ValueError, match=f"{name} computes over several ranks"):
            registry[name].prepare(None)
    assert not any(map(registry.argument_of, [*TORCH, *libraries_guest.BACKENDS, "diffusers:native", "sdpa+compile"]))
    assert registry["torch_cp"].unavailable_because(CPU) == "needs a CUDA device"
    assert "needs torch 2.10" in registry["torch_cp_flex"].unavailable_because(dataclasses.replace(CPU, torch_version="2.9.1"))


# -- arguments -------------------------------------------------------------------------------------------------------------


class Recorder:
    """A library of which every function returns its first argument, and keeps what it was given."""

    def __init__(self, **known):
        self.calls = []
        vars(self).update(known)

    def __getattr__(self, name):
        def function(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return args[0]

        return function


@pytest.fixture
def called(monkeypatch):
    """Return a function that calls a backend with a stand-in for its library, on the shards of one rank."""

    def call(name, workload, library, rank=1, ranks=2, shard="contiguous"):
        monkeypatch.setattr(Library, "load", lambda self: library)
        sharding, inputs = Sharding(workload, shard, ranks), draw_inputs(workload)
        dim = 0 if workload.is_packed else 2
        shards = [getattr(inputs, t).index_select(dim, sharding.of(t)[rank]) for t in "qkv"]
        out = Registry()[name].prepare_on_rank(inputs, sharding, place(rank, ranks))(*shards)
        assert out.shape == shards[0].shape
        return library.calls

    return call


@pytest.mark.parametrize(("name", "shard"), [("ring_flash", "contiguous"), ("zigzag", "head-tail")])
def test_a_ring_gets_mask_scale_and_group(called, name, shard):
    ((function, (q, k, v), options),) = called(name, W, Recorder(), shard=shard)
    assert function == {"ring_flash": "ring_flash_attn_func", "zigzag": "zigzag_ring_flash_attn_func"}[name]
    assert (q.shape, k.shape, v.shape) == ((2, 32, 4, 32), (2, 32, 2, 32), (2, 32, 2, 32))
    assert options == {"softmax_scale": 0.3, "causal": True, "group": GROUP}
    ((function, (q, _, _, ends, longest), options),) = called(name, PACKED, Recorder(), shard=shard)
    assert function.endswith("varlen_func")
    assert q.shape == (40, 4, 32)
    assert (ends.tolist(), ends.dtype, longest) == ([0, 8, 40], torch.int32, 32)
    assert options["softmax_scale"] == PACKED.softmax_scale


def test_a_ring_without_a_mask_is_not_causal(called):
    ((_, _, options),) = called("ring_flash", FULL, Recorder())
    assert options["causal"] is False


def test_llama3_asks_which_keys_it_needs_and_calls_once_for_each_batch_entry(called):
    def prepare(ends, causal, rank, ranks):
        assert (ends.tolist(), causal, rank, ranks) == ([0, 64], True, 1, 2)
        return "cu_q", "cu_k", 32, 64, slice(0, 64)

    calls = called("llama3", W, Recorder(llama3_flash_attn_prepare_cu_seqlens=prepare))
    assert [name for name, _, _ in calls] == ["llama3_flash_attn_varlen_func"] * 2
    for _, (q, _, _, *given), options in calls:
        assert q.shape == (32, 4, 32)
        assert given == ["cu_q", "cu_k", 32, 64, 1, slice(0, 64)]
        assert options == {"softmax_scale": 0.3, "causal": True, "group": GROUP}


class Yunchang(Recorder):
    """yunchang, whose modules keep how they were made."""

    def __init__(self):
        super().__init__(kernels=SimpleNamespace(AttnType=SimpleNamespace(FA="fa")))
        self.globals = SimpleNamespace(PROCESS_GROUP=SimpleNamespace(ULYSSES_PG=None, RING_PG=None))

    def set_seq_parallel_pg(self, ulysses, ring, rank, world):
        self.globals.PROCESS_GROUP.ULYSSES_PG, self.globals.PROCESS_GROUP.RING_PG = f"ulysses {ulysses}", f"ring {ring}"

    def module(self, *args, **kwargs):
        made = vars(self.globals.PROCESS_GROUP).copy()

        def call(q, k, v, **options):
            self.calls.append((made, args, kwargs, options))
            return q

        return call

    UlyssesAttention = LongContextAttention = module


def test_yunchang_gets_groups_and_options(called):
    from pytest_attn.guests.ranks.libraries.yunchang import _groups_of

    windowed = W.replace(mask=Window(3, 0), softcap=5.0)
    ((_, args, kwargs, options),) = called("ulysses", windowed, Yunchang())
    assert (args, kwargs) == ((GROUP,), {"attn_type": "fa"})
    assert options == {"softmax_scale": 0.3, "causal": False, "softcap": 5.0, "window_size": (3, 0)}
    for name, ranks, shard, ring_type, groups in (
        ("usp", 4, "contiguous", "basic", ("ulysses 2", "ring 2")),
        ("usp@ulysses=1", 2, "head-tail", "zigzag", ("ulysses 1", "ring 2")),
    ):
        _groups_of.cache_clear()
        ((made, _, kwargs, options),) = called(name, W, Yunchang(), ranks=ranks, shard=shard)
        assert (made["ULYSSES_PG"], made["RING_PG"]) == groups
        assert kwargs == {"ring_impl_type": ring_type, "attn_type": "fa"}
        assert options == {"softmax_scale": 0.3, "causal": True, "softcap": 0.0, "window_size": (-1, -1)}
    _groups_of.cache_clear()


@pytest.mark.parametrize(
    ("name", "kernel", "degrees"),
    [
        ("diffusers_cp", "native", (1, 4)),
        ("diffusers_cp@ring=2", "_native_flash", (2, 2)),
        ("diffusers_cp@ring=4:kernel=_native_cudnn", "_native_cudnn", (4, 1)),
    ],
)
def test_diffusers_gets_degrees_and_kernel(called, monkeypatch, name, kernel, degrees):
    from pytest_attn.guests.ranks.libraries import diffusers_cp

    monkeypatch.setattr(diffusers_cp, "_configuration", lambda device, ring, ulysses, rank: (ring, ulysses, rank))
    library = Recorder(AttentionBackendName=str)
    ((function, (q, *_), options),) = called(name, FULL.replace(kv_heads=4), library, ranks=4)
    assert (function, q.shape) == ("dispatch_attention_fn", (2, 16, 4, 32))
    assert options == {"scale": 0.3, "backend": kernel, "parallel_config": (*degrees, 1)}


@pytest.mark.parametrize(
    ("name", "comm"), [("te_cp", "p2p"), ("te_cp@comm=all_gather", "all_gather"), ("te_cp@comm=a2a", "a2a")]
)
@pytest.mark.parametrize("workload", [W, PACKED], ids=["dense", "packed"])
def test_transformer_engine_gets_group_and_communication(called, monkeypatch, name, comm, workload):
    from contextlib import nullcontext

    from pytest_attn.guests.ranks.libraries import te_cp

    asked = []
    module = Recorder()
    monkeypatch.setattr(te_cp, "module_of", lambda te, inputs, backward: _Module(module))
    monkeypatch.setattr(te_cp, "selected", lambda te, kernel, remembered: asked.append(kernel) or nullcontext())
    monkeypatch.setattr(te_cp, "listening", lambda te, said: nullcontext())
    (grouped, _, _), (_, (q, *_), options) = called(name, workload, module, shard="head-tail")
    assert grouped == ("group", GROUP, [0, 1], None, comm)
    assert asked == ["FusedAttention"]
    assert q.is_contiguous()
    if workload.is_packed:
        assert options["qkv_format"] == "thd"
        assert options["attn_mask_type"] == "padding_causal"
        for which in ("q", "kv"):  # of the whole sequences, not of the rank's parts
            assert options[f"cu_seqlens_{which}"].tolist() == options[f"cu_seqlens_{which}_padded"].tolist() == [0, 16, 80]
    else:
        assert (options["qkv_format"], options["attn_mask_type"]) == ("bshd", "causal")


class _Module:
    def __init__(self, recorder):
        self.recorder = recorder

    def set_context_parallel_group(self, *args):
        self.recorder.calls.append((("group", *args), (), {}))

    def __call__(self, *tensors, **options):
        self.recorder.calls.append(("call", tensors, options))
        return tensors[0].flatten(-2)


# -- the context of both directions ------------------------------------------------------------------------------------------


def test_both_directions_are_within_the_context():
    from contextlib import contextmanager

    said = []

    @contextmanager
    def context():
        said.append("in")
        yield
        said.append("out")

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            ctx.save_for_backward(q)
            said.append("forward")
            return q * q

        @staticmethod
        def backward(ctx, gradient):
            said.append("backward")
            return 2 * ctx.saved_tensors[0] * gradient

    fn = within(context, lambda q, k, v: Square.apply(q) + k + 0 * v)
    q, k, v = (torch.tensor([3.0], requires_grad=True) for _ in range(3))
    out = fn(q, k, v)
    for _ in range(2):  # the graph stays, for a second backward pass
        assert [t.item() for t in torch.autograd.grad(out, (q, k, v), torch.ones(1), retain_graph=True)] == [6.0, 1.0, 0.0]
    assert said == ["in", "forward", "out", "in", "backward", "out", "in", "backward", "out"]
    with torch.no_grad():
        assert not fn(q, k, v).requires_grad
    assert torch.autograd.grad(fn(q, k.detach(), v.detach()), q)[0].item() == 6.0, "where q alone has a gradient"


def test_defects_of_rings_are_those_of_the_kernel_and_of_the_split():
    def issues(name, rows, shard="contiguous", ranks=2, **options):
        sharding = Sharding(Workload(rows, heads=4, **options), shard, ranks)
        return [defect.issue for defect in Registry()[name].defects_over(sharding, H200, backward=True)]

    causal = {"mask": "causal"}
    assert issues("torch_cp", 128) == issues("torch_cp@kernel=cudnn", 384) == ["pytorch#196678"]
    assert issues("torch_cp", 256, "head-tail", **causal) == ["pytorch#196678"], "its two chunks"
    assert issues("torch_cp", 256, ranks=4) == ["pytorch#196678"]
    assert issues("torch_cp", 256) == issues("torch_cp", 1024) == issues("torch_cp@kernel=flash", 128) == []
    assert issues("torch_cp@kernel=efficient", 512, "head-tail", **causal) == ["pytorch#163075"]
    assert issues("torch_cp@kernel=efficient", 512, **causal) == []
    assert issues("diffusers_cp@ring=2:kernel=_native_cudnn", 128) == ["pytorch#196678"]
    assert issues("diffusers_cp@ring=2:kernel=flash", 128) == issues("diffusers_cp", 128) == []
    assert issues("diffusers_cp", 192) == ["pytorch#196678"], "heads are shared out, sequences are whole"
    assert issues("te_cp", 128, "head-tail") == issues("te_cp@comm=a2a", 192, "head-tail") == ["pytorch#196678"]
    assert issues("te_cp@kernel=flash", 128, "head-tail") == issues("te_cp@comm=a2a", 128, "head-tail") == []
    sharding = Sharding(Workload(128, heads=2), "contiguous", 2)
    assert not Registry()["torch_cp"].defects_over(sharding, H200, backward=False)


def test_what_ring_flash_attn_imports_of_an_older_transformers_is_said(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        needs = "from transformers_of_today import is_flash_attn_greater_or_equal_2_10"
        files = {"transformers_of_today/__init__.py": "", "ring_flash_attn/__init__.py": f"import torch\n{needs}\n"}
        install(patch, tmp_path, files, "ring-flash-attn", "0.1.8")
        reason = Registry()["llama3"].broken_because()
    uninstall(files)
    assert "cannot import name" in reason
    assert reason.endswith("; pip install 'transformers<5'")


@pytest.mark.parametrize("name", ["zigzag", "usp"])
def test_what_the_build_of_flash_attn_lacks_is_a_refusal(monkeypatch, name):
    lacks = "this flash-attn build has head_dim 64 and 128 only"
    monkeypatch.setattr(ring_flash, "refused_by_build", lambda dim, *_: (lacks,) if dim == 32 else ())
    shard = "head-tail" if name == "zigzag" else "contiguous"
    for dim, refusals in ((32, [lacks]), (64, [])):
        sharding = Sharding(Workload(256, heads=4, head_dim=dim, mask="causal"), shard, 2)
        assert Registry()[name].refusals_over(sharding, H200) == refusals
