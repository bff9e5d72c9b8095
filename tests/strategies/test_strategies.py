"""The strategy draws legal workloads that shrink."""

import subprocess
import sys

import pytest
from hypothesis import find, given, settings

from pytest_attn import Document, Pages, Workload
from pytest_attn.backends.precision import precision_named
from pytest_attn.correctness.reference import compute_reference
from pytest_attn.strategies import FEATURES, LAYOUT_KINDS, MASK_KINDS, workloads
from pytest_attn.workloads.inputs import draw_inputs
from pytest_attn.workloads.masks import Causal
from pytest_attn.workloads.traits import layout_of, traits_of

MANY = settings(max_examples=3000, deadline=None, database=None, derandomize=True)
SMALLEST = Workload(1, head_dim=16)


def drawn(strategy, number=200):
    seen = []

    @settings(max_examples=number, deadline=None, database=None, derandomize=True)
    @given(strategy)
    def collect(workload):
        seen.append(workload)

    collect()
    return seen


def test_every_draw_is_legal_small_and_has_a_reference():
    seen = drawn(workloads())
    assert len(seen) >= 200, "draws were rejected"
    for w in seen:
        assert max(w.q_len, w.kv_len) <= 160
        assert w.heads <= 4
        assert w.batch <= 3
    for w in seen[::10]:
        compute_reference(draw_inputs(w), precision_named("flash"), False)


@pytest.mark.slow("draws workloads")
def test_everything_that_may_be_drawn_is():
    seen = drawn(workloads(layouts=LAYOUT_KINDS), 600)
    had = frozenset().union(*map(traits_of, seen))
    assert {*MASK_KINDS, *FEATURES} - {None} <= had
    assert any(w.mask is None for w in seen)
    assert {layout_of(w) for w in seen} == set(LAYOUT_KINDS)
    assert {w.dtype for w in seen} == {"bfloat16", "float16", "float32"}
    assert sum(w.kv_len > 16 for w in seen) > 200, "most draws are trivial"
    assert sum(w.kv_len in (63, 64, 65, 127, 128, 129) for w in seen) > 30, "few draws lie at the ends of tiles"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"features": ("soft cap",)}, "unknown features 'soft cap'; known: fewer queries"),
        ({"layouts": ("thd",)}, "unknown layouts 'thd'; known: plain, padded"),
        ({"batch": 2}, "unknown fixed values 'batch'; known: q_len, cached, pad, softcap"),
        ({"masks": ("diagonal",)}, "mask must be None, 'causal'"),
        ({"max_rows": 0}, "max_rows and max_heads must be whole numbers >= 1"),
        ({"layouts": ("packed",), "masks": ("documents",)}, "nothing legal is left"),
        ({"layouts": ("paged",), "backward": True}, "nothing legal is left"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, text):
    with pytest.raises(ValueError, match=text):
        workloads(**arguments)


@pytest.mark.one_in(13)
@pytest.mark.parametrize(
    ("fault", "smallest"),
    [
        (lambda w: True, SMALLEST),
        (lambda w: w.kv_len > 64 and w.mask == Causal(), SMALLEST.replace(q_len=65, mask="causal")),
        (lambda w: w.kv_len > 70, SMALLEST.replace(q_len=71)),
        (lambda w: w.kv_len > 1 and w.kv_len % 64 == 1, SMALLEST.replace(q_len=65)),
        (lambda w: w.q_len < w.kv_len and w.mask == Causal(True), Workload(1, 2, head_dim=16, mask="causal-bottom-right")),
        (lambda w: w.q_len > w.kv_len, Workload(2, 1, head_dim=16)),
        (lambda w: w.group == 2, SMALLEST.replace(heads=2, kv_heads=1)),
        (lambda w: w.batch > 1, SMALLEST.replace(batch=2)),
        (lambda w: w.softcap and w.dtype == "float32", SMALLEST.replace(softcap=5.0, dtype="float32")),
        (lambda w: w.kv_pages and w.alibi, Workload(1, head_dim=16, kv_lens=(1,), kv_pages=Pages(16), alibi=True)),
        (lambda w: w.is_packed and w.batch == 2, Workload(head_dim=16, q_lens=(1, 1))),
        (lambda w: w.v_head_dim > w.head_dim, SMALLEST.replace(v_head_dim=32)),
        (lambda w: isinstance(w.mask, Document) and w.q_len > 33, SMALLEST.replace(q_len=34, mask=Document((34,)))),
    ],
)
def test_a_fault_shrinks_to_the_smallest_workload_that_has_it(fault, smallest):
    assert find(workloads(), fault, settings=MANY) == smallest


def test_without_hypothesis_the_import_says_what_to_install():
    code = "import sys; sys.modules['hypothesis'] = None; import pytest_attn.strategies"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'ImportError: pytest_attn.strategies needs Hypothesis: pip install "pytest-attn[fuzz]"' in done.stderr
