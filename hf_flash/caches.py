"""Caches that grow in place: a patched model's `generate` keeps its keys and values in these.

transformers' DynamicCache copies the whole past for every new token. Here a layer writes new rows behind the old ones,
into a buffer with room, and hands out views of it. A buffer that is full moves to one larger by a quarter, so a row is
copied five times at most on average, and a layer takes 1.25 times its contents and 64 rows, or what `limit` says it
will ever need where that is less; while it moves, one layer's keys (or values) are there twice.

A layer stays transformers' own in everything else: what crops, selects, repeats or resets it works on its `keys` and
`values` as before. Rows cut off by `crop` are overwritten by what comes next, also in views taken before.
"""

import functools

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .steps import MARK

SPARE_ROWS = 64


class Span:
    """Rows start to end of a buffer (batch, heads, capacity, head_dim). `own`: nobody else wrote or holds the buffer.

    swapped  the buffer as the kernels take it, (batch, capacity, heads, head_dim)
    """

    __slots__ = ("buffer", "swapped", "start", "end", "own")

    def __init__(self):
        self.buffer = self.swapped = None
        self.start, self.end, self.own = 0, 0, False

    def __getstate__(self):
        return self.buffer, self.start, self.end, self.own

    def __setstate__(self, state):  # pickled apart, `swapped` would be other memory
        self.buffer, self.start, self.end, self.own = state
        self.swapped = self.buffer.transpose(1, 2) if self.own else None

    def view(self):
        buffer, rows = self.buffer, self.end - self.start
        if buffer is None or buffer.dim() != 4 or rows == buffer.shape[2]:
            return buffer
        return buffer.narrow(2, self.start, rows)

    def adopt(self, x):
        """Take x for the contents: rows of the buffer after a crop, or a tensor of someone else's."""
        first = self._row_of(x) if x is not None and x.dim() == 4 else None
        if first is not None:
            self.start, self.end = first, first + x.shape[2]
        else:
            self.buffer, self.own = x, False
            self.start, self.end = 0, x.shape[2] if x is not None and x.dim() == 4 else 0

    def _row_of(self, x):
        buffer = self.buffer
        if not self.own or torch.compiler.is_compiling():
            return None
        if x.dtype != buffer.dtype or x.device != buffer.device or x.stride() != buffer.stride():
            return None
        if x.shape[:2] != buffer.shape[:2] or x.shape[3] != buffer.shape[3]:
            return None
        first, rest = divmod(x.data_ptr() - buffer.data_ptr(), x.stride(2) * x.element_size())
        return first if rest == 0 and 0 <= first <= buffer.shape[2] - x.shape[2] else None

    def has_room(self, rows, dtype):
        """Whether so many new rows fit where the buffer is."""
        buffer = self.buffer
        return (
            self.own
            and self.end + rows <= buffer.shape[2]
            and buffer.dtype == dtype
            and (torch.is_inference_mode_enabled() or not buffer.is_inference())
        )

    def move(self, new, axis, limit=None, place=None):
        """Go to a buffer with room for the rows of `new` (axis 1 or 2, heads on the other)."""
        kept = self.end - self.start
        past = self.view() if kept else None
        needed = kept + new.shape[axis]
        rows = needed + needed // 4 + SPARE_ROWS
        if limit is not None and needed <= limit:
            rows = min(rows, limit)
        dtype = new.dtype if past is None else torch.promote_types(past.dtype, new.dtype)
        shape = (new.shape[0], new.shape[3 - axis], rows, new.shape[3])
        self.buffer = place(shape, dtype, new.device) if place is not None else None
        if self.buffer is None:
            self.buffer = torch.empty(shape, dtype=dtype, device=new.device)
        if past is not None:
            self.buffer.narrow(2, 0, kept).copy_(past)
        self.start, self.end, self.own = 0, kept, True
        self.swapped = self.buffer.transpose(1, 2)

    def write(self, new):
        """Write the newest rows."""
        self.buffer.narrow(2, self.end - new.shape[2], new.shape[2]).copy_(new)

    def select(self, rows):
        """Reorder or choose among the batch, with the room that there was."""
        past = self.view()
        shape = (len(rows), past.shape[1], self.buffer.shape[2], past.shape[3])
        buffer = past.new_empty(shape)
        torch.index_select(past, 0, rows, out=buffer.narrow(2, self.start, past.shape[2]))
        self.buffer, self.swapped, self.own = buffer, buffer.transpose(1, 2), True


class GrowingLayer(DynamicLayer):
    """A DynamicLayer whose keys and values are views of buffers with room.

    limit      rows that will ever be needed, where `generate` knows
    place      ("keys" or "values", shape, dtype, device) -> a buffer at least as long, or None for a new one
    deferring  whether `update` leaves new rows to the kernel, which writes them as it attends (`Step`); it then
               returns them alone and keeps them in `pending` until they are written
    left_pad   what `Step` found out about the rows' padding; forgotten when anything but an append happens to them
    """

    limit = place = pending = left_pad = None
    deferring = False

    def __init__(self, *args, **kwargs):
        self.spans = Span(), Span()
        super().__init__(*args, **kwargs)

    @property
    def keys(self):
        self.settle()
        return self.spans[0].view()

    @keys.setter
    def keys(self, x):
        self._adopt(0, x)

    @property
    def values(self):
        self.settle()
        return self.spans[1].view()

    @values.setter
    def values(self, x):
        self._adopt(1, x)

    def _adopt(self, index, x):
        self.flush()
        self.left_pad = None
        self.spans[index].adopt(x)

    def flush(self):
        """Write what a kernel was to write and has not."""
        if self.pending is not None:
            new, self.pending = self.pending, None
            for span, rows in zip(self.spans, new):
                span.write(rows)

    def settle(self):
        """Bring the rows into the state that others expect."""
        self.flush()

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.grows_with(key_states, value_states):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(*(key_states, value_states)[: self._lazy_arguments])
        return self._append(key_states, value_states)

    @staticmethod
    def grows_with(key_states, value_states):
        """Whether rows may be written in place: autograd keeps what it was given, and a compiler knows no buffers."""
        wanted = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        return not (wanted or torch.compiler.is_compiling())

    # transformers 4.57 makes both empty tensors from the keys.
    _lazy_arguments = DynamicLayer.lazy_initialization.__code__.co_argcount - 1

    def reserve(self, key_states, value_states, axis=2):
        """Count new rows (axis 1 or 2) in, with room for them; the caller writes them."""
        self.settle()
        keys, values = self.spans
        rows = key_states.shape[axis]
        if not keys.has_room(rows, key_states.dtype):
            keys.move(key_states, axis, self.limit, self.place and functools.partial(self.place, "keys"))
        if not values.has_room(rows, value_states.dtype):
            values.move(value_states, axis, self.limit, self.place and functools.partial(self.place, "values"))
        self.advance(rows)

    def _append(self, key_states, value_states):
        keys, values = self.spans
        empty = keys.start == keys.end
        new = key_states, value_states
        self.reserve(*new)
        if self.deferring and keys.buffer.dtype == values.buffer.dtype == key_states.dtype == value_states.dtype:
            self.pending = new
            return new
        keys.write(key_states)
        values.write(value_states)
        return new if empty else (keys.view(), values.view())

    def get_seq_length(self):
        return self.spans[0].end - self.spans[0].start

    def advance(self, rows):
        """Count rows in, or out where negative, that someone else has written or will write (again)."""
        keys, values = self.spans
        keys.end += rows
        values.end += rows

    def reorder_cache(self, beam_idx):
        self.settle()
        self.left_pad = None
        for span in self.spans:
            if span.end > span.start:
                span.select(beam_idx.to(span.buffer.device))

    def __getstate__(self):
        self.settle()
        return {**self.__dict__, "place": None, "deferring": False}


class GrowingSlidingLayer(GrowingLayer, DynamicSlidingWindowLayer):
    """The same for a sliding window: rows that have left it are skipped, and dropped when the buffer moves."""

    record_past = False

    def settle(self):
        self.flush()
        if not self.record_past and self.sliding_window > 1:
            for span in self.spans:
                span.start = max(span.start, span.end - (self.sliding_window - 1))

    def _append(self, key_states, value_states):
        returned = super()._append(key_states, value_states)
        visible = self.sliding_window - 1 + key_states.shape[2]
        if self.record_past and self.pending is None and returned[0].shape[2] > visible:
            return tuple(x[:, :, -visible:] for x in returned)
        return returned

    def get_seq_length(self):
        return self.cumulative_length

    def advance(self, rows):
        super().advance(rows)
        self.cumulative_length += rows


class PackedCache(DynamicCache):
    """What a model is given for its empty cache while a prompt runs through it without its padding.

    Keys and values (1, heads, tokens, head_dim) reach the cache at their places of the (batch, length) grid, with zeros
    between them, and the layer as they are.
    """

    def __init__(self, cache, rows, batch, length):
        super().__init__()
        self.cache, self.rows, self.batch, self.length = cache, rows, batch, length

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        rows = self.rows.to(key_states.device)
        grids = (rows.scatter(x[0].transpose(0, 1), self.batch, self.length) for x in (key_states, value_states))
        self.cache.update(*(grid.transpose(1, 2) for grid in grids), layer_idx)
        return key_states, value_states


def is_empty(cache):
    """Whether the cache is a dynamic one that holds nothing yet, so that it can be filled by a PackedCache."""
    return isinstance(cache, DynamicCache) and not isinstance(cache, PackedCache) and cache.get_seq_length() == 0


def grow(cache, limit=None, place=None):
    """Make an empty DynamicCache grow in place. Other caches, offloaded ones and other kinds of layers stay.

    limit: rows that will ever be needed, or None. place: (layer, "keys" or "values", shape, dtype, device) -> buffer.
    Returns whether every layer grows in place now.
    """
    if (
        type(cache) is not DynamicCache
        or cache.offloading
        or cache.layer_class_to_replicate not in (None, DynamicLayer)
    ):
        return False
    if any(
        type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or layer.is_initialized for layer in cache.layers
    ):
        return False
    made = []

    def growing(layer=None):
        if isinstance(layer, DynamicSlidingWindowLayer):
            new = GrowingSlidingLayer(sliding_window=layer.sliding_window)
            new.record_past = getattr(layer, "record_past", False)
            slides = limit is None or limit >= layer.sliding_window
        else:
            new, slides = GrowingLayer(), False
        if not slides:
            new.limit, new.place = limit, place and functools.partial(place, len(made))
        made.append(new)
        return new

    cache.layers = [growing(layer) for layer in cache.layers]
    if cache.layer_class_to_replicate is not None:
        cache.layer_class_to_replicate = growing
    setattr(cache, MARK, True)
    return True
