"""Unusual kernels that compute what they return: no judgment may refuse one. A run has this file as a module of its own."""

import atexit
import functools
import gc
import math
import os
import threading
import time
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
