"""The rules by which other projects accept results, at the commits that docs/explanation/others.md names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pytest_attn import Workload

OUT, WITH_GRADIENTS = ("out",), ("out", "dq", "dk", "dv")


class Rule(NamedTuple):
    """What others assert.

    accepts: of (name, tensor, exact, twin, workload). inputs: the distribution that they draw. judges: the results that they
    look at.
    """

    inputs: str
    accepts: Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor, Workload], bool]
    judges: tuple[str, ...] = WITH_GRADIENTS


ByDtype = dict[str, float]


def dtype_of(w: Workload) -> torch.dtype:
    """Return what the results are rounded to."""
    return getattr(torch, w.dtype)  # type: ignore[no-any-return]


def close(atol: ByDtype, rtol: ByDtype, atol_of_gradients: ByDtype, rtol_of_gradients: ByDtype) -> Any:
    """Return |a - b| <= atol + rtol |b| with tolerances by dtype."""

    def accepts(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, w: Workload) -> bool:
        key = w.dtype
        a, r = (atol[key], rtol[key]) if name == "out" else (atol_of_gradients[key], rtol_of_gradients[key])
        return torch.allclose(got.double(), exact, atol=a, rtol=r)

    return accepts


def assert_close_defaults(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, w: Workload) -> bool:
    """torch.testing.assert_close against the exact result, rounded."""
    try:
        torch.testing.assert_close(got, exact.to(dtype_of(w)))
    except AssertionError:
        return False
    return True


def get_tolerances(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, w: Workload) -> bool:
    """PyTorch's test_transformers.py: tolerances from the twin's largest absolute and largest relative deviation."""
    fudge = {"out": 1, "dq": 4, "dk": 8, "dv": 7}[name]
    deviation = (exact - twin.double()).abs()
    least = {torch.bfloat16: 1.6e-2, torch.float16: 1e-3}.get(dtype_of(w), 1.3e-6)
    relative = float((deviation / exact.abs()).nan_to_num(0.0).max())
    rtol = fudge * max(relative if relative < 1e30 else least, least)
    return torch.allclose(got.double(), exact, atol=fudge * max(float(deviation.max()), 1e-3), rtol=rtol)


def flash_attention(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, w: Workload) -> bool:
    """flash-attention: at most twice, for gradients three times, the twin's largest error."""
    times = 2 if name == "out" else 3
    return float((got.double() - exact).abs().max()) <= times * float((twin.double() - exact).abs().max()) + 1e-5


def flash_attention_3(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, w: Workload) -> bool:
    """flash-attention's hopper tests: 2x, with a soft-cap 3x, and what adding 0.3 and taking it away again does, twice."""
    kept = exact.to(dtype_of(w))
    atol = 2 * float((kept + 0.3 - 0.3 - kept).abs().max()) + (3e-4 if w.softcap and name != "out" else 0)
    reference, times = kept.double(), 3 if w.softcap else 2
    return float((got.double() - reference).abs().max()) <= times * float((twin.double() - reference).abs().max()) + atol


def flashinfer_bench(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, w: Workload) -> bool:
    """flashinfer-bench: finite, and no element off by both 1e-2 and a relative 1e-2."""
    x, y = got.float(), exact.to(got.dtype).float()
    error = (x - y).abs()
    return bool(x.isfinite().all()) and not bool(((error > 1e-2) & (error / (y.abs() + 1e-8) > 1e-2)).any())


def tritonbench(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, w: Workload) -> bool:
    """As tritonbench's flash_attention: no NaN, and assert_close with wider tolerances in half precision."""
    wider = {} if w.dtype == "float32" else {"rtol": 1e-2, "atol": 2e-2}
    try:
        torch.testing.assert_close(got, exact.to(dtype_of(w)), **wider)
    except AssertionError:
        return False
    return True


def rounded(accepts: Any) -> Any:
    """Return a rule that compares with the exact result as the dtype holds it, and wants finite numbers."""

    def of_rounded(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, w: Workload) -> bool:
        return bool(got.isfinite().all()) and bool(accepts(name, got, exact.to(dtype_of(w)).double(), twin, w))

    return of_rounded


def cosine(name: str, got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor, w: Workload) -> bool:
    """Cosine similarity of the whole tensor."""
    a, b = got.double().flatten(), exact.flatten()
    return bool(torch.nn.functional.cosine_similarity(a, b, 0) >= 0.99) or float(b.norm()) == 0


def all_dtypes(fp32: float, fp16: float, bf16: float) -> ByDtype:
    return {"float32": fp32, "float16": fp16, "bfloat16": bf16}


def both(tolerances: ByDtype) -> Any:
    """Return |a - b| <= t + t |b|."""
    return close(tolerances, tolerances, tolerances, tolerances)


#: of its daemon; of its Python client, which recommends 2.5 times its base tolerances for attention
GPUEMU_ATOL, GPUEMU_RTOL = all_dtypes(2.5e-5, 2.5e-3, 2.5e-2), all_dtypes(2.5e-4, 2.5e-2, 0.25)
GPUEMU, NONE = all_dtypes(1e-5, 1e-3, 1e-3), all_dtypes(0, 0, 0)
RULES = {
    "gpuemu, defaults": Rule("uniform-10", rounded(close(GPUEMU, NONE, GPUEMU, NONE)), OUT),
    "gpuemu, attention": Rule("randn", rounded(close(*[GPUEMU_ATOL, GPUEMU_RTOL] * 2)), OUT),
    "gpucheck": Rule("randn", both(all_dtypes(1e-4, 1e-2, 5e-2))),
    "flashinfer-bench": Rule("randn", flashinfer_bench, OUT),
    "tritonbench": Rule("randn", tritonbench, OUT),
    "KernelBench": Rule("rand", both(all_dtypes(1e-4, 1e-2, 1e-2)), OUT),
    "assert_close, defaults": Rule("randn", assert_close_defaults),
    "PyTorch get_tolerances": Rule("randn", get_tolerances),
    "flash-attention 2x": Rule("randn", flash_attention),
    "flash-attention 3": Rule("randn", flash_attention_3),
    "xformers": Rule(
        "peaky",
        close(
            all_dtypes(3e-4, 4e-3, 2e-2), all_dtypes(2e-5, 4e-4, 5e-3), all_dtypes(9e-4, 0.2, 0.9), all_dtypes(1e-4, 2e-2, 0.1)
        ),
    ),
    "Transformer Engine": Rule("flat", close(*[all_dtypes(1e-3, 1e-3, 1.5e-2)] * 4)),
    "vLLM": Rule("randn", close(*[all_dtypes(1.5e-2, 1.5e-2, 1.5e-2), all_dtypes(1e-2, 1e-2, 1e-2)] * 2)),
    "cosine >= .99": Rule("randn", cosine),
}
