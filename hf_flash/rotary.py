"""Attention modules whose queries and keys the decode kernel turns: a layer of a decoding step is its projections and
one call, which turns, appends and attends."""

from collections.abc import Callable
from dataclasses import dataclass

from .interface import fits_step, record_of
from .steps import Step, cache_of

# (Rotary, the forward that the module's instance had before, if any)
STATE = "_hf_flash_rotary"


@dataclass(frozen=True)
class Rotary:
    """What a decoding step must know of an attention class.

    project      (module, hidden_states, (batch, new, -1, head_dim)) -> query, key, value of that shape, not turned
    angles       (module, **the call's keyword arguments) -> cos, sin (1 or batch, new, rotary_dim / 2)
    outputs      the modules through which attention's output goes, in order
    interleaved  whether pairs are (0, 1), (2, 3), ... or the two halves of rotary_dim
    """

    project: Callable
    angles: Callable
    outputs: tuple[str, ...]
    interleaved: bool


def forward(module, *args, **kwargs):
    """Forward of an attention module with rotary embedding: its own, except in a decoding step."""
    step = kwargs.get("attention_mask")
    rotary, previous = module.__dict__[STATE]
    if type(step) is Step and step.turns and not args and cache_of(kwargs) is step.cache:
        out = _step(module, rotary, step, **kwargs)
        if out is not None:
            return out, None
        step.turns = False
    return type(module).forward(module, *args, **kwargs) if previous is None else previous(*args, **kwargs)


def _step(module, rotary, step, hidden_states, **kwargs):
    """`forward` in a decoding step, or None where the layer takes its own way."""
    layer = step.cache.layers[module.layer_idx]
    query, key, value = rotary.project(module, hidden_states, (*hidden_states.shape[:-1], -1, module.head_dim))
    keys, values = layer.spans
    dtype = query.dtype
    one_dtype = dtype == key.dtype == value.dtype == keys.buffer.dtype == values.buffer.dtype
    if not one_dtype or not fits_step(module, step, query, key, value, kwargs):
        return None
    # The layers' angles are the same where what they come from is.
    embeddings = kwargs.get("position_embeddings")
    source = kwargs["position_ids"] if embeddings is None else embeddings[0]
    cos, sin = step.angles(source, lambda: rotary.angles(module, **kwargs), dtype)
    if 2 * cos.shape[-1] > module.head_dim:
        return None
    layer.reserve(key, value, axis=1)
    record_of(module).count_fused(query.device)
    # An attribute that a module lacks takes as long to look for as a launch: neither is asked of the module itself.
    own = module.__dict__
    window = own["sliding_window"] if "sliding_window" in own else step.window_of(own.get("config"))
    scaling = own["scaling"] if "scaling" in own else module.head_dim**-0.5
    out = step.decode(module, query, key, value, cos, sin, rotary.interleaved, scaling, window, None).flatten(2)
    for name in rotary.outputs:
        out = module._modules[name](out)
    return out
