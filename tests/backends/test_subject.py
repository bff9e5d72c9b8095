"""What is tested, behind one type: a callable says what its test declares, a backend declares itself."""

import functools
import warnings
from typing import get_type_hints

import pytest
import torch

from pytest_attn import Backend, KnownDefect, Machine, Pages, Workload, draw_inputs
from pytest_attn.backends.capabilities import Capabilities
from pytest_attn.backends.declaration import Declaration, Declared
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry
from pytest_attn.backends.subject import CallableSubject, obstacle_of_any
from pytest_attn.correctness.spec import CheckSpec

CPU = machine_of(torch.device("cpu"))
SMALL_GPU = Machine("cuda:0", "H200", (9, 0), "sm90", 1 << 20, 1, "2.11.0")
PLAIN, CAUSAL = Workload(16), Workload(16, mask="causal")


def mine(q, k, v):
    return q


class Own(Backend):
    name, library, precision, layout, returns_lse = "own", "torch", "eager", "bshd", True
    capabilities = Capabilities(frozenset(), frozenset(("backward",)))
    unavailable, broken = None, None

    def prepare(self, inputs, backward=False):
        return mine

    def unavailable_because(self, machine):
        return self.unavailable

    def broken_because(self):
        return self.broken


def subject(target, name=None, within="", **declared):
    return Registry().subject(target, name, Declaration(**declared), within)


# -- what it is made of --------------------------------------------------------------------------------------------------


def test_a_callable_is_what_its_test_declares():
    one = subject(mine, "a kernel", layout="bshd", precision="eager", returns_lse=True)
    assert isinstance(one, CallableSubject)
    assert (one.name, one.given_name, one.user_function) == ("a kernel", "a kernel", mine)
    assert (one.layout, one.precision, one.returns_lse) == ("bshd", "eager", True)
    assert not one.is_backend
    assert one.prepare(draw_inputs(PLAIN)) is mine


def test_a_callable_without_a_name_is_called_as_its_author_calls_it():
    assert (subject(mine).name, subject(mine).given_name) == ("mine", "")
    within = "test_a_callable_without_a_name_is_called_as_its_author_calls_it"

    def local(q, k, v):
        return q

    assert subject(local, within=within).name == "local"
    assert subject(functools.partial(mine, k=1)).name == "mine[k=1]"


def test_a_backend_declares_itself_whatever_its_test_says():
    own = Own()
    one = subject(own, "another", layout="bshd", precision="flash2", returns_lse=False)
    assert one is own
    assert (one.name, one.layout, one.precision, one.returns_lse) == ("own", "bshd", "eager", True)
    assert one.is_backend
    assert one.user_function is None


def test_what_a_user_s_backend_calls_its_own_attributes_changes_nothing():
    own = Own()
    own.fn, own.layout = mine, "bshd"
    spec = CheckSpec(PLAIN, torch.device("cpu"))
    one = spec.subject(Registry(), own)
    assert one.is_backend
    assert spec.for_subject(one).layout == "bhsd", "in which a backend is given its tensors, whatever its kernel takes"


def test_a_name_is_the_backend_of_that_name():
    registry = Registry()
    assert registry.subject("math") is registry["math"]
    with pytest.raises(ValueError, match=r"unknown backend 'mth'; did you mean math\?"):
        registry.subject("mth")


@pytest.mark.parametrize("target", [42, None, ["math"]])
def test_what_is_none_of_the_three_is_refused(target):
    with pytest.raises(TypeError, match="or a backend's name, got ") as error:
        subject(target)
    assert str(error.value).startswith("needs a callable of (q, k, v), a backend or a backend's name, got ")
    with pytest.raises(TypeError, match=r"got the class Function; pass Function\.apply if it is an autograd Function"):
        subject(torch.autograd.Function)


@pytest.mark.parametrize("name", [1, "", " ", "a|b"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(TypeError, match=r"^name must be a text without '\|', got "):
        subject(mine, name)


def test_a_check_takes_its_layout_and_precision_from_the_subject():
    spec = CheckSpec(PLAIN, torch.device("cpu"))
    of_backend, of_callable = (spec.for_subject(spec.subject(Registry(), target)) for target in (Own(), mine))
    assert (of_backend.layout, of_backend.declared.precision, of_backend.declared.has_lse) == ("bhsd", "eager", True)
    assert (of_callable.layout, of_callable.declared.precision, of_callable.declared.has_lse) == ("bhsd", "torch_cpu", False)
    packed = CheckSpec(Workload(q_lens=(3, 5)), torch.device("cpu"))
    assert packed.for_subject(Own()).layout == "thd"


def test_a_precision_that_nobody_knows_is_refused_with_the_name_of_who_declares_it():
    class Vague(Own):
        name, precision = "vague", "roughly"

    with pytest.raises(ValueError, match="backend 'vague': unknown precision 'roughly'; known: flash"):
        CheckSpec(PLAIN, torch.device("cpu")).for_subject(Vague())


def test_the_same_callable_declared_the_same_is_equal():
    class Kernel:
        def forward(self, q, k, v):
            return q

    kernel = Kernel()
    assert subject(kernel.forward) == subject(kernel.forward), "each access makes another bound method"
    assert hash(subject(kernel.forward)) == hash(subject(kernel.forward))
    assert subject(kernel.forward) != subject(Kernel().forward)
    for other in (subject(mine, "x"), subject(mine, layout="bshd"), subject(mine, precision="eager"), mine):
        assert subject(mine) != other
    assert subject(mine) != subject(mine, returns_lse=True)


# -- where it comes from -------------------------------------------------------------------------------------------------


def test_baselines_of_a_callable_belong_to_its_test_and_those_of_a_backend_to_all():
    assert subject(mine).baseline_name("t.py::test") == "mine of t.py::test"
    assert subject(mine, "a kernel").baseline_name("t.py::test") == "a kernel of t.py::test"
    assert Own().baseline_name("t.py::test") == "own"
    lambdas = [subject(lambda q, k, v, block=64: q), subject(lambda q, k, v, block=128: q)]
    assert [one.baseline_name("t") for one in lambdas] == ["lambda of t"] * 2, "the same wherever its line moves"


def test_a_callable_comes_from_a_module_and_a_backend_from_a_library():
    assert subject(mine).origin() == {"module": __name__, "qualname": "mine"}
    assert subject(mine).version() == ""
    assert subject(mine).library == ""
    assert Own().origin() == {"library": "torch", "version": Own().version()}
    assert Own().version().startswith(str(torch.__version__).split("+")[0])


def test_a_library_s_warnings_are_kept_quiet_and_a_user_s_are_not():
    with pytest.warns(UserWarning, match="mine"), subject(mine).calling():
        warnings.warn("mine", stacklevel=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Own().calling():
            warnings.warn("a library's", stacklevel=1)


# -- what it takes -------------------------------------------------------------------------------------------------------


def test_the_first_obstacle_is_the_reason():
    own, paged = Own(), Workload(1, 64, batch=2, kv_pages=Pages(16), sinks=True)
    large = Workload(100_000, mask="causal")
    assert own.obstacle(paged, SMALL_GPU, True) == "a paged KV cache has no gradient"
    own.unavailable, own.broken = "not installed", "cannot be imported"
    assert own.obstacle(large, SMALL_GPU, False) == "not installed"
    own.unavailable = None
    assert own.obstacle(large, SMALL_GPU, False).startswith(f"{large.id} needs about ")
    assert own.obstacle(CAUSAL, CPU, False) == "has no causal mask", "for which nothing is imported"
    assert own.obstacle(Workload(16, dropout=0.1), CPU, False).startswith("cannot say which probabilities it dropped")
    assert Own.capabilities.refusals(PLAIN.replace(dropout=0.1)) == ["cannot say which probabilities it dropped (dropout=0.1)"]
    assert own.obstacle(PLAIN, CPU, False) == "cannot be imported"
    own.broken = None
    assert own.obstacle(PLAIN, CPU, False) is None


@pytest.mark.parametrize(
    ("name", "workload", "backward"),
    [
        ("math", Workload(64, dropout=0.1), False),
        ("math", Workload(1, 64, batch=2, kv_pages=Pages(16)), True),
        ("flash4", Workload(64, bias="hqk"), False),
        ("flex_decode", Workload(128), False),
        ("flex_decode", Workload(64, heads=3, kv_heads=1), False),
        ("flex_decode+compile", Workload(128), False),
        ("flash3", Workload(64, head_dim=128, v_head_dim=512), False),
        ("flash3", Workload(64, head_dim=64, v_head_dim=512), True),
    ],
)
def test_what_it_declares_to_refuse_it_does_not_claim(name, workload, backward):
    assert not Registry()[name].claims(workload, backward)


@pytest.mark.parametrize(
    ("name", "workload"), [("flash3", Workload(64, head_dim=64, v_head_dim=512)), ("flex_decode", Workload(64))]
)
def test_what_it_takes_it_claims_though_no_library_is_there(name, workload):
    assert Registry()[name].claims(workload)


def test_its_workspace_must_fit_the_device_as_well():
    class Hungry(Own):
        def workspace(self, workload, backward=False):
            return 1 << 50 if backward else 0

    assert Hungry().obstacle(PLAIN, CPU, False) is None
    assert "needs about 1,048,576 GiB" in Hungry().obstacle(PLAIN, CPU, True)


def test_no_kernel_at_all_runs_what_has_no_gradient_or_no_room():
    paged = Workload(1, 64, batch=2, kv_pages=Pages(16))
    assert obstacle_of_any(paged, CPU, True) == "a paged KV cache has no gradient"
    assert obstacle_of_any(paged, CPU, False) is None
    assert "H200 has 0 GiB" in obstacle_of_any(Workload(100_000), SMALL_GPU, False)


# -- what is known of it -------------------------------------------------------------------------------------------------


def test_a_known_defect_is_of_the_workloads_and_directions_in_its_reach():
    of_masks = KnownDefect("lib#1", "out is off", lambda workload, machine: workload.mask is not None, ("out",))
    of_gradients = KnownDefect("lib#2", "dk is off", lambda workload, machine: True, ("dk",))
    changing = KnownDefect("lib#3", "q is scaled", lambda workload, machine: True, (), changes_input=("q",))

    class Defective(Own):
        known_defects = (of_masks, of_gradients, changing)

    one = Defective()
    assert one.defects_on(CAUSAL, CPU, backward=False) == [of_masks, changing]
    assert one.defects_on(PLAIN, CPU, backward=True) == [of_gradients, changing]
    assert one.known_to_change == {"q"}
    assert subject(mine).defects_on(CAUSAL, CPU, backward=True) == []
    assert subject(mine).known_to_change == frozenset()


def test_the_keywords_for_type_checkers_are_the_fields_of_a_declaration():
    fields, keywords = get_type_hints(Declaration), get_type_hints(Declared)
    assert list(fields.items()) == list(keywords.items())
