"""Which worker of xdist runs which items."""

import re
from types import SimpleNamespace

import pytest
from xdist import scheduler

from pytest_attn.plugin import pytest_configure_node
from pytest_attn.session import scheduling
from pytest_attn.session.scheduling import take_groups

OWN = {
    "load": scheduler.LoadScheduling,
    "worksteal": scheduler.WorkStealingScheduling,
    "loadscope": scheduler.LoadScopeScheduling,
    "loadfile": scheduler.LoadFileScheduling,
    "loadgroup": scheduler.LoadGroupScheduling,
}
#: three tests of two files and two workloads for three backends, as workers name them, one of which compiles; and other tests
GROUPS = [f"{workload} {backend}" for workload in ("w1", "w2") for backend in ("a", "b", "c")]
NAMES = ("x.py::test_check", "x.py::test_times", "y.py::test_holds")
SECONDS = {"w1 b": 10.0, "w2 b": 60.0}
TESTS = [f"{test}[{group}]\0{group}\0{SECONDS.get(group, 0.0)}" for test in NAMES for group in GROUPS]
OTHERS = [f"{file}.py::test_{name}" for file in ("p", "q") for name in range(4)]


class Node:
    """A worker that runs what it is sent, and says so at once."""

    shutting_down = False

    def __init__(self, number):
        self.gateway, self.sent = SimpleNamespace(id=f"gw{number}"), []

    def send_runtest_some(self, indices):
        self.sent += indices

    def send_runtest_all(self):
        raise AssertionError("all at once")

    def shutdown(self):
        self.shutting_down = True


def distributed(dist, ids, own=None, earlier=None, reorder=True):
    """Return the scheduler that xdist uses for two workers with these ids, and them. earlier: seconds of an earlier run."""
    option = SimpleNamespace(tx=["2*popen"], loadscopereorder=reorder, maxschedchunk=None)
    dsession = SimpleNamespace(nodemanager=SimpleNamespace(testrunuid="this"))
    config = SimpleNamespace(
        option=option,
        getoption=lambda name: dist,
        getvalue=lambda name: getattr(option, name),
        cache=SimpleNamespace(get=lambda key, default: earlier or {}),
        pluginmanager=SimpleNamespace(getplugin=lambda name: dsession),
    )
    dsession.sched = (own or OWN[dist])(config)
    nodes = [Node(number) for number in (0, 1)]
    for node in nodes:
        dsession.sched.add_node(node)
    for node in nodes:
        told = list(ids)
        cases = take_groups(config, told)
        assert cases == [one for one, marked in zip(told, ids, strict=True) if "\0" in marked]
        dsession.sched.add_node_collection(node, told)
    return dsession.sched, nodes, told


@pytest.mark.parametrize("dist", OWN)
def test_the_cases_of_a_backend_and_workload_run_one_after_the_other_in_one_worker(dist):
    sched, nodes, ids = distributed(dist, [*TESTS, *OTHERS])
    assert not any("\0" in one for one in ids)
    sched.schedule()
    done = dict.fromkeys(nodes, 0)
    while any(done[node] < len(node.sent) for node in nodes):
        for node in nodes:
            if done[node] < len(node.sent):
                sched.mark_test_complete(node, node.sent[done[node]])
                done[node] += 1
    assert sched.tests_finished
    ran = [[ids[index] for index in node.sent] for node in nodes]
    assert sorted(one for some in ran for one in some) == sorted(ids)
    for group in GROUPS:
        at = [[order for order, one in enumerate(some) if f"[{group}]" in one] for some in ran]
        (places,) = filter(None, at)
        assert places == list(range(places[0], places[0] + 3))
    assert all(len(some) > 6 for some in ran)  # both workers have cases
    if dist in ("loadscope", "loadfile"):
        for file in (OTHERS[:4], OTHERS[4:]):
            assert sum(1 for some in ran if set(file) & set(some)) == 1


def begun(sched, nodes, ids):
    """Return the groups, and the tests without one, in the order in which they begin, where all tests take as long."""
    sched.schedule()
    order, done = [], dict.fromkeys(nodes, 0)
    while any(done[node] < len(node.sent) for node in nodes):
        for node in nodes:
            if done[node] < len(node.sent):
                one = ids[node.sent[done[node]]]
                order.append(one.partition("[")[2].rstrip("]") or one)
                sched.mark_test_complete(node, node.sent[done[node]])
                done[node] += 1
    return list(dict.fromkeys(order))


@pytest.mark.parametrize("dist", OWN)
def test_what_took_longest_in_the_run_before_begins_first(dist):
    earlier = {f"{test}[{group}]": 1.0 + 10 * GROUPS.index(group) for test in NAMES for group in GROUPS}
    assert begun(*distributed(dist, [*OTHERS, *TESTS], earlier=earlier))[:6] == GROUPS[::-1]


def test_what_took_nothing_before_is_spread_among_the_rest():
    slow = ["w1 a", "w1 b", "w2 c"]
    earlier = {f"{test}[{group}]": 9.0 - slow.index(group) if group in slow else 0.01 for test in NAMES for group in GROUPS}
    order = begun(*distributed("load", TESTS, earlier=earlier))
    assert [group for group in order if group in slow] == slow
    assert [group in slow for group in order] == [True, False] * 3
    nothing = {f"{test}[{group}]": 0.0 for test in NAMES for group in GROUPS}
    assert sorted(begun(*distributed("load", TESTS, earlier=nothing))) == sorted(GROUPS)


def test_where_nobody_knows_what_compiles_longest_begins_first_and_in_the_order_that_is_asked_for_nothing_changes():
    compiled, others = ["w2 b", "w1 b"], ["w1 a", "w1 c", "w2 a", "w2 c"]
    assert begun(*distributed("load", TESTS)) == [*compiled, *others]
    known = {"x.py::test_check[w2 c]": 500.0}
    assert begun(*distributed("load", TESTS, earlier=known)) == ["w2 c", *compiled, *others[:-1]]
    assert begun(*distributed("load", TESTS, reorder=False)) == GROUPS


MANY = [f"w{number} {backend}" for number in range(4) for backend in "abcd"]


def called(sched, nodes, ids):
    """Return by worker the backends that it has called, one after the other, where all tests take as long."""
    begun(sched, nodes, ids)
    groups = ([ids[index].partition("[")[2].rstrip("]") for index in node.sent] for node in nodes)
    return [[group.rpartition(" ")[2] for group in dict.fromkeys(some)] for some in groups]


def many(**seconds):
    """Return the ids of a test of many groups. seconds: that their backends compile."""
    return [f"x.py::test_{name}[{group}]\0{group}\0{seconds.get(group[-1], 0.0)}" for group in MANY for name in range(3)]


def test_a_worker_stays_with_a_backend_and_next_takes_one_that_nobody_has():
    assert called(*distributed("load", many())) == [["a"] * 4 + ["c"] * 4, ["b"] * 4 + ["d"] * 4]
    by_backend = sorted(many(), key=lambda one: one.split("\0")[1][-1])
    assert called(*distributed("load", by_backend)) == [["a"] * 4 + ["c"] * 4, ["b"] * 4 + ["d"] * 4]
    assert called(*distributed("load", many(), reorder=False))[0] == list("acacacac")
    alone = [one for one in many() if "test_0" in one]
    assert begun(*distributed("load", [*OTHERS[:2], *alone]))[:2] == OTHERS[:2], "which may take long"


def test_a_worker_stays_with_no_backend_while_something_long_has_not_begun():
    first, second = called(*distributed("load", many(a=6.0)))
    assert (first[:2], second[:2]) == (["a"] * 2, ["a"] * 2)
    earlier = {f"x.py::test_0[{group}]": 40.0 - MANY.index(group) for group in MANY}
    order = begun(*distributed("load", many(), earlier=earlier))
    assert order == MANY


def test_a_worker_stays_with_a_backend_for_which_other_processes_compile(monkeypatch):
    noted = [f"{group} compiled" for group in MANY if group[-1] in "cd"]
    monkeypatch.setattr(scheduling, "noted_in_a_run", lambda run: noted)
    first, second = called(*distributed("load", many(c=-2, d=-2)))
    assert (first[:4], second[:4]) == (["c"] * 4, ["d"] * 4)


def test_the_worker_in_place_of_one_that_crashed_gets_two_tests():
    """Of groups with one test each, some of which were run."""
    sched, (crashed, _), ids = distributed("load", [one for one in many() if "test_0" in one])
    sched.schedule()
    for index in list(crashed.sent)[:2]:
        sched.mark_test_complete(crashed, index)
    assert sched.remove_node(crashed) == ids[crashed.sent[2]]
    new = Node(2)
    sched.add_node(new)
    sched.add_node_collection(new, ids)
    sched.schedule()
    assert len(new.sent) == 2


AHEAD = {"w1 a": -4, "w1 b": -1, "w2 a": 6.0}
IDS_AHEAD = [f"{test}[{group}]\0{group}\0{AHEAD.get(group, 0.0)}" for test in NAMES for group in GROUPS]


def test_what_other_processes_compile_comes_last_and_of_that_what_takes_least_first():
    assert begun(*distributed("load", IDS_AHEAD)) == ["w2 a", "w1 c", "w2 b", "w2 c", "w1 b", "w1 a"]


def test_what_other_processes_have_compiled_comes_at_once(monkeypatch):
    noted = ["w1 b begun", "w1 a begun", "w1 a compiled", "gone compiled"]
    monkeypatch.setattr(scheduling, "noted_in_a_run", lambda run: {"this": noted}[run])
    assert begun(*distributed("load", IDS_AHEAD))[0] == "w1 a"
    assert begun(*distributed("load", IDS_AHEAD, reorder=False)) == GROUPS


@pytest.mark.parametrize("dist", OWN)
def test_a_run_without_cases_has_its_own_scheduler(dist):
    assert type(distributed(dist, OTHERS)[0]) is OWN[dist]


def test_the_scheduler_of_another_plugin_is_left_alone():
    class Other(scheduler.LoadScheduling):
        pass

    sched, _, ids = distributed("load", [*TESTS, *OTHERS], Other)
    assert type(sched) is Other
    assert not any("\0" in one for one in ids)


@pytest.mark.slow
def test_workers_share_no_backend_and_workload(pytester, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    test = """
        import os, pytest
        from pytest_attn.backends.machine import usable_cores

        @pytest.mark.attention("smoke-full", "smoke-half", device="cpu", backends=("math", "eager"))
        def test_it(attn_workload, attn_backend):
            print("ran", attn_workload.name, attn_backend.name, os.environ["PYTEST_XDIST_WORKER"])
            assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == str(max(1, usable_cores() // 4))
        """
    pytester.makepyfile(test_first=test, test_other=test)
    at_end = 'open(f"{os.getpid()}.frozen", "w").write(str(gc.get_freeze_count()))'
    pytester.makeconftest(f"import atexit, gc, os\natexit.register(lambda: {at_end})")
    options = ("-n", "2", "--dist=loadfile", "-rP", "-v", "--attn-unjudged=ignore")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)
    ran = re.findall(r"^ran (\S+ \S+) (gw\d)$", result.stdout.str(), re.MULTILINE)
    result.assert_outcomes(passed=8)
    assert len(ran) == 8
    assert len(set(ran)) == 4
    assert {worker for _, worker in ran} == {"gw0", "gw1"}
    frozen = sorted(int(path.read_text()) for path in pytester.path.glob("*.frozen"))
    assert [count > 0 for count in frozen] == [False, True, True], "nobody waits for the end of workers"
    result.stdout.fnmatch_lines(["*GroupScheduling"])
    assert "\0" not in result.stdout.str()


def test_a_node_of_a_config_that_nobody_configured_is_left_alone(pytester):
    """As those of pytest-xdist's own tests are."""
    node = SimpleNamespace(config=pytester.parseconfig("-p", "no:cacheprovider"), workerinput={})
    pytest_configure_node(node)
    assert node.workerinput == {}
