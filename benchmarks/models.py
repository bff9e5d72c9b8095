"""What a check of a model costs, and one training step of a vision transformer with every backend.

    python benchmarks/models.py [--device cuda] [--small] [--parts ...] [--backends ...] [--depth 4] [--seconds 165]

First part: ViT-B/16 (197 tokens, batch 16) and 4 layers like Llama's (4,096 tokens): a plain step, forward and backward, and
a whole check of it, in time and peak memory. Second part: a ViT with 16 heads of 64 on 196 tokens, batch 128, under autocast
with SGD, eager and compiled: step, peak memory, what attention takes of it, and whether the backend is right in it. Its 24
layers are 4 unless --depth says otherwise. --parts chooses of check, eager and compiled. Nothing is begun after --seconds.
--small: sizes for a CPU.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pytest_attn import Workload, draw_inputs
from pytest_attn.backends.backend import Backend
from pytest_attn.backends.contexts import quiet
from pytest_attn.backends.machine import current, machine_of, resolve_device
from pytest_attn.backends.registry import Registry
from pytest_attn.guests.models.check_model import judge_model
from pytest_attn.guests.models.compiled import compilations
from pytest_attn.guests.models.model_comparison import ModelComparison
from pytest_attn.guests.models.small_models import Block
from pytest_attn.guests.models.step_timing import AttentionShare, attention_share
from pytest_attn.guests.models.substitution import BackendSubstitute, substitutes_of

Case = tuple[nn.Module, Callable[[], torch.Tensor]]
BACKENDS = "eager,sdpa_flash,sdpa_efficient,sdpa_cudnn,flex,flash2,flash3,te_fused,xformers,flash4,math"
PARTS = ("check", "eager", "compiled")
WARM_UP, STEPS = 3, 15


@dataclass(frozen=True)
class Sizes:
    """Of both parts: batch, side of the images, layers and width."""

    vit: tuple[int, int, int, int]
    llama: tuple[int, int, int, int, int]
    table: tuple[int, int, int]


FULL = Sizes(vit=(16, 224, 12, 12), llama=(1, 4096, 4, 32, 8), table=(128, 196, 16))
SMALL = Sizes(vit=(1, 64, 2, 3), llama=(1, 128, 2, 4, 2), table=(2, 49, 2))


class Run:
    """The device, and the time that is left."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        self._end = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be begun."""
        return time.monotonic() > self._end

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Return the wall seconds of a call, the device's work included."""
        self.wait()
        begun = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - begun

    def peak(self, call: Callable[[], Any]) -> int | None:
        """Return the bytes that were allocated at most during a call; None where nobody counts."""
        if self.device.type != "cuda":
            call()
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        self.wait()
        return int(torch.cuda.max_memory_allocated(self.device))

    def attempt(self, what: str, call: Callable[[], str]) -> None:
        """Print what a part found; where it raises, or the time is over, say so, and go on with the next."""
        if self.is_over:
            say(f"{what}: left out, the time is over")
            return
        try:
            with quiet(), current(self.device):
                found = call()
            say(found)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            text = (str(error).splitlines() or [""])[0]
            say(f"{what}: raised {type(error).__name__}: {text:.160} ({frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})")
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def say(text: str) -> None:
    print(text, flush=True)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


# -- what a check costs --------------------------------------------------------------------------------------------------


def vit(sizes: Sizes, device: torch.device) -> Case:
    """ViT-B/16: of timm where it is installed, else blocks of the same sizes."""
    batch, side, layers, heads = sizes.vit
    tokens, dim = (side // 16) ** 2 + 1, 64 * heads
    labels = torch.arange(batch, device=device) % 10
    try:
        from timm.models.vision_transformer import VisionTransformer
    except ImportError:
        blocks = [Block(sdpa, dim, heads, heads) for _ in range(layers)]
        own = nn.Sequential(*blocks, nn.LayerNorm(dim), nn.Linear(dim, 10)).to(device, torch.bfloat16)
        x = torch.randn(batch, tokens, dim, device=device, dtype=torch.bfloat16)
        return own, lambda: F.cross_entropy(own(x)[:, 0].float(), labels)
    model = VisionTransformer(img_size=side, depth=layers, embed_dim=dim, num_heads=heads, num_classes=10)
    model = model.to(device, torch.bfloat16)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[: 2 * dim] *= 6  # else all keys count alike
    images = torch.randn(batch, 3, side, side, device=device, dtype=torch.bfloat16)
    return model, lambda: F.cross_entropy(model(images).float(), labels)


def llama(sizes: Sizes, device: torch.device) -> Case:
    """Causal layers with grouped heads of 128."""
    batch, tokens, layers, heads, kv_heads = sizes.llama
    dim = 128 * heads
    blocks = [Block(causal, dim, heads, kv_heads) for _ in range(layers)]
    model = nn.Sequential(*blocks, nn.LayerNorm(dim), nn.Linear(dim, 128)).to(device, torch.bfloat16)
    x = torch.randn(batch, tokens, dim, device=device, dtype=torch.bfloat16)
    labels = torch.arange(batch * tokens, device=device) % 128
    return model, lambda: F.cross_entropy(model(x).flatten(0, 1).float(), labels)


def cost_of_a_check(run: Run, name: str, made: Callable[[Sizes, torch.device], Case], sizes: Sizes) -> str:
    """Time a plain step and its whole check, with the runs of honest scatter and without."""
    torch.manual_seed(0)
    model, step = made(sizes, run.device)

    def plain() -> None:
        model.zero_grad(set_to_none=True)
        step().backward()

    for _ in range(WARM_UP):
        plain()
    step_seconds = median(run.seconds(plain) for _ in range(STEPS))
    step_peak = run.peak(plain)
    model.zero_grad(set_to_none=True)
    lines = [f"{name}: a plain step {1e3 * step_seconds:.1f} ms{of_bytes(step_peak)}"]
    for again, scatter in enumerate((0, 0, 4)):
        found: list[ModelComparison] = []
        taken: list[float] = []

        def check() -> None:
            taken.append(run.seconds(lambda: found.append(judge_model(model, step, scatter=scatter))))

        peak = run.peak(check)
        memory = f", {peak / step_peak:.2f} times its peak memory" if peak and step_peak else ""
        ratio = taken[0] / step_seconds
        which = "first check" if again == 0 else f"check, scatter={scatter}"
        lines.append(f"  {which}: {taken[0]:.2f} s, {ratio:.0f} steps{memory}; {verdict(found[0])}")
    return "\n".join(lines)


def of_bytes(peak: int | None) -> str:
    return "" if peak is None else f", peak {peak / 2**30:.2f} GiB"


def verdict(found: ModelComparison) -> str:
    worst = found.worst
    z = f", z {worst.comparison.worst.z_element:.2f}" if worst and worst.comparison else ""
    if found.refused and not any(call.is_replaced for call in found.calls):
        return f"refused: {found.refused[0].reason}"
    is_known = "right" if found.passed else "WRONG"
    return f"{is_known}, {len(found.calls)} calls{z}" + ("" if found.passed else f": {found.message.splitlines()[0]:.120}")


# -- a training step with each backend -----------------------------------------------------------------------------------


class Vit(nn.Module):
    """Blocks over patches without a class token; attention is whatever it is given."""

    def __init__(self, attend: Callable[..., torch.Tensor], heads: int, layers: int, patch_dim: int = 768) -> None:
        super().__init__()
        dim = 64 * heads
        self.embed, self.norm, self.head = nn.Linear(patch_dim, dim), nn.LayerNorm(dim), nn.Linear(dim, 1000)
        self.blocks = nn.Sequential(*(Block(attend, dim, heads, heads) for _ in range(layers)))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Return logits of patches, (batch, tokens, patch_dim)."""
        found: torch.Tensor = self.head(self.norm(self.blocks(self.embed(patches))).mean(1))
        return found


@dataclass(frozen=True)
class Training:
    """The same model and batch for every backend."""

    run: Run
    sizes: Sizes
    depth: int

    def case(self, attend: Callable[..., torch.Tensor] = sdpa, compiled: bool = False) -> tuple[nn.Module, Callable[[], Any]]:
        """Return a model and its step, forward only; it runs under autocast."""
        batch, tokens, heads = self.sizes.table
        device = self.run.device
        torch.manual_seed(0)
        model = Vit(attend, heads, self.depth).to(device)
        patches = torch.randn(batch, tokens, 768, device=device)
        labels = torch.arange(batch, device=device) % 1000
        called: Any = torch.compile(model) if compiled else model

        def step() -> torch.Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                return F.cross_entropy(called(patches), labels)

        return model, step

    @property
    def workload(self) -> Workload:
        """What each layer asks."""
        batch, tokens, heads = self.sizes.table
        return Workload(tokens, batch=batch, heads=heads, head_dim=64)

    def kernel(self, backend: Backend) -> Callable[..., torch.Tensor]:
        """Return the backend's function of (q, k, v) for this model's attention."""
        kernel = backend.prepare(draw_inputs(self.workload, "randn", 0, self.run.device), True)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: Any = kernel(q, k, v)
            return out[0] if isinstance(out, tuple | list) else out

        return attend

    def timed(self, backend: Backend, compiled: bool) -> str:
        """Train some steps; return their median, the first, and the peak of a steady one."""
        before = compilations()
        model, step = self.case(self.kernel(backend), compiled)
        optimizer = torch.optim.SGD(model.parameters())

        def train() -> None:
            optimizer.zero_grad(set_to_none=True)
            step().backward()
            optimizer.step()

        first = self.run.seconds(train)
        for _ in range(WARM_UP):
            train()
        seconds = median(self.run.seconds(train) for _ in range(STEPS))
        peak = self.run.peak(train)
        breaks = (compilations() - before)["breaks"]
        told = f", first {first:.1f} s, {breaks} graph breaks" if compiled else ""
        return f"{1e3 * seconds:8.2f} ms{of_bytes(peak)}{told}"

    def share(self, backend: Backend) -> str:
        """Return what attention takes of an eager step."""
        model, step = self.case()
        substitutes = substitutes_of(BackendSubstitute(backend, True), lambda: step().backward(), model, ())
        found = attention_share(model, step, "forward+backward", by=substitutes)
        if not isinstance(found, AttentionShare):
            return f"share unknown: {found}"
        if not found.is_seen:
            return "attention's share is below the scatter"
        return f"attention {100 * found.share:.0f} % ({found.ceiling:.2f}x at most)"

    def judged(self, backend: Backend) -> str:
        """Return the verdict on the backend in this model."""
        model, step = self.case()
        return verdict(judge_model(model, step, backend, scatter=0))


def table(run: Run, sizes: Sizes, depth: int, names: list[str], parts: list[str]) -> None:
    """Print a line per backend that runs here: first all of them eagerly, then compiled."""
    batch, tokens, heads = sizes.table
    say(f"a training step: {depth} layers, {heads} heads of 64, {tokens} tokens, batch {batch}, autocast to bf16, SGD")
    registry, machine = Registry(), machine_of(run.device)
    training, here = Training(run, sizes, depth), []
    for name in names:
        backend = registry[name]
        reason = backend.unavailable_because(machine) or backend.broken_because()
        reason = reason or backend.obstacle(training.workload, machine, True)
        if reason:
            say(f"{name:16} not here: {reason}")
        else:
            here.append(backend)
    for backend in here if "eager" in parts else ():
        begun = f"{backend.name:16} eager   "
        run.attempt(begun, lambda: f"{begun} {training.timed(backend, compiled=False)}")
        run.attempt(begun, lambda: f"{begun} {training.share(backend)}")
        run.attempt(begun, lambda: f"{begun} {training.judged(backend)}")
    for backend in here if "compiled" in parts else ():
        begun = f"{backend.name:16} compiled"
        run.attempt(begun, lambda: f"{begun} {training.timed(backend, compiled=True)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to run; default: all")
    parser.add_argument("--backends", default=BACKENDS)
    parser.add_argument("--depth", type=int, default=0, help="layers of the second part; 24 are the table's own")
    parser.add_argument("--seconds", type=float, default=165)
    chosen = parser.parse_args()
    names, parts = chosen.backends.split(","), chosen.parts.split(",")
    for name in names:
        Registry().require(name)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    device = resolve_device(chosen.device)
    run, sizes = Run(device, chosen.seconds), SMALL if chosen.small else FULL
    torch.set_float32_matmul_precision("high")
    say(f"{machine_of(device).name}, torch {torch.__version__}")
    if "check" in parts:
        run.attempt("ViT-B/16", lambda: cost_of_a_check(run, "ViT-B/16", vit, sizes))
        run.attempt("Llama", lambda: cost_of_a_check(run, "Llama", llama, sizes))
    if parts != ["check"]:
        table(run, sizes, chosen.depth or (2 if chosen.small else 4), names, parts)


if __name__ == "__main__":
    main()
