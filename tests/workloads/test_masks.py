"""Each mask against a definition written out with plain loops."""

import pytest
import torch
from hypothesis import Phase, given, settings

from pytest_attn import BooleanMask, Document, Neighborhood, Window, Workload, draw_inputs
from pytest_attn.backends.dense import boolean_mask
from pytest_attn.diagnosis.faults import FAULTS
from pytest_attn.strategies import workloads
from pytest_attn.workloads.masks import NearMiss, Sequences, as_mask, interval, mask_kinds, visible_pairs
from pytest_attn.workloads.workload import sequences_of


def visible(workload):
    mask = boolean_mask(draw_inputs(workload, "flat"))
    return mask.expand(workload.batch, workload.heads, workload.q_len, workload.kv_len)


def by_definition(q_len, kv_len, sees):
    return torch.tensor([[sees(i, j) for j in range(kv_len)] for i in range(q_len)])


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 5), (3, 7), (7, 3)])
@pytest.mark.parametrize(
    ("mask", "sees"),
    [
        ("causal", lambda i, j, shift: j <= i),
        ("causal-bottom-right", lambda i, j, shift: j <= i + shift),
        (Window(2, 0), lambda i, j, shift: i + shift - 2 <= j <= i + shift),
        (Window(1, 1), lambda i, j, shift: i + shift - 1 <= j <= i + shift + 1),
        (Window(None, 0), lambda i, j, shift: j <= i + shift),
        (Window(0, None), lambda i, j, shift: j >= i + shift),
        (lambda b, h, q, kv: (q + kv) % 2 == 0, lambda i, j, shift: (i + j) % 2 == 0),
    ],
)
def test_a_mask_shows_what_its_definition_says(q_len, kv_len, mask, sees):
    expected = by_definition(q_len, kv_len, lambda i, j: sees(i, j, kv_len - q_len))
    assert torch.equal(visible(Workload(q_len, kv_len, mask=mask))[0, 0], expected)


def test_documents_see_only_themselves():
    lengths = (3, 1, 4)
    document = [n for n, length in enumerate(lengths) for _ in range(length)]
    for causal in (False, True):
        expected = by_definition(8, 8, lambda i, j, causal=causal: document[i] == document[j] and (j <= i or not causal))
        assert torch.equal(visible(Workload(8, mask=Document(lengths, causal=causal)))[0, 0], expected)


def neighborhood_1d(size, kernel, stride, dilation, causal):
    """NATTEN's rule, key by key: the window of the stride group's leader, in positions of the dilation group."""
    rows = []
    for i in range(size):
        group = [p for p in range(size) if p % dilation == i % dilation]
        position = group.index(i)
        if causal:
            leader = min(position // stride * stride + stride - 1, len(group) - 1)
            keys = [p for n, p in enumerate(group) if n <= position and leader - n < kernel]
        else:
            leader = min(position // stride * stride + stride // 2, len(group) - 1)
            start = min(max(leader - kernel // 2, 0), len(group) - kernel)
            keys = group[start : start + kernel]
        rows.append([j in keys for j in range(size)])
    return torch.tensor(rows)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "dilation"), [(9, 3, 1, 1), (9, 4, 1, 1), (10, 3, 2, 1), (11, 3, 1, 3), (12, 4, 4, 2)]
)
def test_a_neighborhood_in_one_dimension(size, kernel, stride, dilation, causal):
    mask = Neighborhood((size,), (kernel,), stride, dilation, causal)
    expected = neighborhood_1d(size, kernel, stride, dilation, causal)
    assert torch.equal(visible(Workload(size, mask=mask))[0, 0], expected)
    assert visible_pairs(mask, size, size) == int(expected.sum())


def test_a_neighborhood_in_two_dimensions_is_the_product_of_its_axes():
    mask = Neighborhood((5, 6), (3, 2), stride=(1, 2), causal=(True, False))
    rows = neighborhood_1d(5, 3, 1, 1, True)
    columns = neighborhood_1d(6, 2, 2, 1, False)
    expected = torch.kron(rows.int(), columns.int()).bool()
    assert torch.equal(visible(Workload(30, mask=mask))[0, 0], expected)
    assert visible_pairs(mask, 30, 30) == int(expected.sum())


def test_padding_hides_keys_beyond_each_length():
    shown = visible(Workload(4, 6, kv_lens=(6, 2), mask="causal-bottom-right"))
    assert torch.equal(shown[0, 0], by_definition(4, 6, lambda i, j: j <= i + 2))
    assert torch.equal(shown[1, 0], by_definition(4, 6, lambda i, j: j < 2 and j <= i - 2))


@pytest.mark.parametrize("mask", [None, "causal", "causal-bottom-right", Window(2, 1), Window(None, 0), Document((4, 3))])
@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (3, 9), (9, 3)])
def test_intervals_and_pair_counts_agree_with_the_mask(mask, q_len, kv_len):
    if isinstance(mask, Document):  # always square
        q_len = kv_len = 7
    workload = Workload(q_len, kv_len, mask=mask)
    shown = torch.ones(q_len, kv_len, dtype=torch.bool) if mask is None else visible(workload)[0, 0]
    for row in range(q_len):
        first, end = interval(as_mask(mask), row, q_len, kv_len)
        assert shown[row].nonzero().flatten().tolist() == list(range(first, end))
    assert workload.pairs() == int(shown.sum())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window(-1, 0), "Window: left must be a number of keys >= 0 or None (open), got -1"),
        (lambda: Document(()), "Document: lengths must be whole numbers >= 1, got ()"),
        (lambda: Neighborhood((8,), (9,)), "kernel 9 with dilation 1 does not fit into 8 tokens"),
        (lambda: Neighborhood((8,), (3,), stride=4), "stride must be between 1 and the kernel size 3, got 4"),
        (lambda: Neighborhood((8, 8), (3,)), "kernel must have 2 entries as shape (8, 8), got (3,)"),
        (lambda: as_mask("bottom"), "mask must be None, 'causal', 'causal-bottom-right', Window"),
        (lambda: as_mask(lambda q, kv: q >= kv), "mask must be a function of (b, h, q_idx, kv_idx), got lambda"),
    ],
)
def test_a_mask_that_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=r".*") as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda b, h, q, k, device: torch.ones(q, k), "must return a boolean tensor (True = visible), got a float32 tensor"),
        (
            lambda b, h, q, k, device: torch.ones(q, k + 1, dtype=torch.bool),
            "must return a tensor that broadcasts to (1, 1, 4, 4)",
        ),
    ],
)
def test_a_boolean_mask_of_the_wrong_kind_is_refused(factory, message):
    with pytest.raises(ValueError, match=r".*") as error:
        visible(Workload(4, mask=BooleanMask(factory)))
    assert message in str(error.value)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", [word for kind in mask_kinds() for word in kind.kinds])
def test_near_misses_have_identities_and_words_of_their_own_and_show_something_else(kind):
    named, seen = set(), set()

    @settings(max_examples=60, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(workloads(masks=(kind,), max_rows=40))
    def collect(workload):
        over, mask = sequences_of(workload, torch.device("cpu")), workload.plain_mask
        misses = [NearMiss(fault, words, as_mask(other)) for fault, words, other in mask.near_misses(over)]
        assert len({miss.words for miss in misses}) == len(misses)
        right = mask.bind(over)(*over.indices())
        seen.update(fault for fault, _, other in misses if bool((other.bind(over)(*over.indices()) != right).any()))
        named.update(miss.fault for miss in misses)

    collect()
    assert named <= set(FAULTS)
    assert named - seen <= {"mask-of-key-head"}  # a mask_mod that is drawn is the same for all heads


def test_flex_attention_takes_the_mask_mod_of_a_tensor():
    """It counts the positional arguments."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask = BooleanMask(lambda b, h, q, k, device: torch.ones(h, 1, k, dtype=torch.bool, device=device))
    mask_mod = draw_inputs(Workload(256, heads=2, mask=mask), "flat").mask_mod()
    assert create_block_mask(mask_mod, None, 2, 256, 256, device="cpu").sparsity() == 0
    nowhere = None  # flash-attn 4 refuses a place that is the same for all, as of a dimension of size 1
    assert bool(mask_mod(nowhere, torch.tensor(1), nowhere, torch.tensor(2)))


def test_a_tensor_without_keys_is_as_wide_as_its_rows():
    mask_mod = BooleanMask(lambda b, h, q, k, device: torch.ones(q, k, dtype=torch.bool)).bind(
        Sequences(1, 1, 3, 0, torch.device("cpu"))
    )
    none = torch.zeros(1, 1, dtype=torch.long)
    assert mask_mod(none, none, torch.arange(3)[:, None], torch.arange(0)).shape == (3, 0)
