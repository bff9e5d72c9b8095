"""The kernels of docs/howto/serving.md, each with a fault planted: the page's own tests find it."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.+?)```", (DOCS / "howto" / "serving.md").read_text(), re.S))
FILES["serving_kernels.py"] = (DOCS / "examples" / "serving_kernels.py").read_text()

#: the test of the page, what of its kernel is replaced, by what, and what is said
FAULTS = [
    ("test_paged", "page_table[b].long()", "page_table[0].long()", "*with the pages of the first sequence for all*"),
    ("test_hnd_pages", "(len(pages) - 1) * size + last", "len(pages) * size", "*mismatch: out of *"),
    ("test_token_slots", "kv_indptr[b] : kv_indptr[b + 1]", "kv_indptr[b] : kv_indptr[b + 1] - 1", "*without the last key*"),
    (
        "test_append",
        "v_pages[slot_mapping // size, slot_mapping % size] = v",
        "v_pages[slot_mapping // size, 0] = v",
        "*wrote to slot*",
    ),
    ("test_append", "cache_seqlens + cu_seqlens.diff()", "cache_seqlens + 1", "*mismatch: out of *"),
]


@pytest.fixture
def page(pytester):
    for name, text in FILES.items():
        pytester.path.joinpath(name).write_text(text)
    return pytester


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("test", "right", "wrong", "said"), FAULTS, ids=[f"{fault[0]}-{i}" for i, fault in enumerate(FAULTS)])
def test_a_planted_fault_is_found(page, test, right, wrong, said):
    kernels = page.path / "serving_kernels.py"
    assert right in kernels.read_text()
    kernels.write_text(kernels.read_text().replace(right, wrong))
    result = page.runpytest_inprocess("-p", "no:cacheprovider", "-k", test)
    result.assert_outcomes(failed=1, deselected=5)
    result.stdout.fnmatch_lines([said])
