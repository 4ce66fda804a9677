"""BERT: bidirectional, heavily padded batches; a decoder with cross-attention when its configuration says so."""

import functools

from ..interface import additive, record_of, run_attention
from ..layout import Inputs, Layout, build_layout
from ..patching import Adapter, register


def _heads(module, x):
    return x.view(*x.shape[:2], module.num_attention_heads, module.attention_head_size).transpose(1, 2)


def _obstacle(module, head_mask, encoder_hidden_states, output_attentions, attention_mask):
    if module.position_embedding_type != "absolute":
        return "the model adds a position bias"
    if output_attentions or (isinstance(attention_mask, Layout) and attention_mask.weights):
        return "attention weights are wanted (output_attentions=True)"
    if head_mask is not None:
        return "a head mask was given"
    if encoder_hidden_states is not None:
        return "cross-attention of BERT on transformers 4.57"
    return None


def self_attention(module, hidden_states, attention_mask=None, head_mask=None, encoder_hidden_states=None,
                   past_key_values=None, output_attentions=False, cache_position=None):  # fmt: skip
    """Forward of `BertSelfAttention` on transformers 4.57, whose class has no hook."""
    obstacle = _obstacle(module, head_mask, encoder_hidden_states, output_attentions, attention_mask)
    if obstacle is not None:
        record_of(module).count_stock(obstacle)
        if isinstance(attention_mask, Layout):
            attention_mask = additive(attention_mask.dense(module.is_decoder), hidden_states.dtype)
        return type(module).forward(module, hidden_states, attention_mask, head_mask, encoder_hidden_states,
                                    past_key_values, output_attentions, cache_position)  # fmt: skip
    query, key, value = (_heads(module, project(hidden_states)) for project in (module.query, module.key, module.value))
    if past_key_values is not None:
        cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        key, value = cache.update(key, value, module.layer_idx, {"cache_position": cache_position})
    dropout = module.dropout.p if module.training else 0.0
    scaling = module.attention_head_size**-0.5
    out, _ = run_attention(module, query, key, value, attention_mask, module.is_decoder, scaling, dropout)
    return out.flatten(2), None


def extended_mask(base, attention_mask, input_shape, device=None, dtype=None):
    """`get_extended_attention_mask` of the base model on transformers 4.57: the Layout instead of a dense mask."""
    if isinstance(attention_mask, Layout):
        return attention_mask
    if not isinstance(attention_mask, Inputs):
        return type(base).get_extended_attention_mask(base, attention_mask, input_shape)
    given = attention_mask
    return build_layout(
        given.batch,
        given.length,
        given.shape[-1],
        mask=given.mask,
        position_ids=given.position_ids,
        cu_seqlens=given.cu_seqlens,
        max_length=given.max_length,
        weights=given.weights,
        cross=given.every_query,
    )


def _replacements(base):
    # Its masks for sdpa are made by functions of the module; those for eager attention by methods that can be replaced.
    yield base, "attn_implementation", "eager"
    yield base, "get_extended_attention_mask", functools.partial(extended_mask, base)
    for module in base.modules():
        if type(module).__name__ in BERT.attention:
            yield module, "forward", functools.partial(self_attention, module)


BERT = register(
    Adapter(
        model_types=("bert",),
        attention=("BertSelfAttention", "BertSdpaSelfAttention", "BertCrossAttention"),
        features=("bidirectional", "dropout", "cross-attention"),
        tiny=lambda: {
            "vocab_size": 97,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "attention_probs_dropout_prob": 0.0,
            "hidden_dropout_prob": 0.0,
            "pad_token_id": 0,
        },
        heads=("AutoModelForMaskedLM", "AutoModel"),
        replacements=_replacements,
        kwargs_since=(5, 0),
    )
)
