"""The rules by which the tests of other projects accept a kernel's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Rule(NamedTuple):
    """What others assert. accepts: of (name, tensor, exact, twin, dtype); inputs: the distribution that they draw."""

    inputs: str
    accepts: Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], bool]


ByDtype = dict[str, float]


def close(atol: ByDtype, rtol: ByDtype, atol_of_gradients: ByDtype, rtol_of_gradients: ByDtype) -> Any:
    """Return |a - b| <= atol + rtol |b| with tolerances by dtype."""

    def accepts(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, dtype: torch.dtype) -> bool:
        key = str(dtype).removeprefix("torch.")
        a, r = (atol[key], rtol[key]) if name == "out" else (atol_of_gradients[key], rtol_of_gradients[key])
        return torch.allclose(got.double(), exact, atol=a, rtol=r)

    return accepts


def assert_close_defaults(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, dtype: torch.dtype) -> bool:
    """torch.testing.assert_close against the exact result, rounded."""
    try:
        torch.testing.assert_close(got, exact.to(dtype))
    except AssertionError:
        return False
    return True


def get_tolerances(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, dtype: torch.dtype) -> bool:
    """PyTorch's test_transformers.py: tolerances from the twin's largest absolute and largest relative deviation."""
    fudge = {"out": 1, "dq": 4, "dk": 8, "dv": 7}[name]
    deviation = (exact - twin.double()).abs()
    least = {torch.bfloat16: 1.6e-2, torch.float16: 1e-3}.get(dtype, 1.3e-6)
    relative = float((deviation / exact.abs()).nan_to_num(0.0).max())
    rtol = fudge * max(relative if relative < 1e30 else least, least)
    return torch.allclose(got.double(), exact, atol=fudge * max(float(deviation.max()), 1e-3), rtol=rtol)


def flash_attention(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, dtype: torch.dtype) -> bool:
    """flash-attention: at most twice, for gradients three times, the twin's largest error."""
    times = 2 if name == "out" else 3
    return float((got.double() - exact).abs().max()) <= times * float((twin.double() - exact).abs().max()) + 1e-5


def cosine(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, dtype: torch.dtype) -> bool:
    """Cosine similarity of the whole tensor."""
    a, b = got.double().flatten(), exact.flatten()
    return bool(torch.nn.functional.cosine_similarity(a, b, 0) >= 0.99) or float(b.norm()) == 0


def all_dtypes(fp32: float, fp16: float, bf16: float) -> ByDtype:
    return {"float32": fp32, "float16": fp16, "bfloat16": bf16}


RULES = {
    "assert_close, defaults": Rule("randn", assert_close_defaults),
    "PyTorch get_tolerances": Rule("randn", get_tolerances),
    "flash-attention 2x": Rule("randn", flash_attention),
    "xformers": Rule(
        "peaky",
        close(
            all_dtypes(3e-4, 4e-3, 2e-2),
            all_dtypes(2e-5, 4e-4, 5e-3),
            all_dtypes(9e-4, 0.2, 0.9),
            all_dtypes(1e-4, 2e-2, 0.1),
        ),
    ),
    "Transformer Engine": Rule("flat", close(*[all_dtypes(1e-3, 1e-3, 1.5e-2)] * 4)),
    "vLLM": Rule("randn", close(*[all_dtypes(1.5e-2, 1.5e-2, 1.5e-2), all_dtypes(1e-2, 1e-2, 1e-2)] * 2)),
    "cosine >= .99": Rule("randn", cosine),
}
