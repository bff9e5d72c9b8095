"""A callable that replaces a function, which others rely on, fails its case, and the function is put back."""

import builtins
import math
import sys
import time
import warnings
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from _pytest import runner
from _pytest.reports import TestReport
from guests.models.zoo import TOKENS, stack
from judging import SMALL, attention, failure

import pytest_attn
from pytest_attn import Workload, check_model
from pytest_attn.correctness import replaced_functions


def evil(*args, **kwargs):
    return True


class Evil:
    """Is equal to whatever it stands for."""

    __call__ = evil

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


PLACES = [
    *((time, name) for name in ("perf_counter", "perf_counter_ns", "process_time", "monotonic", "sleep")),
    *((torch, name) for name in ("equal", "allclose", "stack", "manual_seed", "get_num_threads")),
    *((torch.Tensor, name) for name in ("clone", "detach", "backward", "take", "tolist", "__eq__")),
    *((F, "scaled_dot_product_attention"), (torch.autograd, "grad"), (torch.cuda.Event, "elapsed_time")),
    *((math, "sqrt"), (TestReport, "from_item_and_call"), (runner, "call_and_report")),
]


@contextmanager
def replacing(owner, name, by=evil):
    """Yield a kernel that replaces a function for good, and that function, which is put back where nobody does."""
    was = vars(owner).get(name, mock.DEFAULT)

    def kernel(q, k, v):
        out = attention(q, k, v)
        setattr(owner, name, by)
        return out

    try:
        yield kernel, was
    finally:
        if was is mock.DEFAULT and name in vars(owner):
            delattr(owner, name)
        elif was is not mock.DEFAULT and vars(owner)[name] is not was:
            setattr(owner, name, was)


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[f"{owner.__name__}.{name}" for owner, name in PLACES])
def test_what_is_replaced_is_named_and_put_back(owner, name):
    with replacing(owner, name, Evil() if name == "equal" else evil) as (kernel, was):
        text = failure(kernel, SMALL)
        assert vars(owner).get(name, mock.DEFAULT) is was
    assert text.startswith("the callable replaced ")
    assert f"{owner.__name__}.{name}" in text
    assert "by         replacing.kernel[" in text


@pytest.mark.parametrize("name", ["all", "getattr", "isinstance", "len", "max", "type", "zip"])
def test_what_everything_calls_is_back_before_it_is_called(name):
    with replacing(builtins, name) as (kernel, was):
        with pytest.raises(AssertionError, match=f"the callable replaced {name} by evil"), replaced_functions.functions_kept():
            kernel(*torch.randn(3, 1, 1, 2, 4))
        assert vars(builtins)[name] is was


def test_a_kernel_that_is_registered_for_an_operator_of_torch_is_taken_back():
    libraries = []

    def kernel(q, k, v):
        out = attention(q, k, v)
        if not libraries:
            libraries.append(torch.library.Library("aten", "IMPL"))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                libraries[0].impl("equal", evil, "CPU")
        return out

    try:
        assert "the callable replaced the operator aten::equal by test_replaced.py" in failure(kernel, SMALL)
        assert not torch.equal(torch.zeros(1), torch.ones(1))
    finally:
        libraries.clear()


def test_an_operator_of_ones_own_may_be_registered_meanwhile():
    made = []

    def kernel(q, k, v):
        if not made:
            made.append(torch.library.custom_op("test_replaced::attention", attend, mutates_args=()))
        return made[0](q, k, v)

    assert pytest_attn.check(kernel, SMALL, device="cpu").passed


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v)


def test_what_is_deleted_comes_back():
    was = time.sleep

    def kernel(q, k, v):
        del time.sleep
        return attention(q, k, v)

    try:
        assert "the callable replaced time.sleep:" in failure(kernel, SMALL)
        assert time.sleep is was
    finally:
        time.sleep = was


@pytest.mark.parametrize("judged", ["check", "check_invariants", pytest.param("measure", marks=pytest.mark.slow("times"))])
def test_whatever_is_asked_and_where_the_kernel_raises(judged):
    calls = []

    def kernel(q, k, v):
        calls.append(1)
        out = attention(q, k, v)
        if judged != "measure" or len(calls) > 8:
            replaces(q, k, v)
            if judged == "check":
                raise KeyError("q")
        return out

    with replacing(torch, "equal") as (replaces, was):
        with pytest.raises(AssertionError, match=r"the callable replaced torch\.equal by evil") as error:
            getattr(pytest_attn, judged)(kernel, Workload(16, heads=1, dtype="float32"), device="cpu")
        assert torch.equal is was
    if judged == "check":
        assert "(then KeyError was raised: 'q')" in str(error.value)


def test_a_step_of_a_model_that_replaces_a_function():
    model = stack(attention)
    x = torch.randn(2, TOKENS, 64)

    def step():
        out = model(x).square().mean()
        replaces(x, x, x)
        return out

    words = r"the callable replaced torch\.Tensor\.clone by evil"
    with replacing(torch.Tensor, "clone") as (replaces, _), pytest.raises(AssertionError, match=words):
        check_model(model, step)


def test_what_a_test_has_replaced_before_is_no_fault_and_stays(monkeypatch):
    def frozen():
        return 0.0

    for owner, name in ((time, "time"), (torch, "allclose"), (torch.Tensor, "tril")):
        monkeypatch.setattr(owner, name, frozen)
    assert pytest_attn.check(attention, SMALL, device="cpu").passed
    assert time.time is torch.allclose is frozen


def test_nothing_is_timed_by_a_clock_that_stands_still(monkeypatch):
    def frozen():
        return 0.0

    for by, words in ((frozen, "frozen of test_replaced.py"), (time.monotonic, "an object of type builtin")):
        monkeypatch.setattr(time, "perf_counter", by)
        with pytest.raises(RuntimeError, match=f"^time.perf_counter is {words}"):
            pytest_attn.measure(attention, SMALL, device="cpu")


def test_a_kernel_may_replace_what_it_puts_back_and_add_what_is_new(monkeypatch):
    monkeypatch.setattr(torch, "added", None, raising=False)
    monkeypatch.setattr(torch.Tensor, "added", None, raising=False)

    def kernel(q, k, v):
        with mock.patch.object(torch, "equal", evil), mock.patch.object(torch.Tensor, "clone", evil):
            torch.added = torch.Tensor.added = evil
            return attention(q, k, v)

    assert pytest_attn.check(kernel, SMALL, device="cpu").passed
    assert torch.added is evil


def test_what_torch_puts_around_its_own_functions_stays(monkeypatch):
    monkeypatch.setattr(torch, "manual_seed", was := torch.manual_seed)

    def kernel(q, k, v):
        if torch.manual_seed is was:  # as torch._dynamo does when it is imported
            torch.manual_seed = torch._disable_dynamo(was)
        return attention(q, k, v)

    assert pytest_attn.check(kernel, SMALL, device="cpu").passed
    assert torch.manual_seed is not was


@pytest.mark.parametrize("owner", ["torch", "time"])
def test_a_library_that_is_imported_meanwhile_may_change_torch_and_no_clock(monkeypatch, tmp_path, owner):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "a_library.py").write_text(f"import torch, time\ndef mine(*args): pass\n{owner}.{NAMES[owner]} = mine\n")
    monkeypatch.syspath_prepend(folder)
    module = sys.modules[owner]
    monkeypatch.setattr(module, NAMES[owner], getattr(module, NAMES[owner]))

    def kernel(q, k, v):
        import a_library  # noqa: F401 - which changes torch

        return attention(q, k, v)

    try:
        if owner == "torch":
            assert pytest_attn.check(kernel, SMALL, device="cpu").passed
            assert torch.allclose.__name__ == "mine"
        else:
            assert "the callable replaced time.ctime by mine of a_library.py" in failure(kernel, SMALL)
    finally:
        sys.modules.pop("a_library", None)


NAMES = {"torch": "allclose", "time": "ctime"}
