"""Unusual kernels that compute what they return: no judgment may refuse one. A run has this file as a module of its own."""

import asyncio
import atexit
import contextlib
import faulthandler
import functools
import gc
import math
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa


def _scores(q, k):
    group = q.shape[1] // k.shape[1]
    return q @ k.repeat_interleave(group, 1).transpose(-1, -2) * q.shape[-1] ** -0.5


_WORKSPACES = {}


def workspace(q, k, v):
    """Writes its scores into memory that it keeps for each shape."""
    (b, h, n, d), m = q.shape, k.shape[2]
    key = (b, h, n, m, q.dtype, q.device)
    if key not in _WORKSPACES:
        _WORKSPACES[key] = q.new_empty(b * h, n, m)
    scores = torch.bmm(q.reshape(b * h, n, d), k.reshape(b * h, m, d).mT, out=_WORKSPACES[key])
    scores.mul_(d**-0.5).sub_(scores.amax(-1, True)).exp_()
    return (torch.bmm(scores, v.reshape(b * h, m, -1)) / scores.sum(-1, True)).view(b, h, n, -1)


_PLANS = {}


def plan_by_shape(q, k, v):
    """Chooses its tiles once for each shape, and goes over them."""
    key = (q.shape, k.shape, q.dtype)
    if key not in _PLANS:
        step = max(16, 4096 // k.shape[2])
        _PLANS[key] = [(start, min(start + step, q.shape[2])) for start in range(0, q.shape[2], step)]
    return torch.cat([sdpa(q[:, :, a:b], k, v) for a, b in _PLANS[key]], 2)


_TUNED = {}


def autotuned(q, k, v):
    """Times its variants on the first call of a shape, and keeps the quicker one."""
    variants = (sdpa, lambda q, k, v: _scores(q, k).softmax(-1) @ v)
    key = (q.shape, k.shape, q.dtype)
    if key not in _TUNED:
        seconds = []
        for variant in variants:
            begun = time.perf_counter()
            for _ in range(3):
                variant(q, k, v)
            seconds.append(time.perf_counter() - begun)
        _TUNED[key] = seconds.index(min(seconds))
    return variants[_TUNED[key]](q, k, v)


@functools.cache
def _pool():
    pool = ThreadPoolExecutor(2, thread_name_prefix="heads")
    atexit.register(pool.shutdown)
    return pool


def thread_pool(q, k, v):
    """Has threads that stay alive compute heads on the caller's stream, and waits for them."""
    is_enabled = torch.is_grad_enabled()
    stream = torch.cuda.current_stream() if q.is_cuda else None

    def of_head(i):
        with torch.set_grad_enabled(is_enabled), torch.cuda.stream(stream):
            return sdpa(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1])

    return torch.cat(list(_pool().map(of_head, range(q.shape[1]))), 1)


_STATIC = {}


def static_buffers(q, k, v):
    """Has threads, of which more come as they are needed, write heads to a buffer that it keeps; returns a copy."""
    out, pool = _STATIC.setdefault(q.shape, (torch.empty_like(q), ThreadPoolExecutor(4)))
    list(pool.map(lambda i: out[:, i].copy_(sdpa(q[:, i], k[:, i], v[:, i])), range(q.shape[1])))
    return out.clone()


def forked(q, k, v):
    """Has torch's own threads compute heads, and waits for them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        futures = [torch.jit.fork(sdpa, *(t[:, i : i + 1] for t in (q, k, v))) for i in range(q.shape[1])]
        return torch.cat([torch.jit.wait(one) for one in futures], 1)


class _Replay:
    """Steps recorded once for a shape, on tensors that stay, as graphs of CUDA are replayed."""

    def __init__(self, *given):
        self.given = [t.clone() for t in given]
        q, k, v = self.given
        self.scores, self.out = q.new_empty(*q.shape[:-1], k.shape[2]), torch.empty_like(q)
        self.steps = [
            lambda: torch.matmul(q * q.shape[-1] ** -0.5, k.mT, out=self.scores),
            lambda: torch.softmax(self.scores, -1, out=self.scores),
            lambda: torch.matmul(self.scores, v, out=self.out),
        ]


_REPLAYS = {}


def replayed_steps(q, k, v):
    """Copies its inputs to where its recorded steps read them, replays these, and returns a copy of what they wrote."""
    replay = _REPLAYS.get(q.shape) or _REPLAYS.setdefault(q.shape, _Replay(q, k, v))
    for mine, given in zip(replay.given, (q, k, v), strict=True):
        mine.copy_(given)
    for step in replay.steps:
        step()
    return replay.out.clone()


@functools.cache
def _folder():
    folder = tempfile.mkdtemp()
    weakref.finalize(_folder, os.rmdir, folder)
    atexit.register(lambda: None)
    return folder


def cached_on_disk(q, k, v):
    """Makes a folder at its first call, which goes when the process ends, and computes there with its own mask for files."""
    mask, here = os.umask(0o077), os.getcwd()
    os.chdir(_folder())
    try:
        return sdpa(q, k, v)
    finally:
        os.chdir(here)
        os.umask(mask)


def with_an_alarm(q, k, v):
    """Limits its own time by an alarm and a late end of the process, and puts back what it found."""
    before = signal.signal(signal.SIGALRM, lambda *event: None)
    signal.setitimer(signal.ITIMER_REAL, 30)
    faulthandler.dump_traceback_later(600, exit=True)
    try:
        return sdpa(q, k, v)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def in_an_event_loop(q, k, v):
    """Runs an event loop, which handles signals meanwhile."""

    async def compute():
        return sdpa(q, k, v)

    return asyncio.run(compute())


def process_restored(q, k, v):
    """Turns switches of Python and of the process for its own time, and turns them back."""
    threshold, interval, depth, cores = gc.get_threshold(), sys.getswitchinterval(), sys.getrecursionlimit(), None
    onednn, blocked = torch.backends.mkldnn.enabled, signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    torch.backends.mkldnn.enabled = False
    gc.set_threshold(10_000)
    sys.setswitchinterval(0.1)
    sys.setrecursionlimit(depth + 1000)
    with contextlib.suppress(AttributeError):  # not on Linux
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sdpa(q, k, v)
    finally:
        if cores:
            os.sched_setaffinity(0, cores)
        sys.setrecursionlimit(depth)
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        torch.backends.mkldnn.enabled = onednn


def mapped(q, k, v):
    """Writes its result into memory that it has mapped itself."""
    out = torch.frombuffer(mmap.mmap(-1, max(q.nbytes, 1)), dtype=q.dtype, count=q.numel()).view(q.shape)
    return out.copy_(sdpa(q, k, v))


class _Tagged(torch.Tensor):
    pass


_LAST = []


def counts_living_results(q, k, v):
    """Knows which of its last results live, and computes on views of a subclass."""
    out = sdpa(*(t.as_subclass(_Tagged) for t in (q, k, v))).as_subclass(torch.Tensor)
    _LAST[:] = [one for one in _LAST if one() is not None] + [weakref.ref(out)]
    return out


class _Statistics(threading.Thread):
    """Counts calls beside them, as tools do that log."""

    def __init__(self):
        super().__init__(daemon=True)
        self.calls, self.asked = 0, threading.Event()

    def run(self):
        while True:
            self.asked.wait()
            self.asked.clear()
            self.calls += 1


@functools.cache
def _statistics():
    thread = _Statistics()
    thread.start()
    return thread


def logged(q, k, v):
    """Starts a thread at its first call, which counts calls, and reads the clock."""
    begun = time.perf_counter_ns()
    out = sdpa(q, k, v)
    _statistics().asked.set()
    _statistics().seconds = time.perf_counter_ns() - begun
    return out


def view_of_larger(q, k, v):
    """Returns a slice of a buffer that is wider and longer than out."""
    b, h, n, _ = q.shape
    buffer = q.new_empty(b, h, n + 7, v.shape[-1] + 8)
    out = buffer[:, :, :n, : v.shape[-1]]
    out.copy_(sdpa(q, k, v))
    return out


def padded(q, k, v):
    """Pads rows and keys to whole tiles, and cuts the rows off again."""
    n, m = q.shape[2], k.shape[2]
    q, k, v = (F.pad(t, (0, 0, 0, -t.shape[2] % 48)) for t in (q, k, v))
    mask = torch.arange(k.shape[2], device=k.device) < m
    return sdpa(q, k, v, attn_mask=mask.expand(1, 1, q.shape[2], -1))[:, :, :n]


def scratch_in_place(q, k, v):
    """Works in place on what it made itself."""
    scores = _scores(q, k)
    scores -= scores.detach().amax(-1, keepdim=True)
    p = scores.exp_()
    return (p @ v).div_(p.sum(-1, keepdim=True))


@functools.cache
def _compiled():
    return torch.compile(lambda q, k, v: _scores(q, k).softmax(-1) @ v, backend="aot_eager", dynamic=False)


def lazily_compiled(q, k, v):
    """Is handed to torch.compile at its first call, which traces it."""
    return _compiled()(q, k, v)


@functools.lru_cache(maxsize=8)
def _causal(n, m, device):
    return torch.ones(n, m, dtype=torch.bool, device=device).tril()


def cached_mask(q, k, v):
    """Keeps its mask for each length."""
    mask = _causal(q.shape[2], k.shape[2], q.device)
    return _scores(q, k).masked_fill(~mask, -math.inf).softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def lazy_import(q, k, v):
    """Imports a library at its first call, which reads the environment, and computes with it."""
    os.environ.setdefault("MY_KERNEL_HOME", os.path.expanduser("~"))
    import numpy as np

    scores = np.einsum("bhnd,bhmd->bhnm", q.numpy(), k.numpy()) * np.float32(q.shape[-1] ** -0.5)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return torch.from_numpy(np.einsum("bhnm,bhmd->bhnd", p / p.sum(-1, keepdims=True), v.numpy()))


partial = functools.partial(sdpa, dropout_p=0.0, is_causal=True, enable_gqa=True)


class _Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_forward_pre_hook(lambda module, args: None)

    def forward(self, q, k, v):
        self.calls += 1
        return sdpa(q, k, v)


module = _Module()


class _Object:
    __slots__ = ("_table", "calls")

    def __init__(self):
        self.calls, self._table = 0, {}

    def attend(self, q, k, v):
        self.calls += 1
        scale = self._table.setdefault(q.shape[-1], q.shape[-1] ** -0.5)
        return sdpa(q, k, v, scale=scale)


bound_method = _Object().attend


def switches_restored(q, k, v):
    """Turns switches of torch for its own time, and turns them back."""
    precision, threads, dtype = torch.get_float32_matmul_precision(), torch.get_num_threads(), torch.get_default_dtype()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return sdpa(q, k, v)
    finally:
        torch.use_deterministic_algorithms(is_deterministic)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def without_collector(q, k, v):
    """Stops the garbage collector meanwhile, as samplers do."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sdpa(q, k, v)
    finally:
        if was_enabled:
            gc.enable()


class _Traced(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def under_a_mode(q, k, v):
    """Runs under a mode that sees each of torch's functions, as profilers have them."""
    with _Traced(), torch.profiler.record_function("mine"):
        return sdpa(q, k, v)


@torch.library.custom_op("honest_kernels::attend", mutates_args=())
def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v).contiguous()


_SCRATCH = {}


@torch.library.custom_op("honest_kernels::attend_in_scratch", mutates_args=())
def _attend_in_scratch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scratch = _SCRATCH.setdefault((q.shape, k.shape, q.dtype), q.new_empty(*q.shape[:-1], k.shape[2]))
    torch.matmul(q * q.shape[-1] ** -0.5, k.mT, out=scratch)
    return scratch.softmax(-1) @ v


def operator_with_scratch(q, k, v):
    """Is an operator of torch's library that keeps memory for its scores, by shape."""
    return _attend_in_scratch(q, k, v)


@_attend.register_fake
def _(q, k, v):
    return torch.empty_like(q)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dout):
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        return torch.autograd.grad(sdpa(*leaves), leaves, dout)


_attend.register_autograd(_backward, setup_context=_setup)


def custom_operator(q, k, v):
    """Is an operator of torch's library, with a backward pass of its own."""
    return _attend(q, k, v)


_GRAPHS = {}


def replayed_graph(q, k, v):
    """Copies its inputs to where its CUDA graph reads them, replays it, and returns a copy of what it wrote."""
    key = (q.shape, k.shape, q.dtype)
    if key not in _GRAPHS:
        held = [t.detach().clone() for t in (q, k, v)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            sdpa(*held)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sdpa(*held)
        _GRAPHS[key] = graph, held, out
    graph, held, out = _GRAPHS[key]
    for mine, given in zip(held, (q, k, v), strict=True):
        mine.copy_(given)
    graph.replay()
    return out.clone()


def streams(q, k, v):
    """Has streams of its own compute heads, and the current one wait for them."""
    here, parts = torch.cuda.current_stream(), []
    for i in range(q.shape[1]):
        stream = torch.cuda.Stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            parts.append(sdpa(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1]))
        here.wait_stream(stream)
        for tensor in (q, k, v):
            tensor.record_stream(stream)
        parts[-1].record_stream(here)
    return torch.cat(parts, 1)
