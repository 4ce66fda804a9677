"""A decoding step: a few new tokens over a cache that grows in place (`hf_flash.caches`).

Everything that the step's layers share is found out once, before the first of them. Then a layer is one call: the
kernel writes the new keys and values behind the old ones and attends, reading the buffer where it lies.
"""

import torch

from . import ops
from .layout import SHORT, Layout, build_layout

# What caches.grow leaves on a cache whose layers all grow in place.
MARK = "_hf_flash_grows"
CACHE_NAMES = ("cache", "past_key_values", "layer_past")
# A cache that only `generate` holds: its mask grows by ones, so what was found out about the padding stays true.
PRIVATE = "_hf_flash_private"


def cache_of(given):
    return next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)


class Step(Layout):
    """The Layout of a decoding step, in the place of the mask.

    cache     a DynamicCache whose layers grow in place
    mask      (batch, keys) bool, or None where every key is a token; made when first asked for
    left_pad  (batch,) int32, keys to skip at the start of each row, or None
    lengths   (batch,) int32 on the device, rows in the buffers before the step; given by a captured step
    turns     whether the kernel may turn queries and keys: a layer that found otherwise had projected in vain
    """

    def __init__(self, cache, batch, q_length, kv_length, raw_mask=None, left_pad=None, lengths=None):
        self.raw_mask = raw_mask
        super().__init__(batch, q_length, kv_length)
        self.cache, self.left_pad, self.lengths = cache, left_pad, lengths
        self.given_lengths = lengths is not None
        self.checked, self.tables, self.shifted, self.spelt = None, None, {}, {}
        self.configured, self.calls = None, ops.DecodeCalls()
        self.turns = True
        for layer in cache.layers:
            layer.deferring = True

    @property
    def mask(self):
        return None if self.raw_mask is None else self.raw_mask[:, : self.kv_length].to(torch.bool)

    @mask.setter
    def mask(self, value):
        pass

    def to(self, *args, **kwargs):
        return self

    def end(self):
        """The layers write their rows themselves again."""
        for layer in self.cache.layers:
            layer.deferring = False
            layer.settle()

    def pending_of(self, module, key):
        """The keys and values that the module's layer has yet to write, if `key` is one of them; or None."""
        pending = self.cache.layers[module.layer_idx].pending
        return pending if pending is not None and key is pending[0] else None

    def attend(self, module, query, pending, scaling, window, softcap):
        """Write the pending rows and attend: query (batch, heads, new, head_dim) -> (batch, new, heads, head_dim)."""
        self.cache.layers[module.layer_idx].pending = None
        key, value = (x.transpose(1, 2) for x in pending)
        return self.decode(module, query.transpose(1, 2), key, value, None, None, False, scaling, window, softcap)

    def decode(self, module, query, key, value, cos, sin, interleaved, scaling, window, softcap):
        """`attend` for rows that were reserved, (batch, new, heads, head_dim), turned by cos and sin (angles)."""
        keys, values = self.cache.layers[module.layer_idx].spans
        lengths, left_pad = self._rows(keys.end - self.q_length - keys.start, query.device)
        window, softcap = -1 if window is None else window - 1, softcap or 0.0
        out = self.calls(
            query, keys.swapped, values.swapped, keys.start, key, value, cos, sin, lengths, left_pad, scaling, window,
            softcap, interleaved,
        )  # fmt: skip
        if out is None:
            k_cache, v_cache = keys.swapped, values.swapped
            if keys.start:
                k_cache, v_cache = k_cache[:, keys.start :], v_cache[:, keys.start :]
            out, _ = ops.decode(
                query, k_cache, v_cache, key, value, cos, sin, lengths, None, left_pad, None, None, scaling, window, 0,
                softcap, interleaved, 0,
            )  # fmt: skip
        return out

    def window_of(self, config):
        """The sliding window that a module without one of its own finds in its configuration, or None."""
        if self.configured is None or self.configured[0] is not config:
            self.configured = config, getattr(config, "sliding_window", None)
        return self.configured[1]

    def angles(self, source, make, dtype):
        """`make()`, (cos, sin) of the new tokens, -> (batch, new, rotary_dim / 2); once for layers of one `source`."""
        if self.tables is None or self.tables[0] is not source or self.tables[1].dtype != dtype:
            tables = make()
            shape = (self.batch, self.q_length, tables[0].shape[-1])
            self.tables = source, *(x.expand(shape).to(dtype).contiguous() for x in tables)
        return self.tables[1:]

    def _rows(self, before, device):
        """(lengths, left_pad) for a layer that holds `before` rows; in a sliding window fewer than the mask has."""
        if self.given_lengths:
            return self.lengths, self.left_pad
        found = self.shifted.get((before, device))
        if found is None:
            lengths = torch.full((self.batch,), before, dtype=torch.int32, device=device)
            left_pad, gone = self.left_pad, self.kv_length - self.q_length - before
            if left_pad is not None:
                left_pad = left_pad.to(device)
                left_pad = (left_pad - gone).clamp(min=0) if gone else left_pad
            found = self.shifted[before, device] = lengths, left_pad
        return found

    def spell_out(self, module):
        """(key, value, Layout or None) of a layer that takes the long way: all its keys, the new ones written."""
        if self.given_lengths:
            raise RuntimeError("a layer's call does not fit the kernel that decodes (see the reasons in the table)")
        layer = self.cache.layers[module.layer_idx]
        layer.flush()
        keys, values = (span.view() for span in layer.spans)
        rows = keys.shape[2]
        if rows not in self.spelt:
            mask = None if self.raw_mask is None else self.mask[:, -rows:]
            self.spelt[rows] = build_layout(self.batch, self.q_length, rows, mask=mask)
        return keys, values, self.spelt[rows]


def begin(module, given, batch, length, mask):
    """The Step of this forward, or None where it is no decoding step over a cache that grows in place.

    mask: None, or whatever the caller of the model gave.
    """
    cache = cache_of(given)
    if not getattr(cache, MARK, False) or length > SHORT or torch.compiler.is_compiling():
        return None
    if module.training or torch.is_grad_enabled() or not (mask is None or getattr(mask, "ndim", 0) == 2):
        return None
    past = cache.get_seq_length()
    if past == 0:
        return None
    fits, left_pad = padding(cache, mask, past + length, length)
    return Step(cache, batch, length, past + length, mask, left_pad) if fits else None


def padding(cache, mask, keys, new):
    """(whether each row's tokens are one run up to the newest key, how many keys come before it or None if none do)."""
    if mask is None:
        return True, None
    layer = cache.layers[0]
    if layer.left_pad is not None and getattr(cache, PRIVATE, False):
        return True, None if layer.left_pad is False else layer.left_pad
    if mask.shape[1] != keys:
        return False, None
    mask = mask.to(torch.bool)
    first, tokens = mask.to(torch.uint8).argmax(1), mask.sum(1)
    one_run = (first + tokens == keys) & (tokens >= new)
    one_run, padded = torch.stack([one_run.all(), first.any()]).tolist()
    left_pad = first.to(torch.int32) if padded else None
    if one_run:
        layer.left_pad = False if left_pad is None else left_pad
    return one_run, left_pad
