"""Padded batches to packed rows and back, with the names and signatures of flash-attn's bert_padding."""

import torch
import torch.nn.functional as F


def index_first_axis(x, indices):
    """Rows `indices` of x (rows, ...): (len(indices), ...). Differentiable."""
    return x[indices] if x.dim() < 2 else x.flatten(1).index_select(0, indices).unflatten(1, x.shape[1:])


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """Gathers the tokens that attention_mask keeps.

    Args:
        hidden_states: (batch, seq, ...).
        attention_mask: (batch, seq), bool or int: 1 is a token, 0 padding, anywhere in a row.
        unused_mask: (batch, seq): 1 marks tokens that are gathered too but are not used (allocated slots).

    Returns:
        hidden_states (total, ...) of the tokens in either mask; indices (total,) of them in the flattened batch;
        cu_seqlens (batch + 1) int32; max_seqlen, an int; seqused (batch) int32, tokens in attention_mask alone.
    """
    if hidden_states.shape[:2] != attention_mask.shape:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)} must be the first two axes of hidden_states "
            f"{tuple(hidden_states.shape)}"
        )
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    kept = kept.bool()
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    seqused = lengths if unused_mask is None else attention_mask.bool().sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    max_seqlen = int(lengths.max()) if lengths.numel() else 0
    cu_seqlens = F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, max_seqlen, seqused


def pad_input(hidden_states, indices, batch, seqlen):
    """The inverse: (total, ...) to (batch, seqlen, ...), zeros where no token goes. Differentiable."""
    out = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return out.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
