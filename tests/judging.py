"""Short ways to judge or time a kernel in a test, the kernels that most of them judge or time, and where."""

import math
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention as sdpa

import pytest_attn
from pytest_attn import Workload
from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.diagnosis.diagnose import diagnose
from pytest_attn.invariants.all_invariants import INVARIANTS, judge_invariants
from pytest_attn.latency.kernel_work import work_of
from pytest_attn.latency.protocol import stopwatch_of

SMALL = Workload(64, heads=2, head_dim=32, dtype="float32")
FULL = Workload(128, heads=2)
CAUSAL = Workload(257, heads=4, kv_heads=2, mask="causal")
CROSS = Workload(65, 129, heads=2, mask="causal-bottom-right")

DEVICES = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
keeps_graphs = pytest.mark.skipif(torch.__version__ < (2, 8), reason="needs a torch that keeps the graph it captured")


def attention(q, k, v):
    """Return torch's attention of (batch, heads, seqlen, head_dim)."""
    return F.scaled_dot_product_attention(q, k, v)


def assert_few_calls(report):
    """Fail where an invariant calls a kernel more often than it declares: a user waits for each call."""
    declared = {one.name: one.calls for one in INVARIANTS}
    over = [
        f"{one.invariant} calls {report.subject} {one.calls} times on {report.workload}, and declares calls = {most}"
        for one in report.findings
        if one.calls > (most := declared[one.invariant])
    ]
    assert not over, f"{'; '.join(over)}: compare with `probe.base`, share a call, or give it `thorough = True`"


def judged(target, spec, references=None, **options):
    return diagnose(judge(spec.subject(Registry(), target), spec, references or ReferenceCache(), **options))


def asked(target, spec, only=None, **options):
    return judge_invariants(spec.subject(Registry(), target), spec, ReferenceCache(), only, **options)


def timed(target, workload, device, direction="forward"):
    spec = CheckSpec(workload, device)
    return work_of(spec.subject(Registry(), target), spec, direction)


def causal(q, k, v, **options):
    """Return torch's attention with a causal mask, of grouped heads as well."""
    return sdpa(q, k, v, is_causal=True, enable_gqa=True, **options)


def explicit(q, k, v, *, scale=None, mask=None, softcap=None, sinks=None, bias=None):
    """A fault-free kernel in float32 with options, to leave out or get wrong."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).float(), v.repeat_interleave(group, 1).float()
    score = q.float() @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    score = score if softcap is None else softcap * torch.tanh(score / softcap)
    score = score if bias is None else score + bias.float()
    score = score if mask is None else score.masked_fill(~mask, -math.inf)
    if sinks is not None:
        score = torch.cat([score, sinks.float().view(1, -1, 1, 1).expand(*score.shape[:3], 1)], -1)
    p = score.softmax(-1)[..., : v.shape[2]]
    return (p @ v).to(q.dtype)


def positions(q_len, kv_len):
    return torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]


def failure(fn, workload, **options):
    """Return the message with which a check of a callable fails."""
    with pytest.raises(AssertionError) as error:
        pytest_attn.check(fn, workload, device="cpu", **options)
    return str(error.value)


def spec_of(workload=FULL, **options):
    """Return what a check on a CPU depends on."""
    declared = Declaration(**{one.name: options.pop(one.name) for one in fields(Declaration) if one.name in options})
    return CheckSpec(workload, torch.device("cpu"), declared=declared, **options)


def with_lse(changed=lambda lse: lse, scale=None, attention=attention):
    """Return attention and what `changed` makes of its lse, of scores with a scale of their own."""

    def kernel(q, k, v):
        lse = (q.float() @ k.float().mT * (scale or q.shape[-1] ** -0.5)).logsumexp(-1)
        return attention(q, k, v), changed(lse)

    return kernel


def with_gradients(gradients_of, attention=attention):
    """Return attention whose backward pass is what `gradients_of` returns for its plain gradients, a function of dout."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return attention(q, k, v)

        @staticmethod
        def backward(ctx, dout):
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
                return gradients_of(lambda dout: torch.autograd.grad(attention(*leaves), leaves, dout), dout)

    return Changed.apply


class Clock:
    """A clock that goes on by what is slept, and by a step whenever somebody looks at it."""

    def __init__(self, step=0.0):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now

    perf_counter = __call__

    def sleep(self, seconds):
        self.now += seconds


def measure(kernel, device, direction="forward", workload=SMALL, seconds=0.05, mode=None):
    """Return the latency of a callable or backend, by the real clock."""
    work = timed(kernel, workload, device, direction)
    return stopwatch_of(device).measure(work, workload.id, "kernel", mode, seconds)
