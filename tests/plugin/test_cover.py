"""Where nobody names workloads, a test with `covering` runs as few cases as cover what a backend takes."""

from collections import Counter

import pytest
import torch

from pytest_attn import Capabilities, Window, Workload
from pytest_attn.backends import library
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry
from pytest_attn.session import cover
from pytest_attn.session.session import session_of
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.covering import targets_of, values_of
from pytest_attn.workloads.traits import kernels_of

SMALL = [w for group in ("smoke", "edges", "features") for w in builtin_catalog().select(group)]
MASKS, FEATURES = ("top-left", "window"), ("grouped heads", "backward", "scale")
CONFTEST = f"""
from torch.nn.functional import scaled_dot_product_attention
from pytest_attn import Backend, Capabilities

class Plain(Backend):
    name = "plain"
    capabilities = Capabilities(
        masks=frozenset({MASKS}), features=frozenset({FEATURES}), v_head_dim=True
    )

    def prepare(self, inputs, backward=False):
        is_causal, grouped = inputs.workload.mask is not None, inputs.workload.group > 1
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped)

    asked = []

    def native_refusals(self, workload, machine, backward):
        self.asked.append(workload)
        return []

class Compiling(Plain):
    name, compiles = "compiling", True

    def compiled_for(self, workload):
        return workload.dtype

def pytest_attn_backends(registry):
    registry.add(Plain())
    registry.add(Compiling())
"""
TEST = """
import pytest

@pytest.mark.attention({marker})
def test_kernel(attn, attn_backend):
    attn.check(attn_backend)
"""


class Collected:
    """A plugin that keeps the items and runs none."""

    def pytest_collection_finish(self, session):
        self.workloads = {"plain": [], "compiling": [], "math": []}
        self.tests = Counter()
        for item in session.items:
            parameter = item.callspec.params["_attn_parameter"]
            self.workloads[parameter.backend].append(parameter.workload)
            self.tests[item.originalname] += 1
        self.asked = session_of(session.config).registrations.registry["plain"].asked
        session.items[:] = []


@pytest.fixture
def collect(pytester):
    def collect_it(*options, marker="", covering=2, more=""):
        pytester.makeconftest(CONFTEST)
        pytester.makepyfile(test_it=TEST.format(marker=", ".join(filter(None, (marker, f"covering={covering}")))) + more)
        found = Collected()
        pytester.inline_run("-p", "no:cacheprovider", "--attn-backends=plain,compiling", *options, plugins=[found])
        return found.workloads | {"asked": found.asked, "tests": found.tests}

    return collect_it


def reached(workloads, strength=1):
    return frozenset().union(*(targets_of(values_of(w), strength) for w in workloads))


def takes(w):
    plain = Capabilities(masks=frozenset(MASKS), features=frozenset(FEATURES), v_head_dim=True)
    return not plain.refusals(w) and not w.dropout


def test_a_backend_that_compiles_gets_few_workloads_that_reach_all_that_it_takes(collect):
    found = collect()
    assert found["plain"][: len(SMALL)] == SMALL
    assert 5 < len(found["compiling"]) < 20
    assert reached(found["compiling"]) == reached(filter(takes, SMALL))


def test_a_backend_is_asked_about_the_cases_of_its_cover_alone(collect):
    """Some need seconds to answer, and memory for all tensors of a workload."""
    found = collect()
    assert len(found["asked"]) == len(found["compiling"])
    assert all(w in found["compiling"] for w in found["asked"])


def test_a_backend_of_this_package_gets_each_pair_of_what_it_takes(collect):
    math, cpu = Registry()["math"], machine_of(torch.device("cpu"))
    taken = [w for w in SMALL if math.obstacle(w, cpu, False) is None]
    pairs, alone = (collect("--attn-backends=math", covering=strength)["math"] for strength in (2, 1))
    assert reached(pairs, 2) == reached(taken, 2)
    assert reached(alone) == reached(taken)
    assert reached(alone, 2) < reached(taken, 2)
    assert 5 < len(alone) < len(pairs) < len(taken)


def test_one_that_compiles_has_one_case_where_values_alone_are_covered(collect):
    found, few = collect(covering=2), collect(covering=1)
    assert few["plain"] == found["plain"]
    assert few["compiling"] == found["compiling"][:1] or few["compiling"][0] in found["compiling"]
    assert len(few["compiling"]) == 1


def test_nothing_is_compiled_forward_alone_that_is_reached_with_gradients(collect):
    """But for one case, as kernels may do without what gradients need."""
    more = TEST.format(marker="backward=True, covering=2").replace("test_kernel", "test_gradients")
    found = collect("--attn-backends=compiling", more=more)["tests"]
    assert found["test_gradients"] > 5
    assert found["test_kernel"] == 1
    assert collect("--attn-backends=math", more=more)["tests"]["test_kernel"] > 5


MODELS = """
@pytest.mark.attention_model(covering=1)
@pytest.mark.parametrize("size", range(5))
def test_models(attn_model, attn_backend, size):
    pass
"""


def test_names_of_workloads_name_no_models(collect, monkeypatch):
    monkeypatch.setattr(cover, "_may_be_left_out", lambda item, session: True)  # on a CPU no models are
    for options, models in (
        (["--attn-workloads=smoke"], 0),
        (["--attn-workloads=smoke,all"], 5),
        (["--attn-workloads=-smoke-full"], 1),
        (["--attn-workloads=smoke", "-k", "models"], 1),
    ):
        tests = collect(*options, "--attn-backends=compiling", more=MODELS)["tests"]
        assert tests["test_models"] == models
        assert "-k" in options or tests["test_kernel"] >= 10


AS_THEY_ARE = """
@pytest.mark.attention_model(covering=1)
def test_as_it_is(attn_model):
    pass

@pytest.mark.attention_model
def test_of_another_suite(attn_model):
    pass
"""


class Names:
    """A plugin that keeps the names of tests, and runs none."""

    def pytest_collection_finish(self, session):
        self.names = {item.originalname for item in session.items}
        session.items[:] = []


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        (("--attn-backends=compiling,math",), True),
        (("--attn-backends=all",), False),
        (("--attn-backends=available,compiling",), False),
        (("--attn-backends=-math",), False),
        (("--attn-backends=math", "-k", "as_it_is"), False),
        (("--attn-backends=math", "--attn-workloads=all"), False),
        (("--attn-backends=all", "--attn-workloads=smoke"), True),
    ],
)
def test_who_names_backends_gets_no_models_as_they_are(pytester, options, left_out):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TEST.format(marker='"smoke-full", covering=2') + AS_THEY_ARE)
    found = Names()
    pytester.inline_run("-p", "no:cacheprovider", *options, plugins=[found])
    assert ("test_as_it_is" not in found.names) == left_out
    assert "-k" in options or {"test_of_another_suite", "test_kernel"} <= found.names


def test_of_the_workers_of_a_run_the_first_asks_for_all(collect, tmp_path, monkeypatch):
    monkeypatch.setattr(library, "_folder", lambda: tmp_path)
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "one run")
    first, second = collect(), collect()
    assert len(first["asked"]) > 5
    assert second["asked"] == []
    assert second["compiling"] == first["compiling"]
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "another")
    assert collect()["asked"] == first["asked"]


def test_of_what_compiles_for_minutes_one_kernel_runs(collect, monkeypatch):
    """One kernel serves all workloads of a dtype here."""
    whole = collect(marker='"smoke", "edges", "features"')["compiling"]
    assert {w.dtype for w in whole} == {"bfloat16", "float16"}
    monkeypatch.setattr(cover, "_MINUTES", 5.0)
    part = collect(marker='"smoke", "edges", "features"')["compiling"]
    assert len(part) > 5
    assert len({w.dtype for w in part}) == 1
    assert reached(part) >= reached(w for w in filter(takes, SMALL) if w.dtype == part[0].dtype)


def test_any_other_backend_gets_a_larger_workload_only_for_what_the_small_ones_do_not_reach(collect):
    marker, smoke = '"smoke", "vit", "sdxl-1024", "sdxl-4096"', builtin_catalog().select("smoke")
    found = collect(marker=marker, covering=1)["plain"]
    larger = [w for w in found if w not in smoke]
    assert found[: len(smoke)] == smoke
    assert [w.name for w in larger] == ["sdxl-1024"]  # the least with so many keys
    assert reached(larger) > {("keys 2",)}


@pytest.mark.parametrize(
    ("options", "marker"),
    [
        (["--attn-workloads=all"], '"smoke"'),
        (["--attn-workloads=smoke"], ""),
        (["-k", "smoke-window"], ""),
        ([], '"smoke-window"'),
    ],
)
def test_what_is_named_runs(collect, options, marker):
    found = collect(*options, marker=marker)["compiling"]
    is_one = "smoke-window" in (*options, marker.strip('"'))
    assert [w.name for w in found] == ["smoke-window"] if is_one else found == builtin_catalog().select("smoke")


@pytest.mark.parametrize(
    ("option", "ended"),
    [
        ("--attn-latency=auto", {"skipped": 1}),
        ("--attn-latency=require", {"failed": 1}),
        ("--attn-latency=off", {"skipped": 1}),
    ],
)
def test_what_cannot_be_timed_is_not_checked_first(pytester, monkeypatch, option, ended):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    pytester.makeconftest(CONFTEST)
    timed = "@pytest.mark.attention_requires(timed=True)\n@pytest.mark.attention("
    test = TEST.format(marker='"smoke-full"').replace("@pytest.mark.attention(", timed).replace("check", "measure")
    pytester.makepyfile(test)
    options = "-p", "no:cacheprovider", "-p", "no:xdist", "--attn-backends=compiling", "-rs"
    result = pytester.runpytest_inprocess(*options, option)
    result.assert_outcomes(**ended)
    if "skipped" in ended:
        result.stdout.fnmatch_lines(["SKIPPED * not timed: 2 workers share the cpu; latencies need -n 0"])
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert "2 workers" not in pytester.runpytest_inprocess(*options, option).stdout.str()


def test_one_line_says_what_was_chosen_and_a_listing_which_cases(run, pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TEST.format(marker='"smoke-full", "edges-s127", "edges-s129", covering=2'))
    said = "chosen: 2 of 3 cases, which cover what each backend takes; --attn-workloads=all runs all"
    result = run("--attn-backends=compiling")
    result.stdout.fnmatch_lines([said])
    result.assert_outcomes(passed=2)
    run("--attn-backends=compiling", "--attn-list").stdout.fnmatch_lines([f"{said}; -v lists them"])
    listed = run("--attn-backends=compiling", "--attn-list", "-v").stdout
    listed.fnmatch_lines(["*::test_kernel, compiling: *-*, *-*", said])


def test_a_line_says_that_models_do_not_run(run, pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TEST.format(marker='"smoke", covering=2') + AS_THEY_ARE)
    result = run("--attn-backends=math", "--attn-workloads=smoke-full", "--attn-unjudged=ignore")
    result.stdout.fnmatch_lines(
        ["not run: 1 case without workloads, which say nothing of what is named; --attn-workloads=all adds them"]
    )


def test_which_backends_compile_is_declared():
    registry = Registry()
    compiling = {name for name in registry.names if not registry.argument_of(name) and registry[name].compiles}
    assert compiling == {"flex", "flex_flash", "flex_decode", "flash4", "sdpa_fa4", "flashinfer_fa2", "flashinfer_fa3"}
    assert registry["sdpa+compile"].compiles
    assert registry["flex+max_autotune"].compiles
    assert registry["flash4+graph"].compiles
    assert not registry["flash2+graph"].compiles


def test_a_module_of_flashinfer_serves_all_layouts_of_a_dtype_and_its_head_dims():
    plain, fa2 = Workload(100, 200), Registry()["flashinfer_fa2"]
    shared = [plain.replace(mask="causal-bottom-right"), plain.replace(mask=Window(5, 5)), Workload(q_lens=(3, 4), heads=8)]
    others = [plain.replace(mask=Window(5, 0)), plain.replace(softcap=3.0), plain.replace(dtype="float16")]
    assert {fa2.compiled_for(w) for w in shared} == {fa2.compiled_for(plain)}
    assert len({fa2.compiled_for(w) for w in (plain, *others, plain.replace(v_head_dim=128))}) == 5


def test_a_kernel_is_told_by_dtype_head_dim_rows_and_keys():
    assert kernels_of(Workload(1, 2000, head_dim=40)) == {"bfloat16, head_dim 64", "rows 0", "keys 2"}
    assert kernels_of(Workload(300, head_dim=192, v_head_dim=128)) == {"bfloat16, head_dim 192/128", "rows 2", "keys 1"}


BIAS_ALONE = """
from torch.nn.functional import scaled_dot_product_attention

def refuses(w):
    return [] if w.bias and not (w.mask or w.softcap or w.alibi or w.sinks or w.score_mod or w.group > 1) else ["a bias alone"]

def attention(q, k, v, workload):
    raise NotImplementedError("is not called here")

def pytest_attn_backends(registry):
    registry.add_function("mine", attention, unsupported_because=refuses)
"""


def test_a_kernel_that_takes_little_is_asked_generated_workloads_and_a_listing_says_which(run, pytester):
    pytester.makeconftest(BIAS_ALONE)
    pytester.makepyfile(TEST.format(marker=""))
    said = "generated: workloads beside the catalog's, for 1 kernel"
    run("--attn-backends=mine", "--attn-list").stdout.fnmatch_lines([f"{said}; -v lists them"])
    listed = "*::test_kernel, mine: 115 of the catalog, beside them 5? generated: covering-*"
    run("--attn-backends=mine", "--attn-list", "-v").stdout.fnmatch_lines([listed, said])


DECLINING = """
import pytest
from torch.nn.functional import scaled_dot_product_attention

@pytest.mark.attention({marker})
def test_kernel(attn):
    def fn(q, k, v):
        if attn.workload.shape_id not in {taken}:
            raise NotImplementedError("takes less")
        return scaled_dot_product_attention(q, k, v)

    attn.check(fn)
"""


def test_a_run_says_what_a_kernel_that_takes_few_was_not_asked(run, pytester):
    pytester.makepyfile(DECLINING.format(marker="", taken=["h2-s127-d64"]))
    line = "few cases     *::test_kernel took 1 workload of *; not asked: *causal*; Workload(...) in the marker asks *"
    run("-k", "smoke or covering-h2").stdout.fnmatch_lines([line])
    assert "few cases" not in run("--attn-workloads=smoke-full,smoke-window").stdout.str()


def test_a_kernel_that_declares_nothing_is_asked_no_more_once_it_has_taken_enough(pytester, monkeypatch):
    monkeypatch.setattr(cover, "ENOUGH", 1)
    pytester.makepyfile(DECLINING.format(marker="", taken=("h2-s128-d64", "h2-s64-d64")))
    options = "-p", "no:cacheprovider", "-p", "no:xdist", "-rs", "-k", "smoke-full or covering-h2-s64-d64"
    result = pytester.runpytest_inprocess(*options)
    result.stdout.fnmatch_lines(["SKIPPED * 1 workloads were taken already; --attn-workloads=covering runs all that *"])
