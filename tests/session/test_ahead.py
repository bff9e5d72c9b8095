"""What processes beside the workers of xdist compile, while these run other cases."""

import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from pytest_attn.backends import library
from pytest_attn.backends.libraries.flex import FlexDecode
from pytest_attn.backends.libraries.sdpa import Math
from pytest_attn.invariants import ahead as process
from pytest_attn.invariants.ahead import compile_case
from pytest_attn.session import ahead, cover, scheduling
from pytest_attn.session.devices import Machines
from pytest_attn.session.session import session_of

CPU = torch.device("cpu")
CONFTEST = """
from pytest_attn import Workload

def pytest_attn_backends(registry):
    registry.add_function("mine", lambda q, k, v, workload: q)
    registry["mine"].compiles = True

def pytest_attn_workloads(catalog):
    catalog.add(Workload(96, heads=2, name="own"), group="smoke")
"""
TESTS = """
import pytest

@pytest.mark.attention("smoke-full", "smoke-padded", "own")
def test_forward(attn, attn_backend): ...

@pytest.mark.attention("smoke-full", "smoke-padded", backward=True)
def test_backward(attn, attn_backend): ...

@pytest.mark.attention("smoke-full", device="cpu")
def test_elsewhere(attn, attn_backend): ...

@pytest.mark.attention("llama3-8b-prefill")
def test_large(attn, attn_backend): ...
"""
INVARIANTS = """
import pytest

pytestmark = pytest.mark.attention_chosen(asks_once=True)

@pytest.mark.attention("smoke-full", "smoke-half")
def test_invariants(attn, attn_backend): ...
"""


BOTH = """
import pytest

pytestmark = pytest.mark.attention_chosen

@pytest.mark.attention("smoke-half", "smoke-single")
def test_forward(attn, attn_backend): ...

@pytest.mark.attention("smoke-half", "smoke-single", backward=True)
def test_backward(attn, attn_backend): ...
"""


class Asking:
    """A plugin that asks what is compiled ahead for the items of a run, in a worker of two, and runs none."""

    def __init__(self, worker):
        self.worker, self.seconds, self.order, self.ids = worker, None, {}, []

    def pytest_collection_finish(self, session):
        config = session.config
        config.workerinput = {"attn_place": [self.worker, 2]}
        self.seconds = ahead.compile_ahead(config, session_of(config), session.items)
        self.order = {item.name: float(scheduling._group(item, self.seconds)[1]) for item in session.items}
        self.ids = [item.nodeid for item in session.items]
        del config.workerinput
        session.items[:] = []


class Standard(io.StringIO):
    """The standard input of a process that is none."""

    def close(self):
        self.written = self.getvalue()
        super().close()


@pytest.fixture
def ask(pytester, monkeypatch):
    def ask_it(*options, worker=0, cores=4, memory=16 << 30, kind="cuda", untimed="2 workers share it", more=""):
        machine = SimpleNamespace(device="cpu", kind=kind, memory=memory)
        monkeypatch.setattr(Machines, "known_default", property(lambda self: machine))
        monkeypatch.setattr(ahead, "usable_cores", lambda: cores)
        monkeypatch.setattr(ahead, "untimed_because", lambda gpu_per_worker, device: untimed)
        started = []
        monkeypatch.setattr(ahead, "_started", lambda config: started.append(SimpleNamespace(stdin=Standard())) or started[0])
        pytester.makeconftest(CONFTEST)
        pytester.makepyfile(test_it=TESTS, **({"test_more": more} if more else {}))
        asking = Asking(worker)
        pytester.inline_run("--attn-backends=flex,math,mine", *options, plugins=[asking])
        told = json.loads(started[0].stdin.written) if started else None
        ask_it.order, ask_it.ids = asking.order, asking.ids
        return told, asking.seconds

    return ask_it


def cases_of(told):
    return [case for _, cases in told["groups"] for case in cases]


def test_every_process_is_told_all_that_backends_compile_for_bundled_workloads(ask):
    first, seconds = ask()
    second, _ = ask(worker=1)
    assert first == second
    assert [tuple(case[:3]) for case in cases_of(first)] == [
        ("flex", name, backward) for name in ("smoke-padded", "smoke-full") for backward in (False, True)
    ]
    assert (first["parent"], first["device"]) == (os.getpid(), "cpu")
    assert sorted(seconds.values()) == [7.5, 7.5], "of three kernels each"


def test_processes_begin_with_what_compiles_longest_and_workers_with_what_does_least(ask):
    told, seconds = ask(more=INVARIANTS)
    assert [[case[1:] for case in cases] for _, cases in told["groups"]] == [
        [["smoke-full", False, []], ["smoke-full", True, []], ["smoke-full", False, ["layout", "equivalence"]]],
        [["smoke-padded", False, []], ["smoke-padded", True, []]],
        [["smoke-half", False, ["options"]]],
    ]
    assert sorted(seconds.values()) == [5, 7.5, 15]
    names = ("test_forward[smoke-full-math]", "test_invariants[smoke-half-fp16-flex]", "test_forward[smoke-full-flex]")
    assert [ask.order[name] for name in names] == [0, -5, -15]


def test_a_kernel_that_decodes_float32_takes_longest(ask, monkeypatch):
    monkeypatch.setattr(FlexDecode, "unavailable_because", lambda self, machine: None)
    marked = '@pytest.mark.attention("smoke-softcap", "smoke-single")'
    more = f"import pytest\n\n{marked}\ndef test_decoding(attn, attn_backend): ..."
    told, seconds = ask("--attn-backends=flex,flex_decode", "-k", "decoding", more=more)
    assert [case[:2] for case in cases_of(told)][:2] == [["flex_decode", "smoke-single"], ["flex_decode", "smoke-softcap"]]
    assert sorted(seconds.values()) == [2.5, 2.5, 6, 24]


def test_what_is_called_as_in_training_compiles_nothing_of_its_own(ask):
    told, _ = ask("--attn-workloads=smoke-half,smoke-single", more=BOTH)
    assert [case[1:] for case in cases_of(told)] == [
        ["smoke-half", False, []],
        ["smoke-half", True, []],
        ["smoke-single", True, []],
    ]


def test_what_is_not_compiled_ahead_comes_with_what_is_in_its_group(ask):
    ask()
    assert ask.order["test_elsewhere[smoke-full-flex]"] == ask.order["test_forward[smoke-full-flex]"] == -7.5


def test_what_a_backend_declares_to_refuse_is_not_told_and_compiles_nothing(ask):
    told, _ = ask(more='import pytest\n\n@pytest.mark.attention("features-paged")\ndef test_pages(attn, attn_backend): ...')
    assert {case[1] for case in cases_of(told)} == {"smoke-full", "smoke-padded"}
    assert ask.order["test_pages[features-paged-flex]"] == 0
    assert ask.order["test_large[llama3-8b-prefill-flex]"] > 0


def test_no_library_is_asked_for_whom_each_worker_would_wait(ask, monkeypatch):
    monkeypatch.setattr(cover._Case, "runs", property(lambda self: pytest.fail("a library was asked")))
    told, _ = ask(more=INVARIANTS)
    assert ["flex", "smoke-full", False, ["layout", "equivalence"]] in cases_of(told)


@pytest.mark.parametrize(
    "otherwise",
    [{"cores": 3}, {"memory": 15 << 30}, {"kind": "cpu"}, {"untimed": None}],
    ids=["few cores", "little memory", "no GPU", "timed"],
)
def test_nothing_is_compiled_ahead_where_it_is_in_the_way(ask, otherwise):
    assert ask(**otherwise) == (None, {})


def test_what_a_run_before_had_is_in_the_caches(ask, pytester):
    ask()
    folder = pytester.path / ".pytest_cache/v/attn"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "seconds").write_text(json.dumps(dict.fromkeys(ask.ids, 4.0)))
    assert ask() == (None, {})


@pytest.mark.slow("starts processes")
def test_workers_are_told_their_places_whatever_their_names(pytester):
    pytester.makepyfile("def test_place(request): print('place', request.config.workerinput['attn_place'])")
    workers = "--tx", "popen//id=left", "--tx", "popen//id=right", "--dist=each"
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *workers, "-rP", "-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines_random(["place [[]0, 2[]]", "place [[]1, 2[]]"])


# -- the process -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
def test_a_backend_is_called_as_a_check_calls_it(monkeypatch, backward):
    seen, prepare = [], Math.prepare

    def prepared(self, inputs, backward=False):
        kernel = prepare(self, inputs, backward)

        def call(q, k, v):
            out = kernel(q, k, v)
            seen.append((inputs.workload.name, backward, q.requires_grad, torch.is_grad_enabled()))
            if backward:
                out.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
            return out

        return call

    monkeypatch.setattr(Math, "prepare", prepared)
    compile_case(CPU, "math", "smoke-padded", backward, ())
    assert seen == [("smoke-padded", backward, backward, backward), *([(2, 2, 96, 32)] if backward else [])]


def test_only_invariants_that_compile_more_are_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(process, "judge_invariants", lambda backend, spec, references, names: asked.append((spec, names)))
    compile_case(CPU, "math", "smoke-full", True, ("options",))
    ((spec, names),) = asked
    assert (spec.workload.name, spec.backward, names) == ("smoke-full", True, ("options",))


def test_what_a_backend_refuses_is_not_called(monkeypatch):
    monkeypatch.setattr(Math, "prepare", lambda *given: pytest.fail("it was called"))
    compile_case(CPU, "math", "features-paged", True, ())


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the process, in a run of xdist of its own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(library, "_folder", lambda: tmp_path / f"pytest-attn-imports-{os.getuid()}")
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "this")

    def run_it(cases, parent=None):
        told = {"parent": parent or os.getpid(), "device": "cpu", "groups": [("a group", cases)]}
        command = [sys.executable, "-c", ahead._PROGRAM, json.dumps(sys.path)]
        return subprocess.run(command, input=json.dumps(told), text=True, capture_output=True, timeout=120)

    return run_it


def test_the_process_itself_tries_what_an_import_does(monkeypatch):
    monkeypatch.setattr(library, "is_expendable", False)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"parent": os.getppid(), "device": "cpu", "groups": []})))
    monkeypatch.setattr(process, "die_with", lambda parent: None)
    process.main()
    assert library.is_expendable


@pytest.mark.slow("waits for processes")
@pytest.mark.parametrize(("parent", "status"), [(os.getpid(), 0), (1, 1)], ids=["lives", "is gone"])
def test_the_process_lives_as_long_as_its_worker(run, parent, status):
    ended = run([("no such backend", "smoke-full", False, ()), ("math", "smoke-full", False, ())], parent)
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "", "")
    begun = ['["no such backend", "smoke-full", false, []] begun', '["math", "smoke-full", false, []] begun']
    assert library.noted_in_a_run("this") == ([*begun, "a group compiled"] if status == 0 else [])


@pytest.mark.parametrize(
    ("begun_by_a_worker", "compiled"),
    [
        ((), ["one", "two", "three"]),
        (("one",), ["three", "two"]),
        (("two",), ["one", "three"]),
        (("three",), ["one", "two"]),
        (("one", "two"), ["three"]),
    ],
)
def test_what_another_has_begun_nobody_compiles_again(monkeypatch, run, begun_by_a_worker, compiled):
    """A worker begins with the first of its group, so that others begin with the last."""
    seen, cases = [], [(name, "smoke-full", False, ()) for name in ("one", "two", "three")]
    groups = [("group", cases), ("other", [("four", "smoke-full", True, ("layout",))])]
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"parent": 1, "device": "cpu", "groups": groups})))
    monkeypatch.setattr(library, "is_expendable", False)
    monkeypatch.setattr(process, "die_with", lambda parent: None)
    monkeypatch.setattr(process, "compile_case", lambda device, name, *case: seen.append(name))
    items = {object(): ahead.Compiled("group", *case) for case in cases}
    plugin = ahead.Begun(items)
    for item, one in items.items():
        if one.backend in begun_by_a_worker:
            plugin.pytest_runtest_setup(item)
    process.main()
    assert [name for name in seen if name != "four"] == compiled
    assert seen.count("four") == 1
    is_whole = "one" not in begun_by_a_worker
    assert ("group compiled" in library.noted_in_a_run("this")) == is_whole


COUNTED = """
import torch
from torch._dynamo.utils import counters
from pytest_attn.invariants.ahead import compile_case

compile_case(torch.device("cpu"), "flex", "smoke-full", False, ())
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.slow("inductor compiles a kernel")
def test_what_it_compiled_is_found_in_the_cache(monkeypatch, run, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert run([("flex", "smoke-full", False, ())]).returncode == 0
    counted = subprocess.run([sys.executable, "-c", COUNTED], text=True, capture_output=True, timeout=300, check=True)
    assert counted.stdout.split() == ["1", "0"]
