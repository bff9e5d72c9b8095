import dataclasses

import pytest
import torch
from fakes import install, uninstall
from fakes.attention import attention
from fakes.judged import CPU, H200, assert_passes, judged
from torch.nn import attention as torch_attention

from pytest_attn import Workload, draw_inputs
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.sdpa import _BROKEN_HOOKS, _failure_of_one_token

HERE_MACHINE = dataclasses.replace(machine_of(CPU), torch_version="2.11.0+cu130")
PATHS = {"sdpa_fa3": ("flash_attn_interface.py", "flash-attn-3"), "sdpa_fa4": ("flash_attn/cute/__init__.py", "flash-attn-4")}
W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)
SQUARE = W.replace(kv_len=48, mask="causal")


class Hook:
    """Overrides torch's operators in the way of torch's own hooks, here those of the CPU, and notes that it was asked."""

    def __init__(self, values=2, forward=1.0, backward=1.0):
        self.values, self.forward_factor, self.backward_factor = values, forward, backward
        self.asked = []

    def register(self):
        overriding = torch.library.Library("aten", "IMPL", "CPU")
        overriding.impl("_scaled_dot_product_flash_attention_for_cpu", self.forward, "CPU")
        overriding.impl("_scaled_dot_product_flash_attention_for_cpu_backward", self.backward, "CPU")
        return Handle(overriding)

    def private_function(self, *tensors, **options):
        returned = attention(*(t.transpose(1, 2) for t in tensors), **options)
        return (*returned, None, None, None)[: self.values]

    def forward(self, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
        self.asked.append("forward")
        out, lse = self.private_function(query, key, value, scale=scale, causal="top-left" if is_causal else None)
        return out.transpose(1, 2) * self.forward_factor, lse

    def backward(self, grad, query, key, value, out, lse, dropout_p, is_causal, *, attn_mask=None, scale=None):
        self.asked.append("backward")
        grads = gradients(grad.float(), *(t.float() for t in (query, key, value, out)), lse, is_causal, scale)
        return tuple(g.to(query.dtype) * self.backward_factor for g in grads)


def gradients(grad, q, k, v, out, lse, is_causal, scale):
    """Write attention's backward pass out: below the dispatcher there is no autograd."""
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    wide_k, wide_v = (t.repeat_interleave(group, 1) for t in (k, v))
    p = (q @ wide_k.mT * scale - lse[..., None]).exp()
    p = p.tril() if is_causal else p
    ds = p * (grad @ wide_v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in (ds.mT @ q, p.mT @ grad))
    return ds @ wide_k, dk, dv


class Handle:
    def __init__(self, overriding):
        self.overriding = overriding

    def remove(self):
        self.overriding._destroy()


def forget():
    _failure_of_one_token.cache_clear()
    _BROKEN_HOOKS.clear()


@pytest.fixture
def hooked(monkeypatch, tmp_path):
    """Install a library for a backend and put a hook into torch's registry in the place of its own."""
    registry = pytest.importorskip("torch.nn.attention._registry", reason="torch 2.11 and newer has a registry of hooks")

    def put(name, hook=None):
        path, distribution = PATHS[name]
        install(monkeypatch, tmp_path, {path: ""}, distribution, "4.0.0b36")
        backend = Registry()[name]
        if hook is not None:
            hooks = {**registry._FLASH_ATTENTION_IMPLS, backend.implementation: hook.register}
            monkeypatch.setattr(registry, "_FLASH_ATTENTION_IMPLS", hooks)
        forget()
        return backend

    yield put
    assert torch_attention.current_flash_attention_impl() is None
    forget()
    uninstall([path for path, _ in PATHS.values()])


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("workload", [W.replace(scale=0.3), SQUARE], ids=lambda w: w.id)
def test_forward_and_backward_go_through_the_hook(hooked, name, workload):
    hook = Hook()
    backend = hooked(name, hook)
    assert backend.broken_because() is None
    assert backend.unsupported_because(workload, HERE_MACHINE, backward=True) == []
    assert_passes(backend, workload, backward=True)
    assert {"forward", "backward"} <= set(hook.asked)


@pytest.mark.parametrize(("planted", "wrong"), [({"forward": 1.05}, "out"), ({"backward": 1.05}, "dq")])
def test_a_fault_behind_the_hook_is_found(hooked, planted, wrong):
    backend = hooked("sdpa_fa4", Hook(**planted))
    comparison = judged(backend, SQUARE, backward=True)
    assert wrong in {t.name for t in comparison.tensors if not t.passed}


def test_a_backward_pass_can_be_repeated_and_torchs_own_kernel_is_back_after_it(hooked):
    hook = Hook()
    inputs = draw_inputs(SQUARE, "flat")
    leaves = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    out = hooked("sdpa_fa4", hook).prepare(inputs, backward=True)(*leaves)
    for _ in range(2):
        torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
    assert hook.asked == ["forward", "backward", "backward"]
    assert torch_attention.current_flash_attention_impl() is None
    torch.nn.functional.scaled_dot_product_attention(*leaves, enable_gqa=True).sum().backward()
    assert hook.asked == ["forward", "backward", "backward"]


def test_what_a_user_activated_comes_back(hooked):
    backend = hooked("sdpa_fa4", Hook())
    torch_attention.register_flash_attention_impl("theirs", register_fn=Hook().register)
    torch_attention.activate_flash_attention_impl("theirs")
    try:
        inputs = draw_inputs(SQUARE, "flat")
        backend.prepare(inputs)(inputs.q, inputs.k, inputs.v)
        assert torch_attention.current_flash_attention_impl() == "theirs"
    finally:
        torch_attention.restore_flash_attention_impl()


def test_a_hook_that_no_longer_fits_the_library_is_refused_in_its_own_words(hooked):
    hook = Hook(values=5)
    backend = hooked("sdpa_fa4", hook)
    for workload in (SQUARE, SQUARE.replace(head_dim=64), SQUARE.replace(head_dim=128, dtype="float16")):
        for backward in (True, False):
            assert backend.unsupported_because(workload, HERE_MACHINE, backward) == [
                "torch 2.11.0's FA4 hook fails with flash-attn-4 4.0.0b36: ValueError: too many values to unpack (expected 2)"
            ]
    assert hook.asked == ["forward"]  # which compiles


def test_a_build_without_a_head_dimension_is_refused_in_its_own_words(hooked):
    class Lacking(Hook):
        def private_function(self, q, *others, **options):
            if q.shape[-1] != 64:
                raise RuntimeError("This flash attention build does not support hdim32.\nRebuild it.")
            return super().private_function(q, *others, **options)

    backend = hooked("sdpa_fa4", Lacking())
    (reason,) = backend.unsupported_because(SQUARE, HERE_MACHINE)
    assert reason.endswith("RuntimeError: This flash attention build does not support hdim32.")
    assert backend.unsupported_because(SQUARE.replace(head_dim=64), HERE_MACHINE) == []


def test_a_library_that_torch_cannot_activate_is_broken(hooked):
    reason = hooked("sdpa_fa3").broken_because()
    words = "RuntimeError: Module 'flash_attn_interface' does not expose FA3"
    assert reason.startswith(f"torch cannot activate FA3: {words}")


def test_head_dims_without_a_kernel_on_sm100(hooked):
    b200 = dataclasses.replace(H200, capability=(10, 0), architecture="sm100")
    assert hooked("sdpa_fa4", Hook()).unsupported_because(W.replace(head_dim=160), b200) == [
        "takes a head_dim of at most 128, or 256, on sm100, not 160"
    ]
