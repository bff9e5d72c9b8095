import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from guests.models.zoo import DIM, HONEST, autocast_case, case_of, causal, flex_case, full, layers_of, stack
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import pytest_attn
from pytest_attn import KnownDefect, Machine, Workload, check_model, check_module
from pytest_attn.backends.backend import FunctionBackend
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.judge import RERUN, compare_all
from pytest_attn.correctness.limits import Limits
from pytest_attn.guests.models import call_judge as judge
from pytest_attn.guests.models.call_to_workload import DropoutError
from pytest_attn.guests.models.check_model import judge_model

DTYPES = [torch.float32, torch.bfloat16]
GROUPED, CPU = Workload(8, heads=4, kv_heads=2), torch.device("cpu")
H200 = Machine("cuda:0", "NVIDIA H200", (9, 0), "sm90", 150 << 30, 1, "2.11.0+cu130")
KERNELS = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [
        pytest.param(dtype, kernel, marks=[pytest.mark.slow] * (number in (1, 2)))
        for number, (dtype, kernel) in enumerate(itertools.product(DTYPES, KERNELS))
    ],
    ids=["fp32-math", "fp32-flash", "bf16-math", "bf16-flash"],
)
@pytest.mark.parametrize("name", HONEST)
def test_honest_models_pass_forward_and_backward(name, dtype, kernel):
    model, step = HONEST[name](dtype)

    with sdpa_kernel([kernel, SDPBackend.MATH]):
        found = check_model(model, step)

    assert len(found.calls) == {"cross": 1, "uniform": 3}.get(name, 2)
    assert all(call.has_gradients and len(call.comparison.tensors) == 4 for call in found.calls)
    assert not found.message


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_flex_attention_is_judged_forward(dtype):
    model, step = flex_case(dtype)

    found = check_model(model, step, backward=False)

    assert [call.function for call in found.calls] == ["flex_attention"] * 2
    assert found.calls[0].workload.mask == pytest_attn.Causal()


@pytest.mark.parametrize("kept", [{"k": 2}, {"v": 2}], ids=["fewer keys", "fewer values"])
def test_keys_and_values_in_other_numbers_of_heads_are_judged(kept):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k[:, : kept.get("k")], v[:, : kept.get("v")], enable_gqa=True)

    assert judge_model(*case_of(stack(attend))).passed


@pytest.mark.parametrize(("variant", "is_bottom_right"), [(causal_lower_right, True), (causal_upper_left, False)])
def test_a_causal_mask_of_torch_that_holds_no_numbers_is_read(variant, is_bottom_right):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q[:, :, -9:], k, v, attn_mask=variant(9, k.shape[2])).mean(2, keepdim=True)

    found = judge_model(*case_of(stack(attend)))

    assert found.passed
    assert {call.workload.mask for call in found.calls} == {pytest_attn.Causal(bottom_right=is_bottom_right)}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_in_words():
    def attend(q, k, v):
        nested = torch.nested.nested_tensor([q[0, :, :20], q[1]])
        return F.scaled_dot_product_attention(nested, nested, nested).to_padded_tensor(0.0)

    found = judge_model(*case_of(stack(attend)), backward=False)

    assert "was not judged: q, k and v must be dense tensors; nested ones are not read" in found.message


def test_autocast_calls_are_judged_in_the_dtype_that_they_are_computed_in():
    found = check_model(*autocast_case())

    assert {call.workload.dtype for call in found.calls} == {"bfloat16"}


def test_autocast_does_not_cast_what_a_backend_multiplies_in_float32(monkeypatch):
    """As the float32 copies that MATH makes of q and k: on an H200 their scores were rounded, z 11.5."""
    seen, math = [], Registry()["math"]
    prepare = math.prepare

    def watched(inputs, backward):
        kernel = prepare(inputs, backward)

        def call(q, k, v):
            seen.append(torch.is_autocast_enabled("cpu"))
            return kernel(q, k, v)

        return call

    monkeypatch.setattr(math, "prepare", watched)
    check_model(*autocast_case(), math)
    assert set(seen) == {False}


def test_a_function_of_ones_own_has_the_autocast_of_the_model():
    seen = []

    def mine(q, k, v, workload):
        seen.append(torch.is_autocast_enabled("cpu"))
        return causal(q, k, v)

    check_model(*autocast_case(), mine)
    assert set(seen) == {True}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("backend", [pytest.param("math", marks=pytest.mark.slow), "eager", "sdpa_flash"])
@pytest.mark.parametrize("name", ["causal", "grouped", "window", "padded", "cross", "encoder", "folded", "shifted-windows"])
def test_a_backend_of_the_registry_takes_the_place_of_every_call(name, backend):
    model, step = HONEST[name](torch.bfloat16)
    if name == "grouped" and (refusals := Registry()[backend].unsupported_because(GROUPED, machine_of(CPU), True)):
        pytest.skip(refusals[0])  # as with torch 2.6

    found = check_model(model, step, backend)

    assert {call.comparison.subject for call in found.calls} == {backend}


def test_the_models_own_faulty_function_is_found_where_it_is_named(monkeypatch):
    model, step = case_of(stack(lambda q, k, v: own_attention(q, k, v, scale=0.25)))

    with pytest.raises(AssertionError, match=r"blocks.0.attn \(own_attention\): mismatch: out of own_attention"):
        check_model(model, step, functions=[own_attention])


def own_attention(q, k, v, scale=None):
    return (q @ k.mT * scale * 1.02).softmax(-1) @ v


def defaulting(q, k, v, is_causal=True, *, scale=0.5, blocks=64):
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)


def test_a_named_function_is_asked_with_its_defaults():
    model, step = case_of(stack(lambda q, k, v: defaulting(q, k, v)))

    (call, _) = check_model(model, step, functions=defaulting).calls
    assert (call.workload.mask, call.workload.scale) == (pytest_attn.Causal(), 0.5)


def test_a_function_that_is_named_and_never_caught_fails():
    held = own_attention
    model, step = case_of(stack(lambda q, k, v: held(q, k, v, scale=0.25)))
    model.blocks[1].attn.attend = causal

    with pytest.raises(AssertionError, match="own_attention was named in functions=, and no call of it was caught"):
        check_model(model, step, functions=[own_attention])


def biased(q, k, v, mask):
    return ((q @ k.mT).float() * 0.25 + mask).softmax(-1).to(v.dtype) @ v


BIAS = 4 * torch.randn(4, 45, 45, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("attend", "options"),
    [
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=BIAS), {}),
        (lambda q, k, v: biased(q, k, v, mask=BIAS), {"functions": [biased], "precision": "eager", "scatter": 0}),
    ],
    ids=["sdpa", "named"],
)
def test_autocast_casts_an_additive_mask_as_torch_does_and_leaves_that_of_a_named_function(attend, options):
    model, step = case_of(stack(attend))

    def cast():
        with torch.autocast("cpu", torch.bfloat16):
            return step()

    assert check_model(model, cast, **options).calls


def dropping(query, key, value, mask=None, dropout=None):
    return dropout(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_that_is_a_module_drops_in_training_only(p):
    model, step = case_of(stack(lambda q, k, v: dropping(q, k, v, dropout=drop)))
    drop = torch.nn.Dropout(p).eval()

    assert check_model(model, step, functions=dropping).calls
    if p:
        drop.train()
        with pytest.raises(DropoutError):
            check_model(model, step, functions=dropping)


def in_place(q, k, v):
    q *= 0.25
    return (q @ k.mT).softmax(-1) @ v


def test_a_function_of_ones_own_that_changes_its_input_is_not_judged_backward():
    model, step = case_of(stack(lambda q, k, v: in_place(4 * q, k, v)))

    assert check_model(model, step, functions=in_place, backward=False).calls
    with pytest.raises(AssertionError, match="was not judged: it changes its q in place, which hides the gradient"):
        check_model(model, step, functions=in_place)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_diverged_model_is_told_so(name):
    def attend(q, k, v):
        tensors = {"q": q, "k": k, "v": v}
        tensors[name] = tensors[name].index_fill(2, torch.tensor([5]), float("inf"))
        return F.scaled_dot_product_attention(*tensors.values(), is_causal=True).nan_to_num(0, 0, 0)

    found = judge_model(*case_of(stack(attend), torch.bfloat16), scatter=0)
    assert found.notes[0].startswith("2 of 2 calls hold NaN or infinite elements in q, k or v")
    assert found.notes[0].endswith("(blocks.0.attn, blocks.1.attn)")
    assert found.passed or f"its {name} holds 128 elements that are NaN or infinite" in found.message


def detaching(q, k, v, is_causal=True):
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).detach()


def test_a_layer_that_gives_no_gradient_is_told():
    model, step = case_of(stack(causal), torch.bfloat16)
    model.blocks[1].attn.attend = lambda q, k, v: detaching(q, k, v)

    found = check_model(model, step, functions=[detaching], scatter=0)
    assert [call.has_gradients for call in found.calls] == [True, False]
    assert found.notes == (
        "1 of 2 calls give no gradient, though q, k or v need one: none was compared there (blocks.1.attn)",
    )


def test_a_layer_that_keeps_its_old_implementation_fails_a_replacement():
    model, step = case_of(layers_of(full, lambda q, k, v: (q @ k.mT / 4).softmax(-1) @ v, full))

    with pytest.raises(AssertionError) as failure:
        check_model(model, step, "math")

    assert "blocks.1.attn: ran without an attention call that could be replaced by math" in str(failure.value)
    assert "softmax    ran in blocks.1.attn: is an old implementation left there?" in str(failure.value)


def test_a_refused_call_fails_in_the_backends_words_and_names_its_layer():
    model, step = case_of(layers_of(full, causal))

    def only_full(workload):
        return ["takes no mask"] if workload.mask else []

    backend = FunctionBackend("mine", lambda q, k, v, workload: full(q, k, v), unsupported_because=only_full)
    with pytest.raises(
        AssertionError, match=r"blocks.1.attn: a call of F.scaled_dot_product_attention was not replaced: mine: "
    ):
        check_model(model, step, backend)


def test_dropout_is_refused():
    model, step = case_of(stack(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)))

    with pytest.raises(DropoutError, match=r"dropout 0.1 has no right result; set the model's attention dropout to 0"):
        check_model(model, step)
    with pytest.raises(DropoutError, match=r"dropout 0.1 has no right result, and the model is in evaluation: pass it only"):
        check_model(model.eval(), step)


def dropping_always(q, k, v):
    return F.dropout((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1), 0.1) @ v


def cubed(q, k, v):
    return full(q, k[:, :, ::2], v[:, :, ::2]) ** 3


@pytest.mark.parametrize("is_given", [False, True], ids=["its-own", "given"])
@pytest.mark.parametrize("name", ["dropping_always", "cubed"])
def test_two_equal_calls_that_differ_are_told_as_that(name, is_given):
    plain, differs = stack(full), name == "dropping_always"
    before = torch.get_rng_state()
    if is_given:
        found = judge_model(*case_of(plain), FunctionBackend(name, lambda *qkv, workload: globals()[name](*qkv)), scatter=0)
    else:
        plain.blocks[1].attn.attend = lambda *qkv: globals()[name](*qkv)
        found = judge_model(*case_of(plain), functions=f"{__name__}.{name}", scatter=0)

    said = found.calls[1].comparison.mismatch.hints
    assert [call.passed for call in found.calls] == [not is_given, False]
    assert (said == (RERUN,)) == differs
    assert torch.equal(before, torch.get_rng_state())


def test_gradients_that_never_arrive_fail_unless_none_are_asked_for():
    model, step = case_of(stack(lambda q, k, v: full(q.detach(), k.detach(), v.detach())))

    with pytest.raises(AssertionError, match="no gradient arrived at any attention call"):
        check_model(model, step)
    assert check_model(model, step, backward=False).passed


def test_outputs_without_a_loss_get_gradients_all_the_same():
    model = stack(causal)
    x = torch.randn(2, 45, 64)

    assert all(call.has_gradients for call in check_model(model, lambda: {"hidden": model(x)}).calls)


def test_inputs_that_are_overwritten_later_are_judged_as_they_were():
    def overwrites(q, k, v):
        out = F.scaled_dot_product_attention(q, k, v)
        q.mul_(3)
        return out

    model, step = case_of(stack(overwrites).requires_grad_(False))

    assert check_model(model, step, backward=False).passed


def test_a_call_of_few_rows_is_not_one_in_which_small_faults_cannot_be_seen():
    model = stack(full)
    x = torch.randn(1, 5, DIM, generator=torch.Generator().manual_seed(0))

    found = judge_model(model, lambda: model(x).sum())

    assert {row.limits.head for call in found.calls for row in call.comparison.tensors} == {4.0}
    assert not found.notes


def test_limits_that_emulated_kernels_raise_are_told(monkeypatch):
    monkeypatch.setattr(judge, "_raised", lambda limits, honest, deviations: Limits(20, 20, 20))
    monkeypatch.setattr(judge, "compare_all", lambda *args: (replace(one, passed=False) for one in compare_all(*args)))

    found = judge_model(*HONEST["causal"](torch.float32))

    assert found.passed
    assert "small faults cannot be seen in 2 of 2 calls" in found.notes[0]


# -- what computed each call -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "told"), [(SDPBackend.MATH, "SDPA math"), (SDPBackend.FLASH_ATTENTION, "SDPA flash")])
def test_the_kernel_that_torch_chose_is_told_for_each_layer(kernel, told):
    model, step = case_of(stack(causal), torch.bfloat16)
    with sdpa_kernel([kernel]):
        found = check_model(model, step, scatter=0)

    assert [call.kernel for call in found.calls] == [told, told]


def test_layers_with_different_kernels_are_told_apart():
    def with_math(q, k, v):
        with sdpa_kernel([SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, k, v)

    model, step = case_of(layers_of(full, with_math), torch.bfloat16)

    assert [call.kernel for call in check_model(model, step, scatter=0).calls] == ["SDPA flash", "SDPA math"]


@pytest.mark.parametrize(("backend", "told"), [("math", "SDPA math"), ("sdpa_flash", "SDPA flash"), ("eager", "")])
def test_the_kernel_of_a_replacement_is_told(backend, told):
    model, step = case_of(stack(causal), torch.bfloat16)

    assert {call.kernel for call in check_model(model, step, backend, scatter=0).calls} == {told}


def test_a_layer_that_makes_no_call_is_named_though_nothing_was_to_be_replaced():
    model, step = case_of(layers_of(full, lambda q, k, v: v, full))

    (note,) = check_model(model, step).notes

    assert note == "not judged: blocks.1.attn made no attention call, while others of its kind made one"


def eager(q, k, v, workload=None, scale=None):
    del workload, scale
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def test_a_function_that_declares_where_it_rounds_is_held_to_that():
    model, step = case_of(stack(full), torch.bfloat16)

    assert "fits the precision profile 'eager'" in judge_model(model, step, eager, scatter=0).message
    assert check_model(model, step, eager, precision="eager").passed


def test_the_models_own_function_is_held_to_what_is_declared():
    model, step = case_of(stack(lambda q, k, v: eager(q, k, v)), torch.bfloat16)

    assert not judge_model(model, step, functions=[eager], scatter=0).passed
    assert check_model(model, step, functions=[eager], precision="eager").passed


def test_a_backend_says_itself_where_it_rounds():
    model, step = case_of(stack(full), torch.bfloat16)

    assert check_model(model, step, "eager", scatter=0, precision="flash").passed


def test_an_unknown_precision_is_refused_before_anything_runs():
    model, _ = case_of(stack(full))
    with pytest.raises(ValueError, match="unknown precision"):
        check_model(model, lambda: pytest.fail("the step ran"), precision="flush")


def wrong(q, k, v, workload):
    return F.scaled_dot_product_attention(q, k, v, is_causal=workload.mask is not None) * 1.1


def with_defect(**known):
    """Return a backend with a wrong out, which it is known for where there is a mask."""
    backend = FunctionBackend("known", wrong)
    defect = {"issue": "lib#1", "summary": "out is a tenth too large", "tensors": ("out", "dq", "dk", "dv")}
    backend.known_defects = (KnownDefect(**{**defect, "applies": lambda w, m: w.mask is not None, **known}),)
    return backend


def test_a_known_defect_of_a_backend_explains_what_is_wrong():
    found = judge_model(*case_of(stack(causal)), with_defect())

    assert not found.passed
    assert found.known_defects == ("lib#1: out is a tenth too large",)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("attend", "known"), [(full, {}), (causal, {"tensors": ("dq",)}), (causal, {"only_nan": True})])
def test_what_a_known_defect_does_not_explain_stays_wrong(attend, known):
    found = judge_model(*case_of(stack(attend)), with_defect(**known))

    assert (found.passed, found.known_defects) == (False, ())


def test_a_model_with_a_layer_that_is_not_replaced_has_more_than_a_known_defect():
    model, step = case_of(layers_of(causal, lambda q, k, v: (q @ k.mT / 4).softmax(-1) @ v))

    assert judge_model(model, step, with_defect()).known_defects == ()


def test_cudnn_s_stale_strides_excuse_garbage_of_its_own_kernel_only():
    def known(kernel, l2):
        call = SimpleNamespace(subject=None, kernel=kernel, workload=Workload(88, heads=2, head_dim=16), gradients={"dk": 1})
        wrong = SimpleNamespace(name="dk", passed=False, elements=9, wrong_positions=0, relative_l2=l2, worst=(0, 0, 0, 0))
        return judge.known_defect_of(call, SimpleNamespace(passed=False, tensors=[wrong], changed=()), H200)

    assert "dout is read with the strides" in known("SDPA cudnn", 1.2)
    assert known("SDPA cudnn", 0.05) == known("SDPA flash", 1.2) == ""


def test_cudnn_s_half_filled_tile_excuses_nan_in_dq_alone():
    def known(name="dq", rows=64, wrong_positions=32, kernel="SDPA cudnn"):
        w = Workload(rows, heads=2, head_dim=16, mask="causal")
        call = SimpleNamespace(subject=None, kernel=kernel, workload=w, gradients={"dq": 1})
        wrong = SimpleNamespace(name=name, passed=False, elements=2048, wrong_positions=wrong_positions, relative_l2=0.0)
        return judge.known_defect_of(call, SimpleNamespace(passed=False, tensors=[wrong], changed=()), H200)

    assert known().startswith("pytorch#196678: NaN in dq where q_len is 64")
    assert known("dk") == known("out") == known(rows=63) == known(wrong_positions=0) == known(kernel="SDPA flash") == ""


# -- one layer ---------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Causal attention between projections."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, hidden, turned=False):
        q, k, v = self.qkv(hidden).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=not turned).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, a, b):
        return self.first(a + b)


def workloads(comparison):
    assert comparison.passed
    return [call.workload.id for call in comparison.calls]


@pytest.mark.parametrize("batch_first", [True, False])
def test_hidden_states_are_drawn_for_torch_s_layers(batch_first):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(32, 2, batch_first=batch_first)
    assert workloads(check_module(attention)) == ["b2-h2-s64-d16-fp32"]
    other = nn.MultiheadAttention(32, 2, kdim=24, vdim=16, batch_first=batch_first)
    assert workloads(check_module(other)) == ["b2-h2-s64-d16-fp32"]
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=batch_first)
    assert workloads(check_module(layer)) == ["b2-h2-s64-d16-fp32"]


def test_gradients_and_what_leaves_the_module_are_judged_too():
    torch.manual_seed(0)
    comparison = check_module(Layer().bfloat16())
    (call,) = comparison.calls
    assert {tensor.name for tensor in call.comparison.tensors} == {"out", "dq", "dk", "dv"}
    assert {"0", "output", "gradient of qkv.weight"} & set(comparison.ratios)
    assert call.workload.id == "b2-h2-s64-d16-causal"
    assert not check_module(Layer(), backward=False).calls[0].has_gradients


def test_the_fast_path_of_inference_goes_the_ordinary_way_while_it_is_judged():
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    with torch.no_grad():
        assert workloads(check_module(layer, backward=False)) == ["b2-h2-s64-d16-fp32"]


def test_attention_that_is_written_out_for_its_weights_is_named():
    hidden = torch.randn(2, 8, 32)
    with pytest.raises(AssertionError, match="no attention call was caught") as caught:
        check_module(nn.MultiheadAttention(32, 2, batch_first=True), (hidden, hidden, hidden))
    assert "pass need_weights=False" in str(caught.value)


def test_inputs_are_handed_over_as_they_are():
    torch.manual_seed(0)
    hidden = torch.randn(1, 24, 32)
    for inputs in (hidden, (hidden,), [hidden], {"hidden": hidden}):
        assert workloads(check_module(Layer(), inputs)) == ["h2-s24-d16-causal-fp32"]
    assert workloads(check_module(Layer(), {"hidden": hidden, "turned": True})) == ["h2-s24-d16-fp32"]
    assert workloads(check_module(Encoder(), (hidden, hidden))) == ["h2-s24-d16-fp32"]


@pytest.mark.parametrize(("module", "inputs"), [(Encoder(), None), (nn.ReLU(), None), (Layer(), 3)])
def test_what_cannot_be_called_is_refused_in_words(module, inputs):
    with pytest.raises(ValueError, match="inputs"):
        check_module(module, inputs)
