"""What `make test` leaves out; `make test-all`, which sets ATTN_TESTS=all, runs it.

A test, or a value of a parameter that only adds a slower way, is marked `slow`, with what takes long: what it asks, those
beside it ask of parts, or within one process. A test that asks many cases alike is marked `one_in(n)`, and one that asks them
in a single run takes `one_in(n, cases)`. Stories of tests/plugin are told through an xdist worker as well, which is left out
but for those that are marked `twice`.
"""

import os

#: whether nothing is left out
IS_ALL = os.environ.get("ATTN_TESTS") == "all"
#: pages of docs/ whose blocks start ranks or other processes, time, judge many models, or have a test of their own
PAGES = (
    *("howto/backend.md", "howto/isolated.md", "howto/judge.md", "howto/model.md", "howto/model-latency.md"),
    *("howto/quantized.md", "howto/ranks.md", "howto/report.md", "howto/several-hosts.md"),
    *("howto/signatures.md", "howto/stronger-tests.md", "howto/without-pytest.md"),
    *("tutorial-gate.md", "tutorial-model.md"),
)


def one_in(n, cases):
    """Return what a test asks in a single run: every n-th of its cases, as the marker says, all where nothing is left out."""
    return list(cases)[:: 1 if IS_ALL else n]
