"""Ids are typed: in a shell without quotes beyond those that the brackets need, after -k, and kept by --lf."""

import re

import pytest

from pytest_attn import BooleanMask
from pytest_attn.backends.registry import VARIANTS, Registry
from pytest_attn.session.kinds import CaseParameter, case_id
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.dtypes import DTYPES
from pytest_attn.workloads.workload import Workload

PLAIN = re.compile(r"[A-Za-z0-9._+=:-]+")
MARKED = """
import pytest

@pytest.mark.attention("flux-L512", "flux-L128", "smoke-half", device="cpu")
def test_case(attn, attn_backend):
    if attn.workload.name == "smoke-half":
        attn.check(lambda q, k, v: v if attn_backend.name == "math" else attn_backend.prepare(None))
"""
BACKENDS = "--attn-backends=math,sdpa,sdpa_flash"


def test_ids_of_the_catalog_need_no_quotes():
    backends = [None, *Registry().names, *(f"{name}+{variant}" for name in Registry().names for variant in VARIANTS)]
    for entry in builtin_catalog():
        for dtype in DTYPES:
            assert PLAIN.fullmatch(case_id(CaseParameter(entry.workload.replace(dtype=dtype), None)))
    for backend in backends:
        assert PLAIN.fullmatch(case_id(CaseParameter(entry.workload, backend)))


def test_ids_without_names_need_no_quotes():
    for entry in builtin_catalog():
        assert PLAIN.fullmatch(entry.workload.id)
        assert PLAIN.fullmatch(entry.workload.shape_id)


def test_ids_of_functions_need_no_quotes():
    for spread in (1, -2.5, "a b", (3, "é")):
        for workload in (
            Workload(8, mask=lambda b, h, q, kv, spread=spread: q == kv),
            Workload(8, score_mod=lambda s, b, h, q, kv, spread=spread: s),
            Workload(8, mask=BooleanMask(lambda *shape, spread=spread: spread)),
        ):
            assert PLAIN.fullmatch(workload.id)


@pytest.mark.parametrize(
    ("words", "selected"),
    [
        ("flux-L512", ["flux-L512-math", "flux-L512-sdpa", "flux-L512-sdpa_flash"]),
        ("flux and sdpa", [f"flux-L{n}-{name}" for n in (512, 128) for name in ("sdpa", "sdpa_flash")]),
        ("sdpa_flash", ["flux-L512-sdpa_flash", "flux-L128-sdpa_flash", "smoke-half-fp16-sdpa_flash"]),
        ("flux-L512-sdpa_flash", ["flux-L512-sdpa_flash"]),
        ("smoke-half and not sdpa", ["smoke-half-fp16-math"]),
        (
            "half-fp16 or L128-math",
            ["flux-L128-math", "smoke-half-fp16-math", "smoke-half-fp16-sdpa", "smoke-half-fp16-sdpa_flash"],
        ),
        ("FLUX-l512 and math", ["flux-L512-math"]),
    ],
)
def test_k_takes_ids_as_people_guess_them(pytester, words, selected):
    pytester.makepyfile(MARKED)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--collect-only", "-q", BACKENDS, "-k", words)
    assert re.findall(r"test_case\[(.+)\]", result.stdout.str()) == selected


@pytest.mark.parametrize(
    "workload", ["h2-s33-d32-window31.0", "packed7.64.33-d64-causal", "h4-kv2-q70-k150-d32-softcap5-bias.hqk"]
)
def test_k_takes_the_ids_of_shapes(pytester, workload):
    pytester.makepyfile("""
import pytest
from pytest_attn import Workload, Window

@pytest.mark.attention(
    Workload(33, heads=2, head_dim=32, mask=Window(31, 0)),
    Workload(q_lens=(7, 64, 33), mask="causal"),
    Workload(70, 150, heads=4, kv_heads=2, head_dim=32, softcap=5.0, bias="hqk"),
)
def test_case(attn):
    pass
""")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--collect-only", "-q", "-k", workload)
    assert re.findall(r"test_case\[(.+)\]", result.stdout.str()) == [workload]


LOADGROUP = ("-n", "1", "--dist", "loadgroup")


@pytest.mark.parametrize(
    ("options", "again"),
    [
        ((), ()),
        pytest.param(LOADGROUP, LOADGROUP, marks=pytest.mark.slow),
        pytest.param(LOADGROUP, (), marks=pytest.mark.slow),
    ],
    ids=["serial", "loadgroup", "loadgroup-serial"],
)
def test_lf_runs_what_failed_and_nothing_else(pytester, options, again):
    pytester.makepyfile("""
import pytest

@pytest.mark.attention("smoke-half", "smoke-full", device="cpu")
def test_case(attn, attn_backend):
    attn.check(attn_backend)
    case = attn.workload.name, attn_backend.name
    if case == ("smoke-full", "eager"):
        raise AssertionError(f"not this one: {', '.join(case)}")
""")
    backends = "--attn-backends=math,eager"

    def run(*arguments):
        start = pytester.runpytest_subprocess if "-n" in arguments else pytester.runpytest_inprocess
        result = start(backends, *arguments)
        assert re.findall(r"^E +AssertionError: (.*)", result.stdout.str(), re.MULTILINE) == [
            "not this one: smoke-full, eager"
        ]
        return result

    run(*options).assert_outcomes(passed=3, failed=1)
    run("--lf", "-v", *again).assert_outcomes(failed=1)
