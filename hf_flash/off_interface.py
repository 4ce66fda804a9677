"""Attention of models whose version does not ask transformers' AttentionInterface: what stands in for their methods.

GPT-J and CodeGen compute attention in `_attn`; on 4.57 they also make their masks themselves.
"""

import functools

import torch

from . import interface
from .interface import additive, dense_mask, fused_attention, fused_mask, record_of
from .layout import Layout
from .steps import Step


def causal_layout(module, attention_mask, input_tensor, cache_position, past_key_values, output_attentions=False):
    """The `_update_causal_mask` of transformers 4.57's models that make their mask themselves: the Layout instead."""
    if isinstance(attention_mask, Layout) or isinstance(attention_mask, torch.Tensor) and attention_mask.ndim != 2:
        return attention_mask
    batch, length = input_tensor.shape[:2]
    keys, offset, fixed = length, 0, False
    if past_key_values is not None:
        keys, offset = past_key_values.get_mask_sizes(cache_position, 0)
        fixed = getattr(past_key_values, "is_compileable", False)
    return fused_mask(
        batch, None, keys, 0, offset, None, attention_mask, cache_position, allow_is_causal_skip=not fixed
    )


def generation_layout(
    module, attention_mask, sequence_length, target_length, dtype, cache_position, batch_size, **kwargs
):
    """What `generate` of 4.57 calls to prepare the mask of a static cache: the Layout instead."""
    if attention_mask is not None and attention_mask.ndim != 2:
        return attention_mask
    mask = None if attention_mask is None else attention_mask.to(torch.bool)
    return fused_mask(batch_size, None, target_length, 0, 0, None, mask, cache_position, allow_is_causal_skip=False)


def fused_inner(module, query, key, value, attention_mask=None, head_mask=None):
    """The `_attn` of GPT-J and CodeGen off the interface: out (batch, heads, queries, head_dim), weights or None."""
    extra = {} if head_mask is None else {"head_mask": head_mask}
    if type(attention_mask) is Step and extra:
        key, value, attention_mask = attention_mask.spell_out(module)
    layout = attention_mask if isinstance(attention_mask, Layout) else None
    if not extra and not (layout is not None and layout.weights) and layout is attention_mask:
        dropout = module.attn_dropout.p if module.training else 0.0
        out, weights = fused_attention(module, query, key, value, attention_mask, module.head_dim**-0.5, dropout)
        return out.transpose(1, 2), weights
    reason = interface._obstacle(query, value, attention_mask, layout, extra)
    if not torch.compiler.is_compiling() or record_of(module).strict:
        record_of(module).count_stock(reason)
    mask = additive(dense_mask(attention_mask, query, key, True), torch.float32)
    return type(module)._attn(module, query, key, value, mask, **extra)


def replace_inner(base, kind):
    """Replacements for GPT-J and CodeGen off the interface: `_attn` of every attention module, and where the version
    makes its mask in a method of the base model (4.57), that method."""
    for module in base.modules():
        if type(module).__name__ == kind:
            yield module, "_attn", functools.partial(fused_inner, module)
    if hasattr(base, "_update_causal_mask"):
        yield base, "_update_causal_mask", functools.partial(causal_layout, base)
        name = "_prepare_4d_causal_attention_mask_with_cache_position"
        yield base, name, functools.partial(generation_layout, base)
