import pytest
from fakes.judged import CPU, judged

from pytest_attn import Window, Workload
from pytest_attn.backends.machine import machine_of
from pytest_attn.backends.registry import Registry
from pytest_attn.workloads.masks import interval

W = Workload(48, 80, batch=2, heads=4, kv_heads=2, head_dim=32)


@pytest.mark.parametrize("q_len", [1, 4, 9])
@pytest.mark.parametrize(
    "mask", [None, "causal", "causal-bottom-right", *(Window(n, m) for n in (None, 0, 2) for m in (0, 2))]
)
@pytest.mark.parametrize("kv_lens", [None, (6, 6), (6, 1), (6, 0)])
def test_eager_refuses_exactly_the_workloads_with_a_row_that_sees_no_key(q_len, mask, kv_lens):
    workload = Workload(q_len, 6, batch=2, heads=1, head_dim=8, kv_lens=kv_lens, mask=mask, dtype="fp32")
    lengths = kv_lens or (6,)
    spans = [interval(workload.mask, row, q_len, length) for row in range(q_len) for length in lengths]
    reasons = Registry()["transformers:eager"].unsupported_because(workload, machine_of(CPU))
    assert reasons == ["averages all values in rows that see no key"] * any(start == end for start, end in spans)


def test_padded_keys_do_drop_queries(installed):
    """The refusal's ground: with as many queries as keys, transformers takes both to be padded."""
    backend = installed("transformers:flash_attention_2")
    assert not judged(backend, W.replace(kv_len=48, kv_lens=(48, 33))).passed
