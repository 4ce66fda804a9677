"""Whole-model unpadding: tokens leave their padding before the first layer and return to it after the last.

Embeddings, norms, projections and MLPs then skip the padding too. It is exact at every token where no cache is kept,
because everything outside attention works token by token, and positions are gathered with the tokens.
"""

import torch
import torch.nn.functional as F

from .layout import Layout, Rows
from .steps import cache_of

IGNORED = -100
UNFIT = ("head_mask", "encoder_hidden_states", "cache", "past_key_values")


def tokens_of(given):
    """What a forward was given for its tokens: input_ids, inputs_embeds or None."""
    tokens = given.get("input_ids")
    return given.get("inputs_embeds") if tokens is None else tokens


def empty_cache(module, given):
    """The dynamic cache that this forward begins to fill, or None; in training it would have to carry gradients."""
    cache = cache_of(given)
    if cache is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    from .caches import is_empty

    return cache if is_empty(cache) else None


def obstacle(module, given, inputs, encoder):
    """Why this forward skips padding inside attention only, or None. Reads no value from the device."""
    cache = empty_cache(module, given)
    config = module.config
    if torch.compiler.is_compiling():
        return "torch.compile keeps static sizes"
    if inputs.mask.shape[1] != inputs.length:
        return "the mask is longer than the input (a cache or a prefix)"
    if inputs.cu_seqlens is not None:
        return "cu_seq_lens came with a mask"
    if inputs.weights:
        return "attention weights are wanted"
    for name in UNFIT:
        if given.get(name) is not None and given[name] is not cache:
            return f"{name} was given"
    if cache is None and not encoder and _keeps_cache(module, given):
        return "a cache is kept (pass use_cache=False)"
    if any(getattr(given.get(name), "ndim", 2) != 2 for name in ("input_ids", "position_ids", "token_type_ids")):
        return "inputs have more than one axis of tokens"
    if getattr(config, "chunk_size_feed_forward", 0):
        return "the feed-forward is chunked along the sequence"
    if getattr(config, "position_embedding_type", "absolute") not in (None, "absolute"):
        return "the model adds a position bias"
    rope = getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope"):
        return "rotary frequencies depend on the padded length"
    return None


def _keeps_cache(module, given):
    """In training nobody reads the cache that a default asks for: it is left out."""
    if given.get("use_cache") is None and module.training and torch.is_grad_enabled():
        return False
    wanted = given.get("use_cache")
    return bool(getattr(module.config, "use_cache", False) if wanted is None else wanted)


def layout_obstacle(module, given, layout):
    """Why a layout that is measured by now cannot leave its padding, or None."""
    if layout.keys is None or layout.keys.indices is None:
        return "no padding"
    if layout.keys.max_length == 0:
        return "no tokens"
    if layout.gaps and getattr(module.config, "sliding_window", None):
        return "a sliding window counts the padding between tokens"
    if getattr(module, "pooler", None) is not None and layout.padded_start:
        return "the pooler reads the first place, which is padding"
    return None


def labels_fit(given):
    """Whether a head's loss can be computed on tokens alone, as far as shapes tell."""
    mask, labels = given.get("attention_mask"), given.get("labels")
    tokens = tokens_of(given)
    if not all(isinstance(x, torch.Tensor) for x in (tokens, mask, labels)):
        return False
    kept = given.get("logits_to_keep", 0)
    whole = isinstance(kept, int) and kept == 0 and given.get("shift_labels") is None
    return labels.ndim == 2 and tokens.shape[:2] == mask.shape == labels.shape and whole


def labels_at_padding(given):
    """0-d bool tensor: whether padding carries labels, which only the padded loss counts."""
    return ((given["labels"] != IGNORED) & (given["attention_mask"] == 0)).any()


def pack_labels(given, layout, causal):
    """Gather the labels. A causal head's row has none for a token that only padding could predict."""
    labels, rows = given["labels"], layout.keys
    if causal:
        before = F.pad(layout.mask[:, :-1], (1, 0)).to(labels.device)
        labels = labels.masked_fill(~before, IGNORED)
    return {**given, "labels": labels.flatten().index_select(0, rows.indices.to(labels.device))[None]}


def forward(module, state, given, layout):
    """Run the module's own forward on the tokens alone and put its outputs back into the grid."""
    rows, batch, length = layout.keys, layout.batch, layout.q_length
    given = {name: value for name, value in given.items() if name != "cache_position"}
    device = tokens_of(given).device
    indices, total = rows.indices.to(device), rows.indices.shape[0]
    if given.get("position_ids") is None:
        given["position_ids"] = torch.arange(length, device=device)[None]
    for name in ("input_ids", "token_type_ids", "position_ids"):
        if given.get(name) is not None:
            given[name] = (
                given[name].expand(batch, length).flatten().index_select(0, indices.to(given[name].device))[None]
            )
    if given.get("inputs_embeds") is not None:
        given["inputs_embeds"] = given["inputs_embeds"].flatten(0, 1).index_select(0, indices)[None]
    packed = Layout(1, total, total)
    packed.queries = packed.keys = Rows(None, rows.cu_seqlens.to(device), rows.max_length)
    packed.starts = torch.zeros(1, total + 1, dtype=torch.bool, device=device)
    packed.starts[0, rows.cu_seqlens.long()] = True
    packed.starts = packed.starts[:, :total]
    given["attention_mask"] = packed
    cache, filling = empty_cache(module, given), None
    if cache is not None:
        from .caches import PackedCache

        filling = PackedCache(cache, rows, batch, length)
        given.update({name: filling for name, value in given.items() if value is cache})
    elif "use_cache" in state.names:
        given["use_cache"] = False

    output = state.call(module, given)
    pooler = getattr(module, "pooler", None)
    if isinstance(output, tuple):
        output = _spread(output, rows, batch, length, filling)
        return output if pooler is None else (output[0], pooler(output[0]), *output[2:])
    for name, value in list(output.items()):
        output[name] = _spread(value, rows, batch, length, filling)
    if pooler is not None:
        output["pooler_output"] = pooler(output["last_hidden_state"])
    return output


def _spread(value, rows, batch, length, filling):
    """Put what belongs to tokens back into the grid, and the cache that was filled in the place of what filled it."""
    if filling is not None and value is filling:
        return filling.cache
    if isinstance(value, torch.Tensor) and value.shape[:2] == (1, len(rows.indices)):
        return rows.to(value.device).scatter(value[0], batch, length)
    return tuple(_spread(x, rows, batch, length, filling) for x in value) if isinstance(value, tuple) else value
