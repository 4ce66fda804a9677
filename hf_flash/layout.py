"""The layout of a batch: which places of the padded (batch, length) grid are tokens, and where documents begin.

A `Layout` is made once per forward and travels through the model in the place of the attention mask. Its metadata is
computed on the device and read by the host in one transfer; under torch.compile it keeps static sizes and none is read.

Three descriptions of a batch come in, alone or together: a 2-D padding mask of any shape (right, left, both sides,
holes), `position_ids` that start again (packed documents), and flash-attn's `cu_seq_lens`.
"""

import copy
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from .attention import flash_attn_func, flash_attn_varlen_func
from .kvcache import flash_attn_with_kvcache

# Up to this many new queries a cache is read where it lies, by the kernels made for it.
SHORT = 16


@dataclass
class Inputs:
    """What the caller of a model said about its batch, on the way to where the layout is made.

    mask          (batch, keys) bool or None
    position_ids  (batch, length) or None
    cu_seqlens    (documents + 1,) over the flattened batch, or None
    max_length    int or None
    weights       whether attention weights are wanted, which only eager attention returns
    past          keys from earlier forwards, as far as the host knows
    every_query   whether padding attends too: a pooler reads the first place, even where that is padding
    """

    batch: int
    length: int
    mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    max_length: int | None = None
    weights: bool = False
    past: int = 0
    every_query: bool = False

    ndim = 4

    def dim(self):
        return 4

    @property
    def shape(self):
        keys = self.past + self.length if self.mask is None else self.mask.shape[1]
        return torch.Size((self.batch, 1, self.length, keys))

    def to(self, device=None, *args, **kwargs):
        if not isinstance(device, str | int | torch.device):
            return self
        tensors = ((name, getattr(self, name)) for name in ("mask", "position_ids", "cu_seqlens"))
        return replace(self, **{name: None if tensor is None else tensor.to(device) for name, tensor in tensors})


@dataclass
class Rows:
    """Tokens in the order in which a packed kernel reads them.

    indices     (total,) int64 places in the flattened (batch, length) grid, or None where every place is a token;
                with `static` as many as the grid has places, those past the last token equal to their number
    cu_seqlens  (sequences + 1,) int32
    max_length  int, at least the longest sequence
    """

    indices: torch.Tensor | None
    cu_seqlens: torch.Tensor
    max_length: int
    static: bool = False

    def to(self, device):
        indices = None if self.indices is None else self.indices.to(device)
        return replace(self, indices=indices, cu_seqlens=self.cu_seqlens.to(device))

    def gather(self, x):
        """(batch, heads, length, head_dim) -> (total, heads, head_dim)."""
        x = x.transpose(1, 2)
        batch, length = x.shape[:2]
        if self.indices is None:
            return x.reshape(-1, *x.shape[2:])
        indices = self.indices.clamp(max=batch * length - 1) if self.static else self.indices
        if x.stride(0) == length * x.stride(1) or torch.compiler.is_compiling():
            return x.flatten(0, 1).index_select(0, indices)
        # A cache lies (batch, heads, length, head_dim): flattening it would copy it whole.
        return x[indices // length, indices % length]

    def scatter(self, x, batch, length):
        """(total, heads, head_dim) -> (batch, length, heads, head_dim), zero where there is no token."""
        shape = (batch, length, *x.shape[1:])
        if self.indices is None:
            return x.reshape(shape)
        grid = x.new_zeros(batch * length + self.static, *x.shape[1:])
        return grid.index_copy(0, self.indices, x)[: batch * length].view(shape)


def places(flags):
    """(n,) bool -> (n,) int64: the places of the True entries in order, then n for the rest. No host sync."""
    n = flags.numel()
    count = flags.cumsum(0)
    every = torch.arange(n, device=flags.device)
    found = torch.empty(n + 1, dtype=torch.int64, device=flags.device)
    found = found.scatter(0, torch.where(flags, count - 1, n), every)[:n]
    return torch.where(every < count[-1:], found, n)


def document_starts(positions, mask=None):
    """(batch, length) positions -> bool: the first token of a row, and each whose position does not grow.

    A document's own positions always grow, whatever number they start from (0, or 2 in RoBERTa). Padding, where `mask`
    is False, starts nothing and separates nothing.
    """
    if mask is None:
        starts = torch.ones_like(positions, dtype=torch.bool)
        starts[:, 1:] = positions[:, 1:] <= positions[:, :-1]
        return starts
    columns = torch.arange(positions.shape[1], device=positions.device)
    latest = torch.where(mask, columns, -1).cummax(1).values
    before = F.pad(latest, (1, -1), value=-1)
    return mask & ((before < 0) | (positions <= positions.gather(1, before.clamp(min=0))))


def _rows(mask, starts=None):
    """(batch, n) tokens and document starts -> Rows of full size; total, longest, documents as 0-d tensors."""
    flat, lengths = mask.flatten(), mask.sum(1)
    if starts is None:
        cu_seqlens, longest, documents = (
            F.pad(lengths.cumsum(0), (1, 0)),
            lengths.max(),
            torch.full_like(lengths[0], len(mask)),
        )
    else:
        before = F.pad(flat.cumsum(0), (1, 0))
        # Concatenated: torch.compile takes the value of a pad for a constant, and would compile for every length.
        cu_seqlens = torch.cat([before[places(starts.flatten())], before[-1:]])
        longest, documents = cu_seqlens.diff().max(), starts.sum()
    rows = Rows(places(flat), cu_seqlens.to(torch.int32), mask.shape[1], static=True)
    return rows, lengths.sum(), longest, documents


def _trim(rows, grid, total, longest, documents):
    """The rows with the sizes that the host now knows."""
    indices = None if total == grid else rows.indices[:total]
    return Rows(indices, rows.cu_seqlens[: documents + 1], longest)


class Layout:
    """How queries and keys of one forward lie in their (batch, length) grids. Made by `build_layout`.

    mask      (batch, keys) bool, or None where every key is a token
    used      keys of the buffer in use: 0-d tensor for a static cache (never read by the host), None for all
    starts    (batch, keys) bool, where documents begin, or None
    queries, keys   Rows, or None where the grid is dense
    left_pad  (batch,) int32, where each row's tokens are one run that reaches the newest key
    gaps      whether padding lies between tokens, or may (a sliding window counts places, padding included)
    padded_start  whether a row may begin with padding
    flag      a 0-d bool tensor of the caller's that is read together with the layout's own facts, then a bool
    cross     whether the mask speaks of the keys alone
    measured  whether it describes a padded batch that may yet leave its padding
    moved     device -> this layout there, once asked for
    pending   whether the layers' own keyword arguments may still say that the batch is packed
    """

    ndim = 4

    def __init__(self, batch, q_length, kv_length, mask=None, used=None, weights=False):
        self.batch, self.q_length, self.kv_length = batch, q_length, kv_length
        self.mask, self.used, self.weights = mask, used, weights
        self.starts = self.queries = self.keys = self.left_pad = None
        self.gaps = self.padded_start = self.cross = self.measured = self.pending = False
        self.completed = self.flag = None
        self.moved = {}

    def dim(self):
        return 4

    @property
    def shape(self):
        return torch.Size((self.batch, 1, self.q_length, self.kv_length))

    @property
    def device(self):
        tensors = (self.mask, self.used, self.starts, self.keys and self.keys.cu_seqlens)
        return next((tensor.device for tensor in tensors if tensor is not None), None)

    def to(self, device=None, *args, **kwargs):
        """The same layout on another device, moved once for all layers there; accelerate asks for it at every layer."""
        if not isinstance(device, str | int | torch.device) or self.device in (None, torch.device(device)):
            return self
        device = torch.device(device)
        if device not in self.moved:
            other = self.moved[device] = copy.copy(self)
            other.moved = {}
            for name, value in self.__dict__.items():
                if isinstance(value, torch.Tensor | Rows):
                    setattr(other, name, value.to(device))
            if self.queries is self.keys:
                other.queries = other.keys
        return self.moved[device]

    def trim(self, x):
        """(batch, heads, buffer, head_dim) -> without the places of a static cache known to be unused."""
        return x if x.shape[2] == self.kv_length else x[:, :, : self.kv_length]

    def dense(self, causal, window=None, device=None):
        """The layout spelt out as a (batch, 1, queries, keys) bool mask, for stock attention."""
        device = self.device or device
        end = self.kv_length if self.used is None else self.used
        query = (end - self.q_length + torch.arange(self.q_length, device=device))[:, None]
        key = torch.arange(self.kv_length, device=device)
        seen = key <= query if causal else (key < end).expand(self.q_length, -1)
        if window is not None:
            seen = seen & (key > query - window)
        seen = seen.expand(self.batch, 1, -1, -1)
        if self.mask is not None:
            seen = seen & self.mask[:, None, None]
        if self.starts is not None:
            document = self.starts.flatten().cumsum(0).view(self.starts.shape)
            seen = seen & (document[:, None, :, None] == document[:, None, None])
        return seen

    def attend(self, q, k, v, causal, window, **options):
        """Attention for q, k, v (batch, heads, length, head_dim) -> (batch, length, heads, head_dim)."""
        k, v = self.trim(k), self.trim(v)
        kept = options["dropout_p"] == 0 and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad))
        if self.keys is None and self.used is None and self.left_pad is None:
            return attend(q, k, v, causal, window, **options)
        if kept and (self.keys is None or self.left_pad is not None):
            end = torch.full((self.batch,), self.kv_length, device=q.device) if self.used is None else self.used
            return _attend_cache(
                q, k, v, causal, window, end.to(torch.int32).expand(self.batch), self.left_pad, **options
            )
        if self.keys is None and self.left_pad is None:
            n = int(self.used)
            return attend(q, k[:, :, :n], v[:, :, :n], causal, window, **options)
        if self.keys is None:
            self._take_static_rows()
        cu_seqlens_q, cu_seqlens_k = self.queries.cu_seqlens, self.keys.cu_seqlens
        if cu_seqlens_k is cu_seqlens_q and torch.compiler.is_compiling():
            cu_seqlens_k = cu_seqlens_k.clone()  # dynamo takes no tensor twice in one autograd.Function
        out = flash_attn_varlen_func(
            self.queries.gather(q),
            self.keys.gather(k),
            self.keys.gather(v),
            cu_seqlens_q,
            cu_seqlens_k,
            self.queries.max_length,
            self.keys.max_length,
            causal=causal,
            window_size=_window_size(window, causal),
            **options,
        )
        return self.queries.scatter(out, self.batch, self.q_length)

    def let_padding_attend(self):
        """Make every place a query, of keys that are still tokens alone. For rows that are no packing."""
        offsets = torch.arange(self.batch + 1, dtype=torch.int32, device=self.device) * self.q_length
        self.cross, self.queries = True, Rows(None, offsets, self.q_length)

    def _query_mask(self, mask):
        """(batch, queries) bool: which queries are tokens. They are the newest keys, and all of them if cross."""
        if self.cross:
            return torch.ones(self.batch, self.q_length, dtype=torch.bool, device=mask.device)
        if self.q_length == self.kv_length:
            return mask
        end = self.kv_length if self.used is None else self.used
        columns = end - self.q_length + torch.arange(self.q_length, device=mask.device)
        return mask.gather(1, columns.expand(self.batch, -1))

    def _take_static_rows(self):
        """Rows of full size, which need nothing from the host."""
        mask = torch.ones_like(self.starts) if self.mask is None else self.mask
        q_mask = self._query_mask(mask)
        self.keys = _rows(mask, self.starts)[0]
        self.queries = self.keys if q_mask is mask else _rows(q_mask)[0]
        self.gaps = self.mask is not None

    def _measure(self, packed_by):
        """Fill in the rows. `packed_by`: (batch, length) positions, or None."""
        n, source = self.kv_length, self.mask if self.mask is not None else packed_by
        if packed_by is not None:
            self.starts = document_starts(packed_by, self.mask)
        if self.weights:
            return
        mask = torch.ones(self.batch, n, dtype=torch.bool, device=source.device) if self.mask is None else self.mask
        if self.used is not None:
            mask = self.mask = mask & (torch.arange(n, device=mask.device) < self.used)
        lengths, left_pad = mask.sum(1), mask.to(torch.uint8).argmax(1)
        compiling, continues = torch.compiler.is_compiling(), self.q_length < n and not self.cross
        one_run = torch.zeros_like(lengths[0])
        if continues:
            end = n if self.used is None else self.used
            one_run = ((left_pad + lengths == end) & (lengths >= self.q_length)).all().to(lengths.dtype)
        if continues and not compiling and not torch.is_grad_enabled():
            # A step of generation: where the cache can be read in place, no more is needed.
            if one_run:
                self.left_pad = left_pad.to(torch.int32)
            else:
                self._take_static_rows()
            return
        if compiling:
            self._take_static_rows()
            return
        keys, total, longest, documents = _rows(mask, self.starts)
        q_mask = self._query_mask(mask)
        queries, q_total, q_longest = (keys, total, longest) if q_mask is mask else _rows(q_mask)[:3]
        last = n - 1 - mask.flip(1).to(torch.uint8).argmax(1)
        gaps = ((lengths > 0) & (last - left_pad + 1 > lengths)).any().to(total.dtype)
        late = (~mask[:, 0]).any().to(total.dtype)
        flag = torch.zeros_like(total) if self.flag is None else self.flag.to(total.dtype)
        facts = torch.stack([total, longest, documents, q_total, q_longest, one_run, gaps, late, flag])
        total, longest, documents, q_total, q_longest, one_run, gaps, late, flag = facts.tolist()
        self.gaps, self.padded_start, self.flag = bool(gaps), bool(late), bool(flag)
        if total == self.batch * n and documents == self.batch:
            self.starts = None
            if self.used is None:
                self.mask = None
                return
        self.keys = _trim(keys, self.batch * n, total, longest, documents)
        grid = self.batch * self.q_length
        self.queries = self.keys if queries is keys else _trim(queries, grid, q_total, q_longest, self.batch)
        self.left_pad = left_pad.to(torch.int32) if one_run else None


def _check_devices(**tensors):
    devices = {name: x.device for name, x in tensors.items() if x is not None}
    if len(set(devices.values())) > 1:
        found = " and ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{found}: move them to one device, that of input_ids, with .to(input_ids.device)")


def build_layout(batch, q_length, kv_length, *, mask=None, used=None, position_ids=None, cu_seqlens=None,
                 max_length=None, weights=False, cross=False, flag=None):  # fmt: skip
    """The Layout of one forward, with one host sync at most, or None where queries and keys are plain and dense.

    mask          (batch, keys) bool; keys past its end are unseen
    used          keys in use of a buffer of kv_length: int, 0-d tensor or None for all
    position_ids  (batch, length); where they do not grow another document begins. They count only when the queries are
                  all of the keys, and when 2-D: multi-axis positions are no packing
    cu_seqlens    (documents + 1,) over the flattened batch, max_length the longest document if known
    cross         whether the mask speaks of the keys alone

    Raises ValueError where cu_seqlens does not fit the batch, or the tensors lie on several devices.
    """
    if not torch.compiler.is_compiling():
        _check_devices(attention_mask=mask, position_ids=position_ids, cu_seq_lens=cu_seqlens)
    buffer = kv_length
    if isinstance(used, int):
        kv_length, used = min(used, kv_length), None
    if mask is not None:
        mask = F.pad(mask[:, :kv_length], (0, max(kv_length - mask.shape[1], 0)))
    layout = Layout(batch, q_length, kv_length, mask, used, weights)
    whole = q_length == kv_length and used is None and not cross
    if cu_seqlens is not None:
        if not whole:
            raise ValueError(
                f"cu_seq_lens describes a packed batch, but {q_length} queries meet {kv_length} keys: pass packed "
                "batches with an empty cache or use_cache=False"
            )
        cu_seqlens = cu_seqlens.to(torch.int32)
        tokens = torch.arange(batch * q_length, device=cu_seqlens.device)
        if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            if cu_seqlens[0] != 0 or cu_seqlens[-1] != len(tokens) or (cu_seqlens.diff() < 0).any():
                raise ValueError(
                    f"cu_seq_lens must grow from 0 to the number of tokens, {len(tokens)}; got {cu_seqlens}"
                )
        first = cu_seqlens[torch.searchsorted(cu_seqlens, tokens, right=True) - 1]
        position_ids = (tokens - first).view(batch, q_length)
        if mask is None and not weights:
            max_length = int(cu_seqlens.diff().max()) if max_length is None else int(max_length)
            layout.starts = document_starts(position_ids)
            layout.queries = layout.keys = Rows(None, cu_seqlens, max_length)
            return layout
    elif position_ids is not None:
        fits = whole and position_ids.ndim == 2 and position_ids.shape[1] == q_length
        position_ids = position_ids.expand(batch, -1) if fits else None
    if mask is not None or position_ids is not None:
        layout.cross, layout.flag = cross, flag
        layout._measure(position_ids)
    empty = layout.mask is None and layout.used is None and layout.starts is None
    return None if empty and kv_length == buffer and not weights else layout


def _window_size(window, causal):
    """transformers counts the token itself in a sliding window, flash-attn does not."""
    return (-1, -1) if window is None else (window - 1, 0 if causal else window - 1)


def attend(q, k, v, causal, window=None, **options):
    """Dense attention for q, k, v (batch, heads, length, head_dim) -> (batch, length, heads, head_dim)."""
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if not needs_grad and q.shape[2] < k.shape[2] and q.shape[2] <= SHORT and options["dropout_p"] == 0:
        return _attend_cache(q, k, v, causal, window, None, None, **options)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flash_attn_func(q, k, v, causal=causal, window_size=_window_size(window, causal), **options)


def _attend_cache(q, k, v, causal, window, lengths, left_pad, softmax_scale, softcap, dropout_p):
    return flash_attn_with_kvcache(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        cache_seqlens=lengths,
        cache_leftpad=left_pad,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=_window_size(window, causal),
        softcap=softcap,
    )
