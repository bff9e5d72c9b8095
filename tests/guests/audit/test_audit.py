"""An audit tells loose tests from tight ones, names the line that decides, and says what it does not count."""

import importlib
import json
import math
import sys

import numpy as np
import pytest
import torch

from pytest_attn.__main__ import main
from pytest_attn.guests.audit import audit_run
from pytest_attn.guests.audit.kernel_calls import with_pages
from pytest_attn.guests.audit.tolerances import Tolerances
from pytest_attn.guests.models.call_to_workload import UnreadableError, to_inputs
from pytest_attn.guests.models.calls.flash_attention_calls import FUNCTIONS
from pytest_attn.guests.models.calls.torch_calls import FLEX
from pytest_attn.guests.mutants.all_mutants import MUTANTS
from pytest_attn.workloads.pages import Pages

KERNEL = """
import torch.nn.functional as F

def kernel(q, k, v, causal=False, softmax_scale=None, return_lse=False, tiles=None):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale).transpose(1, 2)
    lse = (q.float() @ k.float().mT / q.shape[-1] ** 0.5).logsumexp(-1)
    return (out, lse, None) if return_lse else out
"""
TESTS = """
import math
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from audited_kernel import kernel

def drawn(n=70, gradient=False):
    return [torch.randn(2, n, 2, 16, requires_grad=gradient) for _ in range(3)]

def scores(q, k):
    return q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / math.sqrt(q.shape[-1])

def naive(q, k, v, causal=False):
    s = scores(q, k)
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return (s.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)

@pytest.mark.parametrize("causal", [False, True])
def test_loose(causal):
    qkv = drawn()
    assert_close(kernel(*qkv, causal=causal), naive(*qkv, causal), atol=5.0, rtol=0.0)  # the line

def test_tight():
    qkv = drawn()
    assert_close(kernel(*qkv), naive(*qkv), atol=1e-5, rtol=1e-5)

def test_gradients():
    qkv = drawn(gradient=True)
    g = torch.randn(2, 70, 2, 16)
    for mine, other in zip(*(torch.autograd.grad(f(*qkv), qkv, g) for f in (kernel, naive))):
        assert (mine - other).abs().max() < 1e-4

def test_lse():
    qkv = drawn()
    out, lse, rest = kernel(*qkv, return_lse=True)
    assert rest is None
    assert torch.allclose(lse, scores(*qkv[:2]).logsumexp(-1), atol=1e-4)

def test_no_attention():
    assert 1 + 1 == 2

def test_wrong_already():
    qkv = drawn()
    assert_close(kernel(*qkv), naive(*qkv) + 1)

def test_of_own_bits():
    qkv = drawn(200)
    q, k, v = (t.transpose(1, 2) for t in qkv)
    assert torch.equal(kernel(*qkv), F.scaled_dot_product_attention(q, k, v).transpose(1, 2))

def test_unread():
    assert_close(kernel(*drawn(), tiles=3), kernel(*drawn(), tiles=4), atol=9.0, rtol=0.0)

@pytest.mark.skip("no device")
def test_skipped():
    kernel(*drawn())

@pytest.mark.xfail(reason="known")
def test_known():
    assert_close(kernel(*drawn()), kernel(*drawn()) + 1)
"""
#: tests of which a part is enough to fail; then another follows
SUBTESTS = """
from test_audited import drawn, kernel, naive, torch

def test_in_parts(subtests):
    qkv = drawn()
    with subtests.test():
        assert (kernel(*qkv) - naive(*qkv)).abs().max() < 1e-5

def test_after():
    qkv = drawn()
    assert (kernel(*qkv) - naive(*qkv)).abs().max() < 1e-5
"""
#: what a repository may have that would end an audit: pytest-timeout, here without a clock
TIMEOUT = """
import pytest

class Hooks:
    @pytest.hookspec(firstresult=True)
    def pytest_timeout_set_timer(self, item, settings):
        "Set a timer for all that runs of a test."

def pytest_addhooks(pluginmanager):
    pluginmanager.add_hookspecs(Hooks)

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    assert item.config.hook.pytest_timeout_set_timer(item=item, settings=None)
    return (yield)
"""
NAMES = (
    *("scale_dropped", "keys_of_first_batch_entry", "softcap_ignored", "lse_off_by_ln_2", "delta_missing", "causal_ignored"),
    *("bottom_right_taken_for_top_left", "pages_of_first_sequence", "last_page_skipped"),
)
#: faults of every kind: of out, of lse, of gradients, of a mask, of pages, and of an option that no test asks for
FEW = [one for one in MUTANTS if one.name.replace("-", "_") in NAMES]


@pytest.fixture(scope="module")
def audit(tmp_path_factory):
    """Return a function that audits files with few mutants, and gives its status and what it writes as JSON, by test."""
    folder = tmp_path_factory.mktemp("audited")
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.syspath_prepend(str(folder))
        patched.setattr(audit_run, "MUTANTS", FEW)
        (folder / "audited_kernel.py").write_text(KERNEL)
        (folder / "audited_timeout.py").write_text(TIMEOUT)
        importlib.import_module("audited_timeout")  # too early for pytest, which warns of it, as of this package
        options = "-n 2 -x --lf --sw --pdb --assert=plain -p audited_timeout"  # by each, other tests or none would be audited
        of_repository = f"[pytest]\naddopts = {options}\nfilterwarnings = error"
        (folder / "pytest.ini").write_text(of_repository)

        def run(name, text, *words, output="audit.json"):
            (folder / name).write_text(text)
            code = main(["audit", name, *words, "-o", output])
            written = (folder / output).read_text()
            if not output.endswith(".json"):
                return code, written
            return code, {one["test"].rpartition("::")[2]: one for one in json.loads(written)["tests"]}

        yield run
    for name in set(sys.modules) - before:
        if name.startswith(("audited_", "test_audited")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def found(audit):
    """Return the code and the tests of the audit of TESTS."""
    return audit("test_audited.py", TESTS, "--replace", "audited_kernel:kernel", "--layout", "bshd")


def test_a_loose_tolerance_and_a_tight_one_are_told_apart(found):
    code, tests = found
    loose, tight = ({one["name"] for one in tests[name]["passed"]} for name in ("test_loose", "test_tight"))
    assert code == 0
    assert {"scale-dropped", "keys-of-first-batch-entry", "causal-ignored"} <= loose
    assert tight == set()
    assert "softcap-ignored" not in json.dumps(tests), "no test has a softcap"
    assert {"scale-dropped", "keys-of-first-batch-entry"} <= set(tests["test_tight"]["found"])


def test_the_line_that_decides_is_named_with_the_tightest_that_fault_free_kernels_keep(found):
    (line,) = found[1]["test_loose"]["lines"]
    number = TESTS.splitlines().index(next(one for one in TESTS.splitlines() if "# the line" in one)) + 1
    assert line["place"] == f"test_audited.py:{number}"
    assert line["asks"] == "assert_close(rtol=0, atol=5)"
    assert 0 < float(line["tightest"].removeprefix("atol=")) < 1e-5
    assert found[1]["test_loose"]["pass_at_the_tightest"] == []
    assert found[1]["test_loose"]["cases"] == 2


def test_gradients_and_lse_are_looked_at_where_the_test_asks_for_them(found):
    tests = found[1]
    assert "delta-missing" in tests["test_gradients"]["found"]
    assert "lse-off-by-ln-2" in tests["test_lse"]["found"]
    assert "lse-off-by-ln-2" in tests["test_tight"]["within_rounding"]
    assert {"scale-dropped", "keys-of-first-batch-entry"} <= {
        *tests["test_lse"]["found"],
        *(o["name"] for o in tests["test_lse"]["passed"]),
    }


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest 9 has subtests")
def test_a_subtest_that_fails_ends_no_audit(found, audit):
    _, tests = audit("test_audited_parts.py", SUBTESTS, "--replace=audited_kernel:kernel", "--layout=bshd", "--pytest=-n 2")
    assert tests["test_in_parts"]["found"] == tests["test_after"]["found"] != []


def test_an_audit_that_was_stopped_says_so(audit, capsys):
    with pytest.raises(SystemExit):
        audit("test_audited_end.py", "import pytest\ndef test_one(): ...\ndef test_two():\n    pytest.exit('enough')\n")
    assert "pytest ran 2 tests, and exited with 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("test_no_attention", "it does not call the kernel"),
        ("test_wrong_already", "it fails with a fault-free kernel, too: AssertionError: Tensor-likes are not close!"),
        ("test_of_own_bits", "it fails with a fault-free kernel, too: "),
        ("test_unread", "its calls cannot be replaced: kernel: its argument tiles=3 is not read"),
        ("test_skipped", "it is skipped with its own kernel: no device"),
        ("test_known", "it is skipped with its own kernel: expected to fail: known"),
    ],
)
def test_what_is_not_counted_is_said(found, name, said):
    one = found[1][name]
    assert one["not_counted_because"].startswith(said)
    assert (one["cases"], one["passed"], one["found"]) == (0, [], [])


OF_TORCH = """
import pytest
import torch
import torch.nn.functional as F

@pytest.fixture
def attend():
    return lambda query, key, value, is_causal=False: F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

def test_by_torch():
    q, k, v = (torch.randn(2, 2, 40, 16) for _ in range(3))
    assert F.scaled_dot_product_attention(q, k, v, is_causal=True).isfinite().all()

def test_by_fixture(attend):
    q, k, v = (torch.randn(2, 2, 40, 16) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v)
    assert F.cosine_similarity(attend(q, k, v).flatten(), expected.flatten(), 0) > 0.99
"""


def test_without_a_name_the_one_function_that_a_test_calls_is_the_kernel(audit):
    code, page = audit("test_audited_torch.py", OF_TORCH, output="audit.md")
    assert code == 0
    assert "## test_audited_torch.py::test_by_torch passes " in page
    assert "- in place of F.scaled_dot_product_attention, 1 case" in page
    assert "no line was read that compares" in page


def test_a_fixture_can_be_the_kernel(audit):
    _, tests = audit("test_audited_fixture.py", OF_TORCH, "--replace", "attend")
    one = tests["test_by_fixture"]
    assert {"scale-dropped", "keys-of-first-batch-entry"} == set(one["found"])
    assert tests["test_by_torch"]["not_counted_because"] == "it does not call the kernel"


def test_two_functions_are_not_guessed_between(audit):
    two = OF_TORCH.replace(
        "expected = F.scaled_dot_product_attention(q, k, v)",
        "from torch.nn.attention.flex_attention import flex_attention; expected = flex_attention(q, k, v)",
    )
    _, tests = audit("test_audited_two.py", two)
    assert "say by --replace which is the kernel" in tests["test_by_fixture"]["not_counted_because"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("test_audited_none.py", "--replace", "audited_kernel:no_such"), "'audited_kernel.no_such' is not found"),
        (("no_such.py",), "pytest ran 0 tests"),
        (("test_audited_none.py", "-o", "audit.txt"), "-o must end in .md or .json"),
        (("test_audited_none.py", "--pytest=-k 'one"), "argument --pytest: No closing quotation"),
        (("test_audited_none.py", "-o", "no_such/audit.md"), "cannot write no_such/audit.md: No such file or directory"),
        (("test_audited_none.py", "--seconds=-3"), "--seconds must be a number of seconds > 0, got -3"),
    ],
)
def test_a_wrong_argument_is_a_usage_error(audit, capsys, words, said):
    code, tests = audit("test_audited_none.py", "def test_nothing():\n    pass\n")
    assert code == 1
    assert "it calls no attention that is known" in tests["test_nothing"]["not_counted_because"]
    with pytest.raises(SystemExit) as ended:
        main(["audit", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


PACKED = """
import math
import torch
from torch.testing import assert_close

def exact(q, k, v):
    s = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(len(k) - len(q) + 1)
    return torch.einsum("hqk,khd->qhd", s.masked_fill(hidden, -math.inf).softmax(-1), v)

def packed(q, k, v, q_lens, kv_lens):
    parts = zip(q.split(q_lens), k.split(kv_lens), v.split(kv_lens))
    return torch.cat([exact(*part) for part in parts])

def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k=None, seqused_k=None, causal=True, block_table=None, out=None, fa_version=2):
    ends = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    kv_lens = (ends.diff() if seqused_k is None else seqused_k).tolist()
    if block_table is not None:
        k, v = (torch.cat([pool[row].flatten(0, 1)[:n] for row, n in zip(block_table, kv_lens)]) for pool in (k, v))
    found = packed(q, k, v, cu_seqlens_q.diff().tolist(), kv_lens)
    return found if out is None else out.copy_(found)

Q_LENS, KV_LENS = [3, 40], [70, 45]
ENDS, KV_ENDS = torch.tensor([0, 3, 43]), torch.tensor([0, 70, 115])

def drawn():
    return [torch.randn(n, 2, 16, requires_grad=True) for n in (43, 115, 115)]

def test_packed():
    qkv = drawn()
    mine, other = varlen(*qkv, ENDS, KV_ENDS, fa_version=3), packed(*qkv, Q_LENS, KV_LENS)
    assert_close(mine, other, atol=1e-5, rtol=1e-5)
    g = torch.randn(43, 2, 16)
    for one, expected in zip(*(torch.autograd.grad(out, qkv, g) for out in (mine, other))):
        assert_close(one, expected, atol=1e-4, rtol=1e-4)

def paged(atol):
    q, (k, v) = torch.randn(43, 2, 16), (torch.randn(12, 16, 2, 16) for _ in range(2))
    table = torch.randperm(12).int()[:10].view(2, 5)
    out = torch.empty_like(q)
    varlen(q, k, v, cu_seqlens_q=ENDS, seqused_k=torch.tensor(KV_LENS), block_table=table, out=out)
    dense = (torch.cat([pool[row].flatten(0, 1)[:n] for row, n in zip(table, KV_LENS)]) for pool in (k, v))
    assert_close(out, packed(q, *dense, Q_LENS, KV_LENS), atol=atol, rtol=0.0)

@torch.inference_mode()
def test_paged():
    paged(1e-5)

def test_paged_and_loose():
    paged(9.0)

def test_without_lengths():
    varlen(*(tensor[:43] for tensor in drawn()), ENDS)

def test_of_padded_keys():
    varlen(*drawn(), ENDS, seqused_k=torch.tensor(KV_LENS))
"""


def test_packed_and_paged_calls_are_read_as_flash_attn_takes_them(audit):
    _, tests = audit("test_audited_packed.py", PACKED, "--replace", "test_audited_packed:varlen")
    of_both = {"scale-dropped", "causal-ignored", "bottom-right-taken-for-top-left"}
    of_pages = {*of_both, "pages-of-first-sequence", "last-page-skipped"}
    assert set(tests["test_packed"]["found"]) == {*of_both, "delta-missing"}
    assert of_pages <= set(tests["test_paged"]["found"])
    assert of_pages <= {one["name"] for one in tests["test_paged_and_loose"]["passed"]}
    assert not tests["test_packed"]["passed"] + tests["test_paged"]["passed"]
    because = {name: one["not_counted_because"] for name, one in tests.items()}
    assert because["test_without_lengths"].endswith("neither cu_seqlens_k nor seqused_k says how many keys there are")
    assert because["test_of_padded_keys"].endswith("its argument seqused_k=a tensor of shape (2,) is not read")


OF_UNITTEST = """
import unittest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

class TestAttention(unittest.TestCase):
    def test_parts(self):
        q, k, v = (torch.randn(2, 2, 70, 16) for _ in range(3))
        found, expected = F.scaled_dot_product_attention(q, k, v), (q @ k.mT / 4).softmax(-1) @ v
        for head in range(2):
            with self.subTest(head=head):
                assert_close(found[:, head], expected[:, head])
"""


def test_a_fault_that_a_subtest_finds_does_not_pass(audit):
    _, tests = audit("test_audited_unittest.py", OF_UNITTEST)
    assert {"scale-dropped", "keys-of-first-batch-entry"} <= set(tests["test_parts"]["found"])
    assert (tests["test_parts"]["cases"], tests["test_parts"]["passed"]) == (1, [])


def test_pages_of_a_library_are_read_where_a_call_has_them():
    (varlen,) = (one for one in FUNCTIONS if one.place == ("flash_attn", "flash_attn_varlen_func"))
    ends = torch.tensor([0, 3, 43])
    given = {"q": torch.zeros(43, 4, 16), "cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": True}
    packed = {**given, "k": torch.zeros(43, 2, 16), "v": torch.zeros(43, 2, 16)}
    paged = {**given, "k": torch.zeros(9, 16, 2, 16), "v": torch.zeros(9, 16, 2, 16), "block_table": torch.zeros(2, 4)}
    assert to_inputs(with_pages(varlen).read(packed)).workload == to_inputs(varlen.read(packed)).workload
    found = to_inputs(with_pages(varlen).read(paged)).workload
    assert (found.kv_pages, found.kv_heads, found.q_lens, found.kv_lens) == (Pages(16), 2, (3, 40), (3, 40))
    with pytest.raises(UnreadableError, match="q has 50 rows, and cu_seqlens_q ends at 43"):
        with_pages(varlen).read({**paged, "q": torch.zeros(50, 4, 16)})
    assert with_pages(FLEX) is FLEX


def shares(tmp_path, compare):
    """Return the lines that a comparison was read as, with the share of each."""
    tolerances = Tolerances(tmp_path)
    with tolerances.spread():
        compare()
    return {line.text: share for line, share in tolerances.used.items()}


def test_each_function_is_read_with_its_own_tolerance(tmp_path):
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.01])
    assert shares(tmp_path, lambda: torch.allclose(a, b, 0.0, 0.1)) == {"allclose(rtol=0, atol=0.1)": pytest.approx(0.1, 1e-4)}
    assert shares(tmp_path, lambda: a.allclose(b, atol=1.0)) == {"allclose(rtol=1e-05, atol=1)": pytest.approx(0.01, 1e-2)}
    (close,) = shares(tmp_path, lambda: torch.testing.assert_close([a], [a.clone()]))
    assert close == "assert_close(rtol=1.3e-06, atol=1e-05)"
    of_numpy = shares(tmp_path, lambda: np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=0.01))
    assert of_numpy == {"assert_allclose(rtol=0.01, atol=0)": pytest.approx(0.4975, 1e-3)}
    nan = torch.tensor([1.0, math.nan])
    assert list(shares(tmp_path, lambda: torch.allclose(nan, b, 0.0, 9.0)).values()) == [math.inf]


@pytest.mark.parametrize(
    ("explanation", "share"),
    [
        ("0.3 <= (2 * 0.3)\n +  where 0.3 = item()", 0.5),
        ("tensor(0.0010) < 0.01", 0.1),
        ("0.995 > 0.99", 0.5),
        ("1 > 0", None),
        ("'a' < 'b'", None),
        ("0.1 < 0", None),
        ("all(<generator>)", None),
    ],
)
def test_an_assertion_is_read_where_it_bounds_a_number(tmp_path, explanation, share):
    tolerances = Tolerances(tmp_path)
    tolerances.see_assertion("a < b", explanation)
    assert list(tolerances.used.values()) == ([] if share is None else [pytest.approx(share)])
