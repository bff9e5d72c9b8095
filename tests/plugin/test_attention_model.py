"""The marker attention_model and the fixture attn_model, through pytest itself."""

import pytest
from fakes.layer import LAYER

from pytest_attn.reports.records import read_records

MODEL = f"""{LAYER}

@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention()).bfloat16()


@pytest.fixture
def step(model):
    x = torch.randn(2, 24, 32, dtype=torch.bfloat16)
    return lambda: model(x).float().square().mean()
"""


@pytest.fixture
def run(pytester):
    def ran(test, *options):
        pytester.makepyfile(MODEL + test)
        return pytester.runpytest("-p", "no:randomly", *options)

    return ran


def test_a_model_is_an_item_per_backend_and_what_a_backend_refuses_is_a_skip(run):
    result = run(
        """
@pytest.mark.attention_model
def test_it(attn_model, attn_backend, model, step):
    assert attn_model.device.type == "cpu"
    attn_model.check(model, step, attn_backend, scatter=0)
""",
        "--attn-backends=math,sdpa_flash,kv_cache",
        "-v",
        "-rs",
    )

    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*test_it?math? PASSED*",
            "*test_it?sdpa_flash? PASSED*",
            "math in Sequential",
            "layer * function * workload * worst *",
            "0 * F.scaled_dot_product_attention * b2-h2-s24-d16-causal *",
            "1 * F.scaled_dot_product_attention *",
            "*kv_cache: decoding has no backward pass (b2-h2-s24-d16-causal)",
        ]
    )


def test_a_wrong_layer_fails_its_test_with_its_name_and_the_command(run, pytester):
    result = run(
        """
@pytest.mark.attention_model
def test_it(attn_model, model, step):
    calls = []

    def mine(q, k, v, workload):
        calls.append(workload)
        return F.scaled_dot_product_attention(q, k, v, is_causal=len(calls) != 2)

    attn_model.check(model, step, mine)
""",
        "--attn-output=records.jsonl",
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E * 1 of 2 attention calls of mine are wrong: 1",
            "E * suggests * it equals attention without the mask *",
            "E * reproduce *test_it?model?* --attn-device=cpu",
            "mismatch * mine on Sequential backward: 1 of 2 attention calls of mine are wrong: 1",
        ]
    )
    (record,) = read_records(pytester.path / "records.jsonl")
    assert [(call["module"], call["passed"]) for call in record["calls"]] == [("0", True), ("1", False)]
    assert [list(call["faults"]) for call in record["calls"]] == [[], ["mask-ignored"]]
    assert record["ratios"]["gradient of 0.qkv.weight"] > 2
    assert (record["workload"], record["subject"], record["verdict"]) == ("Sequential", "mine", "mismatch")


MARKED = "@pytest.mark.attention_model"


#: a test that cannot be meant, and what is said of it
REFUSED = [
    (f"{MARKED}\ndef test_it(attn_model, model): pass", "judges nothing: it passed without a call of attn_model.check*"),
    ("def test_it(attn_model): pass", "*uses attn_model but has no marker; add @pytest.mark.attention_model"),
    (f"{MARKED}\ndef test_it(attn): pass", "*takes attn_model and attn_backend, not attn"),
    (f"{MARKED}\ndef test_it(): pass", "*does not take attn_model; make it an argument of the test*"),
    (f"{MARKED}('flux')\ndef test_it(attn_model): pass", "*takes keyword arguments only, got 'flux'; known: backends, *"),
    (f"{MARKED}(layout=1)\ndef test_it(attn_model): pass", "*unknown argument 'layout'; known: backends, backward*"),
]


def test_a_test_that_cannot_be_meant_is_refused_with_what_to_type(pytester):
    pytester.makepyfile(**{f"test_{number}": f"{MODEL}\n{test}\n" for number, (test, _) in enumerate(REFUSED)})
    result = pytester.runpytest("-p", "no:randomly", "--continue-on-collection-errors")
    result.assert_outcomes(failed=2, errors=4)
    for _, said in REFUSED:
        result.stdout.fnmatch_lines([f"*{said}"])


def test_a_step_in_inference_mode_is_recorded_as_judged_forward(run, pytester):
    run(
        """
@pytest.mark.attention_model
def test_it(attn_model, model, step):
    attn_model.check(model, torch.inference_mode()(step))
""",
        "--attn-output=run.jsonl",
    ).assert_outcomes(passed=1)
    (record,) = read_records(pytester.path / "run.jsonl")
    assert (record["direction"], record["backward"]) == ("forward", False)
    assert "forward passes alone were judged" in record["notes"][0]


def test_faulty_kernels_and_tuning_leave_models_out(run):
    result = run(
        "\n@pytest.mark.attention_model\ndef test_it(attn_model, model, step): attn_model.check(model, step)\n",
        "--attn-mutants",
    )

    result.assert_outcomes(deselected=1)


def test_a_listing_counts_models(run):
    test = """
@pytest.mark.attention_model
def test_it(attn_model, attn_backend): pass

@pytest.mark.attention_model
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_each(attn_model, attn_backend, name): pass
"""
    run(test, "--attn-list", "--attn-backends=math,flash3").stdout.fnmatch_lines(["*4 of 8 cases would run*"])


def test_invariants_of_a_model_are_a_judgment_of_their_own(run, pytester):
    result = run(
        """
class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attend = nn.Embedding(16, 32), Attention()

    def forward(self, input_ids):
        return self.attend(self.embed(input_ids))


@pytest.mark.attention_model
@pytest.mark.parametrize("causal", [True, False])
def test_it(attn_model, causal):
    model, ids = Tokens(), torch.arange(32).view(2, 16) % 16
    if not causal:
        model.attend.forward = lambda x: x + x.mean(1, keepdim=True)
    attn_model.check_invariants(model, ids, causal=True, skip=["dynamic"])


@pytest.mark.attention_model
def test_who_knows(attn_model):
    model = Tokens()
    model.attend.forward = lambda x: x + x.mean(1, keepdim=True)
    attn_model.check_invariants(model, torch.arange(32).view(2, 16) % 16)
""",
        "--attn-output=records.jsonl",
    )

    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "E * 1 invariant broken by Tokens ((2, 16) tokens)",
            "E * future * another token at 5 changes rows before it: 5 of 5, the last is 4",
            "E * reproduce * --attn-device=cpu",
        ]
    )
    found = read_records(pytester.path / "records.jsonl")
    assert {(r["question"], r["verdict"], r["reason"], r["model"]) for r in found} == {
        ("invariants", "held", "", "Tokens"),
        ("invariants", "broken", "future", "Tokens"),
        (
            "invariants",
            "held",
            "future: not run: nothing says that the model is causal, and another token at 5 changes rows before it: 5 of 5,"
            " the last is 4; say causal=True where that is wrong, else causal=False",
            "Tokens",
        ),
    }


def test_warnings_of_libraries_fail_no_model_of_the_suite(pytester):
    pytester.makeconftest("""
import warnings

import pytest


@pytest.fixture(autouse=True)
def old_library(monkeypatch):
    from pytest_attn.guests.models import small_models

    made = small_models.torch_model

    def with_a_warning(*args):
        warnings.warn("this library is old", DeprecationWarning, stacklevel=1)
        return made(*args)

    monkeypatch.setattr(small_models, "torch_model", with_a_warning)
""")
    pytester.makeini("[pytest]\nfilterwarnings = error")

    result = pytester.runpytest(
        "--pyargs", "pytest_attn.suite.test_models", "-k", "test_backends_in_models and llama", "--attn-backends=math"
    )

    assert result.parseoutcomes()["passed"] == 1
    assert "failed" not in result.parseoutcomes()


def test_a_known_defect_of_a_backend_is_an_expected_failure_with_its_layers(run, pytester):
    pytester.makeconftest("""
import pytest_attn


def pytest_attn_backends(registry):
    import torch.nn.functional as F

    def known(q, k, v, workload):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 1.1

    registry.add_function("known", known)
    registry["known"].known_defects = (
        pytest_attn.KnownDefect("lib#1", "out is a tenth too large", lambda w, m: True, ("out", "dq", "dk", "dv")),
    )
""")
    result = run(
        """
@pytest.mark.attention_model
def test_it(attn_model, attn_backend, model, step):
    attn_model.check(model, step, attn_backend, precision="flash")
""",
        "--attn-backends=known",
        "--attn-output=records.jsonl",
    )

    result.assert_outcomes(xfailed=1)
    (record,) = read_records(pytester.path / "records.jsonl")
    assert (record["verdict"], record["reason"]) == ("known defect", "lib#1: out is a tenth too large")
    assert [call["kernel"] for call in record["calls"]] == ["SDPA flash"] * 2


def test_what_was_not_or_cannot_be_judged_is_told(run):
    result = run(
        """
@pytest.mark.attention_model
def test_it(attn_model):
    model = nn.Sequential(Attention(), Attention()).bfloat16()
    model[1].forward = lambda x: x + (x @ x.mT).softmax(-1) @ x
    x = torch.randn(2, 24, 32, dtype=torch.bfloat16)
    attn_model.check(model, lambda: model(x).float().square().mean(), scatter=0, inline=["1"])

@pytest.mark.attention_model
def test_no_tensor(attn_model, model):
    attn_model.check(model, lambda: 3)

@pytest.mark.attention_model
def test_excuse(attn_model, model, step):
    attn_model.check(model, step, excused=["refusal"])
""",
        "-v",
    )

    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["layer * function * kernel * workload*", "  note: not judged, because inline= names them: 1*"]
    )
    result.stdout.fnmatch_lines(["*ValueError: unknown excuse 'refusal'; known: refusals, known defects"])
    result.stdout.fnmatch_lines(["raised * on model: TypeError: the step returned int; expected a tensor of *"])
    result.stdout.no_fnmatch_line("*models/step.py*")


@pytest.mark.slow("waits")
def test_what_stands_in_for_attention_and_hangs_is_stopped(run, pytester):
    result = run(
        """
def endless(q, k, v, workload):
    while True:
        pass


@pytest.mark.attention_model
def test_it(attn_model, model, step):
    attn_model.check(model, step, endless)
""",
        "--attn-timeout=1",
        "--attn-output=run.jsonl",
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*no result after 1 s (--attn-timeout): endless of Sequential, *::test_it[[]model[]]"])
    assert "no result" in pytester.path.joinpath("run.jsonl").read_text()
