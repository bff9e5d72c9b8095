"""The Flux table through the plugin, beside a plain script over the same backends: times, errors and p50 of both.

    python benchmarks/flux.py [--backends sdpa_cudnn,flash2+compile,...] [--out FILE.json]

Six workloads (batch 1, 24 heads of 128, 4096 image tokens and 128 to 512 text tokens, bf16), each backend checked and
timed with triton's do_bench (3 ms warm-up, 10 ms). The script side calls the libraries directly, as people write it:
float32 MATH as the truth, layouts copied, errors printed to six digits. The plugin side is a marked test under pytest.
Each side is a process of its own with empty compile caches. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

BACKENDS = (
    "sdpa_flash,sdpa_flash+compile,sdpa_cudnn,sdpa_cudnn+compile,sdpa_efficient,flash2,flash2+compile,flash4,"
    "xformers,te_fused,sage,flex"
)
TEXT_LENGTHS = (128, 256, 320, 384, 448, 512)
HEADS, DIM, IMAGE = 24, 128, 4096
TEST = """
import pytest, torch, triton
from flux import FOUND, errors
from pytest_attn import draw_inputs

@pytest.mark.attention("flux", inputs="randn", precision="sdpa")
def test_flux(attn, attn_backend):
    with torch.inference_mode():
        kernel = attn_backend.prepare(draw_inputs(attn.workload, "randn", 0, attn.device))
        FOUND[attn.workload.name, attn_backend.name] = (
            *errors(attn.workload.q_len, lambda *qkv: kernel(*(t.transpose(1, 2).contiguous() for t in qkv)).transpose(1, 2)),
            triton.testing.do_bench(lambda: kernel(attn.q, attn.k, attn.v), warmup=3, rep=10, return_mode="median"),
        )
        attn.check(attn_backend if attn_backend.is_approximate else kernel)  # last: a known defect ends the test
"""
FOUND: dict[tuple[str, str], tuple[float, float, float]] = {}


def script_functions() -> dict[str, Callable[..., Any]]:
    """Return what a script would call, (batch, rows, heads, dim) in and out, for every library that is there."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import flex_attention

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: SDPBackend) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()

    functions: dict[str, Callable[..., Any]] = {
        f"sdpa_{name}": functools.partial(sdpa, kernel=getattr(SDPBackend, f"{name.upper()}_ATTENTION"))
        for name in ("flash", "efficient", "cudnn")
    }
    flex = torch.compile(flex_attention, dynamic=False)
    functions["flex"] = lambda q, k, v: flex(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    for library in (_flash2, _flash4, _xformers, _transformer_engine, _sage):
        with report_failure(library.__name__[1:]):
            functions.update(library())
    return functions


def _flash2() -> dict[str, Callable[..., Any]]:
    from flash_attn import flash_attn_func

    return {"flash2": flash_attn_func}


def _flash4() -> dict[str, Callable[..., Any]]:
    from flash_attn.cute import flash_attn_func

    return {"flash4": lambda q, k, v: flash_attn_func(q, k, v)[0]}


def _xformers() -> dict[str, Callable[..., Any]]:
    import xformers.ops

    return {"xformers": xformers.ops.memory_efficient_attention}


def _transformer_engine() -> dict[str, Callable[..., Any]]:
    os.environ.update(NVTE_FLASH_ATTN="0", NVTE_FUSED_ATTN="1", NVTE_UNFUSED_ATTN="0")
    from importlib.util import find_spec

    spec = find_spec("nvidia.cudnn")
    if spec and spec.submodule_search_locations:
        os.environ.setdefault("CUDNN_HOME", next(iter(spec.submodule_search_locations)))
    from transformer_engine.pytorch import DotProductAttention

    module = DotProductAttention(HEADS, DIM, qkv_format="bshd", attn_mask_type="no_mask").eval()
    return {"te_fused": lambda q, k, v: module(q, k, v).unflatten(2, (HEADS, DIM))}


def _sage() -> dict[str, Callable[..., Any]]:
    from sageattention import sageattn

    return {"sage": lambda q, k, v: sageattn(q, k, v, tensor_layout="NHD")}


def compiled(name: str, functions: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the function of "NAME", "NAME+compile" or "NAME+max_autotune"."""
    base, _, variant = name.partition("+")
    if not variant:
        return functions[base]
    mode = "max-autotune-no-cudagraphs" if variant == "max_autotune" else "default"
    return torch.compile(functions[base], mode=mode, dynamic=False, fullgraph=True)


def draw(rows: int) -> list[torch.Tensor]:
    """Return the script's q, k and v in float32, the same on both sides."""
    torch.manual_seed(rows)
    return [torch.randn(1, rows, HEADS, DIM, device="cuda") for _ in range(3)]


@functools.lru_cache(maxsize=1)
def truth(rows: int) -> torch.Tensor:
    """Return float32 MATH attention on inputs that were not rounded yet, as the script takes it for the truth."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in draw(rows))).transpose(1, 2)


def errors(rows: int, fn: Callable[..., Any]) -> tuple[float, float]:
    """Return absmax and mean absolute error of `fn` on the script's inputs, rounded to bf16, against its truth."""
    difference = (fn(*(t.bfloat16() for t in draw(rows))).float() - truth(rows)).abs()
    return float(difference.max()), float(difference.mean())


def run_script(names: list[str]) -> None:
    """Check and time every function, workload by workload, as a script does."""
    torch._dynamo.config.recompile_limit = 10_000
    functions = script_functions()
    functions = {name: compiled(name, functions) for name in names if name.partition("+")[0] in functions}
    with torch.inference_mode():
        for text in TEXT_LENGTHS:
            for name, fn in functions.items():
                with report_failure(f"{name} on flux-L{text}"):
                    FOUND[f"flux-L{text}", name] = check_and_time(IMAGE + text, fn)


@contextlib.contextmanager
def report_failure(case: str) -> Iterator[None]:
    """Print what went wrong and go on with the next case."""
    try:
        yield
    except Exception as error:
        print(f"{case} is left out: {type(error).__name__}: {str(error)[:120]}")


def check_and_time(rows: int, fn: Callable[..., Any]) -> tuple[float, float, float]:
    """Return absmax, mean absolute error and p50 in ms."""
    from triton.testing import do_bench

    q, k, v = (t.bfloat16() for t in draw(rows))
    return (*errors(rows, fn), do_bench(functools.partial(fn, q, k, v), warmup=3, rep=10, return_mode="median"))


def run_plugin(names: list[str]) -> None:
    """Run a marked test over the same backends under pytest."""
    import pytest

    sys.modules["flux"] = sys.modules["__main__"]
    with tempfile.TemporaryDirectory() as folder:
        test = Path(folder, "test_flux.py")
        test.write_text(TEST)
        options = [
            "-q",
            "-rs",
            "-Wignore",
            "--durations=12",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            f"--rootdir={folder}",
            f"--attn-backends={','.join(names)}",
        ]
        if not any("pytest_attn" in str(entry) for entry in _entry_points()):
            options += ["-p", "pytest_attn.plugin"]
        pytest.main([str(test), *options])


def _entry_points() -> list[Any]:
    from importlib.metadata import entry_points

    return list(entry_points(group="pytest11"))


def child(side: str, names: list[str]) -> None:
    """Run one side and print its figures as JSON on the last line."""
    start = time.perf_counter()
    (run_script if side == "script" else run_plugin)(names)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "found": [[*key, *value] for key, value in FOUND.items()]}))


def run_side(side: str, names: list[str]) -> dict[str, Any]:
    """Run one side in a process of its own with empty caches; return seconds and figures by (workload, backend)."""
    with tempfile.TemporaryDirectory() as caches:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
        command = [sys.executable, __file__, "--side", side, "--backends", ",".join(names)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    *log, last = done.stdout.strip().splitlines()
    print("\n".join(f"  {side}: {line}" for line in log))
    result = json.loads(last)
    return {"seconds": result["seconds"], "found": {(w, b): figures for w, b, *figures in result["found"]}}


def main() -> None:
    """Run both sides and print them beside each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default=BACKENDS)
    parser.add_argument("--out")
    parser.add_argument("--side", choices=("script", "plugin"))
    options = parser.parse_args()
    names = options.backends.split(",")
    if options.side:
        child(options.side, names)
        return
    script = run_side("script", names)
    both = [name for name in names if any(backend == name for _, backend in script["found"])]
    plugin = run_side("plugin", both)
    print(
        f"{'workload':10} {'backend':24} {'absmax':>9} {'plugin':>9} {'mean abs':>9} {'plugin':>9} {'p50 ms':>7} {'plugin':>7}"
    )
    same = 0
    for (workload, backend), theirs in script["found"].items():
        ours = plugin["found"].get((workload, backend))
        shown = ours or [float("nan")] * 3
        same += bool(ours) and all(f"{a:.6f}" == f"{b:.6f}" for a, b in zip(theirs[:2], shown[:2], strict=True))
        pairs = (f"{a:9.6f} {b:9.6f}" for a, b in zip(theirs[:2], shown[:2], strict=True))
        print(f"{workload:10} {backend:24} {' '.join(pairs)} {theirs[2]:7.4f} {shown[2]:7.4f}")
    ratio = plugin["seconds"] / script["seconds"]
    print(f"errors equal to six digits: {same} of {len(script['found'])}")
    print(f"script {script['seconds']:.1f} s, plugin {plugin['seconds']:.1f} s, ratio {ratio:.2f}")
    if options.out:
        rows = [[*key, *value, *plugin["found"].get(key, [])] for key, value in script["found"].items()]
        result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "ratio": ratio, "rows": rows}
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
