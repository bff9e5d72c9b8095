"""--attn-isolated: named functions run in a process of their own, whatever they do there; others are refused."""

import os
import socket
import sys
from pathlib import Path

import pytest
import torch
from lasting_server import lasting_servers
from left_out import one_in

from pytest_attn.backends.named import offered_to
from pytest_attn.guests.isolation import isolated_executor
from pytest_attn.guests.isolation.isolated_function import IsolatedProcess
from pytest_attn.processes import launcher

HONEST = """
import gc, os, signal, socket, sys, time
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

def attention(q, k, v):
    assert "pytest" not in sys.modules
    return sdpa(q, k, v)

def causal(q, k, v, workload, kv_lens=None):
    assert kv_lens is None
    return sdpa(q, k, v, is_causal=workload.mask is not None, enable_gqa=True)

def biased(q, k, v, bias):
    return sdpa(q, k, v, bias)

def rows_first(q, k, v):
    return sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

class Once(torch.autograd.Function):
    # as what torch.compile makes may free what it has saved, and refuses to keep its graph

    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, dout):
        assert not torch._C._autograd._get_current_graph_task_keep_graph()
        return dout

def once(q, k, v):
    return Once.apply(sdpa(q, k, v))

def into(q, k, v, out):
    out.copy_(sdpa(q, k, v))

def declines(q, k, v):
    raise NotImplementedError("not today")
"""
CHEATS = """
def patches(q, k, v):
    torch.equal = lambda *tensors: True
    return v * 0.5

def patches_the_judge(q, k, v):
    from pytest_attn.correctness import limits
    limits.limits_named = lambda name: None
    return v * 0.5

def finds_the_reference(q, k, v):
    found = [one for one in gc.get_objects() if type(one).__name__ == "Reference"]
    return found[0].tensors["out"].value.to(q.dtype) if found else v * 0.5

def leaves(q, k, v):
    os._exit(0)

def puts_a_pipe_in_place_of_its_output(q, k, v):
    path = os.readlink("/proc/self/fd/1")
    os.unlink(path)
    os.mkfifo(path)
    os.kill(os.getpid(), signal.SIGKILL)

def leaves_by_c(q, k, v):
    import ctypes
    ctypes.CDLL(None)._exit(0)

def exits(q, k, v):
    sys.exit(0)

def skips(q, k, v):
    import pytest
    pytest.skip("not today")

def kills_itself(q, k, v):
    print("these are my last words")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)

def hangs(q, k, v):
    time.sleep(1000)

def changes_its_input(q, k, v):
    out = sdpa(q, k, v)
    v += 1
    return out

kept = []
def reuses_its_output(q, k, v):
    kept[:] = kept or [torch.empty_like(q)]
    return kept[0].copy_(sdpa(q, k, v))

class Lazy(torch.Tensor):
    pass

def lazy(q, k, v):
    return sdpa(q, k, v).as_subclass(Lazy)

def says_garbage(q, k, v):
    from pytest_attn.guests.isolation import call_server
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"garbage" * 9)
        except OSError:
            pass
    time.sleep(1000)

def says_a_pickle(q, k, v):
    import pickle
    from pytest_attn.guests.isolation import wire
    class Bomb:
        def __reduce__(self):
            return os.mkdir, ("bomb",)
    send = wire.FrameSocket.send
    wire.FrameSocket.send = lambda self, frame, seconds=None: send(self, pickle.dumps(Bomb()), seconds)
    return v

def claims(q, k, v, tensors, result={"tensor": 0}, changed=()):
    from pytest_attn.guests.isolation import call_server
    call_server.CallServer._returns = lambda self, *_: {"result": result, "tensors": tensors, "changed": list(changed)}

def claims_much(q, k, v):
    claims(q, k, v, [{"dtype": "float32", "size": [1 << 20, 1 << 20], "device": "cpu", "needs_grad": False}])

def claims_more_than_it_wrote(q, k, v):
    claims(q, k, v, [{"dtype": "float32", "size": [1 << 20], "device": "cpu", "needs_grad": False}])

def claims_no_size(q, k, v):
    claims(q, k, v, [{"dtype": "float32", "size": [-1], "device": "cpu", "needs_grad": False}])

def claims_a_depth(q, k, v):
    deep = {"tensor": 0}
    for _ in range(300):
        deep = {"tuple": [deep]}
    claims(q, k, v, [], deep)

def has_clocks_lie(q, k, v):
    time.perf_counter = lambda real=time.perf_counter: real() / 10
    return attention(q, k, v)

def claims_changes(q, k, v):
    claims(q, k, v, [], {"plain": None}, [17])
"""
TESTS = """
import pytest
from pytest_attn import Workload

W = Workload(24, heads=2, head_dim=32, dtype="float32")

@pytest.mark.attention(W)
@pytest.mark.parametrize("name", {names})
def test_it(attn, name):
    attn.check("kernels:" + name)
"""
#: what each is refused by
REFUSED = {
    "patches": "kernels:patches on h2-s24-d32-fp32: ",
    "patches_the_judge": "",
    "has_clocks_lie": "the callable replaced time.perf_counter by <lambda> of kernels.py",
    "finds_the_reference": "",
    "leaves": "kernels:leaves called os._exit(0): a kernel cannot end",
    "leaves_by_c": "its process has left the interpreter with exit code 0 while it was called",
    "puts_a_pipe_in_place_of_its_output": "its process was killed by SIGKILL while it was called",
    "exits": "kernels:exits raised SystemExit (0): a kernel cannot end",
    "skips": "kernels:skips raised pytest.skip (not today): a kernel cannot end",
    "kills_itself": "its process was killed by SIGKILL while it was called; its last words: these are my last words",
    "hangs": "no result after 3 s (--attn-timeout)",
    "changes_its_input": "the callable changed its input v in place",
    "reuses_its_output": "the callable changed the out of an earlier call",
    "lazy": "out is of type Lazy, a subclass of torch.Tensor",
    "says_garbage": "its process sent garbage",
    "says_a_pickle": "its process sent garbage",
    "claims_much": "its process returned garbage: 4,398,046,511,104 bytes",
    "claims_more_than_it_wrote": "bytes too few",
    "claims_no_size": "its process returned garbage",
    "claims_a_depth": "",
    "claims_changes": "its process returned garbage",
    "nowhere": "kernels:nowhere cannot be imported: kernels has no nowhere; expected a callable of (q, k, v)",
}


@pytest.fixture(scope="module")
def _lasting():
    with lasting_servers() as lasting:
        yield lasting


@pytest.fixture(autouse=True)
def _kernels(pytester, monkeypatch, _lasting):
    """Have the kernels in a module that nothing imports but by its name."""
    pytester.makepyfile(kernels=HONEST + CHEATS)
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    monkeypatch.setattr(isolated_executor, "modules_ahead", lambda: ["torch", "pytest_attn.guests.isolation.call_server"])
    monkeypatch.setattr(launcher, "ForkServer", _lasting)


def run(pytester, *options):
    return pytester.runpytest("-p", "no:cacheprovider", "-rs", *options)


def test_cheats_are_refused_each_by_itself(pytester):
    refused = one_in(5, REFUSED)
    pytester.makepyfile(test_it=TESTS.format(names=["attention", *refused, "causal"]))
    result = run(pytester, "--attn-isolated", "--attn-timeout=3", "-v")
    result.assert_outcomes(passed=2, failed=len(refused))
    text = result.stdout.str()
    assert {name: REFUSED[name] for name in refused if REFUSED[name] not in text} == {}
    assert not (pytester.path / "bomb").exists()
    assert "kernels" not in sys.modules


@pytest.mark.slow("times in a process of its own")
def test_what_writes_into_memory_that_it_is_given_may_be_timed(pytester):
    test = TESTS.format(names=["into"]).replace("attention(W)", "attention(W, takes_out=True)").replace("check", "measure")
    pytester.makepyfile(test_it=test)
    assert "failed" not in run(pytester, "--attn-isolated").parseoutcomes()


ALL_KINDS = """
import pytest
from pytest_attn import Workload

W = Workload(24, heads=2, head_dim=32, dtype="float32")

@pytest.mark.attention(W, W.replace(mask="causal", kv_heads=1), backward=True)
def test_causal(attn):
    attn.check("kernels:causal")

@pytest.mark.attention(W.replace(bias="hqk"))
def test_bias(attn):
    attn.check("kernels:biased")

@pytest.mark.attention(W, layout="bshd", backward=True)
def test_layout(attn):
    attn.check("kernels:rows_first", name="mine")

@pytest.mark.attention(W, backward=True)
def test_once(attn):
    attn.check("kernels:once")

@pytest.mark.attention(W, takes_out=True)
def test_out(attn):
    attn.check("kernels:into")

@pytest.mark.attention(W)
def test_declines(attn):
    attn.check("kernels:declines")

@pytest.mark.attention(W, backward=True)
def test_invariants(attn):
    attn.check_invariants("kernels:attention", only=("rerun", "layout", "poison", "state", "gradients"))
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [("--attn-isolated",), ()], ids=["isolated", "here"])
def test_a_named_function_stands_wherever_a_callable_does(pytester, options):
    pytester.makepyfile(test_it=ALL_KINDS)
    pytester.makepyfile(kernels=HONEST if options else HONEST.replace("not in sys.modules", "in sys.modules"))
    run(pytester, *options).assert_outcomes(passed=7, skipped=1)


def test_what_has_no_name_is_refused_in_one_line(pytester):
    pytester.makepyfile(
        test_it="""
import pytest, torch
from pytest_attn import Workload
W = Workload(24, heads=2, head_dim=32, dtype="float32")

def mine(q, k, v):
    raise SystemExit("ran")

@pytest.mark.attention(W)
def test_object(attn):
    attn.check(mine)

@pytest.mark.attention(W)
def test_library(attn):
    attn.check("math")

@pytest.mark.attention(W)
def test_output(attn):
    attn.assert_close(attn.q)
"""
    )
    result = run(pytester, "--attn-isolated")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "--attn-isolated: mine computes in the process that judges it; *no test or conftest imports, as in"
            ' attn.check("MODULE:mine"), or leave out*',
            "--attn-isolated: out computes in the process that judges it; *",
        ]
    )


def test_a_module_that_the_judge_imports_too_is_refused(pytester):
    pytester.makepyfile(test_it="import kernels\n" + TESTS.format(names=["attention"]))
    result = run(pytester, "--attn-isolated")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *kernels is imported in the process that judges, too, *"])


REGISTERED = """
def pytest_attn_backends(registry):
    registry.add_function("mine", "kernels:causal", layout="{layout}", precision="torch_cpu")
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "options", [("--attn-backends=mine",), ("--attn-backends=mine", "--attn-isolated"), ("--attn-isolated=kernels:causal",)]
)
def test_backends_may_be_named_functions(pytester, options):
    pytester.makeconftest(REGISTERED.format(layout="bhsd"))
    suite = "pytest_attn.suite.test_correctness"
    result = run(pytester, *options, "--pyargs", suite, "--attn-workloads=smoke-full,smoke-causal-gqa", "-k", "forward")
    result.assert_outcomes(passed=2)
    named = "kernels:causal" if len(options) == 1 and "isolated" in options[0] else "mine"
    assert f"({named}, " in result.stdout.str()


class _Handing(torch.autograd.Function):
    pass


@pytest.mark.parametrize("function", [torch.nn.Linear(1, 1), _Handing.apply], ids=["module", "apply"])
def test_what_hands_on_all_that_it_gets_is_given_nothing_more(function):
    assert offered_to(function) == ()
    assert offered_to(lambda q, k, v, **options: None) == ("workload",)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("option", ["--attn-isolated=kernels:attention", "--attn-fuzz=2", "--attn-backends=sdpa"])
def test_the_header_does_not_wait_for_torch(pytester, option):
    pytester.makeconftest("""
        import sys
        def pytest_report_header():
            return f"torch is {'there' if 'torch' in sys.modules else 'not asked for yet'}"
    """)
    pytester.runpytest_subprocess(option).stdout.fnmatch_lines(["torch is not asked for yet"])


@pytest.mark.slow("starts a process")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_of_an_isolated_callable_listens_nowhere():
    process = IsolatedProcess("torch.nn.functional:scaled_dot_product_attention", 60, launcher.Launcher(list), is_forked=False)
    with socket.socket() as here:
        here.bind(("127.0.0.1", 0))
        here.listen()
        try:
            assert listens(os.getpid())
            assert not listens(process.pid)
        finally:
            process.close()


def listens(pid):
    """Return the sockets at which a process can be reached, by their inodes."""
    tcp = (line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:])
    named = (line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:])
    reachable = {words[9] for words in tcp if words[3] == "0A"} | {words[6] for words in named if len(words) > 7}
    own = {os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink()}
    return reachable & {link[8:-1] for link in own if link.startswith("socket:[")}
