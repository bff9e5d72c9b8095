"""A callable that torch.compile made is judged as compiled code, however many workloads there are, and the settings stay."""

import pytest
import torch
from judging import asked, attention, judged

from pytest_attn import Workload, check_model
from pytest_attn.backends import contexts
from pytest_attn.backends.contexts import eager_because
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.sdpa import Math
from pytest_attn.backends.subject import Compilation
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.guests.models.token_invariants import judge_model_invariants
from pytest_attn.invariants.all_invariants import judge_invariants

CPU = torch.device("cpu")
#: how often dynamo compiles a function by itself in these tests, and one workload more
LIMIT = 2
WORKLOADS = [Workload(16 + number, heads=1, head_dim=8, dtype="float32") for number in range(LIMIT + 1)]


def formula(q, k, v):
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v


class Compiler:
    """A backend of torch.compile, which can make code that is wrong, and counts what ran."""

    def __init__(self, factor=1.0):
        self.factor, self.graphs, self.calls = factor, 0, 0

    def __call__(self, graph, examples):
        self.graphs += 1

        def run(*args):
            self.calls += 1
            return [one * self.factor for one in graph(*args)]

        return run


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with torch._dynamo.config.patch({contexts._present(torch._dynamo.config, *contexts._LIMITS[0]): LIMIT}):
        yield
    torch._dynamo.reset()


def compiled_function(compiler):
    return torch.compile(formula, backend=compiler, dynamic=False)


def compiled_module(compiler):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return formula(q, k, v)

    module = Attention()
    module.compile(backend=compiler, dynamic=False)
    return module


def compiles_inside(compiler):
    inner = compiled_function(compiler)
    return lambda q, k, v: inner(q, k, v)


WAYS = [compiled_function, compiled_module, compiles_inside]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
def test_wrong_compiled_code_is_wrong_on_every_workload(way):
    compiler = Compiler(1.5)
    kernel = way(compiler)
    assert [judged(kernel, CheckSpec(w, CPU)).passed for w in WORKLOADS] == [False] * len(WORKLOADS)
    assert compiler.calls > 2 * len(WORKLOADS)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
def test_right_compiled_code_is_right_and_each_call_ran_it(way):
    compiler, calls = Compiler(), []
    kernel = way(compiler)

    def counted(q, k, v):
        before = compiler.calls
        out = kernel(q, k, v)
        calls.append(compiler.calls - before)
        return out

    for w in WORKLOADS:
        assert judged(counted, CheckSpec(w, CPU)).passed
        assert asked(counted, CheckSpec(w, CPU), only=("rerun", "layout", "state")).passed
    assert set(calls) == {1}
    assert len(calls) > 8 * len(WORKLOADS)


def limits():
    config = torch._dynamo.config  # whose names were others in torch 2.6
    named = (*contexts._LIMITS, contexts._FAILS)
    return tuple(getattr(config, contexts._present(config, *names)) for names in named)


def test_the_settings_are_what_they_were():
    before, inside = limits(), []

    def kernel(q, k, v):
        inside.append(limits())
        return attention(q, k, v)

    assert judged(kernel, CheckSpec(WORKLOADS[0], CPU)).passed
    assert set(inside) == {(1 << 30, 1 << 30, True)}
    assert limits() == before == (LIMIT, 256, False)


def test_a_limit_of_its_own_is_an_error_in_words():
    compiled = compiled_function(Compiler())

    def limited(q, k, v):
        with torch._dynamo.config.patch({contexts._present(torch._dynamo.config, *contexts._LIMITS[0]): 2}):
            return compiled(q, k, v)

    with pytest.raises(
        RuntimeError, match=r"would run it eagerly, so compiled code cannot be judged; leave out recompile_limit"
    ):
        judged(limited, CheckSpec(WORKLOADS[0], CPU))


def test_what_may_run_eagerly_is_said(monkeypatch):
    words = "what torch.compile makes may have run eagerly: "
    assert eager_because() == ""
    with torch.compiler.set_stance("force_eager"):
        assert eager_because() == f"{words}its stance is force_eager"
    with torch._dynamo.config.patch(suppress_errors=True):
        assert eager_because() == f"{words}torch._dynamo.config.suppress_errors is set"
        assert judged(compiled_function(Compiler()), CheckSpec(WORKLOADS[0], CPU)).passed
    with torch._dynamo.config.patch(disable=True):
        assert eager_because() == f"{words}torch._dynamo.config.disable is set"
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert eager_because() == f"{words}TORCHDYNAMO_DISABLE=1"


class Tokens(torch.nn.Module):
    """A model of one attention, whose forward pass looks at the settings."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.inside = torch.nn.Embedding(16, 24), []

    def forward(self, input_ids):
        self.inside.append(limits())
        q, k, v = self.embedding(input_ids).unflatten(-1, (1, -1)).transpose(1, 2).chunk(3, -1)
        return attention(q, k, v).squeeze(1)


def test_models_are_run_so_as_well():
    model, ids = Tokens(), torch.arange(32).view(2, 16) % 16
    check_model(model, lambda: model(ids), backward=False)
    judge_model_invariants(model, ids, only="order", causal=False)
    assert set(model.inside) == {(1 << 30, 1 << 30, True)}


def test_a_run_says_what_may_have_run_eagerly(pytester):
    pytester.makepyfile(
        test_it="""
        import pytest, torch
        from pytest_attn import Workload

        attention = torch.compile(torch.nn.functional.scaled_dot_product_attention, backend="eager")

        @pytest.mark.attention(Workload(16, head_dim=8), device="cpu")
        def test_it(attn):
            with torch.compiler.set_stance("force_eager"):
                attn.check(attention)
                attn.check_invariants(attention, only="rerun")
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    words = "note          what torch.compile makes may have run eagerly: its stance is force_eager"
    assert result.outlines.count(words) == 1


@pytest.mark.parametrize(("is_ours", "is_compiled", "prepared"), [(True, True, 1), (True, False, 2), (False, True, 2)])
def test_the_tests_of_a_workload_share_what_torch_compiled_of_a_backend_of_ours(monkeypatch, is_ours, is_compiled, prepared):
    backend, references, seen = Registry()["math"], ReferenceCache(), []
    prepare = Math.prepare

    def prepared_once(self, inputs, backward=False):
        kernel = prepare(self, inputs, backward)
        seen.append(inputs.workload)

        def call(q, k, v):
            return kernel(q, k, v)

        call.compilation = Compilation(3.0, 1) if is_compiled else None
        return call

    monkeypatch.setattr(Math, "prepare", prepared_once)
    monkeypatch.setattr(Math, "is_contained", is_ours)
    spec = CheckSpec(WORKLOADS[0], CPU)
    assert judge(backend, spec.for_subject(backend), references).passed
    again = judge(backend, spec.for_subject(backend), references)
    assert again.passed
    assert not is_compiled or again.compilation == Compilation(3.0 if prepared > 1 else 0.0, 1)
    assert len(seen) == prepared
    assert judge_invariants(backend, spec, references, ("rerun", "algebra")).passed
    assert len(seen) == prepared + (prepared > 1)
    assert judge(backend, CheckSpec(WORKLOADS[0], CPU, True).for_subject(backend), references).passed
    assert judge(backend, CheckSpec(WORKLOADS[1], CPU).for_subject(backend), references).passed
    assert judge(backend, CheckSpec(WORKLOADS[0], CPU, seed=1).for_subject(backend), references).passed
    assert len(seen) == prepared + (prepared > 1) + 3
    assert judge(backend, spec.for_subject(backend), references).passed
    assert len(seen) == prepared + (prepared > 1) + 4, "the last two are kept"
