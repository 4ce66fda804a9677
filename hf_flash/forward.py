"""The forward of a patched model: it learns what the caller says about the batch and hands it on in the mask's slot.

It stands on the instance, in front of whatever forward was there (the class's, or one that accelerate installed), and
takes no part in the arithmetic.
"""

import inspect
from collections import Counter

import torch

from . import loss, steps, wholemodel
from .interface import PACKED, packed_arguments
from .layout import Inputs, Layout, build_layout

STATE = "_hf_flash_state"
HEADS = (*loss.CAUSAL_HEADS, "ForMaskedLM")


class BoundForward:
    """A bound method that can be pickled: `function(module, ...)`, with the signature of the class's own forward.

    A real bound method comes back from pickle as the class's forward, and a closure keeps pointing at the original
    module when it is copied; accelerate looks for `__func__` and `__self__`.
    """

    def __init__(self, function, module):
        self.function, self.module = function, module

    def __call__(self, *args, **kwargs):
        if args and args[0] is self.module:  # accelerate's unwrap_model binds it a second time
            args = args[1:]
        return self.function(self.module, *args, **kwargs)

    @property
    def __func__(self):
        return self.function

    @property
    def __self__(self):
        return self.module

    @property
    def __name__(self):
        return "forward"

    @property
    def __signature__(self):
        signature = inspect.signature(type(self.module).forward)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class State:
    """What a patched module's forward needs to know. `previous` is the instance's forward before, if it had one.

    base         the base model of a model with a head, else None
    whole_model  whether padding may be skipped by the whole model
    graphs       captured decoding steps of a model with a head, or None
    split        what shares sequences among processes (sequence_parallel), or None
    encoder      whether the model never keeps a cache
    head         whether the head predicts tokens of the vocabulary
    keep_logits  whether training forwards with labels return logits
    """

    def __init__(self, module, previous=None, base=None, whole_model=True, encoder=False, keep_logits=True):
        self.head = type(module).__name__.endswith(HEADS)
        self.whole_model, self.encoder, self.unpadded = whole_model, encoder, Counter()
        self.previous, self.base, self.active, self.keep_logits = previous, base, True, keep_logits
        self.prepared = "_original_forward" in module.__dict__
        self.names = list(inspect.signature(type(module).forward).parameters)[1:]
        self.packed = self.split = self.graphs = self.compiled = None

    def notes(self):
        """Lines for the report: how padding was skipped, and how often."""
        words = {None: "by the whole model", "loss": "by the whole model, its head and its loss"}
        times = {reason: f"{count}x" for reason, count in self.unpadded.items()}
        if self.compiled is not None:
            times.setdefault(self.compiled, "compiled")
        return [
            f"padding skipped {words.get(reason, f'inside attention only: {reason}')} ({count})"
            for reason, count in times.items()
        ]

    def unwrapped(self, module):
        """Whether accelerate has taken back, since the patch, the wrapper that it had put around the forward."""
        return self.prepared and "_original_forward" not in module.__dict__

    def call(self, module, given):
        if not self.keep_logits and loss.skips_logits(module, given):
            return loss.without_logits(module, self._call, given)
        return self._call(module, given)

    def _call(self, module, given):
        if self.previous is not None and not self.unwrapped(module):
            return self.previous(**given)
        return type(module).forward(module, **given)


def top_forward(module, *args, **kwargs):
    """Forward of a model with a head: carries cu_seq_lens past heads that drop it, and where labels allow it leaves
    the padding before the base model, so that the head and the loss skip it too."""
    state = getattr(module, STATE)
    given = dict(zip(state.names, args), **kwargs)
    if not state.active:
        return state.call(module, given)
    if state.split is not None and not state.split.steps_back(given):
        return state.split.forward(module, state, given)
    replayed = None if state.graphs is None else state.graphs.step(module, state, given)
    if replayed is not None:
        return replayed
    base = getattr(state.base, STATE)
    _ask_for_the_cache_of_a_tuple(module, given, base)
    if any(name in given for name in PACKED):
        base.packed = packed_arguments(given)
    elif base.whole_model and state.head and wholemodel.labels_fit(given):
        mask = given["attention_mask"].to(torch.bool)
        inputs = Inputs(*mask.shape, mask, given.get("position_ids"))
        inputs.weights = _weights_wanted(module, given)
        layout = None
        if wholemodel.obstacle(module, given, inputs, base.encoder) is None:
            layout = _measure(inputs, wholemodel.labels_at_padding(given))
            given["attention_mask"] = Inputs(inputs.batch, inputs.length) if layout is None else layout
        if layout is not None and not layout.flag and wholemodel.layout_obstacle(module, given, layout) is None:
            base.unpadded["loss"] += 1
            given = wholemodel.pack_labels(given, layout, causal=not base.encoder)
            return wholemodel.forward(module, state, given, layout)
    return state.call(module, given)


def _ask_for_the_cache_of_a_tuple(module, given, base):
    """In a tuple the default cache has a place, which must not go to what comes after it."""
    if given.get("return_dict") is False and not base.encoder and given.get("use_cache") is None:
        given["use_cache"] = getattr(module.config, "use_cache", None)


def _weights_wanted(module, given):
    weights = given.get("output_attentions")
    return bool(getattr(module.config, "output_attentions", False) if weights is None else weights)


def _measure(inputs, flag=None):
    layout = build_layout(
        inputs.batch, inputs.length, inputs.length, mask=inputs.mask, position_ids=inputs.position_ids, flag=flag
    )
    if layout is not None:
        layout.measured = True
    return layout


def base_forward(module, *args, **kwargs):
    """Forward of the base model: replaces attention_mask by `Inputs`. Masks that are not 2-D stay as they are."""
    state = getattr(module, STATE)
    given = dict(zip(state.names, args), **kwargs)
    packed, state.packed = state.packed, None
    tokens = wholemodel.tokens_of(given)
    mask = given.get("attention_mask")
    if not state.active or tokens is None:
        return state.call(module, given)
    if isinstance(mask, Layout) and mask.measured:
        return _run_measured(module, state, given, mask)
    _ask_for_the_cache_of_a_tuple(module, given, state)
    if packed is None:
        packed = packed_arguments(given)
    shape = tokens.shape[:-1] if given.get("input_ids") is None else tokens.shape
    batch, length = shape[:-1].numel(), shape[-1]
    plain = packed[0] is None and not _weights_wanted(module, given)
    step = steps.begin(module, given, batch, length, mask) if plain else None
    if step is not None:
        try:
            return state.call(module, {**given, "attention_mask": step})
        finally:
            step.end()
    if isinstance(mask, torch.Tensor) and mask.shape[:-1] == shape[:-1]:
        mask = mask.reshape(batch, -1).to(torch.bool)
    if mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2):
        positions = given.get("position_ids")
        positions = positions if isinstance(positions, torch.Tensor) and length > 1 else None
        cache = steps.cache_of(given)
        past = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
        past = past if isinstance(past, int) else 0
        inputs = Inputs(batch, length, mask, positions, *packed, _weights_wanted(module, given), past)
        inputs.every_query = (
            getattr(module, "pooler", None) is not None
            and state.encoder
            and inputs.position_ids is None
            and inputs.cu_seqlens is None
        )
        given["attention_mask"] = inputs
        if mask is not None and state.whole_model:
            return _skip_padding(module, state, given, inputs)
    return state.call(module, given)


def _skip_padding(module, state, given, inputs):
    reason, layout = wholemodel.obstacle(module, given, inputs, state.encoder), None
    if reason is None:
        layout = _measure(inputs)
        if layout is not None and layout.padded_start and inputs.every_query:
            layout.let_padding_attend()
        given["attention_mask"] = Inputs(inputs.batch, inputs.length) if layout is None else layout
    return _run_measured(module, state, given, layout, reason)


def _run_measured(module, state, given, layout, reason=None):
    if layout is not None:
        reason = wholemodel.layout_obstacle(module, given, layout)
    if torch.compiler.is_compiling():
        state.compiled = reason  # counting would read what guards watch
    elif (layout or reason) and reason != "no padding":
        state.unpadded[reason] += 1
    if layout is not None and reason is None:
        return wholemodel.forward(module, state, given, layout)
    return state.call(module, given)
