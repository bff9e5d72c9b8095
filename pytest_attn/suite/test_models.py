"""Small models, as they are and with every selected backend in place of their attention: each call judged on its own tensors.

Those of plain torch always run; those of timm, transformers and diffusers where the library is installed.
"""

from types import ModuleType
from typing import Any, Final

import pytest

from pytest_attn import AttentionModel, Backend

#: of the libraries that models come from, which warn as they are imported and as they run: nothing of attention
pytestmark = pytest.mark.filterwarnings("default")
_LANGUAGE = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt-oss")
LIBRARY = (*_LANGUAGE, "modernbert", "siglip", "whisper", "timm-vit-197", "flux", "wan")
#: what takes a CPU too long, or tells it nothing more
FOR_A_GPU = ("vit-196", "vit-3137", "vit-3136", "timm-vit-196", "timm-vit-3137", "timm-vit-3136")
#: the suite asks every backend about every model, and carries what it found in torch
EXCUSED: Final = ("refusals", "known defects")
DTYPES = ("bfloat16", "float16", "float32")


@pytest.mark.attention_model(covering=1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["vit", "llama", "mistral", *FOR_A_GPU[:3]])
def test_backends_in_models(attn_model: AttentionModel, attn_backend: Backend, name: str, dtype: str) -> None:
    """Every backend, in a training step."""
    _require_gpu(attn_model, name in (*FOR_A_GPU, "mistral") or dtype != "bfloat16")
    _require_gradients(attn_backend)
    model, step = _of_torch(name, attn_model, dtype)
    attn_model.check(model, step, attn_backend, scatter=0, excused=EXCUSED)


@pytest.mark.attention_model(backward=False, covering=1)
@pytest.mark.parametrize("name", ["softcap", "neighborhood"])
def test_backends_in_flex_models(attn_model: AttentionModel, attn_backend: Backend, name: str) -> None:
    """Every backend that can say a softcap or a neighborhood, forward."""
    model, step = _of_torch(name, attn_model)
    attn_model.check(model, step, attn_backend, scatter=0, excused=EXCUSED)


@pytest.mark.attention_model(covering=1)
@pytest.mark.parametrize("name", LIBRARY)
def test_backends_in_library_models(attn_model: AttentionModel, attn_backend: Backend, name: str) -> None:
    """Every backend in place of the library's attention, in a training step."""
    _require_gpu(attn_model, True)
    _require_gradients(attn_backend)
    attn_model.check(*_of_library(name, attn_model), attn_backend, scatter=0, excused=EXCUSED)


@pytest.mark.attention_model(covering=1)
@pytest.mark.parametrize("name", ["vit", "llama", "mistral"])
def test_torch_models(attn_model: AttentionModel, name: str) -> None:
    """The choice of torch, in a training step."""
    attn_model.check(*_of_torch(name, attn_model))


@pytest.mark.attention_model(covering=1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*LIBRARY, *FOR_A_GPU[3:]])
def test_library_models(attn_model: AttentionModel, name: str, dtype: str) -> None:
    """The choice of the library, in a training step."""
    _require_gpu(attn_model, name in FOR_A_GPU or dtype != "bfloat16")
    attn_model.check(*_of_library(name, attn_model, dtype), scatter=0, excused=EXCUSED)


@pytest.mark.attention_model(covering=1)
@pytest.mark.parametrize("name", _LANGUAGE)
def test_invariants_of_library_models(attn_model: AttentionModel, name: str) -> None:
    """Future unseen, windows, padding, packing, caches."""
    attn_model.check_invariants(*_of_tokens(name, attn_model))


@pytest.mark.attention_model(backward=False, covering=1)
@pytest.mark.parametrize("cache", ["dynamic", "static", "sliding"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_decoding_of_library_models(attn_model: AttentionModel, name: str, cache: str) -> None:
    """Every call of a prefill and of some steps through a cache."""
    model, ids = _of_tokens(name, attn_model)
    attn_model.check(model, _models().decoding(model, ids, cache), scatter=0)


def _require_gpu(case: AttentionModel, is_for_a_gpu: bool) -> None:
    """Skip on a CPU what would take it too long."""
    if is_for_a_gpu and case.device.type == "cpu":
        pytest.skip("on a GPU: a CPU runs a smaller part of the models, in bfloat16")


def _require_gradients(backend: Backend) -> None:
    """Skip before a model is made what refuses each of its calls."""
    if backend.capabilities and "backward" not in backend.capabilities.features:
        pytest.skip(f"{backend.name} has no backward pass")


def _models() -> ModuleType:
    """Return the models; torch is imported by a test that runs, and not when it is collected."""
    from pytest_attn.guests.models import small_models

    return small_models


def _of_torch(name: str, case: AttentionModel, dtype: str = "bfloat16") -> tuple[Any, Any]:
    """Return a model and its step."""
    made: tuple[Any, Any] = _models().torch_model(name, case.device, getattr(_models().torch, dtype))
    return made


def _of_library(name: str, case: AttentionModel, dtype: str = "bfloat16") -> tuple[Any, Any]:
    made: tuple[Any, Any] = _models().library_model(name, case.device, getattr(_models().torch, dtype))
    return made


def _of_tokens(name: str, case: AttentionModel) -> tuple[Any, Any]:
    """Return a model and the ids of its tokens."""
    return _models().language_model(name, case.device, _models().torch.bfloat16), _models().token_ids(case.device)
