"""Of a large suite a run chooses, where nobody names workloads, as few cases as reach every option and kernel of a backend."""

import re
from collections import Counter

import pytest
import torch

from pytest_attn import Capabilities, Window, Workload
from pytest_attn.backends import library
from pytest_attn.backends.builtin import BUILTIN
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry
from pytest_attn.invariants.invariant import Probe
from pytest_attn.reports.records import read_records
from pytest_attn.session import cover
from pytest_attn.session.kinds import kind_of
from pytest_attn.session.session import session_of
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.traits import kernels_of, options_of

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

@pytest.mark.attention_chosen{arguments}
@pytest.mark.attention({marker})
def test_kernel(attn, attn_backend):
    attn.check(attn_backend)
"""


class Collected:
    """A plugin that keeps the items and runs none."""

    def pytest_collection_finish(self, session):
        self.workloads = {"plain": [], "compiling": [], "math": []}
        self.groups = {"plain": set(), "compiling": set(), "math": set()}
        self.tests = Counter()
        for item in session.items:
            parameter = item.callspec.params["_attn_parameter"]
            self.workloads[parameter.backend].append(parameter.workload)
            self.groups[parameter.backend].add(kind_of(item).made_items().group(item, parameter))
            self.tests[item.originalname] += 1
        self.asked = session_of(session.config).registrations.registry["plain"].asked
        session.items[:] = []


@pytest.fixture
def collect(pytester):
    def collect_it(*options, marker="", arguments="", more=""):
        pytester.makeconftest(CONFTEST)
        pytester.makepyfile(test_it=TEST.format(marker=marker, arguments=arguments) + more)
        found = Collected()
        pytester.inline_run("-p", "no:cacheprovider", "--attn-backends=plain,compiling", *options, plugins=[found])
        return found.workloads | {"asked": found.asked, "groups": found.groups, "tests": found.tests}

    return collect_it


def reached(workloads):
    return frozenset().union(*(options_of(w) | kernels_of(w) for w in workloads))


def takes(w):
    plain = Capabilities(masks=frozenset(MASKS), features=frozenset(FEATURES), v_head_dim=True)
    return not plain.refusals(w) and not w.dropout


def test_a_backend_that_compiles_gets_few_workloads_that_reach_all_that_it_takes(collect):
    found = collect()
    assert found["plain"] == SMALL
    assert 5 < len(found["compiling"]) < 20
    assert reached(found["compiling"]) == reached(filter(takes, SMALL))


def test_a_backend_is_asked_about_the_cases_of_its_cover_alone(collect):
    """Some need seconds to answer, and memory for all tensors of a workload."""
    found = collect()
    assert len(found["asked"]) == len(found["compiling"])
    assert all(w in found["compiling"] for w in found["asked"])


def test_one_worker_runs_all_cases_of_what_compiles_once(collect):
    found = collect()
    assert found["groups"]["compiling"] == {"bfloat16 compiling", "float16 compiling"}
    assert found["groups"]["plain"] == {f"{w.id} plain" for w in found["plain"]}


def test_a_backend_of_this_package_gets_what_reaches_all_that_it_takes(collect):
    found, math = collect("--attn-backends=math")["math"], Registry()["math"]
    assert 5 < len(found) < 40
    assert reached(found) == reached(w for w in SMALL if math.obstacle(w, machine_of(torch.device("cpu")), False) is None)


def test_nothing_is_compiled_forward_alone_that_is_reached_with_gradients(collect):
    """But for one case, as kernels may do without what gradients need."""
    more = TEST.format(marker="backward=True", arguments="").replace("test_kernel", "test_gradients")
    found = collect("--attn-backends=compiling", more=more)["tests"]
    assert found["test_gradients"] > 5
    assert found["test_kernel"] == 1
    assert collect("--attn-backends=math", more=more)["tests"]["test_kernel"] > 5


MODELS = """
@pytest.mark.attention_chosen(compiled=2)
@pytest.mark.attention_model
@pytest.mark.parametrize("size", range(5))
def test_models(attn_model, attn_backend, size):
    pass
"""


def test_names_of_workloads_name_no_models(collect, monkeypatch):
    monkeypatch.setattr(cover, "_may_be_left_out", lambda item, session: True)  # on a CPU no models are
    for options, models in (
        (["--attn-workloads=smoke"], 0),
        (["--attn-workloads=smoke,all"], 5),
        (["--attn-workloads=-smoke-full"], 2),
        (["--attn-workloads=smoke", "-k", "models"], 2),
    ):
        tests = collect(*options, "--attn-backends=compiling", more=MODELS)["tests"]
        assert tests["test_models"] == models
        assert "-k" in options or tests["test_kernel"] >= 10


AS_THEY_ARE = """
@pytest.mark.attention_chosen(compiled=2)
@pytest.mark.attention_model
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
    pytester.makepyfile(test_it=TEST.format(marker='"smoke-full"', arguments="") + AS_THEY_ARE)
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


@pytest.mark.parametrize(
    ("body", "said"), [("return [workload.dtype]", "TypeError: unhashable type: 'list'"), ("raise KeyError(3)", "KeyError: 3")]
)
def test_a_backend_that_cannot_say_what_it_compiles_for_is_one_clear_error(pytester, body, said):
    pytester.makeconftest(CONFTEST.replace("return workload.dtype", body))
    pytester.makepyfile(TEST.format(marker='"smoke"', arguments=""))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", "--attn-backends=compiling")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = result.stdout.str() + result.stderr.str()
    assert f"ERROR: backend compiling: compiled_for(smoke-full): {said}; return something hashable, equal for" in text
    assert "Traceback" not in text


def test_a_test_may_say_how_many_cases_of_it_are_enough(collect):
    found, few = collect(), collect(arguments="(compiled=3)")
    assert few["plain"] == found["plain"]
    assert few["compiling"] == [w for w in found["compiling"] if w in few["compiling"]]
    assert len(few["compiling"]) == 3
    assert len(reached(few["compiling"])) > len(reached(found["compiling"])) / 2


def test_what_compiles_too_long_is_left_to_those_who_name_it(collect, monkeypatch):
    """One kernel serves all workloads of a dtype here, and takes 10 s."""
    whole = collect(marker='"smoke", "edges", "features"')["compiling"]
    assert {w.dtype for w in whole} == {"bfloat16", "float16"}
    monkeypatch.setattr("pytest_attn.session.cover._COMPILING", 10.0)
    part = collect(marker='"smoke", "edges", "features"')["compiling"]
    assert len(part) > 5
    assert len({w.dtype for w in part}) == 1
    assert reached(part) >= reached(w for w in filter(takes, SMALL) if w.dtype == part[0].dtype)


def test_any_other_backend_gets_a_larger_workload_only_for_a_kernel_that_the_small_ones_do_not_reach(collect):
    found, smoke = collect(marker='"smoke", "vit", "sdxl-1024", "sdxl-4096"')["plain"], builtin_catalog().select("smoke")
    larger = [w for w in found if w not in smoke]
    assert found[: len(smoke)] == smoke
    assert [w.name for w in larger] == ["sdxl-1024"]  # the least with so many keys
    assert reached(larger) > {"keys 2"}


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


def test_a_test_that_is_timed_keeps_all_where_times_can_be_taken(collect, monkeypatch):
    smoke = builtin_catalog().select("smoke")
    assert collect(marker='"smoke"', arguments="(timed=True)")["compiling"] == smoke
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    found = collect(marker='"smoke"', arguments="(timed=True)")
    assert (len(found["plain"]), len(found["compiling"])) == (1, 1)


@pytest.mark.parametrize(("latency", "ended"), [("auto", "skipped"), ("require", "failed")])
def test_what_cannot_be_timed_is_not_checked_first(pytester, monkeypatch, latency, ended):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TEST.format(marker='"smoke"', arguments="(timed=True)").replace("check", "measure"))
    options = ("--attn-backends=compiling", f"--attn-latency={latency}", "-rs")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", *options)
    result.assert_outcomes(**{ended: 1})
    if ended == "skipped":
        result.stdout.fnmatch_lines(["SKIPPED * not timed: 2 workers share the cpu; latencies need -n 0"])
        assert "passed" not in result.stdout.str()


def test_one_line_says_what_was_chosen_and_what_is_left(run, pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TEST.format(marker='"smoke-full", "edges-s127", "edges-s129"', arguments=""))
    result = run("--attn-backends=compiling")
    result.stdout.fnmatch_lines(
        ["chosen: 2 cases, which reach every option and kernel of each backend; --attn-workloads=all adds 1"]
    )
    result.assert_outcomes(passed=2)
    assert "units waiting" not in result.stdout.str() + result.stderr.str()  # as xdist's schedulers say under --debug


def test_a_line_says_that_models_do_not_run(run, pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TEST.format(marker='"smoke"', arguments="") + AS_THEY_ARE)
    result = run("--attn-backends=math", "--attn-workloads=smoke-full", "--attn-unjudged=ignore")
    result.stdout.fnmatch_lines(
        ["not run: 1 case of models, which say nothing of what is named; --attn-workloads=all adds them"]
    )


def test_the_line_says_which_backends_are_reached_in_part(run, pytester, monkeypatch):
    monkeypatch.setattr(cover, "_COMPILING", cover._COMPILING)  # which the conftest changes, in this process, too
    pytester.makeconftest(CONFTEST + "\nfrom pytest_attn.session import cover\ncover._COMPILING = 10.0\n")
    pytester.makepyfile(TEST.format(marker='"smoke-full", "smoke-half"', arguments=""))
    result = run("--attn-backends=compiling")
    result.stdout.fnmatch_lines(["chosen: * each backend, of compiling what compiles in minutes; *"])


def test_which_backends_compile_is_declared():
    registry = Registry()
    compiling = {name for name in BUILTIN if registry[name].compiles}
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


# -- what a backend would compile anew for, asked once ----------------------------------------------------------------------

#: faults that no plain call shows, and the invariant that does; "honest" has none
SHOWN_BY = {
    "strides_of_first_call": "layout",
    "dout_strides_of_first_call": "layout",
    "scale_of_first_call": "options",
    "causal_flag_of_first_call": "options",
    "softcap_of_first_call": "options",
    "lengths_of_first_call": "options",
    "page_table_of_first_call": "options",
    "no_last_row_alone": "equivalence",
    "honest": "",
}
KEPT = """
from dataclasses import replace
from honest.variants import HONEST
from pytest_attn.guests.mutants import MUTANTS

def no_last_row_alone(backend):
    prepare = backend.prepare

    def prepared(inputs, backward=False):
        kernel = prepare(inputs, backward)
        return (lambda q, k, v: kernel(2 * q, k, v)) if inputs.workload.q_len == 1 else kernel

    backend.prepare = prepared
    return backend

def pytest_attn_backends(registry):
    named = {mutant.name.replace('-', '_'): mutant for mutant in MUTANTS}
    made = {name: named[name].backend() for name in NAMES & named.keys()}
    made |= {"honest": HONEST.backend(), "no_last_row_alone": no_last_row_alone(HONEST.backend())}
    for name, backend in made.items():
        backend.name, backend.compiles, backend.makes_plans = name, COMPILES, not COMPILES
        registry.add(backend)
"""
ONCE = """
import pytest

pytestmark = pytest.mark.attention_chosen(asks_once=True)

@pytest.mark.attention("smoke", device="cpu")
def test_forward(attn, attn_backend):
    attn.check_invariants(attn_backend, only=("layout", "options", "equivalence"))

@pytest.mark.attention("smoke", device="cpu", backward=True)
def test_backward(attn, attn_backend):
    attn.check_invariants(attn_backend, only=("layout", "options", "equivalence"))
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("is_by_torch", "compiles"),
    [(True, True), (False, True), (False, False)],
    ids=["compiled by torch", "compiled by another", "planned"],
)
def test_what_is_made_anew_is_asked_once_and_still_finds_its_fault(pytester, monkeypatch, is_by_torch, compiles):
    monkeypatch.setattr(Probe, "is_compiled", is_by_torch)
    pytester.makeconftest(f"NAMES = {set(SHOWN_BY)}\nCOMPILES = {compiles}\n{KEPT}")
    pytester.makepyfile(test_it=ONCE)
    asked = (
        "--attn-workloads=smoke-full,smoke-single,smoke-padded,smoke-paged,smoke-softcap",
        f"--attn-backends={','.join(SHOWN_BY)}",
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider", *asked, "--attn-output=run.jsonl")
    records = read_records(pytester.path / "run.jsonl")
    broken = {
        name: {one["reason"] for one in records if (one["subject"], one["verdict"]) == (name, "broken")} for name in SHOWN_BY
    }
    assert {name: shown in ", ".join(broken[name]) for name, shown in SHOWN_BY.items()} == dict.fromkeys(SHOWN_BY, True), (
        broken
    )
    assert not broken["honest"]
    left = Counter(
        one
        for record in records
        if record["subject"] == "honest"
        for one in re.findall(r"(\w+):? not run here but on", record["reason"])
    )
    assert left == {"layout": 6, "options": 6, "equivalence": 6}, "those with gradients are asked for those without"


DEFECTS = """
from pytest_attn import KnownDefect
from honest.variants import HONEST

def pytest_attn_backends(registry):
    backend = HONEST.backend()
    backend.name, backend.compiles = "honest", True
    backend.known_defects = (
        KnownDefect("one", "anything", lambda w, machine: w.name == "smoke-full", ("out",)),
        KnownDefect("two", "strides", lambda w, machine: w.name == "smoke-half", (), invariants=("layout",)),
    )
    registry.add(backend)
"""


def left_by_cases(pytester, conftest, *asked):
    """Return by workload what its case leaves to which other one, forward."""
    pytester.makeconftest(conftest)
    pytester.makepyfile(test_it=ONCE)
    options = "--attn-backends=honest", "--attn-output=run.jsonl", "-k", "test_forward"
    pytester.runpytest_inprocess("-p", "no:cacheprovider", f"--attn-workloads={','.join(asked)}", *options)
    return {
        record["name"]: dict(re.findall(r"(\w+):? not run here but on (\S+(?: and \S+)*)\b", record["reason"]))
        for record in read_records(pytester.path / "run.jsonl")
    }


def test_a_case_with_a_known_defect_stands_for_none_and_is_asked_what_the_defect_names(pytester):
    left = left_by_cases(pytester, DEFECTS, "smoke-full", "smoke-half", "smoke-single", "smoke-window")
    assert left["smoke-full"].keys() == {"layout", "options", "equivalence"}
    assert "layout" not in left["smoke-half"]
    others = [workload for some in left.values() for invariant, workload in some.items() if invariant == "layout"]
    assert set(others) <= {"smoke-single-fp32", "smoke-window"}
    assert all("smoke-full" not in some.values() for some in left.values())


LATE = """
from honest.variants import HONEST

def pytest_attn_backends(registry):
    backend = HONEST.backend()
    prepare = backend.prepare
    backend.name, backend.compiles = "honest", True
    backend.refusal_in = lambda error: "its compiler says no" if "softcap" in str(error) else None

    def prepared(inputs, backward=False):
        if inputs.workload.name == "smoke-softcap":
            raise RuntimeError("no kernel for softcap")
        return prepare(inputs, backward)

    backend.prepare = prepared
    registry.add(backend)
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("options", "left"),
    [
        ((), "; not asked, as other cases left it to this one: options (4 cases); --attn-thorough asks each case"),
        (("--attn-thorough",), ""),
    ],
    ids=["some are asked", "all are asked"],
)
def test_a_case_that_its_compiler_refuses_says_what_others_have_left_to_it(pytester, options, left):
    pytester.makeconftest(LATE)
    pytester.makepyfile(test_it=ONCE, test_more=ONCE)  # in which it is known
    asked = "--attn-backends=honest", "--attn-workloads=smoke-full,smoke-half,smoke-softcap", "--attn-output=run.jsonl"
    pytester.runpytest_inprocess("-p", "no:cacheprovider", *asked, *options)
    reasons = [record["reason"] for record in read_records(pytester.path / "run.jsonl")]
    said = "its compiler says no"
    assert [reason for reason in reasons if reason.startswith(said)] == [said, said + left] * 2


#: options alone and together, in a plain batch and in a padded one
COMBINED = """
from pytest_attn import Workload

def pytest_attn_workloads(catalog):
    options = {"one": {"softcap": 5.0}, "other": {"alibi": True}, "both": {"softcap": 5.0, "alibi": True}}
    options["grouped"] = {"kv_heads": 1}
    layouts = {"few": {}, "padded": {"batch": 2, "kv_lens": (64, 40)}}
    for layout, lengths in layouts.items():
        for name, chosen in options.items():
            w = Workload(64, heads=2, head_dim=32, name=f"{layout}-{name}", **lengths, **chosen)
            catalog.add(w, group="smoke")
"""
FEW = f"""
from honest.variants import HONEST

def pytest_attn_backends(registry):
    backend = HONEST.backend()
    backend.name, backend.compiles = "honest", True
    registry.add(backend)
{COMBINED}
"""


def test_the_case_of_most_is_asked_so_that_few_are(pytester):
    left = left_by_cases(pytester, FEW, "few-one", "few-other", "few-both")
    assert {name: some.get("options") for name, some in left.items()} == {
        "few-one": "few-both",
        "few-other": "few-both",
        "few-both": None,
    }


def test_an_option_and_a_layout_need_not_meet_for_what_changes_all_options_at_once(pytester):
    left = left_by_cases(pytester, FEW, "few-both", "padded-one", "padded-other")
    assert {name: some.get("options") for name, some in left.items()} == {
        "few-both": None,
        "padded-one": "few-both and padded-other",
        "padded-other": None,
    }


def test_groups_matter_only_where_no_sequence_can_be_asked_alone(pytester):
    asked = ("few-one", "few-grouped", "few-other", "padded-one", "padded-grouped")
    left = left_by_cases(pytester, FEW, *asked)
    assert {name for name, some in left.items() if "equivalence" not in some} == {"few-grouped", "few-one", "padded-grouped"}


def test_who_calls_the_kernels_of_another_runs_in_its_worker(pytester):
    pytester.makepyfile(test_it=TEST.format(marker='"smoke-full", "smoke-half"', arguments=""))

    class Groups:
        def pytest_collection_finish(self, session):
            parameters = [(item, item.callspec.params["_attn_parameter"]) for item in session.items]
            groups = [(one.backend, kind_of(item).made_items().group(item, one)) for item, one in parameters]
            self.groups = {name: {group for backend, group in groups if backend == name} for name, _ in groups}
            session.items[:] = []

    found = Groups()
    together = ("flash4", "te_flash", "sdpa_fa4"), ("sdpa", "sdpa_cudnn"), ("te_fused",)
    names = [name for some in together for name in some]
    pytester.inline_run("-p", "no:cacheprovider", f"--attn-backends={','.join(names)}", "--co", plugins=[found])
    groups = [[found.groups[name] for name in some] for some in together]
    assert all(one == some[0] for some in groups for one in some)
    assert len(set.union(*(some[0] for some in groups))) == sum(len(some[0]) for some in groups), "none is in two"


# -- without gradients a compiler makes another kernel, which few cases are asked for ----------------------------------------

TWO_KERNELS = """
import torch
from pytest_attn import KnownDefect
from honest.variants import HONEST

def pytest_attn_backends(registry):
    for name, is_wrong in FAULTS.items():
        registry.add(compiled(name, is_wrong))

def compiled(name, is_wrong):
    backend = HONEST.backend()
    prepare = backend.prepare
    backend.name, backend.compiles = name, True
    if name == "known":
        backend.known_defects = (KnownDefect("one", "anything", lambda w, machine: w.name == "smoke-half", ("out",)),)

    def prepared(inputs, backward=False):
        kernel = prepare(inputs, backward)

        def call(q, k, v):
            trains = torch.is_grad_enabled()
            assert trains == backward
            with open("calls", "a") as calls:
                print(name, inputs.workload.name, "in training" if trains else "in inference", file=calls)
            out, lse = kernel(q, k, v)
            return (1.5 * out if is_wrong(inputs.workload, trains) else out), lse

        return call

    backend.prepare = prepared
    return backend

FAULTS = {
    "right": lambda w, trains: False,
    "known": lambda w, trains: False,
    "inference": lambda w, trains: not trains,
    "softcap_in_inference": lambda w, trains: w.softcap and not trains,
    "training": lambda w, trains: trains,
}
"""
BOTH_WAYS = """
import pytest

pytestmark = pytest.mark.attention_chosen

@pytest.mark.attention("smoke", device="cpu")
def test_forward(attn, attn_backend):
    attn.check(attn_backend)

@pytest.mark.attention("smoke", device="cpu", backward=True)
def test_backward(attn, attn_backend):
    attn.check(attn_backend)
"""
FIVE = ("smoke-full", "smoke-half", "smoke-single", "smoke-padded", "smoke-softcap")
#: of those alike one, of float32 none; one for another layout and one for a softcap
FEW_OF_FIVE = {"smoke-full", "smoke-padded", "smoke-softcap"}


def asked_both_ways(pytester, *options, **replaced):
    """Return the cases of kernels that are wrong, and how each kernel was called, in words. replaced: words of the file."""
    pytester.makeconftest(TWO_KERNELS)
    test = BOTH_WAYS
    for old, new in replaced.items():
        test = test.replace(old, new)
    pytester.makepyfile(test_it=test)
    asked = "--attn-backends=right,known,inference,softcap_in_inference,training", f"--attn-workloads={','.join(FIVE)}"
    pytester.runpytest_inprocess("-p", "no:cacheprovider", *asked, "--attn-output=run.jsonl", *options)
    records = read_records(pytester.path / "run.jsonl")
    verdicts = {(one["subject"], one["direction"], one["name"]): one["verdict"] for one in records}
    wrong = {key for key, verdict in verdicts.items() if verdict not in ("passed", "held")}
    calls = {tuple(line.split(" ", 2)) for line in (pytester.path / "calls").read_text().splitlines()}
    return wrong, calls


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ask", ["check", "check_invariants"])
def test_the_kernel_of_inference_is_asked_of_as_few_cases_as_have_all_options(pytester, ask):
    wrong, calls = asked_both_ways(pytester, "-k", "right", check=ask)
    said = {one["name"]: one["reason"].rpartition("; ")[2] for one in read_records(pytester.path / "run.jsonl")[:5]}
    assert said["smoke-half"] == "called as in training, and as in inference on smoke-full"
    assert "as in" not in said["smoke-full"]
    inferred = {name for _, name, how in calls if how == "in inference"}
    assert not wrong
    assert {name for _, name, how in calls if how == "in training"} >= set(FIVE)
    assert inferred & set(FIVE) == FEW_OF_FIVE


def test_the_kernel_of_inference_is_asked_of_an_option_in_each_layout(pytester):
    pytester.makeconftest(TWO_KERNELS + COMBINED)
    pytester.makepyfile(test_it=BOTH_WAYS)
    asked = "--attn-backends=right", "--attn-workloads=few-one,few-other,padded-both,padded-one"
    pytester.runpytest_inprocess("-p", "no:cacheprovider", *asked).assert_outcomes(passed=8)
    calls = [line.split(" ", 2) for line in (pytester.path / "calls").read_text().splitlines()]
    assert {name for _, name, how in calls if how == "in inference"} == {"few-one", "few-other", "padded-both"}


@pytest.mark.slow("makes many calls")
def test_a_fault_of_inference_alone_is_found_where_it_is_asked(pytester):
    wrong, _ = asked_both_ways(pytester)
    by_backend = {
        name: {key[1:] for key in wrong if key[0] == name} for name in ("inference", "softcap_in_inference", "right")
    }
    assert by_backend["right"] == set()
    assert by_backend["softcap_in_inference"] == {("forward", "smoke-softcap")}
    assert {name for _, name in by_backend["inference"]} == FEW_OF_FIVE


@pytest.mark.slow("makes many calls")
def test_a_fault_of_training_is_none_of_inference(pytester):
    wrong, calls = asked_both_ways(pytester, "-k", "training")
    assert {direction for name, direction, _ in wrong if name == "training"} == {"forward+backward"}
    assert {name for _, name, how in calls if how == "in inference"} == set(FIVE)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "replaced",
    [
        {"attention_chosen": "attention_chosen(timed=True)"},
        {"check(attn_backend)": "measure(attn_backend)"},
        {"attn.check(attn_backend)": "attn.check(attn_backend); attn.measure(attn_backend)"},
    ],
    ids=["said", "alone", "after a check"],
)
def test_what_is_timed_is_checked_as_in_inference(pytester, replaced):
    _, calls = asked_both_ways(pytester, "-k", "right", "--attn-latency=off", **replaced)
    assert {name for _, name, how in calls if how == "in inference"} == set(FIVE)


def test_for_what_does_not_compile_no_library_is_asked_what_others_run(pytester, monkeypatch):
    monkeypatch.setattr(cover._Case, "runs", property(lambda self: pytest.fail("a library was asked")))
    pytester.makeconftest(TWO_KERNELS.replace("backend.compiles = name, True", "backend.compiles = name, False"))
    pytester.makepyfile(test_it=BOTH_WAYS)
    asked = "--attn-backends=right", f"--attn-workloads={','.join(FIVE)}"
    pytester.runpytest_inprocess("-p", "no:cacheprovider", *asked).assert_outcomes(passed=10)


def test_a_case_with_a_known_defect_is_called_as_in_inference(pytester):
    _, calls = asked_both_ways(pytester, "-k", "known")
    assert {name for _, name, how in calls if how == "in inference"} == {*FEW_OF_FIVE, "smoke-half"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options", [("-k", "right and forward"), ("-k", "right", "--attn-thorough")], ids=["alone", "thorough"]
)
def test_nothing_is_left_to_cases_that_do_not_run_nor_in_a_thorough_run(pytester, options):
    _, calls = asked_both_ways(pytester, *options)
    assert {name for _, name, how in calls if how == "in inference"} == set(FIVE)
