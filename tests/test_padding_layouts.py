"""The layout of a batch: rows, documents and cache lengths against dense attention. Numbers in names: see the uniform
probe below, where every allowed key weighs the same and value j is j."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_flash.interface import fused_mask, packed_arguments
from hf_flash.layout import Inputs, Layout, attend, build_layout, document_starts, places

torch.set_num_threads(1)
OPTIONS = {"softmax_scale": 0.5, "dropout_p": 0.0, "softcap": 0.0}


def dense_attention(q, k, v, seen, scale=0.5):
    """(batch, heads, length, head_dim) with a (batch, 1, queries, keys) bool mask; rows that see nothing give 0."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)


def run(layout, q, k, v, causal, window=None):
    if layout is None:
        return attend(q, k, v, causal, window, **OPTIONS)
    return layout.attend(q, k, v, causal, window, **OPTIONS)


def probe(layout, batch, queries, keys, causal, window=None):
    """The uniform probe: queries and keys are zero, so a row's output is the mean of the values that it sees."""
    q, k = torch.zeros(batch, 2, queries, 8), torch.zeros(batch, 1, keys, 8)
    v = torch.arange(keys, dtype=torch.float32)[None, None, :, None].expand(batch, 1, keys, 8).contiguous()
    return run(layout, q, k, v, causal, window)[:, :, 0, 0]


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32), atol=1e-4, rtol=0)


def test_left_padding_is_not_seen():
    layout = build_layout(1, 5, 5, mask=torch.tensor([[0, 0, 1, 1, 1]]).bool())
    close(probe(layout, 1, 5, 5, True)[0, 2:], [2, 2.5, 3])


def test_holes_are_skipped():
    layout = build_layout(1, 5, 5, mask=torch.tensor([[1, 1, 0, 1, 1]]).bool())
    close(probe(layout, 1, 5, 5, True)[0, [0, 1, 3, 4]], [0, 0.5, 4 / 3, 2.0])


def test_an_empty_row_beside_a_packed_one_keeps_the_documents():
    mask, positions = torch.tensor([[0] * 5, [1] * 5]).bool(), torch.tensor([[0] * 5, [0, 1, 0, 1, 2]])
    layout = build_layout(2, 5, 5, mask=mask, position_ids=positions)
    close(probe(layout, 2, 5, 5, True), [[0] * 5, [0, 0.5, 2, 2.5, 3]])
    assert not layout.dense(True)[1, 0, 3, 1]


def test_padding_rows_give_zero():
    layout = build_layout(1, 5, 5, mask=torch.tensor([[0, 1, 1, 0, 0]]).bool())
    close(probe(layout, 1, 5, 5, False)[0], [0, 1.5, 1.5, 0, 0])


def test_new_tokens_after_a_cache_see_all_of_it():
    close(probe(None, 1, 2, 5, True)[0], [1.5, 2.0])


def test_left_padded_decode_step_reads_the_cache_where_it_lies():
    layout = build_layout(1, 1, 5, mask=torch.tensor([[0, 0, 1, 1, 1]]).bool())
    assert layout.left_pad.tolist() == [2]
    close(probe(layout, 1, 1, 5, True)[0], [3.0])


def test_decode_step_over_holes_gathers():
    with torch.no_grad():
        layout = build_layout(2, 1, 5, mask=torch.tensor([[1, 0, 1, 0, 1], [1] * 5]).bool())
    assert layout.left_pad is None and layout.keys.static
    close(probe(layout, 2, 1, 5, True)[:, 0], [2.0, 2.0])


@pytest.mark.parametrize("used", [5, torch.tensor(5)], ids=["known", "live tensor"])
def test_unused_slots_of_a_static_cache_are_not_read(used):
    layout = build_layout(1, 1, 16, used=used)
    q, k = torch.zeros(1, 2, 1, 8), torch.zeros(1, 1, 16, 8)
    v = torch.full((1, 1, 16, 8), 1000.0)
    v[0, 0, :5] = torch.arange(5.0)[:, None]
    k[:, :, 5:], v[:, :, 5:] = torch.nan, torch.nan
    close(run(layout, q, k, v, True)[0, :, 0, 0], [2.0])


def test_static_cache_with_left_padding():
    mask = torch.tensor([[0, 0, 1, 1, 1]]).bool()
    layout = build_layout(1, 1, 16, mask=mask, used=torch.tensor(5))
    close(probe(layout, 1, 1, 16, True)[0], [3.0])
    prefill = build_layout(1, 5, 16, mask=mask, used=torch.tensor(5))
    close(probe(prefill, 1, 5, 16, True)[0, 2:], [2, 2.5, 3])


def test_a_live_length_is_copied_by_the_mask_function():
    offset = torch.tensor(4)
    layout = fused_mask(1, q_length=1, kv_length=16, q_offset=offset)
    offset += 5
    close(probe(layout, 1, 1, 16, True)[0], [2.0])


def test_cross_attention_hides_keys_only():
    layout = build_layout(1, 7, 4, mask=torch.tensor([[1, 1, 1, 0]]).bool(), cross=True)
    close(probe(layout, 1, 7, 4, False)[0], [1.0] * 7)


def test_window_counts_the_token_itself():
    close(probe(None, 1, 8, 8, True, window=4)[0], [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5])


PACKED = [0, 0.5, 1, 3, 3.5, 4, 4.5, 7, 7.5]


def test_packed_documents_do_not_mix():
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]])
    close(probe(build_layout(1, 9, 9, position_ids=positions), 1, 9, 9, True)[0], PACKED)
    close(probe(build_layout(1, 9, 9, position_ids=positions + 2), 1, 9, 9, True)[0], PACKED)
    offsets = torch.tensor([0, 3, 7, 9], dtype=torch.int32)
    close(probe(build_layout(1, 9, 9, cu_seqlens=offsets, max_length=4), 1, 9, 9, True)[0], PACKED)


def test_several_packed_rows():
    """Row 17."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]])
    layout = build_layout(2, 8, 8, position_ids=positions)
    assert layout.keys.cu_seqlens.tolist() == [0, 3, 8, 14, 16]
    close(probe(layout, 2, 8, 8, True)[:, -1], [5.0, 6.5])


@pytest.mark.parametrize(
    "positions, mask",
    [
        (torch.arange(8).expand(3, 1, 8), None),
        (torch.arange(8), None),
        (torch.tensor([[1, 1, 0, 1, 2]]), torch.tensor([[0, 0, 1, 1, 1]])),
        (torch.tensor([[5, 6, 9, 10, 11]]), None),
    ],
    ids=["multi-axis", "one axis", "left padded", "jump ahead"],
)
def test_positions_that_are_no_packing(positions, mask):
    """Row 19."""
    length = positions.shape[-1]
    layout = build_layout(1, length, length, mask=None if mask is None else mask.bool(), position_ids=positions)
    tokens = length if mask is None else int(mask.sum())
    assert layout is None or layout.keys.cu_seqlens.tolist() == [0, tokens]


def test_documents_of_a_cache_that_holds_earlier_tokens_are_refused():
    with pytest.raises(ValueError, match="empty cache or use_cache=False"):
        build_layout(1, 4, 9, cu_seqlens=torch.tensor([0, 4]))


@pytest.mark.parametrize("offsets", [[0, 3, 8], [1, 3, 9], [0, 5, 3, 9]])
def test_offsets_that_do_not_fit_the_batch_are_refused(offsets):
    with pytest.raises(ValueError, match="must grow from 0 to the number of tokens"):
        build_layout(1, 9, 9, cu_seqlens=torch.tensor(offsets), max_length=9)


@pytest.mark.parametrize("dropped", ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"])
def test_half_a_set_of_varlen_arguments_is_completed(dropped):
    offsets = torch.tensor([0, 3, 7, 9], dtype=torch.int32)
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 4, "max_length_k": 4}
    del given[dropped]
    cu_seqlens, longest = packed_arguments(given)
    assert not given
    close(probe(build_layout(1, 9, 9, cu_seqlens=cu_seqlens, max_length=longest), 1, 9, 9, True)[0], PACKED)


def test_lengths_without_offsets_are_refused():
    with pytest.raises(ValueError, match="pass the offsets too"):
        packed_arguments({"max_length_q": 4, "max_length_k": 4})


def test_no_metadata_where_nothing_is_padded():
    assert build_layout(2, 5, 5) is None
    assert build_layout(2, 5, 5, mask=torch.ones(2, 5).bool()) is None
    assert build_layout(2, 5, 5, position_ids=torch.arange(5)[None]) is None


@pytest.mark.parametrize("batch", [1, 2])
def test_layout_moves_between_devices_once(batch):
    layout = build_layout(batch, 4, 4, mask=torch.tensor([[1, 1, 0, 0]] * batch).bool())
    assert layout.to("cpu") is layout and layout.to(torch.device("cpu"), non_blocking=True) is layout
    other = layout.to("meta")
    assert other.keys.cu_seqlens.device.type == other.mask.device.type == "meta" and layout.device.type == "cpu"
    inputs = Inputs(batch, 4, layout.mask)
    assert inputs.to("meta").mask.device.type == "meta" and inputs.shape == (batch, 1, 4, 4)


masks = st.integers(1, 4).flatmap(
    lambda batch: st.integers(1, 9).flatmap(
        lambda length: st.lists(
            st.lists(st.booleans(), min_size=length, max_size=length), min_size=batch, max_size=batch
        )
    )
)


def inputs_for(batch, queries, keys, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, 4, queries, 8), (batch, 2, keys, 8), (batch, 2, keys, 8)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def check(layout, mask, queries, causal, seed, starts=None):
    """Output and gradients equal dense attention's at every token, and padding gets no gradient."""
    batch, keys = mask.shape
    q, k, v = inputs_for(batch, queries, keys, seed)
    reference = Layout(batch, queries, keys, mask)
    reference.starts = starts
    rows = mask[:, keys - queries :]
    expected = dense_attention(q, k, v, reference.dense(causal, device="cpu")) * rows[:, :, None, None]
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed + 1))
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    out = run(layout, q, k, v, causal) * rows[:, :, None, None]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    for ours, theirs in zip(torch.autograd.grad((out * weight).sum(), (q, k, v)), wanted):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    with torch.no_grad():
        again = run(layout, q, k, v, causal) * rows[:, :, None, None]
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=0)


@settings(max_examples=60, deadline=None)
@given(masks, st.booleans(), st.integers(0, 2**20))
def test_any_mask_equals_dense_attention(rows, causal, seed):
    mask = torch.tensor(rows)
    check(build_layout(*mask.shape, mask.shape[1], mask=mask), mask, mask.shape[1], causal, seed)


@settings(max_examples=60, deadline=None)
@given(masks, st.integers(1, 9), st.integers(0, 2**20))
def test_new_queries_over_any_cached_mask_equal_dense_attention(rows, queries, seed):
    mask = torch.tensor(rows)
    queries = min(queries, mask.shape[1])
    check(build_layout(mask.shape[0], queries, mask.shape[1], mask=mask), mask, queries, True, seed)
    with torch.no_grad():
        step = build_layout(mask.shape[0], queries, mask.shape[1], mask=mask)
    check(step, mask, queries, True, seed)  # with gradients after all, and without


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=3), st.integers(0, 3),
       st.booleans(), st.booleans(), st.integers(0, 2**20))  # fmt: skip
def test_packed_and_padded_rows_equal_dense_attention(rows, first, padded, causal, seed):
    length = max(sum(row) for row in rows)
    positions, mask = torch.zeros(len(rows), length, dtype=torch.int64), torch.zeros(len(rows), length).bool()
    for i, row in enumerate(rows):
        numbers = torch.cat([torch.arange(first, first + n) for n in row])
        positions[i, : len(numbers)], mask[i, : len(numbers)] = numbers, True
    if not padded:  # what would be padding is one more document
        for i, row in enumerate(rows):
            positions[i, sum(row) :] = torch.arange(length - sum(row)) + first
        mask[:] = True
    layout = build_layout(len(rows), length, length, mask=mask if padded else None, position_ids=positions)
    check(layout, mask, length, causal, seed, document_starts(positions, mask))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_places_lists_true_entries_in_order(flags):
    n = len(flags)
    found = [i for i, flag in enumerate(flags) if flag]
    assert places(torch.tensor(flags)).tolist() == found + [n] * (n - len(found))
