"""Each option reaches kernels and models alike: what a judgment of the one reads of `Settings`, one of the other does, too."""

import json

import pytest

from pytest_attn.session.option_types import declared_options
from pytest_attn.session.options import Settings

#: read where a kernel is judged and not where a model is, and why
OF_KERNELS = {
    "seed": "the inputs of a model are the test's own",
    "profile": "the launches of a step are those of all its layers",
    "thorough": "a model has no invariant that few would wait for",
}
CONFTEST = """
import json
import pytest
from pytest_attn.session.session import session_of
from pathlib import Path

class Watched:
    def __init__(self, settings):
        self.settings, self.read = settings, set()

    def __getattr__(self, name):
        self.read.add(name)
        return getattr(self.settings, name)

READ = {}

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    session = session_of(item.config)
    watched = session.settings = Watched(session.settings)
    try:
        return (yield)
    finally:
        session.settings = watched.settings
        READ[item.name.partition("[")[0]] = sorted(watched.read)
        Path("read.json").write_text(json.dumps(READ))
"""
TESTS = """
import pytest, torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from pytest_attn import Workload

class Layer(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend, self.to_qkv = attend, torch.nn.Linear(32, 96)

    def forward(self, x):
        return self.attend(*self.to_qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4))

def right(q, k, v):
    return sdpa(q, k, v)

def wrong(q, k, v):
    return sdpa(q, k, v) * 1.1

kernel = pytest.mark.attention(Workload(32, heads=2, head_dim=16), device="cpu")
model = pytest.mark.attention_model(device="cpu")

def step(attend):
    torch.manual_seed(0)
    layer, x = Layer(attend), torch.randn(1, 16, 32)
    return layer, lambda: layer(x).square().sum()

@kernel
def test_kernel_right(attn): attn.check(right)
@kernel
def test_kernel_wrong(attn): attn.check(wrong)
@kernel
def test_kernel_invariants(attn): attn.check_invariants(right, only="rerun")
@kernel
def test_kernel_measured(attn): attn.measure(right)
@model
def test_model_right(attn_model): attn_model.check(*step(right), functions=[right])
@model
def test_model_wrong(attn_model): attn_model.check(*step(wrong), functions=[wrong])
@model
def test_model_invariants(attn_model):
    attn_model.check_invariants(step(right)[0], torch.randn(2, 16, 32), only="order", causal=False)
@model
def test_model_measured(attn_model): attn_model.measure(*step(right), functions=[right])
"""


@pytest.fixture
def read(pytester):
    """Return a function of the kind of some tests that returns which settings their judgments read, in a run of their own."""

    def run(kind):
        done = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-save-failures=failures", f"-k=test_{kind}")
        done.assert_outcomes(passed=3, failed=1, deselected=4)
        return set().union(*json.loads((pytester.path / "read.json").read_text()).values())

    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_reach=TESTS)
    return run


def test_an_option_that_a_kernel_s_judgment_reads_a_model_s_reads_too(read):
    names = {one.name for one in declared_options(Settings)}
    of_kernels, of_models = read("kernel") & names, read("model") & names
    assert of_kernels >= {"limits", "timeout", "diagnosis_timeout", "rows", "memory", "declines"}
    assert of_kernels - of_models == OF_KERNELS.keys()
    assert of_models - of_kernels == set()
