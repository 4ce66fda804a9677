"""unpad_input, pad_input and index_first_axis are inverses for every mask."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_flash import index_first_axis, pad_input, unpad_input

masks = st.integers(1, 5).flatmap(
    lambda seq: st.lists(st.lists(st.booleans(), min_size=seq, max_size=seq), min_size=1, max_size=5)
)


@given(masks, st.sampled_from([(), (3,), (2, 3)]), st.sampled_from([torch.bool, torch.int64, torch.float32]))
@settings(deadline=None)
def test_unpad_gathers_the_tokens_in_order_and_pad_puts_them_back(mask, features, dtype):
    """Row 11: padding on either side, on both, holes, empty rows."""
    mask = torch.tensor(mask)
    batch, seq = mask.shape
    x = torch.randn(batch, seq, *features, requires_grad=True)
    tokens, indices, cu_seqlens, longest, used = unpad_input(x, mask.to(dtype))
    assert torch.equal(tokens, x[mask]) and torch.equal(indices, mask.flatten().nonzero().flatten())
    assert cu_seqlens.dtype == used.dtype == torch.int32 and isinstance(longest, int)
    assert cu_seqlens.tolist() == [0, *mask.sum(1).cumsum(0).tolist()] and cu_seqlens[-1] == len(tokens)
    assert longest == mask.sum(1).max() and torch.equal(used, mask.sum(1).int())
    padded = pad_input(tokens, indices, batch, seq)
    assert torch.equal(padded, torch.where(mask.view(batch, seq, *[1] * len(features)), x, 0.0))
    (padded * 2).sum().backward()
    assert torch.equal(x.grad, 2.0 * mask.view(batch, seq, *[1] * len(features)).expand_as(x))


@given(masks, st.randoms())
@settings(deadline=None)
def test_unused_tokens_are_gathered_but_not_counted_as_used(mask, random):
    mask = torch.tensor(mask)
    unused = torch.tensor([[random.random() < 0.5 for _ in row] for row in mask]) & ~mask
    x = torch.randn(*mask.shape, 2)
    tokens, indices, cu_seqlens, longest, used = unpad_input(x, mask.int(), unused.int())
    assert torch.equal(tokens, x[mask | unused]) and torch.equal(used, mask.sum(1).int())
    assert cu_seqlens[-1] == len(tokens) and longest == (mask | unused).sum(1).max()


def test_index_first_axis_takes_rows_and_is_differentiable():
    x = torch.randn(6, 2, 3, requires_grad=True)
    indices = torch.tensor([4, 0, 4])
    taken = index_first_axis(x, indices)
    assert torch.equal(taken, x[indices])
    taken.sum().backward()
    assert x.grad[:, 0, 0].tolist() == [1, 0, 0, 0, 2, 0]


def test_a_mask_of_another_shape_is_refused():
    import pytest

    with pytest.raises(ValueError, match=r"attention_mask \(2, 5\) must be the first two axes of hidden_states"):
        unpad_input(torch.zeros(2, 4, 3), torch.ones(2, 5))
