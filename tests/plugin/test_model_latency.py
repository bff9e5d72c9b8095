"""attn_model.measure as a user sees it. Times come from a clock of the tests, in this process and in the fresh ones."""

from importlib import import_module

import pytest
from fakes.layer import LAYER

from pytest_attn.reports.records import read_records

MODEL = f"""{LAYER}
def made():
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention(), Attention()), torch.randn(2, 24, 32)
    return model, lambda: model(x).square().mean()

"""
BACKENDS = """
@pytest.mark.attention_model(backends=["math", "sdpa_flash"])
def test_step(attn_model, attn_backend):
    attn_model.measure(*made(), attn_backend)
"""
OWN = """
@pytest.mark.attention_model
def test_own(attn_model):
    model, step = made()
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    attn_model.check(model, step, scatter=0)
    attn_model.measure(model, step)
    attn_model.measure(model, step, optimizer=optimizer)
    assert not optimizer.state
    assert all(map(torch.equal, before, model.parameters()))
"""


@pytest.fixture
def timed(project, pytester):
    """Run pytest on a test of the model; the fixture's own test is gone."""
    (pytester.path / "test_mine.py").unlink()

    def run(test, *options, **environment):
        pytester.makepyfile(test_model=MODEL + test)
        return project(*options, **environment)

    return run


def records(pytester, question):
    return [record for record in read_records(pytester.path / "run.jsonl") if record["question"] == question]


def test_backends_are_checked_timed_and_ranked_in_a_model(timed, pytester):
    result = timed(BACKENDS, "--attn-rank", "--attn-output=run.jsonl")

    result.assert_outcomes(passed=2)
    result.stdout.re_match_lines(
        [
            r" ?(100|0\.10)\S+ .s .* no baseline +math +Sequential-fp32 +forward\+backward +host clock, 1 call .*",
            r"step +math in Sequential-fp32: first call \S+ .s; attention.*",
            r"step +sdpa_flash in Sequential-fp32: first call \S+ .s; attention.*",
            r".* attention rank .*",
            r"Sequential-fp32 +f\+b .*(math|sdpa_flash).*",
        ],
        consecutive=False,
    )
    assert [r["verdict"] for r in records(pytester, "check")] == ["passed", "passed"]
    found = records(pytester, "latency")
    assert [r["latency"]["key"].split(" | ")[:4] for r in found] == [
        [f"test_model.py::test_step[{name}]", name, "forward+backward", "warm"] for name in ("math", "sdpa_flash")
    ]
    assert {r["model"] for r in found} == {"Sequential"}
    assert all(r["step"]["first_call"] > 0 and r["step"]["attention"]["calls"] == 2 for r in found)


def test_a_step_with_and_without_an_optimizer_are_two_cases(timed, pytester):
    result = timed(OWN, "--attn-output=run.jsonl")

    result.assert_outcomes(passed=1)
    assert len(records(pytester, "check")) == 1
    keys = [r["latency"]["key"].split(" | ")[0] for r in records(pytester, "latency")]
    assert keys == ["test_model.py::test_own[model]", "test_model.py::test_own[model] with AdamW"]
    result.stdout.fnmatch_lines(["step *model in Sequential-fp32, AdamW's included: first call *"])


@pytest.mark.slow("times in many processes")
def test_a_step_that_became_slower_fails_and_another_model_has_no_baseline(timed, pytester):
    own = OWN.replace("    attn_model.measure(model, step)\n", "")
    timed(own, "--attn-update-baselines=first").assert_outcomes(passed=1)
    timed(own).stdout.fnmatch_lines(["latency: 1 as fast as recorded"])
    result = timed(own, TIMES="150")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E *AssertionError: regressed: *Sequential*", "E *reproduce *test_own?model?*", "latency: 1 regressed"]
    )
    timed(own.replace("made()", "made()\n    model.append(nn.Linear(32, 32))")).stdout.fnmatch_lines(
        ["no baseline *recorded for Sequential, 6,336 parameters, float32; *, this is Sequential, 7,392 parameters, *"]
    )


def test_an_optimizer_needs_gradients(timed):
    forward = OWN.replace("attention_model\n", "attention_model(backward=False)\n")
    result = timed(forward.replace("    attn_model.measure(model, step)\n", ""))

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*attn_model.measure: an optimizer needs gradients; leave out backward=False of the marker"])


COMPILED = """
@pytest.mark.attention_model
def test_compiled(attn_model):
    model, step = made()
    compiled = torch.compile(model, backend="eager")
    x, sizes = torch.randn(2, 24, 32), [24]

    def step():
        CHANGE
        return compiled(x[:, : sizes[0]]).square().mean()

    attn_model.measure(compiled, step, BACKEND)
"""


@pytest.fixture(scope="module")
def dynamo():
    """What torch.compile imports late and cannot import twice, as runs in this process would."""
    import_module("torch._dynamo.repro.after_dynamo")


def test_a_compiled_model_is_timed_as_it_is_with_its_graphs_and_breaks(timed, pytester, dynamo):
    test = COMPILED.replace("CHANGE", "pass").replace(", BACKEND", "")
    result = timed(test, "--attn-output=run.jsonl")

    result.assert_outcomes(passed=1)
    (record,) = records(pytester, "latency")
    assert record["step"]["graphs"] == 1
    assert "measure the eager model" in record["step"]["attention"]["unknown"]
    result.stdout.fnmatch_lines(["step *compiled to 1 graph, 0 graph breaks; attention's share is not known: *"])


def test_a_backend_is_not_timed_in_a_compiled_model(timed, dynamo):
    result = timed(COMPILED.replace("CHANGE", "pass").replace("BACKEND", '"math"'), "-rs")

    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*math: a compiled model is timed with its own attention; to replace that, pass the model*"])
