"""Functions of libraries in a model, which stand here as modules of the same names and signatures.

How each library's arguments are read: tests/backends/libraries/test_round_trip.py.
"""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from models.zoo import case_of, stack

import pytest_attn
from pytest_attn import Causal, Window


def swapped(*tensors):
    return [t.transpose(1, 2) for t in tensors]


def dense(mask, q, k):
    from pytest_attn.backends.dense import dense as of

    return None if mask is None else of(mask, (*q.shape[:3], k.shape[2]), q.device)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None
):
    """Mask from the bottom right, as flash-attention does."""
    q, k, v = swapped(q, k, v)
    left = None if window_size[0] < 0 else window_size[0]
    mask = Window(left, 0) if causal else None
    (out,) = swapped(F.scaled_dot_product_attention(q, k, v, attn_mask=dense(mask, q, k), scale=softmax_scale))
    return out


def single_prefill_with_kv_cache(q, k, v, causal=False, kv_layout="NHD", sm_scale=None, window_left=-1):
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)[0].transpose(0, 1)


@pytest.fixture
def library(monkeypatch):
    """Make a function importable from a library's module; returns that."""

    def made(name, function):
        parent, _, child = name.rpartition(".")
        module = ModuleType(name)
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)
        if parent:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
            setattr(sys.modules[parent], child, module)
        return module

    return made


def checked(attend):
    """Check a model whose attention is this; return the workload of its calls."""
    model, step = case_of(stack(attend))
    found = pytest_attn.check_model(model, step, functions=())
    assert len(found.calls) == 2
    assert pytest_attn.check_model(model, step, "math").passed
    return found.calls[0]


def test_flash_attention(library):
    module = library("flash_attn", flash_attn_func)

    def attend(q, k, v):
        (out,) = swapped(module.flash_attn_func(*swapped(q, k, v), causal=True, window_size=(9, 0), softmax_scale=0.2))
        return out

    call = checked(attend)
    assert (call.function, call.workload.mask, call.workload.scale) == ("flash_attn.flash_attn_func", Window(9, 0), 0.2)


def test_flashinfer(library):
    module = library("flashinfer", single_prefill_with_kv_cache)

    def attend(q, k, v):
        parts = [module.single_prefill_with_kv_cache(*(t[b].transpose(0, 1) for t in (q, k, v)), causal=True) for b in (0, 1)]
        return torch.stack(parts).transpose(1, 2)

    model, step = case_of(stack(attend))
    found = pytest_attn.check_model(model, step)
    assert [call.label for call in found.calls].count("blocks.0.attn, call 2") == 1
    assert found.calls[0].workload.mask == Causal(bottom_right=True)


def test_an_argument_that_is_not_read_is_told_and_nothing_passes_silently(library):
    def flash_attn_func(q, k, v, block_table=None):
        (out,) = swapped(F.scaled_dot_product_attention(*swapped(q, k, v)))
        return out

    module = library("flash_attn", flash_attn_func)

    def attend(q, k, v):
        (out,) = swapped(module.flash_attn_func(*swapped(q, k, v), block_table=torch.ones(2, 3)))
        return out

    model, step = case_of(stack(attend))
    with pytest.raises(
        AssertionError, match=r"flash_attn_func was not judged: its argument block_table=a tensor of shape \(2, 3\)"
    ):
        pytest_attn.check_model(model, step)


def test_a_library_that_drops_its_window_is_found(library):
    def forgets(q, k, v, causal=False, window_size=(-1, -1)):
        return flash_attn_func(q, k, v, causal=causal)

    forgets.__name__ = "flash_attn_func"
    module = library("flash_attn", forgets)

    def attend(q, k, v):
        (out,) = swapped(module.flash_attn_func(*swapped(q, k, v), causal=True, window_size=(9, 0)))
        return out

    model, step = case_of(stack(attend))
    with pytest.raises(AssertionError, match="whose left window is ignored"):
        pytest_attn.check_model(model, step)
