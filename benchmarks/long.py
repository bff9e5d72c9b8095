"""What the check of a long context costs and finds: seconds by phase, the kernel's own time, peak memory, planted faults.

    PYTHONPATH=. python3 benchmarks/long.py --device cuda
    PYTHONPATH=. python3 benchmarks/long.py --device cpu --tokens 2048 --sample 128

Each case prints its lines as soon as they are known. A case that would not fit the seconds that are left is left out, and
says so. Faults are planted in torch's own flash attention: one key lost at a border, a tile lost, offsets that wrap round, a
last tile that is cut off. Each is held against the same reference as the fault-free kernel.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import pytest_attn
import pytest_attn.correctness.mismatch_text
import pytest_attn.workloads.catalog
from pytest_attn import Window, Workload
from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness import arithmetic, judge, reference
from pytest_attn.correctness import spec as specs
from pytest_attn.correctness.call import CONTIGUOUS, call_kernel
from pytest_attn.correctness.judge import compare_all
from pytest_attn.correctness.limits import limits_named
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.latency.work import PeakMemory
from pytest_attn.workloads import positions

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
START = time.perf_counter()


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s]", *words, flush=True)


@dataclass
class Case:
    """estimate: seconds that the check is thought to take on one H200, which decide whether it is begun."""

    workload: Workload
    backward: bool = False
    faults: tuple[str, ...] = ()
    estimate: float = 0.0


@dataclass
class Clock:
    """Seconds by phase, each with the device's work waited for."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)
    calls: list[float] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds inside, less those of phases within it."""
        self.wait()
        start, before = time.perf_counter(), sum(self.seconds.values())
        yield
        self.wait()
        within = sum(self.seconds.values()) - before
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start - within

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# -- kernels: torch's flash attention, and what is made of it --------------------------------------------------------------


def flash(w: Workload) -> Kernel:
    """Torch's flash attention; windows by blocks of queries, each with a mask."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if isinstance(w.mask, Window):
            return windowed(q, k, v, w.mask.left or 0)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            is_causal = w.mask is not None and w.q_len == w.kv_len
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=w.group > 1)

    return call


def windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, left: int) -> torch.Tensor:
    size, parts = max(256, left + 1), []
    for start in range(0, q.shape[2], size):
        rows = torch.arange(start, min(start + size, q.shape[2]), device=q.device)[:, None]
        first, end = max(0, start - left), int(rows[-1]) + 1
        keys = torch.arange(first, end, device=q.device)[None]
        mask = (keys <= rows) & (keys >= rows - left)
        at = (slice(None), slice(None), slice(first, end))
        parts.append(masked(q[:, :, start : start + len(rows)], k[at], v[at], mask))
    return torch.cat(parts, 2)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if q.device.type != "cuda":
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    ops = torch.ops.aten
    on_cpu = q.device.type == "cpu"
    run = ops._scaled_dot_product_flash_attention_for_cpu if on_cpu else ops._scaled_dot_product_flash_attention
    out, lse, *_ = run(q, k, v, 0.0, is_causal)
    return out, lse


def without_keys(w: Workload, first: int, count: int) -> Kernel:
    """Causal attention in which all rows behind some keys, and those of a single one, do not see them."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = with_lse(q, k, v, True)
        out = out.clone()
        rows = slice(first + count if count > 1 else max(first, 1), None)
        lost = (slice(None), slice(None), slice(first, first + count))
        for head in range(w.heads):
            here = (slice(None), slice(head, head + 1))
            scores = q[here][:, :, rows].float() @ k[lost][here].float().mT * w.softmax_scale
            p = (scores - lse[here][:, :, rows, None]).exp()
            left = out[here][:, :, rows].float() - p @ v[lost][here].float()
            out[:, head : head + 1, rows] = (left / (1 - p.sum(-1, keepdim=True)).clamp(min=1e-6)).to(out.dtype)
        return out

    return call


def wrapped(w: Workload) -> Kernel:
    """Keys are read at offsets (row * width) of a fused projection, in bytes, in int32 (scaled down for short ones)."""
    width = (w.heads + 2 * w.kv_heads) * w.head_dim * 2
    wrap = 2**31
    while wrap // width >= w.kv_len:
        wrap //= 2
    cut = wrap // width

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        at = torch.arange(w.kv_len, device=k.device)
        return flash(w)(q, k[:, :, torch.where(at < cut, at, at % cut)], v)

    return call


def cut_tail(w: Workload) -> Kernel:
    """The rows of the last, part-filled tile do not see its keys."""
    full = w.kv_len // positions.TILE * positions.TILE
    full = full if full < w.kv_len else full - positions.TILE

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flash(w)(q, k, v).clone()
        out[:, :, full:] = with_lse(q[:, :, full:].contiguous(), k[:, :, :full], v[:, :, :full], False)[0]
        return out

    return call


def tile_borders(w: Workload) -> list[int]:
    return [border for border in positions.borders(w.kv_len) if border % positions.TILE == 0]


def faulty(w: Workload, fault: str) -> Kernel:
    tiles = tile_borders(w)
    middle = tiles[len(tiles) // 2]
    return {
        "key 0": lambda: without_keys(w, 0, 1),
        "key before a border": lambda: without_keys(w, middle - 1, 1),
        "key after a border": lambda: without_keys(w, middle, 1),
        "tile": lambda: without_keys(w, middle, positions.TILE),
        "int32": lambda: wrapped(w),
        "last tile": lambda: cut_tail(w),
    }[fault]()


FORWARD_FAULTS = ("key 0", "key before a border", "key after a border", "tile", "int32", "last tile")
#: name -> gradients with a fault; of the exact ones, rows from `first` on
GRADIENT_FAULTS = {
    "dk without the last rows": ("dk", "rows"),
    "dv of a key after a border is 0": ("dv", "key"),
    "dq of the last tile is 0": ("dq", "tail"),
}


# -- a case ------------------------------------------------------------------------------------------------------------------


def run(case: Case, device: torch.device) -> None:
    w, precision = case.workload, "flash" if device.type == "cuda" else "torch_cpu"
    spec = CheckSpec(w, device, case.backward, declared=Declaration(precision=precision))
    say(f"{w.id} {'forward and backward' if case.backward else 'forward'}: begins")
    clock, cache = Clock(device), ReferenceCache()
    with instrumented(clock), PeakMemory(device) as peak, clock.phase("rest"):
        subject = spec.subject(Registry(), timed_kernel(flash(w), clock), "flash")
        comparison = judge.judge(subject, spec, cache)
    counts = "; ".join(f"{some:,} of {every:,} {name}" for name, (some, every) in comparison.sampled.items()) or "all rows"
    worst = comparison.worst
    say(
        f"  {'passed' if comparison.passed else 'FAILED'}: {counts}; closest to its limits {worst.name}/{worst.distribution}"
        f" z {worst.z_element:.2f} row {worst.z_row:.2f} head {worst.z_head:.3f}"
    )
    if not comparison.passed:
        say("  " + pytest_attn.correctness.mismatch_text.describe(comparison).replace("\n", "\n    "))
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in clock.seconds.items())
    say(f"  whole check {sum(clock.seconds.values()):.2f} s: {parts}")
    say(f"  the kernel's own ms per forward call: {', '.join(f'{1e3 * seconds:.1f}' for seconds in clock.calls)}")
    say_memory(case, peak.bytes)
    try_faults(case, spec, cache)


def say_memory(case: Case, peak: int) -> None:
    own = case.workload.bytes("backward" if case.backward else "forward")
    ratio = f"{peak / own:.2f} times" if peak else "not counted on this device,"
    say(f"  peak memory {peak / 2**30:.2f} GiB, {ratio} the kernel's tensors ({own / 2**30:.2f} GiB)")


def timed_kernel(kernel: Kernel, clock: Clock) -> Kernel:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        clock.wait()
        start = time.perf_counter()
        out = kernel(q, k, v)
        clock.wait()
        clock.calls.append(time.perf_counter() - start)
        return out

    return call


@contextmanager
def instrumented(clock: Clock) -> Iterator[None]:
    """Count the seconds of drawing, of the reference, of calls with their copies, and of comparing."""
    names = {
        "draw": (specs, "draw_inputs"),
        "reference": (specs, "compute_reference"),
        "calls and copies": (judge, "call_kernel"),
        "compare": (judge, "compare_all"),
    }
    originals = {name: getattr(module, attribute) for name, (module, attribute) in names.items()}

    def timed(name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            with clock.phase(name):
                return originals[name](*args, **kwargs)

        return call

    for name, (module, attribute) in names.items():
        setattr(module, attribute, timed(name))
    try:
        yield
    finally:
        for name, (module, attribute) in names.items():
            setattr(module, attribute, originals[name])


# -- faults ------------------------------------------------------------------------------------------------------------------


def try_faults(case: Case, spec: CheckSpec, cache: ReferenceCache) -> None:
    w = case.workload
    if not case.faults:
        return
    forward = CheckSpec(w, spec.device, declared=spec.declared)
    exact = cache.reference_of(spec)
    for fault in case.faults:
        start = time.perf_counter()
        tensors, _ = call_kernel(faulty(w, fault), forward, exact, CONTIGUOUS)
        say_found(fault, tensors, exact, w, start)
        del tensors
    if case.backward:
        honest, _ = call_kernel(flash(w), spec, exact, CONTIGUOUS)
        for fault in GRADIENT_FAULTS:
            start = time.perf_counter()
            say_found(fault, broken_gradient(fault, honest, exact, w), exact, w, start)
    exact.free_inputs()


def say_found(fault: str, tensors: dict[str, torch.Tensor], exact: reference.Reference, w: Workload, start: float) -> None:
    rows = list(compare_all("structured", tensors, exact, w, limits_named("default")))
    worst = max(rows, key=lambda row: row.excess)
    verdict = "found" if not all(row.passed for row in rows) else "NOT FOUND"
    figures = f"z {worst.z_element:.1f} row {worst.z_row:.1f} head {worst.z_head:.2f}, {worst.exceeding:,} elements over"
    say(f"  fault: {fault}: {verdict} ({worst.name}: {figures}; {time.perf_counter() - start:.1f} s)")


def broken_gradient(
    fault: str, honest: dict[str, torch.Tensor], exact: reference.Reference, w: Workload
) -> dict[str, torch.Tensor]:
    name, kind = GRADIENT_FAULTS[fault]
    broken = honest[name].detach().clone()
    if kind == "tail":
        broken[:, :, -positions.TILE :] = 0
    elif kind == "key":
        broken[:, :, tile_borders(w)[-2]] = 0
    else:  # dk = scale * dS^T q without the last 128 query rows
        broken = without_last_rows(broken, honest, exact, w)
    return {name: broken}


def without_last_rows(
    dk: torch.Tensor, honest: dict[str, torch.Tensor], exact: reference.Reference, w: Workload
) -> torch.Tensor:
    """Return dk less the share of the last tile of query rows, head by head, in float32."""
    i, last = exact.inputs, slice(w.q_len - positions.TILE, None)
    for head in range(w.heads):
        of = head // w.group
        q, dout, out = (t[:, head, last].float() for t in (i.q, i.dout, honest["out"].detach()))
        k, v = i.k[:, of].float(), i.v[:, of].float()
        scores = q @ k.mT * w.softmax_scale
        rows = torch.arange(w.q_len, device=q.device)[last, None]
        scores.masked_fill_(torch.arange(w.kv_len, device=q.device) > rows, float("-inf"))
        ds = scores.softmax(-1) * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
        dk[:, of] -= (ds.mT @ q * w.softmax_scale).to(dk.dtype)
    return dk


# -- virtual strides ---------------------------------------------------------------------------------------------------------

INT32 = """
import sys, torch, triton, triton.language as tl, pytest_attn
from pytest_attn import Workload

@triton.jit
def attend(q, k, v, o, sqh, sqm, skh, skm, svh, svm, soh, som, S, scale, D: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1)
    if WIDE:
        row, head = row.to(tl.int64), head.to(tl.int64)
    d = tl.arange(0, D)
    x = tl.load(q + head * sqh + row * sqm + d).to(tl.float32) * scale
    top, total, acc = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32), tl.zeros([D], tl.float32)
    for start in range(0, S, N):
        n = start + tl.arange(0, N)
        if WIDE:
            n = n.to(tl.int64)
        inside = n < S
        at = inside[:, None]
        s = tl.sum(tl.load(k + head * skh + n[:, None] * skm + d[None, :], mask=at, other=0.0).to(tl.float32) * x[None, :], 1)
        s = tl.where(inside, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 0))
        p = tl.exp(s - new)
        shrink = tl.exp(top - new)
        value = tl.load(v + head * svh + n[:, None] * svm + d[None, :], mask=at, other=0.0).to(tl.float32)
        acc = acc * shrink + tl.sum(p[:, None] * value, 0)
        total = total * shrink + tl.sum(p, 0)
        top = new
    tl.store(o + head * soh + row * som + d, (acc / total).to(o.dtype.element_ty))

def kernel(wide):
    def call(q, k, v):
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        S, D = q.shape[2:]
        strides = [s for t in (q, k, v, o) for s in t.stride()[1:3]]
        attend[(S, q.shape[1])](q, k, v, o, *strides, S, D**-0.5, D=D, N=32, WIDE=wide)
        return o
    return call

w, name = Workload(96, heads=2), sys.argv[1]
report = pytest_attn.check_invariants(kernel(name == "int64"), w, only="offsets", thorough=True, device="cuda")
print("held", [f.evidence for f in report.findings])
"""


def ask_strides(device: torch.device) -> None:
    """Ask kernels of this process about rows 2^31 elements apart, and Triton kernels of others, which may lose CUDA."""
    w = Workload(96, heads=2, batch=2, mask="causal")
    for name, kernel in (("flash", flash(w)), ("offsets in int32", read_in_int32(flash(w)))):
        start, is_honest = time.perf_counter(), name == "flash"
        precision = "flash" if device.type == "cuda" else "torch_cpu"
        asked = {"only": "offsets", "thorough": True, "device": str(device), "precision": precision, "name": name}
        try:
            report = pytest_attn.check_invariants(kernel, w, **asked)  # type: ignore[arg-type]
            said = "held" if report.applied else f"not asked: {report.findings[0].evidence}"
        except AssertionError as error:
            said = "broken: " + str(error).splitlines()[1].strip()
        wanted = "honest" if is_honest else "planted"
        say(f"virtual strides, {name} ({wanted}): {said} ({time.perf_counter() - start:.1f} s)")
    if device.type != "cuda":
        return
    for name in ("int64", "int32"):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", INT32_FILE, name], capture_output=True, text=True, timeout=120, check=False
        )
        last = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-4:]
        said = "held" if done.returncode == 0 else "broken or ended: " + " | ".join(last)[-400:]
        say(f"virtual strides, Triton kernel with {name} offsets: {said} ({time.perf_counter() - start:.1f} s)")


#: Triton reads a kernel's source from its file
INT32_FILE = (
    "import sys, tempfile, runpy, os\n"
    f"source = {INT32!r}\n"
    "path = os.path.join(tempfile.mkdtemp(), 'overflow.py')\n"
    "open(path, 'w').write(source)\n"
    "runpy.run_path(path, run_name='__main__')\n"
)


def read_in_int32(kernel: Kernel) -> Kernel:
    """Read q, k and v at offsets that are computed in int32; what lies outside of the memory is read from its other end."""

    def read(t: torch.Tensor) -> torch.Tensor:
        offsets = torch.zeros((), dtype=torch.int32, device=t.device)
        for size, stride in zip(t.shape, t.stride(), strict=True):
            step = torch.tensor((stride + 2**31) % 2**32 - 2**31, dtype=torch.int32, device=t.device)
            offsets = offsets[..., None] + torch.arange(size, dtype=torch.int32, device=t.device) * step
        elements = t.untyped_storage().nbytes() // t.element_size()
        return t.as_strided((elements,), (1,), 0)[(t.storage_offset() + offsets.long()) % elements]

    return lambda q, k, v: kernel(read(q), read(k), read(v))


# -- the list ----------------------------------------------------------------------------------------------------------------


def default_cases() -> list[Case]:
    def of(name: str) -> Workload:
        return pytest_attn.workloads.catalog.builtin_catalog().select(name)[0]

    return [
        Case(of("long-64k-causal"), True, FORWARD_FAULTS, 20),
        Case(of("long-64k-tail"), True, FORWARD_FAULTS, 10),
        Case(of("long-64k-gqa"), False, (), 10),
        Case(of("long-1m-decode"), False, (), 10),
        Case(of("long-1m-window"), False, (), 20),
        Case(of("long-1m-causal"), False, ("key after a border", "int32"), 60),
        Case(of("long-256k-causal"), True, (), 115),
    ]


def own_cases(tokens: list[int], heads: int, head_dim: int) -> list[Case]:
    cases = []
    for count in tokens:
        of = {"head_dim": head_dim}
        cases += [
            Case(Workload(count, heads=heads, mask="causal", name=f"own-{count}-causal", **of), True, FORWARD_FAULTS),
            Case(Workload(count + 37, heads=1, mask="causal", name=f"own-{count}-tail", **of), False, FORWARD_FAULTS),
            Case(Workload(count, heads=heads, mask=Window(count // 8 - 1, 0), name=f"own-{count}-window", **of), True),
            Case(Workload(1, count, heads=4, kv_heads=2, mask="causal-bottom-right", name=f"own-{count}-decode", **of)),
        ]
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--tokens", type=int, nargs="+", help="instead of the default list: causal, window, tail, decode of these"
    )
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--sample", type=int, help="look at about so many rows, of any length: for a try on a CPU")
    parser.add_argument("--only", help="run the cases of the list whose name contains this")
    parser.add_argument("--seconds", type=float, default=235, help="begin no case that is thought to take longer than is left")
    parser.add_argument("--no-strides", action="store_true", help="leave out the virtual strides")
    given = parser.parse_args()
    device = torch.device(given.device)
    if given.sample:
        kind = "cpu" if device.type == "cpu" else "cuda"
        reference._SAMPLED_ROWS = positions.SAMPLED = given.sample
        reference._FULL_ELEMENTS, positions.LONG_PAIRS = {kind: 1}, 1 << 16
        sampled, borders = positions.sampled_positions, positions.borders
        sampled.__defaults__, borders.__defaults__ = (given.sample, ()), (given.sample,)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    say(f"{name}, torch {torch.__version__}, chunk of {arithmetic.chunk_elements(device):,} scores")
    if not given.no_strides:
        ask_strides(device)
    for case in own_cases(given.tokens, given.heads, given.head_dim) if given.tokens else default_cases():
        if given.only and given.only not in case.workload.id:
            continue
        if case.estimate > given.seconds - (time.perf_counter() - START):
            say(f"{case.workload.id}: left out, about {case.estimate:.0f} s do not fit")
            continue
        run(case, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    say("done")


if __name__ == "__main__":
    main()
