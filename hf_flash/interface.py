"""The backend `hf_fused` that transformers calls: one attention function and one mask function.

The mask function returns a `Layout` instead of a mask, and the attention function runs it. Whatever the kernels cannot
do goes to the stock function for that call, with its reason counted in the module's `Record`.
"""

import functools
import sys

import torch
import torch.nn.functional as F

from . import library
from .layout import Inputs, Layout, attend, build_layout
from .record import RECORD, Record
from .steps import Step

# transformers takes any name that contains "flash" for the flash-attn package.
NAME = "hf_fused"
MAX_HEAD_DIM = 256
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# Arguments that only eager attention understands.
EXTRAS = ("position_bias", "s_aux", "head_mask")


def register():
    """Register the backend with transformers; raises ImportError where transformers is missing or too old."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, fused_attention)
    AttentionMaskInterface.register(NAME, fused_mask)


def packed_arguments(kwargs):
    """Take flash-attn's four arguments out of `kwargs` -> (cu_seqlens or None, max_length or None).

    What is missing is recomputed; lengths without offsets raise ValueError, as the documents would be mixed.
    """
    cu_q, cu_k, max_q, max_k = (kwargs.pop(name, None) for name in PACKED)
    if cu_q is None and cu_k is None:
        if max_q is not None or max_k is not None:
            raise ValueError("max_length_q/max_length_k came without cu_seq_lens_q/cu_seq_lens_k: pass the offsets too")
        return None, None
    if cu_q is not None and cu_k is not None and cu_q is not cu_k and cu_q.shape != cu_k.shape:
        raise ValueError(f"cu_seq_lens_q {tuple(cu_q.shape)} and cu_seq_lens_k {tuple(cu_k.shape)} must be equal")
    return (cu_k if cu_q is None else cu_q), (max_k if max_q is None else max_q)


def _packed_numbers(function):
    """The document numbers that transformers itself found in position_ids, inside a mask function's closure."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars if code else (), cells):
        content = cell.cell_contents
        if name == "packed_sequence_mask" and isinstance(content, torch.Tensor):
            return content
        for inner in content if isinstance(content, tuple) else (content,):
            found = _packed_numbers(inner) if callable(inner) else None
            if found is not None:
                return found
    return None


def fused_mask(batch_size, q_length=None, kv_length=None, q_offset=0, kv_offset=0, mask_function=None,
               attention_mask=None, cache_position=None, **kwargs):  # fmt: skip
    """The mask function of the backend: a Layout, or None where there is nothing to say.

    attention_mask: None, (batch, keys) bool, `Inputs` from a patched model, or a Layout that is ready.
    Masks with overlays of the model's own (`use_vmap`) come back dense, for stock attention.
    """
    if isinstance(attention_mask, Layout):
        return attention_mask
    bidirectional = "allow_is_bidirectional_skip" in kwargs
    used = None
    if cache_position is not None:
        q_length = cache_position.shape[0]
        # A buffer larger than what is in use: only static caches forbid to skip the mask while keys outnumber queries.
        if kv_length > q_length and not kwargs.get("allow_is_causal_skip", True):
            used = cache_position[-1] + 1 - kv_offset
    elif not bidirectional and (isinstance(q_offset, torch.Tensor) or q_offset + q_length - kv_offset < kv_length):
        # A static cache's offset is a live tensor, which later layers move on: the sum is a copy.
        used = q_offset + q_length - kv_offset
    inputs = attention_mask if isinstance(attention_mask, Inputs) else None
    mask = inputs.mask if inputs else attention_mask
    if mask is not None:
        mask = mask.to(torch.bool)[:, kv_offset:]
    if kwargs.get("use_vmap"):
        return _stock_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, mask, kwargs)
    if inputs:
        return build_layout(
            batch_size,
            q_length,
            kv_length,
            mask=mask,
            used=used,
            position_ids=inputs.position_ids,
            cu_seqlens=inputs.cu_seqlens,
            max_length=inputs.max_length,
            weights=inputs.weights,
            cross=inputs.every_query,
        )
    # Not a patched model: what its layers are given may still tell of packing.
    numbers = _packed_numbers(mask_function) if mask is None and used is None else None
    positions = None
    if numbers is not None and not torch.compiler.is_compiling():
        same = F.pad((numbers.diff(dim=1) == 0).long(), (1, 0))
        index = torch.arange(q_length, device=numbers.device)
        positions = index - torch.where(same == 0, index, 0).cummax(1).values
    cross = bidirectional and q_length != kv_length
    layout = build_layout(batch_size, q_length, kv_length, mask=mask, used=used, position_ids=positions, cross=cross)
    if torch.compiler.is_compiling():
        return layout
    layout = layout or Layout(batch_size, q_length, kv_length)
    layout.pending = positions is None and not cross
    return layout


def _stock_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, mask, kwargs):
    from transformers.masking_utils import sdpa_mask

    kwargs = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=mask,
        **kwargs,
    )


def fused_attention(module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, sliding_window=None,
                    softcap=None, **kwargs):  # fmt: skip
    """The attention function of the backend, in transformers' shapes.

    query (batch, heads, queries, head_dim), key and value (batch, kv_heads, keys, head_dim), attention_mask a Layout,
    None or, for stock attention, a dense mask -> out (batch, queries, heads, head_dim), weights or None.
    Raises RuntimeError where stock attention would be needed and the model was patched with strict=True.
    """
    if type(attention_mask) is Step:
        if scaling is None:
            scaling = _default_scaling(module, query)
        out = _step_attention(module, attention_mask, query, key, scaling, sliding_window, softcap, kwargs)
        if out is not None:
            return out, None
        key, value, attention_mask = attention_mask.spell_out(module)
    layout = attention_mask if isinstance(attention_mask, Layout) else None
    cross = getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__
    config = getattr(module, "config", None)
    causal = getattr(module, "is_causal", True) and not cross and getattr(config, "is_causal", None) is not False
    if scaling is None:
        scaling = _default_scaling(module, query)
    if layout is not None and layout.pending and not cross:
        layout = _complete(layout, kwargs)
    elif layout is None and attention_mask is None and kwargs.get(PACKED[0], kwargs.get(PACKED[1])) is not None:
        cu_seqlens, longest = packed_arguments(dict(kwargs))
        batch, keys = query.shape[0], key.shape[2]
        layout = build_layout(batch, query.shape[2], keys, cu_seqlens=cu_seqlens, max_length=longest, cross=cross)
    if cross and layout is not None and layout.mask is not None:
        layout = _keys_alone(layout)
    if layout is not None and not torch.compiler.is_compiling():
        layout = layout.to(query.device)  # where layers lie on several devices
    slot = attention_mask if isinstance(attention_mask, torch.Tensor) else layout
    return run_attention(module, query, key, value, slot, causal, scaling, dropout, sliding_window, softcap, **kwargs)


def run_attention(module, query, key, value, attention_mask, causal, scaling, dropout, window=None, softcap=None,
                  **kwargs):  # fmt: skip
    """`fused_attention` with nothing left to find out. attention_mask: Layout, None or a dense mask."""
    layout = attention_mask if isinstance(attention_mask, Layout) else None
    query, key, value = _one_dtype(query, key, value)
    reason = _obstacle(query, value, attention_mask, layout, kwargs)
    if reason is None and window is not None and layout is not None and layout.gaps and window < key.shape[2]:
        reason = "a sliding window over a mask with holes"
    record = record_of(module)
    if reason is not None:
        if not torch.compiler.is_compiling() or record.strict:
            record.count_stock(reason)
        else:
            record.compiled = reason
        return _stock(module, query, key, value, attention_mask, causal, scaling, dropout, window, softcap, kwargs)
    if torch.compiler.is_compiling():
        record.compiled = ""
    else:
        record.count_fused(query.device)
    options = {"softmax_scale": scaling, "dropout_p": dropout, "softcap": softcap or 0.0}
    run = attend if layout is None else layout.attend
    return run(query, key, value, causal, window, **options), None


def _step_attention(module, step, query, key, scaling, window, softcap, kwargs):
    """One layer of a decoding step, or None where it takes the long way: its keys and values spelt out."""
    pending = step.pending_of(module, key)
    if pending is None:
        return None
    key, value = pending
    if not fits_step(module, step, query, key, value, kwargs):
        return None
    record_of(module).count_fused(query.device)
    return step.attend(module, query.to(key.dtype), pending, scaling, window, softcap)


def fits_step(module, step, query, key, value, kwargs):
    """Whether the decode kernel takes a layer's call. Looked into once for a step whose layers are alike."""
    given = key, value
    signature = query.dtype, key.dtype, value.dtype, query.shape, key.shape, value.shape, query.device
    if signature != step.checked or kwargs.get("head_mask") is not None or kwargs.get("s_aux") is not None:
        key, value = _one_dtype(query, key, value)[1:]
        fits = key is given[0] and value is given[1] and getattr(module, "is_causal", True)
        if not fits or _obstacle(query.to(key.dtype), value, None, None, kwargs) is not None:
            return False
        step.checked = signature
    return True


def _default_scaling(module, query):
    """GPT-2 of transformers 4.57 leaves the scale to the function it calls."""
    scaling = query.shape[-1] ** -0.5 if getattr(module, "scale_attn_weights", True) else 1.0
    return scaling / (module.layer_idx + 1) if getattr(module, "scale_attn_by_inverse_layer_idx", False) else scaling


def _complete(layout, kwargs):
    """Add the packing that the layers' keyword arguments tell of to a layout, once per forward."""
    if layout.completed is None:
        cu_seqlens, longest = packed_arguments(dict(kwargs))
        position_ids = kwargs.get("position_ids")
        done = layout
        whole = layout.q_length == layout.kv_length and layout.used is None  # else positions are no packing
        if cu_seqlens is not None or (whole and isinstance(position_ids, torch.Tensor)):
            done = build_layout(layout.batch, layout.q_length, layout.kv_length, mask=layout.mask, used=layout.used,
                                position_ids=position_ids, cu_seqlens=cu_seqlens, max_length=longest)  # fmt: skip
        layout.completed = done or Layout(layout.batch, layout.q_length, layout.kv_length)
        layout.completed.pending = False
    return layout.completed


def _keys_alone(layout):
    """The layout of cross-attention: its mask hides keys, and every query counts."""
    if layout.completed is None and not layout.cross:
        layout.completed = build_layout(layout.batch, layout.q_length, layout.kv_length, mask=layout.mask, cross=True)
    return layout if layout.cross else layout.completed


def _one_dtype(query, key, value):
    """Under autocast its dtype; else the half precision that any of the three has, the values' first."""
    kind = query.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    else:
        half = [x.dtype for x in (value, key, query) if x.dtype in (torch.float16, torch.bfloat16)]
        dtype = half[0] if half else value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def record_of(module):
    record = getattr(module, RECORD, None)
    if record is None:
        record = Record(f"layer {getattr(module, 'layer_idx', '?')}", type(module).__name__)
        setattr(module, RECORD, record)
    return record


def _obstacle(query, value, attention_mask, layout, kwargs):
    """Why this call takes the stock path, or None."""
    if isinstance(attention_mask, torch.Tensor):
        return "a dense attention mask was given"
    if kwargs.get("output_attentions") or (layout is not None and layout.weights):
        return "attention weights are wanted (output_attentions=True)"
    if kwargs.get("head_mask") is not None:
        return "a head mask was given"
    if kwargs.get("position_bias") is not None:
        return "the model adds a position bias"
    if kwargs.get("s_aux") is not None:
        return "the model has attention sinks"
    if max(query.shape[-1], value.shape[-1]) > MAX_HEAD_DIM:
        return f"head dim {query.shape[-1]} is above {MAX_HEAD_DIM}"
    if query.shape[-1] != value.shape[-1]:
        return f"head dims of queries ({query.shape[-1]}) and values ({value.shape[-1]}) differ"
    if query.device.type == "cuda" and query.dtype not in (torch.float16, torch.bfloat16):
        return f"{query.dtype} on CUDA outside autocast (the kernels take float16 and bfloat16)"
    if query.device.type not in ("cuda", "cpu", "meta"):
        return f"no kernels for device {query.device.type}"
    if not torch.compiler.is_compiling() and _shared_by_torch(F.scaled_dot_product_attention):
        return "torch's context parallelism shares sequences within sdpa alone (remedy: hf_flash.split_sequences)"
    if query.device.type == "cuda" and not torch.compiler.is_compiling():
        return _no_kernels(query.device)
    return None


def _shared_by_torch(sdpa):
    """Whether context parallelism has put its own function in sdpa's place."""
    return (getattr(sdpa, "__module__", None) or "").startswith("torch.distributed")


def _no_kernels(device):
    """Why the kernels cannot run on this CUDA device, and the remedy, or None."""
    status = library.status()
    if not status.available:
        return f"{status.reason} (remedy: {status.remedy})"
    if _capability(device.index) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


_capability = functools.cache(torch.cuda.get_device_capability)


def dense_mask(attention_mask, query, key, causal, window=None):
    """A Layout or None spelt out as a bool mask; a dense mask as it is."""
    if isinstance(attention_mask, torch.Tensor):
        return attention_mask
    layout = attention_mask or Layout(query.shape[0], query.shape[2], key.shape[2])
    return layout.dense(causal, window, query.device)


def additive(mask, dtype):
    """A bool mask as the float mask that eager attention adds to its scores."""
    return torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype) if mask.dtype == torch.bool else mask


def _stock(module, query, key, value, dense, causal, scaling, dropout, window, softcap, kwargs):
    """The stock function: eager where weights or head masks ask for it, else sdpa, with the layout's dense mask."""
    layout = dense if isinstance(dense, Layout) else None
    if layout is not None:
        key, value = layout.trim(key), layout.trim(value)
    extra = {name: kwargs[name] for name in EXTRAS if kwargs.get(name) is not None}
    weights = kwargs.get("output_attentions") or (layout is not None and layout.weights)
    eager = _eager_function(module)
    if eager is not None and (weights or extra or softcap):
        mask = additive(dense_mask(dense, query, key, causal, window), query.dtype)
        options = {"softcap": softcap} if softcap else {}
        return eager(module, query, key, value, mask, scaling=scaling, dropout=dropout, **options, **extra)
    if dense is not None or window is not None or (causal and key.shape[2] != query.shape[2] > 1):
        dense = dense_mask(dense, query, key, causal, window)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    is_causal = causal and dense is None and query.shape[2] > 1
    return sdpa_attention_forward(module, query, key, value, dense, dropout=dropout, scaling=scaling,
                                  is_causal=is_causal, **extra)  # fmt: skip


def _eager_function(module):
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    return None
