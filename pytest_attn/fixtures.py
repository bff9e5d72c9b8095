"""The plugin's fixtures; `pytest --fixtures` prints what stands here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pkgutil import resolve_name
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from pytest_attn.backends.backend import Backend
    from pytest_attn.cases.case import AttentionCase
    from pytest_attn.cases.model import AttentionModel
    from pytest_attn.cases.tensors import ReferenceTensors
    from pytest_attn.session.items import CaseParameter
    from pytest_attn.workloads.workload import Workload


@pytest.fixture
def _attn_parameter(request: pytest.FixtureRequest) -> CaseParameter:
    """What the attention marker gave this item; for the other fixtures."""
    if not hasattr(request, "param"):
        pytest.fail(f"{request.node.nodeid}: the attention fixtures must be arguments of the test, not asked for later", False)
    parameter: CaseParameter = request.param
    return parameter


@pytest.fixture
def attn(request: pytest.FixtureRequest, _attn_parameter: CaseParameter) -> AttentionCase:
    """One attention case: a workload of the marker, with its tensors and judgments.

    Example::

        @pytest.mark.attention("flux-L512", backward=True)
        def test_my_kernel(attn):
            attn.check(lambda q, k, v: my_attention(q, k, v, scale=attn.workload.softmax_scale))

    Its attributes describe the case: workload, backend, device, q, k, v, mask, bias, sinks, alibi_slopes, cu_seqlens, kv_lens,
    page_table and reference. `attn.check(fn)` compares fn with exact attention and raises AssertionError with a
    diagnosis where it is wrong. fn may be a callable of (q, k, v), attn_backend, or a backend's name.
    `attn.check_invariants(fn)` asks what needs no tolerance. `attn.measure(fn)` checks fn, times it, and raises AssertionError
    where its p50 is slower than the baseline of this machine.
    """
    from pytest_attn.session.kinds import kind_of

    make_case = resolve_name(_attn_parameter.maker or kind_of(request.node).maker)
    case: AttentionCase = make_case(request, _attn_parameter)
    return case


@pytest.fixture
def attn_backend(attn: AttentionCase) -> Backend:
    """One of the backends selected by --attn-backends: the test becomes one item per backend.

    Example::

        @pytest.mark.attention("flux")
        def test_every_backend_is_right(attn, attn_backend):
            attn.check(attn_backend)
    """
    from pytest_attn.cases.case import backend_of

    return backend_of(attn)


@pytest.fixture
def attn_model(attn: AttentionCase) -> AttentionModel:
    """A model's attention: holds every call that a model makes against exact attention on the call's own tensors.

    Example::

        @pytest.mark.attention_model
        def test_my_model(attn_model, attn_backend):
            model = MyModel().to(attn_model.device)
            attn_model.check(model, lambda: loss(model(batch)), attn_backend)

    attn_model.device is the device of the marker or of --attn-device. attn_model.check(model, step, backend=None) runs the
    step forward and backward, and lets a backend compute the calls where one is given. It raises AssertionError, naming the
    layer, where a call is wrong or was not replaced.
    """
    model: AttentionModel = attn  # type: ignore[assignment]  # what the fixture attn is under the marker attention_model
    return model


@pytest.fixture
def attn_workload(_attn_parameter: CaseParameter) -> Workload:
    """The workload of the case (attn.workload)."""
    return _attn_parameter.workload


@pytest.fixture
def attn_device(attn: AttentionCase) -> torch.device:
    """The torch device of the case, chosen by the marker or --attn-device."""
    return attn.device


@pytest.fixture
def qkv(attn: AttentionCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tensors (q, k, v) of the marker's first input distribution, in the marker's layout."""
    return attn.q, attn.k, attn.v


@pytest.fixture
def attn_reference(attn: AttentionCase) -> ReferenceTensors:
    """Exact results for `qkv` in float64: (out, lse, dq, dk, dv); the gradients are None unless backward=True."""
    return attn.reference


@pytest.fixture
def attn_benchmark(request: pytest.FixtureRequest) -> Callable[..., None]:
    """A function of samples in seconds, measured elsewhere: hands them to pytest-benchmark, where it is there and enabled.

    Example::

        def test_mine(attn_benchmark):
            attn_benchmark([0.00041, 0.00040, 0.00042], clock="my profiler")
    """
    from pytest_attn.cases.pytest_benchmark import attn_benchmark_recorder

    return attn_benchmark_recorder(request)


@pytest.fixture
def assert_attention_close(attn: AttentionCase) -> Callable[[torch.Tensor], None]:
    """A function of out, computed from `qkv`: raises AssertionError with a diagnosis unless it is within its budget.

    Example::

        @pytest.mark.attention("smoke-full")
        def test_output(qkv, assert_attention_close):
            assert_attention_close(my_attention(*qkv))
    """
    return attn.assert_close


def fixtures_of_kinds(names: Iterable[str]) -> ModuleType:
    """Return a plugin with the fixtures of kinds that others have registered: each is the case, as `attn` makes it."""
    module = ModuleType("pytest_attn_kinds")
    for name in names:

        def case(attn: object) -> object:
            """The case of a test; its kind says what it judges."""
            return attn

        setattr(module, name, pytest.fixture(name=name)(case))
    return module
